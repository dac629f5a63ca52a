//! Runs work under a lock, and stops it when the lock is lost.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use crate::client::lease::State;
use crate::lock::hold::Hold;
use crate::types::error::{Error, Result};

/// Runs `work` until it is done or the lock is lost, then releases the lock.
///
/// The clock is checked before each poll of `work`. So a process that was paused for longer than
/// its lease takes no further step. A loss also wakes this task, even if `work` does not.
pub(crate) async fn run<T, F: Future<Output = T>>(
    hold: Hold,
    work: impl FnOnce() -> F,
) -> Result<T> {
    let done = {
        let mut work = pin!(work());
        let mut lost = pin!(hold.lost());
        poll_fn(|cx| {
            if let State::Lost(reason) = hold.state() {
                return Poll::Ready(Err(reason));
            }
            if let Poll::Ready(reason) = lost.as_mut().poll(cx) {
                return Poll::Ready(Err(reason));
            }
            work.as_mut().poll(cx).map(Ok)
        })
        .await
    };
    match done {
        Ok(done) => {
            // If `work` has kept its guard, the lock stays held. Otherwise this guard is the last
            // one.
            match hold.release().await {
                Err(error) if error.lost_reason().is_some() => Err(error),
                // If the release got no reply, the work is done anyway. The background thread
                // retries the release.
                Ok(_) | Err(_) => Ok(done),
            }
        }
        Err(reason) => Err(Error::lost(reason).with_operation("run").with_lock(hold.name())),
    }
}
