//! The doctor finds each planted misconfiguration, and nothing on a server that is set up well.

use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::troubles;
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

#[tokio::test]
async fn s73_a_zookeeper_whose_sessions_and_numbers_are_short() {
    assert_eq!(troubles(&ZooKeepers::start().url()).await, []);
    let second = std::time::Duration::from_secs(1);
    let setup = ZooKeeperSetup::new()
        .sessions(second, second * 5)
        .sequences_at("/late", 1 << 30)
        .sequences_at("/last", i32::MAX - 500_000);
    let server = ZooKeeper::with(&setup);
    assert_eq!(troubles(&server.url()).await, [("one-member", Weak), ("session-limits", Weak)]);
    assert_eq!(troubles(&format!("{}?session=5s", server.url())).await, [("one-member", Weak)]);
    let found = troubles(&format!("{}/?session=5s", server.url())).await;
    assert_eq!(found, [("one-member", Weak), ("sequence", Weak), ("sequence", Broken)]);
}
