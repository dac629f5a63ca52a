//! A cut of the power of a database server.
#![cfg(all(feature = "postgres", feature = "mysql"))]

use leasehold_test_support::power::{grants_survive_a_power_cut, with_disk};
use testbed::{MariaDb, Postgres, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn postgres_grants_survive_a_power_cut() {
    with_disk("power::postgres_grants_survive_a_power_cut", |disk| async move {
        let server = Postgres::with(Setup::new());
        let kill = || server.kill();
        let restart = || server.restart();
        grants_survive_a_power_cut(&disk, &server.database(), kill, restart).await;
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn mariadb_grants_survive_a_power_cut() {
    with_disk("power::mariadb_grants_survive_a_power_cut", |disk| async move {
        let server = MariaDb::with(Setup::new());
        let kill = || server.kill();
        let restart = || server.restart();
        grants_survive_a_power_cut(&disk, &server.database(), kill, restart).await;
    });
}
