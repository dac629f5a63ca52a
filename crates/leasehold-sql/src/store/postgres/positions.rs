//! Decides when a client of PostgreSQL listens for notifications, and when it polls instead.
//!
//! Up to PostgreSQL 18, a NOTIFY wakes every listening session of the database, regardless of the
//! channel. Each of these sessions runs a transaction. If all waiting clients listened, a hand-over
//! would cost one transaction for each waiting client. So a client listens only while one of its
//! claims is near the front of a queue. All other clients poll their positions, and listen as soon
//! as they are near. A hand-over then costs at most [`JOINED_NEAR`] such transactions, and a claim
//! that joins at position *n* costs about log₂ *n* polls in all.
//!
//! **No grant is missed.** A client first listens and then polls. The poll finds a grant that was
//! committed before, and a later one is notified. A client that does not listen finds its grant by
//! its next poll or heartbeat. A client that stops listening has just learned that all its claims
//! are far from the front. If a position is not known because the reply to the join was lost, it is
//! polled.
//!
//! **When does a client poll?** When its claim is expected to be halfway to the front, by the pace
//! since the last poll. So a claim is polled about log₂ *n* times, however fast the queue moves.
//! While the queue does not move, the pauses double up to [`longest`], in proportion to the
//! position. The rate of all polls of a queue of *n* clients grows with log *n*. Heartbeats report
//! positions too and postpone the next poll, so claims that are far back cost no polls. A poll is
//! one statement for all claims of a client.
//!
//! **What does it cost in time?** A queue can suddenly move faster. All claims near the front may
//! leave together, or a long hold may be followed by more than [`JOINED_NEAR`] short ones. The lock
//! then stays unused until the client of the granted claim polls. If the queue was at rest, this
//! takes at most the pause that [`longest`] returns for its position. Otherwise it takes at most
//! until its next heartbeat.
//!
//! **Clients do not flap.** A position only decreases. A claim that joins near the front stays
//! near, and one that joins far from it becomes near once. So a client starts and stops listening
//! at most once for each claim.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use leasehold_core::kit::locked;
use leasehold_core::{Claim, ClaimId, Name};

/// A claim is near the front if it is granted after at most this many hand-overs.
const NEAR: usize = 8;
/// A claim that joins is near the front from the start if it will be granted after at most this
/// many hand-overs.
const JOINED_NEAR: usize = 16;

/// The assumed time per position of a queue whose pace is not known yet.
const PACE: Duration = Duration::from_millis(1);
/// The shortest pause between two polls.
const SHORTEST: Duration = Duration::from_millis(1);
/// The part of the longest pause that is added by each claim ahead.
const LONGEST_EACH: Duration = Duration::from_millis(20);
/// The longest pause of all. Heartbeats come sooner.
const LONGEST: Duration = Duration::from_secs(5);

/// The positions of a client's waiting claims.
#[derive(Debug, Default)]
pub(in crate::store) struct Positions {
    all: Mutex<HashMap<ClaimId, Position>>,
    changed: Notify,
}

/// The action that the waiting claims need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) enum Need {
    /// No claim waits.
    Nothing,
    /// A claim is near the front.
    Listen,
    /// All claims are far from the front. The next poll is due at this time.
    PollAt(Instant),
}

#[derive(Debug)]
struct Position {
    name: Name,
    /// The number of claims like this one that can hold at the same time.
    slots: usize,
    ahead: Option<usize>,
    /// The claim is near the front if it is granted after at most this many hand-overs.
    near: usize,
    at: Instant,
    pause: Duration,
}

impl Positions {
    /// Adds a claim that is about to join. Call it after the claim was added to the waiters.
    pub(in crate::store) fn add(&self, claim: &Claim) {
        let slots = (claim.capacity / claim.weight.max(1)).max(1);
        let position = || Position {
            name: claim.name.clone(),
            slots: usize::try_from(slots).unwrap_or(usize::MAX),
            ahead: None,
            near: NEAR,
            at: Instant::now(),
            pause: PACE * 4,
        };
        locked(&self.all).entry(claim.id).or_insert_with(position);
        self.changed.notify_one();
    }

    /// Notes how many claims are ahead of this one.
    pub(in crate::store) fn note(&self, id: ClaimId, ahead: usize) {
        if let Some(position) = locked(&self.all).get_mut(&id) {
            position.note(ahead, Instant::now());
            self.changed.notify_one();
        }
    }

    /// Notes the answer to a poll: the positions of the first few claims of each lock. This
    /// client's other claims on that lock are further back.
    pub(in crate::store) fn polled(&self, found: &[(ClaimId, usize)]) {
        let (found, now): (HashMap<_, _>, _) = (found.iter().copied().collect(), Instant::now());
        let mut all = locked(&self.all);
        let mut last: HashMap<Name, usize> = HashMap::new();
        for (id, ahead) in &found {
            if let Some(position) = all.get(id) {
                let last = last.entry(position.name.clone()).or_default();
                *last = (*last).max(*ahead);
            }
        }
        for (id, position) in all.iter_mut() {
            let behind = last.get(&position.name).map(|last| last.saturating_add(1));
            match found.get(id).copied().or(behind) {
                Some(ahead) => position.note(ahead, now),
                None => position.not_found(now),
            }
        }
    }

    /// Returns what the claims that still wait need, and forgets the others. A client that
    /// `listens` continues to listen until it knows that all its claims are far from the front.
    pub(in crate::store) fn need(&self, listens: bool, waits: impl Fn(ClaimId) -> bool) -> Need {
        let mut all = locked(&self.all);
        all.retain(|id, _| waits(*id));
        if all.values().any(|position| position.is_near().unwrap_or(listens)) {
            return Need::Listen;
        }
        let due = all.values().map(|position| position.at + position.pause).min();
        due.map_or(Need::Nothing, Need::PollAt)
    }

    /// Waits until a claim was added or a position was noted since the last call.
    pub(in crate::store) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Position {
    fn note(&mut self, ahead: usize, now: Instant) {
        let left = ahead.saturating_sub(self.slots - 1).saturating_sub(NEAR / 2);
        let halfway = |pace: Duration| pace * u32::try_from(left).unwrap_or(u32::MAX) / 2;
        let pause = match self.ahead.map(|before| before.checked_sub(ahead)) {
            // The claim has joined, or joined again.
            None | Some(None) => {
                self.near = if self.is_within(ahead, JOINED_NEAR) { JOINED_NEAR } else { NEAR };
                halfway(PACE).min(longest(ahead))
            }
            Some(Some(0)) => self.doubled(ahead),
            Some(Some(moved)) => {
                let pace = (now - self.at) / u32::try_from(moved).unwrap_or(u32::MAX);
                halfway(pace).min(self.pause * 2)
            }
        };
        (self.ahead, self.at) = (Some(ahead), now);
        self.pause = pause.clamp(SHORTEST, LONGEST);
    }

    /// Doubles the pause after a poll that failed or did not find the claim.
    fn not_found(&mut self, now: Instant) {
        (self.at, self.pause) = (now, self.doubled(self.ahead.unwrap_or(NEAR)));
    }

    fn doubled(&self, ahead: usize) -> Duration {
        (self.pause * 2).min(longest(ahead).max(self.pause))
    }

    /// Returns whether the claim is near the front, or `None` if its position is not known.
    fn is_near(&self) -> Option<bool> {
        self.ahead.map(|ahead| self.is_within(ahead, self.near))
    }

    /// Returns whether the claim is granted after at most `near` hand-overs. The first `slots`
    /// claims hold the lock at the same time and need no hand-over.
    fn is_within(&self, ahead: usize, near: usize) -> bool {
        ahead < near.saturating_add(self.slots)
    }
}

/// Returns the longest pause between two polls of a claim whose position does not change.
fn longest(ahead: usize) -> Duration {
    LONGEST.min(LONGEST_EACH * u32::try_from(ahead.max(1)).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::Kind;

    fn claim(kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new("queue").unwrap(), kind, weight, capacity).unwrap()
    }

    fn mutex() -> Claim {
        claim(Kind::Mutex, 1, 1)
    }

    fn all(positions: &Positions, listens: bool) -> Need {
        positions.need(listens, |_| true)
    }

    fn joined(claim: &Claim, ahead: usize) -> Positions {
        let positions = Positions::default();
        positions.add(claim);
        positions.note(claim.id, ahead);
        positions
    }

    fn pause(positions: &Positions, id: ClaimId) -> Duration {
        locked(&positions.all)[&id].pause
    }

    /// Simulates a claim in a queue that moves at `pace`. Returns how many polls it took until the
    /// claim was near the head, and how many claims were ahead of it then.
    fn polls(from: usize, pace: Duration) -> (usize, usize) {
        let claim = mutex();
        let positions = joined(&claim, from);
        let (mut polls, mut waited, began) = (0, Duration::ZERO, Instant::now());
        let mut all = locked(&positions.all);
        let position = all.get_mut(&claim.id).unwrap();
        position.at = began;
        while position.is_near() != Some(true) {
            waited += position.pause;
            let moved = waited.as_micros() / pace.as_micros();
            position.note(from.saturating_sub(moved as usize), began + waited);
            polls += 1;
        }
        (polls, position.ahead.unwrap())
    }

    #[test]
    fn only_a_claim_near_the_front_listens() {
        for ahead in 1..=JOINED_NEAR {
            assert_eq!(all(&joined(&mutex(), ahead), false), Need::Listen, "{ahead}");
        }
        let far = mutex();
        let positions = joined(&far, JOINED_NEAR + 1);
        assert!(matches!(all(&positions, true), Need::PollAt(_)));
        // This claim joined far from the front, so its limit is lower than that of a claim that
        // joined near the front.
        positions.note(far.id, NEAR + 1);
        assert!(matches!(all(&positions, true), Need::PollAt(_)));
        positions.note(far.id, NEAR);
        assert_eq!(all(&positions, false), Need::Listen);
        assert_eq!(positions.need(false, |_| false), Need::Nothing);
        assert_eq!(all(&positions, false), Need::Nothing, "a claim that left must be forgotten");
    }

    #[test]
    fn one_claim_near_the_front_is_enough_to_listen() {
        let (far, near) = (mutex(), mutex());
        let positions = joined(&far, 500);
        positions.add(&near);
        positions.note(near.id, 1);
        assert_eq!(all(&positions, false), Need::Listen);
        assert!(matches!(positions.need(true, |id| id == far.id), Need::PollAt(_)));
    }

    #[test]
    fn unknown_position_neither_starts_nor_stops_listening() {
        let positions = Positions::default();
        positions.add(&mutex());
        assert!(matches!(all(&positions, false), Need::PollAt(_)));
        assert_eq!(all(&positions, true), Need::Listen);
    }

    #[test]
    fn claims_that_can_share_the_lock_all_count_as_near() {
        let reader = claim(Kind::RwLock, 1, 1_000);
        assert_eq!(all(&joined(&reader, 500), false), Need::Listen);
        let permit = claim(Kind::Semaphore, 1, 10);
        assert_eq!(all(&joined(&permit, 25), false), Need::Listen);
        assert!(matches!(all(&joined(&permit, 26), false), Need::PollAt(_)));
    }

    #[test]
    fn positions_behind_polled_claims_are_never_overestimated() {
        let claims = [mutex(), mutex(), mutex()];
        let positions = joined(&claims[0], 100);
        for (claim, ahead) in claims[1..].iter().zip([200, 300]) {
            positions.add(claim);
            positions.note(claim.id, ahead);
        }
        positions.polled(&[(claims[0].id, 2)]);
        let ahead = |claim: &Claim| locked(&positions.all)[&claim.id].ahead;
        assert_eq!(claims.each_ref().map(ahead), [Some(2), Some(3), Some(3)]);
        // The first was granted: the others may be next.
        assert_eq!(positions.need(true, |id| id != claims[0].id), Need::Listen);
    }

    #[test]
    fn polls_until_near_grow_with_the_logarithm_of_the_queue() {
        for from in [17, 32, 200, 1_000] {
            for pace in [1, 2, 5, 50] {
                let (polls, ahead) = polls(from, Duration::from_millis(pace));
                let most = 2 * (from.ilog2() as usize) + 8;
                assert!(polls <= most, "{polls} polls from {from} at {pace} ms each");
                assert!(
                    ahead > 0,
                    "{from} at {pace} ms: the claim was granted before the waiter listened"
                );
            }
        }
    }

    #[test]
    fn poll_rate_of_an_idle_queue_is_bounded() {
        let rate = |clients: usize| -> f64 {
            let pause = |ahead| {
                let claim = mutex();
                let positions = joined(&claim, ahead);
                (0..20).for_each(|_| positions.note(claim.id, ahead));
                assert_eq!(pause(&positions, claim.id), longest(ahead));
                1.0 / longest(ahead).as_secs_f64()
            };
            (JOINED_NEAR + 1..clients).map(pause).sum()
        };
        assert!(rate(32) < 40.0 && rate(200) < 140.0, "{} {}", rate(32), rate(200));
    }

    #[test]
    fn failed_polls_are_repeated_with_growing_pauses() {
        let claim = mutex();
        let positions = joined(&claim, 100);
        let before = pause(&positions, claim.id);
        positions.polled(&[]);
        assert_eq!(pause(&positions, claim.id), before * 2);
        (0..20).for_each(|_| positions.polled(&[]));
        assert_eq!(pause(&positions, claim.id), longest(100));
    }
}
