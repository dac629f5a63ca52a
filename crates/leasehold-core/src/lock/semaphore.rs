//! The semaphore: a queue of capacity n.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::Guard;
use crate::lock::options::option_methods;
use crate::lock::run::{run, try_run};
use crate::lock::wait::Wait;
use crate::lock::wanted::Wanted;
use crate::words::error::{Error, Result};

/// A pool of permits, first come, first served: who asks for many is not overtaken by those who
/// ask for few. Cheap to clone; nothing is sent until it is taken.
///
/// Tokens of permits are names, not fences: several are valid at once. Every call that takes
/// permits is cancel safe and fails as [`Mutex::lock`](crate::Mutex::lock) and its companions do;
/// zero permits, or more than there are, is [`Config`](crate::ErrorKind::Config).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let conversions = locks.semaphore("convert", 3); // of 3, everywhere
/// let small = conversions.acquire().await?;
/// let big = conversions.acquire_many(2).await?;
/// assert!(conversions.try_acquire().await.is_err());
/// small.release().await?;
/// assert_eq!(big.permits(), 2);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is taken"]
pub struct Semaphore {
    handle: LockHandle,
}

impl Semaphore {
    pub(crate) fn new(handle: LockHandle) -> Self {
        Self { handle }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    option_methods!();

    /// Waits its turn and takes one permit. One round trip when free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let permit = locks.semaphore("convert", 3).acquire().await?; // at most three at once
    /// assert_eq!(permit.permits(), 1);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub async fn acquire(&self) -> Result<Guard> {
        self.acquire_many(1).await
    }

    /// Waits its turn and takes `permits` at once.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let two = locks.semaphore("convert", 3).acquire_many(2).await?;
    /// assert_eq!(two.permits(), 2);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub async fn acquire_many(&self, permits: u32) -> Result<Guard> {
        self.handle.acquire("acquire", permits, Wait::Forever).await
    }

    /// Takes one permit now or not at all. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let one_only = locks.semaphore("license", 1);
    /// let _permit = one_only.try_acquire().await?;
    /// assert!(one_only.try_acquire().await.is_err());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    ///
    /// # Errors
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_acquire(&self) -> Result<Guard> {
        self.try_acquire_many(1).await
    }

    /// Takes `permits` now or not at all. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let convert = locks.semaphore("convert", 3);
    /// let _two = convert.try_acquire_many(2).await?;
    /// assert!(convert.try_acquire_many(2).await.is_err()); // one is left
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    ///
    /// # Errors
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Guard> {
        self.handle.acquire("try_acquire", permits, Wait::Try).await
    }

    /// Waits for at most this long for one permit.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let limit = std::time::Duration::from_secs(2);
    /// let _permit = locks.semaphore("convert", 3).acquire_timeout(limit).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// # Errors
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn acquire_timeout(&self, limit: Duration) -> Result<Guard> {
        self.acquire_many_timeout(1, limit).await
    }

    /// Waits for at most this long for `permits`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let limit = std::time::Duration::from_secs(2);
    /// let _two = locks.semaphore("convert", 3).acquire_many_timeout(2, limit).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// # Errors
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn acquire_many_timeout(&self, permits: u32, limit: Duration) -> Result<Guard> {
        self.handle.acquire("acquire", permits, Wait::For(limit)).await
    }

    /// So many permits, as one of several locks: see [`lock_all`](crate::Leasehold::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.semaphore("convert", 3).to_acquire(2), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn to_acquire(&self, permits: u32) -> Wanted {
        Wanted::new(self.handle.clone(), permits)
    }

    /// Runs `work` with one permit; see [`Mutex::run`](crate::Mutex::run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let done = locks.semaphore("convert", 3).run(|_permit| async { "done" }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::run`](crate::Mutex::run).
    pub async fn run<T, F: Future<Output = T>>(&self, work: impl FnOnce(Guard) -> F) -> Result<T> {
        run(self.acquire().await?, work).await
    }

    /// Runs `work`, which fails by itself, with one permit; see [`Mutex::try_run`](crate::Mutex::try_run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let done: Result<u64, Error> =
    ///     locks.semaphore("convert", 3).try_run(|_permit| async { Ok("42".parse()?) }).await;
    /// assert_eq!(done.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::try_run`](crate::Mutex::try_run).
    pub async fn try_run<T, E, F>(&self, work: impl FnOnce(Guard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        try_run(self.acquire().await?, work).await
    }
}
