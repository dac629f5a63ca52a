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

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::guarantees::ALL_KINDS;
use super::{
    ClockModel, Durability, Evict, Guarantees, Joined, Liveness, LockInfo, Mode, Renew, Renewal,
    Signal, Store, Survival, Wakeup, mismatch,
};
use crate::claim::{Claim, ClaimId, Token};
use crate::clock::{Clock, wall_micros};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::queue::{At, Queue};

/// Queues in this process. See the module's documentation.
#[derive(Debug)]
pub struct MemoryStore {
    url: String,
    guarantees: Guarantees,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queues: BTreeMap<Name, Queue>,
    waiters: HashMap<ClaimId, Arc<Waiter>>,
    last_token: u64,
}

#[derive(Debug, Default)]
struct Waiter {
    granted: Mutex<Option<Token>>,
    wake: Notify,
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
        Self { url, guarantees: guarantees(), clock, state: Mutex::default() }
    }

    /// The process-wide namespace of this URL.
    pub(crate) fn connect(url: &str) -> Result<Arc<Self>> {
        static NAMESPACES: Mutex<BTreeMap<String, Weak<MemoryStore>>> = Mutex::new(BTreeMap::new());
        let name = url.strip_prefix("memory:").unwrap_or(url).trim_start_matches('/');
        if let Some(c) = name.chars().find(|c| c.is_control() || "?#@/".contains(*c)) {
            let what = format!("a memory: store is memory:NAME, without {c:?}");
            return Err(Error::new(ErrorKind::Config, what));
        }
        let mut all = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Works on the queue of `name`, then tells those that it granted.
    fn with<T>(&mut self, name: &Name, work: impl FnOnce(&mut Queue) -> T) -> Option<T> {
        let queue = self.queues.get_mut(name)?;
        let done = work(queue);
        self.tell(name);
        Some(done)
    }

    /// Waiters that expired and never left; looked for only when there are many more than places.
    fn forget_gone_waiters(&mut self) {
        let places: usize = self.queues.values().map(|q| q.entries().len()).sum();
        if self.waiters.len() > 2 * places + 64 {
            let queues = &self.queues;
            self.waiters.retain(|id, _| queues.values().any(|q| q.position(*id).is_some()));
        }
    }

    fn tell(&mut self, name: &Name) {
        let Some(queue) = self.queues.get_mut(name) else { return };
        for id in queue.take_fresh_grants() {
            let entry = queue.position(id).and_then(|i| queue.entries().nth(i));
            if let (Some(entry), Some(waiter)) = (entry, self.waiters.get(&id)) {
                *waiter.granted.lock().unwrap_or_else(PoisonError::into_inner) = Some(entry.token);
                waiter.wake.notify_one();
            }
        }
        if queue.is_empty() {
            self.last_token = self.last_token.max(queue.last_token());
            self.queues.remove(name);
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn guarantees(&self) -> &Guarantees {
        &self.guarantees
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn is_local(&self) -> bool {
        true
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let mut state = self.lock();
        let at = At { now: self.now(), stamp: wall_micros() };
        let last = state.last_token;
        let queue = state.queues.entry(claim.name.clone()).or_insert_with(|| {
            let mut queue = Queue::new(claim.kind, claim.capacity, true);
            queue.raise_last_token(last);
            queue
        });
        let joined = queue.join(claim, mode, at, "");
        if let Ok(Joined::Waiting(_)) = &joined {
            state.forget_gone_waiters();
            state.waiters.entry(claim.id).or_default();
        }
        state.tell(&claim.name);
        joined.map_err(|m| mismatch(claim, m.kind, m.capacity))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut state = self.lock();
        let now = self.now();
        let one = |Renew { claim, lease }: &Renew| {
            let renewed = state.with(&claim.name, |q| q.renew(claim, *lease, now));
            renewed.unwrap_or(Renewal::Lost)
        };
        Ok(renewals.iter().map(one).collect())
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let mut state = self.lock();
        let now = self.now();
        state.waiters.remove(&claim.id);
        Ok(state.with(&claim.name, |q| q.leave(claim.id, keep, now)).unwrap_or(false))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let Some(waiter) = self.lock().waiters.get(&claim.id).cloned() else {
            return Ok(Signal::Ask);
        };
        loop {
            // Taken after the wake-up, so that what came before this call is found as well.
            let granted = *waiter.granted.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(token) = granted {
                return Ok(Signal::Granted(token));
            }
            waiter.wake.notified().await;
        }
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let mut state = self.lock();
        let now = self.now();
        state.with(name, |q| q.settle(now));
        let info = state.queues.get(name).map(|q| describe(name, q, now));
        Ok(info)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut state = self.lock();
        let now = self.now();
        let matching = |n: &&Name| n.as_str().starts_with(prefix);
        let names: Vec<Name> = state.queues.keys().filter(matching).cloned().collect();
        for name in &names {
            state.with(name, |q| q.settle(now));
        }
        let shown = names.iter().filter_map(|n| Some(describe(n, state.queues.get(n)?, now)));
        Ok(shown.collect())
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut state = self.lock();
        let now = self.now();
        Ok(state.with(name, |q| q.evict(which, now)).unwrap_or(0))
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
