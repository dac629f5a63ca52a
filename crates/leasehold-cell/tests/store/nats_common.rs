//! Common parts of the tests for NATS.

use std::time::{Duration, Instant};

use leasehold::Client;

use leasehold_test_support::PATIENCE;

/// Waits until the condition is true.
pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so().await {
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the queue has this many claims.
pub(crate) async fn until_queued(locks: &Client, name: &str, count: usize) {
    until("the expected queue", async || {
        let shown = locks.inspect(name).await.ok().flatten();
        shown.is_some_and(|shown| shown.claims.len() == count)
    })
    .await;
}
