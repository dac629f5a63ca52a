//! Since when the longest wait lasts, of all the clients of this process: a metric (feature `metrics`).
//!
//! As a point in time, and not as an age: it changes only when a wait begins or ends, and whoever asks at any
//! moment gets the age by subtracting. All waits are kept in the order in which they began; who is first is told to
//! the recorder while the order is locked, so that the last word is the right one.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::base::locked::locked;
use crate::base::world::process_id;
use crate::words::claim::Kind;

/// By this machine's clock, since 1970, and a number that tells those of one moment apart.
type Began = (Duration, u64);

static WAITS: [Mutex<BTreeSet<Began>>; 3] = [const { Mutex::new(BTreeSet::new()) }; 3];
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A wait, until it is dropped. One that a forked child has inherited is its parent's.
#[derive(Debug)]
pub(super) struct Wait {
    kind: Kind,
    began: Began,
    pid: u32,
    tell: fn(Kind, f64),
}

impl Wait {
    /// `tell` is told when the longest of its kind began, in seconds since 1970; 0 if there is none.
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
        // What a child has of its parent's threads may be locked for ever.
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

    /// No other test of this program has a metric's recorder, nor semaphores that wait.
    #[test]
    fn the_first_of_those_that_last_is_told() {
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
        // Of a child, which has it by a fork.
        drop(Wait { kind: Kind::Semaphore, began: third.began, pid: 0, tell: third.tell });
        drop(third);
        assert_eq!(*locked(&TOLD), [one, three, 0.0]);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - one).abs() < 60.0, "{one} of {now}");
    }
}
