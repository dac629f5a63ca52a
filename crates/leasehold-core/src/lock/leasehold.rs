//! A client of one store, and the kinds of lock it hands out.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::acquire::LockHandle;
use super::changes::{Changes, list};
use super::election::Election;
use super::mutex::Mutex;
use super::rwlock::RwLock;
use super::semaphore::Semaphore;
use super::several::{Guards, acquire_all};
use super::wait::Wait;
use super::wanted::Wanted;
use crate::base::clock::Moment;
use crate::client::background::Background;
use crate::client::core::Core;
use crate::store::{Guarantees, Store};
use crate::words::answer::{ClaimInfo, Evict, LockInfo, Standing};
use crate::words::claim::{Kind, MAX_READERS};
use crate::words::doctor::Finding;
use crate::words::error::{Error, ErrorKind, LostReason, Result};
use crate::words::name::Name;
use crate::words::sequencer::{Sequencer, Side};

/// How long [`Leasehold::close`] waits for goodbyes: far less than for answers that matter, since
/// one silent connection costs all of it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A client of one store. Clones are the same client.
///
/// The client has its own thread for renewals. The thread ends when the client and all its guards
/// are gone and all pending releases are done.
///
/// **At the end of the program.** A guard that is dropped is released in the background, but the
/// end of a process ends its threads too. So dropping the last handle (the client, a lock or a
/// guard) blocks for up to one second while pending releases are sent. Call [`close`](Self::close)
/// or [`close_timeout`](Self::close_timeout) to get the result or to wait longer. Call one of them
/// too if the client is never dropped (a `static`, or `process::exit`). A lock that is not released
/// is free when its lease expires.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let locks = leasehold::connect("memory:").await?;
/// let guard = locks.mutex("order:42").lock().await?;
/// println!("held, token {}", guard.token());
/// guard.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Leasehold {
    core: Arc<Core>,
}

impl Leasehold {
    pub(super) fn new(core: Core) -> Self {
        Self { core: Arc::new(core) }
    }

    /// Creates a mutex, which has one holder at a time. No I/O. An invalid name is reported when
    /// the lock is acquired.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("order:42").lock().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1))
    }

    /// Creates a read-write lock, which has any number of readers or one writer, in the order of
    /// their requests. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _reader = locks.rwlock("config").read().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(LockHandle::new(&self.core, name.as_ref(), Kind::RwLock, MAX_READERS))
    }

    /// Creates a semaphore with this many permits. No I/O. All clients must use the same number for
    /// one name.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _permit = locks.semaphore("convert", 3).acquire().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(LockHandle::new(&self.core, name.as_ref(), Kind::Semaphore, permits))
    }

    /// Creates an election, in which one of all candidates with this name leads. It uses the mutex
    /// of this name. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use std::ops::ControlFlow;
    /// let lead = |term: leasehold::Guard| async move { ControlFlow::Break(term.token()) };
    /// let term = locks.election("leader").lead(lead).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1))
    }

    /// Watches one queue, and reports claims that begin to wait, are granted or end. It takes no
    /// locks. Each poll is one request.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy").label("release 7").lock().await?;
    /// let change = locks.watch("deploy").next().await?; // the first call returns the current state
    /// assert_eq!(change.claim.holder.label, "release 7");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch(&self, name: impl AsRef<str>) -> Changes {
        Changes::of(&self.core, name.as_ref())
    }

    /// Watches all queues whose names begin with `prefix`; see [`watch`](Self::watch).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy:web").lock().await?;
    /// let change = locks.watch_all("deploy:").next().await?;
    /// assert_eq!(change.name.as_str(), "deploy:web");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch_all(&self, prefix: impl AsRef<str>) -> Changes {
        Changes::of_all(&self.core, prefix.as_ref())
    }

    /// Acquires several locks, and waits until it holds all of them.
    ///
    /// A lock is given as a name (a mutex with default options), as a [`Mutex`] with options of
    /// your own, or as a request for another kind of lock ([`Wanted`](crate::Wanted)). A lock that
    /// is given twice is acquired once.
    ///
    /// Taking free locks costs the time of one round trip, with one request per lock. (In SQL
    /// stores, as many requests are sent at once as the client has connections.) From the first
    /// lock that is not free, the locks are acquired one after another, in order of their names. So
    /// callers that want some of the same locks cannot deadlock. While the call waits for a lock,
    /// it holds those before it and none of those after it.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let stock = locks.lock_all(["stock:a", "stock:b"]).await?;
    /// stock.release().await?;
    /// // Different kinds of locks, with options:
    /// let all = [
    ///     locks.rwlock("config").to_read(),
    ///     locks.semaphore("convert", 3).to_acquire(2),
    ///     locks.mutex("order:42").lease(Duration::from_secs(60)).into(),
    /// ];
    /// let all = locks.lock_all(all).await?;
    /// assert!(all.is_held());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. All locks acquired so
    /// far are released.
    ///
    /// # Errors
    /// The call holds none of the locks after an error. [`name`](Error::name) returns the lock that
    /// failed.
    /// - [`Config`](ErrorKind::Config): one lock is requested in two different ways.
    /// - All others as for [`Mutex::lock`].
    pub async fn lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
    ) -> Result<Guards> {
        self.take_all("lock_all", wanted, Wait::Forever).await
    }

    /// Acquires several locks if all of them are free, and does not wait. See
    /// [`lock_all`](Self::lock_all).
    ///
    /// If two clients try at the same moment, both may fail.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _held = locks.mutex("b").lock().await?;
    /// let error = locks.try_lock_all(["a", "b"]).await.unwrap_err();
    /// assert_eq!(error.name().unwrap().as_str(), "b");
    /// assert!(locks.mutex("a").try_lock().await.is_ok()); // no lock is held
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. All locks acquired so
    /// far are released.
    ///
    /// # Errors
    /// The same as [`Mutex::try_lock`] and [`lock_all`](Self::lock_all).
    pub async fn try_lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
    ) -> Result<Guards> {
        self.take_all("try_lock_all", wanted, Wait::Try).await
    }

    /// Acquires several locks, and waits for at most `limit` until it holds all of them. See
    /// [`lock_all`](Self::lock_all).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let limit = std::time::Duration::from_secs(2);
    /// let _both = locks.lock_all_timeout(["stock:a", "stock:b"], limit).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. All locks acquired so
    /// far are released.
    ///
    /// # Errors
    /// The same as [`Mutex::lock_timeout`] and [`lock_all`](Self::lock_all).
    pub async fn lock_all_timeout(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
        limit: Duration,
    ) -> Result<Guards> {
        self.take_all("lock_all", wanted, Wait::For(limit)).await
    }

    async fn take_all(
        &self,
        operation: &'static str,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
        wait: Wait,
    ) -> Result<Guards> {
        let wanted: Vec<Wanted> = wanted.into_iter().map(|one| one.into_wanted(self)).collect();
        acquire_all(&self.core, operation, wanted, wait).await
    }

    /// Returns the holders and waiters of one lock, or `None` if there are none. One round trip.
    ///
    /// Use it for diagnostics only, because the snapshot may be stale.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("order:42").label("the nightly job").lock().await?;
    /// if let Some(lock) = locks.read("order:42").await? {
    ///     for claim in lock.holders() {
    ///         println!("{} holds it for {:?}", claim.holder, claim.since);
    ///     }
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`InvalidName`](ErrorKind::InvalidName): the name is invalid.
    /// - Any error of the store, such as [`Unreachable`](ErrorKind::Unreachable) or
    ///   [`Denied`](ErrorKind::Denied).
    pub async fn read(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1).read().await
    }

    /// Returns at least the first 100 holders of one lock, or `None` if it is free.
    ///
    /// The result contains a cooldown too, but waiters may be left out. Use it instead of
    /// [`read`](Self::read) if many clients poll a lock with a long queue: Redis, etcd and
    /// ZooKeeper answer it without reading the queue.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("order:42").label("the nightly job").lock().await?;
    /// let lock = locks.holders("order:42").await?.expect("it is held");
    /// assert_eq!(lock.holders().next().unwrap().holder.label, "the nightly job");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// The same as [`read`](Self::read).
    pub async fn holders(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1).holders().await
    }

    /// Returns all locks in use whose names begin with `prefix`, sorted by name.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("order:42").lock().await?;
    /// let in_use = locks.list("order:").await?;
    /// assert_eq!(in_use[0].name.as_str(), "order:42");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// Any error of the store, such as [`Unreachable`](ErrorKind::Unreachable) or
    /// [`Denied`](ErrorKind::Denied).
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        list(&self.core, prefix).await
    }

    /// Evicts holders of a lock, and returns how many holds ended. For operators.
    ///
    /// The evicted guards become `Lost` immediately if the store [notifies](Guarantees::evicted)
    /// evicted holders, otherwise at their next renewal. The next holder may have begun *before*
    /// that, so only resources that check tokens are safe.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::store::Evict;
    /// let guard = locks.mutex("stuck").lock().await?;
    /// assert_eq!(locks.evict("stuck", Evict::Token(guard.token())).await?, 1);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. Repeating it is safe with
    /// [`Evict::Token`]. With [`Evict::Holders`], the second call could evict the next holder.
    ///
    /// # Errors
    /// - [`InvalidName`](ErrorKind::InvalidName): the name is invalid.
    /// - Any error of the store, such as [`Unreachable`](ErrorKind::Unreachable) or
    ///   [`Denied`](ErrorKind::Denied).
    pub async fn evict(&self, name: impl AsRef<str>, which: Evict) -> Result<usize> {
        let name = Name::new(name)?;
        let evicted = async { self.core.ours()?.evict(&name, which).await };
        let evicted = self.core.background.with_runtime(pin!(evicted)).await;
        evicted.map_err(|e| e.during("evict").on(&name).at(self.url()))
    }

    /// Checks at the store that the hold of this sequencer is still held, and returns its claim.
    /// One round trip.
    ///
    /// `Ok` means that the lock was held when the store answered. It may be lost a moment later.
    /// [`sequencer`](crate::sequencer) explains what this protects.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// let sequencer = guard.sequencer();
    /// assert_eq!(locks.check(&sequencer).await?.token, Some(guard.token()));
    /// guard.release().await?;
    /// assert!(locks.check(&sequencer).await.is_err());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock is no longer held with this token, or never was.
    /// - [`Mismatch`](ErrorKind::Mismatch): the sequencer is from another store, or its name is in
    ///   use as another kind of lock.
    /// - [`Unreachable`](ErrorKind::Unreachable): the store did not answer, so the state of the
    ///   hold is unknown.
    pub async fn check(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        let checked = self.check_here(sequencer).await;
        checked.map_err(|e| e.during("check").on(sequencer.name()).at(self.url()))
    }

    async fn check_here(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        let core = &self.core;
        if sequencer.store() != core.identity {
            let what = format!(
                "the sequencer is from the store {:?}, but this is the store {:?}",
                sequencer.store(),
                core.identity
            );
            let hint = "check it with a client of its store; if both are the same store, set the same \
                        Builder::identity in both clients";
            return Err(Error::new(ErrorKind::Mismatch, what).with_hint(hint));
        }
        let store = core.ours()?;
        let token = Some(sequencer.token());
        let read = store.holders(sequencer.name(), token);
        let read = core.background.with_runtime(pin!(read)).await?;
        let Some(info) = read else { return Err(Error::lost(LostReason::Gone)) };
        let same = |c: &&ClaimInfo| {
            c.token == Some(sequencer.token())
                && c.standing == Standing::Holding
                && Side::of(info.kind, c.weight) == sequencer.side()
        };
        match info.claims.iter().find(same) {
            Some(claim) => Ok(claim.clone()),
            None if info.kind != sequencer.kind() => {
                let what = format!(
                    "the sequencer is for a {}, but the name is now in use as a {}: the hold has ended",
                    sequencer.kind(),
                    info.kind
                );
                Err(Error::new(ErrorKind::Mismatch, what))
            }
            None => Err(Error::lost(LostReason::Gone)),
        }
    }

    /// Checks how the store is set up, and returns findings, worst first. A finding is a setting
    /// that breaks or weakens what this kind of store can guarantee.
    ///
    /// [`guarantees`](Self::guarantees) returns what the store guarantees in its present
    /// configuration.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// for finding in locks.diagnose().await? {
    ///     println!("{finding:?}");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// Any error of the store. The state of the store is unknown then.
    pub async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = async { self.core.ours()?.diagnose().await };
        let asked = self.core.background.with_runtime(pin!(asked)).await;
        let mut findings = asked.map_err(|e| e.during("diagnose").at(self.url()))?;
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(findings)
    }

    /// Checks that the store answers within `limit`. One round trip, for readiness probes.
    ///
    /// It only reads. Whether the store can also be written is shown by
    /// [`diagnose`](Self::diagnose) and by the first lock.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let ready = locks.ping(Duration::from_secs(1)).await.is_ok();
    /// # assert!(ready); Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Unreachable`](ErrorKind::Unreachable): the store did not answer within `limit`.
    /// - Any other error of the store.
    pub async fn ping(&self, limit: Duration) -> Result<()> {
        // A name that every store takes: Redis keeps those that begin with "leasehold:" for itself.
        let probe = self.read("leasehold-ping");
        match self.core.background.within(|| limit, probe).await {
            Some(read) => read.map(drop).map_err(|e| e.during("ping")),
            None => Err(Error::no_reply(limit).during("ping").at(self.url())),
        }
    }

    /// Returns the identity of the store, which its sequencers contain. All clients with the same
    /// identity share their locks.
    ///
    /// It is derived from the store's address without credentials (for a store on this machine,
    /// from the directory and the machine), or set by
    /// [`Builder::identity`](crate::Builder::identity).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let sequencer = locks.mutex("order:42").lock().await?.sequencer();
    /// assert_eq!(sequencer.store(), locks.identity());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn identity(&self) -> &str {
        &self.core.identity
    }

    pub(crate) fn background(&self) -> &Background {
        &self.core.background
    }

    /// Returns what this store guarantees in its current configuration. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// if !locks.guarantees().has_leases() {
    ///     println!("a holder that hangs holds on");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn guarantees(&self) -> &Guarantees {
        self.core.store.guarantees()
    }

    /// Returns the store's URL without credentials. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// println!("locks are in {}", locks.url()); // without credentials
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn url(&self) -> &str {
        self.core.store.url()
    }

    /// Returns the store itself.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.core.store
    }

    /// Releases all locks of this client and its clones, and disconnects.
    ///
    /// Waiting calls fail with [`ErrorKind::Closed`], and guards become `Lost(Closed)`. The call
    /// returns when the store has released the locks, or when the longest lease has expired.
    /// [`close_timeout`](Self::close_timeout) sets another limit. Then the client disconnects from
    /// the servers ([`Store::disconnect`], for at most 2 s). A client that is only dropped breaks
    /// its connections, and MariaDB, for example, logs a warning for each.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// locks.close().await?; // all locks are released at the store
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. All locks are
    /// released.
    ///
    /// # Errors
    /// - [`Unreachable`](ErrorKind::Unreachable): a lock may still be held at the store until its
    ///   lease expires.
    /// - [`Closed`](ErrorKind::Closed): this is a forked child process, which holds nothing.
    pub async fn close(self) -> Result<()> {
        self.end(None).await
    }

    /// Closes the client like [`close`](Self::close), and returns after `limit` at the latest. For
    /// a shutdown with a deadline.
    ///
    /// Releases that are not done by then continue in the background while the process lives. The
    /// rest end when their leases expire.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// if let Err(error) = locks.close_timeout(Duration::from_secs(3)).await {
    ///     eprintln!("{error:#}"); // a lock is held until its lease expires
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. All locks are
    /// released.
    ///
    /// # Errors
    /// The same as [`close`](Self::close).
    pub async fn close_timeout(self, limit: Duration) -> Result<()> {
        self.end(Some(limit)).await
    }

    async fn end(self, limit: Option<Duration>) -> Result<()> {
        let core = &self.core;
        core.check_ours().map_err(|e| e.during("close").at(self.url()))?;
        let until = limit.map_or(Moment::NEVER, |limit| core.clock.now().plus(limit));
        core.close();
        let mut longest = Duration::from_secs(1);
        let (held, waited) = core.keeper.close();
        for waiting in waited {
            waiting.fail(Error::closed());
            // Its caller does so too, but perhaps is polled only after we have returned.
            core.leave_in_background(&waiting.claim, Moment::from_nanos(0));
        }
        for lease in held {
            longest = longest.max(lease.claim.lease);
            if lease.lose(LostReason::Closed) {
                core.leave_in_background(&lease.claim_now(), lease.keep_until);
            }
        }
        let longest = longest.min(until.since(core.clock.now()));
        let paid = core.background.within(|| longest, core.background.all_paid()).await;
        if paid.is_none() {
            return Err(Error::no_reply(longest).during("close").at(self.url()));
        }
        let farewell = CLOSE_TIMEOUT.min(until.since(core.clock.now()));
        let mut goodbye = core.store.disconnect();
        let goodbye = core.background.with_runtime(goodbye.as_mut());
        let _ = core.background.within(|| farewell, goodbye).await;
        Ok(())
    }
}

/// An argument of [`lock_all`](Leasehold::lock_all): a name (a mutex with default options), a
/// [`Mutex`] with options of your own, or a [`Wanted`] request for another kind of lock.
pub trait IntoWanted {
    /// Converts the value into a request for a lock of this client.
    fn into_wanted(self, locks: &Leasehold) -> Wanted;
}

impl IntoWanted for Wanted {
    fn into_wanted(self, _: &Leasehold) -> Wanted {
        self
    }
}

impl IntoWanted for Mutex {
    fn into_wanted(self, _: &Leasehold) -> Wanted {
        self.into()
    }
}

impl<N: AsRef<str>> IntoWanted for N {
    fn into_wanted(self, locks: &Leasehold) -> Wanted {
        locks.mutex(self).into()
    }
}
