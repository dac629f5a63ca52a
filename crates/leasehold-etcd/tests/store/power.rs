//! A cut of the power of all members of etcd.

use leasehold_test_support::power::{grants_survive_a_power_cut, with_disk};
use testbed::{Etcd, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_of_all_members() {
    with_disk("power::grants_survive_a_power_cut_of_all_members", |disk| async move {
        let cluster = Etcd::with(Setup::new(), 3);
        let kill = || (0..3).for_each(|member| cluster.kill(member));
        let restart = || cluster.restart_all();
        grants_survive_a_power_cut(&disk, &cluster.url(), kill, restart).await;
    });
}
