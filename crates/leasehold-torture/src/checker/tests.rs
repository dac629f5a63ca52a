//! Valid histories pass, and every mutation of them is reported as the property that it breaks.
//!
//! The generator simulates a correct store in virtual time. Workers arrive at random, wait in a
//! queue and are granted by the rule. They learn of the grant later, write, are paused until their
//! lease expires, or are killed. A mutation then breaks one promise.

use fastrand::Rng;
use leasehold::Kind;
use leasehold::store::queue::granted;

use super::super::history::{Event, Final, LockSpec, What, Write, nanos};
use super::*;

const MS: u64 = 1_000_000;
const LEASE: u64 = 500 * MS;
const RECOVERY: Duration = Duration::from_secs(3);
const WORKERS: usize = 7;

/// An entry in a generated queue.
struct Entry {
    op: OpId,
    weight: u32,
    token: u64,
    /// Whether the worker knows that it holds.
    knows: bool,
}

/// The state of one generated worker.
#[derive(Clone, Copy, PartialEq)]
enum Doing {
    Nothing,
    Op { lock: usize, op: OpId, wrote: bool, held: bool },
}

struct Generator {
    rng: Rng,
    t: u64,
    token: u64,
    next_worker: WorkerId,
    workers: Vec<(WorkerId, u32, Doing)>,
    queues: Vec<Vec<Entry>>,
    highest: Vec<u64>,
    history: History,
}

impl Generator {
    fn new(seed: u64) -> Self {
        let lock = |kind, capacity| LockSpec { name: format!("{kind}"), kind, capacity };
        let locks = vec![lock(Kind::Mutex, 1), lock(Kind::RwLock, 8), lock(Kind::Semaphore, 3)];
        Self {
            rng: Rng::with_seed(seed),
            t: 5_000 * MS,
            token: 1_000,
            next_worker: WORKERS as WorkerId,
            workers: (0..WORKERS as WorkerId).map(|w| (w, 0, Doing::Nothing)).collect(),
            queues: (0..3).map(|_| Vec::new()).collect(),
            highest: vec![0; 3],
            history: History { finals: vec![Default::default(); 3], locks, ..History::default() },
        }
    }

    /// Generates a history of `steps` steps in which all workers finish.
    fn run(mut self, steps: usize, pauses: bool, kills: bool) -> History {
        for _ in 0..steps {
            let w = self.rng.usize(..WORKERS);
            match self.rng.u32(..100) {
                0 if kills => self.kill(w),
                1..=2 if pauses => self.pause(w),
                _ => self.step(w, false),
            }
        }
        while self.workers.iter().any(|(.., doing)| *doing != Doing::Nothing) {
            let w = self.rng.usize(..WORKERS);
            self.step(w, true);
        }
        self.history.ended = self.tick();
        self.history
    }

    fn tick(&mut self) -> u64 {
        self.t += self.rng.u64(1..MS);
        self.t
    }

    fn record(&mut self, op: OpId, what: What) {
        let at = self.tick();
        self.history.events.push(Event { op, at, what });
    }

    fn holds(&self, lock: usize, op: OpId) -> bool {
        let queue = &self.queues[lock];
        let fit = granted(queue.iter().map(|e| e.weight), self.history.locks[lock].capacity);
        queue.iter().take(fit).any(|e| e.op == op)
    }

    fn leave(&mut self, lock: usize, op: OpId) {
        self.queues[lock].retain(|e| e.op != op);
    }

    fn step(&mut self, w: usize, ending: bool) {
        match self.workers[w].2 {
            Doing::Nothing if ending => {}
            Doing::Nothing => self.invoke(w),
            Doing::Op { lock, op, wrote, held } => self.go_on(w, lock, op, wrote, held),
        }
    }

    fn invoke(&mut self, w: usize) {
        let lock = self.rng.usize(..3);
        let LockSpec { kind, capacity, .. } = self.history.locks[lock];
        let weight = match kind {
            Kind::Mutex => 1,
            Kind::RwLock if self.rng.bool() => capacity,
            Kind::RwLock => 1,
            Kind::Semaphore => self.rng.u32(1..=capacity),
        };
        let (worker, n, _) = self.workers[w];
        let op = OpId { worker, n };
        let ask = if self.rng.u32(..8) == 0 { Ask::Try } else { Ask::Lock };
        self.record(op, What::Invoked { lock, weight, ask });
        let before: u32 = self.queues[lock].iter().map(|e| e.weight).sum();
        self.workers[w].1 += 1;
        if ask == Ask::Try && before + weight > capacity {
            return self.record(
                op,
                What::Failed { kind: "contended".into(), error: "another worker holds it".into() },
            );
        }
        self.token += self.rng.u64(1..10);
        self.queues[lock].push(Entry { op, weight, token: self.token, knows: false });
        if !self.holds(lock, op) && self.rng.u32(..10) > 0 {
            self.record(op, What::Waiting { ahead: self.queues[lock].len() - 1 });
        }
        self.workers[w].2 = Doing::Op { lock, op, wrote: false, held: false };
    }

    fn go_on(&mut self, w: usize, lock: usize, op: OpId, wrote: bool, held: bool) {
        if !self.holds(lock, op) {
            if self.rng.u32(..60) == 0 {
                self.record(op, What::Abandoned);
                self.leave(lock, op);
                self.workers[w].2 = Doing::Nothing;
            }
            return;
        }
        let i = self.queues[lock].iter().position(|e| e.op == op).unwrap();
        let (token, weight) = (self.queues[lock][i].token, self.queues[lock][i].weight);
        if !self.queues[lock][i].knows {
            self.queues[lock][i].knows = true;
            self.record(op, What::Acquired { token });
            return;
        }
        let exclusive = weight == self.history.locks[lock].capacity;
        if !held {
            self.check(op);
            self.workers[w].2 = Doing::Op { lock, op, wrote, held: true };
        } else if exclusive && !wrote {
            let base = self.history.finals[lock].0.clone();
            let fenced = self.write(lock, op, token, base);
            self.record(op, What::Wrote { plain: true, fenced: Some(fenced) });
            self.workers[w].2 = Doing::Op { lock, op, wrote: true, held };
        } else if self.rng.u32(..3) == 0 {
            self.check(op);
        } else {
            self.record(op, What::Releasing);
            self.leave(lock, op);
            if self.rng.bool() {
                self.record(op, What::Released);
            }
            self.workers[w].2 = Doing::Nothing;
        }
    }

    fn check(&mut self, op: OpId) {
        let until = self.t + LEASE;
        self.record(op, What::Held { until });
    }

    /// Writes to both resources. The unfenced one accepts the value that was read plus one, and the
    /// fenced one checks the token.
    fn write(&mut self, lock: usize, op: OpId, token: u64, base: Final) -> bool {
        let at = Some(self.tick());
        let mut plain = base;
        plain.value += 1;
        plain.set.push(op);
        self.history.finals[lock].0 = plain;
        self.history.writes.push(Write { lock, resource: Resource::Plain, op, token, at });
        if token < self.highest[lock] {
            return false;
        }
        self.highest[lock] = token;
        self.history.finals[lock].1.value += 1;
        self.history.finals[lock].1.set.push(op);
        self.history.writes.push(Write { lock, resource: Resource::Fenced, op, token, at });
        true
    }

    /// Pauses a worker for longer than its lease. A waiter loses its place. A holder continues with
    /// what it read before, although another client may have written since.
    fn pause(&mut self, w: usize) {
        let Doing::Op { lock, op, held, wrote } = self.workers[w].2 else { return };
        let entry = self.queues[lock].iter().find(|e| e.op == op).unwrap();
        let (token, weight, knows) = (entry.token, entry.weight, entry.knows);
        if !held || wrote || weight != self.history.locks[lock].capacity {
            if knows {
                return;
            }
            return self.pause_waiter(w, lock, op);
        }
        let from = self.tick();
        let base = self.history.finals[lock].0.clone();
        self.t += LEASE + 2 * MS;
        self.leave(lock, op);
        // The other workers continue while this one is paused.
        self.workers[w].2 = Doing::Nothing;
        for _ in 0..60 {
            let other = self.rng.usize(..WORKERS);
            if other != w {
                self.step(other, false);
            }
        }
        let to = self.tick();
        self.history.troubles.push(Trouble::stall(Some(op.worker), from, to));
        let fenced = self.write(lock, op, token, base);
        self.record(op, What::Wrote { plain: true, fenced: Some(fenced) });
        self.record(op, What::Lost { expired: true, reason: "its lease ran out".into() });
        self.record(op, What::Releasing);
    }

    fn pause_waiter(&mut self, w: usize, lock: usize, op: OpId) {
        let from = self.tick();
        let i = self.queues[lock].iter().position(|e| e.op == op).unwrap();
        let mut entry = self.queues[lock].remove(i);
        self.t += LEASE;
        for _ in 0..20 {
            let other = self.rng.usize(..WORKERS);
            if other != w {
                self.step(other, false);
            }
        }
        let to = self.tick();
        self.history.troubles.push(Trouble::stall(Some(op.worker), from, to));
        self.token += 1;
        entry.token = self.token;
        self.queues[lock].push(entry);
    }

    fn kill(&mut self, w: usize) {
        let at = self.tick();
        self.history.deaths.insert(self.workers[w].0, at);
        if let Doing::Op { lock, op, .. } = self.workers[w].2 {
            self.t += self.rng.u64(..nanos(RECOVERY) / 2);
            self.leave(lock, op);
        }
        self.workers[w] = (self.next_worker, 0, Doing::Nothing);
        self.next_worker += 1;
    }
}

/// Returns a history of a correct store, for the tests of other files.
pub(in super::super) fn generated(seed: u64, steps: usize) -> History {
    generate(seed, steps, true, true)
}

/// Like [`generated`], with a choice of faults.
pub(super) fn generate(seed: u64, steps: usize, pauses: bool, kills: bool) -> History {
    Generator::new(seed).run(steps, pauses, kills)
}

pub(super) fn terms(pauses: bool) -> Terms {
    let mut terms = strict(RECOVERY);
    if pauses {
        terms.claimed.remove(&Property::Unfenced);
    }
    terms
}

/// Breaks one promise in a history and returns which, or `None` if the history has nothing to
/// break.
pub(super) type Mutation = fn(&mut History, &mut Rng) -> Option<Property>;

fn holds_of(history: &History, lock: usize) -> Vec<(Op, u64, Time, Time)> {
    let ops = Op::fold(&history.events);
    let terms = terms(true);
    let check = Check {
        history,
        terms: &terms,
        troubles: Troubles::new(&history.troubles),
        start: 0,
        findings: Findings::default(),
    };
    let here: Vec<&Op> = ops.iter().filter(|op| op.lock == lock).collect();
    let holds = check.holds(&here);
    holds.iter().map(|h| (h.op.clone(), h.token, h.from, h.to)).collect()
}

/// Returns a pair of successive holds of the mutex.
fn successive(history: &History, rng: &mut Rng) -> Option<[(Op, u64, Time, Time); 2]> {
    let holds = holds_of(history, 0);
    if holds.len() < 2 {
        return None;
    }
    let i = rng.usize(..holds.len() - 1);
    Some([holds[i].clone(), holds[i + 1].clone()])
}

fn edit(history: &mut History, op: OpId, mut change: impl FnMut(&mut Event)) {
    history.events.iter_mut().filter(|e| e.op == op).for_each(&mut change);
}

fn set_token(history: &mut History, op: OpId, new: u64) {
    edit(history, op, |e| {
        if let What::Acquired { token } = &mut e.what {
            *token = new;
        }
    });
}

fn any_acked(history: &History, rng: &mut Rng) -> Option<OpId> {
    let acked: Vec<OpId> = history
        .events
        .iter()
        .filter(|e| matches!(e.what, What::Wrote { fenced: Some(true), .. }))
        .map(|e| e.op)
        .collect();
    rng.choice(acked)
}

fn side(history: &mut History, resource: Resource, op: OpId) -> &mut Final {
    let lock = history.writes.iter().find(|w| w.op == op).unwrap().lock;
    match resource {
        Resource::Plain => &mut history.finals[lock].0,
        Resource::Fenced => &mut history.finals[lock].1,
    }
}

/// Extends the first of two holds into the second.
fn overlap(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let [(a, ..), (_, _, from, _)] = successive(history, rng)?;
    history.deaths.remove(&a.id.worker);
    history.events.retain(|e| e.op != a.id || !matches!(e.what, What::Lost { .. }));
    edit(history, a.id, |e| match &mut e.what {
        What::Held { until } => *until = from + LEASE,
        What::Releasing => e.at = from + 1,
        _ => {}
    });
    Some(Property::Exclusion)
}

/// Makes a paused holder's guard promise more than the store kept.
fn promise_too_much(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, 0);
    let lost: Vec<usize> =
        (0..holds.len().saturating_sub(1)).filter(|&i| holds[i].0.lost.is_some()).collect();
    let i = rng.choice(lost)?;
    let (op, next) = (&holds[i].0, holds[i + 1].2);
    if op.lost.as_ref().is_some_and(|(at, ..)| *at <= next) {
        return None;
    }
    edit(history, op.id, |e| {
        if let What::Held { until } = &mut e.what {
            *until = next + 1;
        }
    });
    Some(Property::Exclusion)
}

/// Grants all permits while some are held.
fn too_many_permits(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let (_, _, from, to) = rng.choice(holds_of(history, 2))?;
    let op = OpId { worker: 9_999, n: 0 };
    let mut add = |at, what| history.events.push(Event { op, at, what });
    add(from - 1, What::Invoked { lock: 2, weight: 3, ask: Ask::Lock });
    add(from, What::Acquired { token: 1 << 40 });
    add(from, What::Held { until: to });
    add(to, What::Releasing);
    Some(Property::Exclusion)
}

fn swap_tokens(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let [(a, ta, ..), (b, tb, ..)] = successive(history, rng)?;
    set_token(history, a.id, tb);
    set_token(history, b.id, ta);
    Some(Property::TokenOrder)
}

/// Swaps the tokens of a semaphore, where only calls that followed one another have an order.
fn swap_permits_tokens(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, 2);
    let (a, ta, from, _) = rng.choice(&holds)?;
    let (b, tb, ..) = holds.iter().find(|(b, ..)| b.invoked > *from)?;
    set_token(history, a.id, *tb);
    set_token(history, b.id, *ta);
    Some(Property::TokenOrder)
}

fn duplicate_token(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, rng.usize(..3));
    let i = rng.usize(..holds.len());
    let j = (i + 1) % holds.len();
    set_token(history, holds[j].0.id, holds[i].1);
    (i != j).then_some(Property::TokenUnique)
}

/// Removes an increment from the register.
fn drop_increment(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let op = any_acked(history, rng)?;
    side(history, Resource::Fenced, op).value -= 1;
    Some(Property::Updates)
}

/// Removes an element from the set.
fn drop_element(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let op = any_acked(history, rng)?;
    side(history, Resource::Fenced, op).set.retain(|o| *o != op);
    Some(Property::Updates)
}

/// Removes an update and keeps only its acknowledgement.
fn drop_update(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let op = any_acked(history, rng)?;
    let fenced = side(history, Resource::Fenced, op);
    fenced.value -= 1;
    fenced.set.retain(|o| *o != op);
    history.writes.retain(|w| w.op != op || w.resource != Resource::Fenced);
    Some(Property::Updates)
}

/// Removes an update of the unfenced resource, which must keep everything in a store without
/// leases.
fn drop_plain_update(history: &mut History, rng: &mut Rng) -> Option<Property> {
    if !history.troubles.is_empty() {
        return None;
    }
    let op = any_acked(history, rng)?;
    side(history, Resource::Plain, op).set.retain(|o| *o != op);
    Some(Property::Unfenced)
}

/// Makes the fenced resource accept a write after one with a greater token.
fn take_late_write(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let (fenced, others): (Vec<Write>, _) =
        history.writes.iter().partition(|w| w.resource == Resource::Fenced && w.lock == 0);
    let i = (fenced.len() > 1).then(|| rng.usize(1..fenced.len()))?;
    let mut fenced = fenced;
    fenced.swap(i - 1, i);
    history.writes = others.into_iter().chain(fenced).collect();
    Some(Property::Effect)
}

/// Grants a claim before another that was already waiting when it was requested. The tokens fit the
/// new order.
fn overtake(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, 0);
    let troubles = Troubles::new(&history.troubles);
    let mut pairs = Vec::new();
    for (i, (a, _, from, _)) in holds.iter().enumerate() {
        for (b, _, _, to) in &holds[i + 1..] {
            let stood = a.waiting.is_some_and(|w| w < b.invoked) && b.invoked < *from;
            if stood && !troubles.hit(a.id.worker, a.invoked, *to) {
                pairs.push((a.id, b.id));
            }
        }
    }
    let (a, b) = rng.choice(pairs)?;
    for e in &mut history.events {
        let asks = matches!(e.what, What::Invoked { .. } | What::Waiting { .. });
        if asks || (e.op != a && e.op != b) {
            continue;
        }
        e.op = if e.op == a { b } else { a };
    }
    // Deaths would shorten the exchanged holds.
    history.deaths.remove(&a.worker);
    history.deaths.remove(&b.worker);
    Some(Property::Fifo)
}

fn leave_residue(history: &mut History, _: &mut Rng) -> Option<Property> {
    history.residue.push("mutex: 1 claim is left".into());
    Some(Property::Residue)
}

/// Makes a waiter never be granted.
fn forget_waiter(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let waited: Vec<OpId> = history
        .events
        .iter()
        .filter(|e| matches!(e.what, What::Waiting { .. }))
        .map(|e| e.op)
        .filter(|op| !history.deaths.contains_key(&op.worker))
        .collect();
    let op = rng.choice(waited)?;
    let asks = |what: &What| matches!(what, What::Invoked { .. } | What::Waiting { .. });
    history.events.retain(|e| e.op != op || asks(&e.what));
    Some(Property::Wakeup)
}

/// Makes a killed holder's lock be handed over late.
fn recover_late(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, 0);
    let mut fit = Vec::new();
    for (i, (op, _, _, to)) in holds.iter().enumerate() {
        let Some((next, _, from, _)) = holds.get(i + 1) else { continue };
        let died = history.deaths.get(&op.id.worker) == Some(to);
        let waited = next.waiting.is_some_and(|w| w < *to);
        let others = history.deaths.values().any(|d| (*to + 1..*from).contains(d));
        let trouble = history.troubles.iter().any(|t| t.from <= *from && *to <= t.excuses_until);
        let unseen = history
            .events
            .iter()
            .any(|e| matches!(e.what, What::Acquired { .. }) && (*to..*from).contains(&e.at));
        if died && waited && !others && !trouble && !unseen {
            fit.push(*to);
        }
    }
    let at = rng.choice(fit)?;
    let late = nanos(RECOVERY) + MS;
    let shift = |t: &mut u64| {
        if *t > at {
            *t += late;
        }
    };
    for e in &mut history.events {
        shift(&mut e.at);
        if let What::Held { until } = &mut e.what {
            shift(until);
        }
    }
    history.deaths.values_mut().for_each(shift);
    history.troubles.iter_mut().for_each(|t| {
        shift(&mut t.from);
        shift(&mut t.to);
        shift(&mut t.excuses_until);
    });
    shift(&mut history.ended);
    Some(Property::Recovery)
}

/// Makes the lease of a live holder expire.
fn lose_hold(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, rng.usize(..3));
    let troubles = Troubles::new(&history.troubles);
    let live = |(op, _, from, to): &&(Op, u64, Time, Time)| {
        op.releasing.is_some() && !troubles.hit(op.id.worker, *from, *to)
    };
    let live: Vec<_> = holds.iter().filter(live).collect();
    let (op, _, _, to) = rng.choice(live)?;
    let what = What::Lost { expired: false, reason: "gone".into() };
    history.events.push(Event { op: op.id, at: *to, what });
    Some(Property::Renewal)
}

/// Makes the store end a hold early, for a worker that had trouble before.
fn break_promise(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let holds = holds_of(history, rng.usize(..3));
    let holds: Vec<_> = holds.iter().filter(|(op, ..)| op.releasing.is_some()).collect();
    let (op, _, from, to) = rng.choice(holds)?;
    let worker = Some(op.id.worker);
    history.troubles.push(Trouble::stall(worker, *from, *to));
    let what = What::Lost { expired: false, reason: "gone".into() };
    history.events.push(Event { op: op.id, at: *to - 1, what });
    Some(Property::Renewal)
}

fn fail_without_cause(history: &mut History, rng: &mut Rng) -> Option<Property> {
    let mut kinds = vec!["contended", "timeout", "corrupt", "mismatch"];
    if history.troubles.is_empty() {
        kinds.push("lost");
    }
    fail(history, rng.choice(kinds)?, history.ended)
}

/// Adds an operation that fails immediately.
fn fail(history: &mut History, kind: &str, at: Time) -> Option<Property> {
    let op = OpId { worker: 9_999, n: 0 };
    let what = What::Invoked { lock: 0, weight: 1, ask: Ask::Lock };
    history.events.push(Event { op, at, what });
    let what = What::Failed { kind: kind.into(), error: "why?".into() };
    history.events.push(Event { op, at, what });
    Some(Property::Outcome)
}

fn crash(history: &mut History, _: &mut Rng) -> Option<Property> {
    history.crashes.push("worker 3 ended by itself: exit status 101".into());
    Some(Property::Outcome)
}

pub(super) const MUTATIONS: &[(&str, Mutation)] = &[
    ("overlap", overlap),
    ("promise_too_much", promise_too_much),
    ("too_many_permits", too_many_permits),
    ("swap_tokens", swap_tokens),
    ("swap_permits_tokens", swap_permits_tokens),
    ("duplicate_token", duplicate_token),
    ("drop_increment", drop_increment),
    ("drop_element", drop_element),
    ("drop_update", drop_update),
    ("drop_plain_update", drop_plain_update),
    ("take_late_write", take_late_write),
    ("overtake", overtake),
    ("leave_residue", leave_residue),
    ("forget_waiter", forget_waiter),
    ("recover_late", recover_late),
    ("lose_hold", lose_hold),
    ("break_promise", break_promise),
    ("fail_without_cause", fail_without_cause),
    ("crash", crash),
];

pub(super) const SHAPES: [(bool, bool); 4] =
    [(false, false), (true, false), (false, true), (true, true)];

#[test]
fn valid_histories_pass() {
    for seed in 0..60 {
        for (pauses, kills) in SHAPES {
            let history = Generator::new(seed).run(1_500, pauses, kills);
            let findings = check(&history, &terms(pauses));
            assert!(
                findings.violations.is_empty(),
                "seed {seed}, pauses {pauses}, kills {kills}: {:?}",
                findings.violations
            );
            assert!(findings.grants > 100, "{findings:?}");
            assert!(findings.grants_by_lock.iter().all(|n| *n > 10));
        }
    }
}

#[test]
fn every_mutation_is_caught() {
    for (name, mutation) in MUTATIONS {
        let mut applied = 0;
        for seed in 0..40 {
            for (pauses, kills) in SHAPES {
                let mut history = Generator::new(seed).run(1_500, pauses, kills);
                let broken = mutation(&mut history, &mut Rng::with_seed(seed));
                let Some(property) = broken else { continue };
                applied += 1;
                let found = check(&history, &terms(pauses)).violations;
                assert!(
                    found.iter().any(|v| v.property == property),
                    "{name}, seed {seed}, pauses {pauses}, kills {kills}: {found:?}"
                );
            }
        }
        assert!(applied >= 20, "{name} could be applied only {applied} times");
    }
}

#[test]
fn every_property_has_a_mutation_that_breaks_it() {
    let mut broken = BTreeSet::new();
    for (_, mutation) in MUTATIONS {
        for seed in 0..10 {
            for (pauses, kills) in SHAPES {
                let mut history = Generator::new(seed).run(1_500, pauses, kills);
                broken.extend(mutation(&mut history, &mut Rng::with_seed(seed)));
            }
        }
    }
    assert_eq!(broken, Property::ALL.into_iter().collect());
}

#[test]
fn generated_pauses_lose_unfenced_updates_and_no_fenced_ones() {
    let mut lost = 0;
    for seed in 0..20 {
        let history = Generator::new(seed).run(1_500, true, false);
        let findings = check(&history, &terms(true));
        lost += findings.plain_lost.len();
        assert!(findings.violations.is_empty());
        assert!(findings.plain_late.is_empty() || findings.fenced_refused > 0);
    }
    assert!(lost > 0);
}

#[test]
fn waiter_may_be_overtaken_during_a_stall() {
    let mut history = Generator::new(3).run(1_500, false, false);
    let mut rng = Rng::with_seed(3);
    assert_eq!(overtake(&mut history, &mut rng), Some(Property::Fifo));
    assert!(!check(&history, &terms(false)).violations.is_empty());
    // The same history is valid if the machine did not run during this time.
    let all = Trouble::stall(None, 0, history.ended);
    history.troubles.push(all);
    assert!(check(&history, &terms(false)).violations.is_empty());
}

#[test]
fn stall_of_another_worker_excuses_if_stalls_are_shared() {
    let breaks: [(Mutation, Property); 3] = [
        (overtake, Property::Fifo),
        (lose_hold, Property::Renewal),
        (fail_as_lost, Property::Outcome),
    ];
    for (n, (mutation, property)) in breaks.into_iter().enumerate() {
        let mut history = Generator::new(n as u64).run(1_500, false, false);
        assert_eq!(mutation(&mut history, &mut Rng::with_seed(4)), Some(property));
        // A stall does not excuse the loss of a hold that the store had promised to keep until
        // later.
        for event in &mut history.events {
            if let What::Lost { expired, .. } = &mut event.what {
                *expired = true;
            }
        }
        // Another worker was paused all the time, but none of these.
        history.troubles.push(Trouble::stall(Some(8_888), 0, history.ended));
        let mut terms = terms(false);
        let violated = |terms: &Terms| !check(&history, terms).violations.is_empty();
        assert!(violated(&terms), "{property}");
        terms.shared_stalls = true;
        assert!(!violated(&terms), "{property}");
    }
}

#[test]
fn server_fault_excuses_lost_renewals_without_exclusion() {
    let mut history = Generator::new(5).run(1_500, false, false);
    assert_eq!(break_promise(&mut history, &mut Rng::with_seed(4)), Some(Property::Renewal));
    let broken = |history: &History, terms: &Terms| {
        let violations = check(history, terms).violations;
        violations.iter().any(|violation| violation.property == Property::Renewal)
    };
    let mut forgetful = terms(false);
    forgetful.claimed.remove(&Property::Exclusion);
    assert!(
        broken(&history, &forgetful),
        "without a fault of the servers, a lost renewal must be reported"
    );
    // The holder was affected by a fault of the servers.
    for trouble in &mut history.troubles {
        (trouble.worker, trouble.fault) = (None, Some(Fault::Servers));
    }
    assert!(broken(&history, &terms(false)), "servers that must keep their data lost a renewal");
    assert!(!broken(&history, &forgetful));
}

#[test]
fn late_reply_to_an_earlier_grant_does_not_break_token_order() {
    // The store grants token 1 to worker 0. The servers forget that and grant token 2 to worker 1.
    // Worker 0 receives its reply after worker 1 receives its own.
    let mut history = History { finals: vec![Default::default()], ..History::default() };
    history.locks = vec![LockSpec { name: "a".into(), kind: Kind::Mutex, capacity: 1 }];
    history.ended = 9;
    for (worker, token, acquired) in [(0, 1, 5), (1, 2, 4)] {
        let mut tell =
            |at, what| history.events.push(Event { op: OpId { worker, n: 0 }, at, what });
        tell(1, What::Invoked { lock: 0, weight: 1, ask: Ask::Lock });
        tell(acquired, What::Acquired { token });
        tell(6, What::Held { until: 9 });
        tell(8, What::Releasing);
    }
    let broken = |terms: &Terms| {
        let violations = check(&history, terms).violations;
        violations.into_iter().map(|violation| violation.property).collect::<Vec<_>>()
    };
    let mut terms = terms(true);
    assert_eq!(broken(&terms), [Property::Exclusion, Property::TokenOrder]);
    terms.claimed.remove(&Property::Exclusion);
    assert_eq!(broken(&terms), []);
}

fn fail_as_lost(history: &mut History, _: &mut Rng) -> Option<Property> {
    fail(history, "lost", history.ended - 1)
}

#[test]
fn unclaimed_property_is_not_checked() {
    let mut history = Generator::new(4).run(1_500, false, false);
    overtake(&mut history, &mut Rng::with_seed(4)).unwrap();
    let mut terms = terms(false);
    terms.claimed.remove(&Property::Fifo);
    assert!(check(&history, &terms).violations.is_empty());
}

#[test]
fn a_large_history_is_judged_fast_enough() {
    // This is not a timed test. A quadratic checker would not finish in a debug build.
    let history = Generator::new(9).run(300_000, false, false);
    let findings = check(&history, &terms(false));
    assert!(findings.operations > 20_000);
    assert!(findings.violations.is_empty());
}
