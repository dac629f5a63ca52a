//! A cut of the power of all members of etcd.

use std::sync::Arc;

use leasehold_test_support::power::{OnDisk, grants_survive_a_power_cut, with_disk};
use testbed::{Etcd, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_of_all_members() {
    with_disk("power::grants_survive_a_power_cut_of_all_members", |disk| async {
        let cluster = Arc::new(Etcd::with(Setup::new(), 3));
        let (down, up) = (cluster.clone(), cluster.clone());
        let servers = OnDisk {
            url: cluster.url(),
            kill: Box::new(move || (0..3).for_each(|member| down.kill(member))),
            start: Box::new(move || up.restart_all()),
        };
        grants_survive_a_power_cut(disk, servers).await;
    });
}
