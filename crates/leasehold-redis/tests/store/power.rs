//! A cut of the power of a Redis server.

use leasehold_test_support::power::{grants_survive_a_power_cut, with_disk};
use testbed::{Redis, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_with_appendfsync_always() {
    with_disk("power::grants_survive_a_power_cut_with_appendfsync_always", |disk| async move {
        let server = Redis::with(Setup::new());
        let kill = || server.kill();
        let restart = || server.restart();
        grants_survive_a_power_cut(&disk, &server.url(), kill, restart).await;
    });
}
