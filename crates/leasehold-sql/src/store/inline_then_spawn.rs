//! A future that runs in its caller's task, and finishes on the client's thread if the caller drops
//! it.
//!
//! Running in the caller's task saves four thread switches for an acquisition and its release.
//!
//! Use it only for work that blocks no other client if the work pauses between two awaits, such as
//! a single statement. The caller's executor may be blocked at that point. Timers and tasks of the
//! work belong to the client's runtime, whatever the caller's runtime supports.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::runtime::Handle;

/// Work that runs in its caller's task. If it is dropped early, it continues on `runtime`.
pub(super) struct InlineThenSpawn<T: Send + 'static> {
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    runtime: Handle,
}

impl<T: Send + 'static> InlineThenSpawn<T> {
    pub(super) fn new(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime: runtime.clone() }
    }
}

impl<T: Send + 'static> Future for InlineThenSpawn<T> {
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

impl<T: Send + 'static> Drop for InlineThenSpawn<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            drop(self.runtime.spawn(work));
        }
    }
}

impl<T: Send + 'static> fmt::Debug for InlineThenSpawn<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InlineThenSpawn").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn dropped_work_is_completed_in_the_background() {
        let ended = Arc::new(AtomicUsize::new(0));
        let work = || {
            let ended = ended.clone();
            InlineThenSpawn::new(&Handle::current(), async move {
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

    /// The caller's runtime has no timer.
    #[test]
    fn timers_run_on_the_clients_runtime() {
        let client = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let caller = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let slept = InlineThenSpawn::new(client.handle(), async {
            tokio::time::sleep(Duration::from_millis(1)).await;
        });
        caller.block_on(slept);
    }
}
