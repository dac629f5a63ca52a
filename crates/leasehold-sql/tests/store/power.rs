//! A cut of the power of a database server.
#![cfg(all(feature = "postgres", feature = "mysql"))]

use std::sync::Arc;

use leasehold_test_support::power::{OnDisk, grants_survive_a_power_cut, with_disk};
use testbed::{MariaDb, Postgres, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn postgres_grants_survive_a_power_cut() {
    with_disk("power::postgres_grants_survive_a_power_cut", |disk| async {
        let server = Arc::new(Postgres::with(Setup::new()));
        let (down, up) = (server.clone(), server.clone());
        let servers = OnDisk {
            url: server.database(),
            kill: Box::new(move || down.kill()),
            start: Box::new(move || up.restart()),
        };
        grants_survive_a_power_cut(disk, servers).await;
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn mariadb_grants_survive_a_power_cut() {
    with_disk("power::mariadb_grants_survive_a_power_cut", |disk| async {
        let server = Arc::new(MariaDb::with(Setup::new()));
        let (down, up) = (server.clone(), server.clone());
        let servers = OnDisk {
            url: server.database(),
            kill: Box::new(move || down.kill()),
            start: Box::new(move || up.restart()),
        };
        grants_survive_a_power_cut(disk, servers).await;
    });
}
