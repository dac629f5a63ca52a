//! Names whose row this client has seen. For these names, it acquires the lock with a far cheaper
//! statement, which cannot create the row. If the row is gone because the name was not used for a
//! day, that statement changes nothing. The call then takes the slow path, as it does for a lock
//! that is not free.

use std::collections::HashSet;
use std::sync::Mutex;

use leasehold_core::Name;
use leasehold_core::kit::locked;

/// The maximum number of names that are remembered.
const MOST: usize = 10_000;

/// The set of known names.
#[derive(Debug, Default)]
pub(super) struct SeenNames(Mutex<HashSet<Name>>);

impl SeenNames {
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
