//! What the files of tests for NATS share.

use std::time::{Duration, Instant};

use leasehold::Leasehold;

use leasehold_test_support::PATIENCE;

/// Waits until something is so.
pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so().await {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until so many stand in the queue.
pub(crate) async fn until_queued(locks: &Leasehold, name: &str, count: usize) {
    until("the queue", async || {
        let shown = locks.read(name).await.ok().flatten();
        shown.is_some_and(|shown| shown.claims.len() == count)
    })
    .await;
}
