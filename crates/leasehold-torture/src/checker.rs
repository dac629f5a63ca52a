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

use serde::{Deserialize, Serialize};

use super::history::{Ask, Fault, History, OpId, Resource, Time, Trouble, WorkerId, Write, merged};
use super::op::Op;

/// What is checked. P1 to P9 are the library's promises, R the rows of its requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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
            Self::Exclusion => "mutual exclusion",
            Self::TokenOrder => "tokens increase",
            Self::TokenUnique => "tokens are unique",
            Self::Effect => "fenced: no late write",
            Self::Updates => "fenced: no lost update",
            Self::Unfenced => "unfenced: no lost update",
            Self::Fifo => "first come, first served",
            Self::Recovery => "recovery after a crash",
            Self::Wakeup => "every waiter is served",
            Self::Renewal => "live holders keep the lock",
            Self::Residue => "nothing left in the store",
            Self::Outcome => "errors have a cause",
        })
    }
}

/// What the store promised for the faults that were injected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Terms {
    #[serde(rename = "promises")]
    pub(super) claimed: BTreeSet<Property>,
    /// A dead holder's lock is free after so many milliseconds.
    pub(super) recovery_ms: Option<u64>,
    /// Whoever is stopped may stop others for so long that it costs them their places.
    #[serde(default)]
    pub(super) shared_stalls: bool,
}

/// A promise that was not kept.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Violation {
    pub(super) property: Property,
    /// The offending events, in one line.
    pub(super) what: String,
    #[serde(skip)]
    pub(super) place: Place,
}

/// Where in a history to look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    Lock(usize),
    /// The operations that were in each other's way.
    Ops(Vec<OpId>),
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
    pub(super) plain_lost: Vec<OpId>,
    /// Writes that the unfenced resources took although a greater token had written before.
    pub(super) plain_late: Vec<OpId>,
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
    let mut by_lock: Vec<Vec<&Op>> = vec![Vec::new(); history.locks.len()];
    for op in &ops {
        by_lock[op.lock].push(op);
    }
    let mut writes: Vec<Vec<&Write>> = vec![Vec::new(); history.locks.len()];
    for write in &history.writes {
        if let Some(here) = writes.get_mut(write.lock) {
            here.push(write);
        }
    }
    for (lock, here) in by_lock.into_iter().enumerate() {
        let holds = check.holds(&here);
        check.exclusion(lock, &holds);
        check.tokens_of_conflicting(lock, &holds);
        check.tokens_of_successive(&here);
        check.tokens_unique(&here);
        check.fifo(lock, &holds);
        check.recovery(lock, &here, &holds);
        check.resources(lock, &here, &writes[lock]);
        let grants = here.iter().filter(|op| op.acquired.is_some()).count();
        check.findings.grants_by_lock.push(grants);
        check.findings.grants += grants;
    }
    check.residue();
    check.findings.operations = ops.len();
    check.findings
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
    /// In which something was done to the servers.
    servers: Vec<(Time, Time)>,
}

impl Troubles {
    fn new(troubles: &[Trouble]) -> Self {
        let mut by_worker: HashMap<WorkerId, Vec<(Time, Time)>> = HashMap::new();
        let mut everybody = Vec::new();
        for t in troubles {
            match t.worker {
                Some(worker) => {
                    by_worker.entry(worker).or_default().push((t.from, t.excuses_until))
                }
                None => everybody.push((t.from, t.excuses_until)),
            }
        }
        let anybody = merged(troubles.iter().map(|t| (t.from, t.excuses_until)).collect());
        let by_worker = by_worker.into_iter().map(|(w, spans)| (w, merged(spans))).collect();
        let servers = troubles.iter().filter(|t| t.fault == Some(Fault::Servers));
        let servers = merged(servers.map(|t| (t.from, t.to)).collect());
        Self { by_worker, everybody: merged(everybody), anybody, servers }
    }

    fn hit(&self, worker: WorkerId, from: Time, to: Time) -> bool {
        let own = self.by_worker.get(&worker).is_some_and(|spans| overlaps(spans, from, to));
        own || overlaps(&self.everybody, from, to)
    }

    fn hit_anybody(&self, from: Time, to: Time) -> bool {
        overlaps(&self.anybody, from, to)
    }
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
    fn violated(&mut self, property: Property, place: Place, what: String) {
        if self.terms.claimed.contains(&property) {
            self.findings.violations.push(Violation { property, what, place });
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
        let token = match hold.token {
            0 => String::new(),
            token => format!("token {token}, "),
        };
        format!("{} ({token}held {from} to {to} ms)", hold.op.id)
    }

    /// In order of their beginning.
    fn holds<'o>(&self, ops: &[&'o Op]) -> Vec<Hold<'o>> {
        let hold = |op: &&'o Op| {
            let (_, token) = op.acquired?;
            let (from, to) = op.held_beyond_doubt(self.history)?;
            Some(Hold { op, token, from, to })
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
                let others: Vec<usize> = active.iter().take(3).copied().collect();
                let shown: Vec<String> = others.iter().map(|j| self.shown(&holds[*j])).collect();
                let (name, new) = (self.name(lock), self.shown(&holds[i]));
                let what = format!("{name}: {new} while {} held", shown.join(", "));
                let ops = std::iter::once(i).chain(others).map(|j| holds[j].op.id).collect();
                self.violated(Property::Exclusion, Place::Ops(ops), what);
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
                let place = Place::Ops(vec![hold.op.id, before.op.id]);
                let (before, now) = (self.shown(before), self.shown(hold));
                let what = format!(
                    "{}: {now} has a lower token than {before}, which held it earlier",
                    self.name(lock)
                );
                self.violated(Property::TokenOrder, place, what);
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
                    "{}: {} requested at {} ms and got token {token}, but {id} already had token {max}",
                    self.name(op.lock),
                    op.id,
                    self.ms(op.invoked),
                );
                self.violated(Property::TokenOrder, Place::Ops(vec![op.id, id]), what);
            }
        }
    }

    fn tokens_unique(&mut self, ops: &[&Op]) {
        let mut seen: HashMap<u64, OpId> = HashMap::new();
        for op in ops {
            let Some((_, token)) = op.acquired else { continue };
            if let Some(other) = seen.insert(token, op.id) {
                let name = self.name(op.lock);
                let what =
                    format!("{name}: token {token} was granted to both {other} and {}", op.id);
                self.violated(Property::TokenUnique, Place::Ops(vec![op.id, other]), what);
            }
        }
    }

    /// Whether trouble of its own, or of others where that is everybody's, met this worker.
    fn is_hit(&self, worker: WorkerId, from: Time, to: Time) -> bool {
        let others = self.terms.shared_stalls && self.troubles.hit_anybody(from, to);
        others || self.troubles.hit(worker, from, to)
    }

    /// Whether servers were disturbed meanwhile that do not promise to remember who holds.
    fn is_forgotten(&self, from: Time, to: Time) -> bool {
        let may_forget = !self.terms.claimed.contains(&Property::Exclusion);
        may_forget && overlaps(&self.troubles.servers, from, to)
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
                    "{}: {} requested at {} ms and was served before {}, which was in the queue at {} ms",
                    self.name(lock),
                    self.shown(hold),
                    self.ms(hold.op.invoked),
                    self.shown(&waiter),
                    self.ms(since),
                );
                let place = Place::Ops(vec![hold.op.id, waiter.op.id]);
                self.violated(Property::Fifo, place, what);
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
            let Some(promised) = self.terms.recovery_ms else { continue };
            if taken > Duration::from_millis(promised) {
                let what = format!(
                    "{}: {} was killed while holding at {} ms; the waiter {} held only {} ms later (promised: {} ms)",
                    self.name(lock),
                    hold.op.id,
                    self.ms(died),
                    waiter.id,
                    taken.as_millis(),
                    promised,
                );
                let place = Place::Ops(vec![waiter.id, hold.op.id]);
                self.violated(Property::Recovery, place, what);
            }
        }
    }

    fn resources(&mut self, lock: usize, ops: &[&Op], writes: &[&Write]) {
        let (plain, fenced) = match self.history.finals.get(lock) {
            Some(finals) => (&finals.0, &finals.1),
            None => return,
        };
        let log = |resource| writes.iter().copied().filter(move |w| w.resource == resource);
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

        self.findings.plain_late.extend(plain_late.iter().map(|w| w.op));
        for w in fenced_late {
            let what = format!(
                "{}: the write of {} with token {} was accepted after a write with a higher token",
                self.name(lock),
                w.op,
                w.token
            );
            self.violated(Property::Effect, Place::Ops(vec![w.op]), what);
        }

        let lost = |set: &[OpId], acked: fn(&Op) -> bool| {
            let set: HashSet<OpId> = set.iter().copied().collect();
            let gone = ops.iter().filter(|op| acked(op) && !set.contains(&op.id));
            gone.map(|op| op.id).collect::<Vec<_>>()
        };
        let plain_lost = lost(&plain.set, |op| op.plain == Some(true));
        self.findings.plain_lost.extend(&plain_lost);
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
                let what = format!("{name}: the update of {id} was acknowledged but is missing");
                self.violated(property, Place::Ops(vec![id]), what);
            }
            if end.value != taken || end.set.len() as u64 != taken {
                let what = format!(
                    "{}: {taken} increments were accepted, but the register is {} and the set has {} entries",
                    self.name(lock),
                    end.value,
                    end.set.len(),
                );
                self.violated(property, Place::Lock(lock), what);
            }
        }
    }

    /// How calls ended, and how holds did.
    fn outcomes(&mut self, ops: &[Op]) {
        for crash in &self.history.crashes {
            self.violated(Property::Outcome, Place::Nowhere, crash.clone());
        }
        for op in ops {
            if !op.is_over() && !self.history.deaths.contains_key(&op.id.worker) {
                let what = format!(
                    "{}: {} requested at {} ms and never finished",
                    self.name(op.lock),
                    op.id,
                    self.ms(op.invoked)
                );
                self.violated(Property::Wakeup, Place::Ops(vec![op.id]), what);
            }
            if let Some((at, kind, error)) = &op.failed
                && !self.has_cause(op, kind, *at)
            {
                let what = format!("{} failed without a known cause: {error}", op.id);
                self.violated(Property::Outcome, Place::Ops(vec![op.id]), what);
            }
            let Some((at, expired, reason)) = &op.lost else { continue };
            self.findings.lost_holds += 1;
            let since = op.acquired.map_or(op.invoked, |(at, _)| at);
            // Nobody evicts: whatever the trouble, the store keeps what it promised until then, if it
            // has not forgotten.
            let too_early = !expired && *at < op.until && !self.is_forgotten(since, *at);
            if too_early || !self.is_hit(op.id.worker, since, *at) {
                let what = format!(
                    "{}: {} lost its hold at {} ms although {}: {reason}",
                    self.name(op.lock),
                    op.id,
                    self.ms(*at),
                    match too_early {
                        true => format!("it was granted until {} ms", self.ms(op.until)),
                        false => "its process was running and could reach the store".into(),
                    },
                );
                self.violated(Property::Renewal, Place::Ops(vec![op.id]), what);
            }
        }
    }

    fn has_cause(&mut self, op: &Op, kind: &str, at: Time) -> bool {
        match kind {
            "contended" => op.ask == Ask::Try,
            "timeout" => op.ask == Ask::Timeout,
            "lost" => self.is_hit(op.id.worker, op.invoked, at),
            "at_risk" | "unreachable" => {
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
            self.violated(Property::Residue, Place::Nowhere, left.clone());
        }
    }
}

/// The terms of a store that promises everything.
#[cfg(test)]
pub(super) fn strict(recovery: Duration) -> Terms {
    let recovery_ms = u64::try_from(recovery.as_millis()).ok();
    Terms { claimed: Property::ALL.into_iter().collect(), recovery_ms, shared_stalls: false }
}

#[cfg(test)]
pub(super) mod tests;
