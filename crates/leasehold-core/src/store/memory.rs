//! The `memory:` store: queues in this process, behind a mutex.
//!
//! There is one [`Queue`] for each name in use. Every call locks the mutex, changes one queue and
//! unlocks it. Nothing is awaited in between, so every call is atomic, and a dropped future has
//! done either nothing or everything. Leases are measured by the boot clock, and tokens are derived
//! from the wall clock.
//!
//! An empty queue is *idle*. It is invisible, and the next claim determines its kind and capacity.
//! It is kept only because most locks are acquired again, and creating the queue costs more than
//! everything else in a call. When there are more than [`IDLE`] idle queues, and more than half of
//! all queues are idle, all idle ones are dropped. Only the highest token ever drawn in the
//! namespace is kept, and every new queue starts from it. So memory use does not grow with the
//! number of names ever used, and tokens still increase. Names come from outside the program, so
//! they are looked up with a keyed hash.
//!
//! `memory:` is one namespace for the whole process, and `memory:NAME` is another one for each
//! NAME. A namespace exists while a client is connected to it.

use crate::util::locked::locked;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::guarantees::ALL_KINDS;
use super::inbox::Inbox;
use super::{
    ClockModel, Converted, Durability, Evict, EvictionListener, EvictionListeners, Follow,
    Followers, Guarantees, Joined, Liveness, LockInfo, Mode, Queues, Renew, Renewal, Signal, Stall,
    Store, StoreInfo, Survival, Wakeup, mismatch,
};
use crate::queue::{Queue, StoreTime};
use crate::types::claim::{Claim, ClaimId, IdMap};
use crate::types::doctor::{Finding, own_clock};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::Name;
use crate::util::clock::{Clock, wall_micros};
use async_trait::async_trait;

/// A store in the memory of this process, `memory:`.
#[derive(Debug)]
pub struct MemoryStore {
    info: StoreInfo,
    clock: Clock,
    state: Mutex<State>,
    listeners: EvictionListeners,
    followers: Followers,
}

#[derive(Debug, Default)]
struct State {
    locks: HashMap<Name, Lock>,
    /// The number of idle locks, whose queue is empty.
    idle: usize,
    last_token: u64,
}

/// Up to this number of idle locks, none is dropped.
const IDLE: usize = 64;
/// The queue capacity that an idle lock keeps. It keeps up to about twice that for waiters.
const ROOM: usize = 16;

/// The effect of one call on a lock's use: the lock is now in use, or now idle.
enum UsageChange {
    InUse,
    Idle { last_token: u64 },
}

/// One name, in use or idle.
#[derive(Debug)]
struct Lock {
    queue: Queue,
    waiters: IdMap<Arc<Inbox>>,
}

impl MemoryStore {
    /// Creates a store that no URL can reach.
    pub fn new() -> Self {
        Self::with_clock(Clock::default())
    }

    /// Creates a store that no URL can reach, with this clock for leases.
    pub fn with_clock(clock: Clock) -> Self {
        Self::named("memory:".into(), clock)
    }

    fn named(url: String, clock: Clock) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let identity = format!("{url}@{}.{}.{made}", std::process::id(), wall_micros());
        let info = StoreInfo::new(url, guarantees()).identified(identity).local();
        let (state, listeners, followers) = Default::default();
        Self { info, clock, state, listeners, followers }
    }

    /// Returns the store of the process-wide namespace that this URL names.
    pub(crate) fn connect(url: &str) -> Result<Arc<Self>> {
        static NAMESPACES: Mutex<BTreeMap<String, Weak<MemoryStore>>> = Mutex::new(BTreeMap::new());
        let name = url.strip_prefix("memory:").unwrap_or(url).trim_start_matches('/');
        if let Some(c) = name.chars().find(|c| c.is_control() || "?#@/".contains(*c)) {
            let what = format!("invalid store URL: the NAME of memory:NAME cannot contain {c:?}");
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
    /// Runs `work` on the lock of `name` if it exists, then notifies the claims that were granted.
    fn with<T>(&mut self, name: &Name, work: impl FnOnce(&mut Lock) -> T) -> Option<T> {
        let (done, usage) = self.locks.get_mut(name)?.work(work);
        self.apply_usage(usage);
        Some(done)
    }

    /// Runs `work` on the lock of this claim, which is created if it does not exist.
    fn with_new<T>(&mut self, claim: &Claim, work: impl FnOnce(&mut Lock) -> T) -> T {
        let lock = match self.locks.get_mut(&claim.name) {
            Some(lock) => lock,
            None => {
                self.idle += 1;
                let new = || Lock::new(claim, self.last_token);
                self.locks.entry(claim.name.clone()).or_insert_with(new)
            }
        };
        let (done, usage) = lock.work(work);
        self.apply_usage(usage);
        done
    }

    fn apply_usage(&mut self, usage: Option<UsageChange>) {
        match usage {
            None => {}
            Some(UsageChange::InUse) => self.idle -= 1,
            Some(UsageChange::Idle { last_token }) => {
                self.last_token = self.last_token.max(last_token);
                self.idle += 1;
                self.sweep();
            }
        }
    }

    /// Drops the idle locks if there are many of them.
    fn sweep(&mut self) {
        if self.idle <= IDLE.max(self.locks.len() / 2) {
            return;
        }
        self.locks.retain(|_, lock| !lock.queue.is_empty());
        self.idle = 0;
        self.locks.shrink_to(2 * (self.locks.len() + IDLE));
    }

    /// Returns the queue of this lock if it is in use.
    fn used(&self, name: &Name) -> Option<&Queue> {
        self.locks.get(name).map(|lock| &lock.queue).filter(|queue| !queue.is_empty())
    }
}

impl Lock {
    fn new(claim: &Claim, last_token: u64) -> Self {
        let mut queue = Queue::new(claim.kind, claim.capacity, true).indexed();
        queue.raise_last_token(last_token);
        Self { queue, waiters: IdMap::default() }
    }

    fn work<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> (T, Option<UsageChange>) {
        let was_idle = self.queue.is_empty();
        let done = work(self);
        self.notify();
        let usage = match (was_idle, self.queue.is_empty()) {
            (true, false) => Some(UsageChange::InUse),
            (false, true) => {
                self.rest();
                Some(UsageChange::Idle { last_token: self.queue.last_token() })
            }
            _ => None,
        };
        (done, usage)
    }

    /// Reduces the memory of a lock whose queue has become empty.
    fn rest(&mut self) {
        self.queue.shrink_to(ROOM);
        if self.waiters.capacity() > 2 * ROOM {
            // These waiters expired without leaving. They have already been notified.
            self.waiters = IdMap::default();
        }
    }

    /// Registers the claim to be notified when it is granted.
    fn enlist(&mut self, id: ClaimId) {
        // Removes waiters that expired without leaving, but only when there are many of them.
        if self.waiters.len() > 2 * self.queue.entries().len() + 16 {
            let here: HashSet<ClaimId> = self.queue.entries().map(|e| e.id).collect();
            self.waiters.retain(|id, _| here.contains(id));
        }
        self.waiters.entry(id).or_default().clear();
    }

    fn notify(&mut self) {
        for id in self.queue.take_fresh_grants() {
            let entry = self.queue.entries().find(|e| e.id == id);
            if let (Some(entry), Some(waiter)) = (entry, self.waiters.get(&id)) {
                waiter.notify(Signal::Granted(entry.token));
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
            "the locks exist only in the memory of this process",
            "other processes cannot see them. Use this store between the tasks of one program, and in tests",
        );
        Ok(own_clock(wall_micros()).into_iter().chain([one_process]).collect())
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let mut state = self.lock();
        let at = StoreTime { now: self.now(), stamp: self.clock.wall_micros() };
        let joined = state.with_new(claim, |lock| {
            let joined = lock.queue.join(claim, mode, at, "");
            if let Ok(Joined::Waiting(_)) = &joined {
                lock.enlist(claim.id);
            }
            joined
        });
        drop(state);
        if !matches!(joined, Ok(Joined::Busy { .. })) {
            self.followers.notify(claim.name.as_str());
        }
        joined.map_err(|m| mismatch(claim, m.kind, m.capacity))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut state = self.lock();
        let now = self.now();
        let one = |Renew { claim, lease }: &Renew| {
            let renewed = state.with(&claim.name, |l| l.queue.renew(claim, *lease, now));
            renewed.unwrap_or(Renewal::Lost)
        };
        let renewed: Vec<Renewal> = renewals.iter().map(one).collect();
        drop(state);
        // A waiter's heartbeat is not reported, even if it settles an expired lease. Subscribers
        // also poll periodically, and so find such a change.
        for (Renew { claim, .. }, renewal) in renewals.iter().zip(&renewed) {
            if !matches!(renewal, Renewal::Waiting(_)) {
                self.followers.notify(claim.name.as_str());
            }
        }
        Ok(renewed)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let mut state = self.lock();
        let now = self.now();
        let left = state.with(&claim.name, |lock| {
            if !lock.waiters.is_empty() {
                lock.waiters.remove(&claim.id);
            }
            lock.queue.leave(claim.id, keep, now)
        });
        drop(state);
        self.followers.notify(claim.name.as_str());
        Ok(left.unwrap_or(false))
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let mut state = self.lock();
        let now = self.now();
        let converted = state.with(&claim.name, |lock| lock.queue.convert(claim, now));
        drop(state);
        self.followers.notify(claim.name.as_str());
        Ok(converted.unwrap_or(Converted::Lost))
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
        Ok(state.used(name).map(|queue| describe(name, queue, now)))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut state = self.lock();
        let now = self.now();
        let matching = |n: &&Name| n.as_str().starts_with(prefix);
        let mut names: Vec<Name> = state.locks.keys().filter(matching).cloned().collect();
        names.sort_unstable();
        for name in &names {
            state.with(name, |l| l.queue.settle(now));
        }
        let shown = names.iter().filter_map(|n| Some(describe(n, state.used(n)?, now)));
        Ok(shown.collect())
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut state = self.lock();
        let now = self.now();
        let evicted = state.with(name, |lock| lock.queue.evict(which, now)).unwrap_or_default();
        drop(state);
        evicted.iter().for_each(|entry| self.listeners.ask(entry.id));
        self.followers.notify(name.as_str());
        Ok(evicted.len())
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.listeners.add(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        Ok(Some(self.followers.follow(queues.clone())))
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
        evicted: Wakeup::Push,
        followed: Wakeup::Push,
        liveness: Liveness::Lease,
        clock: ClockModel::Monotonic,
        lock_delay: true,
        min_hold: true,
        downgrades: true,
        upgrades: true,
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
            Cow::Borrowed("Locks are visible in this process only."),
            Cow::Borrowed(
                "Tokens keep increasing across a restart of the process, unless the wall clock is \
                 set back.",
            ),
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::claim::Kind;

    fn claim(name: &str, kind: Kind, capacity: u32) -> Claim {
        Claim::new(Name::new(name).unwrap(), kind, 1, capacity).unwrap()
    }

    fn block<T>(work: impl Future<Output = Result<T>>) -> T {
        pollster::block_on(work).unwrap()
    }

    fn pair(store: &MemoryStore, claim: &Claim) -> u64 {
        let joined = block(store.join(claim, Mode::Try));
        assert!(block(store.leave(claim, None)));
        let Joined::Holding { token, .. } = joined else { panic!("{joined:?}") };
        token.get()
    }

    #[test]
    fn idle_lock_behaves_like_an_unused_one() {
        let store = MemoryStore::new();
        let mutex = claim("a", Kind::Mutex, 1);
        let first = pair(&store, &mutex);
        assert_eq!(locked(&store.state).locks.len(), 1, "expected one stored lock");
        assert!(block(store.read(&mutex.name)).is_none());
        assert!(block(store.list("")).is_empty());
        assert!(!block(store.leave(&mutex, None)));
        let renewed = block(store.renew(&[Renew { claim: mutex.clone(), lease: mutex.lease }]));
        assert!(matches!(renewed[..], [Renewal::Lost]));
        assert_eq!(block(store.evict(&mutex.name, Evict::Holders)), 0);
        assert!(
            pair(&store, &claim("a", Kind::Semaphore, 3)) > first,
            "the token of another kind is not higher"
        );
    }

    #[test]
    fn names_that_were_used_once_are_forgotten() {
        let store = MemoryStore::new();
        let held: Vec<Claim> =
            (0..100).map(|n| claim(&format!("held {n}"), Kind::Mutex, 1)).collect();
        for claim in &held {
            assert!(matches!(block(store.join(claim, Mode::Try)), Joined::Holding { .. }));
        }
        let mut last = 0;
        for n in 0..10_000 {
            let token = pair(&store, &claim(&n.to_string(), Kind::Mutex, 1));
            assert!(token > last, "the token of a new name is not higher than all others");
            last = token;
        }
        let state = locked(&store.state);
        assert!(state.locks.len() < 350, "{} locks are stored", state.locks.len());
        assert_eq!(state.idle, state.locks.len() - held.len());
        drop(state);
        assert_eq!(block(store.list("held")).len(), held.len());
    }

    #[test]
    fn memory_of_departed_waiters_is_freed() {
        let store = MemoryStore::new();
        let crowd: Vec<Claim> = (0..2_000).map(|_| claim("a", Kind::Mutex, 1)).collect();
        for claim in &crowd {
            block(store.join(claim, Mode::Wait));
        }
        for claim in &crowd {
            assert!(block(store.leave(claim, None)));
        }
        let state = locked(&store.state);
        let lock = &state.locks[&crowd[0].name];
        assert!(lock.waiters.capacity() <= 4 * ROOM);
        assert!(format!("{lock:?}").len() < 1_000);
    }
}
