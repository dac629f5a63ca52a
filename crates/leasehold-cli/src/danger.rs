//! When CMD is asked to end, and when it is ended.
//!
//! # The lock is never given away under a running CMD
//! A guard knows until when it is certain ([`remaining`](leasehold::Guard::remaining)), by a clock and a margin that no
//! store can undercut. With L the lease that is held: the one asked for, or max-hold where that is
//! shorter, or what the store granted of it (a session's end may come before, and whoever waited
//! first gets a waiter's lease, which is renewed to a whole one before CMD starts):
//!
//! | left | what happens |
//! |---|---|
//! | L/3 | the guard turns `AtRisk`: SIGTERM to CMD's group, by us |
//! | L/4 | the same, by the watchdog, if we do not run |
//! | L/8 | SIGKILL to CMD's group, by us |
//! | L/10 | the same, by the watchdog, if we do not run |
//! | 0 | the lock may be another's |
//!
//! With `--term-grace G`, SIGTERM comes G before SIGKILL, whatever the guard says of itself.
//!
//! A renewal may still come between: then nothing more is done to CMD, but it was asked to end, so
//! we exit with 74 all the same once it has. A hold that a person took away (`release --force`) is
//! lost without warning: SIGKILL at once, and only tokens help against what happened before it.
//! Where the store has no leases and there is no max-hold, `remaining` is for ever and none of this
//! applies.
//!
//! max-hold is kept here and not by the guard, whose lock would be another's at its end whatever
//! CMD does: a CMD that became another user (sudo) cannot be ended by us. That is said at once,
//! renewals go on for as long as it lives, and we exit with 74 and the reason.

use std::time::Duration;

use leasehold::State;

use crate::boottime;
use crate::watchdog::Deadlines;

/// What is to be done to CMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Danger {
    None,
    Terminate,
    Kill,
}

/// What must be left of a lease for CMD to live on. A little more than the watchdog's tenth, so
/// that it speaks up only if we do not.
pub(crate) fn kill_margin(lease: Duration) -> Duration {
    lease / 8
}

/// How much is left of a lease at the latest when CMD is killed: this long the lock is still held
/// then, for what CMD itself has set off under [another lock](nested).
pub(crate) fn after_kill(lease: Duration) -> Duration {
    lease / 10
}

/// How much is left of a lease when CMD is asked to end, where the caller said how long that may take: never
/// more than half of it, since a lease that is renewed in time has two thirds left.
fn term_margin(lease: Duration, grace: Duration) -> Duration {
    (kill_margin(lease) + grace).min(lease / 2)
}

/// The shortest lease that has room for it.
pub(crate) fn lease_for(grace: Duration) -> Duration {
    grace * 8 / 3
}

/// The table above, for a guard in this state with this much left of a lease of that length, and of
/// max-hold. `grace`: what CMD has between the two signals, where the caller said so.
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

/// When to look again at the latest, so that neither signal is late.
pub(crate) fn until_next(left: Duration, lease: Duration, grace: Option<Duration>) -> Duration {
    let margins = [Some(kill_margin(lease)), grace.map(|grace| term_margin(lease, grace))];
    let until = margins.into_iter().flatten().map(|margin| left.saturating_sub(margin));
    until.filter(|until| !until.is_zero()).min().unwrap_or_default().min(lease / 20)
}

/// What the watchdog is told.
pub(crate) fn deadlines(
    left: Duration,
    lease: Duration,
    grace: Option<Duration>,
    terminated: bool,
) -> Deadlines {
    let before_end = |margin| boottime::after(left.saturating_sub(margin));
    // A little after us.
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
    fn a_command_is_killed_in_time_before_the_end() {
        let never = Duration::MAX;
        let danger = |left| danger(State::Held, Duration::from_millis(left), never, LEASE, None);
        assert_eq!(danger(10_000), Danger::None);
        assert_eq!(danger(1251), Danger::None);
        assert_eq!(danger(1250), Danger::Kill);
        let lost = State::Lost(LostReason::Gone);
        assert_eq!(super::danger(lost, Duration::ZERO, never, LEASE, None), Danger::Kill);
        // And by max-hold on a store without leases.
        let of_hold = |left| super::danger(State::Held, never, left, LEASE, None);
        assert_eq!(of_hold(LEASE), Danger::None);
        assert_eq!(of_hold(LEASE / 3), Danger::Terminate);
        assert_eq!(of_hold(LEASE / 8), Danger::Kill);
    }

    #[test]
    fn a_command_has_the_grace_that_was_asked_for() {
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
        // More than fits is no reason to end what is renewed in time.
        let left = LEASE * 6 / 10;
        assert_eq!(danger(State::Held, left, never, LEASE, Some(LEASE)), Danger::None);
        assert!(kill_margin(lease_for(LEASE)) + LEASE <= lease_for(LEASE) / 2);
    }

    #[test]
    fn it_looks_again_in_time_for_either_signal() {
        let grace = Some(Duration::from_secs(3));
        let until = |left| until_next(Duration::from_millis(left), LEASE, grace).as_millis();
        assert_eq!([9000, 4300, 4250, 4200, 1300].map(until), [500, 50, 500, 500, 50]);
    }

    #[test]
    fn without_leases_the_watchdog_has_no_deadline() {
        assert_eq!(deadlines(Duration::MAX, LEASE, None, false), Deadlines::default());
    }

    #[test]
    fn the_watchdog_terminates_after_us_and_kills_before_the_end() {
        let now = boottime::now();
        let told = deadlines(LEASE, LEASE, None, false);
        // They count from some moment of the call.
        let took = boottime::now() - now;
        let (term, kill) = (told.term.unwrap() - now, told.kill.unwrap() - now);
        assert!((7_500_000_000..=7_500_000_000 + took).contains(&term), "{term} in {took}");
        assert!((9_000_000_000..=9_000_000_000 + took).contains(&kill), "{kill} in {took}");
        assert_eq!(deadlines(LEASE, LEASE, None, true).term, None);
        // However little is left, TERM comes no earlier than half of it from now.
        let (now, told) = (boottime::now(), deadlines(LEASE / 5, LEASE, None, false));
        assert!(told.term.unwrap() - now >= 1_000_000_000);
    }
}
