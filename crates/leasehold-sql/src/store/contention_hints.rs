//! Names of locks that were recently not free.
//!
//! For these names, the client does not try the statement for a free lock first, because it would
//! probably fail. A name is forgotten when its lock is found free.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use leasehold_core::Name;
use leasehold_core::kit::locked;
use leasehold_core::store::Joined;

/// How long a name is considered contended after a wait.
const LATELY: Duration = Duration::from_secs(1);
/// The maximum number of remembered names.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct ContentionHints(Mutex<HashMap<Name, Instant>>);

impl ContentionHints {
    /// Remembers that this lock was not free.
    fn note(&self, name: &Name) {
        let mut all = locked(&self.0);
        if all.len() >= MOST {
            all.retain(|_, at| at.elapsed() < LATELY);
        }
        if all.len() < MOST {
            all.insert(name.clone(), Instant::now());
        }
    }

    /// Updates the entry of a name with the answer of a join that did not acquire the lock with one
    /// statement.
    pub(super) fn learn(&self, name: &Name, joined: &Joined) {
        match joined {
            Joined::Waiting(_) | Joined::Busy { .. } => self.note(name),
            Joined::Holding { .. } => drop(locked(&self.0).remove(name)),
        }
    }

    pub(super) fn lately(&self, name: &Name) -> bool {
        locked(&self.0).get(name).is_some_and(|at| at.elapsed() < LATELY)
    }
}
