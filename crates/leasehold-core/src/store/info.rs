//! What a store is, as it was found when it was opened.

use std::time::Duration;

use super::guarantees::Guarantees;

/// What a store is, as it was found when it was opened; it does not change afterwards.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreInfo {
    /// Its URL, without credentials.
    pub url: String,
    /// Which store it is: the same text for all who share its queues, and another for all who do not,
    /// as far as that can be known. Sequencers carry it, so it tells no secrets.
    pub identity: String,
    /// What it promises, in the configuration that it found.
    pub guarantees: Guarantees,
    /// Whether calls are answered without I/O to another machine. Then a dropped guard is released
    /// on the spot, and not by the background thread.
    pub is_local: bool,
    /// Extra time that a grant may need in [`Store::join`](super::Store::join) for replication, beside a
    /// server's answer. Asking again meanwhile would help nobody.
    pub replication_timeout: Duration,
}

impl StoreInfo {
    /// A store on another machine that has no better name for itself than its URL, and waits for
    /// nothing but an answer.
    pub fn new(url: impl Into<String>, guarantees: Guarantees) -> Self {
        let url = url.into();
        let identity = url.replacen("***@", "", 1);
        Self { url, identity, guarantees, is_local: false, replication_timeout: Duration::ZERO }
    }

    /// With this [identity](field@Self::identity).
    #[must_use]
    pub fn identified(self, identity: impl Into<String>) -> Self {
        Self { identity: identity.into(), ..self }
    }

    /// On [this machine](field@Self::is_local).
    #[must_use]
    pub fn local(self) -> Self {
        Self { is_local: true, ..self }
    }

    /// Which waits so long for [confirmations](field@Self::replication_timeout).
    #[must_use]
    pub fn confirming(self, replication_timeout: Duration) -> Self {
        Self { replication_timeout, ..self }
    }
}
