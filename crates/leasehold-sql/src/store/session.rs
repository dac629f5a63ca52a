//! The names of clients' sessions. A name's prefix shows whether and how the client is notified of
//! grants.

/// The prefix of a client that listens for notifications. Clients that cannot listen notify it too.
#[cfg(feature = "postgres")]
pub(super) const LISTENS: &str = "leasehold_hears_";

/// The prefix of a client that polls.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(super) const ASKS: &str = "leasehold_asks_";

/// The prefix of a client of MySQL that can be woken. It differs from that of PostgreSQL's
/// listeners, because an older leasehold would send PostgreSQL statements to clients with that
/// prefix.
#[cfg(feature = "mysql")]
pub(super) const SLEEPS: &str = "leasehold_sleeps_";
