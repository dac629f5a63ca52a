//! The semaphore: a queue of capacity n.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::Permit;
use crate::lock::options::option_methods;
use crate::lock::request::LockRequest;
use crate::lock::wait::Wait;
use crate::types::error::{Error, Result};

/// A fixed number of permits, created by [`Client::semaphore`](crate::Client::semaphore).
///
/// The semaphore is fair: a client that requests many permits is not overtaken by clients that
/// request few. Cheap to clone. No request is sent to the store until permits are acquired.
///
/// The tokens of permits identify holds, but they are not fencing tokens: several are valid at the
/// same time. Requesting zero permits, or more than the semaphore has, returns
/// [`Config`](crate::ErrorKind::Config).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let conversions = locks.semaphore("convert", 3); // all clients use 3
/// let small = conversions.acquire().await?;
/// let big = conversions.acquire_many(2).await?;
/// assert!(conversions.try_acquire().await.is_err());
/// small.release().await?;
/// assert_eq!(big.permits(), 2);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
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

    /// Acquires one permit, and waits in the queue if necessary. One round trip if one is free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let permit = locks.semaphore("convert", 3).acquire().await?; // at most three at the same time
    /// assert_eq!(permit.permits(), 1);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn acquire(&self) -> Result<Permit> {
        self.acquire_many(1).await
    }

    /// Acquires `permits` permits together, and waits in the queue if necessary. One round trip if
    /// they are free.
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
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn acquire_many(&self, permits: u32) -> Result<Permit> {
        self.handle.acquire("acquire", permits, Wait::Forever).await.map(Permit::new)
    }

    /// Acquires one permit if one is free, and does not wait. One round trip.
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
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_acquire(&self) -> Result<Permit> {
        self.try_acquire_many(1).await
    }

    /// Acquires `permits` permits together if they are free, and does not wait. One round trip.
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
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Permit> {
        self.handle.acquire("try_acquire", permits, Wait::Try).await.map(Permit::new)
    }

    /// Acquires one permit, and waits in the queue for at most `limit`.
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
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn acquire_timeout(&self, limit: Duration) -> Result<Permit> {
        self.acquire_many_timeout(1, limit).await
    }

    /// Acquires `permits` permits together, and waits in the queue for at most `limit`.
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
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn acquire_many_timeout(&self, permits: u32, limit: Duration) -> Result<Permit> {
        self.handle.acquire("acquire", permits, Wait::For(limit)).await.map(Permit::new)
    }

    /// Returns a request for `permits` permits as part of [`lock_all`](crate::Client::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.semaphore("convert", 3).permit_request(2), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn permit_request(&self, permits: u32) -> LockRequest {
        LockRequest::new(self.handle.clone(), permits)
    }

    /// Acquires one permit, runs `work`, and releases the permit. See
    /// [`Mutex::run`](crate::Mutex::run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let done = locks.semaphore("convert", 3).run(|_permit| async { "done" }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// The same as [`Mutex::run`](crate::Mutex::run).
    pub async fn run<T, F: Future<Output = T>>(&self, work: impl FnOnce(Permit) -> F) -> Result<T> {
        self.acquire().await?.run(work).await
    }

    /// Acquires one permit, runs `work`, which returns a `Result`, and releases the permit in
    /// either case. See [`Mutex::try_run`](crate::Mutex::try_run).
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
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// The same as [`Mutex::try_run`](crate::Mutex::try_run).
    pub async fn try_run<T, E, F>(&self, work: impl FnOnce(Permit) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        self.acquire().await?.try_run(work).await
    }
}
