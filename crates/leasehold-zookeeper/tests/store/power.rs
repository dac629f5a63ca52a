//! A cut of the power of all members of ZooKeeper.

use leasehold_test_support::power::{grants_survive_a_power_cut, with_disk};
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_of_all_members() {
    with_disk("power::grants_survive_a_power_cut_of_all_members", |disk| async move {
        let all = ZooKeepers::with(&ZooKeeperSetup::new().durable());
        let url = all.url() + "?session=60s";
        let kill = || all.members().iter().for_each(ZooKeeper::kill);
        let restart = || all.restart_all();
        grants_survive_a_power_cut(&disk, &url, kill, restart).await;
    });
}
