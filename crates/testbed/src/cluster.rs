//! A Redis Cluster: masters that share the 16,384 slots, each with as many replicas as wanted.

use crate::daemon::{Setup, start_somewhere};
use crate::redis::Redis;
use crate::wait::wait;

const SLOTS: usize = 16_384;

/// Masters first, then their replicas in the same order.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Redis>,
    masters: usize,
}

impl Cluster {
    /// Three masters of the test's own.
    pub fn start() -> Self {
        Self::with(3, 0, Setup::new().fast())
    }

    /// The same, which nobody breaks.
    pub fn unbroken() -> Self {
        Self::unbroken_with(3, 0, Setup::new().fast())
    }

    /// So many masters, each with so many replicas, which nobody breaks: a machine that does much
    /// else is no reason to take a node for dead.
    pub fn unbroken_with(masters: usize, replicas: usize, setup: Setup) -> Self {
        let cluster = Self::acquainted(masters, replicas, setup);
        // Only now: while they meet, it is also how long it takes to try again.
        for node in &cluster.nodes {
            node.command(&["CONFIG", "SET", "cluster-node-timeout", "60000"]);
        }
        cluster.settled(replicas)
    }

    /// So many masters, each with so many replicas. A node that does not answer for two seconds is
    /// taken for dead.
    pub fn with(masters: usize, replicas: usize, setup: Setup) -> Self {
        Self::acquainted(masters, replicas, setup).settled(replicas)
    }

    /// Nodes that have met and have their slots or masters.
    fn acquainted(masters: usize, replicas: usize, setup: Setup) -> Self {
        let count = masters * (1 + replicas);
        let nodes: Vec<Redis> = (0..count).map(|_| start_somewhere(|p| node(&setup, p))).collect();
        let buses: Vec<String> = nodes.iter().map(bus).collect();
        // Epochs first: a node that has met another takes none.
        for (i, node) in nodes.iter().enumerate() {
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]);
            if i < masters {
                let (from, to) = (SLOTS * i / masters, SLOTS * (i + 1) / masters - 1);
                let (from, to) = (from.to_string(), to.to_string());
                node.command(&["CLUSTER", "ADDSLOTSRANGE", &from, &to]);
            }
        }
        for node in &nodes {
            for (other, bus) in nodes.iter().zip(&buses) {
                let port = other.port().to_string();
                node.command(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]);
            }
        }
        let cluster = Self { nodes, masters };
        wait("the nodes to know each other", &|| {
            cluster.nodes.iter().all(|n| {
                // Those that are only being met are listed as well.
                let nodes = n.command(&["CLUSTER", "NODES"]);
                nodes.lines().count() == count && !nodes.contains("handshake")
            })
        });
        for (i, node) in cluster.nodes.iter().enumerate().skip(masters) {
            let of = cluster.id(i % masters);
            // It must have heard of the master as such first.
            wait("a master to be known", &|| {
                node.command(&["CLUSTER", "NODES"])
                    .lines()
                    .any(|l| l.starts_with(&of) && l.contains("master") && !l.contains("handshake"))
            });
            node.command(&["CLUSTER", "REPLICATE", &of]);
        }
        cluster
    }

    /// The same once all slots are served, and every master has so many replicas.
    fn settled(self, replicas: usize) -> Self {
        wait("the cluster to be ok", &|| self.is_ok());
        for master in self.nodes.iter().take(self.masters) {
            master.wait_for_replicas(replicas);
        }
        self
    }

    /// Whether all nodes that run say that all slots are served.
    pub fn is_ok(&self) -> bool {
        self.nodes.iter().all(|n| n.command(&["CLUSTER", "INFO"]).contains("cluster_state:ok"))
    }

    /// The URL that names three of the nodes.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.nodes.iter().take(3).map(|n| format!("127.0.0.1:{}", n.port())).collect();
        format!("redis+cluster://{}/", hosts.join(","))
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// How many of the nodes were made masters.
    pub fn masters(&self) -> usize {
        self.masters
    }

    /// A node's own name in the cluster.
    pub fn id(&self, node: usize) -> String {
        self.nodes[node].command(&["CLUSTER", "MYID"])
    }

    /// Returns when another node than this one serves what it served.
    pub fn wait_for_failover(&self, dead: usize) {
        let replica = dead + self.masters;
        wait("the fail-over", &|| {
            let other = &self.nodes[replica];
            other.is_master() && other.command(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        });
    }

    /// Begins to move a slot: keys that are asked for and not there are to be found at `to`.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.nodes[to].command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]);
        self.nodes[from].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]);
    }

    /// Moves up to `most` of the slot's keys, and tells how many there were.
    pub fn move_keys(&self, slot: u16, from: usize, to: usize, most: usize) -> usize {
        let (slot, most) = (slot.to_string(), most.to_string());
        let keys = self.nodes[from].command(&["CLUSTER", "GETKEYSINSLOT", &slot, &most]);
        let port = self.nodes[to].port().to_string();
        let mut moved = 0;
        for key in keys.lines() {
            self.nodes[from].command(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
            moved += 1;
        }
        moved
    }

    /// Ends the move: the slot belongs to `to`. Returns when all nodes agree, and have heard of each
    /// other's epochs: another move before that could leave them at odds for ever.
    pub fn end_move(&self, slot: u16, to: usize) {
        let (number, id) = (slot.to_string(), self.id(to));
        let masters = || self.nodes.iter().filter(|n| n.is_master());
        wait("the nodes to agree on who has the slot", &|| {
            // The new owner first, so that there is always one.
            for node in std::iter::once(&self.nodes[to]).chain(masters()) {
                node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &id]);
            }
            let epochs = |name: &str| -> Vec<String> {
                masters().map(|n| line_of(&n.command(&["CLUSTER", "INFO"]), name)).collect()
            };
            let epochs = epochs("cluster_current_epoch:");
            epochs.iter().all(|epoch| *epoch == epochs[0])
                && masters().all(|n| has_slot(&n.command(&["CLUSTER", "NODES"]), &id, slot))
        });
    }
}

fn line_of(text: &str, start: &str) -> String {
    text.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned()
}

/// Whether a node's view of the cluster gives the slot to the node of this name.
fn has_slot(nodes: &str, id: &str, slot: u16) -> bool {
    let line = line_of(nodes, id);
    line.split(' ').skip(8).any(|range| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<u16>().ok();
        number(from).zip(number(to)).is_some_and(|(from, to)| (from..=to).contains(&slot))
    })
}

fn node(setup: &Setup, port: u16) -> Result<Redis, String> {
    let bus = crate::port::free();
    let setup = setup.clone().arg("--cluster-enabled").arg("yes");
    let setup = setup.arg("--cluster-config-file").arg("nodes.conf");
    let setup = setup.arg("--cluster-port").arg(bus.to_string());
    Redis::try_start(&setup.arg("--cluster-node-timeout").arg("2000"), port)
}

fn bus(node: &Redis) -> String {
    // The node's own line: id, host:port@bus, …
    let nodes = node.command(&["CLUSTER", "NODES"]);
    let own = nodes.lines().find(|l| l.contains("myself")).expect("a node knows itself");
    let address = own.split(' ').nth(1).expect("its address");
    let bus = address.split('@').nth(1).expect("its bus port");
    bus.split(',').next().expect("a number").to_owned()
}
