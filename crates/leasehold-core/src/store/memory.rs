//! The `memory:` store: queues in this process, behind a mutex.
//!
//! One [`Queue`] for each name in use. Every call takes the mutex, works on one queue and leaves;
//! nothing is awaited while it is held, so every call is atomic and a dropped future has either
//! done nothing or everything. Leases count on the boot clock, tokens are drawn from the wall
//! clock. A queue that nobody stands in is forgotten but for the highest token ever drawn in the
//! namespace, from which every new queue starts: memory does not grow with the names ever used,
//! and tokens still rise.
//!
//! `memory:` is one namespace for the whole process, `memory:NAME` another for each NAME; a
//! namespace lives as long as somebody is connected to it.

use crate::base::locked::locked;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::guarantees::ALL_KINDS;
use super::inbox::Inbox;
use super::{
    ClockModel, Durability, Evict, Guarantees, Joined, Liveness, LockInfo, Mode, Renew, Renewal,
    Signal, Stall, Store, StoreInfo, Survival, Wakeup, mismatch,
};
use crate::base::clock::{Clock, wall_micros};
use crate::queue::{Queue, StoreTime};
use crate::words::claim::{Claim, ClaimId};
use crate::words::doctor::{Finding, own_clock};
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::name::Name;
use async_trait::async_trait;

/// Queues in this process. See the module's documentation.
#[derive(Debug)]
pub struct MemoryStore {
    info: StoreInfo,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    locks: BTreeMap<Name, Lock>,
    last_token: u64,
}

/// One name in use.
#[derive(Debug)]
struct Lock {
    queue: Queue,
    waiters: HashMap<ClaimId, Arc<Inbox>>,
}

impl MemoryStore {
    /// A namespace of its own that no URL reaches.
    pub fn new() -> Self {
        Self::with_clock(Clock::default())
    }

    /// As [`new`](Self::new), judging leases by this clock.
    pub fn with_clock(clock: Clock) -> Self {
        Self::named("memory:".into(), clock)
    }

    fn named(url: String, clock: Clock) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let identity = format!("{url}@{}.{}.{made}", std::process::id(), wall_micros());
        let info = StoreInfo::new(url, guarantees()).identified(identity).local();
        Self { info, clock, state: Mutex::default() }
    }

    /// The process-wide namespace of this URL.
    pub(crate) fn connect(url: &str) -> Result<Arc<Self>> {
        static NAMESPACES: Mutex<BTreeMap<String, Weak<MemoryStore>>> = Mutex::new(BTreeMap::new());
        let name = url.strip_prefix("memory:").unwrap_or(url).trim_start_matches('/');
        if let Some(c) = name.chars().find(|c| c.is_control() || "?#@/".contains(*c)) {
            let what = format!("a memory: store is memory:NAME, without {c:?}");
            return Err(Error::new(ErrorKind::Config, what));
        }
        let mut all = locked(&NAMESPACES);
        all.retain(|_, store| store.strong_count() > 0);
        if let Some(store) = all.get(name).and_then(Weak::upgrade) {
            return Ok(store);
        }
        let store = Arc::new(Self::named(format!("memory:{name}"), Clock::default()));
        all.insert(name.to_owned(), Arc::downgrade(&store));
        Ok(store)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two consistent states.
        locked(&self.state)
    }

    fn now(&self) -> u64 {
        self.clock.now().as_nanos() / 1_000
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    /// Works on the lock of `name` if it is in use, then tells those that it granted.
    fn with<T>(&mut self, name: &Name, work: impl FnOnce(&mut Lock) -> T) -> Option<T> {
        let lock = self.locks.get_mut(name)?;
        let done = work(lock);
        lock.tell();
        if lock.queue.is_empty() {
            self.last_token = self.last_token.max(lock.queue.last_token());
            self.locks.remove(name);
        }
        Some(done)
    }
}

impl Lock {
    fn new(claim: &Claim, last_token: u64) -> Self {
        let mut queue = Queue::new(claim.kind, claim.capacity, true);
        queue.raise_last_token(last_token);
        Self { queue, waiters: HashMap::new() }
    }

    /// Registers who shall be told of a grant.
    fn enlist(&mut self, id: ClaimId) {
        // Waiters that expired and never left; looked for only when there are many of them.
        if self.waiters.len() > 2 * self.queue.entries().len() + 16 {
            let here: HashSet<ClaimId> = self.queue.entries().map(|e| e.id).collect();
            self.waiters.retain(|id, _| here.contains(id));
        }
        self.waiters.entry(id).or_default().clear();
    }

    fn tell(&mut self) {
        for id in self.queue.take_fresh_grants() {
            let entry = self.queue.entries().find(|e| e.id == id);
            if let (Some(entry), Some(waiter)) = (entry, self.waiters.get(&id)) {
                waiter.tell(Signal::Granted(entry.token));
            }
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let one_process = Finding::note(
            "one-process",
            "the locks are in the memory of this process",
            "no other process sees them: it is the store for the tasks of one program, and for tests",
        );
        Ok(own_clock(wall_micros()).into_iter().chain([one_process]).collect())
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let mut state = self.lock();
        let at = StoreTime { now: self.now(), stamp: self.clock.wall_micros() };
        let last = state.last_token;
        state.locks.entry(claim.name.clone()).or_insert_with(|| Lock::new(claim, last));
        let joined = state.with(&claim.name, |lock| {
            let joined = lock.queue.join(claim, mode, at, "");
            if let Ok(Joined::Waiting(_)) = &joined {
                lock.enlist(claim.id);
            }
            joined
        });
        match joined {
            Some(Ok(joined)) => Ok(joined),
            Some(Err(m)) => Err(mismatch(claim, m.kind, m.capacity)),
            None => Ok(Joined::Busy { holders: Vec::new() }),
        }
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut state = self.lock();
        let now = self.now();
        let one = |Renew { claim, lease }: &Renew| {
            let renewed = state.with(&claim.name, |l| l.queue.renew(claim, *lease, now));
            renewed.unwrap_or(Renewal::Lost)
        };
        Ok(renewals.iter().map(one).collect())
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let mut state = self.lock();
        let now = self.now();
        let left = state.with(&claim.name, |lock| {
            lock.waiters.remove(&claim.id);
            lock.queue.leave(claim.id, keep, now)
        });
        Ok(left.unwrap_or(false))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let find = |state: &State| state.locks.get(&claim.name)?.waiters.get(&claim.id).cloned();
        let waiter = find(&self.lock());
        Ok(match waiter {
            Some(waiter) => waiter.news().await,
            None => Signal::Ask,
        })
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let mut state = self.lock();
        let now = self.now();
        state.with(name, |l| l.queue.settle(now));
        Ok(state.locks.get(name).map(|l| describe(name, &l.queue, now)))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut state = self.lock();
        let now = self.now();
        let matching = |n: &&Name| n.as_str().starts_with(prefix);
        let names: Vec<Name> = state.locks.keys().filter(matching).cloned().collect();
        for name in &names {
            state.with(name, |l| l.queue.settle(now));
        }
        let shown = names.iter().filter_map(|n| Some(describe(n, &state.locks.get(n)?.queue, now)));
        Ok(shown.collect())
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut state = self.lock();
        let now = self.now();
        Ok(state.with(name, |l| l.queue.evict(which, now)).unwrap_or(0))
    }
}

fn describe(name: &Name, queue: &Queue, now: u64) -> LockInfo {
    LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now))
}

fn guarantees() -> Guarantees {
    Guarantees {
        kinds: Cow::Borrowed(ALL_KINDS),
        fifo: true,
        wakeup: Wakeup::Push,
        liveness: Liveness::Lease,
        clock: ClockModel::Monotonic,
        lock_delay: true,
        at_least: true,
        grant: Durability::Process,
        token: Durability::Process,
        on_pause: Survival::Fenced,
        on_clock_step: Survival::Exclusive,
        on_store_crash: Survival::NotApplicable,
        on_failover: Survival::NotApplicable,
        on_partition: Survival::NotApplicable,
        stall: Stall::Nobody,
        recovery: Duration::from_secs(2),
        recovery_leases: 1,
        notes: Cow::Borrowed(&[
            Cow::Borrowed("Locks are seen by this process only."),
            Cow::Borrowed(
                "Tokens rise over a restart of the process as long as the wall clock is not set \
                 back over it.",
            ),
        ]),
    }
}
