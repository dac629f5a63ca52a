//! The servers of the stories: the installed versions, configured for speed and not for durability.

use testbed::{MariaDb, Postgres, Redis, Setup, Version, ZooKeeper, ZooKeeperSetup};

fn installed() -> Setup {
    Setup::oldest().fast()
}

pub(crate) fn redis() -> Redis {
    Redis::with(installed())
}

/// Starts a Redis server that replicates the server on this port.
pub(crate) fn replica_of(port: u16) -> Redis {
    Redis::replica_of(port, installed())
}

pub(crate) fn postgres() -> Postgres {
    Postgres::with(installed())
}

pub(crate) fn mariadb() -> MariaDb {
    MariaDb::with(installed())
}

pub(crate) fn zookeeper() -> ZooKeeper {
    ZooKeeper::with(&ZooKeeperSetup::new().version(Version::Oldest))
}
