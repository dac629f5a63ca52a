//! Common parts of the tests for NATS.

use leasehold::Client;
pub(crate) use leasehold_test_support::until;

/// Waits until the queue has this many claims.
pub(crate) async fn until_queued(locks: &Client, name: &str, count: usize) {
    until("the expected queue", async || {
        let shown = locks.inspect(name).await.ok().flatten();
        shown.is_some_and(|shown| shown.claims.len() == count)
    })
    .await;
}
