//! The store on top of any [`Cells`].

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Ends, redacted, spawn_on};
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Converted, Evict, EvictionListener, EvictionListeners, Guarantees,
    Joined, Liveness, LockInfo, Mode, Renew, Renewal, Signal, Stall, Store, StoreInfo, Survival,
    Wakeup,
};
use leasehold_core::{Claim, ClaimId, Clock, DEFAULT_LEASE, Error, ErrorKind, Name, Result};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;

use crate::cells::Cells;
use crate::claims::Claims;
use crate::epoch::Epochs;
use crate::heartbeat::beat;
use crate::keys::Keys;
use crate::last_writes::{AliveSessions, LastWrites};
use crate::leave::{REAPING, reap};
use crate::notifications::receive_messages;
use crate::session::{Lifetimes, Sessions};
use crate::shared::Shared;

/// The options of a [`CellStore`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The prefix of all keys: printable ASCII without spaces, at most 64 bytes.
    pub prefix: String,
    /// The longest lease. The locks of a crashed client stay taken slightly longer than that. This
    /// value must be equal for all clients of a system that [`forgets`](crate::System::forgets).
    pub session: Duration,
    /// The longest pause between two polls of a waiter.
    pub poll: Duration,
    /// How long no lock is granted after the system has lost its data; `None`: the lifetime of a
    /// session.
    pub restart_delay: Option<Duration>,
    /// The list of systems, in printable ASCII without spaces, if lock names are distributed over
    /// several systems with a store each. This system's own name and `@` may precede the list. If
    /// the system [`forgets`](crate::System::forgets), a client with another list than earlier
    /// clients gets an error.
    pub members: Option<String>,
    /// The client's clock. It differs from the machine's clock only in tests.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        let (session, poll) = (DEFAULT_LEASE, Duration::from_millis(100));
        let (prefix, clock) = ("leasehold:".into(), Clock::default());
        Self { prefix, session, poll, restart_delay: None, members: None, clock }
    }
}

impl Options {
    /// Returns the lifetimes of sessions on a system with the given `grain`.
    fn lifetimes(&self, grain: Duration) -> Lifetimes {
        Lifetimes::of(self.session, grain)
    }

    /// Returns how long no lock is granted after the system has lost its data.
    pub fn closed_for(&self, grain: Duration) -> Duration {
        self.restart_delay.unwrap_or(self.lifetimes(grain).cell)
    }
}

/// Locks in a system that supports compare-and-set of single values. See the crate's documentation.
pub struct CellStore {
    info: StoreInfo,
    shared: Arc<Shared>,
    _tasks: [Ends; 3],
}

impl CellStore {
    /// Creates a store on these cells. `info` contains the store's guarantees, which can be based
    /// on [`promises`]. The store's tasks run on `runtime`. No I/O.
    pub fn new(cells: Arc<dyn Cells>, options: Options, info: StoreInfo, runtime: &Handle) -> Self {
        let (clock, system) = (options.clock.clone(), cells.system().clone());
        let keys = Keys::new(options.prefix.clone(), system.longest_key);
        let lifetimes = options.lifetimes(system.grain);
        let (say, receiver) = unbounded_channel();
        let sessions = Arc::new(Sessions::new(cells.clone(), lifetimes, clock.clone(), say));
        let delay = options.closed_for(system.grain);
        let shared = Arc::new(Shared {
            epochs: Epochs::new(keys.epoch(), delay, system.grain, options.members),
            cells,
            runtime: runtime.clone(),
            clock,
            keys,
            sessions,
            claims: Claims::default(),
            last_writes: LastWrites::default(),
            alive_sessions: AliveSessions::default(),
            is_clearing: AtomicBool::new(false),
            reaping: Semaphore::new(REAPING),
            poll: options.poll,
            listeners: EvictionListeners::default(),
            rng: Mutex::new(rng()),
        });
        let beating = spawn_on(runtime, beat(Arc::downgrade(&shared)));
        let reaping = spawn_on(runtime, reap(Arc::downgrade(&shared)));
        let hearing = spawn_on(runtime, receive_messages(Arc::downgrade(&shared), receiver));
        let _tasks = [&beating, &reaping, &hearing].map(Ends::new);
        Self { info, shared, _tasks }
    }

    /// Ensures that all clients of this system use the same list of members ([`Options::members`]).
    #[cfg(feature = "memcached")]
    pub(crate) async fn agrees(&self) -> Result<()> {
        self.with_context(None, self.shared.epochs.agree(&*self.shared.cells).await)
    }

    /// Returns the number of round trips of this client so far. For measurements.
    pub fn round_trips(&self) -> u64 {
        self.shared.cells.round_trips()
    }

    fn with_context<T>(&self, name: Option<&Name>, done: Result<T>) -> Result<T> {
        done.map_err(|e| match name {
            Some(name) => e.with_lock(name).with_store(&self.info.url),
            None => e.with_store(&self.info.url),
        })
    }
}

/// Returns the random number generator for pauses, seeded from the same source as IDs.
fn rng() -> fastrand::Rng {
    let seeded = |id: ClaimId| fastrand::Rng::with_seed(id.as_u128() as u64);
    ClaimId::random().map_or_else(|_| fastrand::Rng::new(), seeded)
}

impl fmt::Debug for CellStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CellStore").field("url", &redacted(&self.info.url)).finish_non_exhaustive()
    }
}

/// Returns the guarantees that an adapter starts with. The adapter replaces those that differ in
/// its system, and adds what survives a crash.
pub fn promises(system: &crate::cells::System, options: &Options) -> Guarantees {
    let lifetimes = options.lifetimes(system.grain);
    let mut promised = Guarantees::least();
    promised.kinds = Cow::Borrowed(ALL_KINDS);
    promised.fifo = true;
    promised.wakeup = Wakeup::Poll;
    promised.liveness = Liveness::Session;
    promised.clock = ClockModel::Monotonic;
    promised.on_clock_step = Survival::Exclusive;
    promised.downgrades = true;
    promised.upgrades = true;
    promised.stall = Stall::Nobody;
    // The next client finds a dead holder at its next read. If that client is dead too, another
    // client finds both at its next renewal.
    promised.recovery = lifetimes.cell + system.grain + Duration::from_secs(3);
    promised.recovery_leases = 0;
    promised
}

#[async_trait]
impl Store for CellStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    fn longest_lease(&self) -> Duration {
        self.shared.sessions.lifetimes.lease
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.with_context(Some(&claim.name), self.shared.join(claim, mode).await)
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.with_context(None, self.shared.renew(renewals).await)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let left = match keep {
            None => self.shared.leave(claim).await,
            Some(_) => {
                let what = "min_hold is not supported by this store";
                let hint =
                    "remove min_hold, or use postgres:, mysql:, sqlite:, redis:, etcd: or file:";
                Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint))
            }
        };
        self.with_context(Some(&claim.name), left)
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        self.with_context(Some(&claim.name), self.shared.convert(claim).await)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.changed(claim).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.with_context(Some(name), self.shared.read(name).await)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.with_context(None, self.shared.list(prefix).await)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.with_context(Some(name), self.shared.evict(name, which).await)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.shared.listeners.add(listener);
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.with_context(None, self.shared.cells.diagnose().await)
    }

    /// Several clients may share the store, so the session stays open while it has claims.
    async fn disconnect(&self) {
        if !self.shared.claims.any_stands(self.shared.clock.now()) {
            self.shared.sessions.close().await;
        }
    }
}
