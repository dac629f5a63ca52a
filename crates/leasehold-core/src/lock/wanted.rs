//! One of several locks, as it is wanted; and the order in which all are taken.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::lock::acquire::LockHandle;
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::name::Name;

/// A request for one lock, for [`lock_all`](crate::Leasehold::lock_all).
///
/// It is made from a [`Mutex`](crate::Mutex), or by [`RwLock::to_read`](crate::RwLock::to_read),
/// [`RwLock::to_write`](crate::RwLock::to_write) or
/// [`Semaphore::to_acquire`](crate::Semaphore::to_acquire).
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Wanted {
    pub(crate) handle: LockHandle,
    pub(crate) weight: u32,
}

impl Wanted {
    pub(crate) fn new(handle: LockHandle, weight: u32) -> Self {
        Self { handle, weight }
    }

    fn name(&self) -> &str {
        self.handle.name.as_ref().map_or_else(String::as_str, Name::as_str)
    }

    /// What everybody sorts by.
    fn place(&self) -> (String, String) {
        (self.handle.core.identity.clone(), self.name().to_owned())
    }

    fn is_same(&self, other: &Self) -> bool {
        let what = |wanted: &Self| (wanted.handle.kind, wanted.handle.capacity, wanted.weight);
        what(self) == what(other)
    }
}

/// In the order in which all take them, each once.
pub(crate) fn in_order(wanted: impl IntoIterator<Item = Wanted>) -> Result<Vec<Wanted>> {
    let mut places: BTreeMap<_, Wanted> = BTreeMap::new();
    for one in wanted {
        match places.entry(one.place()) {
            Entry::Vacant(place) => drop(place.insert(one)),
            Entry::Occupied(other) if other.get().is_same(&one) => {}
            Entry::Occupied(_) => {
                let what = format!(
                    "{:?} is requested in two different ways, which would be a deadlock",
                    one.name()
                );
                return Err(Error::new(ErrorKind::Config, what).with_hint("request it once"));
            }
        }
    }
    Ok(places.into_values().collect())
}
