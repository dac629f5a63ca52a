//! The read-write lock: a reader has the weight 1, and a writer has the whole capacity as its
//! weight.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::{ReadGuard, WriteGuard};
use crate::lock::options::option_methods;
use crate::lock::request::LockRequest;
use crate::lock::wait::Wait;
use crate::types::claim::MAX_READERS;
use crate::types::error::{Error, Result};

/// A read-write lock with any number of readers or one writer, created by
/// [`Client::rwlock`](crate::Client::rwlock).
///
/// The lock is fair: a waiting writer blocks later readers, so neither readers nor writers starve.
/// Cheap to clone. No request is sent to the store until the lock is acquired.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let config = locks.rwlock("config");
/// let (one, other) = (config.read().await?, config.read().await?); // at the same time
/// assert!(config.try_write().await.is_err());
/// drop((one, other));
/// config.run_write(|guard| async move { println!("alone, token {}", guard.token()) }).await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct RwLock {
    handle: LockHandle,
}

impl RwLock {
    pub(crate) fn new(handle: LockHandle) -> Self {
        Self { handle }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    option_methods!();
    crate::lock::owner::owner_method!();

    /// Acquires the lock for reading, and waits in the queue if necessary. One round trip if it is
    /// free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let reader = locks.rwlock("config").read().await?;
    /// let other = locks.rwlock("config").read().await?; // at the same time
    /// assert!(reader.is_held() && other.is_held());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn read(&self) -> Result<ReadGuard> {
        self.handle.acquire("read", 1, Wait::Forever).await.map(ReadGuard::new)
    }

    /// Acquires the lock for reading if that is possible now, and does not wait. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _writer = locks.rwlock("config").write().await?;
    /// let error = locks.rwlock("config").try_read().await.unwrap_err();
    /// assert_eq!(error.kind(), leasehold::ErrorKind::Contended);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_read(&self) -> Result<ReadGuard> {
        self.handle.acquire("try_read", 1, Wait::Try).await.map(ReadGuard::new)
    }

    /// Acquires the lock for reading, and waits in the queue for at most `limit`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let limit = std::time::Duration::from_secs(2);
    /// let _reader = locks.rwlock("config").read_timeout(limit).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn read_timeout(&self, limit: Duration) -> Result<ReadGuard> {
        self.handle.acquire("read", 1, Wait::For(limit)).await.map(ReadGuard::new)
    }

    /// Acquires the lock for writing, and waits in the queue if necessary. One round trip if it is
    /// free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let writer = locks.rwlock("config").write().await?; // the only holder
    /// println!("write, token {}", writer.token());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn write(&self) -> Result<WriteGuard> {
        self.handle.acquire("write", MAX_READERS, Wait::Forever).await.map(WriteGuard::new)
    }

    /// Acquires the lock for writing if it is free, and does not wait. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _reader = locks.rwlock("config").read().await?;
    /// assert!(locks.rwlock("config").try_write().await.is_err());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_write(&self) -> Result<WriteGuard> {
        self.handle.acquire("try_write", MAX_READERS, Wait::Try).await.map(WriteGuard::new)
    }

    /// Acquires the lock for writing, and waits in the queue for at most `limit`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let limit = std::time::Duration::from_secs(2);
    /// let _writer = locks.rwlock("config").write_timeout(limit).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. A waiter loses its
    /// queue position.
    ///
    /// # Errors
    /// The same as [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn write_timeout(&self, limit: Duration) -> Result<WriteGuard> {
        self.handle.acquire("write", MAX_READERS, Wait::For(limit)).await.map(WriteGuard::new)
    }

    /// Returns a request to read-lock this lock as part of
    /// [`lock_all`](crate::Client::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.rwlock("config").read_request(), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn read_request(&self) -> LockRequest {
        LockRequest::new(self.handle.clone(), 1)
    }

    /// Returns a request to write-lock this lock as part of
    /// [`lock_all`](crate::Client::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.rwlock("config").write_request(), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn write_request(&self) -> LockRequest {
        LockRequest::new(self.handle.clone(), MAX_READERS)
    }

    /// Acquires the lock for reading, runs `work`, and releases the lock. See
    /// [`Mutex::run`](crate::Mutex::run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let read = locks.rwlock("config").run_read(|_| async { 42 }).await?;
    /// assert_eq!(read, 42);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// The same as [`Mutex::run`](crate::Mutex::run).
    pub async fn run_read<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(ReadGuard) -> F,
    ) -> Result<T> {
        self.read().await?.run(work).await
    }

    /// Acquires the lock for reading, runs `work`, which returns a `Result`, and releases the lock
    /// in either case. See [`Mutex::try_run`](crate::Mutex::try_run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let config = locks.rwlock("config");
    /// let done: Result<u64, Error> = config.try_run_read(|_| async { Ok("42".parse()?) }).await;
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
    pub async fn try_run_read<T, E, F>(&self, work: impl FnOnce(ReadGuard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        self.read().await?.try_run(work).await
    }

    /// Acquires the lock for writing, runs `work`, and releases the lock. See
    /// [`Mutex::run`](crate::Mutex::run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let term = locks.rwlock("config").run_write(|guard| async move { guard.token() }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// The same as [`Mutex::run`](crate::Mutex::run).
    pub async fn run_write<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(WriteGuard) -> F,
    ) -> Result<T> {
        self.write().await?.run(work).await
    }

    /// Acquires the lock for writing, runs `work`, which returns a `Result`, and releases the lock
    /// in either case. See [`Mutex::try_run`](crate::Mutex::try_run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let config = locks.rwlock("config");
    /// let done: Result<u64, Error> = config.try_run_write(|_| async { Ok("42".parse()?) }).await;
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
    pub async fn try_run_write<T, E, F>(&self, work: impl FnOnce(WriteGuard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        self.write().await?.try_run(work).await
    }
}
