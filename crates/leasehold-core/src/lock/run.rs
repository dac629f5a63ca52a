//! Working under a lock, and stopping when it is lost.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use crate::client::lease::State;
use crate::lock::guard::Guard;
use crate::words::error::{Error, Result};

impl Guard {
    /// Runs `work` under this hold, then releases the lock. Like [`Mutex::run`](crate::Mutex::run),
    /// for a lock that is already held.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("ledger").try_lock().await?;
    /// let total = guard.run(|guard| async move { guard.token().get() }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost before `work` was done.
    pub async fn run<T, F: Future<Output = T>>(self, work: impl FnOnce(Guard) -> F) -> Result<T> {
        run(self, work).await
    }

    /// Runs `work`, which returns a `Result`, under this hold, then releases the lock in either
    /// case.
    ///
    /// Like [`run`](Self::run), but with one error type for both: leasehold's errors are converted
    /// into the error of `work`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>; // anyhow's, or an enum with `#[from]`
    /// let guard = locks.mutex("ledger").try_lock().await?;
    /// let total: Result<u64, Error> = guard.try_run(|_| async { Ok("41".parse::<u64>()? + 1) }).await;
    /// assert_eq!(total.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost before `work` was done. It takes
    ///   precedence over an error of `work`, which may be a consequence of the loss.
    /// - The errors of `work`.
    pub async fn try_run<T, E, F>(self, work: impl FnOnce(Guard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        try_run(self, work).await
    }
}

/// As [`run`], for work that fails by itself: one result for both.
pub(crate) async fn try_run<T, E: From<Error>, F: Future<Output = Result<T, E>>>(
    guard: Guard,
    work: impl FnOnce(Guard) -> F,
) -> Result<T, E> {
    run(guard, work).await.map_err(E::from)?
}

/// Runs `work` until it is done or the lock is lost, then releases.
///
/// The clock is looked at before each poll of `work`, so a process that was stopped for longer
/// than its lease takes not one more step; and the loss is waited for, so it wakes us.
pub(crate) async fn run<T, F: Future<Output = T>>(
    guard: Guard,
    work: impl FnOnce(Guard) -> F,
) -> Result<T> {
    let done = {
        let mut work = pin!(work(Guard::share(Arc::clone(guard.hold()))));
        let mut lost = pin!(guard.lost());
        poll_fn(|cx| {
            if let State::Lost(reason) = guard.state() {
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
            // A guard that `work` kept for itself goes on holding; ours was the last otherwise.
            match guard.release().await {
                Err(error) if error.lost_reason().is_some() => Err(error),
                // An unheard release undoes nothing: the background thread goes on with it.
                Ok(_) | Err(_) => Ok(done),
            }
        }
        Err(reason) => Err(Error::lost(reason).during("run").on(guard.name())),
    }
}
