//! The clock that this process and its watchdog share: CLOCK_BOOTTIME in nanoseconds.
//!
//! It continues while the machine sleeps, it cannot be set, and all processes read the same one. So
//! a deadline can be sent to another process as a number.

use std::time::Duration;

use leasehold::Clock;

/// Returns the current time in nanoseconds since the machine was booted.
pub(crate) fn now() -> u64 {
    Clock::default().now().as_nanos()
}

/// Returns the moment `d` from now, or `None` if it is out of range.
pub(crate) fn after(d: Duration) -> Option<u64> {
    now().checked_add(u64::try_from(d.as_nanos()).ok()?)
}

/// Returns the time left until `moment`.
pub(crate) fn until(moment: u64) -> Duration {
    Duration::from_nanos(moment.saturating_sub(now()))
}
