//! Every server starts and answers, in both its oldest and its newest version.

use testbed::{
    Etcd, MariaDb, MySql, Nats, Postgres, Redis, Server, Setup, Version, ZooKeeper, ZooKeeperSetup,
};

/// Starts a server and requests its version, which must begin with the version that its program
/// prints.
fn answers(server: Server, version: Version) {
    if !server.exists(version) {
        eprintln!("left out: {} ({version:?})", server.name());
        return;
    }
    let setup = match version {
        Version::Oldest => Setup::oldest(),
        Version::Newest => Setup::newest(),
    };
    let answer = match server {
        Server::Postgres => Postgres::with(setup).admin("postgres", "SHOW server_version"),
        Server::MariaDb => MariaDb::with(setup).admin("SELECT VERSION()"),
        Server::MySql => MySql::with(setup).admin("SELECT VERSION()"),
        Server::Redis => Redis::with(setup).info("server", "redis_version"),
        Server::Valkey => Redis::with(Setup::valkey()).info("server", "valkey_version"),
        Server::Nats => Nats::with(setup).info(),
        Server::Etcd => Etcd::with(setup, 1).etcdctl(&["endpoint", "status", "-w", "json"]),
        Server::ZooKeeper => ZooKeeper::with(&ZooKeeperSetup::new().version(version)).ask("srvr"),
    };
    let expected = server.version(version);
    assert!(answer.contains(&expected), "{} {version:?}: {expected} in {answer}", server.name());
}

#[test]
fn the_oldest_servers_answer() {
    Server::ALL.iter().for_each(|server| answers(*server, Version::Oldest));
}

#[test]
fn the_newest_servers_answer() {
    Server::ALL.iter().for_each(|server| answers(*server, Version::Newest));
}
