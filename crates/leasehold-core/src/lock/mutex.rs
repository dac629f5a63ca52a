//! The mutex: a queue of capacity 1.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::Guard;
use crate::lock::once_per::{OncePer, once_per};
use crate::lock::options::option_methods;
use crate::lock::run::{run, try_run};
use crate::lock::wait::Wait;
use crate::lock::wanted::Wanted;
use crate::words::error::{Error, Result};

/// A lock with one holder at a time. Cheap to clone; nothing is sent until it is taken.
///
/// Every call that takes it is cancel safe: a future that is dropped gives its place back, in the
/// background.
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is taken"]
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

    /// Waits its turn and takes the lock. One round trip when free.
    ///
    /// **A task that holds it already waits for itself, for ever**, unless both locks have the same
    /// [`owner`](Self::owner). After 6 s behind a hold of its own client, a wait is told of by an
    /// event (feature `tracing`); see also
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
    /// A future that is dropped gives its place back, in the background.
    ///
    /// # Errors
    /// [`Unreachable`](crate::ErrorKind::Unreachable) when the store has not answered for a lease,
    /// or for 15 s where the lease is shorter (a fail-over must fit in it); and whatever cannot be
    /// mended by waiting. An outage that is longer than that ends this call, not the need for the
    /// lock: a loop that is to outlive it goes on while
    /// [`is_retryable`](crate::Error::is_retryable), with growing pauses.
    pub async fn lock(&self) -> Result<Guard> {
        self.handle.acquire("lock", 1, Wait::Forever).await
    }

    /// Takes the lock now or not at all. One round trip. (A guard of the same client that was dropped just
    /// before is given back first.)
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::ErrorKind;
    /// match locks.mutex("nightly").try_lock().await {
    ///     Ok(guard) => println!("ours, token {}", guard.token()),
    ///     Err(error) if error.kind() == ErrorKind::Contended => println!("not now: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// A future that is dropped gives back what it was granted, in the background.
    ///
    /// # Errors
    /// [`Contended`](crate::ErrorKind::Contended), with who holds it; and as [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Guard> {
        self.handle.acquire("try_lock", 1, Wait::Try).await
    }

    /// Waits its turn for at most this long.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// # let _held = locks.mutex("order:42").lock().await?;
    /// let error = locks.mutex("order:42").lock_timeout(Duration::from_millis(10)).await.unwrap_err();
    /// assert!(error.store_answered()); // busy, and not away
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// A future that is dropped gives its place back, in the background.
    ///
    /// # Errors
    /// [`Timeout`](crate::ErrorKind::Timeout), with who holds it, or with
    /// [`store_answered`](crate::Error::store_answered) `false` if the store was away; and as
    /// [`lock`](Self::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<Guard> {
        self.handle.acquire("lock", 1, Wait::For(limit)).await
    }

    /// Takes the lock, runs `work` under it, releases it: the way to use a lock. When the lock is
    /// lost meanwhile, the future of `work` is dropped at its next await and the error says so.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let total = locks.mutex("ledger").run(|guard| async move { guard.token().get() }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Dropped, it drops the future of `work` where that awaits, and releases in the background.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), and [`Lost`](crate::ErrorKind::Lost) if the lock was lost before
    /// `work` was done.
    pub async fn run<T, F: Future<Output = T>>(&self, work: impl FnOnce(Guard) -> F) -> Result<T> {
        run(self.lock().await?, work).await
    }

    /// As [`run`](Self::run), for work that fails by itself: its error is yours, and ours becomes one of
    /// those. The lock is released whether it fails or not.
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
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As [`run`](Self::run), and as `work`.
    pub async fn try_run<T, E, F>(&self, work: impl FnOnce(Guard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        try_run(self.lock().await?, work).await
    }

    /// For what is done once in each `period`, on however many machines: takes the lock if nobody has
    /// had it for that long, and tells how it stands if somebody has. Nobody waits.
    ///
    /// The period begins with the grant. A hold that is lost (its holder died) does not count, so another may
    /// do it; work that takes longer than the period is followed at once by the next. One round trip, and
    /// one more to say how it stands.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::OncePer;
    /// let report = locks.mutex("report");
    /// match report.once_per(Duration::from_secs(3600)).await? {
    ///     OncePer::Ran(guard) => println!("doing it, token {}", guard.token()),
    ///     OncePer::Running(holder) => println!("{} is at it", holder.holder),
    ///     OncePer::Done { next } => println!("done; the next time in {next:?}"),
    ///     # _ => {}
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) where the store cannot keep a lock
    /// [taken](Self::at_least); and as [`try_lock`](Self::try_lock), but for `Contended`.
    pub async fn once_per(&self, period: Duration) -> Result<OncePer> {
        once_per(&self.handle, period).await
    }
}

impl From<Mutex> for Wanted {
    fn from(mutex: Mutex) -> Self {
        Self::new(mutex.handle, 1)
    }
}
