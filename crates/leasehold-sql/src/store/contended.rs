//! Names for which this client had to wait a moment ago: there it does not try first whether the lock is
//! free, which would be a statement in vain. Found free, such a name is as any other again.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use leasehold_core::Name;
use leasehold_core::kit::locked;
use leasehold_core::store::Joined;

/// How long a moment is.
const LATELY: Duration = Duration::from_secs(1);
/// How many names are remembered.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Contended(Mutex<HashMap<Name, Instant>>);

impl Contended {
    /// Somebody waits for it.
    pub(super) fn note(&self, name: &Name) {
        let mut all = locked(&self.0);
        if all.len() >= MOST {
            all.retain(|_, at| at.elapsed() < LATELY);
        }
        if all.len() < MOST {
            all.insert(name.clone(), Instant::now());
        }
    }

    /// How somebody fared who asked for it in full.
    pub(super) fn learn(&self, name: &Name, joined: &Joined) {
        match joined {
            Joined::Waiting(_) => self.note(name),
            Joined::Holding { .. } => drop(locked(&self.0).remove(name)),
            Joined::Busy { .. } => {}
        }
    }

    pub(super) fn lately(&self, name: &Name) -> bool {
        locked(&self.0).get(name).is_some_and(|at| at.elapsed() < LATELY)
    }
}
