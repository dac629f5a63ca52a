//! Checks a history and reports which of the store's promises were broken, and by which events.
//!
//! # How
//! Tokens are unique, so no search over possible orders is needed. Every property is checked by a
//! sort and one pass. That is O(n log n) in the number of operations, times the small number of
//! distinct weights.
//!
//! # No false alarms
//! Each event carries a time that was read on the known side of what it reports. Every property is
//! checked only against what *must* have been true.
//!
//! - A hold counts only if its guard reported "held" at least once. It starts after the call
//!   returned. It ends at the earliest of three times: before its release, its worker's death, and
//!   the last time until which its guard promised to hold.
//! - Order is checked only between grants that cannot have been held together, or if one call
//!   returned before the other was made.
//! - A waiter is not entitled to its turn if it was paused, killed or disconnected, or if its
//!   process was not scheduled.
//! - No waiter is entitled to its turn while the store was slow. The parent measures that with a
//!   lock that no other client uses.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::history::{Ask, Fault, History, OpId, Resource, Time, Trouble, WorkerId, Write, merged};
use super::op::Op;

/// The checked properties. P1 to P9 are the library's promises, and R numbers are its requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Property {
    /// P1: while a guard may report that it is held, no conflicting guard is held.
    Exclusion,
    /// P3: a later grant has a greater token.
    TokenOrder,
    /// P8: no token is granted twice.
    TokenUnique,
    /// P2: the fenced resource never accepts a token after it accepted a greater one.
    Effect,
    /// No update that the fenced resource acknowledged is lost.
    Updates,
    /// No update that the unfenced resource acknowledged is lost (stores without leases only).
    Unfenced,
    /// P4: live, acknowledged waiters are served in the order in which they arrived.
    Fifo,
    /// P5: a crashed holder's lock is free within the promised time.
    Recovery,
    /// P6: every live waiter is eventually granted the lock.
    Wakeup,
    /// R5: the lease does not expire while its holder lives and reaches the store. No lease ends
    /// early.
    Renewal,
    /// P9: when all clients are gone, the store has no leftovers.
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

/// The store's promises under the faults that were injected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Terms {
    #[serde(rename = "promises")]
    pub(super) claimed: BTreeSet<Property>,
    /// Time in milliseconds after which a crashed holder's lock is free.
    pub(super) recovery_ms: Option<u64>,
    /// Whether a paused client may block others for long enough that they lose their places.
    #[serde(default)]
    pub(super) shared_stalls: bool,
}

/// A broken promise.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Violation {
    pub(super) property: Property,
    /// The events that broke it, in one line.
    pub(super) what: String,
    #[serde(skip)]
    pub(super) place: Place,
}

/// A location in a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    Lock(usize),
    /// The operations that conflict with each other.
    Ops(Vec<OpId>),
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// Violations of claimed properties only.
    pub(super) violations: Vec<Violation>,
    pub(super) operations: usize,
    pub(super) grants: usize,
    /// Number of grants per lock.
    pub(super) grants_by_lock: Vec<usize>,
    /// Number of holds that ended because they were lost.
    pub(super) lost_holds: usize,
    /// Acknowledged updates of the unfenced resources that are lost.
    pub(super) plain_lost: Vec<OpId>,
    /// Writes that the unfenced resources accepted after a write with a greater token.
    pub(super) plain_late: Vec<OpId>,
    /// Number of writes that the fenced resources refused.
    pub(super) fenced_refused: usize,
    /// Number of acknowledged updates of the fenced resources.
    pub(super) fenced_kept: usize,
    /// Number of waiters that were entitled to their turn.
    pub(super) fair_waiters: usize,
    /// Times for which the locks of killed holders stayed unavailable while another client waited.
    pub(super) recoveries: Vec<Duration>,
    /// Number of calls that the store did not answer in time although no fault was active. These
    /// errors are correct, and indicate a slow store or a busy machine.
    pub(super) unanswered: usize,
}

/// Checks `history` against the store's promises.
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

/// The time in which an operation certainly held.
#[derive(Clone, Copy)]
struct Hold<'a> {
    op: &'a Op,
    token: u64,
    from: Time,
    to: Time,
}

/// The times of trouble per worker, indexed for fast lookups.
struct Troubles {
    /// Intervals per worker, disjoint and in order. Trouble of the parent counts for all workers.
    by_worker: HashMap<WorkerId, Vec<(Time, Time)>>,
    everybody: Vec<(Time, Time)>,
    anybody: Vec<(Time, Time)>,
    /// Times in which the servers were disturbed.
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

    /// Formats a time for the report, as milliseconds since the run began.
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

    /// Returns the holds in the order in which they began.
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
        // At the same time, ends sort before beginnings.
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

    /// Checks that conflicting locks were granted in the order in which they were held. This
    /// applies only if the store promises exclusion. Otherwise the reply to the earlier grant may
    /// have arrived after the later one's.
    fn tokens_of_conflicting(&mut self, lock: usize, holds: &[Hold<'_>]) {
        if !self.terms.claimed.contains(&Property::Exclusion) {
            return;
        }
        let capacity = self.history.locks[lock].capacity;
        let mut greatest: BTreeMap<u32, Hold<'_>> = BTreeMap::new();
        for simultaneous in holds.chunk_by(|a, b| a.from == b.from) {
            for hold in simultaneous {
                let conflicting = greatest
                    .range(capacity.saturating_sub(hold.op.weight).saturating_add(1)..)
                    .map(|(_, h)| h)
                    .max_by_key(|h| h.token);
                let Some(before) = conflicting.filter(|h| h.token > hold.token) else { continue };
                let place = Place::Ops(vec![hold.op.id, before.op.id]);
                let (before, now) = (self.shown(before), self.shown(hold));
                let what = format!(
                    "{}: {now} has a lower token than {before}, which held it earlier",
                    self.name(lock)
                );
                self.violated(Property::TokenOrder, place, what);
            }
            for hold in simultaneous {
                let max = greatest.entry(hold.op.weight).or_insert(*hold);
                if hold.token > max.token {
                    *max = *hold;
                }
            }
        }
    }

    /// Checks that a grant that returned before another call was made has the smaller token. This
    /// applies to every kind, and also to grants whose reply was lost.
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
                    "{}: {} requested the lock at {} ms and got token {token}, but {id} already had token {max}",
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

    /// Returns whether this worker had trouble of its own, or was affected by the trouble of
    /// others.
    fn is_hit(&self, worker: WorkerId, from: Time, to: Time) -> bool {
        let others = self.terms.shared_stalls && self.troubles.hit_anybody(from, to);
        others || self.troubles.hit(worker, from, to)
    }

    /// Returns whether servers that do not promise to remember holders were disturbed in this time.
    fn is_forgotten(&self, from: Time, to: Time) -> bool {
        let may_forget = !self.terms.claimed.contains(&Property::Exclusion);
        may_forget && overlaps(&self.troubles.servers, from, to)
    }

    /// Checks the order of grants. It goes from the last grant to the first, and looks for an
    /// earlier waiter among the grants that came later.
    fn fifo(&mut self, lock: usize, holds: &[Hold<'_>]) {
        let capacity = self.history.locks[lock].capacity;
        let mut first: BTreeMap<u32, (Time, Hold<'_>)> = BTreeMap::new();
        for simultaneous in holds.chunk_by(|a, b| a.from == b.from).rev() {
            for hold in simultaneous {
                let conflicting = first
                    .range(capacity.saturating_sub(hold.op.weight).saturating_add(1)..)
                    .map(|(_, waiter)| *waiter)
                    .min_by_key(|(since, _)| *since);
                let overtaken = conflicting.filter(|(since, _)| *since < hold.op.invoked);
                let Some((since, waiter)) = overtaken else { continue };
                let what = format!(
                    "{}: {} requested the lock at {} ms and was served before {}, which was already in the queue at {} ms",
                    self.name(lock),
                    self.shown(hold),
                    self.ms(hold.op.invoked),
                    self.shown(&waiter),
                    self.ms(since),
                );
                let place = Place::Ops(vec![hold.op.id, waiter.op.id]);
                self.violated(Property::Fifo, place, what);
            }
            for hold in simultaneous {
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
    }

    /// Checks how long a killed holder's lock stays unavailable while a client without trouble
    /// waits for it.
    fn recovery(&mut self, lock: usize, ops: &[&Op], holds: &[Hold<'_>]) {
        let capacity = self.history.locks[lock].capacity;
        let mut deaths: Vec<Time> = self.history.deaths.values().copied().collect();
        deaths.sort_unstable();
        let mut granted: Vec<(Time, &&Op)> =
            ops.iter().filter_map(|op| op.acquired.map(|(at, _)| (at, op))).collect();
        // Of simultaneous grants, the longest waiter's comes first.
        granted.sort_unstable_by_key(|(at, op)| (*at, op.waiting.unwrap_or(Time::MAX)));
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
            // Holders that died in between have their own recovery time.
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

    /// Checks how calls and holds ended.
    fn outcomes(&mut self, ops: &[Op]) {
        for crash in &self.history.crashes {
            self.violated(Property::Outcome, Place::Nowhere, crash.clone());
        }
        for op in ops {
            if !op.is_over() && !self.history.deaths.contains_key(&op.id.worker) {
                let what = format!(
                    "{}: {} requested the lock at {} ms, and the request never finished",
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
            // No client evicts in this test. Whatever the trouble, the store keeps a lease until
            // the promised time, unless it has forgotten it.
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
                // The trouble of another worker is a cause as well. In a file store, a paused
                // client can block the others.
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

/// Returns the terms of a store that promises everything.
#[cfg(test)]
pub(super) fn strict(recovery: Duration) -> Terms {
    let recovery_ms = u64::try_from(recovery.as_millis()).ok();
    Terms { claimed: Property::ALL.into_iter().collect(), recovery_ms, shared_stalls: false }
}

#[cfg(test)]
mod second;
#[cfg(test)]
pub(super) mod tests;
