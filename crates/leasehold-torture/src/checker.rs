//! Judges a history: which of the store's promises were broken, and by which events.
//!
//! # How
//! Tokens are unique, so no search over possible orders is needed: every property is a sort and
//! one pass, O(n log n) in the number of operations (times the number of distinct weights, which
//! is a handful).
//!
//! # No false alarms
//! Each event carries a time that was read on the known side of what it tells, and every property
//! is judged on what *must* have been true. A hold counts from the moment after the call returned
//! to the earliest of: the moment before its release, its worker's death, and the moment until
//! which its guard last promised to hold; and only if the guard said "held" at least once. Order
//! is claimed only between grants that could not have been held together, or where one call had
//! returned before the other was made. A waiter that was paused, killed or cut off, or whose
//! process did not get to run, has no claim to its turn; nor has anybody while the store took its time
//! over a lock of the parent's own that nobody else wants.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::history::{Ask, Event, History, OpId, Resource, Time, Trouble, What, WorkerId};

/// What is checked. P1 to P9 are the library's promises, R the rows of its requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Property {
    /// P1: while a guard may say that it is held, no conflicting one is.
    Exclusion,
    /// P3: a later grant has a greater token.
    TokenOrder,
    /// P8: no token is granted twice.
    TokenUnique,
    /// P2: the fenced resource never takes a token after it took a greater one.
    Effect,
    /// No update that the fenced resource acknowledged is lost.
    Updates,
    /// No update that the unfenced resource acknowledged is lost (stores without leases only).
    Unfenced,
    /// P4: first come, first served among live, acknowledged waiters.
    Fifo,
    /// P5: a dead holder's lock is free within the promised time.
    Recovery,
    /// P6: every live waiter is granted in the end.
    Wakeup,
    /// R5: the lease does not run out under a holder that lives and reaches the store, and ends
    /// for nobody before its time.
    Renewal,
    /// P9: when everybody is gone, nothing is left.
    Residue,
    /// Every call ends in a grant or in an error that has a cause.
    Outcome,
}

impl Property {
    pub(super) const ALL: [Self; 12] = [
        Self::Exclusion,
        Self::TokenOrder,
        Self::TokenUnique,
        Self::Effect,
        Self::Updates,
        Self::Unfenced,
        Self::Fifo,
        Self::Recovery,
        Self::Wakeup,
        Self::Renewal,
        Self::Residue,
        Self::Outcome,
    ];
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exclusion => "mutual exclusion (P1)",
            Self::TokenOrder => "tokens rise (P3)",
            Self::TokenUnique => "tokens are unique (P8)",
            Self::Effect => "fenced: no late write (P2)",
            Self::Updates => "fenced: no lost update",
            Self::Unfenced => "unfenced: no lost update",
            Self::Fifo => "first come, first served (P4)",
            Self::Recovery => "a dead holder's lock (P5)",
            Self::Wakeup => "every waiter's turn (P6)",
            Self::Renewal => "live holders keep it (R5)",
            Self::Residue => "nothing left behind (P9)",
            Self::Outcome => "errors have a cause",
        })
    }
}

/// What the store promised for the faults that were injected.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) claimed: BTreeSet<Property>,
    /// A dead holder's lock is free after this.
    pub(super) recovery: Duration,
    /// Whoever is stopped may stop others for so long that it costs them their places.
    pub(super) shared_stalls: bool,
}

/// A promise that was not kept.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Violation {
    pub(super) property: Property,
    /// The offending events, in one line.
    pub(super) what: String,
}

/// What the checker found.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// Of claimed properties only.
    pub(super) violations: Vec<Violation>,
    pub(super) operations: usize,
    pub(super) grants: usize,
    /// Grants per lock.
    pub(super) grants_by_lock: Vec<usize>,
    /// Holds that ended by loss.
    pub(super) lost_holds: usize,
    /// Acknowledged updates of the unfenced resources that are gone.
    pub(super) plain_lost: usize,
    /// Writes that the unfenced resources took although a greater token had written before.
    pub(super) plain_late: usize,
    /// Writes that the fenced resources refused.
    pub(super) fenced_refused: usize,
    /// Acknowledged updates of the fenced resources.
    pub(super) fenced_kept: usize,
    /// Waiters that had a claim to their turn.
    pub(super) fair_waiters: usize,
    /// How long the locks of killed holders stayed taken while somebody waited.
    pub(super) recoveries: Vec<Duration>,
    /// Calls that the store did not answer in time though nothing was done to anybody: honest
    /// errors, and a sign of a slow store or a busy machine.
    pub(super) unanswered: usize,
}

/// Judges `history` by what the store promised.
pub(super) fn check(history: &History, terms: &Terms) -> Findings {
    let ops = Op::fold(&history.events);
    let mut check = Check {
        history,
        terms,
        troubles: Troubles::new(&history.troubles),
        start: history.events.iter().map(|e| e.at).min().unwrap_or(0),
        findings: Findings::default(),
    };
    check.outcomes(&ops);
    for lock in 0..history.locks.len() {
        let here: Vec<&Op> = ops.iter().filter(|op| op.lock == lock).collect();
        let holds = check.holds(&here);
        check.exclusion(lock, &holds);
        check.tokens_of_conflicting(lock, &holds);
        check.tokens_of_successive(&here);
        check.tokens_unique(&here);
        check.fifo(lock, &holds);
        check.recovery(lock, &here, &holds);
        check.resources(lock, &here);
        let grants = here.iter().filter(|op| op.acquired.is_some()).count();
        check.findings.grants_by_lock.push(grants);
        check.findings.grants += grants;
    }
    check.residue();
    check.findings.operations = ops.len();
    check.findings
}

/// One operation: its events, folded.
#[derive(Clone, Debug)]
struct Op {
    id: OpId,
    lock: usize,
    weight: u32,
    ask: Ask,
    invoked: Time,
    /// When it first knew that it waits.
    waiting: Option<Time>,
    acquired: Option<(Time, u64)>,
    /// The last moment at which the guard is known to have said "held".
    held: Option<Time>,
    /// Until when the guard promised to hold, as far as it was asked.
    until: Time,
    lost: Option<(Time, bool, String)>,
    releasing: Option<Time>,
    abandoned: bool,
    failed: Option<(Time, String, String)>,
    plain: Option<bool>,
    fenced: Option<bool>,
}

impl Op {
    fn fold(events: &[Event]) -> Vec<Self> {
        let mut at: HashMap<OpId, usize> = HashMap::new();
        let mut ops: Vec<Self> = Vec::new();
        for event in events {
            if let What::Invoked { lock, weight, ask } = event.what {
                at.insert(event.op, ops.len());
                ops.push(Self::invoked(event, lock, weight, ask));
            } else if let Some(&i) = at.get(&event.op) {
                ops[i].learn(event);
            }
        }
        ops
    }

    fn invoked(event: &Event, lock: usize, weight: u32, ask: Ask) -> Self {
        Self {
            id: event.op,
            lock,
            weight,
            ask,
            invoked: event.at,
            waiting: None,
            acquired: None,
            held: None,
            until: 0,
            lost: None,
            releasing: None,
            abandoned: false,
            failed: None,
            plain: None,
            fenced: None,
        }
    }

    fn learn(&mut self, event: &Event) {
        match &event.what {
            What::Invoked { .. } | What::Released => {}
            What::Waiting { .. } => self.waiting = self.waiting.or(Some(event.at)),
            What::Acquired { token } => self.acquired = Some((event.at, *token)),
            What::Held { until } => {
                self.held = Some(event.at);
                self.until = self.until.max(*until);
            }
            What::Lost { expired, reason } => {
                self.lost.get_or_insert((event.at, *expired, reason.clone()));
            }
            What::Wrote { plain, fenced } => {
                (self.plain, self.fenced) = (Some(*plain), *fenced);
            }
            What::Releasing => self.releasing = Some(event.at),
            What::Failed { kind, error } => {
                self.failed = Some((event.at, kind.clone(), error.clone()));
            }
            What::Abandoned => self.abandoned = true,
        }
    }

    fn is_over(&self) -> bool {
        self.releasing.is_some() || self.abandoned || self.failed.is_some()
    }
}

/// The time in which an operation held beyond doubt.
#[derive(Clone, Copy)]
struct Hold<'a> {
    op: &'a Op,
    token: u64,
    from: Time,
    to: Time,
}

/// When which worker was in trouble, to be asked fast.
struct Troubles {
    /// Per worker: disjoint, in order; those of the parent are everybody's.
    by_worker: HashMap<WorkerId, Vec<(Time, Time)>>,
    everybody: Vec<(Time, Time)>,
    anybody: Vec<(Time, Time)>,
}

impl Troubles {
    fn new(troubles: &[Trouble]) -> Self {
        let mut by_worker: HashMap<WorkerId, Vec<(Time, Time)>> = HashMap::new();
        let mut everybody = Vec::new();
        for t in troubles {
            match t.worker {
                Some(worker) => by_worker.entry(worker).or_default().push((t.from, t.to)),
                None => everybody.push((t.from, t.to)),
            }
        }
        let anybody = merged(troubles.iter().map(|t| (t.from, t.to)).collect());
        let by_worker = by_worker.into_iter().map(|(w, spans)| (w, merged(spans))).collect();
        Self { by_worker, everybody: merged(everybody), anybody }
    }

    fn hit(&self, worker: WorkerId, from: Time, to: Time) -> bool {
        let own = self.by_worker.get(&worker).is_some_and(|spans| overlaps(spans, from, to));
        own || overlaps(&self.everybody, from, to)
    }

    fn hit_anybody(&self, from: Time, to: Time) -> bool {
        overlaps(&self.anybody, from, to)
    }
}

fn merged(mut spans: Vec<(Time, Time)>) -> Vec<(Time, Time)> {
    spans.sort_unstable();
    let mut out: Vec<(Time, Time)> = Vec::with_capacity(spans.len());
    for (from, to) in spans {
        match out.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => out.push((from, to)),
        }
    }
    out
}

fn overlaps(spans: &[(Time, Time)], from: Time, to: Time) -> bool {
    let i = spans.partition_point(|s| s.1 < from);
    spans.get(i).is_some_and(|s| s.0 <= to)
}

struct Check<'a> {
    history: &'a History,
    terms: &'a Terms,
    troubles: Troubles,
    start: Time,
    findings: Findings,
}

impl Check<'_> {
    fn violated(&mut self, property: Property, what: String) {
        if self.terms.claimed.contains(&property) {
            self.findings.violations.push(Violation { property, what });
        }
    }

    /// A moment as the report shows it: milliseconds since the run began.
    fn ms(&self, at: Time) -> String {
        let micros = at.saturating_sub(self.start) / 1_000;
        format!("{}.{:03}", micros / 1_000, micros % 1_000)
    }

    fn name(&self, lock: usize) -> &str {
        self.history.locks.get(lock).map_or("?", |l| &l.name)
    }

    fn shown(&self, hold: &Hold<'_>) -> String {
        let (from, to) = (self.ms(hold.from), self.ms(hold.to));
        format!("{} (token {}, held {from} to {to} ms)", hold.op.id, hold.token)
    }

    /// In order of their beginning.
    fn holds<'o>(&self, ops: &[&'o Op]) -> Vec<Hold<'o>> {
        let hold = |op: &&'o Op| {
            let (from, token) = op.acquired?;
            let held = op.held?;
            // Lost by its own clock is what the guard promised; lost in any other way came we
            // do not know when after it last said "held".
            let lost = op.lost.as_ref();
            let lost = lost.map(|(at, expired, _)| if *expired { *at } else { held });
            let died = self.history.deaths.get(&op.id.worker).copied();
            let ends = [Some(op.until), lost, op.releasing, died, Some(self.history.ended)];
            let to = ends.into_iter().flatten().min()?;
            (from < to).then_some(Hold { op, token, from, to })
        };
        let mut holds: Vec<Hold<'o>> = ops.iter().filter_map(hold).collect();
        holds.sort_unstable_by_key(|h| (h.from, h.op.id));
        holds
    }

    fn exclusion(&mut self, lock: usize, holds: &[Hold<'_>]) {
        let capacity = u64::from(self.history.locks[lock].capacity);
        // At the same moment ends come before beginnings.
        let begins = holds.iter().enumerate().map(|(i, h)| (h.from, true, i));
        let ends = holds.iter().enumerate().map(|(i, h)| (h.to, false, i));
        let mut edges: Vec<(Time, bool, usize)> = begins.chain(ends).collect();
        edges.sort_unstable();
        let (mut active, mut sum) = (BTreeSet::new(), 0_u64);
        for (_, begins, i) in edges {
            let weight = u64::from(holds[i].op.weight);
            if !begins {
                active.remove(&i);
                sum -= weight;
                continue;
            }
            sum += weight;
            if sum > capacity {
                let others: Vec<String> =
                    active.iter().take(3).map(|&j: &usize| self.shown(&holds[j])).collect();
                let (name, new) = (self.name(lock), self.shown(&holds[i]));
                let what = format!("{name}: {new} while {} held", others.join(", "));
                self.violated(Property::Exclusion, what);
            }
            active.insert(i);
        }
    }

    /// Two that could not have been held together were granted in the order in which they held.
    fn tokens_of_conflicting(&mut self, lock: usize, holds: &[Hold<'_>]) {
        let capacity = self.history.locks[lock].capacity;
        let mut greatest: BTreeMap<u32, Hold<'_>> = BTreeMap::new();
        for hold in holds {
            let conflicting = greatest
                .range(capacity.saturating_sub(hold.op.weight).saturating_add(1)..)
                .map(|(_, h)| h)
                .max_by_key(|h| h.token);
            if let Some(before) = conflicting.filter(|h| h.token > hold.token) {
                let (before, now) = (self.shown(before), self.shown(hold));
                let what = format!("{}: {now} came after {before}", self.name(lock));
                self.violated(Property::TokenOrder, what);
            }
            let max = greatest.entry(hold.op.weight).or_insert(*hold);
            if hold.token > max.token {
                *max = *hold;
            }
        }
    }

    /// What was granted before another call was made has the smaller token: true of every kind,
    /// and of grants that were lost on the way as well.
    fn tokens_of_successive(&mut self, ops: &[&Op]) {
        let mut granted: Vec<(Time, u64, OpId)> =
            ops.iter().filter_map(|op| op.acquired.map(|(at, token)| (at, token, op.id))).collect();
        granted.sort_unstable();
        let mut invoked: Vec<&&Op> = ops.iter().filter(|op| op.acquired.is_some()).collect();
        invoked.sort_unstable_by_key(|op| op.invoked);
        let mut earlier = granted.into_iter().peekable();
        let mut greatest: Option<(u64, OpId)> = None;
        for op in invoked {
            while let Some((_, token, id)) = earlier.next_if(|(at, ..)| *at < op.invoked) {
                greatest = greatest.max(Some((token, id)));
            }
            let token = op.acquired.map_or(u64::MAX, |(_, token)| token);
            if let Some((max, id)) = greatest.filter(|(max, _)| *max > token) {
                let what = format!(
                    "{}: {} asked at {} ms and got token {token}, though {id} had {max} already",
                    self.name(op.lock),
                    op.id,
                    self.ms(op.invoked),
                );
                self.violated(Property::TokenOrder, what);
            }
        }
    }

    fn tokens_unique(&mut self, ops: &[&Op]) {
        let mut seen: HashMap<u64, OpId> = HashMap::new();
        for op in ops {
            let Some((_, token)) = op.acquired else { continue };
            if let Some(other) = seen.insert(token, op.id) {
                let name = self.name(op.lock);
                let what = format!("{name}: token {token} was granted to {other} and {}", op.id);
                self.violated(Property::TokenUnique, what);
            }
        }
    }

    /// Whether trouble of its own, or of others where that is everybody's, met this worker.
    fn is_hit(&self, worker: WorkerId, from: Time, to: Time) -> bool {
        let others = self.terms.shared_stalls && self.troubles.hit_anybody(from, to);
        others || self.troubles.hit(worker, from, to)
    }

    /// From the last grant to the first: of those granted later, who waited first?
    fn fifo(&mut self, lock: usize, holds: &[Hold<'_>]) {
        let capacity = self.history.locks[lock].capacity;
        let mut first: BTreeMap<u32, (Time, Hold<'_>)> = BTreeMap::new();
        for hold in holds.iter().rev() {
            let conflicting = first
                .range(capacity.saturating_sub(hold.op.weight).saturating_add(1)..)
                .map(|(_, waiter)| *waiter)
                .min_by_key(|(since, _)| *since);
            if let Some((since, waiter)) = conflicting.filter(|(s, _)| *s < hold.op.invoked) {
                let what = format!(
                    "{}: {} asked at {} ms and came before {}, which stood in the queue at {} ms",
                    self.name(lock),
                    self.shown(hold),
                    self.ms(hold.op.invoked),
                    self.shown(&waiter),
                    self.ms(since),
                );
                self.violated(Property::Fifo, what);
            }
            let op = hold.op;
            let Some(since) = op.waiting else { continue };
            if self.is_hit(op.id.worker, op.invoked, hold.from) {
                continue;
            }
            self.findings.fair_waiters += 1;
            let min = first.entry(op.weight).or_insert((since, *hold));
            if since < min.0 {
                *min = (since, *hold);
            }
        }
    }

    /// A killed holder's lock, while somebody waited for it and nobody else was in trouble.
    fn recovery(&mut self, lock: usize, ops: &[&Op], holds: &[Hold<'_>]) {
        let capacity = self.history.locks[lock].capacity;
        let mut deaths: Vec<Time> = self.history.deaths.values().copied().collect();
        deaths.sort_unstable();
        let mut granted: Vec<(Time, &&Op)> =
            ops.iter().filter_map(|op| op.acquired.map(|(at, _)| (at, op))).collect();
        granted.sort_unstable_by_key(|(at, _)| *at);
        for hold in holds.iter().filter(|h| h.op.weight == capacity) {
            let died = hold.to;
            if self.history.deaths.get(&hold.op.id.worker) != Some(&died) {
                continue;
            }
            let next = granted.get(granted.partition_point(|(at, _)| *at <= died));
            let Some((at, waiter)) = next else { continue };
            let waited = waiter.waiting.is_some_and(|since| since < died);
            if !waited || self.troubles.hit_anybody(died, *at) {
                continue;
            }
            // Those that died meanwhile have their own time to be forgotten.
            let last_death = deaths[deaths.partition_point(|d| d < at) - 1];
            let taken = Duration::from_nanos(at - last_death);
            if last_death == died {
                self.findings.recoveries.push(taken);
            }
            if taken > self.terms.recovery {
                let what = format!(
                    "{}: {} died holding at {} ms; {} waited, and held only {} ms later (promised: {} ms)",
                    self.name(lock),
                    hold.op.id,
                    self.ms(died),
                    waiter.id,
                    taken.as_millis(),
                    self.terms.recovery.as_millis(),
                );
                self.violated(Property::Recovery, what);
            }
        }
    }

    fn resources(&mut self, lock: usize, ops: &[&Op]) {
        let (plain, fenced) = match self.history.finals.get(lock) {
            Some(finals) => (&finals.0, &finals.1),
            None => return,
        };
        let log = |resource| {
            let here = move |w: &&_| is_write_of(w, lock, resource);
            self.history.writes.iter().filter(here)
        };
        let late = |resource| {
            let mut max = 0;
            let falls = log(resource).filter(|w| {
                let falls = w.token < max;
                max = max.max(w.token);
                falls
            });
            falls.copied().collect::<Vec<_>>()
        };
        let (plain_late, fenced_late) = (late(Resource::Plain), late(Resource::Fenced));
        let (plain_taken, fenced_taken) =
            (log(Resource::Plain).count() as u64, log(Resource::Fenced).count() as u64);

        self.findings.plain_late += plain_late.len();
        for w in fenced_late {
            let what = format!(
                "{}: the write of {} with token {} was taken after a greater token's",
                self.name(lock),
                w.op,
                w.token
            );
            self.violated(Property::Effect, what);
        }

        let lost = |set: &[OpId], acked: fn(&Op) -> bool| {
            let set: HashSet<OpId> = set.iter().copied().collect();
            let gone = ops.iter().filter(|op| acked(op) && !set.contains(&op.id));
            gone.map(|op| op.id).collect::<Vec<_>>()
        };
        let plain_lost = lost(&plain.set, |op| op.plain == Some(true));
        self.findings.plain_lost += plain_lost.len();
        self.findings.fenced_refused += ops.iter().filter(|op| op.fenced == Some(false)).count();
        self.findings.fenced_kept += ops.iter().filter(|op| op.fenced == Some(true)).count();
        let fenced_lost = lost(&fenced.set, |op| op.fenced == Some(true));
        let sides = [
            (Property::Unfenced, plain, plain_taken, plain_lost),
            (Property::Updates, fenced, fenced_taken, fenced_lost),
        ];
        for (property, end, taken, lost) in sides {
            for id in lost {
                let name = self.name(lock);
                let what = format!("{name}: the update of {id} was acknowledged and is gone");
                self.violated(property, what);
            }
            if end.value != taken || end.set.len() as u64 != taken {
                let what = format!(
                    "{}: {taken} increments were taken, but the register says {} and the set has {}",
                    self.name(lock),
                    end.value,
                    end.set.len(),
                );
                self.violated(property, what);
            }
        }
    }

    /// How calls ended, and how holds did.
    fn outcomes(&mut self, ops: &[Op]) {
        for crash in &self.history.crashes {
            self.violated(Property::Outcome, crash.clone());
        }
        for op in ops {
            if !op.is_over() && !self.history.deaths.contains_key(&op.id.worker) {
                let what = format!(
                    "{}: {} asked at {} ms and never came to an end",
                    self.name(op.lock),
                    op.id,
                    self.ms(op.invoked)
                );
                self.violated(Property::Wakeup, what);
            }
            if let Some((at, kind, error)) = &op.failed
                && !self.has_cause(op, kind, *at)
            {
                let what = format!("{} failed without a cause: {error}", op.id);
                self.violated(Property::Outcome, what);
            }
            let Some((at, expired, reason)) = &op.lost else { continue };
            self.findings.lost_holds += 1;
            let since = op.acquired.map_or(op.invoked, |(at, _)| at);
            // Nobody evicts: whatever the trouble, the store keeps what it promised until then.
            let too_early = !expired && *at < op.until;
            if too_early || !self.is_hit(op.id.worker, since, *at) {
                let what = format!(
                    "{}: {} lost its hold at {} ms though {}: {reason}",
                    self.name(op.lock),
                    op.id,
                    self.ms(*at),
                    match too_early {
                        true => format!("it was promised until {} ms", self.ms(op.until)),
                        false => "it lived and reached the store".into(),
                    },
                );
                self.violated(Property::Renewal, what);
            }
        }
    }

    fn has_cause(&mut self, op: &Op, kind: &str, at: Time) -> bool {
        match kind {
            "Contended" => op.ask == Ask::Try,
            "Timeout" => op.ask == Ask::Timeout,
            "Lost" => self.is_hit(op.id.worker, op.invoked, at),
            "AtRisk" | "Unreachable" => {
                // Somebody else's trouble is a cause as well: who is stopped inside a store of
                // files bars the others.
                if !self.troubles.hit_anybody(op.invoked, at) {
                    self.findings.unanswered += 1;
                }
                true
            }
            _ => false,
        }
    }

    fn residue(&mut self) {
        for left in &self.history.residue {
            self.violated(Property::Residue, left.clone());
        }
    }
}

fn is_write_of(w: &super::history::Write, lock: usize, resource: Resource) -> bool {
    w.lock == lock && w.resource == resource
}

/// The terms of a store that promises everything, for a run with these faults.
#[cfg(test)]
pub(super) fn strict(recovery: Duration) -> Terms {
    Terms { claimed: Property::ALL.into_iter().collect(), recovery, shared_stalls: false }
}

#[cfg(test)]
mod tests;
