//! A client of one store, which creates the locks.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::acquire::LockHandle;
use super::election::Election;
use super::events::{LockEvents, list};
use super::mutex::Mutex;
use super::request::LockRequest;
use super::rwlock::RwLock;
use super::semaphore::Semaphore;
use super::several::{MultiGuard, acquire_all};
use super::wait::Wait;
use super::wait_chain::WaitChain;
use crate::client::background::Background;
use crate::client::core::Core;
use crate::store::{Guarantees, Store};
use crate::types::answer::{ClaimInfo, ClaimState, Evict, LockInfo};
use crate::types::claim::{Kind, MAX_READERS};
use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, LostReason, Result};
use crate::types::name::Name;
use crate::types::sequencer::{Sequencer, Side};
use crate::util::clock::Moment;

/// The time limit for disconnecting in [`Client::close`].
///
/// This limit is much shorter than the limits for releases, because one unresponsive connection
/// uses up the whole limit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A client of one store. Clones represent the same client.
///
/// The client has its own thread for renewals. The thread ends when the client and all its guards
/// are gone and all pending releases are done.
///
/// **At the end of the program.** Dropping a guard never blocks: the client's thread releases the
/// lock. The end of the process ends that thread too. So first call [`close`](Self::close) or
/// [`close_timeout`](Self::close_timeout), which wait for pending releases. A lock that was not
/// released is free when its lease expires. Only the [blocking](crate::blocking) client waits when
/// its last handle is dropped outside an async runtime, for up to one second.
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
pub struct Client {
    core: Arc<Core>,
}

/// The minimum time limit for pending releases in [`Client::close`].
const SHORTEST_WAIT: Duration = Duration::from_secs(1);

impl Client {
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

    /// Creates a semaphore with `permits` permits. No I/O. All clients must use the same number for
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

    /// Creates an election, in which one of the candidates for `name` leads at a time. The election
    /// uses the mutex with the same name. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use std::ops::ControlFlow;
    /// let lead = |term: leasehold::MutexGuard| async move { ControlFlow::Break(term.token()) };
    /// let term = locks.election("leader").lead(lead).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1))
    }

    /// Watches one queue, and reports claims that begin to wait, are granted or end. The watch
    /// takes no locks. Each poll is one request.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy").label("release 7").lock().await?;
    /// let change = locks.watch("deploy").next().await?; // the first call returns the current state
    /// assert_eq!(change.claim.holder.label, "release 7");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch(&self, name: impl AsRef<str>) -> LockEvents {
        LockEvents::of(&self.core, name.as_ref())
    }

    /// Watches all locks whose names begin with `prefix`; see [`watch`](Self::watch).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy:web").lock().await?;
    /// let change = locks.watch_all("deploy:").next().await?;
    /// assert_eq!(change.name.as_str(), "deploy:web");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch_all(&self, prefix: impl AsRef<str>) -> LockEvents {
        LockEvents::of_all(&self.core, prefix.as_ref())
    }

    /// Acquires several locks, and waits until it holds all of them.
    ///
    /// A lock is given as a name (a mutex with default options), as a [`Mutex`] with options of
    /// your own, or as a request for another kind of lock
    /// ([`LockRequest`](crate::LockRequest)). A lock that is given twice is acquired once.
    ///
    /// Taking free locks costs the time of one round trip, with one request per lock. (In SQL
    /// stores, as many requests are sent at once as the client has connections.) From the first
    /// lock that is not free, the locks are acquired one after another, in order of their names. So
    /// callers that want some of the same locks cannot deadlock. While the call waits for a lock,
    /// it holds the locks before that one and none of those after it.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let stock = locks.lock_all(["stock:a", "stock:b"]).await?;
    /// stock.release().await?;
    /// // Different kinds of locks, with options:
    /// let all = [
    ///     locks.rwlock("config").read_request(),
    ///     locks.semaphore("convert", 3).permit_request(2),
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
    /// The call holds none of the locks after an error. [`name`](Error::name) returns the name of
    /// the lock that could not be acquired.
    /// - [`Config`](ErrorKind::Config): one lock is requested in two different ways.
    /// - All others as for [`Mutex::lock`].
    pub async fn lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
    ) -> Result<MultiGuard> {
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
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
    ) -> Result<MultiGuard> {
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
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
        limit: Duration,
    ) -> Result<MultiGuard> {
        self.take_all("lock_all", wanted, Wait::For(limit)).await
    }

    async fn take_all(
        &self,
        operation: &'static str,
        wanted: impl IntoIterator<Item = impl IntoLockRequest>,
        wait: Wait,
    ) -> Result<MultiGuard> {
        let wanted: Vec<LockRequest> =
            wanted.into_iter().map(|one| one.into_wanted(self)).collect();
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
    /// if let Some(lock) = locks.inspect("order:42").await? {
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
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1).read().await
    }

    /// Returns at least the first 100 holders of one lock, or `None` if it is free.
    ///
    /// The result contains a cooldown too, but waiters may be left out. Use it instead of
    /// [`inspect`](Self::inspect) if many clients poll a lock with a long queue: Redis, etcd and
    /// ZooKeeper answer this request without reading the queue.
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
    /// The same as [`inspect`](Self::inspect).
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

    /// Explains why a lock is not available: the locks for which its holders wait, and a deadlock.
    /// For operators.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("order:42").lock().await?;
    /// let chain = locks.wait_chain("order:42").await?;
    /// assert_eq!(chain.locks[0].name.as_str(), "order:42");
    /// assert!(chain.deadlock.is_empty());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// Reads all locks, like [`list`](Self::list) with an empty prefix.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`InvalidName`](ErrorKind::InvalidName): the name is not valid.
    /// - Any error of [`list`](Self::list).
    pub async fn wait_chain(&self, name: impl AsRef<str>) -> Result<WaitChain> {
        let name = Name::new(name)?;
        Ok(WaitChain::of(&self.list("").await?, &name))
    }

    /// Evicts holders of a lock, and returns how many holds ended. For operators.
    ///
    /// The evicted guards become `Lost` immediately if the store [notifies](Guarantees::evicted)
    /// evicted holders, otherwise at their next renewal. The next holder may have acquired the lock
    /// *before* that, so only resources that check tokens are safe.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::store::Evict;
    /// let guard = locks.mutex("stuck").lock().await?;
    /// assert_eq!(locks.evict("stuck", Evict::Token(guard.grant())).await?, 1);
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
        evicted.map_err(|e| e.with_operation("evict").with_lock(&name).with_store(self.url()))
    }

    /// Checks at the store that the hold of this sequencer still exists, and returns its claim. One
    /// round trip.
    ///
    /// `Ok` means that the lock was held when the store answered. It may be lost a moment later.
    /// [`sequencer`](crate::sequencer) explains what this protects.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// let sequencer = guard.sequencer();
    /// assert_eq!(locks.check(&sequencer).await?.token, Some(guard.grant()));
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
        checked.map_err(|e| {
            e.with_operation("check").with_lock(sequencer.name()).with_store(self.url())
        })
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
                && c.state == ClaimState::Holding
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

    /// Checks the configuration of the store, and returns findings, worst first. A finding is a
    /// setting that breaks or weakens what this kind of store can guarantee.
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
    /// Any error of the store. After an error, it is unknown how the store is configured.
    pub async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = async { self.core.ours()?.diagnose().await };
        let asked = self.core.background.with_runtime(pin!(asked)).await;
        let mut findings =
            asked.map_err(|e| e.with_operation("diagnose").with_store(self.url()))?;
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(findings)
    }

    /// Checks that the store answers within `limit`. One round trip, for readiness probes.
    ///
    /// The request only reads. [`diagnose`](Self::diagnose) and the first lock show whether the
    /// store can also be written.
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
        // Every store accepts this name. In Redis, names that begin with "leasehold:" are reserved.
        let probe = self.inspect("leasehold-ping");
        match self.core.background.within(|| limit, probe).await {
            Some(read) => read.map(drop).map_err(|e| e.with_operation("ping")),
            None => Err(Error::no_reply(limit).with_operation("ping").with_store(self.url())),
        }
    }

    /// Returns the identity of the store, which the store's sequencers contain. All clients with
    /// the same identity share their locks.
    ///
    /// The identity is derived from the store's address without credentials (for a store on this
    /// machine, from the directory and the machine), or set by
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
    /// returns when the store has released the locks, including those of guards that were dropped
    /// before, or when the longest lease has expired.
    /// [`close_timeout`](Self::close_timeout) sets another limit.
    ///
    /// After the releases, the client disconnects from the servers ([`Store::disconnect`], for at
    /// most 2 s). A client that is only dropped breaks its connections, and MariaDB, for example,
    /// logs a warning for each.
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
    /// Releases that are not done by then continue in the background while the process lives. Locks
    /// that are not released even then are free when their leases expire.
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
        core.check_ours().map_err(|e| e.with_operation("close").with_store(self.url()))?;
        let until = limit.map_or(Moment::NEVER, |limit| core.clock.now().plus(limit));
        core.close();
        let (held, waited) = core.renewer.close();
        for waiting in waited {
            waiting.fail(Error::closed());
            // The waiting call removes its claim too, but it may be polled only after this call has
            // returned.
            core.leave_in_background(&waiting.claim, Moment::from_nanos(0));
        }
        for lease in held {
            if lease.lose(LostReason::Closed) {
                core.release_in_background(&lease.claim_now(), lease.keep_until);
            }
        }
        let longest = core.until_released().max(SHORTEST_WAIT).min(until.since(core.clock.now()));
        let done = core.background.within(|| longest, core.background.all_done()).await;
        if done.is_none() {
            return Err(Error::no_reply(longest).with_operation("close").with_store(self.url()));
        }
        let limit = CLOSE_TIMEOUT.min(until.since(core.clock.now()));
        let mut disconnect = core.store.disconnect();
        let disconnect = core.background.with_runtime(disconnect.as_mut());
        let _ = core.background.within(|| limit, disconnect).await;
        Ok(())
    }
}

/// An argument of [`lock_all`](Client::lock_all): a name (a mutex with default options), a
/// [`Mutex`] with options of your own, or a [`LockRequest`] for another kind of lock.
pub trait IntoLockRequest {
    /// Converts the value into a request for a lock of this client.
    fn into_wanted(self, locks: &Client) -> LockRequest;
}

impl IntoLockRequest for LockRequest {
    fn into_wanted(self, _: &Client) -> LockRequest {
        self
    }
}

impl IntoLockRequest for Mutex {
    fn into_wanted(self, _: &Client) -> LockRequest {
        self.into()
    }
}

impl<N: AsRef<str>> IntoLockRequest for N {
    fn into_wanted(self, locks: &Client) -> LockRequest {
        locks.mutex(self).into()
    }
}
