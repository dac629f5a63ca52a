//! Facts about a store, collected when it is opened.

use std::time::Duration;

use super::guarantees::Guarantees;

/// Facts about a store, collected when it is opened. They do not change afterwards.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreInfo {
    /// The URL, without credentials.
    pub url: String,
    /// The identity: the same text for all clients that share the queues, and, as far as possible,
    /// another text for all others. Sequencers contain it, so it contains no secrets.
    pub identity: String,
    /// What the store guarantees in its current configuration.
    pub guarantees: Guarantees,
    /// Whether calls are answered without I/O to another machine. In that case, a dropped guard is
    /// released immediately, not by the background thread.
    pub is_local: bool,
    /// Extra time that a grant may need in [`Store::join`](super::Store::join) for replication.
    /// Polling during that time would not help.
    pub replication_timeout: Duration,
}

impl StoreInfo {
    /// Creates the information about a store on another machine, with its URL as its identity and
    /// without replication.
    pub fn new(url: impl Into<String>, guarantees: Guarantees) -> Self {
        let url = url.into();
        let identity = url.replacen("***@", "", 1);
        Self { url, identity, guarantees, is_local: false, replication_timeout: Duration::ZERO }
    }

    /// Sets the [identity](field@Self::identity).
    #[must_use]
    pub fn identified(self, identity: impl Into<String>) -> Self {
        Self { identity: identity.into(), ..self }
    }

    /// Marks the store as [local](field@Self::is_local).
    #[must_use]
    pub fn local(self) -> Self {
        Self { is_local: true, ..self }
    }

    /// Sets the [extra time for replication](field@Self::replication_timeout).
    #[must_use]
    pub fn confirming(self, replication_timeout: Duration) -> Self {
        Self { replication_timeout, ..self }
    }
}
