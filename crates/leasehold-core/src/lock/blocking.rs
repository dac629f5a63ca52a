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
//! A thread cannot be stopped from outside. Work that is [run](Guard::run) under a lock must check its guard
//! between its steps, with [`is_held`](crate::Guard::is_held) or [`ensure`](crate::Guard::ensure). If the lock
//! was lost, the call returns an error when the work is done.
//!
//! Leases are renewed in the background while your thread works or blocks. In async code, use the async
//! types: a blocked executor thread runs nothing else.

use std::cell::RefCell;
use std::ops::{ControlFlow, Deref};
use std::time::Duration;

use crate::base::park;
use crate::client::background::Background;
use crate::client::lease::State;
use crate::lock::changes::Change;
use crate::lock::guard::Released;
use crate::lock::leasehold::IntoWanted;
use crate::lock::once_per::OncePer;
use crate::words::answer::{ClaimInfo, Evict, LockInfo};
use crate::words::doctor::Finding;
use crate::words::error::{Error, LostReason, Result};
use crate::words::name::Name;
use crate::words::sequencer::Sequencer;
use crate::words::token::Token;

/// Blocks in the context of the background thread: a runtime of the caller's, whose thread we
/// block, could answer nothing.
pub(crate) fn block_on<T>(background: &Background, work: impl Future<Output = T>) -> T {
    let _context = background.handle().enter();
    park::block_on(work)
}

/// A client of one store. The blocking form of [`crate::Leasehold`].
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
/// assert_eq!(locks.check(&guard.sequencer())?.token, Some(guard.token()));
/// assert_eq!(locks.read("order:42")?.expect("it is held").claims.len(), 1);
/// assert_eq!(locks.list("order:")?.len(), 1);
/// assert_eq!(locks.watch("order:42").next()?.claim.token, Some(guard.token())); // then the changes
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
pub struct Leasehold(crate::Leasehold);

impl Leasehold {
    /// Creates a mutex; see [`crate::Leasehold::mutex`].
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.0.mutex(name))
    }

    /// Creates a read-write lock; see [`crate::Leasehold::rwlock`].
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock(self.0.rwlock(name))
    }

    /// Creates a semaphore; see [`crate::Leasehold::semaphore`].
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore(self.0.semaphore(name, permits))
    }

    /// Creates an election; see [`crate::Leasehold::election`].
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election(self.0.election(name))
    }

    /// Watches one queue; see [`crate::Leasehold::watch`].
    pub fn watch(&self, name: impl AsRef<str>) -> Changes {
        Changes(self.0.watch(name))
    }

    /// Watches all queues whose names begin with `prefix`; see [`crate::Leasehold::watch_all`].
    pub fn watch_all(&self, prefix: impl AsRef<str>) -> Changes {
        Changes(self.0.watch_all(prefix))
    }

    /// Acquires several locks, and blocks until it holds all of them; see [`crate::Leasehold::lock_all`].
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
    /// The same as [`crate::Leasehold::lock_all`].
    pub fn lock_all(&self, wanted: impl IntoIterator<Item = impl IntoWanted>) -> Result<Guards> {
        block_on(self.0.background(), self.0.lock_all(wanted)).map(Guards)
    }

    /// Acquires several locks if all of them are free; see [`crate::Leasehold::try_lock_all`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::try_lock_all`].
    pub fn try_lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
    ) -> Result<Guards> {
        block_on(self.0.background(), self.0.try_lock_all(wanted)).map(Guards)
    }

    /// Acquires several locks, and blocks for at most `limit`; see [`crate::Leasehold::lock_all_timeout`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::lock_all_timeout`].
    pub fn lock_all_timeout(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
        limit: Duration,
    ) -> Result<Guards> {
        block_on(self.0.background(), self.0.lock_all_timeout(wanted, limit)).map(Guards)
    }

    /// Returns the holders and waiters of one lock; see [`crate::Leasehold::read`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::read`].
    pub fn read(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        block_on(self.0.background(), self.0.read(name))
    }

    /// Returns the first holders of one lock; see [`crate::Leasehold::holders`].
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// let guard = locks.mutex("order:42").lock()?;
    /// let lock = locks.holders("order:42")?.expect("it is held");
    /// assert_eq!(lock.holders().next().unwrap().token, Some(guard.token()));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::holders`].
    pub fn holders(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        block_on(self.0.background(), self.0.holders(name))
    }

    /// Returns all locks in use whose names begin with `prefix`; see [`crate::Leasehold::list`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::list`].
    pub fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        block_on(self.0.background(), self.0.list(prefix))
    }

    /// Evicts holders of a lock, and returns how many holds ended; see [`crate::Leasehold::evict`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::evict`].
    pub fn evict(&self, name: impl AsRef<str>, which: Evict) -> Result<usize> {
        block_on(self.0.background(), self.0.evict(name, which))
    }

    /// Checks at the store that the hold of this sequencer is still held; see [`crate::Leasehold::check`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::check`].
    pub fn check(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        block_on(self.0.background(), self.0.check(sequencer))
    }

    /// Checks how the store is set up; see [`crate::Leasehold::diagnose`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::diagnose`].
    pub fn diagnose(&self) -> Result<Vec<Finding>> {
        block_on(self.0.background(), self.0.diagnose())
    }

    /// Checks that the store answers within `limit`; see [`crate::Leasehold::ping`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::ping`].
    pub fn ping(&self, limit: Duration) -> Result<()> {
        block_on(self.0.background(), self.0.ping(limit))
    }

    /// Releases all locks of this client, and disconnects; see [`crate::Leasehold::close`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::close`].
    pub fn close(self) -> Result<()> {
        let locks = self.0.clone();
        block_on(locks.background(), self.0.close())
    }

    /// Closes the client, and returns after `limit` at the latest; see [`crate::Leasehold::close_timeout`].
    ///
    /// # Errors
    /// The same as [`crate::Leasehold::close_timeout`].
    pub fn close_timeout(self, limit: Duration) -> Result<()> {
        let locks = self.0.clone();
        block_on(locks.background(), self.0.close_timeout(limit))
    }
}

impl From<crate::Leasehold> for Leasehold {
    fn from(locks: crate::Leasehold) -> Self {
        Self(locks)
    }
}

/// Under a lock that is lost already no work begins.
fn begin(guard: &crate::Guard) -> Result<()> {
    match guard.state() {
        State::Lost(reason) => Err(Error::lost(reason).during("run").on(guard.name())),
        _ => Ok(()),
    }
}

/// What a release says of work that is done: of a loss. An unheard release undoes nothing: the background
/// thread goes on with it.
fn end(released: Result<Released>) -> Result<()> {
    match released {
        Err(error) if error.lost_reason().is_some() => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// A held lock. It has all methods of [`crate::Guard`], and those that wait block the thread.
///
/// ```
/// # use std::time::Duration;
/// # let locks = leasehold::blocking::connect("memory:")?;
/// use leasehold::store::Evict;
/// let guard = locks.mutex("order:42").lock()?;
/// println!("held, token {}", guard.token()); // a method of the async guard
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
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard(crate::Guard);

impl Guard {
    /// Releases the lock, and blocks until the store has answered; see [`crate::Guard::release`].
    ///
    /// # Errors
    /// The same as [`crate::Guard::release`].
    pub fn release(self) -> Result<Released> {
        let core = self.0.core();
        block_on(&core.background, self.0.release())
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

    /// Renews the lease now; see [`crate::Guard::renew`].
    ///
    /// # Errors
    /// The same as [`crate::Guard::renew`].
    pub fn renew(&self) -> Result<Duration> {
        let core = self.0.core();
        block_on(&core.background, self.0.renew())
    }

    /// Turns a write hold into a read hold; see [`crate::Guard::downgrade`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let guard = locks.rwlock("config").write()?;
    /// // … write it …
    /// guard.downgrade()?;
    /// let other = locks.rwlock("config").read()?; // and no other client has written since
    /// # drop(other);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guard::downgrade`].
    pub fn downgrade(&self) -> Result<()> {
        let core = self.0.core();
        block_on(&core.background, self.0.downgrade())
    }

    /// Turns a read hold into a write hold if there is no other holder; see [`crate::Guard::try_upgrade`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let guard = locks.rwlock("config").read()?;
    /// guard.try_upgrade()?; // there is no other reader
    /// assert!(locks.rwlock("config").try_read().is_err());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guard::try_upgrade`].
    pub fn try_upgrade(&self) -> Result<()> {
        let core = self.0.core();
        block_on(&core.background, self.0.try_upgrade())
    }

    /// Blocks until the lock is lost; see [`crate::Guard::lost`].
    pub fn lost(&self) -> LostReason {
        park::block_on(self.0.lost())
    }

    /// Returns a handle that reports the state of this hold; see [`crate::Guard::watch`].
    pub fn watch(&self) -> Watch {
        Watch(self.0.watch())
    }
}

impl Deref for Guard {
    type Target = crate::Guard;

    fn deref(&self) -> &crate::Guard {
        &self.0
    }
}

/// Several held locks. It has all methods of [`crate::Guards`], and those that wait block the thread.
///
/// ```
/// # let locks = leasehold::blocking::connect("memory:")?;
/// use leasehold::store::Evict;
/// let both = locks.lock_all(["stock:a", "stock:b"])?;
/// locks.evict("stock:b", Evict::Holders)?;
/// let (name, _reason) = both.lost(); // blocks until one is lost
/// assert_eq!(name.as_str(), "stock:b");
/// assert!(both.release().is_err()); // this reports it too
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the locks are released when the guards are dropped"]
pub struct Guards(crate::Guards);

impl Guards {
    /// Releases all locks; see [`crate::Guards::release`].
    ///
    /// # Errors
    /// The same as [`crate::Guards::release`].
    pub fn release(self) -> Result<Released> {
        match self.0.core() {
            Some(core) => block_on(&core.background, self.0.release()),
            None => Ok(Released::Now),
        }
    }

    /// Runs `work` while all locks are held, then releases them; see [`crate::Guards::run`].
    ///
    /// The work is not stopped when a lock is lost. It must check the guards between its steps.
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// let both = locks.lock_all(["account:1", "account:2"])?;
    /// let moved = both.run(|both| both.is_held())?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guards::run`]. If a lock is already lost, `work` is not called.
    pub fn run<T>(self, work: impl FnOnce(&Self) -> T) -> Result<T> {
        self.0.iter().try_for_each(begin)?;
        let done = work(&self);
        end(self.release()).map(|()| done)
    }

    /// Runs `work`, which returns a `Result`, while all locks are held, then releases them; see
    /// [`crate::Guards::try_run`].
    ///
    /// ```
    /// # let locks = leasehold::blocking::connect("memory:")?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let both = locks.lock_all(["account:1", "account:2"])?;
    /// let moved: Result<u64, Error> = both.try_run(|_| Ok("42".parse()?));
    /// assert_eq!(moved.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`crate::Guards::try_run`].
    pub fn try_run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run(work)?
    }

    /// Blocks until one of the locks is lost; see [`crate::Guards::lost`].
    pub fn lost(&self) -> (Name, LostReason) {
        park::block_on(self.0.lost())
    }
}

impl Deref for Guards {
    type Target = crate::Guards;

    fn deref(&self) -> &crate::Guards {
        &self.0
    }
}

/// Reports the state of one hold. It has all methods of [`crate::Watch`], and
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
/// assert!(watch.wait_until_held().is_err());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Watch(crate::Watch);

impl Watch {
    /// Blocks while the hold is at risk; see [`crate::Watch::wait_until_held`].
    ///
    /// # Errors
    /// The same as [`crate::Watch::wait_until_held`].
    pub fn wait_until_held(&mut self) -> Result<()> {
        park::block_on(self.0.wait_until_held())
    }
}

impl Deref for Watch {
    type Target = crate::Watch;

    fn deref(&self) -> &crate::Watch {
        &self.0
    }
}

/// One lock type of the blocking face: the options of the async one, and its calls, blocking.
macro_rules! blocking {
    ($name:ident: $($call:ident($($arg:ident: $type:ty),*)),+) => {
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
                pub fn $call(&self, $($arg: $type),*) -> Result<Guard> {
                    let background = &self.0.core().background;
                    block_on(background, self.0.$call($($arg),*)).map(Guard)
                }
            )+
        }
    };
}

/// The calls that run work under a lock, and give it back.
macro_rules! runs {
    ($name:ident: $($run:ident, $try_run:ident: $take:ident),+) => {
        impl $name {
            $(
                #[doc = concat!(
                    "Acquires the lock, runs `work`, and releases the lock; see [`", stringify!($run),
                    "`](crate::", stringify!($name), "::", stringify!($run), ")."
                )]
                ///
                /// The work is not stopped when the lock is lost. It must check its guard between its
                /// steps.
                ///
                /// # Errors
                #[doc = concat!(
                    "The same as [`", stringify!($run), "`](crate::", stringify!($name), "::",
                    stringify!($run), ")."
                )]
                pub fn $run<T>(&self, work: impl FnOnce(&Guard) -> T) -> Result<T> {
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
                    work: impl FnOnce(&Guard) -> Result<T, E>,
                ) -> Result<T, E> {
                    self.$take()?.try_run(work)
                }
            )+
        }
    };
}

impl Mutex {
    /// Acquires the lock if no client has acquired it in the last `period`; see [`crate::Mutex::once_per`].
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
    pub fn once_per(&self, period: Duration) -> Result<OncePer<Guard>> {
        block_on(&self.0.core().background, self.0.once_per(period)).map(|ran| ran.map(Guard))
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
///     assert_eq!(leader.token, Some(guard.token()));
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

    /// Waits for leadership, runs `work` in this thread while it leads, and waits again when leadership is
    /// lost; see [`crate::Election::lead`].
    ///
    /// A thread cannot be stopped from outside. So `work` must check its guard between its steps, with
    /// [`is_held`](crate::Guard::is_held) or [`ensure`](crate::Guard::ensure), and return
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
    pub fn lead<T>(&self, work: impl FnMut(Guard) -> ControlFlow<T>) -> Result<T> {
        let work = RefCell::new(work);
        // It works when it is polled, and not before: what it says then counts, whatever became of its term.
        let term = |guard| async { (work.borrow_mut())(Guard(guard)) };
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
    pub fn leads(&self) -> Option<Token> {
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

/// Reports changes in queues. The blocking form of [`crate::Changes`].
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
pub struct Changes(crate::Changes);

impl Changes {
    /// Sets the longest pause between two polls; see [`crate::Changes::every`].
    #[must_use]
    pub fn every(self, pause: Duration) -> Self {
        Self(self.0.every(pause))
    }

    /// Blocks until something changes; see [`crate::Changes::next`].
    ///
    /// # Errors
    /// The same as [`crate::Changes::next`].
    #[allow(clippy::should_implement_trait, reason = "it has no end, and an error does not end it")]
    pub fn next(&mut self) -> Result<Change> {
        let core = self.0.core().clone();
        block_on(&core.background, self.0.next())
    }
}

blocking!(Mutex: lock(), try_lock(), lock_timeout(limit: Duration));
blocking!(RwLock:
    read(), try_read(), read_timeout(limit: Duration),
    write(), try_write(), write_timeout(limit: Duration));
blocking!(Semaphore:
    acquire(), try_acquire(), acquire_timeout(limit: Duration),
    acquire_many(permits: u32), try_acquire_many(permits: u32),
    acquire_many_timeout(permits: u32, limit: Duration));
runs!(Mutex: run, try_run: lock);
runs!(RwLock: run_read, try_run_read: read, run_write, try_run_write: write);
runs!(Semaphore: run, try_run: acquire);
