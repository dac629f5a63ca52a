//! Servers of a store, and the ways to disturb them: kill and restart, pause, fail over, partition
//! the members, cut the power of all servers at once.
//!
//! Power cuts require a [`Disk`], on which the servers are started. Partitions require the private
//! network in which a disk is created. The tests of torture and the campaign share these servers.

use std::path::Path;
use std::time::Duration;

use testbed::{Cut, Disk, Setup, ZooKeeperSetup};

/// Injects the disturbance with this number.
type Disturb = Box<dyn FnMut(usize, Option<&Disk>) + Send>;

/// A store on its own servers, which can be disturbed.
pub struct Breakable {
    url: String,
    kinds: u64,
    disturb: Disturb,
    /// The servers' disk, which outlives them.
    disk: Option<Disk>,
}

impl Breakable {
    fn new(url: String, kinds: u64, mut disturb: impl FnMut(usize) + Send + 'static) -> Self {
        Self { url, kinds, disturb: Box::new(move |n, _| disturb(n)), disk: None }
    }

    /// With a disk, the servers were started on it a moment ago.
    fn on(
        disk: Option<Disk>,
        url: String,
        kinds: u64,
        disturb: impl FnMut(usize, Option<&Disk>) + Send + 'static,
    ) -> Self {
        disk.iter().for_each(Disk::sync);
        Self { url, kinds, disturb: Box::new(disturb), disk }
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
        (self.disturb)(n, self.disk.as_ref());
    }
}

/// Pauses a server for a second.
fn pause(stop: impl Fn(), cont: impl Fn()) {
    stop();
    std::thread::sleep(Duration::from_secs(1));
    cont();
}

/// Duration of a partition. The members elect another leader within a second.
const PARTITION: Duration = Duration::from_secs(3);

/// Three members of a cluster, which are numbered from 0.
trait Members: Send + 'static {
    fn kill(&self, member: usize);
    fn restart(&self, member: usize);
    fn stop(&self, member: usize);
    fn cont(&self, member: usize);
    fn cut(&self, member: usize, cut: Cut);
    fn heal(&self);
    fn restart_all(&self);
}

/// These clusters have the methods already.
macro_rules! members {
    ($($cluster:ty),+) => {$(
        impl Members for $cluster {
            fn kill(&self, member: usize) {
                self.kill(member);
            }

            fn restart(&self, member: usize) {
                self.restart(member);
            }

            fn stop(&self, member: usize) {
                self.stop(member);
            }

            fn cont(&self, member: usize) {
                self.cont(member);
            }

            fn cut(&self, member: usize, cut: Cut) {
                self.cut(member, cut);
            }

            fn heal(&self) {
                self.heal();
            }

            fn restart_all(&self) {
                self.restart_all();
            }
        }
    )+};
}

members!(testbed::Etcd, testbed::NatsCluster);

impl Members for testbed::ZooKeepers {
    fn kill(&self, member: usize) {
        self.members()[member].kill();
    }

    fn restart(&self, member: usize) {
        self.members()[member].restart();
    }

    fn stop(&self, member: usize) {
        self.members()[member].stop();
    }

    fn cont(&self, member: usize) {
        self.members()[member].cont();
    }

    fn cut(&self, member: usize, cut: Cut) {
        self.cut(&self.members()[member], cut);
    }

    fn heal(&self) {
        self.uncut();
    }

    fn restart_all(&self) {
        self.restart_all();
    }
}

/// Disturbs three members: kills and pauses them. With a disk, partitions them and cuts the power
/// of all.
fn three(url: String, members: impl Members, disk: Option<Disk>) -> Breakable {
    Breakable::on(disk, url, 2, move |n, disk| {
        let member = n % 3;
        match (n % 2, disk) {
            (0, None) => {
                members.kill(member);
                members.restart(member);
            }
            (_, None) => pause(|| members.stop(member), || members.cont(member)),
            (0, Some(_)) => {
                members.cut(member, [Cut::Off, Cut::Mute, Cut::Deaf][n / 2 % 3]);
                std::thread::sleep(PARTITION);
                members.heal();
            }
            (_, Some(disk)) => {
                cut_power(n / 2, disk, || (0..3).for_each(|member| members.kill(member)));
                members.restart_all();
            }
        }
    })
}

/// Kills and restarts a server. With a disk, cuts its power for the `n`th time.
fn kill(n: usize, disk: Option<&Disk>, kill: impl Fn(), restart: impl Fn()) {
    match disk {
        Some(disk) => cut_power(n, disk, kill),
        None => kill(),
    }
    restart();
}

/// Cuts the power. Every second cut tears writes.
fn cut_power(n: usize, disk: &Disk, kill: impl Fn()) {
    match n % 2 {
        0 => disk.cycle_power(kill),
        _ => _ = disk.cycle_power_tearing_writes(kill),
    }
}

/// Starts one server of Redis or Valkey, which is killed and paused. With a disk, its power is cut.
/// It syncs its log on each write.
pub fn redis(setup: Setup, disk: Option<Disk>) -> Breakable {
    let server = testbed::Redis::with(setup);
    let kinds = if disk.is_some() { 1 } else { 2 };
    Breakable::on(disk, server.url(), kinds, move |n, disk| match n as u64 % kinds {
        0 => kill(n, disk, || server.kill(), || server.restart()),
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

/// Starts PostgreSQL, which is killed. With a disk, its power is cut.
pub fn postgres(setup: Setup, disk: Option<Disk>) -> Breakable {
    let server = testbed::Postgres::with(setup);
    Breakable::on(disk, server.database(), 1, move |n, disk| {
        kill(n, disk, || server.kill(), || server.restart());
    })
}

/// Starts MariaDB, which is killed. With a disk, its power is cut.
pub fn mariadb(setup: Setup, disk: Option<Disk>) -> Breakable {
    let server = testbed::MariaDb::with(setup);
    Breakable::on(disk, server.database(), 1, move |n, disk| {
        kill(n, disk, || server.kill(), || server.restart());
    })
}

/// Starts MySQL, which is killed. With a disk, its power is cut.
pub fn mysql(setup: Setup, disk: Option<Disk>) -> Breakable {
    let server = testbed::MySql::with(setup);
    Breakable::on(disk, server.database(), 1, move |n, disk| {
        kill(n, disk, || server.kill(), || server.restart());
    })
}

/// Starts three members of etcd, which are disturbed in turn.
pub fn etcd(setup: Setup, disk: Option<Disk>) -> Breakable {
    let etcd = match disk {
        Some(_) => testbed::Etcd::separable(&setup),
        None => testbed::Etcd::with(setup, 3),
    };
    three(etcd.url(), etcd, disk)
}

/// Starts three members of ZooKeeper, which are disturbed in turn.
pub fn zookeeper(setup: &ZooKeeperSetup, disk: Option<Disk>) -> Breakable {
    let keepers = match disk {
        Some(_) => testbed::ZooKeepers::separable(&setup.clone().durable()),
        None => testbed::ZooKeepers::with(setup),
    };
    three(format!("{}?session=2s", keepers.url()), keepers, disk)
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

/// Starts three members of NATS, which are disturbed in turn.
pub fn nats(disk: Option<Disk>) -> Breakable {
    let nats = match disk {
        Some(_) => testbed::NatsCluster::durable(),
        None => testbed::NatsCluster::start(),
    };
    three(nats.url() + "/?session_ms=2000", nats, disk)
}

/// Starts SeaweedFS, which is paused and then killed without a break, because clients need half a
/// minute to recover.
pub fn objects() -> Breakable {
    let server = testbed::SeaweedFs::start();
    let url = server.url("torture") + "&session_ms=6000&poll_ms=50";
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
