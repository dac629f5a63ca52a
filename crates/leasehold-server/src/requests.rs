//! The count of the requests that were answered.

use std::collections::BTreeMap;
use std::sync::Mutex;

use leasehold_core::kit::locked;

/// Route, method and status.
type Key = (String, &'static str, u16);

/// The number of answered requests, by route, method and status.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<BTreeMap<Key, u64>>);

impl Requests {
    pub(crate) fn count(&self, route: &str, method: &str, status: u16) {
        // A client can invent methods, so all unknown ones share one label.
        const METHODS: [&str; 4] = ["GET", "POST", "PUT", "DELETE"];
        let method = METHODS.into_iter().find(|known| *known == method).unwrap_or("other");
        *locked(&self.0).entry((route.to_owned(), method, status)).or_default() += 1;
    }

    pub(crate) fn all(&self) -> BTreeMap<Key, u64> {
        locked(&self.0).clone()
    }
}
