//! Names whose row this client has seen: a lock that has one is taken by a statement that is far cheaper
//! than the one that would make it. If it is gone (nobody used it for a day), that statement finds nothing, and the
//! call is done in full, as where the lock is not free.

use std::collections::HashSet;
use std::sync::Mutex;

use leasehold_core::Name;
use leasehold_core::kit::locked;

/// How many names are remembered.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Known(Mutex<HashSet<Name>>);

impl Known {
    pub(super) fn note(&self, name: &Name) {
        let mut all = locked(&self.0);
        if all.len() >= MOST {
            all.clear();
        }
        all.insert(name.clone());
    }

    pub(super) fn has(&self, name: &Name) -> bool {
        locked(&self.0).contains(name)
    }
}
