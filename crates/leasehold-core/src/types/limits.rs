//! Leases: defaults, limits and derived times.

use std::time::Duration;

/// The default lease: how long a grant lasts without a renewal.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(15);
/// The default waiter lease: how long a waiter keeps its queue position without a heartbeat.
pub const DEFAULT_WAITER_LEASE: Duration = Duration::from_secs(6);
/// The shortest lease. Clock drift and scheduling delays would use up a shorter one.
pub const MIN_LEASE: Duration = Duration::from_millis(50);
/// The longest lease: one day. With a longer one, a crash blocks the lock for too long.
pub const MAX_LEASE: Duration = Duration::from_secs(86_400);

/// The minimum number of holders that [`Store::holders`](crate::store::Store::holders) returns, if
/// that many hold the lock.
pub const LISTED_HOLDERS: usize = 100;

/// Returns the safety margin of a lease, since two clocks may run at different rates: 1 % + 2 ms,
/// as in the description of the Redlock algorithm.
pub fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// Returns how long to wait for the store's reply before the request is repeated.
pub fn request_timeout(lease: Duration) -> Duration {
    (lease / 3).clamp(Duration::from_millis(20), Duration::from_secs(5))
}

/// Returns how long a waiter's position lasts without a heartbeat. This is never longer than the
/// lease that the waiter requests.
pub(crate) fn waiter_lease(lease: Duration) -> Duration {
    DEFAULT_WAITER_LEASE.min(lease)
}
