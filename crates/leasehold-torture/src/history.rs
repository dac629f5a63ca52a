//! What happened: the events that the workers tell and the parent writes down, and nothing judged.
//!
//! All times are nanoseconds on CLOCK_BOOTTIME, which every process of one machine shares, so that
//! events of different processes can be compared. Each event says on which side of what it tells
//! its time was read; the [checker](super::checker) needs that to claim no more than was seen.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use leasehold::Clock;
use leasehold::Kind;
use serde::{Deserialize, Serialize};

/// Nanoseconds since the machine was switched on.
pub(super) type Time = u64;

/// The time now, for events.
pub(super) fn now() -> Time {
    let now = Clock::default().now();
    nanos(now.since(now.minus(Duration::MAX)))
}

/// A duration in the unit of [`Time`].
pub(super) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// One worker process. A respawned worker is another one.
pub(super) type WorkerId = u32;

/// One call of `lock`, `try_lock`, … and all that follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct OpId {
    pub(super) worker: WorkerId,
    pub(super) n: u32,
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.worker, self.n)
    }
}

/// One of the locks that are fought for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LockSpec {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) capacity: u32,
}

/// How the worker asks for the lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Ask {
    /// Waits as long as it takes.
    #[default]
    Lock,
    /// Does not wait.
    Try,
    /// Waits for a short time.
    Timeout,
    /// Waits, and drops the future after a short time.
    Cancel,
}

/// What happened to an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum What {
    /// Read before the call.
    Invoked { lock: usize, weight: u32, ask: Ask },
    /// The store said that it waits. Read after the answer.
    Waiting { ahead: usize },
    /// The call returned a guard. Read after it.
    Acquired { token: u64 },
    /// Read *before* `is_held()` said yes: it was held then, and by the guard's own word
    /// (`remaining()`) may be until `until`.
    Held { until: Time },
    /// `is_held()` said no. `expired`: because the lease ran out by the guard's own clock.
    Lost { expired: bool, reason: String },
    /// Answered by the resources, each with whether it took the write. `None`: no answer.
    Wrote { plain: bool, fenced: Option<bool> },
    /// Read before the release or the drop.
    Releasing,
    /// The release was acknowledged.
    Released,
    /// The call returned an error of this kind, as [`ErrorKind::as_str`](leasehold::ErrorKind)
    /// has it.
    Failed { kind: String, error: String },
    /// The future was dropped before it was ready. Read before the drop.
    Abandoned,
}

/// One event of one operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Event {
    pub(super) op: OpId,
    pub(super) at: Time,
    pub(super) what: What,
}

/// What can be done to a worker, or to the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fault {
    /// Stopped (SIGSTOP) and continued.
    Pause,
    /// Killed (SIGKILL), and another one started.
    Kill,
    /// Its connection to the store closed, or frozen with what is on the way.
    Cut,
    /// What the user's own command does to the servers.
    Servers,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pause => "pause",
            Self::Kill => "kill",
            Self::Cut => "cut",
            Self::Servers => "servers",
        })
    }
}

/// A time during which a worker (or, with `None`, the parent and with it everybody) could not do
/// what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) worker: Option<WorkerId>,
    /// What was injected; `None`: nothing, the machine was so busy that it did not run.
    pub(super) fault: Option<Fault>,
    pub(super) from: Time,
    pub(super) to: Time,
    /// What was kept waiting takes until then to be made up for.
    pub(super) excuses_until: Time,
}

impl Trouble {
    /// A process did not get to run.
    pub(super) fn stall(worker: Option<WorkerId>, from: Time, to: Time) -> Self {
        Self { worker, fault: None, from, to, excuses_until: to }
    }

    /// A fault that ends now, and needs so long to be made up for.
    pub(super) fn ends_now(
        fault: Fault,
        worker: Option<WorkerId>,
        from: Time,
        grace: Duration,
    ) -> Self {
        let to = now();
        let excuses_until = to.saturating_add(nanos(grace));
        Self { worker, fault: Some(fault), from, to, excuses_until }
    }
}

/// Which of the two resources under each lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Resource {
    /// Takes every write.
    Plain,
    /// Takes no token below the highest that it has seen.
    Fenced,
}

/// A write that a resource took, in its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) lock: usize,
    pub(super) resource: Resource,
    pub(super) op: OpId,
    pub(super) token: u64,
    /// When, where the resource knows.
    pub(super) at: Option<Time>,
}

/// What a resource holds in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Final {
    /// The register: how often it was incremented.
    pub(super) value: u64,
    /// The set: every operation that added itself.
    pub(super) set: Vec<OpId>,
}

/// Everything that happened in one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    pub(super) locks: Vec<LockSpec>,
    /// In any order; those of one operation are in order.
    pub(super) events: Vec<Event>,
    /// When a worker was killed; read before the kill.
    pub(super) deaths: HashMap<WorkerId, Time>,
    /// Workers that ended though nobody killed them, with how.
    pub(super) crashes: Vec<String>,
    pub(super) troubles: Vec<Trouble>,
    pub(super) writes: Vec<Write>,
    /// Per lock: the plain resource, the fenced one.
    pub(super) finals: Vec<(Final, Final)>,
    /// What still stood in the store when everybody was gone and the promised time had passed.
    pub(super) residue: Vec<String>,
    /// When the workers were all gone.
    pub(super) ended: Time,
}

impl History {
    /// For how long of this time nobody could do what he should.
    pub(super) fn stood_still(&self, from: Time, to: Time) -> Duration {
        let everybody = self.troubles.iter().filter(|t| t.worker.is_none());
        let spans = everybody.map(|t| (t.from.max(from), t.to.min(to))).filter(|s| s.0 < s.1);
        Duration::from_nanos(merged(spans.collect()).iter().map(|(from, to)| to - from).sum())
    }

    /// What a worker is at: the last that it told of each operation of which it told no end.
    pub(super) fn under_way(&self, worker: WorkerId) -> String {
        let mut open: BTreeMap<OpId, (usize, &Event)> = BTreeMap::new();
        for event in self.events.iter().filter(|event| event.op.worker == worker) {
            match &event.what {
                What::Abandoned | What::Failed { .. } | What::Released => {
                    open.remove(&event.op);
                }
                What::Invoked { lock, .. } => {
                    open.insert(event.op, (*lock, event));
                }
                _ => {
                    if let Some((_, last)) = open.get_mut(&event.op) {
                        *last = event;
                    }
                }
            }
        }
        let now = now();
        let told = open.values().map(|(lock, last)| {
            let name = self.locks.get(*lock).map_or("", |spec| spec.name.as_str());
            let ago = Duration::from_nanos(now.saturating_sub(last.at));
            format!("{name}: {:?} {ago:.1?} ago", last.what)
        });
        // Of what was dropped no end is told: so it is the last ones that matter.
        let mut told: Vec<String> = told.collect();
        match told.split_off(told.len().saturating_sub(4)) {
            last if last.is_empty() => "closing its client".into(),
            last => last.join("; "),
        }
    }
}

/// These spans of time, each moment in one of them only.
pub(super) fn merged(mut spans: Vec<(Time, Time)>) -> Vec<(Time, Time)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_is_at_is_what_it_told_no_end_of() {
        let mut history = History::default();
        let spec = |name: &str| LockSpec { name: name.into(), kind: Kind::Mutex, capacity: 1 };
        history.locks = vec![spec("a"), spec("b")];
        let mut tell =
            |n, what| history.events.push(Event { op: OpId { worker: 3, n }, at: now(), what });
        let invoked = |lock| What::Invoked { lock, weight: 1, ask: Ask::Lock };
        tell(1, invoked(0));
        tell(1, What::Released);
        tell(2, invoked(1));
        tell(3, invoked(0));
        tell(3, What::Waiting { ahead: 2 });
        tell(4, invoked(1));
        tell(4, What::Abandoned);
        let told = history.under_way(3);
        let (first, second) = told.split_once("; ").unwrap();
        assert!(first.starts_with("b: Invoked"), "{told}");
        assert!(second.starts_with("a: Waiting { ahead: 2 }"), "{told}");
        assert_eq!(history.under_way(4), "closing its client");
    }

    #[test]
    fn standstill_is_counted_once_and_only_where_it_hit_everybody() {
        let second = nanos(Duration::from_secs(1));
        let stall = |worker, from: u64, to: u64| Trouble::stall(worker, from * second, to * second);
        let troubles = vec![
            stall(None, 1, 4),
            stall(Some(3), 4, 9), // one worker's own
            stall(None, 3, 5),    // told twice
            stall(None, 8, 20),   // goes on
        ];
        let history = History { troubles, ..History::default() };
        let between =
            |from: u64, to: u64| history.stood_still(from * second, to * second).as_secs();
        assert_eq!(between(0, 10), 4 + 2);
        assert_eq!(between(2, 3), 1);
        assert_eq!(between(5, 8), 0);
        assert_eq!(between(0, 30), 4 + 12);
    }
}
