//! Locks for code without an async runtime: every call blocks its thread.
//!
//! ```
//! let locks = leasehold::blocking::connect("memory:")?;
//! let guard = locks.mutex("order:42").lock()?;
//! println!("held, token {}", guard.token());
//! guard.release()?;
//! # Ok::<(), leasehold::Error>(())
//! ```
//!
//! A thread cannot be stopped from outside. Work that is [run](Guard::run) under a lock must check
//! its guard between its steps, with [`is_held`](Hold::is_held) or [`ensure`](Hold::ensure). If the
//! lock was lost, the call returns an error when the work is done.
//!
//! Leases are renewed in the background while your thread works or blocks. In async code, use the
//! async types, because a blocked executor thread runs nothing else.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{ControlFlow, Deref};
use std::time::Duration;

use crate::client::background::Background;
use crate::client::lease::State;
use crate::lock::client::IntoLockRequest;
use crate::lock::events::LockEvent;
use crate::lock::fence::{Fence, shown};
use crate::lock::guard::{ConvertError, mode};
use crate::lock::hold::Released;
use crate::lock::once_per::OncePer;
use crate::lock::several::first_lost;
use crate::lock::wait_chain::WaitChain;
use crate::types::answer::{ClaimInfo, Evict, LockInfo};
use crate::types::claim::Kind;
use crate::types::doctor::Finding;
use crate::types::error::{Error, LostReason, Result};
use crate::types::name::Name;
use crate::types::sequencer::Sequencer;
use crate::types::token::{FencingToken, Token};
use crate::util::park;

/// Blocks until `work` is done, in the context of the background runtime. A runtime of the caller
/// could not deliver answers, because this call blocks its thread.
pub(crate) fn block_on<T>(background: &Background, work: impl Future<Output = T>) -> T {
    let _context = background.handle().enter();
    park::block_on(work)
}

/// A client of one store. The blocking form of [`crate::Client`].
///
/// ```
/// use std::time::Duration;
/// use leasehold::blocking::connect;
/// use leasehold::store::Evict;
/// let limit = Duration::from_secs(5);
///
/// let locks = connect("memory:")?;
/// locks.ping(limit)?;
/// let config = locks.rwlock("config");
/// assert_eq!(locks.election("leader").leader()?.map(|l| l.holder.host), None);
/// let (one, other) = (config.read()?, config.read()?); // together
/// drop((one, other));
/// locks.semaphore("convert", 3).acquire_many(2)?.release()?;
///
/// // Several locks, which all callers acquire in the same order.
/// let both = locks.lock_all_timeout(["stock:b", "stock:a"], limit)?;
/// assert!(locks.try_lock_all(["stock:a", "stock:c"]).is_err());
/// both.release()?;
///
/// // What operators see and do.
/// let guard = locks.mutex("order:42").lock()?;
/// assert_eq!(locks.check(&guard.sequencer())?.token, Some(guard.grant()));
/// assert_eq!(locks.inspect("order:42")?.expect("it is held").claims.len(), 1);
/// assert_eq!(locks.list("order:")?.len(), 1);
/// assert_eq!(locks.watch("order:42").next()?.claim.token, Some(guard.grant())); // then the changes
/// assert_eq!(locks.watch_all("order:").next()?.name.as_str(), "order:42");
/// assert_eq!(locks.evict("order:42", Evict::Holders)?, 1);
/// for finding in locks.diagnose()? {
///     println!("{finding:?}");
/// }
/// locks.clone().close_timeout(limit)?; // or close()
/// assert!(locks.close().is_ok());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client(crate::Client);

impl Client {
    /// Creates a mutex; see [`crate::Client::mutex`].
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.0.mutex(name))
    }

    /// Creates a read-write lock; see [`crate::Client::rwlock`].
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock(self.0.rwlock(name))
    }

    /// Creates a semaphore; see [`crate::Client::semaphore`].
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore(self.0.semaphore(name, permits))
    }

    /// Creates an election; see [`crate::Client::election`].
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election(self.0.election(name))
    }

    /// Watches one queue; see [`crate::Client::watch`].
    pub fn watch(&self, name: impl AsRef<str>) -> LockEvents {
        LockEvents(self.0.watch(name))
    }

    /// Watches all queues whose names begin with `prefix`; see [`crate::Client::watch_all`].
    pub fn watch_all(&self, prefix: impl AsRef<str>) -> LockEvents {
        LockEvents(self.0.watch_all(prefix))
    }

    /// Acquires several locks, and blocks until it holds all of them; see
    /// [`crate::Client::lock_all`].
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// let both = locks.lock_all(["stock:a", "stock:b"])?;
    /// assert!(both.is_held());
    /// both.release()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Client::lock_all`].
    pub fn lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
    ) -> Result<MultiGuard> {
        block_on(self.0.background(), self.0.lock_all(wanted)).map(MultiGuard::new)
    }

    /// Acquires several locks if all of them are free; see [`crate::Client::try_lock_all`].
    ///
    /// # Errors
    /// The same as [`crate::Client::try_lock_all`].
    pub fn try_lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
    ) -> Result<MultiGuard> {
        block_on(self.0.background(), self.0.try_lock_all(wanted)).map(MultiGuard::new)
    }

    /// Acquires several locks, and blocks for at most `limit`; see
    /// [`crate::Client::lock_all_timeout`].
    ///
    /// # Errors
    /// The same as [`crate::Client::lock_all_timeout`].
    pub fn lock_all_timeout(
        &self,
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
        limit: Duration,
    ) -> Result<MultiGuard> {
        block_on(self.0.background(), self.0.lock_all_timeout(wanted, limit)).map(MultiGuard::new)
    }

    /// Returns the holders and waiters of one lock; see [`crate::Client::inspect`].
    ///
    /// # Errors
    /// The same as [`crate::Client::inspect`].
    pub fn inspect(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        block_on(self.0.background(), self.0.inspect(name))
    }

    /// Returns the first holders of one lock; see [`crate::Client::holders`].
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// let guard = locks.mutex("order:42").lock()?;
    /// let lock = locks.holders("order:42")?.expect("it is held");
    /// assert_eq!(lock.holders().next().unwrap().token, Some(guard.grant()));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Client::holders`].
    pub fn holders(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        block_on(self.0.background(), self.0.holders(name))
    }

    /// Returns all locks in use whose names begin with `prefix`; see [`crate::Client::list`].
    ///
    /// # Errors
    /// The same as [`crate::Client::list`].
    pub fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        block_on(self.0.background(), self.0.list(prefix))
    }

    /// Explains why a lock is not available; see [`crate::Client::wait_chain`].
    ///
    /// ```
    /// # use leasehold::blocking;
    /// let locks = blocking::connect("memory:blocking-wait-chain")?;
    /// let _guard = locks.mutex("order:42").lock()?;
    /// assert!(locks.wait_chain("order:42")?.deadlock.is_empty());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Client::wait_chain`].
    pub fn wait_chain(&self, name: impl AsRef<str>) -> Result<WaitChain> {
        block_on(self.0.background(), self.0.wait_chain(name))
    }

    /// Evicts holders of a lock, and returns how many holds ended; see [`crate::Client::evict`].
    ///
    /// # Errors
    /// The same as [`crate::Client::evict`].
    pub fn evict(&self, name: impl AsRef<str>, which: Evict) -> Result<usize> {
        block_on(self.0.background(), self.0.evict(name, which))
    }

    /// Checks at the store that the hold of this sequencer still exists; see
    /// [`crate::Client::check`].
    ///
    /// # Errors
    /// The same as [`crate::Client::check`].
    pub fn check(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        block_on(self.0.background(), self.0.check(sequencer))
    }

    /// Checks the configuration of the store; see [`crate::Client::diagnose`].
    ///
    /// # Errors
    /// The same as [`crate::Client::diagnose`].
    pub fn diagnose(&self) -> Result<Vec<Finding>> {
        block_on(self.0.background(), self.0.diagnose())
    }

    /// Checks that the store answers within `limit`; see [`crate::Client::ping`].
    ///
    /// # Errors
    /// The same as [`crate::Client::ping`].
    pub fn ping(&self, limit: Duration) -> Result<()> {
        block_on(self.0.background(), self.0.ping(limit))
    }

    /// Releases all locks of this client, and disconnects; see [`crate::Client::close`].
    ///
    /// # Errors
    /// The same as [`crate::Client::close`].
    pub fn close(self) -> Result<()> {
        let locks = self.0.clone();
        block_on(locks.background(), self.0.close())
    }

    /// Closes the client, waiting at most `limit`; see [`crate::Client::close_timeout`].
    ///
    /// # Errors
    /// The same as [`crate::Client::close_timeout`].
    pub fn close_timeout(self, limit: Duration) -> Result<()> {
        let locks = self.0.clone();
        block_on(locks.background(), self.0.close_timeout(limit))
    }
}

impl From<crate::Client> for Client {
    fn from(locks: crate::Client) -> Self {
        locks.background().allow_blocking();
        Self(locks)
    }
}

/// Returns an error if the lock is already lost, so that no work begins.
fn begin(guard: &Hold) -> Result<()> {
    match guard.state() {
        State::Lost(reason) => {
            Err(Error::lost(reason).with_operation("run").with_lock(guard.name()))
        }
        _ => Ok(()),
    }
}

/// Returns the error of a release only if the lock was lost. All other errors are ignored, because
/// the work is done and the background thread retries the release.
fn end(released: Result<Released>) -> Result<()> {
    match released {
        Err(error) if error.lost_reason().is_some() => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Declares methods that do not block, and that call the methods of the async type.
macro_rules! same_as {
    ($type:literal: $($call:ident($($arg:ident: $of:ty),*) -> $returns:ty),+ $(,)?) => {
        $(
            #[doc = concat!("See [`", $type, "::", stringify!($call), "`](crate::", $type, "::",
                stringify!($call), "). No I/O.")]
            ///
            /// # Errors
            /// The errors of the async method, if it returns a `Result`.
            pub fn $call(&self, $($arg: $of),*) -> $returns {
                self.0.$call($($arg),*)
            }
        )+
    };
}

/// A held lock of any kind. The blocking form of [`crate::Hold`].
///
/// ```
/// # use std::time::Duration;
/// # let locks = leasehold::blocking::connect("memory:")?;
/// use leasehold::store::Evict;
/// let guard = locks.mutex("order:42").lock()?;
/// println!("{} is held, token {}", guard.name(), guard.token());
/// assert!(guard.renew()? > Duration::ZERO); // between steps, with `no_renewal`
/// let watch = guard.watch();
/// guard.release()?;
/// assert!(watch.ensure(Duration::ZERO).is_err());
///
/// let guard = locks.mutex("order:42").lock()?;
/// locks.evict("order:42", Evict::Holders)?;
/// println!("{}", guard.lost()); // blocks until the lock is lost
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when the hold is dropped"]
pub struct Hold(crate::Hold);

impl Hold {
    same_as!("Hold":
        name() -> &Name,
        kind() -> Kind,
        permits() -> u32,
        grant() -> Token,
        fencing_token() -> Option<FencingToken>,
        sequencer() -> Sequencer,
        replicas() -> Option<u32>,
        is_held() -> bool,
        remaining() -> Duration,
        state() -> State,
        ensure(min: Duration) -> Result<()>,
    );

    /// Renews the lease now; see [`crate::Hold::renew`].
    ///
    /// # Errors
    /// The same as [`crate::Hold::renew`].
    pub fn renew(&self) -> Result<Duration> {
        block_on(&self.0.core().background, self.0.renew())
    }

    /// Blocks until the lock is lost; see [`crate::Hold::lost`].
    pub fn lost(&self) -> LostReason {
        park::block_on(self.0.lost())
    }

    /// Returns a handle that reports the state of this hold; see [`crate::Hold::watch`].
    pub fn watch(&self) -> Watch {
        Watch(self.0.watch())
    }

    /// Releases the lock, and blocks until the store has answered; see [`crate::Hold::release`].
    ///
    /// # Errors
    /// The same as [`crate::Hold::release`].
    pub fn release(self) -> Result<Released> {
        let core = self.0.core();
        block_on(&core.background, self.0.release())
    }
}

/// A held mutex, or one term of an election. The blocking form of [`crate::MutexGuard`].
pub type MutexGuard = Guard<mode::Mutex>;

/// A read-write lock that is held for reading. The blocking form of [`crate::ReadGuard`].
pub type ReadGuard = Guard<mode::Read>;

/// A read-write lock that is held for writing. The blocking form of [`crate::WriteGuard`].
pub type WriteGuard = Guard<mode::Write>;

/// Held permits of a semaphore. The blocking form of [`crate::Permit`].
pub type Permit = Guard<mode::Permit>;

/// A held lock. The blocking form of [`crate::Guard`].
///
/// The guard dereferences to [`Hold`]. None of the guard's methods returns a future.
///
/// ```
/// # let locks = leasehold::blocking::connect("memory:")?;
/// let guard = locks.mutex("order:42").lock()?;
/// println!("held, token {}", guard.token());
/// guard.release()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// ```compile_fail,E0277
/// # async fn example(locks: leasehold::blocking::Client) -> leasehold::Result<()> {
/// locks.mutex("order:42").lock()?.lost().await; // it blocks: there is nothing to await
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard<M> {
    hold: Hold,
    mode: PhantomData<fn() -> M>,
}

impl<M> Guard<M> {
    fn new(guard: crate::Guard<M>) -> Self {
        Self { hold: Hold(guard.into()), mode: PhantomData }
    }

    fn into_async(self) -> crate::Guard<M> {
        crate::Guard::new(self.hold.0)
    }

    /// Releases the lock; see [`Hold::release`].
    ///
    /// # Errors
    /// The same as [`crate::Hold::release`].
    pub fn release(self) -> Result<Released> {
        self.hold.release()
    }

    /// Runs `work` under this hold, then releases the lock; see [`crate::Guard::run`].
    ///
    /// The work is not stopped when the lock is lost. It must check its guard between its steps.
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let guard = locks.mutex("ledger").try_lock()?;
    /// let total = guard.run(|guard| guard.token().get())?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guard::run`]. If the lock is already lost, `work` is not called.
    pub fn run<T>(self, work: impl FnOnce(&Self) -> T) -> Result<T> {
        begin(&self)?;
        let done = work(&self);
        end(self.release()).map(|()| done)
    }

    /// Runs `work`, which returns a `Result`, under this hold, then releases the lock; see
    /// [`crate::Guard::try_run`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let guard = locks.mutex("ledger").try_lock()?;
    /// let total: Result<u64, Error> = guard.try_run(|_| Ok("41".parse::<u64>()? + 1));
    /// assert_eq!(total.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guard::try_run`].
    pub fn try_run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run(work)?
    }
}

impl<M: mode::Exclusive> Guard<M> {
    /// Returns the fencing token; see [`crate::MutexGuard::token`].
    pub fn token(&self) -> FencingToken {
        FencingToken::of(self.grant())
    }
}

impl<M: mode::Exclusive> Fence for Guard<M> {
    fn fence(&self) -> Result<FencingToken> {
        shown(self.hold.0.lease())
    }
}

impl WriteGuard {
    /// Turns a write hold into a read hold; see [`crate::WriteGuard::downgrade`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let writer = locks.rwlock("config").write()?;
    /// // … write it …
    /// let reader = writer.downgrade()?;
    /// let other = locks.rwlock("config").read()?; // and no other client has written since
    /// # drop((reader, other));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::WriteGuard::downgrade`].
    pub fn downgrade(self) -> Result<ReadGuard, ConvertError<Self>> {
        let core = self.hold.0.core();
        convert(block_on(&core.background, self.into_async().downgrade()))
    }
}

impl ReadGuard {
    /// Turns a read hold into a write hold if there is no other holder; see
    /// [`crate::ReadGuard::try_upgrade`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let reader = locks.rwlock("config").read()?;
    /// let writer = reader.try_upgrade()?; // there is no other reader
    /// assert!(locks.rwlock("config").try_read().is_err());
    /// # drop(writer);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::ReadGuard::try_upgrade`].
    pub fn try_upgrade(self) -> Result<WriteGuard, ConvertError<Self>> {
        let core = self.hold.0.core();
        convert(block_on(&core.background, self.into_async().try_upgrade()))
    }
}

fn convert<M, N>(
    done: Result<crate::Guard<N>, ConvertError<crate::Guard<M>>>,
) -> Result<Guard<N>, ConvertError<Guard<M>>> {
    done.map(Guard::new).map_err(|failed| failed.map(Guard::new))
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

/// Several held locks. The blocking form of [`crate::MultiGuard`].
///
/// ```
/// # use std::time::Duration;
/// # let locks = leasehold::blocking::connect("memory:")?;
/// use leasehold::store::Evict;
/// let both = locks.lock_all(["stock:a", "stock:b"])?;
/// locks.evict("stock:b", Evict::Holders)?;
/// let (name, _reason) = both.lost(); // blocks until one is lost
/// assert_eq!(name.as_str(), "stock:b");
/// assert!(!both.is_held() && both.remaining() == Duration::ZERO);
/// assert!(both.ensure(Duration::ZERO).is_err());
/// assert!(both.get("stock:a").is_some_and(|hold| hold.is_held()));
/// assert_eq!(both.iter().count(), 2);
/// assert!(both.release().is_err()); // this reports it too
///
/// type Error = Box<dyn std::error::Error + Send + Sync>;
/// let both = locks.lock_all(["stock:a", "stock:b"])?;
/// let moved: Result<u64, Error> = both.try_run(|_both| Ok("42".parse()?));
/// assert_eq!(moved.unwrap(), 42);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the locks are released when the guards are dropped"]
pub struct MultiGuard {
    /// The holds, in the order in which their locks were acquired.
    holds: Vec<Hold>,
}

impl MultiGuard {
    fn new(all: crate::MultiGuard) -> Self {
        Self { holds: all.into_iter().map(Hold).collect() }
    }

    /// Returns the hold of the lock with this name.
    pub fn get(&self, name: impl AsRef<str>) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.name().as_str() == name.as_ref())
    }

    /// Returns an iterator over the holds, in the order in which they were acquired.
    pub fn iter(&self) -> std::slice::Iter<'_, Hold> {
        self.holds.iter()
    }

    /// Returns whether all locks are certainly held now; see [`crate::MultiGuard::is_held`].
    pub fn is_held(&self) -> bool {
        self.holds.iter().all(Hold::is_held)
    }

    /// Returns how much longer all locks are certainly held; see [`crate::MultiGuard::remaining`].
    pub fn remaining(&self) -> Duration {
        self.holds.iter().map(Hold::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Checks that each lock is certainly held for at least `min`; see
    /// [`crate::MultiGuard::ensure`].
    ///
    /// # Errors
    /// The same as [`crate::MultiGuard::ensure`].
    pub fn ensure(&self, min: Duration) -> Result<()> {
        self.holds.iter().try_for_each(|hold| hold.ensure(min))
    }

    /// Releases all locks; see [`crate::MultiGuard::release`].
    ///
    /// # Errors
    /// The same as [`crate::MultiGuard::release`].
    pub fn release(self) -> Result<Released> {
        let Some(core) = self.holds.first().map(|hold| hold.0.core()) else {
            return Ok(Released::Now);
        };
        let all = self.holds.into_iter().map(|hold| hold.0).collect();
        block_on(&core.background, crate::MultiGuard::new(all).release())
    }

    /// Runs `work` while all locks are held, then releases them; see [`crate::MultiGuard::run`].
    ///
    /// The work is not stopped when a lock is lost. It must check the guards between its steps.
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// let moved = locks.lock_all(["account:1", "account:2"])?.run(|_both| 42)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::MultiGuard::run`]. If a lock is already lost, `work` is not called.
    pub fn run<T>(self, work: impl FnOnce(&Self) -> T) -> Result<T> {
        self.holds.iter().try_for_each(begin)?;
        let done = work(&self);
        end(self.release()).map(|()| done)
    }

    /// Runs `work`, which returns a `Result`, while all locks are held, then releases them; see
    /// [`crate::MultiGuard::try_run`].
    ///
    /// # Errors
    /// The same as [`crate::MultiGuard::try_run`].
    pub fn try_run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run(work)?
    }

    /// Blocks until one of the locks is lost; see [`crate::MultiGuard::lost`].
    pub fn lost(&self) -> (Name, LostReason) {
        park::block_on(first_lost(self.holds.iter().map(|hold| &hold.0)))
    }
}

impl<'a> IntoIterator for &'a MultiGuard {
    type Item = &'a Hold;
    type IntoIter = std::slice::Iter<'a, Hold>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Iterates over the holds, each of which releases its lock independently.
impl IntoIterator for MultiGuard {
    type Item = Hold;
    type IntoIter = std::vec::IntoIter<Hold>;

    fn into_iter(self) -> Self::IntoIter {
        self.holds.into_iter()
    }
}

/// Reports the state of one hold. The blocking form of [`crate::Watch`]:
/// [`wait_until_held`](Self::wait_until_held) blocks the thread.
///
/// ```
/// # let locks = leasehold::blocking::connect("memory:")?;
/// let guard = locks.mutex("order:42").lock()?;
/// let mut watch = guard.watch();
/// for step in 1..=3 {
///     watch.wait_until_held()?; // returns while held, blocks while at risk, fails when lost
///     println!("step {step}");
/// }
/// guard.release()?;
/// assert_eq!(watch.changed(), leasehold::State::Released);
/// assert!(watch.wait_until_held().is_err());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Watch(crate::Watch);

impl Watch {
    same_as!("Watch":
        name() -> &Name,
        grant() -> Token,
        fencing_token() -> Option<FencingToken>,
        state() -> State,
        remaining() -> Duration,
        ensure(min: Duration) -> Result<()>,
    );

    /// Blocks while the hold is at risk; see [`crate::Watch::wait_until_held`].
    ///
    /// # Errors
    /// The same as [`crate::Watch::wait_until_held`].
    pub fn wait_until_held(&mut self) -> Result<()> {
        park::block_on(self.0.wait_until_held())
    }

    /// Blocks until the state differs from the last one seen; see [`crate::Watch::changed`].
    pub fn changed(&mut self) -> State {
        park::block_on(self.0.changed())
    }
}

macro_rules! blocking {
    ($name:ident: $($call:ident($($arg:ident: $type:ty),*) -> $guard:ident),+ $(,)?) => {
        #[doc = concat!("A lock for blocking code. The blocking form of [`crate::", stringify!($name), "`].")]
        #[derive(Clone, Debug)]
        #[must_use = "a lock does nothing until it is acquired"]
        pub struct $name(crate::$name);

        impl $name {
            /// Sets options, with the builder methods of the async lock.
            ///
            /// ```
            /// # use std::time::Duration;
            /// # let locks = leasehold::blocking::connect("memory:")?;
            /// let lock = locks.mutex("a").with(|m| m.lease(Duration::from_secs(30)));
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn with(self, options: impl FnOnce(crate::$name) -> crate::$name) -> Self {
                Self(options(self.0))
            }

            $(
                #[doc = concat!(
                    "Calls [`", stringify!($call), "`](crate::", stringify!($name), "::",
                    stringify!($call), "), and blocks until it is done."
                )]
                ///
                /// # Errors
                #[doc = concat!(
                    "The same as [`", stringify!($call), "`](crate::", stringify!($name), "::",
                    stringify!($call), ")."
                )]
                pub fn $call(&self, $($arg: $type),*) -> Result<$guard> {
                    let background = &self.0.core().background;
                    block_on(background, self.0.$call($($arg),*)).map(Guard::new)
                }
            )+
        }
    };
}

/// Declares the methods that run work under a lock and then release it.
macro_rules! runs {
    ($name:ident: $($run:ident, $try_run:ident: $take:ident -> $guard:ident),+) => {
        impl $name {
            $(
                #[doc = concat!(
                    "Acquires the lock, runs `work`, and releases the lock; see [`", stringify!($run),
                    "`](crate::", stringify!($name), "::", stringify!($run), ")."
                )]
                ///
                /// The work is not stopped when the lock is lost. It must check its guard between
                /// its steps.
                ///
                /// # Errors
                #[doc = concat!(
                    "The same as [`", stringify!($run), "`](crate::", stringify!($name), "::",
                    stringify!($run), ")."
                )]
                pub fn $run<T>(&self, work: impl FnOnce(&$guard) -> T) -> Result<T> {
                    self.$take()?.run(work)
                }

                #[doc = concat!(
                    "Acquires the lock, runs `work`, which returns a `Result`, and releases the lock in ",
                    "either case; see [`", stringify!($try_run), "`](crate::", stringify!($name), "::",
                    stringify!($try_run), ")."
                )]
                ///
                /// # Errors
                #[doc = concat!(
                    "The same as [`", stringify!($try_run), "`](crate::", stringify!($name), "::",
                    stringify!($try_run), ")."
                )]
                pub fn $try_run<T, E: From<Error>>(
                    &self,
                    work: impl FnOnce(&$guard) -> Result<T, E>,
                ) -> Result<T, E> {
                    self.$take()?.try_run(work)
                }
            )+
        }
    };
}

impl Mutex {
    /// Acquires the lock if no client has acquired it in the last `period`; see
    /// [`crate::Mutex::once_per`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let hour = Duration::from_secs(3600);
    /// if let Some(guard) = locks.mutex("report").once_per(hour)?.ran() {
    ///     guard.release()?; // done: no client does it again within the hour
    /// }
    /// assert!(locks.mutex("report").once_per(hour)?.ran().is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Mutex::once_per`].
    pub fn once_per(&self, period: Duration) -> Result<OncePer<MutexGuard>> {
        block_on(&self.0.core().background, self.0.once_per(period)).map(|ran| ran.map(Guard::new))
    }
}

/// A leader election. The blocking form of [`crate::Election`].
///
/// ```
/// use std::ops::ControlFlow;
/// use std::time::Duration;
/// # let locks = leasehold::blocking::connect("memory:")?;
/// let election = locks.election("leader").with(|e| e.lease(Duration::from_secs(10)));
/// let mut observer = election.observe();
/// assert!(observer.changed()?.is_none()); // the first call returns the current state
/// election.lead(|guard| {
///     let leader = election.leader().unwrap().expect("we lead");
///     assert_eq!(leader.token, Some(guard.grant()));
///     assert_eq!(election.leads(), Some(guard.token()));
///     ControlFlow::Break(())
/// })?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "an election does nothing until `lead` is called"]
pub struct Election(crate::Election);

impl Election {
    /// Sets options, with the builder methods of the async election.
    pub fn with(self, options: impl FnOnce(crate::Election) -> crate::Election) -> Self {
        Self(options(self.0))
    }

    /// Waits for leadership, runs `work` in this thread while this candidate leads, and waits again
    /// when leadership is lost; see [`crate::Election::lead`].
    ///
    /// A thread cannot be stopped from outside. So `work` must check its guard between its steps,
    /// with [`is_held`](Hold::is_held) or [`ensure`](Hold::ensure), and return
    /// [`Continue`](ControlFlow::Continue) when leadership is lost.
    ///
    /// ```
    /// # use std::ops::ControlFlow;
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// let term = locks.election("leader").lead(|guard| {
    ///     while guard.is_held() {
    ///         // … a step …
    ///         return ControlFlow::Break(guard.token()); // done for good
    ///     }
    ///     ControlFlow::Continue(()) // leadership was lost: wait for it again
    /// })?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Election::lead`].
    pub fn lead<T>(&self, work: impl FnMut(MutexGuard) -> ControlFlow<T>) -> Result<T> {
        let work = RefCell::new(work);
        // The work runs inside one poll of this future. So its result is returned even if the term
        // ends while the work runs.
        let term = |guard| async { (work.borrow_mut())(Guard::new(guard)) };
        block_on(self.0.background(), self.0.lead(term))
    }

    /// Returns the current leader according to the store; see [`crate::Election::leader`].
    ///
    /// # Errors
    /// The same as [`crate::Election::leader`].
    pub fn leader(&self) -> Result<Option<ClaimInfo>> {
        block_on(self.0.background(), self.0.leader())
    }

    /// Returns the term in which this candidate leads now; see [`crate::Election::leads`].
    pub fn leads(&self) -> Option<FencingToken> {
        self.0.leads()
    }

    /// Returns an observer of the leader; see [`crate::Election::observe`].
    pub fn observe(&self) -> Observer {
        Observer { election: self.0.clone(), observer: self.0.observe() }
    }
}

/// Reports changes of leadership. The blocking form of [`crate::Observer`].
///
/// ```
/// # let locks = leasehold::blocking::connect("memory:")?;
/// let mut observer = locks.election("leader").observe();
/// match observer.changed()? {
///     Some(leader) => println!("{} leads", leader.holder),
///     None => println!("there is no leader"),
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Observer {
    election: crate::Election,
    observer: crate::Observer,
}

impl Observer {
    /// Blocks until the leader changes; see [`crate::Observer::changed`].
    ///
    /// # Errors
    /// The same as [`crate::Observer::changed`].
    pub fn changed(&mut self) -> Result<Option<ClaimInfo>> {
        block_on(self.election.background(), self.observer.changed())
    }
}

/// Reports changes in queues. The blocking form of [`crate::LockEvents`].
///
/// ```
/// # use std::time::Duration;
/// # let locks = leasehold::blocking::connect("memory:")?;
/// let _guard = locks.mutex("deploy:web").lock()?;
/// // One lock, or all locks with this prefix.
/// for mut changes in [locks.watch("deploy:web"), locks.watch_all("deploy:")] {
///     changes = changes.every(Duration::from_secs(2)); // the longest pause between polls
///     assert_eq!(changes.next()?.name.as_str(), "deploy:web"); // the first call returns the current state
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LockEvents(crate::LockEvents);

impl LockEvents {
    /// Sets the longest pause between two polls; see [`crate::LockEvents::every`].
    #[must_use]
    pub fn every(self, pause: Duration) -> Self {
        Self(self.0.every(pause))
    }

    /// Blocks until something changes; see [`crate::LockEvents::next`].
    ///
    /// # Errors
    /// The same as [`crate::LockEvents::next`].
    #[allow(clippy::should_implement_trait, reason = "it has no end, and an error does not end it")]
    pub fn next(&mut self) -> Result<LockEvent> {
        let core = self.0.core().clone();
        block_on(&core.background, self.0.next())
    }
}

blocking!(Mutex:
    lock() -> MutexGuard,
    try_lock() -> MutexGuard,
    lock_timeout(limit: Duration) -> MutexGuard,
);
blocking!(RwLock:
    read() -> ReadGuard,
    try_read() -> ReadGuard,
    read_timeout(limit: Duration) -> ReadGuard,
    write() -> WriteGuard,
    try_write() -> WriteGuard,
    write_timeout(limit: Duration) -> WriteGuard,
);
blocking!(Semaphore:
    acquire() -> Permit,
    try_acquire() -> Permit,
    acquire_timeout(limit: Duration) -> Permit,
    acquire_many(permits: u32) -> Permit,
    try_acquire_many(permits: u32) -> Permit,
    acquire_many_timeout(permits: u32, limit: Duration) -> Permit,
);
runs!(Mutex: run, try_run: lock -> MutexGuard);
runs!(RwLock: run_read, try_run_read: read -> ReadGuard, run_write, try_run_write: write -> WriteGuard);
runs!(Semaphore: run, try_run: acquire -> Permit);
