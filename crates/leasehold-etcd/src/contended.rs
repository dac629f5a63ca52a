//! Which locks were found taken lately: who joins one of these sends all that it may take in one transaction,
//! and who tries looks before it writes. Of a lock that was free the last time, the small transaction is
//! enough. A guess: to be wrong costs a round trip, once, and names that share a place by chance guess for
//! each other.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_core::Name;

/// Among how many places the names are spread.
const SPREAD: usize = 1_024;

#[derive(Debug)]
pub(super) struct Contended {
    found: Vec<AtomicBool>,
    spread: RandomState,
}

impl Default for Contended {
    fn default() -> Self {
        let found = (0..SPREAD).map(|_| AtomicBool::new(false)).collect();
        Self { found, spread: RandomState::new() }
    }
}

impl Contended {
    fn place(&self, name: &Name) -> Option<&AtomicBool> {
        let at = self.spread.hash_one(name) % SPREAD as u64;
        self.found.get(usize::try_from(at).ok()?)
    }

    /// Others had it when it was last asked for.
    pub(super) fn was(&self, name: &Name) -> bool {
        self.place(name).is_some_and(|found| found.load(Ordering::Relaxed))
    }

    pub(super) fn note(&self, name: &Name, found: bool) {
        if let Some(place) = self.place(name) {
            place.store(found, Ordering::Relaxed);
        }
    }
}
