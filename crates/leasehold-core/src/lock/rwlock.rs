//! The read-write lock: a reader weighs 1, a writer the whole capacity.

use std::time::Duration;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::Guard;
use crate::lock::options::option_methods;
use crate::lock::run::{run, try_run};
use crate::lock::wait::Wait;
use crate::lock::wanted::Wanted;
use crate::words::claim::MAX_READERS;
use crate::words::error::{Error, Result};

/// Many readers or one writer, first come, first served: a waiting writer holds later readers
/// back, so nobody starves. Cheap to clone; nothing is sent until it is taken.
///
/// Every call that takes it is cancel safe and fails as [`Mutex::lock`](crate::Mutex::lock) and its
/// companions do.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let config = locks.rwlock("config");
/// let (one, other) = (config.read().await?, config.read().await?); // together
/// assert!(config.try_write().await.is_err());
/// drop((one, other));
/// config.run_write(|guard| async move { println!("alone, token {}", guard.token()) }).await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is taken"]
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

    /// Waits its turn and takes the lock for reading. One round trip when free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let reader = locks.rwlock("config").read().await?;
    /// let other = locks.rwlock("config").read().await?; // side by side
    /// assert!(reader.is_held() && other.is_held());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub async fn read(&self) -> Result<Guard> {
        self.handle.acquire("read", 1, Wait::Forever).await
    }

    /// Takes the lock for reading, now or not at all. One round trip.
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
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    ///
    /// # Errors
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_read(&self) -> Result<Guard> {
        self.handle.acquire("try_read", 1, Wait::Try).await
    }

    /// Waits for at most this long to read.
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
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// # Errors
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn read_timeout(&self, limit: Duration) -> Result<Guard> {
        self.handle.acquire("read", 1, Wait::For(limit)).await
    }

    /// Waits its turn and takes the lock for writing. One round trip when free.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let writer = locks.rwlock("config").write().await?; // alone
    /// println!("write, token {}", writer.token());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub async fn write(&self) -> Result<Guard> {
        self.handle.acquire("write", MAX_READERS, Wait::Forever).await
    }

    /// Takes the lock for writing, now or not at all. One round trip.
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
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    ///
    /// # Errors
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub async fn try_write(&self) -> Result<Guard> {
        self.handle.acquire("try_write", MAX_READERS, Wait::Try).await
    }

    /// Waits for at most this long to write.
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
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// # Errors
    /// As [`Mutex::lock_timeout`](crate::Mutex::lock_timeout).
    pub async fn write_timeout(&self, limit: Duration) -> Result<Guard> {
        self.handle.acquire("write", MAX_READERS, Wait::For(limit)).await
    }

    /// This lock for reading, as one of several: see [`lock_all`](crate::Leasehold::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.rwlock("config").to_read(), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn to_read(&self) -> Wanted {
        Wanted::new(self.handle.clone(), 1)
    }

    /// This lock for writing, as one of several: see [`lock_all`](crate::Leasehold::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = [locks.rwlock("config").to_write(), locks.mutex("order:42").into()];
    /// let _both = locks.lock_all(both).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn to_write(&self) -> Wanted {
        Wanted::new(self.handle.clone(), MAX_READERS)
    }

    /// Runs `work` while reading; see [`Mutex::run`](crate::Mutex::run).
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
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::run`](crate::Mutex::run).
    pub async fn run_read<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(Guard) -> F,
    ) -> Result<T> {
        run(self.read().await?, work).await
    }

    /// Runs `work`, which fails by itself, while reading; see [`Mutex::try_run`](crate::Mutex::try_run).
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
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::try_run`](crate::Mutex::try_run).
    pub async fn try_run_read<T, E, F>(&self, work: impl FnOnce(Guard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        try_run(self.read().await?, work).await
    }

    /// Runs `work` while writing; see [`Mutex::run`](crate::Mutex::run).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let term = locks.rwlock("config").run_write(|guard| async move { guard.token() }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::run`](crate::Mutex::run).
    pub async fn run_write<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(Guard) -> F,
    ) -> Result<T> {
        run(self.write().await?, work).await
    }

    /// Runs `work`, which fails by itself, while writing; see [`Mutex::try_run`](crate::Mutex::try_run).
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
    /// As [`Mutex::run`](crate::Mutex::run).
    ///
    /// # Errors
    /// As [`Mutex::try_run`](crate::Mutex::try_run).
    pub async fn try_run_write<T, E, F>(&self, work: impl FnOnce(Guard) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        try_run(self.write().await?, work).await
    }
}
