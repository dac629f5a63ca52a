//! What this client wrote last, by the lock's name: where nobody came in between, the next call needs no
//! look. It is only ever a guess, which the system refuses if it is wrong.

use std::collections::HashMap;
use std::sync::Mutex;

use leasehold_core::Name;
use leasehold_core::kit::locked;
use leasehold_core::queue::Queue;

use crate::cells::Version;

/// How many names are kept in mind.
const MOST: usize = 16_384;
/// The longest queue that is worth it: others change too often.
const LONGEST: usize = 2;

/// A lock's cell, as it was when it was last read or written.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) queue: Queue,
    /// `None`: there is no cell.
    pub(crate) version: Option<Version>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<HashMap<Name, Seen>>);

impl Known {
    /// What is known, if it is of use, and then it is forgotten: whoever goes by it finds out how it is.
    pub(crate) fn take(&self, name: &Name, is_of_use: impl Fn(&Queue) -> bool) -> Option<Seen> {
        let mut all = locked(&self.0);
        if !is_of_use(&all.get(name)?.queue) {
            return None;
        }
        all.remove(name)
    }

    pub(crate) fn keep(&self, name: &Name, seen: Seen) {
        if seen.queue.entries().len() > LONGEST {
            return self.forget(name);
        }
        let mut all = locked(&self.0);
        if all.len() >= MOST && !all.contains_key(name) {
            all.clear();
        }
        all.insert(name.clone(), seen);
    }

    pub(crate) fn forget(&self, name: &Name) {
        locked(&self.0).remove(name);
    }
}
