//! Servers of a store, and the ways to disturb them: kill and restart, pause, fail over.
//!
//! The tests of torture and the campaign share them.

use std::path::Path;
use std::time::Duration;

use testbed::{Setup, ZooKeeperSetup};

/// A store on its own servers, which can be disturbed.
pub struct Breakable {
    url: String,
    kinds: u64,
    disturb: Box<dyn FnMut(usize) + Send>,
}

impl Breakable {
    fn new(url: String, kinds: u64, disturb: impl FnMut(usize) + Send + 'static) -> Self {
        Self { url, kinds, disturb: Box::new(disturb) }
    }

    /// Returns the URL of the store.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the number of different disturbances, which are used in turn.
    pub fn kinds(&self) -> u64 {
        self.kinds
    }

    /// Injects the `n`th disturbance, and returns when the servers are available again.
    pub fn disturb(&mut self, n: usize) {
        (self.disturb)(n);
    }
}

/// Pauses a server for a second.
fn pause(stop: impl Fn(), cont: impl Fn()) {
    stop();
    std::thread::sleep(Duration::from_secs(1));
    cont();
}

/// Starts one server of Redis or Valkey, which is killed and paused. It syncs its log on each
/// write.
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

/// Starts a master and a replica with sentinels. The master is killed and the replica takes over.
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

/// Starts three masters of a Redis Cluster, which are killed and paused in turn.
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

/// Starts five servers of Redlock. One is killed and another paused at the same time.
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

/// Starts PostgreSQL, which is killed.
pub fn postgres(setup: Setup) -> Breakable {
    let server = testbed::Postgres::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// Starts MariaDB, which is killed.
pub fn mariadb(setup: Setup) -> Breakable {
    let server = testbed::MariaDb::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// Starts MySQL, which is killed.
pub fn mysql(setup: Setup) -> Breakable {
    let server = testbed::MySql::with(setup);
    Breakable::new(server.database(), 1, move |_| {
        server.kill();
        server.restart();
    })
}

/// Starts three members of etcd, which are killed and paused in turn.
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

/// Starts three members of ZooKeeper, which are killed and paused in turn.
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

/// Starts memcached, which is killed and paused. It restarts empty, and its clients grant no lock
/// for a while then.
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

/// Starts three memcached servers that share the names, which are killed and paused in turn.
pub fn memcached_three() -> Breakable {
    let servers: [testbed::Memcached; 3] = std::array::from_fn(|_| testbed::Memcached::start());
    let hosts = servers.each_ref().map(|server| format!("127.0.0.1:{}", server.port()));
    // Clients that can be cut off connect through relays, whose addresses differ. The names keep
    // the same distribution of locks for all clients.
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

/// Starts three members of NATS, which are killed and paused in turn.
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

/// Starts SeaweedFS, which is paused and then killed without a break, because clients need half a
/// minute to recover.
pub fn objects() -> Breakable {
    let server = testbed::SeaweedFs::start();
    let url = server.url("torture") + "&session_ms=2000&poll_ms=50";
    Breakable::new(url, 1, move |_| {
        pause(|| server.stop(), || server.cont());
        server.kill();
        server.restart();
    })
}

/// Starts three servers of the lock service over one Redis. The servers are killed and paused in
/// turn.
pub fn lock_service(leasehold: &Path) -> Breakable {
    let redis = testbed::Redis::start();
    let start = |_| testbed::LockService::start(leasehold, &redis.url());
    let servers: [testbed::LockService; 3] = std::array::from_fn(start);
    let hosts = servers.each_ref().map(|server| format!("127.0.0.1:{}", server.port()));
    Breakable::new(format!("http://{}/", hosts.join(",")), 2, move |n| {
        // Redis must run for as long as the servers.
        let _store = &redis;
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
