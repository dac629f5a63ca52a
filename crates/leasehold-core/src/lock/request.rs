//! A request for one of several locks, and the order in which all are acquired.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::lock::acquire::LockHandle;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::Name;

/// A request for one lock, for [`lock_all`](crate::Client::lock_all).
///
/// A request is made from a [`Mutex`](crate::Mutex), or by
/// [`RwLock::read_request`](crate::RwLock::read_request),
/// [`RwLock::write_request`](crate::RwLock::write_request) or
/// [`Semaphore::permit_request`](crate::Semaphore::permit_request).
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct LockRequest {
    pub(crate) handle: LockHandle,
    pub(crate) weight: u32,
}

impl LockRequest {
    pub(crate) fn new(handle: LockHandle, weight: u32) -> Self {
        Self { handle, weight }
    }

    fn name(&self) -> &str {
        self.handle.name.as_ref().map_or_else(String::as_str, Name::as_str)
    }

    /// Returns the key by which all callers sort their requests.
    fn place(&self) -> (String, String) {
        (self.handle.core.identity.clone(), self.name().to_owned())
    }

    fn is_same(&self, other: &Self) -> bool {
        let what = |wanted: &Self| (wanted.handle.kind, wanted.handle.capacity, wanted.weight);
        what(self) == what(other)
    }
}

/// Sorts the requests into the order in which all callers acquire locks, and removes duplicates.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): the same lock is requested in two different ways.
pub(crate) fn in_order(wanted: impl IntoIterator<Item = LockRequest>) -> Result<Vec<LockRequest>> {
    let mut places: BTreeMap<_, LockRequest> = BTreeMap::new();
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
