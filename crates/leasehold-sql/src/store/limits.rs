//! How long a call may take, and how often others may get in its way.

use std::time::Duration;

/// The longest that one try of a call may take: then its connection is given up.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// How long most calls take at most.
pub(super) const SLOW: Duration = Duration::from_secs(1);
/// How often others may get in the way.
pub(super) const TRIES: u32 = 30;
