//! What the sessions of clients are called: by its name a client is told, or not, of its grants.

/// A client that listens for notifications, and tells those who do; also those are told so that cannot
/// listen themselves.
pub(super) const LISTENS: &str = "leasehold_hears_";

/// A client that asks for itself.
pub(super) const ASKS: &str = "leasehold_asks_";

/// A client of MySQL that can be woken. Another word than PostgreSQL's listeners have: to those an older
/// leasehold would send PostgreSQL's words.
#[cfg(feature = "mysql")]
pub(super) const SLEEPS: &str = "leasehold_sleeps_";
