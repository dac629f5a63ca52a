//! Work that is done in its caller's task for as long as that waits for it, and is ended on the client's
//! thread if it does not: a pair costs four switches between threads less.
//!
//! Only for what holds nothing up between two awaits, as one statement: a caller's executor may be
//! blocked in the middle. Timers and tasks of the work are the client's, whatever the caller's runtime has.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::runtime::Handle;

pub(super) struct Here<T: Send + 'static> {
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    runtime: Handle,
}

impl<T: Send + 'static> Here<T> {
    pub(super) fn new(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime: runtime.clone() }
    }
}

impl<T: Send + 'static> Future for Here<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        let _in_runtime = this.runtime.enter();
        let Some(work) = &mut this.work else { return Poll::Pending };
        let done = ready!(work.as_mut().poll(cx));
        this.work = None;
        Poll::Ready(done)
    }
}

impl<T: Send + 'static> Drop for Here<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            drop(self.runtime.spawn(work));
        }
    }
}

impl<T: Send + 'static> fmt::Debug for Here<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Here").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn what_its_caller_lets_go_of_is_ended_all_the_same() {
        let ended = Arc::new(AtomicUsize::new(0));
        let work = || {
            let ended = ended.clone();
            Here::new(&Handle::current(), async move {
                tokio::task::yield_now().await;
                tokio::time::sleep(Duration::from_millis(1)).await;
                ended.fetch_add(1, Ordering::SeqCst)
            })
        };
        assert_eq!(work().await, 0);
        drop(work());
        let _ = tokio::time::timeout(Duration::ZERO, work()).await;
        while ended.load(Ordering::SeqCst) < 3 {
            tokio::task::yield_now().await;
        }
    }

    /// As a caller's runtime without a timer.
    #[test]
    fn its_timers_are_the_clients() {
        let client = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let caller = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let slept = Here::new(client.handle(), async {
            tokio::time::sleep(Duration::from_millis(1)).await;
        });
        caller.block_on(slept);
    }
}
