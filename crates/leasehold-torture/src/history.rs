//! What happened: the events that the workers report and the parent records, without any judgement.
//!
//! All times are nanoseconds on CLOCK_BOOTTIME. All processes of one machine share that clock, so
//! events of different processes can be compared. Each event documents whether its time was read
//! before or after what it reports. The [checker](super::checker) needs that to claim no more than
//! was observed.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use leasehold::Clock;
use leasehold::Kind;
use serde::{Deserialize, Serialize};

/// Nanoseconds since the machine was switched on.
pub(super) type Time = u64;

/// Returns the current time, for events.
pub(super) fn now() -> Time {
    let now = Clock::default().now();
    nanos(now.since(now.minus(Duration::MAX)))
}

/// Converts a duration to the unit of [`Time`].
pub(super) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// One worker process. A respawned worker has a new ID.
pub(super) type WorkerId = u32;

/// One call of `lock`, `try_lock` and so on, with everything that follows from it.
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

/// One of the locks that the workers compete for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LockSpec {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) capacity: u32,
}

/// How the worker requests the lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Ask {
    /// Waits without limit.
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
    /// The call is about to be made. The time was read before the call.
    Invoked { lock: usize, weight: u32, ask: Ask },
    /// The store answered that the claim waits. The time was read after the answer.
    Waiting { ahead: usize },
    /// The call returned a guard. The time was read after the call.
    Acquired { token: u64 },
    /// `is_held()` returned true. The time was read *before* that call, so the lock was held then.
    /// According to the guard (`remaining()`), it may be held until `until`.
    Held { until: Time },
    /// `is_held()` returned false. `expired` means that the lease expired on the guard's own clock.
    Lost { expired: bool, reason: String },
    /// The resources answered, each with whether it accepted the write. `None`: no answer.
    Wrote { plain: bool, fenced: Option<bool> },
    /// The release or the drop is about to begin. The time was read before it.
    Releasing,
    /// The release was acknowledged.
    Released,
    /// The call returned an error of this kind, named as in
    /// [`ErrorKind::as_str`](leasehold::ErrorKind).
    Failed { kind: String, error: String },
    /// The future was dropped before it was complete. The time was read before the drop.
    Abandoned,
}

/// One event of one operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Event {
    pub(super) op: OpId,
    pub(super) at: Time,
    pub(super) what: What,
}

/// A fault of a worker or of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fault {
    /// The worker is paused (SIGSTOP) and continued.
    Pause,
    /// The worker is killed (SIGKILL), and another one is started.
    Kill,
    /// The worker's connection to the store is closed, or frozen with the data in transit.
    Cut,
    /// The worker is paused while the store's reply is on its way, and continues after its lease.
    Stale,
    /// The user's own command disturbs the servers.
    Servers,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pause => "pause",
            Self::Kill => "kill",
            Self::Cut => "cut",
            Self::Stale => "stale",
            Self::Servers => "servers",
        })
    }
}

/// A time in which a worker could not work normally. `None` means the parent, and therefore all
/// workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) worker: Option<WorkerId>,
    /// The injected fault. `None`: no fault, the machine was so busy that the process did not run.
    pub(super) fault: Option<Fault>,
    pub(super) from: Time,
    pub(super) to: Time,
    /// Time until which delayed work is excused.
    pub(super) excuses_until: Time,
}

impl Trouble {
    /// Records that a process was not scheduled.
    pub(super) fn stall(worker: Option<WorkerId>, from: Time, to: Time) -> Self {
        Self { worker, fault: None, from, to, excuses_until: to }
    }

    /// Records a fault that ends now, with `grace` for the work that it delayed.
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

/// One of the two resources under each lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Resource {
    /// Accepts every write.
    Plain,
    /// Refuses tokens below the highest token that it has seen.
    Fenced,
}

/// A write that a resource accepted, in the resource's own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) lock: usize,
    pub(super) resource: Resource,
    pub(super) op: OpId,
    pub(super) token: u64,
    /// When it was accepted, if the resource knows.
    pub(super) at: Option<Time>,
}

/// The final contents of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Final {
    /// The value of the register, which each update increments by one.
    pub(super) value: u64,
    /// The set of all operations that added themselves.
    pub(super) set: Vec<OpId>,
}

/// Everything that happened in one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    pub(super) locks: Vec<LockSpec>,
    /// Events in any order, except that the events of one operation are in order.
    pub(super) events: Vec<Event>,
    /// When each worker was killed. The time was read before the kill.
    pub(super) deaths: HashMap<WorkerId, Time>,
    /// Workers that ended without being killed, and how they ended.
    pub(super) crashes: Vec<String>,
    pub(super) troubles: Vec<Trouble>,
    pub(super) writes: Vec<Write>,
    /// Per lock: the final state of the plain resource and of the fenced resource.
    pub(super) finals: Vec<(Final, Final)>,
    /// Leftovers in the store after all clients were gone and the promised time had passed.
    pub(super) residue: Vec<String>,
    /// When all workers were gone.
    pub(super) ended: Time,
}

impl History {
    /// Returns for how long of this time no worker could work normally.
    pub(super) fn stood_still(&self, from: Time, to: Time) -> Duration {
        let everybody = self.troubles.iter().filter(|t| t.worker.is_none());
        let spans = everybody.map(|t| (t.from.max(from), t.to.min(to))).filter(|s| s.0 < s.1);
        Duration::from_nanos(merged(spans.collect()).iter().map(|(from, to)| to - from).sum())
    }

    /// Returns what a worker is doing: the last event of each of its operations that has not ended.
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
        let operations = open.values().map(|(lock, last)| {
            let name = self.locks.get(*lock).map_or("", |spec| spec.name.as_str());
            let ago = Duration::from_nanos(now.saturating_sub(last.at));
            format!("{name}: {:?} {ago:.1?} ago", last.what)
        });
        // Dropped operations report no end, so only the last ones matter.
        let mut operations: Vec<String> = operations.collect();
        match operations.split_off(operations.len().saturating_sub(4)) {
            last if last.is_empty() => "closing its client".into(),
            last => last.join("; "),
        }
    }
}

/// Merges overlapping intervals, so that each time is in one interval only.
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
    fn unfinished_operations_of_a_worker_are_listed() {
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
        let listed = history.under_way(3);
        let (first, second) = listed.split_once("; ").unwrap();
        assert!(first.starts_with("b: Invoked"), "{listed}");
        assert!(second.starts_with("a: Waiting { ahead: 2 }"), "{listed}");
        assert_eq!(history.under_way(4), "closing its client");
    }

    #[test]
    fn only_stalls_of_all_workers_count_and_only_once() {
        let second = nanos(Duration::from_secs(1));
        let stall = |worker, from: u64, to: u64| Trouble::stall(worker, from * second, to * second);
        let troubles = vec![
            stall(None, 1, 4),
            stall(Some(3), 4, 9), // one worker's own
            stall(None, 3, 5),    // reported twice
            stall(None, 8, 20),   // lasts longer
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
