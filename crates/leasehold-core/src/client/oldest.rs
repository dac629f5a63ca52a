//! The start of the longest current wait among all clients of this process, as a metric (feature
//! `metrics`).
//!
//! The metric is a point in time, not an age. So it changes only when a wait begins or ends, and a
//! reader computes the age by subtraction. All waits are kept in the order in which they began. The
//! first one is reported while the set is locked, so the last reported value is the correct one.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::types::claim::Kind;
use crate::util::locked::locked;
use crate::util::world::process_id;

/// The time since 1970 by this machine's clock, and a number that distinguishes waits that began at
/// the same time.
type Began = (Duration, u64);

static WAITS: [Mutex<BTreeSet<Began>>; 3] = [const { Mutex::new(BTreeSet::new()) }; 3];
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A registered wait. Dropping this value ends the wait. In a forked child, an inherited wait still
/// belongs to the parent.
#[derive(Debug)]
pub(super) struct Wait {
    kind: Kind,
    began: Began,
    pid: u32,
    tell: fn(Kind, f64),
}

impl Wait {
    /// Registers a wait. `tell` is called with the start of the longest wait of this kind, in
    /// seconds since 1970, or with 0 if there is none.
    pub(super) fn begin(kind: Kind, pid: u32, tell: fn(Kind, f64)) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wait = Self { kind, began: (now, NEXT.fetch_add(1, Ordering::Relaxed)), pid, tell };
        wait.note(|all| {
            all.insert(wait.began);
        });
        wait
    }

    fn note(&self, change: impl FnOnce(&mut BTreeSet<Began>)) {
        let waits = match self.kind {
            Kind::Mutex => &WAITS[0],
            Kind::RwLock => &WAITS[1],
            Kind::Semaphore => &WAITS[2],
        };
        let mut all = locked(waits);
        let before = all.first().copied();
        change(&mut all);
        if all.first().copied() != before {
            (self.tell)(self.kind, all.first().map_or(0.0, |(at, _)| at.as_secs_f64()));
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        // In a forked child, the mutex may be locked forever by a thread of the parent.
        if self.pid == process_id() {
            self.note(|all| {
                all.remove(&self.began);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static TOLD: Mutex<Vec<f64>> = Mutex::new(Vec::new());

    /// No other test of this program installs a metrics recorder or waits for a semaphore.
    #[test]
    fn oldest_current_wait_is_reported() {
        let began = || {
            Wait::begin(Kind::Semaphore, process_id(), |kind, since| {
                assert_eq!(kind, Kind::Semaphore);
                locked(&TOLD).push(since);
            })
        };
        let [first, second, third] = [began(), began(), began()];
        let at = |wait: &Wait| wait.began.0.as_secs_f64();
        let (one, three) = (at(&first), at(&third));
        drop(second);
        drop(first);
        // This wait has another process ID, like a wait that a forked child inherited.
        drop(Wait { kind: Kind::Semaphore, began: third.began, pid: 0, tell: third.tell });
        drop(third);
        assert_eq!(*locked(&TOLD), [one, three, 0.0]);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - one).abs() < 60.0, "{one} of {now}");
    }
}
