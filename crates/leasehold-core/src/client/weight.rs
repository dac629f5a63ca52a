//! The weight of a hold: a writer can become a reader, and a single reader can become a writer.
//!
//! # The argument
//! The holder must never assume a larger weight than the store has. A larger weight in the store
//! only delays waiters, and ends with the hold.
//! - *Decreasing.* The holder assumes the lower weight before the request is sent. Whether the
//!   store applies the request soon, late or never, the store's weight is never lower than the one
//!   that the holder assumes.
//! - *Increasing.* The holder assumes the higher weight only after the result. A late request to
//!   decrease the weight could make that assumption wrong. So a hold is never increased after a
//!   decrease was requested, and no such request can be in flight.
//! - *A lost reply.* The client repeats the request, and the store finds that it is done.
//! - *A dropped future.* The holder counts as a reader. The store may still treat it as a writer
//!   until the request is repeated or the lock is released.

use std::sync::Mutex;

use crate::util::locked::locked;

/// The weight that the holder may assume.
#[derive(Debug)]
pub(crate) struct Weight(Mutex<Weighing>);

#[derive(Clone, Copy, Debug)]
struct Weighing {
    now: u32,
    /// Whether a decrease was ever requested.
    lightened: bool,
    /// Whether an increase was ever requested.
    asked_more: bool,
}

impl Weight {
    pub(crate) fn new(now: u32) -> Self {
        Self(Mutex::new(Weighing { now, lightened: false, asked_more: false }))
    }

    pub(crate) fn now(&self) -> u32 {
        locked(&self.0).now
    }

    /// Decreases the weight to at most `to`. Returns whether a request to the store is necessary.
    pub(crate) fn lighten(&self, to: u32) -> bool {
        let mut weighing = locked(&self.0);
        if weighing.now <= to && !weighing.asked_more && !weighing.lightened {
            return false;
        }
        weighing.now = weighing.now.min(to);
        weighing.lightened = true;
        true
    }

    /// Records that an increase is being requested. Returns `false` if the hold was ever
    /// downgraded.
    pub(crate) fn ask_more(&self) -> bool {
        let mut weighing = locked(&self.0);
        weighing.asked_more |= !weighing.lightened;
        !weighing.lightened
    }

    /// Applies a weight that the store has confirmed. Returns whether the holder may assume it.
    pub(crate) fn answered(&self, more: u32) -> bool {
        let mut weighing = locked(&self.0);
        if !weighing.lightened {
            weighing.now = weighing.now.max(more);
        }
        !weighing.lightened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downgrade_request_is_sent_only_by_a_possible_writer() {
        let reader = Weight::new(1);
        assert!(!reader.lighten(1));
        assert!(reader.ask_more());
        assert!(reader.lighten(1), "the store may still list it as a writer");
        let writer = Weight::new(8);
        assert!(writer.lighten(1) && writer.lighten(1), "the first request may have been lost");
        assert_eq!(writer.now(), 1);
    }

    #[test]
    fn late_upgrade_reply_does_not_undo_a_downgrade() {
        let weight = Weight::new(1);
        assert!(weight.ask_more() && weight.answered(8));
        assert_eq!(weight.now(), 8);
        let weight = Weight::new(1);
        assert!(weight.ask_more());
        assert!(weight.lighten(1));
        assert!(!weight.answered(8), "a late answer was accepted");
        assert!(!weight.ask_more());
        assert_eq!(weight.now(), 1);
    }
}
