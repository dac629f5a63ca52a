//! Tracks the claims ahead of a mutex waiter near the front of the queue, by events alone. The
//! client needs no read to find out that the waiter has become the holder.
//!
//! **What is known.** One reply (of the transaction that joined, or of a read) shows all keys of
//! the lock as of one revision. These are the client's own key and those that were created before
//! it. Keys that are created later come after it. From there on, a key ahead can only be deleted.
//! [`DeletionLog`] contains all deletions under the lock's name since some revision, in order and
//! without gaps. A key that was deleted after the reply's revision is removed from the list of keys
//! ahead. If the list is empty and the client's own key was not deleted, the claim is the holder as
//! of the revision of the last event. A read from the member that sent the event would have shown
//! the same.
//!
//! **A key that is deleted and created again** comes after the client's own key, so later deletions
//! of it change nothing. The client's own position ends with the first deletion of its key, even if
//! another client creates the key again (scenario 80).
//!
//! **When the events are not enough,** the client reads again. That happens if the watch began
//! later than the reply, if the watch ended, or if the client polled so late that deletions were
//! dropped ([`KEPT`]). If the range contains keys that are not entries of this lock, this method is
//! not used, because a write could turn them into entries.
//!
//! **Long queues.** Each client with a waiter near the front is notified of each deletion, so at
//! most [`NEAR`] claims count as near. A waiter farther back watches one key, that of the claim
//! halfway ahead of it. It comes near the front when that claim leaves, long before it can be
//! granted.

use std::collections::VecDeque;

/// Maximum number of claims ahead of a waiter that counts as near the front.
pub(super) const NEAR: usize = 16;
/// How many deletions are kept for watchers that begin or poll late.
const KEPT: usize = 256;

/// The deletions under a lock's name, in the order of revisions.
#[derive(Debug, Default)]
pub(super) struct DeletionLog {
    /// All deletions after this revision are included.
    since: i64,
    gone: VecDeque<(i64, Vec<u8>)>,
}

/// All keys ahead of a waiter, and its own key, as of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Predecessors {
    own: Vec<u8>,
    ahead: Vec<Vec<u8>>,
    revision: i64,
}

/// What the deletions of keys mean for a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PredecessorState {
    /// No claim is ahead.
    NoneAhead,
    /// The waiter's own key was deleted.
    OwnDeleted,
    /// Some deletions may be missing.
    Unknown,
}

impl DeletionLog {
    /// Starts the record of deletions after this revision.
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

impl Predecessors {
    /// Creates the view of a queue in which `ahead` and `own` were the only keys up to the client's
    /// own, at this revision.
    pub(super) fn new(own: Vec<u8>, ahead: Vec<Vec<u8>>, revision: i64) -> Self {
        Self { own, ahead, revision }
    }

    /// Removes the keys that have been deleted since. Returns the waiter's new state, or `None` if
    /// claims are still ahead.
    pub(super) fn apply(&mut self, deletions: &DeletionLog) -> Option<PredecessorState> {
        if deletions.since > self.revision {
            return Some(PredecessorState::Unknown);
        }
        let known = deletions.gone.partition_point(|(revision, _)| *revision <= self.revision);
        for (revision, key) in deletions.gone.range(known..) {
            if *key == self.own {
                return Some(PredecessorState::OwnDeleted);
            }
            self.ahead.retain(|ahead| ahead != key);
            self.revision = *revision;
        }
        self.ahead.is_empty().then_some(PredecessorState::NoneAhead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predecessors(ahead: &[&str], revision: i64) -> Predecessors {
        let ahead = ahead.iter().map(|key| key.as_bytes().to_vec()).collect();
        Predecessors::new(b"own".to_vec(), ahead, revision)
    }

    fn deletions(since: i64, gone: &[(i64, &str)]) -> DeletionLog {
        let mut deletions = DeletionLog::default();
        deletions.begin(since);
        for (revision, key) in gone {
            deletions.note(*revision, key.as_bytes().to_vec());
        }
        deletions
    }

    /// Applies deletions to a waiter after "a", as of revision 10.
    fn applied(since: i64, gone: &[(i64, &str)]) -> Option<PredecessorState> {
        predecessors(&["a"], 10).apply(&deletions(since, gone))
    }

    #[test]
    fn claim_is_first_when_all_claims_ahead_have_left() {
        let mut ahead = predecessors(&["a", "b"], 10);
        assert_eq!(ahead.apply(&deletions(10, &[])), None);
        // A waiter gave up before the claim ahead of it left.
        assert_eq!(ahead.apply(&deletions(10, &[(11, "b")])), None);
        let both = deletions(10, &[(11, "b"), (12, "behind us"), (13, "a")]);
        assert_eq!(ahead.apply(&both), Some(PredecessorState::NoneAhead));
    }

    #[test]
    fn departures_before_the_reply_are_ignored() {
        // "a" left and joined again, and is still ahead.
        let mut ahead = predecessors(&["a"], 10);
        assert_eq!(ahead.apply(&deletions(3, &[(4, "a"), (9, "own"), (10, "a")])), None);
        let twice = deletions(3, &[(10, "a"), (11, "a")]);
        assert_eq!(ahead.apply(&twice), Some(PredecessorState::NoneAhead));
    }

    // S80
    #[test]
    fn claim_whose_own_key_is_gone_is_not_granted() {
        let gone = [(11, "own"), (12, "a")];
        assert_eq!(applied(10, &gone), Some(PredecessorState::OwnDeleted));
        let gone = [(11, "a"), (11, "own")];
        assert_eq!(applied(10, &gone), Some(PredecessorState::OwnDeleted));
    }

    #[test]
    fn possibly_missed_departures_make_the_result_unknown() {
        assert_eq!(applied(11, &[]), Some(PredecessorState::Unknown));
        let many = (0..).take(KEPT + 1).map(|n| (11 + n, "x"));
        let many: Vec<_> = many.collect();
        assert_eq!(applied(5, &many), Some(PredecessorState::Unknown));
        assert_eq!(predecessors(&["a"], 11).apply(&deletions(5, &many)), None);
    }
}
