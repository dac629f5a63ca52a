//! Requests that go out together.

use std::future::poll_fn;
use std::task::Poll;

/// How many requests about nodes are under way at once, for people.
pub(super) const READ_TOGETHER: usize = 256;

/// Awaits all of them at once, so that their requests go out together.
pub(super) async fn all_of<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
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
