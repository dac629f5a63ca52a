//! When a waiter of `leasehold hold` polls the store for the holders of its lock.
//!
//! **The cost of a hand-over does not grow with the queue.** The waiter's heartbeat reports a new
//! position at no cost, and a line is printed for it. A poll for the holders costs a request, so
//! the waiter polls only
//! - once, when it has joined the queue;
//! - when its position changes and fewer than [`NEAR`] waiters are ahead, or the store reports that
//!   it is the first.
//!
//! So at most [`NEAR`] waiters poll after a hand-over, however many there are. A poll reads the
//! holders, not the waiters.
//!
//! **A poll is for people.** It decides nothing, and its failure is ignored. The number of holders
//! that it returned is used to count the waiters ahead until the next poll. If holders (readers)
//! have joined since, the waiter assumes too many waiters ahead, and polls less. It never polls
//! more.

use leasehold::store::{LockInfo, Place};

use crate::args::TakeArgs;
use crate::progress;

/// Number of waiters at the front that poll after a hand-over.
const NEAR: usize = 3;

/// What one waiter knows about the claims ahead.
pub(super) struct Polls {
    is_mutex: bool,
    has_polled: bool,
    /// Number of claims that held the lock or were in a cooldown at the last poll.
    others: usize,
}

impl Polls {
    pub(super) fn new(args: &TakeArgs) -> Self {
        let is_mutex = !args.shared && !args.exclusive && args.max.is_none();
        Self { is_mutex, has_polled: false, others: 1 }
    }

    /// Returns whether to poll at this new position.
    pub(super) fn is_due(&self, place: Place) -> bool {
        let is_first = place.head_remaining.is_some();
        !self.has_polled || is_first || place.ahead.saturating_sub(self.others) < NEAR
    }

    /// Notes that the waiter has polled, and what the store returned.
    pub(super) fn polled(&mut self, lock: Option<&LockInfo>) {
        self.has_polled = true;
        // A mutex has one holder, even if the poll came between two holders.
        self.others = lock.map_or(self.others, progress::others).max(1);
    }

    /// Returns the position among the waiters with `ahead` claims ahead, if it is known without a
    /// poll.
    pub(super) fn place(&self, ahead: usize) -> Option<usize> {
        self.is_mutex.then_some(ahead.max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::store::{ClaimInfo, ClaimState};
    use leasehold::{Holder, Kind, Name, Token};

    use super::*;

    fn polls(is_mutex: bool) -> Polls {
        Polls { is_mutex, has_polled: false, others: 1 }
    }

    fn place(ahead: usize) -> Place {
        Place { ahead, head_remaining: None, token: None }
    }

    fn held_by(holders: u64) -> LockInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: String::new() };
        let claim = |token| {
            let (token, since) = (Token::new(token), Duration::ZERO);
            ClaimInfo::new(ClaimState::Holding, holder.clone(), token, 1, since, None)
        };
        let claims = (1..=holders).map(claim).collect();
        LockInfo::new(Name::new("x").unwrap(), Kind::Semaphore, 9, claims)
    }

    #[test]
    fn a_waiter_polls_when_it_joins_and_near_the_front() {
        let mut polls = polls(true);
        assert!(polls.is_due(place(40)), "a claim that has just joined must be polled");
        polls.polled(Some(&held_by(1)));
        let polled: Vec<usize> = (1..40).filter(|ahead| polls.is_due(place(*ahead))).collect();
        assert_eq!(polled, [1, 2, 3]);
        assert_eq!(polls.place(7), Some(7));
    }

    #[test]
    fn failed_poll_is_retried_only_near_the_front() {
        let mut polls = polls(true);
        polls.polled(None);
        assert!(!polls.is_due(place(4)) && polls.is_due(place(3)));
    }

    #[test]
    fn holders_are_not_counted_as_waiters_ahead() {
        let mut polls = polls(false);
        polls.polled(Some(&held_by(5)));
        assert!(!polls.is_due(place(8)) && polls.is_due(place(7)) && polls.is_due(place(5)));
        // There are more readers than the waiter knows of.
        let first = Place { head_remaining: Some(Duration::from_secs(1)), ..place(100) };
        assert!(polls.is_due(first));
        assert_eq!(polls.place(7), None);
    }
}
