//! When CMD is terminated, and when it is killed.
//!
//! # leasehold never releases the lock while CMD runs
//! A guard knows how long the lock is certain to be held
//! ([`remaining`](leasehold::Hold::remaining)). It uses a clock and a safety margin that a store
//! cannot reduce. L is the length of the current lease:
//! - the requested lease, or max-hold if that is shorter;
//! - less if the store granted less, because a session may end earlier;
//! - less for a client that waited, because it first gets a waiter's lease, which is renewed to a
//!   full lease before CMD starts.
//!
//! | left | what happens |
//! |---|---|
//! | L/3 | the guard turns `AtRisk`: leasehold sends SIGTERM to CMD's group |
//! | L/4 | the watchdog sends SIGTERM, if leasehold does not run |
//! | L/8 | leasehold sends SIGKILL to CMD's group |
//! | L/10 | the watchdog sends SIGKILL, if leasehold does not run |
//! | 0 | another client may have the lock |
//!
//! With `--kill-after G`, SIGTERM comes G before SIGKILL, whatever the state of the guard.
//!
//! A renewal may still succeed in between. Then CMD gets no further signal. But CMD was sent
//! SIGTERM, so leasehold exits with 74 once CMD has ended. An evicted hold (`leasehold evict`) is
//! lost without warning. CMD gets SIGKILL immediately, and only tokens protect against what CMD did
//! before the signal. If the store has no leases and there is no max-hold, `remaining` is unlimited
//! and none of this applies.
//!
//! leasehold enforces max-hold here, not through the guard. At the end of a guard's max-hold the
//! lock would be free, whatever CMD does. But leasehold cannot end a CMD that runs as another user
//! (sudo). It reports that immediately, continues to renew while CMD lives, and exits with 74 and
//! the reason.

use std::time::Duration;

use leasehold::State;

use crate::boottime;
use crate::watchdog::Deadlines;

/// The signal that CMD must get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Danger {
    None,
    Terminate,
    Kill,
}

/// Returns the time before the end of a lease at which leasehold kills CMD. The watchdog kills CMD
/// a little later, with a tenth of the lease left, so it acts only if leasehold does not.
pub(crate) fn kill_margin(lease: Duration) -> Duration {
    lease / 8
}

/// Returns the minimum time that is left of a lease when CMD is killed. The lock is still held for
/// this time, so that commands below CMD that run under [another lock](nested) can be stopped.
pub(crate) fn after_kill(lease: Duration) -> Duration {
    lease / 10
}

/// Returns how much of a lease is left when CMD is terminated with a given grace period. It is at
/// most half of the lease, because a lease that is renewed in time always has two thirds left.
fn term_margin(lease: Duration, grace: Duration) -> Duration {
    (kill_margin(lease) + grace).min(lease / 2)
}

/// Returns the shortest lease that has room for this grace period.
pub(crate) fn lease_for(grace: Duration) -> Duration {
    grace * 8 / 3
}

/// Implements the table in the module documentation. The lock is in `state`, with `left` of the
/// lease and `of_hold` of max-hold left. `grace` is the time between the two signals, if the user
/// specified it.
pub(crate) fn danger(
    state: State,
    left: Duration,
    of_hold: Duration,
    lease: Duration,
    grace: Option<Duration>,
) -> Danger {
    match (state, grace) {
        (State::Lost(_), _) => Danger::Kill,
        _ if left.min(of_hold) <= kill_margin(lease) => Danger::Kill,
        (_, Some(grace)) if left.min(of_hold) <= term_margin(lease, grace) => Danger::Terminate,
        (_, Some(_)) => Danger::None,
        (State::AtRisk(_), None) => Danger::Terminate,
        _ if of_hold <= lease / 3 => Danger::Terminate,
        _ => Danger::None,
    }
}

/// Returns the time until the next check, so that neither signal is late.
pub(crate) fn until_next(left: Duration, lease: Duration, grace: Option<Duration>) -> Duration {
    let margins = [Some(kill_margin(lease)), grace.map(|grace| term_margin(lease, grace))];
    let until = margins.into_iter().flatten().map(|margin| left.saturating_sub(margin));
    until.filter(|until| !until.is_zero()).min().unwrap_or_default().min(lease / 20)
}

/// Returns the deadlines for the watchdog.
pub(crate) fn deadlines(
    left: Duration,
    lease: Duration,
    grace: Option<Duration>,
    terminated: bool,
) -> Deadlines {
    let before_end = |margin| boottime::after(left.saturating_sub(margin));
    // The watchdog acts a little later than leasehold.
    let asked = grace.map_or(lease / 4, |grace| term_margin(lease, grace) - lease / 40);
    match boottime::after(left) {
        None => Deadlines::default(),
        Some(_) => Deadlines {
            term: before_end(asked.min(left / 2)).filter(|_| !terminated),
            kill: before_end(after_kill(lease)),
        },
    }
}

#[cfg(test)]
mod tests {
    use leasehold::LostReason;

    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    #[test]
    fn command_is_killed_before_its_lease_expires() {
        let never = Duration::MAX;
        let danger = |left| danger(State::Held, Duration::from_millis(left), never, LEASE, None);
        assert_eq!(danger(10_000), Danger::None);
        assert_eq!(danger(1251), Danger::None);
        assert_eq!(danger(1250), Danger::Kill);
        let lost = State::Lost(LostReason::Gone);
        assert_eq!(super::danger(lost, Duration::ZERO, never, LEASE, None), Danger::Kill);
        // The same applies to max-hold on a store without leases.
        let of_hold = |left| super::danger(State::Held, never, left, LEASE, None);
        assert_eq!(of_hold(LEASE), Danger::None);
        assert_eq!(of_hold(LEASE / 3), Danger::Terminate);
        assert_eq!(of_hold(LEASE / 8), Danger::Kill);
    }

    #[test]
    fn command_gets_the_requested_grace_period() {
        let never = Duration::MAX;
        let grace = Some(Duration::from_secs(3));
        let at = |left| {
            let left = Duration::from_millis(left);
            let state = danger(State::Held, left, never, LEASE, grace);
            assert_eq!(state, danger(State::Held, never, left, LEASE, grace));
            state
        };
        assert_eq!([4251, 4250, 1251, 1250].map(at), {
            use Danger::{Kill, None, Terminate};
            [None, Terminate, Terminate, Kill]
        });
        // A grace period that does not fit must not end a CMD whose lease is renewed in time.
        let left = LEASE * 6 / 10;
        assert_eq!(danger(State::Held, left, never, LEASE, Some(LEASE)), Danger::None);
        assert!(kill_margin(lease_for(LEASE)) + LEASE <= lease_for(LEASE) / 2);
    }

    #[test]
    fn next_check_is_in_time_for_either_signal() {
        let grace = Some(Duration::from_secs(3));
        let until = |left| until_next(Duration::from_millis(left), LEASE, grace).as_millis();
        assert_eq!([9000, 4300, 4250, 4200, 1300].map(until), [500, 50, 500, 500, 50]);
    }

    #[test]
    fn without_leases_the_watchdog_has_no_deadline() {
        assert_eq!(deadlines(Duration::MAX, LEASE, None, false), Deadlines::default());
    }

    #[test]
    fn watchdog_terminates_after_leasehold_and_kills_before_expiry() {
        let now = boottime::now();
        let times = deadlines(LEASE, LEASE, None, false);
        // The deadlines are relative to a moment during the call.
        let took = boottime::now() - now;
        let (term, kill) = (times.term.unwrap() - now, times.kill.unwrap() - now);
        assert!((7_500_000_000..=7_500_000_000 + took).contains(&term), "{term} in {took}");
        assert!((9_000_000_000..=9_000_000_000 + took).contains(&kill), "{kill} in {took}");
        assert_eq!(deadlines(LEASE, LEASE, None, true).term, None);
        // However little is left, TERM is not sent before half of it has passed.
        let (now, times) = (boottime::now(), deadlines(LEASE / 5, LEASE, None, false));
        assert!(times.term.unwrap() - now >= 1_000_000_000);
    }
}
