//! The servers of the stories: what is installed on this machine, quick rather than durable.

use testbed::{MariaDb, Postgres, Redis, Setup, Version, ZooKeeper, ZooKeeperSetup};

fn installed() -> Setup {
    Setup::oldest().fast()
}

pub(crate) fn redis() -> Redis {
    Redis::with(installed())
}

/// A Redis server that follows another one, through this port.
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
