//! Who looks on, and knows what time it really is.
//!
//! What it judges by is what programs go by: that a guard says it is held, at a moment of the world's time,
//! by the clock of the guard's own process. It asks all guards of a lock whenever one of them is granted.
//!
//! It is not torture's checker, which has less to go by and must forgive more: that one reads what processes have
//! written down, each at a time between two that it knows, so two holders who overlap by less than that are no
//! violation to it, and who was stopped may have held until it wrote again. Here no time passes between a grant and
//! its judgement, every clock's error is known, and a guard that nobody looks at is asked all the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::{Guard, Kind, Token, Watch};
use tokio::time::Instant;

use crate::plan::{LockPlan, Plan, STALE, System};

#[derive(Debug)]
pub(crate) struct Judge {
    plan: Plan,
    began: Instant,
    /// Whether somebody reads the story.
    told: bool,
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
    /// Those that were thrown out, and when: who holds by them may not have heard of it yet.
    evicted: BTreeMap<Token, Instant>,
    tokens: BTreeSet<Token>,
    /// Who asked with patience and has no answer, by when.
    waiting: BTreeMap<u64, Instant>,
    /// Since when the lock, or a part of it, was not held.
    free_since: Option<Instant>,
    closed_until: Option<Instant>,
    /// Of a mutex: until when nobody may come after whom, unless he lets go of it.
    delayed_until: Option<(Token, Instant)>,
}

struct Hold {
    watch: Watch,
    weight: u32,
    token: Token,
    who: String,
}

/// What was asked of one lock, by one task.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) number: u64,
    pub(crate) who: String,
    pub(crate) lock: usize,
    pub(crate) weight: u32,
    pub(crate) at: Instant,
    /// Asked without a limit, and not to be given up.
    pub(crate) patient: bool,
    pub(crate) at_least: Duration,
    pub(crate) lock_delay: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// The owner holds it already.
    pub(crate) again: Option<Token>,
}

/// What is promised in a calm world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// How long one who waits may be behind a lock that is free.
    pub(crate) hand_over: Duration,
    /// Who asked this much earlier is certainly before.
    pub(crate) before: Duration,
}

impl Pace {
    /// In cells it takes some round trips to come into a queue, and more where others are faster; and who waits looks.
    pub(crate) fn of(system: System) -> Self {
        let (hand_over, before) = if system == System::Memory { (150, 50) } else { (400, 600) };
        Self { hand_over: Duration::from_millis(hand_over), before: Duration::from_millis(before) }
    }
}

impl Judge {
    pub(crate) fn new(plan: &Plan, told: bool) -> Self {
        let locks = plan.locks.iter().map(|_| Lock::default()).collect();
        let state = Mutex::new(State { locks, ..State::default() });
        Self { plan: plan.clone(), began: Instant::now(), told, state }
    }

    fn now(&self) -> String {
        format!("{:>9.3} ", self.began.elapsed().as_secs_f64() * 1_000.0)
    }

    /// Whether somebody reads the story.
    pub(crate) fn is_told(&self) -> bool {
        self.told
    }

    /// Something happened.
    pub(crate) fn tell(&self, what: impl FnOnce() -> String) {
        if self.told {
            let line = self.now() + &what();
            self.state.lock().unwrap().story.push(line);
        }
    }

    /// Something happened of which there shall be some.
    pub(crate) fn saw(&self, what: &'static str) {
        *self.state.lock().unwrap().seen.entry(what).or_default() += 1;
    }

    /// A promise was broken.
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

    /// It has an answer, or does not want one any more.
    pub(crate) fn asks_no_more(&self, asked: &Asked) {
        self.state.lock().unwrap().locks[asked.lock].waiting.remove(&asked.number);
    }

    /// Judges a grant in the moment in which its holder learns of it.
    pub(crate) fn granted(&self, asked: &Asked, guard: &Guard) {
        self.saw("granted");
        self.asks_no_more(asked);
        let plan = &self.plan.locks[asked.lock];
        let (token, now) = (guard.token(), Instant::now());
        self.tell(|| format!("{} holds {} by {token}", asked.who, plan.name));
        let mut wrong = None;
        // Nothing was awaited since it was given.
        if guard.remaining().is_zero() {
            wrong = Some("it was over before its holder got it".to_owned());
        }
        let mut state = self.state.lock().unwrap();
        let lock = &mut state.locks[asked.lock];
        lock.holds.retain(|hold| !hold.watch.remaining().is_zero());
        if asked.again.is_none() {
            wrong = wrong.or_else(|| lock.wrong_token(plan, token));
            lock.tokens.insert(token);
            let hold =
                Hold { watch: guard.watch(), weight: asked.weight, token, who: asked.who.clone() };
            lock.holds.push(hold);
            if !self.plan.wild {
                wrong = wrong.or_else(|| lock.too_many(plan));
            }
            if self.plan.calm {
                let pace = Pace::of(self.plan.system);
                wrong = wrong.or_else(|| lock.unfair(pace, plan, asked, now));
            }
            // One that was thrown out may hear of its grant after the next one of its own.
            if !lock.evicted.contains_key(&token) {
                let delayed = lock.delayed_until.take();
                if !self.plan.wild && delayed.is_some_and(|(_, until)| now < until) {
                    wrong = wrong.or(Some("granted before the lock-delay was over".into()));
                }
                lock.delayed_until = lock.delay(plan, asked, guard, now);
            }
            let closed = lock.closed_until.take();
            if closed.is_some_and(|until| now < until) {
                wrong = wrong.or(Some("granted before at_least was over".into()));
            }
            if self.plan.calm && plan.kind == Kind::Mutex && !asked.at_least.is_zero() {
                // By its own clock, which may be fast.
                lock.closed_until = Some(now + asked.at_least * 98 / 100);
            }
        }
        drop(state);
        if let Some(what) = wrong {
            self.breaks(&format!("{} by {token}: {what}", asked.who));
        }
    }

    /// The holder of this believes that it weighs so much.
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
            self.breaks(&format!("{token} weighs {weight}: {what}"));
        }
    }

    /// The holder of this looks at it, and believes to hold.
    pub(crate) fn believes(&self, lock: usize, token: Token, lease: Duration) {
        let out = self.state.lock().unwrap().locks[lock].evicted.get(&token).copied();
        // Renewed just before it was thrown out, and by its own clock, which may be slow.
        let most = lease * if self.plan.wild { 2 } else { 1 } * 102 / 100;
        // Or by a look that showed what was.
        let most = most + if self.plan.system.looks_behind() { STALE } else { Duration::ZERO };
        if out.is_some_and(|out| out.elapsed() > most) {
            self.breaks(&format!("{token} was thrown out {most:?} ago, and its holder holds on"));
        }
    }

    /// The holder begins to let go.
    pub(crate) fn lets_go(&self, asked: &Asked, token: Token) {
        let lock = &mut self.state.lock().unwrap().locks[asked.lock];
        lock.delayed_until = lock.delayed_until.filter(|(delays, _)| *delays != token);
    }

    /// The holder has let go, with the store's word for it or not.
    pub(crate) fn ended(&self, asked: &Asked, token: Token) {
        let lock = &mut self.state.lock().unwrap().locks[asked.lock];
        // Whoever came next may have heard of it first.
        if lock.tokens.last() == Some(&token) {
            lock.free_since = Some(Instant::now());
        }
    }

    /// These are thrown out just now.
    pub(crate) fn evicted(&self, lock: usize, tokens: impl IntoIterator<Item = Token>) {
        let mut state = self.state.lock().unwrap();
        let now = Instant::now();
        state.locks[lock].evicted.extend(tokens.into_iter().map(|token| (token, now)));
        // What was kept closed is open.
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
        // One that was thrown out may hear of its grant after the next one of its own.
        if plan.kind != Kind::Mutex || self.evicted.contains_key(&token) {
            return None;
        }
        let greater = self.tokens.last().filter(|last| **last > token)?;
        Some(format!("{greater} was granted before"))
    }

    /// Until when nobody may come after this holder, unless he lets go of it, or is thrown out. By his own clock,
    /// which may be fast.
    fn delay(
        &self,
        plan: &LockPlan,
        asked: &Asked,
        guard: &Guard,
        now: Instant,
    ) -> Option<(Token, Instant)> {
        let delays = plan.kind == Kind::Mutex && !asked.lock_delay.is_zero();
        let held = guard.remaining().min(asked.max_hold.unwrap_or(Duration::MAX));
        delays.then(|| (guard.token(), now + (held + asked.lock_delay) * 98 / 100))
    }

    /// Whether those that believe to hold it are more than may.
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
        let named = || holds().map(|hold| format!("{} by {}", hold.who, hold.token));
        alone.then(|| format!("held at once: {}", named().collect::<Vec<_>>().join(", ")))
    }

    /// Whether it came before one that was there first, or far too late.
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
            return Some("another one had asked before".into());
        }
        // Of one that is just being released it is not known yet.
        let since = self.free_since.take()?.max(asked.at);
        let late = now.saturating_duration_since(since);
        // The end of at_least is nobody's news: who waits finds it out at its next heartbeat.
        (asked.patient && late > pace.hand_over && self.closed_until.is_none())
            .then(|| format!("the lock was free for {late:?}"))
    }
}
