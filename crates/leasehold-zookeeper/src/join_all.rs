//! Requests that are sent together.

use std::future::poll_fn;
use std::task::Poll;

/// Maximum number of concurrent reads of nodes, for inspection and checks.
pub(super) const MAX_CONCURRENT_READS: usize = 256;

/// Awaits all futures concurrently, so that their requests are sent together.
pub(super) async fn join_all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    poll_fn(|cx| {
        let mut open = false;
        for (future, done) in all.iter_mut().filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *done = Some(value),
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    all.into_iter().filter_map(|(_, done)| done).collect()
}
