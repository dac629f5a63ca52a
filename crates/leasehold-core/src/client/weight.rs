//! How much a hold weighs: a writer may become a reader, and a reader that is alone a writer.
//!
//! # The argument
//! The holder must never believe in more than the store has; that the store has more is no harm but to those who
//! wait, and ends with the hold.
//! - *Lighter* is believed before the request is sent. Whether the store does it soon, late or never, it has at
//!   least as much.
//! - *Heavier* is believed as it is answered. What could make that wrong is a request to make it lighter that comes
//!   late. So a hold that was ever to become lighter is never made heavier again: no such request is
//!   under way.
//! - *A lost reply*: the same is asked again, and the store finds it done. *A dropped future*: it is a reader, and
//!   the store may have it as a writer until it is asked again or released.

use std::sync::Mutex;

use crate::base::locked::locked;

/// What a hold weighs, as its holder may believe.
#[derive(Debug)]
pub(crate) struct Weight(Mutex<Weighing>);

#[derive(Clone, Copy, Debug)]
struct Weighing {
    now: u32,
    /// It was to become lighter.
    lightened: bool,
    /// It was to become heavier.
    asked_more: bool,
}

impl Weight {
    pub(crate) fn new(now: u32) -> Self {
        Self(Mutex::new(Weighing { now, lightened: false, asked_more: false }))
    }

    pub(crate) fn now(&self) -> u32 {
        locked(&self.0).now
    }

    /// It is to weigh this much and no more from now on. Whether the store need be told.
    pub(crate) fn lighten(&self, to: u32) -> bool {
        let mut weighing = locked(&self.0);
        if weighing.now <= to && !weighing.asked_more && !weighing.lightened {
            return false;
        }
        weighing.now = weighing.now.min(to);
        weighing.lightened = true;
        true
    }

    /// It is to become heavier. Whether it still may.
    pub(crate) fn ask_more(&self) -> bool {
        let mut weighing = locked(&self.0);
        weighing.asked_more |= !weighing.lightened;
        !weighing.lightened
    }

    /// The store has it as heavy as this. Whether it may be believed.
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
    fn a_reader_is_not_told_to_be_one_and_a_writer_always_is() {
        let reader = Weight::new(1);
        assert!(!reader.lighten(1));
        assert!(reader.ask_more());
        assert!(reader.lighten(1), "the store may have it as a writer");
        let writer = Weight::new(8);
        assert!(writer.lighten(1) && writer.lighten(1), "the first time may have gone unheard");
        assert_eq!(writer.now(), 1);
    }

    #[test]
    fn what_was_to_become_lighter_is_never_heavier_again() {
        let weight = Weight::new(1);
        assert!(weight.ask_more() && weight.answered(8));
        assert_eq!(weight.now(), 8);
        let weight = Weight::new(1);
        assert!(weight.ask_more());
        assert!(weight.lighten(1));
        assert!(!weight.answered(8), "an answer from before");
        assert!(!weight.ask_more());
        assert_eq!(weight.now(), 1);
    }
}
