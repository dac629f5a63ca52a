//! A cut of the power of all members of ZooKeeper.

use std::sync::Arc;

use leasehold_test_support::power::{OnDisk, grants_survive_a_power_cut, with_disk};
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_of_all_members() {
    with_disk("power::grants_survive_a_power_cut_of_all_members", |disk| async {
        let all = Arc::new(ZooKeepers::with(&ZooKeeperSetup::new().durable()));
        let (down, up) = (all.clone(), all.clone());
        let servers = OnDisk {
            url: all.url() + "?session=60s",
            kill: Box::new(move || down.members().iter().for_each(ZooKeeper::kill)),
            start: Box::new(move || up.restart_all()),
        };
        grants_survive_a_power_cut(disk, servers).await;
    });
}
