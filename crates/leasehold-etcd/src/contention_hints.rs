//! A cache of the locks that were recently found taken.
//!
//! To acquire such a lock, the client sends one transaction with everything that it may need, and a
//! try reads the queue before it writes. For a lock that was free the last time, the small
//! transaction is enough. The cache is only a guess. A wrong guess costs one round trip, once.
//! Names that hash to the same slot share their guess.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_core::Name;

/// Number of slots to which the names are hashed.
const SPREAD: usize = 1_024;

#[derive(Debug)]
pub(super) struct ContentionHints {
    found: Vec<AtomicBool>,
    spread: RandomState,
}

impl Default for ContentionHints {
    fn default() -> Self {
        let found = (0..SPREAD).map(|_| AtomicBool::new(false)).collect();
        Self { found, spread: RandomState::new() }
    }
}

impl ContentionHints {
    fn place(&self, name: &Name) -> Option<&AtomicBool> {
        let at = self.spread.hash_one(name) % SPREAD as u64;
        self.found.get(usize::try_from(at).ok()?)
    }

    /// Returns whether other clients had the lock when it was last requested.
    pub(super) fn was(&self, name: &Name) -> bool {
        self.place(name).is_some_and(|found| found.load(Ordering::Relaxed))
    }

    pub(super) fn note(&self, name: &Name, found: bool) {
        if let Some(place) = self.place(name) {
            place.store(found, Ordering::Relaxed);
        }
    }
}
