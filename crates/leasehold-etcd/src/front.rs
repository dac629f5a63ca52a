//! Who stands before one who waits for a mutex near the front, kept true by events alone: no reading is
//! needed to know that it holds.
//!
//! *What is known, and since when.* One answer (of the transaction that joined, or of a reading) shows all
//! keys of the lock as of one revision: our own, and those that were created before it. Whoever comes
//! later is behind us, so from there on a key before us can only be deleted. [`Departures`] are all
//! deletions under the lock's name since some revision, in their order and none left out. What was
//! deleted after our revision is struck out; when nobody is left before us and our own key is not among
//! what was deleted, we hold, as of the revision of the last event. That is as much as a reading
//! from the member that sent it would have shown.
//!
//! *A key that is deleted and made again* is behind us: what is deleted of it later strikes out nobody. Our own
//! place ends with the first deletion of its key, whoever makes it again (scenario 80).
//!
//! *Where this is not enough, somebody reads again*: the watch began later than the answer, or was cut off, or
//! we looked so late that deletions were dropped ([`KEPT`]). Where keys lie in the range that are not places
//! of this lock (they might become such by a write), nobody begins this way.
//!
//! *Many.* Each deletion is told to each client that has somebody near the front, so no more than [`NEAR`]
//! are there. Who stands farther back watches one key, that of somebody half so far ahead, and
//! comes near when that one leaves, long before its turn.

use std::collections::VecDeque;

/// Before one who is near the front stand no more than these.
pub(super) const NEAR: usize = 16;
/// How many deletions are remembered for those who come later, or look late.
const KEPT: usize = 256;

/// What was deleted under a lock's name, in the order of revisions.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// Nothing is left out that was deleted after this revision.
    since: i64,
    gone: VecDeque<(i64, Vec<u8>)>,
}

/// All who stand before a waiter, and its own place, as of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Front {
    own: Vec<u8>,
    ahead: Vec<Vec<u8>>,
    revision: i64,
}

/// What the departures of others decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decided {
    /// Nobody is before us.
    First,
    /// Our own place has ended.
    Gone,
    /// Something may have been left out.
    Unknown,
}

impl Departures {
    /// What follows is told from after this revision.
    pub(super) fn begin(&mut self, revision: i64) {
        self.since = self.since.max(revision);
    }

    pub(super) fn note(&mut self, revision: i64, key: Vec<u8>) {
        self.gone.push_back((revision, key));
        if self.gone.len() > KEPT
            && let Some((revision, _)) = self.gone.pop_front()
        {
            self.since = self.since.max(revision);
        }
    }
}

impl Front {
    /// `ahead` and `own` were all that there was at this revision, down to our own key.
    pub(super) fn new(own: Vec<u8>, ahead: Vec<Vec<u8>>, revision: i64) -> Self {
        Self { own, ahead, revision }
    }

    /// Strikes out who has left since; what that decides.
    pub(super) fn take_in(&mut self, departures: &Departures) -> Option<Decided> {
        if departures.since > self.revision {
            return Some(Decided::Unknown);
        }
        let known = departures.gone.partition_point(|(revision, _)| *revision <= self.revision);
        for (revision, key) in departures.gone.range(known..) {
            if *key == self.own {
                return Some(Decided::Gone);
            }
            self.ahead.retain(|ahead| ahead != key);
            self.revision = *revision;
        }
        self.ahead.is_empty().then_some(Decided::First)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(ahead: &[&str], revision: i64) -> Front {
        let ahead = ahead.iter().map(|key| key.as_bytes().to_vec()).collect();
        Front::new(b"own".to_vec(), ahead, revision)
    }

    fn departures(since: i64, gone: &[(i64, &str)]) -> Departures {
        let mut departures = Departures::default();
        departures.begin(since);
        for (revision, key) in gone {
            departures.note(*revision, key.as_bytes().to_vec());
        }
        departures
    }

    #[test]
    fn the_last_that_leaves_lets_us_in() {
        let mut front = front(&["a", "b"], 10);
        assert_eq!(front.take_in(&departures(10, &[])), None);
        // Who gave up before the one before it did.
        assert_eq!(front.take_in(&departures(10, &[(11, "b")])), None);
        let both = departures(10, &[(11, "b"), (12, "behind us"), (13, "a")]);
        assert_eq!(front.take_in(&both), Some(Decided::First));
    }

    #[test]
    fn what_was_deleted_before_the_answer_says_nothing() {
        // "a" left and joined again, and stands before us.
        let mut front = front(&["a"], 10);
        assert_eq!(front.take_in(&departures(3, &[(4, "a"), (9, "own"), (10, "a")])), None);
        assert_eq!(front.take_in(&departures(3, &[(10, "a"), (11, "a")])), Some(Decided::First));
    }

    #[test]
    fn s80_who_lost_its_own_place_is_not_let_in() {
        let gone = [(11, "own"), (12, "a")];
        assert_eq!(front(&["a"], 10).take_in(&departures(10, &gone)), Some(Decided::Gone));
        let gone = [(11, "a"), (11, "own")];
        assert_eq!(front(&["a"], 10).take_in(&departures(10, &gone)), Some(Decided::Gone));
    }

    #[test]
    fn what_may_have_been_left_out_is_unknown() {
        assert_eq!(front(&["a"], 10).take_in(&departures(11, &[])), Some(Decided::Unknown));
        let many = (0..).take(KEPT + 1).map(|n| (11 + n, "x"));
        let many: Vec<_> = many.collect();
        assert_eq!(front(&["a"], 10).take_in(&departures(5, &many)), Some(Decided::Unknown));
        assert_eq!(front(&["a"], 11).take_in(&departures(5, &many)), None);
    }
}
