//! A client of one store, and the kinds of lock it hands out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::acquire::Want;
use crate::background::Background;
use crate::blocking;
use crate::claim::{Claim, Holder, Kind, MAX_READERS, Token};
use crate::clock::{Clock, Moment};
use crate::doctor::Finding;
use crate::error::{Error, ErrorKind, LostReason, Result};
use crate::keeper::{Keeper, closed, leave_for_sure};
use crate::mutex::Mutex;
use crate::name::Name;
use crate::registry::Registry;
use crate::rwlock::RwLock;
use crate::semaphore::Semaphore;
use crate::sequencer::{MAX_IDENTITY_BYTES, Sequencer, Side};
use crate::store::above::above;
use crate::store::{ClaimInfo, Evict, Guarantee, Guarantees, LockInfo, Standing, Store};
use crate::telemetry;
use crate::url::open;

/// How long [`Leasehold::close`] waits for goodbyes: far less than for answers that matter, since
/// one silent connection costs all of it.
const FAREWELL: Duration = Duration::from_secs(2);

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

/// What the parts of one client share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) background: Background,
    pub(crate) clock: Clock,
    pub(crate) label: String,
    pub(crate) holder: Arc<Holder>,
    /// What sequencers say of the store.
    pub(crate) identity: String,
    seen: AtomicU64,
    closed: AtomicBool,
}

impl Core {
    pub(crate) fn check_ours(&self) -> Result<()> {
        if !self.holder_is_us() {
            let what = "this process is a fork of the one that connected, and has no thread to \
                        renew with: connect after forking";
            return Err(Error::new(ErrorKind::Closed, what));
        }
        Ok(())
    }

    /// The store, in the process that connected: in a forked child its connections are the
    /// parent's.
    fn ours(&self) -> Result<&dyn Store> {
        self.check_ours()?;
        Ok(&*self.store)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) { Err(closed()) } else { Ok(()) }
    }

    /// The highest token that this client has seen, whatever the name: higher than needed never
    /// harms, since tokens are drawn from clocks.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }

    pub(crate) fn saw(&self, token: Token) {
        self.seen.fetch_max(token.get(), Ordering::SeqCst);
    }

    /// What is left of `at_least`.
    pub(crate) fn keep(&self, until: Moment) -> Option<Duration> {
        if until == Moment::from_nanos(0) {
            return None;
        }
        let left = until.since(self.clock.now());
        (!left.is_zero()).then_some(left)
    }

    /// Gives a claim back without a caller to wait for it: at once where the store is local, else
    /// on the background thread, until the store answers or the claim can no longer live there.
    pub(crate) fn owe_leave(self: &Arc<Self>, claim: Claim, keep_until: Moment) {
        if !self.holder_is_us() {
            return;
        }
        let (store, clock) = (self.store.clone(), self.clock.clone());
        let local = store.is_local();
        self.background.owe(leave_for_sure(store, clock, claim, keep_until), local);
    }

    pub(crate) fn holder_is_us(&self) -> bool {
        self.holder.pid == std::process::id()
    }
}

impl Leasehold {
    /// A client of this store, with the default options; see [`Builder::store`].
    ///
    /// # Errors
    /// As there.
    pub fn with_store(store: Arc<dyn Store>) -> Result<Self> {
        Builder::default().store(store)
    }

    /// A mutex: one holder at a time. A bad name is told by the call that takes the lock.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(Want::new(&self.core, name.as_ref(), Kind::Mutex, 1))
    }

    /// A read-write lock: any number of readers or one writer, in the order in which they asked.
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(Want::new(&self.core, name.as_ref(), Kind::RwLock, MAX_READERS))
    }

    /// A semaphore of this many permits. All who use one name must agree on the number.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(Want::new(&self.core, name.as_ref(), Kind::Semaphore, permits))
    }

    /// Who holds and who waits for one lock; `None` if nobody does. For people: it is old news
    /// when it arrives. Cancel safe.
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
    /// # Errors
    /// [`ErrorKind::InvalidName`], or as the store fails.
    pub async fn read(&self, name: impl AsRef<str>) -> Result<Option<LockInfo>> {
        let name = Name::new(name)?;
        let read = async { self.core.ours()?.read(&name).await };
        let read = self.core.background.in_context(read).await;
        read.map_err(|e| e.during("show").on(&name).at(self.url()))
    }

    /// All locks in use whose name starts with `prefix`, by name. Cancel safe.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let listed = async { self.core.ours()?.list(prefix).await };
        let listed = self.core.background.in_context(listed).await;
        listed.map_err(|e| e.during("list").at(self.url()))
    }

    /// Takes a lock away by a person's order, and tells how many holds ended. Their guards turn
    /// `Lost` at their next renewal, *after* the next holder may have begun: only resources that
    /// check tokens are safe from that. A future that is dropped may have done it or not; doing it
    /// again is safe with [`Evict::Token`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`], or as the store fails.
    pub async fn evict(&self, name: impl AsRef<str>, which: Evict) -> Result<usize> {
        let name = Name::new(name)?;
        let evicted = async { self.core.ours()?.evict(&name, which).await };
        let evicted = self.core.background.in_context(evicted).await;
        evicted.map_err(|e| e.during("evict").on(&name).at(self.url()))
    }

    /// Asks the store whether the hold that this sequencer tells of is still held, and by whom:
    /// one round trip.
    ///
    /// `Ok` means that it was held when the store answered; it may be lost a moment later. What
    /// that does and does not protect is on [`sequencer`](crate::sequencer).
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if it is not held any more (or never was); [`ErrorKind::Mismatch`] if the
    /// sequencer is of another store, or its name is in use as another kind of lock;
    /// [`ErrorKind::Unreachable`], and nothing is known. Cancel safe.
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
        let read = core.background.in_context(read).await?;
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
    /// Cancel safe.
    ///
    /// # Errors
    /// As the store fails; then nothing is known.
    pub async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = async { self.core.ours()?.diagnose().await };
        let asked = self.core.background.in_context(asked).await;
        let mut findings = asked.map_err(|e| e.during("diagnose").at(self.url()))?;
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(findings)
    }

    /// What sequencers say of this store: all clients with the same identity share their locks. It
    /// is drawn from the store's address (on this machine: from the directory and the machine),
    /// without credentials, or was set by [`Builder::identity`].
    pub fn identity(&self) -> &str {
        &self.core.identity
    }

    pub(crate) fn background(&self) -> &Background {
        &self.core.background
    }

    /// What this store promises, as it was found.
    pub fn guarantees(&self) -> &Guarantees {
        self.core.store.guarantees()
    }

    /// The store's URL, without credentials.
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
    /// each. Dropped meanwhile, it goes on in the background.
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
    /// # Errors
    /// As [`close`](Self::close).
    pub async fn close_timeout(self, limit: Duration) -> Result<()> {
        self.end(Some(limit)).await
    }

    async fn end(self, limit: Option<Duration>) -> Result<()> {
        let core = &self.core;
        core.check_ours().map_err(|e| e.during("close").at(self.url()))?;
        let until = limit.map_or(Moment::NEVER, |limit| core.clock.now().plus(limit));
        core.closed.store(true, Ordering::SeqCst);
        let mut longest = Duration::from_secs(1);
        let (held, waited) = core.keeper.close();
        for waiting in waited {
            waiting.fail(closed());
            // Its caller does so too, but perhaps is polled only after we have returned.
            core.owe_leave(waiting.claim.clone(), Moment::from_nanos(0));
        }
        for lease in held {
            longest = longest.max(lease.claim.lease);
            if lease.lose(LostReason::Closed) {
                core.owe_leave(lease.claim.clone(), lease.keep_until);
            }
        }
        let longest = longest.min(until.since(core.clock.now()));
        let paid = core.background.within(longest, core.background.all_paid()).await;
        if paid.is_none() {
            return Err(crate::acquire::no_answer(longest).during("close").at(self.url()));
        }
        let farewell = FAREWELL.min(until.since(core.clock.now()));
        let goodbye = core.background.in_context(core.store.disconnect());
        let _ = core.background.within(farewell, goodbye).await;
        Ok(())
    }
}

/// Connects with options. The default knows the store `memory:` alone; `leasehold::builder()` knows
/// all that are in the build.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::store::Guarantee;
/// let locks = leasehold::builder()
///     .label("billing") // what people see who look at a lock
///     .require(Guarantee::Fifo)
///     .connect("memory:")
///     .await?;
/// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Builder {
    label: String,
    clock: Clock,
    required: Vec<Guarantee>,
    identity: Option<String>,
    token_offset: u64,
    registry: Registry,
}

impl Builder {
    /// Of a client of one of these stores.
    pub fn new(registry: Registry) -> Self {
        Self { registry, ..Self::default() }
    }

    /// What every lock of this client says of its holder, unless the lock says otherwise.
    #[must_use]
    pub fn label(mut self, text: impl Into<String>) -> Self {
        self.label = text.into();
        self
    }

    /// Refuses to connect to a store that does not promise this.
    #[must_use]
    pub fn require(mut self, guarantee: Guarantee) -> Self {
        self.required.push(guarantee);
        self
    }

    /// What sequencers say of the store, where clients address one store in more than one way (by
    /// another host name, say): give them all the same. 1 to 1024 bytes, without control
    /// characters, and no secret.
    #[must_use]
    pub fn identity(mut self, text: impl Into<String>) -> Self {
        self.identity = Some(text.into());
        self
    }

    /// Raises all of the store's tokens by this number: for a resource whose lock moves here from a
    /// store with greater tokens, which its fence has seen and would refuse everybody for. Choose
    /// it no smaller than the greatest of them, and give it to all clients, for ever. In a URL it
    /// is the parameter `token_offset` (not of `file:` and `memory:`). docs/fencing.md has the
    /// steps.
    #[must_use]
    pub fn token_offset(mut self, offset: u64) -> Self {
        self.token_offset = offset;
        self
    }

    /// Judges leases by this clock; for tests.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Connects to the store of this URL. Cancel safe.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a URL that cannot work, [`ErrorKind::Unsupported`] for a store
    /// that this build leaves out, or for a guarantee that was [required](Self::require) and is not
    /// given; otherwise as the store fails.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<Leasehold> {
        let background = Background::start()?;
        let opened = open(url.as_ref(), &self.registry, background.handle());
        let store = background.in_context(opened).await?;
        self.start(store, background)
    }

    /// As [`connect`](Self::connect), for code without a runtime.
    ///
    /// # Errors
    /// As there.
    pub fn connect_blocking(self, url: impl AsRef<str>) -> Result<blocking::Leasehold> {
        let background = Background::start()?;
        let opened = open(url.as_ref(), &self.registry, background.handle());
        let store = blocking::block_on(&background, opened)?;
        self.start(store, background).map(Into::into)
    }

    /// A client of a store of your own.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn store(self, store: Arc<dyn Store>) -> Result<Leasehold> {
        self.start(store, Background::start()?)
    }

    /// A client that is one process of a simulation.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn simulated(self, store: Arc<dyn Store>, world: &crate::World) -> Result<Leasehold> {
        self.start(store, Background::inside(world.clone()))
    }

    fn start(self, store: Arc<dyn Store>, background: Background) -> Result<Leasehold> {
        telemetry::describe();
        let url = store.url().to_owned();
        let store = above(store, self.token_offset).map_err(|e| e.during("connect").at(&url))?;
        for wanted in self.required {
            if !store.guarantees().meets(wanted) {
                let what = format!("this store does not promise {wanted}: choose another");
                return Err(Error::new(ErrorKind::Unsupported, what)
                    .during("connect")
                    .at(store.url()));
            }
        }
        let identity = self.identity.unwrap_or_else(|| store.identity());
        let length = 1..=MAX_IDENTITY_BYTES;
        if !length.contains(&identity.len()) || identity.contains(char::is_control) {
            let what = "a store's identity is 1 to 1024 bytes without control characters: set one";
            return Err(Error::new(ErrorKind::Config, what).during("connect").at(store.url()));
        }
        let keeper = Keeper::new(store.clone(), self.clock.clone());
        background.spawn(keeper.clone().run());
        let holder = Arc::new(Holder::this_process(&self.label));
        let core = Core {
            store,
            keeper,
            background,
            clock: self.clock,
            label: self.label,
            holder,
            identity,
            seen: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        Ok(Leasehold { core: Arc::new(core) })
    }
}
