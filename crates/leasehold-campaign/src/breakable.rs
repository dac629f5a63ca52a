//! Servers that a store is on, and what is done to them: killed and started again, stopped, failed over.
//!
//! The same for the tests of torture and for the campaign.

use std::time::Duration;

use testbed::{Setup, ZooKeeperSetup};

/// A store on servers of its own, which can be disturbed.
pub struct Breakable {
    url: String,
    kinds: u64,
    disturb: Box<dyn FnMut(usize) + Send>,
}

impl Breakable {
    fn new(url: String, kinds: u64, disturb: impl FnMut(usize) + Send + 'static) -> Self {
        Self { url, kinds, disturb: Box::new(disturb) }
    }

    /// The URL of the store.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// How many different things are done, in turn.
    pub fn kinds(&self) -> u64 {
        self.kinds
    }

    /// Does the `n`th thing, and returns when the servers serve again.
    pub fn disturb(&mut self, n: usize) {
        (self.disturb)(n);
    }
}

/// Stops a server for a while.
fn pause(stop: impl Fn(), cont: impl Fn()) {
    stop();
    std::thread::sleep(Duration::from_secs(1));
    cont();
}

/// One server of Redis's or Valkey's, killed and stopped. Its log is synced at once.
pub fn redis(setup: Setup) -> Breakable {
    let server = testbed::Redis::with(setup);
    Breakable::new(server.url(), 2, move |n| match n % 2 {
        0 => {
            server.kill();
            server.restart();
        }
        _ => pause(|| server.stop(), || server.cont()),
    })
}

/// A master and a replica behind sentinels; the master dies and the replica takes over.
pub fn sentinel(setup: Setup) -> Breakable {
    let servers = testbed::Sentinel::with(1, setup.fast());
    Breakable::new(servers.url(), 1, move |_| {
        let master = servers.master();
        let old = master.port();
        master.kill();
        servers.wait_for_failover(old);
        master.restart();
        servers.master().wait_for_replicas(1);
    })
}

/// Three masters of a Redis Cluster, killed and stopped in turn.
pub fn cluster(setup: Setup) -> Breakable {
    let cluster = testbed::Cluster::with(3, 0, setup.fast());
    Breakable::new(cluster.url(), 2, move |n| {
        let node = &cluster.nodes()[n % cluster.masters()];
        match n % 2 {
            0 => {
                node.kill();
                node.restart();
            }
            _ => pause(|| node.stop(), || node.cont()),
        }
    })
}

/// Five servers of Redlock's, of which two are killed and stopped at once.
pub fn redlock(setup: Setup) -> Breakable {
    let servers = testbed::Redlock::with(5, setup);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=500";
    Breakable::new(url, 1, move |n| {
        let nodes = servers.nodes();
        let (one, two) = (&nodes[n % 5], &nodes[(n + 1) % 5]);
        one.kill();
        pause(|| two.stop(), || two.cont());
        one.restart();
    })
}

/// PostgreSQL, killed.
pub fn postgres(setup: Setup) -> Breakable {
    let server = testbed::Postgres::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// MariaDB, killed.
pub fn mariadb(setup: Setup) -> Breakable {
    let server = testbed::MariaDb::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// MySQL, killed.
pub fn mysql(setup: Setup) -> Breakable {
    let server = testbed::MySql::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// Three members of etcd's, killed and stopped in turn.
pub fn etcd(setup: Setup) -> Breakable {
    let etcd = testbed::Etcd::with(setup, 3);
    Breakable::new(etcd.url(), 2, move |n| {
        let member = n % etcd.len();
        match n % 2 {
            0 => {
                etcd.kill(member);
                etcd.restart(member);
            }
            _ => pause(|| etcd.stop(member), || etcd.cont(member)),
        }
    })
}

/// Three members of ZooKeeper's, killed and stopped in turn.
pub fn zookeeper(setup: &ZooKeeperSetup) -> Breakable {
    let keepers = testbed::ZooKeepers::with(setup);
    let url = format!("{}?session=2s", keepers.url());
    Breakable::new(url, 2, move |n| {
        let member = &keepers.members()[n % keepers.members().len()];
        match n % 2 {
            0 => {
                member.kill();
                member.restart();
            }
            _ => pause(|| member.stop(), || member.cont()),
        }
    })
}

/// memcached, killed and stopped: it comes back empty, and closed for the time that its clients wait then.
pub fn memcached(setup: Setup) -> Breakable {
    let server = testbed::Memcached::with(setup);
    Breakable::new(server.url() + "?session_ms=1000", 2, move |n| match n % 2 {
        0 => {
            server.kill();
            server.restart();
        }
        _ => pause(|| server.stop(), || server.cont()),
    })
}

/// Three servers of memcached's which share out the names, killed and stopped in turn.
pub fn memcached_three() -> Breakable {
    let servers: [testbed::Memcached; 3] = std::array::from_fn(|_| testbed::Memcached::start());
    let hosts = servers.each_ref().map(|server| format!("127.0.0.1:{}", server.port()));
    // Whoever is cut off goes by a proxy.
    let url = format!("memcached://{}/?names=a,b,c&session_ms=1000", hosts.join(","));
    Breakable::new(url, 2, move |n| {
        let server = &servers[n % 3];
        match n % 2 {
            0 => {
                server.kill();
                server.restart();
            }
            _ => pause(|| server.stop(), || server.cont()),
        }
    })
}

/// Three members of NATS, killed and stopped in turn.
pub fn nats() -> Breakable {
    let nats = testbed::NatsCluster::start();
    let url = nats.url();
    let separator = if url.matches('/').count() > 2 { "?" } else { "/?" };
    Breakable::new(url + separator + "session_ms=2000", 2, move |n| {
        let member = n % 3;
        match n % 2 {
            0 => {
                nats.kill(member);
                nats.restart(member);
            }
            _ => pause(|| nats.stop(member), || nats.cont(member)),
        }
    })
}

/// SeaweedFS, stopped and then killed: one right after the other, since clients are given half a minute to recover.
pub fn objects() -> Breakable {
    let server = testbed::SeaweedFs::start();
    let url = server.url("torture") + "&session_ms=2000&poll_ms=50";
    Breakable::new(url, 1, move |_| {
        pause(|| server.stop(), || server.cont());
        server.kill();
        server.restart();
    })
}
