//! The mutex: a queue of capacity 1.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::MutexGuard;
use crate::lock::once_per::{OncePer, once_per};
use crate::lock::options::option_methods;
use crate::lock::request::LockRequest;
use crate::lock::wait::Wait;
use crate::types::error::{Error, Result};

/// A lock with one holder at a time, created by [`Client::mutex`](crate::Client::mutex).
///
/// Cheap to clone. No request is sent to the store until the lock is acquired.
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Mutex {
    handle: LockHandle,
}

impl Mutex {
    pub(crate) fn new(handle: LockHandle) -> Self {
        Self { handle }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    option_methods!();
    crate::lock::owner::owner_method!();

    /// Acquires the lock, and waits in the queue while it is held. One round trip if it is free.
    ///
    /// **Locking the same name twice in one task is a deadlock**, unless both locks have the same
    /// [`owner`](Self::owner). If a call has waited for 6 s (or for its lease, if that is shorter)
    /// for a lock that its own client holds, the client emits a `tracing` event. See also
    /// [`held_by_this_client`](crate::Error::held_by_this_client).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// println!("held, token {}", guard.token());
    /// guard.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// - [`Unreachable`](crate::ErrorKind::Unreachable): the store did not answer for a lease, or
    ///   for 15 s if the lease is shorter (long enough for a fail-over).
    /// - [`InvalidName`](crate::ErrorKind::InvalidName), [`Config`](crate::ErrorKind::Config),
    ///   [`Unsupported`](crate::ErrorKind::Unsupported), [`Mismatch`](crate::ErrorKind::Mismatch):
    ///   the name, the kind of lock or an option is not valid for this lock or this store.
    /// - [`Denied`](crate::ErrorKind::Denied), [`Corrupt`](crate::ErrorKind::Corrupt),
    ///   [`Full`](crate::ErrorKind::Full): the store rejects the request.
    /// - [`Closed`](crate::ErrorKind::Closed): the client was closed.
    ///
    /// To survive longer outages, retry with back-off while
    /// [`is_retryable`](crate::Error::is_retryable) is `true`.
    pub async fn lock(&self) -> Result<MutexGuard> {
        self.handle.acquire("lock", 1, Wait::Forever).await.map(MutexGuard::new)
    }

    /// Acquires the lock if it is free, and does not wait. One round trip.
    ///
    /// If the same client has just dropped a guard of this lock, the call waits for that release
    /// first.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::ErrorKind;
    /// match locks.mutex("nightly").try_lock().await {
    ///     Ok(guard) => println!("ours, token {}", guard.token()),
    ///     Err(error) if error.kind() == ErrorKind::Contended => println!("not now: {error:#}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// - [`Contended`](crate::ErrorKind::Contended): another client holds the lock.
    ///   [`holders`](crate::Error::holders) lists it.
    /// - All others as for [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<MutexGuard> {
        self.handle.acquire("try_lock", 1, Wait::Try).await.map(MutexGuard::new)
    }

    /// Acquires the lock, and waits in the queue for at most `limit`. One round trip if it is free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// # let _held = locks.mutex("order:42").lock().await?;
    /// let error = locks.mutex("order:42").lock_timeout(Duration::from_millis(10)).await.unwrap_err();
    /// assert_eq!(error.kind(), leasehold::ErrorKind::Timeout); // the lock was held all the time
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// - [`Timeout`](crate::ErrorKind::Timeout): the lock was not available within `limit`.
    /// - [`Unreachable`](crate::ErrorKind::Unreachable): the store was not answering when `limit`
    ///   had passed.
    /// - All others as for [`lock`](Self::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<MutexGuard> {
        self.handle.acquire("lock", 1, Wait::For(limit)).await.map(MutexGuard::new)
    }

    /// Acquires the lock, runs `work`, and releases the lock. The recommended way to use a lock.
    ///
    /// If the lock is lost while `work` runs, the future of `work` is dropped at its next await,
    /// and the call returns [`Lost`](crate::ErrorKind::Lost).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let total = locks.mutex("ledger").run(|guard| async move { guard.token().get() }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost before `work` was done.
    /// - All others as for [`lock`](Self::lock).
    pub async fn run<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(MutexGuard) -> F,
    ) -> Result<T> {
        self.lock().await?.run(work).await
    }

    /// Acquires the lock, runs `work`, which returns a `Result`, and releases the lock in either
    /// case.
    ///
    /// Like [`run`](Self::run), but with a single error type: leasehold's errors are converted into
    /// the error type of `work`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>; // anyhow's, or an enum with `#[from]`
    /// let total: Result<u64, Error> =
    ///     locks.mutex("ledger").try_run(|_| async { Ok("41".parse::<u64>()? + 1) }).await;
    /// assert_eq!(total.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// - The errors of `work`.
    /// - All others as for [`run`](Self::run).
    pub async fn try_run<T, E, F>(&self, work: impl FnOnce(MutexGuard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        self.lock().await?.try_run(work).await
    }

    /// Acquires the lock if no client has acquired it in the last `period`. For jobs that run once
    /// per period, on any number of machines.
    ///
    /// The call never waits: if the job is running or was done in this period, the call returns
    /// [`Running`](OncePer::Running) or [`Done`](OncePer::Done).
    ///
    /// The period begins when the lock is acquired. A hold that is lost does not count, so another
    /// client can run the job. If the job takes longer than the period, the next run can begin
    /// immediately. One round trip, and a second one if the lock is not free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::OncePer;
    /// let report = locks.mutex("report");
    /// match report.once_per(Duration::from_secs(3600)).await? {
    ///     OncePer::Ran(guard) => println!("running, token {}", guard.token()),
    ///     OncePer::Running(holder) => println!("{} is running it", holder.holder),
    ///     OncePer::Done { next } => println!("done; next run in {next:?}"),
    ///     _ => {}
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// - [`Unsupported`](crate::ErrorKind::Unsupported): the store cannot keep a released lock
    ///   unavailable ([`min_hold`](Self::min_hold)).
    /// - All others as for [`try_lock`](Self::try_lock), except `Contended`.
    pub async fn once_per(&self, period: Duration) -> Result<OncePer> {
        once_per(&self.handle, period).await
    }
}

impl From<Mutex> for LockRequest {
    fn from(mutex: Mutex) -> Self {
        Self::new(mutex.handle, 1)
    }
}
