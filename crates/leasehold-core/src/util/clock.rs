//! The client's clock: CLOCK_BOOTTIME, which continues while the machine is suspended.
//!
//! `std::time::Instant` is CLOCK_MONOTONIC on Linux and stops during suspend. A guard that used it
//! would still claim its lease after a night of suspend. CLOCK_BOOTTIME cannot be set, so a step of
//! the wall clock does not affect leases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A point in time on this machine's boot clock, in nanoseconds since the machine booted.
///
/// ```
/// use std::time::Duration;
/// use leasehold::store::Moment;
/// use leasehold::Clock;
/// let began = Clock::default().now(); // counts suspend, and cannot be set
/// let limit = began.plus(Duration::from_secs(5));
/// assert_eq!(limit.since(began), Duration::from_secs(5));
/// assert_eq!(began.since(limit), Duration::ZERO);
/// assert_eq!(limit.minus(Duration::from_secs(5)), began);
/// assert_eq!(Moment::from_nanos(began.as_nanos()), began);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// A point in time later than all others: the deadline of a hold without a lease.
    pub const NEVER: Self = Self(u64::MAX);

    /// Returns the point in time this many nanoseconds after the machine booted.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the number of nanoseconds since the machine booted.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns `self - earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the point in time that is later by `d`, or [`NEVER`](Self::NEVER) if the result is
    /// out of range.
    #[must_use]
    pub fn plus(self, d: Duration) -> Self {
        let nanos = u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// Returns the point in time that is earlier by `d`, or the time of the boot if the result is
    /// out of range.
    #[must_use]
    pub fn minus(self, d: Duration) -> Self {
        let nanos = u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanos))
    }
}

/// A clock. The default reads the machine's clock. A test can advance a [stepped](Clock::stepped)
/// one, as if the machine had been suspended.
///
/// ```
/// use std::time::Duration;
/// let clock = leasehold::Clock::stepped();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(60)); // as if the machine had been suspended
/// assert!(clock.now().since(before) >= Duration::from_secs(60));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Clock {
    source: Source,
}

#[derive(Clone, Debug, Default)]
enum Source {
    #[default]
    Machine,
    Stepped(Arc<AtomicU64>),
    /// The runtime's time since `began`. A second of it lasts `second` microseconds on this clock.
    #[cfg(feature = "simulation")]
    Simulated {
        began: tokio::time::Instant,
        second: u32,
        /// Wall-clock time at `began`, in microseconds since 1970.
        wall: u64,
    },
}

impl Clock {
    /// Creates a clock that [`advance`](Self::advance) moves.
    pub fn stepped() -> Self {
        Self { source: Source::Stepped(Arc::default()) }
    }

    /// Creates the clock of a simulated process, inside a runtime whose time is paused.
    ///
    /// It starts at 1,000 s and is too fast by `fast` parts per million. Its wall clock is ahead by
    /// `ahead` microseconds.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn simulated(fast: i32, ahead: i64) -> Self {
        let second = 1_000_000_u32.saturating_add_signed(fast);
        let wall = 1_700_000_000_000_000_u64.saturating_add_signed(ahead);
        Self { source: Source::Simulated { began: tokio::time::Instant::now(), second, wall } }
    }

    /// Advances a stepped clock and all its clones. It has no effect on the machine's clock.
    pub fn advance(&self, by: Duration) {
        if let Source::Stepped(step) = &self.source {
            let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
            step.fetch_add(by, Ordering::SeqCst);
        }
    }

    /// Returns the current time.
    pub fn now(&self) -> Moment {
        match &self.source {
            Source::Machine => Moment(boottime()),
            Source::Stepped(step) => Moment(boottime().saturating_add(step.load(Ordering::SeqCst))),
            #[cfg(feature = "simulation")]
            Source::Simulated { began, second, .. } => {
                let passed = began.elapsed().as_nanos() * u128::from(*second) / 1_000_000;
                Moment(1_000_000_000_000 + u64::try_from(passed).unwrap_or(u64::MAX / 2))
            }
        }
    }

    /// Returns the microseconds since 1970 by the wall clock, from which stores derive tokens.
    /// Never use it for leases.
    #[doc(hidden)]
    pub fn wall_micros(&self) -> u64 {
        match &self.source {
            #[cfg(feature = "simulation")]
            Source::Simulated { wall, .. } => wall + self.now().as_nanos() / 1_000,
            _ => wall_micros(),
        }
    }
}

fn boottime() -> u64 {
    let t = clock_gettime(ClockId::Boottime);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Returns the microseconds since 1970 by the wall clock, from which tokens are derived. Never use
/// it for leases.
pub fn wall_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // S10
    #[test]
    fn suspend_is_counted() {
        // The reading of our clock must be between two readings of the clock that counts suspend.
        let boot = || {
            let t = clock_gettime(ClockId::Boottime);
            u64::try_from(t.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap()
        };
        let (before, ours, after) = (boot(), Clock::default().now().as_nanos(), boot());
        assert!(before <= ours && ours <= after);

        let clock = Clock::stepped();
        let start = clock.now();
        clock.clone().advance(Duration::from_secs(3600));
        assert!(clock.now().since(start) >= Duration::from_secs(3600));
    }

    /// Environment variable of the child process, with the seconds by which its boot clock is
    /// ahead.
    const SLEPT: &str = "LEASEHOLD_TEST_SLEPT";

    // S10
    /// On a machine that was never suspended, the two clocks show the same time. So this test also
    /// runs in a time namespace in which only the boot clock is ahead. Creating one requires
    /// CAP_SYS_ADMIN.
    #[test]
    fn clock_advances_while_the_machine_is_suspended() {
        let monotonic = || {
            let t = clock_gettime(ClockId::Monotonic);
            Duration::new(t.tv_sec.try_into().unwrap(), t.tv_nsec.try_into().unwrap())
        };
        if let Ok(slept) = std::env::var(SLEPT) {
            let slept = Duration::from_secs(slept.parse().unwrap());
            let before = monotonic();
            let ours = Duration::from_nanos(Clock::default().now().as_nanos());
            assert!(
                ours >= before + slept,
                "the clock shows {ours:?} after {slept:?} of sleep and {before:?}"
            );
            return;
        }
        let slept = ["unshare", "--time", "--boottime", "1000000", "--fork"];
        let run = |command: &[&str]| {
            let mut process = std::process::Command::new(slept[0]);
            process.args(&slept[1..]).args(command).env(SLEPT, slept[3]).output()
        };
        if !run(&["true"]).is_ok_and(|output| output.status.success()) {
            assert!(std::env::var_os("CI").is_none(), "cannot create a time namespace");
            println!("skipped: cannot create a time namespace");
            return;
        }
        let ourselves = std::env::current_exe().unwrap();
        let name = module_path!().split_once("::").unwrap().1;
        let name = format!("{name}::clock_advances_while_the_machine_is_suspended");
        let output = run(&[ourselves.to_str().unwrap(), "--exact", &name]).unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    }

    #[test]
    fn moments_never_wrap() {
        assert_eq!(Moment::NEVER.plus(Duration::MAX), Moment::NEVER);
        assert_eq!(Moment::from_nanos(1).minus(Duration::MAX), Moment::from_nanos(0));
        assert_eq!(Moment::from_nanos(1).since(Moment::NEVER), Duration::ZERO);
    }
}
