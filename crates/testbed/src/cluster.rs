//! A Redis Cluster: masters that share the 16,384 slots, with a number of replicas each.

use crate::daemon::{Setup, start_somewhere};
use crate::redis::Redis;
use crate::wait::wait;

const SLOTS: usize = 16_384;

/// A Redis Cluster. The nodes are the masters, followed by their replicas in the same order.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Redis>,
    masters: usize,
}

impl Cluster {
    /// Starts three private masters.
    pub fn start() -> Self {
        Self::with(3, 0, Setup::new().fast())
    }

    /// Starts three masters that tests do not break.
    pub fn unbroken() -> Self {
        Self::unbroken_with(3, 0, Setup::new().fast())
    }

    /// Starts `masters` masters with `replicas` replicas each, which tests do not break. A node is
    /// considered dead only after a minute, because a busy machine may delay its answers.
    pub fn unbroken_with(masters: usize, replicas: usize, setup: Setup) -> Self {
        let cluster = Self::acquainted(masters, replicas, setup);
        // This is set after the nodes have met, because the timeout also delays the retries while
        // they meet.
        for node in &cluster.nodes {
            node.command(&["CONFIG", "SET", "cluster-node-timeout", "60000"]);
        }
        cluster.settled(replicas)
    }

    /// Starts `masters` masters with `replicas` replicas each. A node that does not answer for two
    /// seconds is considered dead.
    pub fn with(masters: usize, replicas: usize, setup: Setup) -> Self {
        Self::acquainted(masters, replicas, setup).settled(replicas)
    }

    /// Starts nodes that have met and have their slots or masters.
    fn acquainted(masters: usize, replicas: usize, setup: Setup) -> Self {
        let count = masters * (1 + replicas);
        let nodes: Vec<Redis> = (0..count).map(|_| start_somewhere(|p| node(&setup, p))).collect();
        let buses: Vec<String> = nodes.iter().map(bus).collect();
        // Epochs are set first, because a node that has met another node refuses them.
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
                // Nodes that are still in the handshake are listed as well.
                let nodes = n.command(&["CLUSTER", "NODES"]);
                nodes.lines().count() == count && !nodes.contains("handshake")
            })
        });
        for (i, node) in cluster.nodes.iter().enumerate().skip(masters) {
            let of = cluster.id(i % masters);
            // The node must first know the master as such.
            wait("a master to be known", &|| {
                node.command(&["CLUSTER", "NODES"])
                    .lines()
                    .any(|l| l.starts_with(&of) && l.contains("master") && !l.contains("handshake"))
            });
            node.command(&["CLUSTER", "REPLICATE", &of]);
        }
        cluster
    }

    /// Waits until all slots are served and every master has `replicas` replicas.
    fn settled(self, replicas: usize) -> Self {
        wait("the cluster to be ok", &|| self.is_ok());
        for master in self.nodes.iter().take(self.masters) {
            master.wait_for_replicas(replicas);
        }
        self
    }

    /// Returns whether all running nodes report that all slots are served.
    pub fn is_ok(&self) -> bool {
        self.nodes.iter().all(|n| n.command(&["CLUSTER", "INFO"]).contains("cluster_state:ok"))
    }

    /// Returns the URL of the cluster, with its first three nodes.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.nodes.iter().take(3).map(|n| format!("127.0.0.1:{}", n.port())).collect();
        format!("redis+cluster://{}/", hosts.join(","))
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// Returns how many of the nodes were created as masters.
    pub fn masters(&self) -> usize {
        self.masters
    }

    /// Returns a node's ID in the cluster.
    pub fn id(&self, node: usize) -> String {
        self.nodes[node].command(&["CLUSTER", "MYID"])
    }

    /// Waits until the replica of the master `dead` serves its slots.
    pub fn wait_for_failover(&self, dead: usize) {
        let replica = dead + self.masters;
        wait("the fail-over", &|| {
            let other = &self.nodes[replica];
            other.is_master() && other.command(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        });
    }

    /// Starts moving a slot. From then on, requests for keys that are not on `from` are redirected
    /// to `to`.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.nodes[to].command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]);
        self.nodes[from].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]);
    }

    /// Moves up to `most` of the slot's keys, and returns how many were moved.
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

    /// Ends the move, so that the slot belongs to `to`. Waits until all nodes agree and know each
    /// other's epochs. Another move before that could leave them in permanent disagreement.
    pub fn end_move(&self, slot: u16, to: usize) {
        let (number, id) = (slot.to_string(), self.id(to));
        let masters = || self.nodes.iter().filter(|n| n.is_master());
        wait("the nodes to agree on the owner of the slot", &|| {
            // The new owner is first, so that the slot always has an owner.
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

/// Returns whether a node's view of the cluster assigns the slot to the node with this ID.
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
