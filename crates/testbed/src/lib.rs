//! Real servers for tests and demonstrations: private, disposable, and breakable.
//!
//! A test declares what it needs and gets a private server. The server is started from the
//! machine's installed packages, on a free loopback port, with its own directory:
//!
//! ```no_run
//! let server = testbed::Postgres::start();
//! println!("{}", server.database()); // the URL of a new, empty database
//! server.stop(); // SIGSTOP to all its processes; `cont` resumes them
//! server.kill(); // kill -9
//! server.restart(); // same port, same data
//! ```
//!
//! Tests that only need *a* server share the one of their binary ([`postgres`], [`mariadb`],
//! [`etcd`]) and use a database each. Shared servers trade durability for speed, so a test that
//! kills a server starts its own.
//!
//! **Clean-up.** All servers of a test process have their files, and the working directories of
//! their processes, in one directory. A small shell script, the reaper, waits until the test
//! process's end of a pipe is closed, which happens however the process ends. Then the reaper kills
//! the processes that work in that directory and deletes it. So neither `kill -9` of the tests nor
//! a panic leaves anything behind.
//!
//! All errors are panics with a message for the reader of a failed test, because tests have no
//! other error handling. A program that must not panic first checks what is not installed
//! ([`Server::missing`]). Then it starts servers on a thread of its own, whose panic is the error.
//! Each kind of server has a file, and `daemon.rs` contains the common part.

mod azurite;
mod browser;
mod cert;
mod clock;
mod cluster;
mod command;
mod daemon;
mod disk;
mod etcd;
mod google;
mod lock_service;
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
mod seeded_rng;
mod sentinel;
mod template;
#[cfg(feature = "texts")]
mod texts;
mod torn;
mod version;
mod wait;
mod zookeeper;

use std::sync::OnceLock;

pub use azurite::Azurite;
pub use browser::{Browser, DevTools};
pub use cert::Certificates;
pub use cluster::Cluster;
pub use command::cargo;
pub use daemon::Setup;
pub use disk::{Disk, where_disks_are_possible};
pub use etcd::Etcd;
pub use google::FakeGcs;
pub use lock_service::LockService;
pub use mariadb::{MariaDb, MySql};
pub use memcached::Memcached;
pub use moto::Moto;
pub use nats::{Nats, NatsCluster};
pub use network::{
    Cut, TWO_ADDRESSES, TWO_OF_A_FAMILY, drop_ipv6, drop_port, drop_second_ipv4, enter_own_network,
    in_own_network,
};
pub use pgbouncer::PgBouncer;
pub use postgres::Postgres;
pub use proxy::Proxy;
pub use python::{node_module, python};
pub use redis::Redis;
pub use redlock::{Redlock, url_of as redlock_url};
pub use seaweed::SeaweedFs;
pub use seeded_rng::SeededRng;
pub use sentinel::Sentinel;
#[cfg(feature = "texts")]
pub use texts::{cases, texts};
pub use version::{Server, Version};
pub use zookeeper::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

/// Returns `long` in a run of `./test.sh --long`, which may take hours, and `short` in any other.
pub fn sized<T>(long: T, short: T) -> T {
    if extent() == Some("long") { long } else { short }
}

/// Returns `quick` in `cargo test` and `./test.sh`, `whole` in `./test.sh --all`, and `long` in
/// `./test.sh --long`.
pub fn by_extent<T>(quick: T, whole: T, long: T) -> T {
    match extent() {
        Some("long") => long,
        Some("all") => whole,
        _ => quick,
    }
}

/// Returns the value of `LEASEHOLD_TESTS`.
fn extent() -> Option<&'static str> {
    static EXTENT: OnceLock<Option<String>> = OnceLock::new();
    EXTENT.get_or_init(|| std::env::var("LEASEHOLD_TESTS").ok()).as_deref()
}

/// Returns this test binary's memcached. Tests must not pause, kill or empty it.
pub fn memcached() -> &'static Memcached {
    static SHARED: OnceLock<Memcached> = OnceLock::new();
    SHARED.get_or_init(Memcached::start)
}

/// Returns this test binary's SeaweedFS. Tests must not pause or kill it.
pub fn seaweed() -> &'static SeaweedFs {
    static SHARED: OnceLock<SeaweedFs> = OnceLock::new();
    SHARED.get_or_init(SeaweedFs::start)
}

/// Returns this test binary's Azurite. Tests must not pause or kill it.
pub fn azurite() -> &'static Azurite {
    static SHARED: OnceLock<Azurite> = OnceLock::new();
    SHARED.get_or_init(Azurite::start)
}

/// Returns this test binary's emulator of Google Cloud Storage. Tests must not pause or kill it.
pub fn google() -> &'static FakeGcs {
    static SHARED: OnceLock<FakeGcs> = OnceLock::new();
    SHARED.get_or_init(FakeGcs::start)
}

/// Returns this test binary's NATS server. Tests must not pause or kill it.
pub fn nats() -> &'static Nats {
    static SHARED: OnceLock<Nats> = OnceLock::new();
    SHARED.get_or_init(Nats::start)
}

/// Returns this test binary's PostgreSQL. Tests must not pause or kill it.
pub fn postgres() -> &'static Postgres {
    static SHARED: OnceLock<Postgres> = OnceLock::new();
    SHARED.get_or_init(|| Postgres::with(Setup::new().fast()))
}

/// Returns this test binary's MariaDB. Tests must not pause or kill it.
pub fn mariadb() -> &'static MariaDb {
    static SHARED: OnceLock<MariaDb> = OnceLock::new();
    SHARED.get_or_init(|| MariaDb::with(Setup::new().fast()))
}

/// Returns this test binary's MySQL. Tests must not pause or kill it.
pub fn mysql() -> &'static MySql {
    static SHARED: OnceLock<MySql> = OnceLock::new();
    SHARED.get_or_init(|| MySql::with(Setup::new().fast()))
}

/// Returns this test binary's Redis. Tests must not pause, kill or empty it.
pub fn redis() -> &'static Redis {
    static SHARED: OnceLock<Redis> = OnceLock::new();
    SHARED.get_or_init(|| Redis::with(Setup::new().fast()))
}

/// Returns this test binary's Valkey. Tests must not pause or kill it.
pub fn valkey() -> &'static Redis {
    static SHARED: OnceLock<Redis> = OnceLock::new();
    SHARED.get_or_init(|| Redis::with(Setup::valkey().fast()))
}

/// Returns this test binary's sentinels with a master and a replica. Tests must not pause or kill
/// them.
pub fn sentinel() -> &'static Sentinel {
    static SHARED: OnceLock<Sentinel> = OnceLock::new();
    SHARED.get_or_init(Sentinel::unbroken)
}

/// Returns this test binary's Redis Cluster. Tests must not pause or kill it.
pub fn cluster() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(Cluster::unbroken)
}

/// Returns this test binary's etcd with one member. Tests must not pause or kill it.
pub fn etcd() -> &'static Etcd {
    static SHARED: OnceLock<Etcd> = OnceLock::new();
    SHARED.get_or_init(Etcd::start)
}

/// Returns this test binary's etcd cluster of three members. Tests must not pause or kill it.
pub fn etcd_cluster() -> &'static Etcd {
    static SHARED: OnceLock<Etcd> = OnceLock::new();
    SHARED.get_or_init(Etcd::cluster)
}

/// Returns this test binary's single ZooKeeper server. Tests must not pause or kill it.
pub fn zookeeper() -> &'static ZooKeeper {
    static SHARED: OnceLock<ZooKeeper> = OnceLock::new();
    SHARED.get_or_init(ZooKeeper::start)
}

/// Returns this test binary's five independent Redis servers. Tests must not pause or kill them.
pub fn redlock() -> &'static Redlock {
    static SHARED: OnceLock<Redlock> = OnceLock::new();
    SHARED.get_or_init(|| Redlock::with(5, Setup::new().fast()))
}
