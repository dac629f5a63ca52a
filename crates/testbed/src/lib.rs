//! Real servers for tests and demonstrations: private, throw-away, breakable at will.
//!
//! A test says what it needs and gets a server of its own, started from the machine's installed
//! packages on a free loopback port with a directory of its own:
//!
//! ```no_run
//! let server = testbed::Postgres::start();
//! println!("{}", server.database()); // the URL of a new, empty database
//! server.stop(); // SIGSTOP to every process of it; `cont` goes on
//! server.kill(); // kill -9
//! server.restart(); // same port, same data
//! ```
//!
//! Tests that only need *a* server share the one of their binary ([`postgres`], [`mariadb`], [`etcd`]) and
//! take a database each. Shared servers trade durability for speed, so a test that kills one
//! starts its own.
//!
//! **Clean-up.** All that a test process starts lives in one directory, and the working directory
//! of each of its processes is in there. A small shell, the reaper, waits for the test process
//! to end, in whatever way (its end of a pipe closes), then kills what works in that directory
//! and deletes it. So neither `kill -9` of the tests nor a panic leaves anything behind.
//!
//! Everything panics with a message for the reader of a failed test: there is nobody else to handle an error.
//! Who must not panic asks first what is not installed ([`Server::missing`]), and starts servers on a thread
//! of its own, whose panic is the error. One file for each kind of server; what they share is in `daemon.rs`.

mod azurite;
mod browser;
mod cert;
mod clock;
mod cluster;
mod command;
mod daemon;
mod dice;
mod etcd;
mod google;
mod mariadb;
mod memcached;
mod moto;
mod nats;
mod network;
mod pgbouncer;
mod port;
mod postgres;
mod proxy;
mod python;
mod reaper;
mod redis;
mod redlock;
mod seaweed;
mod sentinel;
mod template;
#[cfg(feature = "texts")]
mod texts;
mod version;
mod wait;
mod zookeeper;

use std::sync::OnceLock;

pub use azurite::Azurite;
pub use browser::Browser;
pub use cert::Certificates;
pub use cluster::Cluster;
pub use command::cargo;
pub use daemon::Setup;
pub use dice::Dice;
pub use etcd::Etcd;
pub use google::FakeGcs;
pub use mariadb::{MariaDb, MySql};
pub use memcached::Memcached;
pub use moto::Moto;
pub use nats::{Nats, NatsCluster};
pub use network::{Cut, in_own_network};
pub use pgbouncer::PgBouncer;
pub use postgres::Postgres;
pub use proxy::Proxy;
pub use python::python;
pub use redis::Redis;
pub use redlock::{Redlock, url_of as redlock_url};
pub use seaweed::SeaweedFs;
pub use sentinel::Sentinel;
#[cfg(feature = "texts")]
pub use texts::{cases, texts};
pub use version::{Server, Version};
pub use zookeeper::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

/// Picks `long` in a run of `./test.sh --long`, which may take hours, and `short` in any other.
pub fn sized<T>(long: T, short: T) -> T {
    if extent() == Some("long") { long } else { short }
}

/// Picks `quick` in `cargo test` and `./test.sh`, `whole` in `./test.sh --all`, and `long` in
/// `./test.sh --long`.
pub fn by_extent<T>(quick: T, whole: T, long: T) -> T {
    match extent() {
        Some("long") => long,
        Some("all") => whole,
        _ => quick,
    }
}

/// What `LEASEHOLD_TESTS` asks for.
fn extent() -> Option<&'static str> {
    static EXTENT: OnceLock<Option<String>> = OnceLock::new();
    EXTENT.get_or_init(|| std::env::var("LEASEHOLD_TESTS").ok()).as_deref()
}

/// This test binary's memcached: not to be stopped or killed, or emptied.
pub fn memcached() -> &'static Memcached {
    static SHARED: OnceLock<Memcached> = OnceLock::new();
    SHARED.get_or_init(Memcached::start)
}

/// This test binary's SeaweedFS: not to be stopped or killed.
pub fn seaweed() -> &'static SeaweedFs {
    static SHARED: OnceLock<SeaweedFs> = OnceLock::new();
    SHARED.get_or_init(SeaweedFs::start)
}

/// This test binary's Azurite: not to be stopped or killed.
pub fn azurite() -> &'static Azurite {
    static SHARED: OnceLock<Azurite> = OnceLock::new();
    SHARED.get_or_init(Azurite::start)
}

/// This test binary's emulator of Google Cloud Storage: not to be stopped or killed.
pub fn google() -> &'static FakeGcs {
    static SHARED: OnceLock<FakeGcs> = OnceLock::new();
    SHARED.get_or_init(FakeGcs::start)
}

/// This test binary's NATS server: not to be stopped or killed.
pub fn nats() -> &'static Nats {
    static SHARED: OnceLock<Nats> = OnceLock::new();
    SHARED.get_or_init(Nats::start)
}

/// This test binary's PostgreSQL: not to be stopped or killed.
pub fn postgres() -> &'static Postgres {
    static SHARED: OnceLock<Postgres> = OnceLock::new();
    SHARED.get_or_init(|| Postgres::with(Setup::new().fast()))
}

/// This test binary's MariaDB: not to be stopped or killed.
pub fn mariadb() -> &'static MariaDb {
    static SHARED: OnceLock<MariaDb> = OnceLock::new();
    SHARED.get_or_init(|| MariaDb::with(Setup::new().fast()))
}

/// This test binary's MySQL: not to be stopped or killed.
pub fn mysql() -> &'static MySql {
    static SHARED: OnceLock<MySql> = OnceLock::new();
    SHARED.get_or_init(|| MySql::with(Setup::new().fast()))
}

/// This test binary's Redis: not to be stopped or killed, or emptied.
pub fn redis() -> &'static Redis {
    static SHARED: OnceLock<Redis> = OnceLock::new();
    SHARED.get_or_init(|| Redis::with(Setup::new().fast()))
}

/// This test binary's Valkey: not to be stopped or killed.
pub fn valkey() -> &'static Redis {
    static SHARED: OnceLock<Redis> = OnceLock::new();
    SHARED.get_or_init(|| Redis::with(Setup::valkey().fast()))
}

/// This test binary's sentinels with a master and a replica: not to be stopped or killed.
pub fn sentinel() -> &'static Sentinel {
    static SHARED: OnceLock<Sentinel> = OnceLock::new();
    SHARED.get_or_init(Sentinel::unbroken)
}

/// This test binary's Redis Cluster: not to be stopped or killed.
pub fn cluster() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(Cluster::unbroken)
}

/// This test binary's etcd, of one member: not to be stopped or killed.
pub fn etcd() -> &'static Etcd {
    static SHARED: OnceLock<Etcd> = OnceLock::new();
    SHARED.get_or_init(Etcd::start)
}

/// This test binary's etcd cluster of three members: not to be stopped or killed.
pub fn etcd_cluster() -> &'static Etcd {
    static SHARED: OnceLock<Etcd> = OnceLock::new();
    SHARED.get_or_init(Etcd::cluster)
}

/// This test binary's ZooKeeper: one server, not to be stopped or killed.
pub fn zookeeper() -> &'static ZooKeeper {
    static SHARED: OnceLock<ZooKeeper> = OnceLock::new();
    SHARED.get_or_init(ZooKeeper::start)
}

/// This test binary's five independent Redis servers: not to be stopped or killed.
pub fn redlock() -> &'static Redlock {
    static SHARED: OnceLock<Redlock> = OnceLock::new();
    SHARED.get_or_init(|| Redlock::with(5, Setup::new().fast()))
}
