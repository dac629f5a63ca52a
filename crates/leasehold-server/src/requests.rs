//! The count of the requests that were answered.

use std::collections::BTreeMap;
use std::sync::Mutex;

use leasehold_core::kit::locked;

/// What is counted separately.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Answered {
    /// The name of the identity, or empty if the request had no valid proof of one.
    pub(crate) identity: String,
    pub(crate) route: String,
    pub(crate) method: &'static str,
    pub(crate) status: u16,
}

/// The number of answered requests.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<BTreeMap<Answered, u64>>);

impl Requests {
    pub(crate) fn count(&self, identity: &str, route: &str, method: &str, status: u16) {
        // A client can invent methods, so all unknown ones share one label.
        const METHODS: [&str; 4] = ["GET", "POST", "PUT", "DELETE"];
        let method = METHODS.into_iter().find(|known| *known == method).unwrap_or("other");
        let (identity, route) = (identity.to_owned(), route.to_owned());
        let of = Answered { identity, route, method, status };
        *locked(&self.0).entry(of).or_default() += 1;
    }

    pub(crate) fn all(&self) -> BTreeMap<Answered, u64> {
        locked(&self.0).clone()
    }
}
