//! The clock that this process and its watchdog share: CLOCK_BOOTTIME in nanoseconds.
//!
//! It counts while the machine sleeps, nobody can set it, and every process reads the same one,
//! so a deadline can be told to another process as a number.

use std::time::Duration;

use leasehold::Clock;

/// Now, in nanoseconds since the machine was switched on.
pub(crate) fn now() -> u64 {
    Clock::default().now().as_nanos()
}

/// The moment that is `d` away, or `None` if that is never.
pub(crate) fn after(d: Duration) -> Option<u64> {
    now().checked_add(u64::try_from(d.as_nanos()).ok()?)
}

/// What is left until `moment`.
pub(crate) fn until(moment: u64) -> Duration {
    Duration::from_nanos(moment.saturating_sub(now()))
}
