//! The data that the page's program draws: operations, faults and violations, as lists of numbers.
//!
//! Times are microseconds since the first event. An operation is an array, because with a hundred
//! thousand events, names would be most of the file.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::Serialize;

use crate::checker::Place;
use crate::history::{Fault, History, LockSpec, OpId, Resource, Time, WorkerId};
use crate::judged::Judged;
use crate::op::Op;
use crate::report::Verdict;

#[derive(Serialize)]
pub(super) struct Data {
    store: String,
    verdict: Verdict,
    summary: String,
    command: String,
    seed: Option<String>,
    lease_ms: Option<u64>,
    /// Duration of the run.
    span: i64,
    locks: Vec<LockSpec>,
    workers: Vec<Life>,
    ops: Vec<Drawn>,
    bands: Vec<Band>,
    violations: Vec<Broken>,
}

/// A worker, and when it was killed.
#[derive(Serialize)]
struct Life {
    id: WorkerId,
    died: Option<i64>,
}

#[derive(Serialize)]
struct Band {
    fault: &'static str,
    worker: Option<WorkerId>,
    from: i64,
    to: i64,
}

#[derive(Serialize)]
struct Broken {
    name: String,
    what: String,
    /// Indexes of the operations.
    ops: Vec<usize>,
    lock: Option<usize>,
}

/// An operation, as an array in the order in which the program names its parts.
#[derive(Serialize)]
struct Drawn(WorkerId, u32, usize, u32, Times, Option<String>, String, Written);

/// When it was invoked, acquired and over, and from when to when it certainly held.
#[derive(Serialize)]
struct Times(i64, Option<i64>, i64, Option<(i64, i64)>);

/// When it wrote, and the result at the unfenced and at the fenced resource.
#[derive(Serialize)]
struct Written(Option<i64>, Option<Fate>, Option<Fate>);

/// The result of a write.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Fate {
    Taken,
    Refused,
    /// Accepted after a write with a greater token.
    Late,
    /// Acknowledged, but missing at the end.
    Lost,
}

/// Returns what the page draws of a run.
pub(super) fn of(judged: &Judged) -> Data {
    let Judged { trial, history, findings, report } = judged;
    let clock = Clock::new(history);
    let ops = Op::fold(&history.events);
    let number: HashMap<OpId, usize> = ops.iter().enumerate().map(|(i, op)| (op.id, i)).collect();
    let writes = Writes::new(judged);
    let broken = |violation: &crate::checker::Violation| {
        let (ops, lock) = match &violation.place {
            Place::Nowhere => (Vec::new(), None),
            Place::Lock(lock) => (Vec::new(), Some(*lock)),
            Place::Ops(ops) => {
                (ops.iter().filter_map(|op| number.get(op)).copied().collect(), None)
            }
        };
        Broken { name: violation.property.to_string(), what: violation.what.clone(), ops, lock }
    };
    let mut violations: Vec<_> = findings.violations.iter().collect();
    violations.sort_by_key(|violation| violation.property);
    Data {
        store: trial.store.clone(),
        verdict: report.verdict(),
        summary: report.summary().to_owned(),
        command: trial.command_line(),
        seed: trial.seed.map(|seed| seed.to_string()),
        lease_ms: trial.lease_ms,
        span: clock.at(clock.last),
        locks: history.locks.clone(),
        workers: lives(history, &ops, &clock),
        bands: bands(history, &clock),
        violations: violations.into_iter().map(broken).collect(),
        ops: ops.iter().map(|op| drawn(op, history, &clock, &writes)).collect(),
    }
}

/// Converts times to the page's unit.
struct Clock {
    first: Time,
    last: Time,
}

impl Clock {
    fn new(history: &History) -> Self {
        let events = || history.events.iter().map(|event| event.at);
        let faults = history.troubles.iter().flat_map(|trouble| [trouble.from, trouble.to]);
        let last = events().chain(faults).chain([history.ended]).max().unwrap_or(0);
        Self { first: events().min().unwrap_or(history.ended), last }
    }

    fn at(&self, time: Time) -> i64 {
        let micros = (i128::from(time.min(self.last)) - i128::from(self.first)) / 1_000;
        i64::try_from(micros).unwrap_or(i64::MAX)
    }
}

fn lives(history: &History, ops: &[Op], clock: &Clock) -> Vec<Life> {
    let acted = ops.iter().map(|op| op.id.worker);
    let struck = history.troubles.iter().filter_map(|trouble| trouble.worker);
    let all: BTreeSet<WorkerId> =
        acted.chain(struck).chain(history.deaths.keys().copied()).collect();
    let died = |id| history.deaths.get(&id).map(|at| clock.at(*at));
    all.into_iter().map(|id| Life { id, died: died(id) }).collect()
}

fn bands(history: &History, clock: &Clock) -> Vec<Band> {
    let band = |trouble: &crate::history::Trouble| Band {
        fault: match trouble.fault {
            Some(Fault::Pause | Fault::Stale) => "pause",
            Some(Fault::Cut) => "cut",
            Some(Fault::Servers) => "servers",
            Some(Fault::Kill) => "kill",
            None => "stall",
        },
        worker: trouble.worker,
        from: clock.at(trouble.from),
        to: clock.at(trouble.to),
    };
    history.troubles.iter().map(band).collect()
}

/// What the history and the checker know about writes, beyond the workers' replies.
struct Writes {
    taken: HashMap<(OpId, Resource), Option<Time>>,
    lost: HashSet<OpId>,
    late: HashSet<OpId>,
}

impl Writes {
    fn new(judged: &Judged) -> Self {
        let taken =
            judged.history.writes.iter().map(|write| ((write.op, write.resource), write.at));
        Self {
            taken: taken.collect(),
            lost: judged.findings.plain_lost.iter().copied().collect(),
            late: judged.findings.plain_late.iter().copied().collect(),
        }
    }

    fn when(&self, op: OpId) -> Option<Time> {
        let at = |resource| self.taken.get(&(op, resource)).copied().flatten();
        at(Resource::Plain).or(at(Resource::Fenced))
    }

    fn plain(&self, op: &Op) -> Option<Fate> {
        let fate = self.fate(op, Resource::Plain, op.plain)?;
        Some(match fate {
            Fate::Taken if self.lost.contains(&op.id) => Fate::Lost,
            Fate::Taken if self.late.contains(&op.id) => Fate::Late,
            fate => fate,
        })
    }

    fn fate(&self, op: &Op, resource: Resource, answered: Option<bool>) -> Option<Fate> {
        match answered {
            Some(true) => Some(Fate::Taken),
            Some(false) => Some(Fate::Refused),
            None => self.taken.contains_key(&(op.id, resource)).then_some(Fate::Taken),
        }
    }
}

fn drawn(op: &Op, history: &History, clock: &Clock, writes: &Writes) -> Drawn {
    let (end, how) = end_of(op, history);
    let times = Times(
        clock.at(op.invoked),
        op.acquired.map(|(at, _)| clock.at(at)),
        clock.at(end),
        op.held_beyond_doubt(history).map(|(from, to)| (clock.at(from), clock.at(to))),
    );
    let written = Written(
        writes.when(op.id).or(op.wrote).map(|at| clock.at(at)),
        writes.plain(op),
        writes.fate(op, Resource::Fenced, op.fenced),
    );
    // Text, because numbers of the page's program are exact only up to 2^53.
    let token = op.acquired.filter(|(_, token)| *token != 0).map(|(_, token)| token.to_string());
    Drawn(op.id.worker, op.id.n, op.lock, op.weight, times, token, how, written)
}

fn end_of(op: &Op, history: &History) -> (Time, String) {
    let lost = op.lost.as_ref().map(|(_, _, reason)| format!("lost: {reason}"));
    if let Some(at) = op.releasing {
        let given_back = if op.released.is_some() { "released" } else { "dropped" };
        return (at, lost.unwrap_or_else(|| given_back.into()));
    }
    if let Some((at, kind, error)) = &op.failed {
        return (*at, format!("failed ({kind}): {error}"));
    }
    if let Some(at) = op.abandoned {
        return (at, "gave up".into());
    }
    match history.deaths.get(&op.id.worker) {
        Some(at) => (*at, "its worker was killed".into()),
        None => (history.ended, lost.unwrap_or_else(|| "never finished".into())),
    }
}
