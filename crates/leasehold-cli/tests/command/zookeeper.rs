//! `leasehold run` on ZooKeeper ensembles whose members are killed.

#![cfg(feature = "zookeeper")]

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::count::Counting;
use testbed::ZooKeepers;

/// The script that lets kazoo count in the same file at the same time.
const KAZOO: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../leasehold-zookeeper/tests/interop/kazoo_peer.py");
const ROUNDS: usize = 25;

// R32
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_and_kazoo_count_exactly_while_members_are_killed() {
    let all = ZooKeepers::start();
    // A member needs seconds to start again.
    let store = format!("{}/count?create=yes&naming=kazoo", all.url());
    let counting = Counting::start_for(8, &store);
    let hosts: Vec<String> =
        all.members().iter().map(|m| format!("127.0.0.1:{}", m.port())).collect();
    let mut kazoo = Command::new(testbed::python());
    kazoo.args([KAZOO, &hosts.join(","), "/count/counter", "count"]);
    kazoo.arg(counting.counter()).arg(ROUNDS.to_string()).stdin(Stdio::null());
    let mut kazoo = kazoo.spawn().unwrap();
    for (member, counted) in all.members().iter().zip([1, 11, 21]) {
        counting.in_the_midst(counted, || member.kill());
        std::thread::sleep(Duration::from_millis(300));
        member.restart();
    }
    assert!(kazoo.wait().unwrap().success());
    counting.finish(ROUNDS);
}
