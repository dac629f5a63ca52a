//! The doctor finds each planted misconfiguration, and finds nothing on a well-configured server.

use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::troubles;
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers};

// S73
#[tokio::test]
async fn doctor_reports_short_sessions_and_nearly_used_up_numbers() {
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
