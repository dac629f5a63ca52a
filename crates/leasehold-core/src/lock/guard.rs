//! Guards, which represent held locks and have the methods that their kind of lock allows.
//!
//! The type of a guard states how it holds the lock. So only an exclusive hold has a fencing token,
//! and only a read-write lock can be downgraded or upgraded.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use crate::lock::hold::{Hold, Released};
use crate::lock::{convert, run};
use crate::types::error::{Error, Result};
use crate::types::token::FencingToken;

/// How a guard holds its lock. The types are markers for [`Guard`] and have no values.
pub mod mode {
    /// The only holder of a mutex.
    #[derive(Debug)]
    pub enum Mutex {}

    /// One of the readers of a read-write lock.
    #[derive(Debug)]
    pub enum Read {}

    /// The only holder of a read-write lock.
    #[derive(Debug)]
    pub enum Write {}

    /// A holder of some permits of a semaphore.
    #[derive(Debug)]
    pub enum Permit {}

    /// A mode in which no other client holds the lock. It cannot be implemented elsewhere.
    pub trait Exclusive: sealed::Sealed {}

    impl Exclusive for Mutex {}
    impl Exclusive for Write {}

    mod sealed {
        pub trait Sealed {}
        impl Sealed for super::Mutex {}
        impl Sealed for super::Write {}
    }
}

/// A held mutex, or one term of an [election](crate::Election).
pub type MutexGuard = Guard<mode::Mutex>;

/// A read-write lock that is held for reading.
pub type ReadGuard = Guard<mode::Read>;

/// A read-write lock that is held for writing.
pub type WriteGuard = Guard<mode::Write>;

/// Held permits of a semaphore.
pub type Permit = Guard<mode::Permit>;

/// A held lock; see [`MutexGuard`], [`ReadGuard`], [`WriteGuard`] and [`Permit`].
///
/// Dropping it releases the lock in the background; [`release`](Self::release) also reports whether
/// the release succeeded. It dereferences to [`Hold`], which has the methods that do not depend on
/// the kind of lock, such as [`is_held`](Hold::is_held), [`lost`](Hold::lost) and
/// [`watch`](Hold::watch).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # let locks = leasehold::connect("memory:").await?;
/// let guard = locks.mutex("order:42").lock().await?;
/// // Each write carries the token of its hold, and the resource rejects stale ones.
/// println!("write, token {}", guard.token());
/// // Before a step that cannot be undone, check that enough of the lease is left.
/// guard.ensure(Duration::from_secs(2))?;
/// guard.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// A reader has no fencing token, and a mutex cannot be downgraded:
///
/// ```compile_fail,E0599
/// # async fn example(locks: leasehold::Client) -> leasehold::Result<()> {
/// locks.rwlock("config").read().await?.token();
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0599
/// # async fn example(locks: leasehold::Client) -> leasehold::Result<()> {
/// locks.semaphore("convert", 3).acquire().await?.token();
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0599
/// # async fn example(locks: leasehold::Client) -> leasehold::Result<()> {
/// locks.mutex("order:42").lock().await?.downgrade().await?;
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0599
/// # async fn example(locks: leasehold::Client) -> leasehold::Result<()> {
/// locks.rwlock("config").write().await?.try_upgrade().await?;
/// # Ok(()) }
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard<M> {
    hold: Hold,
    mode: PhantomData<fn() -> M>,
}

impl<M> Guard<M> {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold, mode: PhantomData }
    }

    /// Releases the lock; see [`Hold::release`]. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// guard.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Hold::release`].
    pub async fn release(self) -> Result<Released> {
        self.hold.release().await
    }

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
    pub async fn run<T, F: Future<Output = T>>(self, work: impl FnOnce(Self) -> F) -> Result<T> {
        let shared = Self::new(self.hold.share());
        run::run(self.hold, || work(shared)).await
    }

    /// Runs `work`, which returns a `Result`, under this hold, then releases the lock in either
    /// case.
    ///
    /// Like [`run`](Self::run), but with a single error type: leasehold's errors are converted into
    /// the error type of `work`.
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
    pub async fn try_run<T, E, F>(self, work: impl FnOnce(Self) -> F) -> Result<T, E>
    where
        E: From<Error>,
        F: Future<Output = Result<T, E>>,
    {
        self.run(work).await.map_err(E::from)?
    }
}

impl<M: mode::Exclusive> Guard<M> {
    /// Returns the fencing token of this hold. Pass it to the resource that the lock protects.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let lock = locks.mutex("a");
    /// let first = lock.lock().await?;
    /// let token = first.token();
    /// first.release().await?;
    /// assert!(lock.lock().await?.token() > token);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn token(&self) -> FencingToken {
        FencingToken::of(self.grant())
    }
}

impl WriteGuard {
    /// Turns a write hold into a read hold. No other writer can acquire the lock during the change.
    /// One round trip.
    ///
    /// Readers that are next in the queue acquire the lock immediately. Writers wait for this
    /// reader as for any other. The grant, the lease, the renewals and
    /// [`max_hold`](crate::RwLock::max_hold) stay the same.
    ///
    /// A [`Sequencer`](crate::Sequencer) that was created earlier is no longer valid. If several
    /// guards share the hold (with an [`Owner`](crate::Owner), or inside
    /// [`run_write`](crate::RwLock::run_write)), all of them are read holds afterwards, and fences
    /// reject those that are still write guards.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let writer = config.write().await?;
    /// // … write it …
    /// let reader = writer.downgrade().await?;
    /// let _other = config.read().await?; // and no other client has written since
    /// # drop(reader);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The error contains the guard. After `Unsupported`, nothing has changed. After any other
    /// error, the store may treat the hold as either kind: fences reject it, and it blocks other
    /// clients until it is downgraded again or released.
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported): the store cannot downgrade
    ///   ([`Guarantees::downgrades`](crate::store::Guarantees::downgrades)).
    /// - [`Unreachable`](crate::ErrorKind::Unreachable): the store did not answer for a lease (at
    ///   least 15 s).
    pub async fn downgrade(self) -> Result<ReadGuard, ConvertError<Self>> {
        match convert::downgrade(&self.hold).await {
            Ok(()) => Ok(Guard::new(self.hold)),
            Err(error) => Err(ConvertError { error, guard: self }),
        }
    }
}

impl ReadGuard {
    /// Turns a read hold into a write hold if there is no other holder. It does not wait. One round
    /// trip.
    ///
    /// Waiters keep their queue positions. There is no upgrade that waits, because two readers that
    /// both wait for it would deadlock. To be sure that you can write, acquire the lock for writing
    /// from the start and [downgrade](WriteGuard::downgrade) it later. Or release it, acquire it
    /// for writing, and read the data again.
    ///
    /// The grant, the lease and the renewals stay the same. No writer has held the lock since the
    /// grant, so the token is larger than that of every earlier writer. A hold that was downgraded
    /// cannot be upgraded again, because the request that downgraded it may arrive late.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let reader = config.read().await?;
    /// // … it has to be changed …
    /// let writer = match reader.try_upgrade().await {
    ///     Ok(writer) => writer,
    ///     Err(failed) if failed.error().kind() == leasehold::ErrorKind::Contended => {
    ///         let (reader, _) = failed.into_parts();
    ///         reader.release().await?;
    ///         config.write().await? // … and read the data again: others may have written it
    ///     }
    ///     Err(failed) => return Err(failed.into()),
    /// };
    /// assert!(config.try_read().await.is_err());
    /// # drop(writer);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The error contains the guard. After `Unreachable`, the store may treat the hold as a write
    /// hold, which blocks other clients until it is upgraded again or released.
    /// - [`Contended`](crate::ErrorKind::Contended): the lock has other holders, or is in a
    ///   cooldown.
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported): the hold was downgraded before, or the
    ///   store cannot upgrade ([`Guarantees::upgrades`](crate::store::Guarantees::upgrades)).
    /// - [`Unreachable`](crate::ErrorKind::Unreachable): the store did not answer.
    pub async fn try_upgrade(self) -> Result<WriteGuard, ConvertError<Self>> {
        match convert::try_upgrade(&self.hold).await {
            Ok(()) => Ok(Guard::new(self.hold)),
            Err(error) => Err(ConvertError { error, guard: self }),
        }
    }
}

/// A downgrade or an upgrade that failed, with the guard, which still holds the lock unless the
/// lock was lost.
///
/// This type converts into [`Error`], so `?` reports the error and releases the lock.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let config = locks.rwlock("config");
/// let (reader, _other) = (config.read().await?, config.read().await?);
/// let failed = reader.try_upgrade().await.unwrap_err();
/// assert_eq!(failed.error().kind(), leasehold::ErrorKind::Contended);
/// let (reader, _error) = failed.into_parts();
/// assert!(reader.is_held());
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
pub struct ConvertError<G> {
    error: Error,
    guard: G,
}

impl<G> ConvertError<G> {
    /// Returns why the conversion failed.
    pub fn error(&self) -> &Error {
        &self.error
    }

    pub(crate) fn map<H>(self, wrap: impl FnOnce(G) -> H) -> ConvertError<H> {
        ConvertError { error: self.error, guard: wrap(self.guard) }
    }

    /// Returns the guard, with the type that it had before the call, and the error.
    pub fn into_parts(self) -> (G, Error) {
        (self.guard, self.error)
    }
}

impl<G> fmt::Display for ConvertError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<G: fmt::Debug> std::error::Error for ConvertError<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<G> From<ConvertError<G>> for Error {
    fn from(failed: ConvertError<G>) -> Self {
        failed.error
    }
}

impl<M> Deref for Guard<M> {
    type Target = Hold;

    fn deref(&self) -> &Hold {
        &self.hold
    }
}

impl<M> From<Guard<M>> for Hold {
    fn from(guard: Guard<M>) -> Self {
        guard.hold
    }
}

impl<M> fmt::Debug for Guard<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.fmt(f)
    }
}
