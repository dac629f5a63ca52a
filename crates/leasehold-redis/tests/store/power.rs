//! A cut of the power of a Redis server.

use std::sync::Arc;

use leasehold_test_support::power::{OnDisk, grants_survive_a_power_cut, with_disk};
use testbed::{Redis, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_with_appendfsync_always() {
    with_disk("power::grants_survive_a_power_cut_with_appendfsync_always", |disk| async {
        let server = Arc::new(Redis::with(Setup::new()));
        let (down, up) = (server.clone(), server.clone());
        let servers = OnDisk {
            url: server.url(),
            kill: Box::new(move || down.kill()),
            start: Box::new(move || up.restart()),
        };
        grants_survive_a_power_cut(disk, servers).await;
    });
}
