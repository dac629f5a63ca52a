//! The judge: an observer that knows the real time.
//!
//! It uses the same information as programs: whether a guard reports that it is held. It reads that
//! at a moment of the world's time, by the clock of the guard's own process. Whenever a guard of a
//! lock is granted, it checks all guards of that lock.
//!
//! It is stricter than torture's checker, which has less information. That checker reads what
//! processes have recorded, and knows the time of each event only between two limits. Two holds
//! that overlap by less than that are not a violation there. And a paused client may have held
//! until its next record. Here no time passes between a grant and its judgement, and every clock's
//! error is known. A guard that its program does not use is checked as well.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::{Hold as Guard, Kind, Token, Watch};
use tokio::time::Instant;

use crate::plan::{LockPlan, Plan, STALE, System};

#[derive(Debug)]
pub(crate) struct Judge {
    plan: Plan,
    began: Instant,
    /// Whether the story is printed.
    verbose: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    story: Vec<String>,
    broken: Vec<String>,
    seen: BTreeMap<&'static str, u64>,
    locks: Vec<Lock>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Lock {
    holds: Vec<Hold>,
    /// Evicted claims, and when they were evicted. Their holders may not have found out yet.
    evicted: BTreeMap<Token, Instant>,
    tokens: BTreeSet<Token>,
    /// Requests without a time limit that have no answer yet, and when they were made.
    waiting: BTreeMap<u64, Instant>,
    /// Since when the lock, or a part of it, has been free.
    free_since: Option<Instant>,
    closed_until: Option<Instant>,
    /// For a mutex: until when no other client may follow which holder, unless that holder releases
    /// it.
    delayed_until: Option<(Token, Instant)>,
}

struct Hold {
    watch: Watch,
    weight: u32,
    token: Token,
    actor: String,
}

/// A request of one task for one lock.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) number: u64,
    pub(crate) actor: String,
    pub(crate) lock: usize,
    pub(crate) weight: u32,
    pub(crate) at: Instant,
    /// Whether the request has no time limit and is not abandoned.
    pub(crate) patient: bool,
    pub(crate) min_hold: Duration,
    pub(crate) lock_delay: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// The token of the hold that the owner already has.
    pub(crate) again: Option<Token>,
}

/// The timing promises in a calm world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Maximum time for which a lock may be free while a client waits for it.
    pub(crate) hand_over: Duration,
    /// A request that was made this much earlier is certainly earlier in the queue.
    pub(crate) before: Duration,
}

impl Pace {
    /// Returns the promises for this system. With cells, joining a queue takes some round trips,
    /// and more if others are faster. Also, waiters poll.
    pub(crate) fn of(system: System) -> Self {
        let (hand_over, before) = if system == System::Memory { (150, 50) } else { (400, 600) };
        Self { hand_over: Duration::from_millis(hand_over), before: Duration::from_millis(before) }
    }
}

impl Judge {
    pub(crate) fn new(plan: &Plan, verbose: bool) -> Self {
        let locks = plan.locks.iter().map(|_| Lock::default()).collect();
        let state = Mutex::new(State { locks, ..State::default() });
        Self { plan: plan.clone(), began: Instant::now(), verbose, state }
    }

    fn now(&self) -> String {
        format!("{:>9.3} ", self.began.elapsed().as_secs_f64() * 1_000.0)
    }

    /// Returns whether the story is printed.
    pub(crate) fn is_told(&self) -> bool {
        self.verbose
    }

    /// Adds an event to the story.
    pub(crate) fn log(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            let line = self.now() + &what();
            self.state.lock().unwrap().story.push(line);
        }
    }

    /// Counts an event that the worlds must contain.
    pub(crate) fn saw(&self, what: &'static str) {
        *self.state.lock().unwrap().seen.entry(what).or_default() += 1;
    }

    /// Records that a promise was broken.
    pub(crate) fn breaks(&self, what: &str) {
        let line = self.now() + "BROKEN: " + what;
        let mut state = self.state.lock().unwrap();
        state.story.push(line.clone());
        state.broken.push(line);
    }

    pub(crate) fn asks(&self, asked: &Asked) {
        if asked.patient && asked.again.is_none() {
            let mut state = self.state.lock().unwrap();
            state.locks[asked.lock].waiting.insert(asked.number, asked.at);
        }
    }

    /// Records that a request was answered or abandoned.
    pub(crate) fn asks_no_more(&self, asked: &Asked) {
        self.state.lock().unwrap().locks[asked.lock].waiting.remove(&asked.number);
    }

    /// Judges a grant at the moment at which its holder receives it.
    pub(crate) fn granted(&self, asked: &Asked, guard: &Guard) {
        self.saw("granted");
        self.asks_no_more(asked);
        let plan = &self.plan.locks[asked.lock];
        let (token, now) = (guard.grant(), Instant::now());
        self.log(|| format!("{} holds {} with {token}", asked.actor, plan.name));
        let mut wrong = None;
        // No time has passed since the guard was returned.
        if guard.remaining().is_zero() {
            wrong = Some("the grant expired before its holder received it".to_owned());
        }
        let mut state = self.state.lock().unwrap();
        let lock = &mut state.locks[asked.lock];
        lock.holds.retain(|hold| !hold.watch.remaining().is_zero());
        if asked.again.is_none() {
            wrong = wrong.or_else(|| lock.wrong_token(plan, token));
            lock.tokens.insert(token);
            let hold = Hold {
                watch: guard.watch(),
                weight: asked.weight,
                token,
                actor: asked.actor.clone(),
            };
            lock.holds.push(hold);
            if !self.plan.wild {
                wrong = wrong.or_else(|| lock.too_many(plan));
            }
            if self.plan.calm {
                let pace = Pace::of(self.plan.system);
                wrong = wrong.or_else(|| lock.unfair(pace, plan, asked, now));
            }
            // An evicted holder may learn of its grant after a later grant of its own.
            if !lock.evicted.contains_key(&token) {
                let delayed = lock.delayed_until.take();
                if !self.plan.wild && delayed.is_some_and(|(_, until)| now < until) {
                    wrong = wrong.or(Some("granted before the end of lock_delay".into()));
                }
                lock.delayed_until = lock.delay(plan, asked, guard, now);
            }
            let closed = lock.closed_until.take();
            if closed.is_some_and(|until| now < until) {
                wrong = wrong.or(Some("granted before the end of min_hold".into()));
            }
            if self.plan.calm && plan.kind == Kind::Mutex && !asked.min_hold.is_zero() {
                // The duration is by the holder's own clock, which may be fast.
                lock.closed_until = Some(now + asked.min_hold * 98 / 100);
            }
        }
        drop(state);
        if let Some(what) = wrong {
            self.breaks(&format!("{} with {token}: {what}", asked.actor));
        }
    }

    /// Records the weight that the holder of this token believes to have.
    pub(crate) fn weighs(&self, lock: usize, token: Token, weight: u32) {
        let mut state = self.state.lock().unwrap();
        let held = &mut state.locks[lock];
        held.holds.retain(|hold| !hold.watch.remaining().is_zero());
        for hold in held.holds.iter_mut().filter(|hold| hold.token == token) {
            hold.weight = weight;
        }
        let wrong = held.too_many(&self.plan.locks[lock]).filter(|_| !self.plan.wild);
        drop(state);
        if let Some(what) = wrong {
            self.breaks(&format!("{token} has the weight {weight}: {what}"));
        }
    }

    /// Judges a holder that checks its guard and believes that it holds.
    pub(crate) fn believes(&self, lock: usize, token: Token, lease: Duration) {
        let out = self.state.lock().unwrap().locks[lock].evicted.get(&token).copied();
        // The hold may have been renewed just before the eviction, and its own clock may be slow.
        let most = lease * if self.plan.wild { 2 } else { 1 } * 102 / 100;
        // A stale read may have delayed it further.
        let most = most + if self.plan.system.looks_behind() { STALE } else { Duration::ZERO };
        if out.is_some_and(|out| out.elapsed() > most) {
            self.breaks(&format!("{token} was evicted {most:?} ago, but is_held() is true"));
        }
    }

    /// Records that the holder begins to release.
    pub(crate) fn lets_go(&self, asked: &Asked, token: Token) {
        let lock = &mut self.state.lock().unwrap().locks[asked.lock];
        lock.delayed_until = lock.delayed_until.filter(|(delays, _)| *delays != token);
    }

    /// Records that the holder has released, with or without a confirmation by the store.
    pub(crate) fn ended(&self, asked: &Asked, token: Token) {
        let lock = &mut self.state.lock().unwrap().locks[asked.lock];
        // The next holder may have learned of its grant earlier.
        if lock.tokens.last() == Some(&token) {
            lock.free_since = Some(Instant::now());
        }
    }

    /// Records that these claims are evicted now.
    pub(crate) fn evicted(&self, lock: usize, tokens: impl IntoIterator<Item = Token>) {
        let mut state = self.state.lock().unwrap();
        let now = Instant::now();
        state.locks[lock].evicted.extend(tokens.into_iter().map(|token| (token, now)));
        // The eviction ends the cooldown.
        state.locks[lock].closed_until = None;
        state.locks[lock].delayed_until = None;
    }

    pub(crate) fn ends(&self) -> (Vec<String>, Vec<String>, BTreeMap<&'static str, u64>) {
        let state = std::mem::take(&mut *self.state.lock().unwrap());
        (state.story, state.broken, state.seen)
    }
}

impl Lock {
    fn wrong_token(&self, plan: &LockPlan, token: Token) -> Option<String> {
        if self.tokens.contains(&token) {
            return Some("another grant had this token".into());
        }
        // An evicted holder may learn of its grant after a later grant of its own.
        if plan.kind != Kind::Mutex || self.evicted.contains_key(&token) {
            return None;
        }
        let greater = self.tokens.last().filter(|last| **last > token)?;
        Some(format!("the higher token {greater} was granted earlier"))
    }

    /// Returns until when no other client may follow this holder, unless it releases or is evicted.
    /// The time is by the holder's own clock, which may be fast.
    fn delay(
        &self,
        plan: &LockPlan,
        asked: &Asked,
        guard: &Guard,
        now: Instant,
    ) -> Option<(Token, Instant)> {
        let delays = plan.kind == Kind::Mutex && !asked.lock_delay.is_zero();
        let held = guard.remaining().min(asked.max_hold.unwrap_or(Duration::MAX));
        delays.then(|| (guard.grant(), now + (held + asked.lock_delay) * 98 / 100))
    }

    /// Returns an error if too many clients believe that they hold it.
    fn too_many(&self, plan: &LockPlan) -> Option<String> {
        let holds = || self.holds.iter().filter(|hold| !self.evicted.contains_key(&hold.token));
        let capacity = match plan.kind {
            Kind::Semaphore => plan.permits,
            _ => leasehold_core::MAX_READERS,
        };
        let held: u64 = holds().map(|hold| u64::from(hold.weight)).sum();
        let alone = match plan.kind {
            Kind::Mutex => holds().count() > 1,
            _ => held > u64::from(capacity),
        };
        let named = || holds().map(|hold| format!("{} with {}", hold.actor, hold.token));
        alone.then(|| format!("held at once: {}", named().collect::<Vec<_>>().join(", ")))
    }

    /// Returns an error if it was granted before an earlier request, or far too late.
    fn unfair(
        &mut self,
        pace: Pace,
        plan: &LockPlan,
        asked: &Asked,
        now: Instant,
    ) -> Option<String> {
        if plan.kind != Kind::Mutex {
            return None;
        }
        let first = self.waiting.values().find(|at| **at + pace.before < asked.at);
        if first.is_some() && asked.patient {
            return Some("an earlier request still waits".into());
        }
        // If the lock is still being released, it is not recorded as free yet.
        let since = self.free_since.take()?.max(asked.at);
        let late = now.saturating_duration_since(since);
        // The store does not notify waiters of the end of min_hold. A waiter finds out at its next
        // heartbeat.
        (asked.patient && late > pace.hand_over && self.closed_until.is_none())
            .then(|| format!("the lock was free for {late:?}"))
    }
}
