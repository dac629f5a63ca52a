//! A cut of the power of all members of ZooKeeper.

use std::time::Duration;

use leasehold_test_support::power::{grants_survive_a_power_cut, with_disk};
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

/// The sessions that the servers accept.
const SHORTEST: Duration = Duration::from_millis(400);
const LONGEST: Duration = Duration::from_secs(180);

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_of_all_members() {
    with_disk("power::grants_survive_a_power_cut_of_all_members", |disk| async move {
        let all = ZooKeepers::with(&ZooKeeperSetup::new().durable().sessions(SHORTEST, LONGEST));
        let url = all.url() + "?session=180s";
        let kill = || all.members().iter().for_each(ZooKeeper::kill);
        let restart = || all.restart_all();
        grants_survive_a_power_cut(&disk, &url, kill, restart).await;
    });
}
