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
/// It has a thread of its own for renewals, which ends when the client and all its guards are
/// gone and what they owed to the store is done.
///
/// **At the end of the program**: a guard that is dropped is released in the background, and a
/// process that ends takes its threads along. So the last of a client to be dropped
/// (the client itself, a lock or a guard of it) waits for what is owed, for up to a second. To be
/// told whether that was enough, to wait for longer, or where the client is never dropped
/// (a `static`, `process::exit`), call [`close`](Self::close) or
/// [`close_timeout`](Self::close_timeout). What the store never hears of ends with its lease.
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

    /// A mutex: one holder at a time. An invalid name is reported on acquisition.
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

    /// A read-write lock: any number of readers or one writer, in the order in which they asked.
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

    /// A semaphore of this many permits. All who use one name must agree on the number.
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

    /// An election: of all who stand under this name, one leads. It is the mutex of this name.
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

    /// Follows what changes in the queue of this lock: who waits, who holds, who has ended. Nothing is taken; each
    /// look is one request.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy").label("release 7").lock().await?;
    /// let change = locks.watch("deploy").next().await?; // at first, what is there
    /// assert_eq!(change.claim.holder.label, "release 7");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch(&self, name: impl AsRef<str>) -> Changes {
        Changes::of(&self.core, name.as_ref())
    }

    /// Follows what changes in all queues whose names begin so: see [`watch`](Self::watch).
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

    /// Takes several locks, or waits until it has all of them: names (each a mutex), mutexes with options of
    /// yours, and parts of other kinds.
    ///
    /// What is free costs the time of one round trip together, one request each. (In SQL a connection carries one
    /// call at a time: there as many go at once as the client has connections.) From the first on that is not
    /// free, they are taken one after the other, by name, so that callers who want some of the same never wait
    /// for each other in a circle. While one is waited for, those before it are held, and those behind it are
    /// not. A lock that is named twice is taken once.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let stock = locks.lock_all(["stock:a", "stock:b"]).await?;
    /// stock.release().await?;
    /// // Of different kinds, with options:
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
    /// A future that is dropped gives back what it has and its place, in the background.
    ///
    /// # Errors
    /// As [`Mutex::lock`], and says of which lock; then none of them is held by this call.
    /// [`ErrorKind::Config`] if one lock is asked for in two different ways.
    pub async fn lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
    ) -> Result<Guards> {
        self.take_all("lock_all", wanted, Wait::Forever).await
    }

    /// Takes all of these locks now, or none: see [`lock_all`](Self::lock_all). Of two who try at the same
    /// moment both may be refused.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _held = locks.mutex("b").lock().await?;
    /// let error = locks.try_lock_all(["a", "b"]).await.unwrap_err();
    /// assert_eq!(error.name().unwrap().as_str(), "b");
    /// assert!(locks.mutex("a").try_lock().await.is_ok()); // nothing stays
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// A future that is dropped gives back what it has, in the background.
    ///
    /// # Errors
    /// As [`Mutex::try_lock`], and says of which lock; and as [`lock_all`](Self::lock_all).
    pub async fn try_lock_all(
        &self,
        wanted: impl IntoIterator<Item = impl IntoWanted>,
    ) -> Result<Guards> {
        self.take_all("try_lock_all", wanted, Wait::Try).await
    }

    /// Waits for all of these locks, for at most this long: see [`lock_all`](Self::lock_all).
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
    /// A future that is dropped gives back what it has and its place, in the background.
    ///
    /// # Errors
    /// As [`Mutex::lock_timeout`], and says of which lock; and as [`lock_all`](Self::lock_all).
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

    /// Who holds and who waits for one lock; `None` if nobody does. For diagnostics only: the
    /// snapshot may be stale.
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
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`], or as the store fails.
    pub async fn read(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        LockHandle::new(&self.core, name.as_ref(), Kind::Mutex, 1).read().await
    }

    /// All locks in use whose name starts with `prefix`, by name.
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
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        list(&self.core, prefix).await
    }

    /// Takes a lock away by a person's order, and tells how many holds ended. Their guards turn `Lost` as they
    /// hear of it (at once where [the store tells](Guarantees::evicted), else at their next renewal), *after* the
    /// next holder may have begun: only resources that check tokens are safe from that.
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
    /// A future that is dropped may have done it or not. Doing it again is safe with [`Evict::Token`]; with
    /// [`Evict::Holders`] it could meet the next one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`], or as the store fails.
    pub async fn evict(&self, name: impl AsRef<str>, which: Evict) -> Result<usize> {
        let name = Name::new(name)?;
        let evicted = async { self.core.ours()?.evict(&name, which).await };
        let evicted = self.core.background.with_runtime(pin!(evicted)).await;
        evicted.map_err(|e| e.during("evict").on(&name).at(self.url()))
    }

    /// Asks the store whether the hold that this sequencer tells of is still held, and by whom:
    /// one round trip.
    ///
    /// `Ok` means that it was held when the store answered; it may be lost a moment later. What
    /// that does and does not protect is on [`sequencer`](crate::sequencer).
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
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if it is not held any more (or never was); [`ErrorKind::Mismatch`] if the
    /// sequencer is of another store, or its name is in use as another kind of lock;
    /// [`ErrorKind::Unreachable`], and nothing is known.
    pub async fn check(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        let checked = self.check_here(sequencer).await;
        checked.map_err(|e| e.during("check").on(sequencer.name()).at(self.url()))
    }

    async fn check_here(&self, sequencer: &Sequencer) -> Result<ClaimInfo> {
        let core = &self.core;
        if sequencer.store() != core.identity {
            let what = format!(
                "the sequencer is of the store {:?}, this is {:?}: ask that one (or give both \
                 clients the same Builder::identity, if they are one)",
                sequencer.store(),
                core.identity
            );
            return Err(Error::new(ErrorKind::Mismatch, what));
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
                    "the sequencer is of a {}, but the name is in use as a {}: that hold is over",
                    sequencer.kind(),
                    info.kind
                );
                Err(Error::new(ErrorKind::Mismatch, what))
            }
            None => Err(Error::lost(LostReason::Gone)),
        }
    }

    /// Asks the store what is wrong with its set-up, worst first: settings that break or weaken what
    /// this kind of store can promise. What it promises as it is, is [`guarantees`](Self::guarantees).
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
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// As the store fails; then nothing is known.
    pub async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = async { self.core.ours()?.diagnose().await };
        let asked = self.core.background.with_runtime(pin!(asked)).await;
        let mut findings = asked.map_err(|e| e.during("diagnose").at(self.url()))?;
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(findings)
    }

    /// Whether the store answers, within `limit`: one round trip, for a probe of readiness. It reads; that
    /// it may also be written is what [`diagnose`](Self::diagnose) and the first lock tell.
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
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if there is no answer by then; or as the store fails.
    pub async fn ping(&self, limit: Duration) -> Result<()> {
        // A name that every store takes: Redis keeps those that begin with "leasehold:" for itself.
        let probe = self.read("leasehold-ping");
        match self.core.background.within(|| limit, probe).await {
            Some(read) => read.map(drop).map_err(|e| e.during("ping")),
            None => Err(Error::no_reply(limit).during("ping").at(self.url())),
        }
    }

    /// What sequencers say of this store: all clients with the same identity share their locks. It
    /// is drawn from the store's address (on this machine: from the directory and the machine),
    /// without credentials, or was set by [`Builder::identity`](crate::Builder::identity).
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

    /// What this store promises, as it was found.
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

    /// The store's URL, without credentials.
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

    /// The store underneath.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.core.store
    }

    /// Releases everything held through this client and its clones, fails what still waits with
    /// [`ErrorKind::Closed`], and returns when the store knows, or when the longest lease of what
    /// was held has passed ([`close_timeout`](Self::close_timeout) sets another limit). Its guards
    /// are `Lost(Closed)`. Then it says goodbye to the servers ([`Store::disconnect`], two seconds
    /// at most): a client that is only dropped breaks its connections off, and MariaDB's log warns of
    /// each.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// locks.close().await?; // all is given back, and the store knows
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// A future that is dropped goes on in the background.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if something may still be held at the store, which then ends
    /// with its lease. [`ErrorKind::Closed`] in a forked child, which holds nothing.
    pub async fn close(self) -> Result<()> {
        self.end(None).await
    }

    /// As [`close`](Self::close), and returns after `limit` at the latest: for a shutdown that has
    /// only so much time. What is not told by then goes on in the background for as long as the
    /// process lives, and the lease ends the rest.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// if let Err(error) = locks.close_timeout(Duration::from_secs(3)).await {
    ///     eprintln!("{error}"); // something is held until its lease is over
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As [`close`](Self::close).
    ///
    /// # Errors
    /// As [`close`](Self::close).
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

/// What can be asked for in [`lock_all`](Leasehold::lock_all): a name, which is a mutex with the
/// usual options, a [`Mutex`] with yours, or a [`Wanted`] part of another kind of lock.
pub trait IntoWanted {
    /// As one of the locks to take.
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
