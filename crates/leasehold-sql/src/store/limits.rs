//! Time limits for calls, and the limit for retries after conflicts.

use std::time::Duration;

/// The maximum time for one attempt of a call. After that, the attempt's connection is closed.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// The time after which a call counts as slow. Most calls are much faster.
pub(super) const SLOW: Duration = Duration::from_secs(1);
/// The time that a login may take on a busy server, before another address or host is tried.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) const LOGIN: Duration = Duration::from_secs(2);
/// The maximum number of attempts for a call that conflicts with other transactions.
pub(super) const TRIES: u32 = 30;
