//! How long things last: leases, their defaults and bounds, and what follows from them.

use std::time::Duration;

/// How long a grant lasts unrenewed, unless the caller says otherwise.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(15);
/// How long a waiter that went silent keeps its place.
pub const DEFAULT_WAITER_LEASE: Duration = Duration::from_secs(6);
/// The shortest lease: below it, drift and scheduling eat the lease whole.
pub const MIN_LEASE: Duration = Duration::from_millis(50);
/// The longest lease: a day. A longer one is an outage waiting for a crash.
pub const MAX_LEASE: Duration = Duration::from_secs(86_400);

/// What one acknowledgement of `lease` must be shortened by, since two clocks may differ in rate:
/// 1 % + 2 ms, the convention of the Redlock algorithm's description.
pub fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// How long one answer of a store is waited for before the request is repeated.
pub fn request_timeout(lease: Duration) -> Duration {
    (lease / 3).clamp(Duration::from_millis(20), Duration::from_secs(5))
}

/// How long a waiter's place lasts: never longer than the lease that it waits for.
pub(crate) fn waiter_lease(lease: Duration) -> Duration {
    DEFAULT_WAITER_LEASE.min(lease)
}
