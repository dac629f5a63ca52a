//! Tracks this client's `leave` requests in progress, so that a slow request is not sent
//! repeatedly.
//!
//! A caller waits for the reply to a request for a third of the lease. It then sends the request
//! again, because the reply may have been lost. A slow server would receive each request several
//! times, and each of them would wait for the lock's row. The more requests there are, the longer
//! this takes, and nothing else gets through. So a request that is repeated soon only waits for the
//! reply to the earlier one. After [a while](SLOW), it is sent again, on a connection that is known
//! to work. If the earlier request has not been sent by then, it is not sent any more.
//!
//! A request contains no times, so the reply to the first one is correct for its repetitions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::watch;

use super::limits::SLOW;
use leasehold_core::ClaimId;
use leasehold_core::kit::locked;

type Answer = Option<bool>;

/// The `leave` requests in progress, by claim.
#[derive(Debug, Default)]
pub(super) struct InFlightLeaves(Mutex<HashMap<ClaimId, InFlightLeave>>);

#[derive(Debug)]
struct InFlightLeave {
    since: Instant,
    answer: watch::Sender<Answer>,
}

/// The next step for a caller that requests a `leave`.
pub(super) enum Leave {
    /// No other request for the claim is in progress, so the caller sends it.
    First(FirstLeave),
    /// Another call is sending the same request, so the caller waits for the reply. The channel
    /// closes if that call fails.
    Again(watch::Receiver<Answer>),
}

/// The `leave` request that is sent on behalf of all callers. Dropping this value removes its
/// entry.
pub(super) struct FirstLeave {
    leaves: Arc<InFlightLeaves>,
    id: ClaimId,
    answer: watch::Sender<Answer>,
}

impl InFlightLeaves {
    pub(super) fn begin(self: &Arc<Self>, id: ClaimId) -> Leave {
        let mut all = locked(&self.0);
        if let Some(before) = all.get(&id).filter(|before| before.since.elapsed() < SLOW) {
            return Leave::Again(before.answer.subscribe());
        }
        let answer = watch::Sender::new(None);
        all.insert(id, InFlightLeave { since: Instant::now(), answer: answer.clone() });
        Leave::First(FirstLeave { leaves: self.clone(), id, answer })
    }

    /// Forgets the request of a claim that joins again. The old reply would not apply to the new
    /// join.
    pub(super) fn forget(&self, id: ClaimId) {
        locked(&self.0).remove(&id);
    }
}

impl FirstLeave {
    /// Returns whether another request has replaced this one, because this one took too long.
    pub(super) fn is_overtaken(&self) -> bool {
        locked(&self.leaves.0)
            .get(&self.id)
            .is_none_or(|now| !now.answer.same_channel(&self.answer))
    }

    pub(super) fn answered(&self, left: bool) {
        self.answer.send_replace(Some(left));
    }
}

impl Drop for FirstLeave {
    fn drop(&mut self) {
        let mut all = locked(&self.leaves.0);
        if all.get(&self.id).is_some_and(|now| now.answer.same_channel(&self.answer)) {
            all.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another transaction keeps the lock's row locked while several `leave` requests wait for the
    /// row.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    async fn a_leave_that_is_only_slow_is_sent_once(url: &str) {
        use super::super::SqlStore;
        use super::super::wire::Arg;
        use leasehold_core::store::{Mode, Store};
        use leasehold_core::{Claim, Kind, Name};
        use std::time::Duration;

        let here = tokio::runtime::Handle::current();
        let store = SqlStore::open(url, &here).await.unwrap();
        let name = Name::new("slow").unwrap();
        let held = Claim::new(name.clone(), Kind::Mutex, 1, 1).unwrap();
        store.join(&held, Mode::Try).await.unwrap();
        let other = SqlStore::open(url, &here).await.unwrap();
        let mut section = other.shared.pool.take().await.unwrap();
        section.wire.raw(other.shared.sql.begin).await.unwrap();
        let row = vec![Arg::Name(name.as_str().into())];
        section.wire.rows(&other.shared.sql.lock, row).await.unwrap();
        let free = store.shared.pool.free();
        for _ in 0..5 {
            let left = tokio::time::timeout(Duration::from_millis(100), store.leave(&held, None));
            assert!(left.await.is_err());
        }
        assert_eq!(store.shared.pool.free(), free - 1, "expected one connection in use");
        let commits = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            section.wire.raw("COMMIT").await.unwrap();
        };
        let (left, ()) = tokio::join!(store.leave(&held, None), commits);
        assert!(left.unwrap());
        assert!(store.read(&name).await.unwrap().is_none(), "the released lock still exists");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn slow_release_is_sent_once_to_postgres() {
        a_leave_that_is_only_slow_is_sent_once(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn slow_release_is_sent_once_to_mariadb() {
        a_leave_that_is_only_slow_is_sent_once(&testbed::mariadb().database()).await;
    }

    fn first(leaves: &Arc<InFlightLeaves>, id: ClaimId) -> FirstLeave {
        match leaves.begin(id) {
            Leave::First(first) => first,
            Leave::Again(_) => panic!("a release is already in progress"),
        }
    }

    #[tokio::test]
    async fn repeated_release_gets_the_result_of_the_first() {
        let (leaves, id) = (Arc::<InFlightLeaves>::default(), ClaimId::random().unwrap());
        let sent = first(&leaves, id);
        let _of_another = first(&leaves, ClaimId::random().unwrap());
        let (Leave::Again(mut again), Leave::Again(mut late)) =
            (leaves.begin(id), leaves.begin(id))
        else {
            panic!("the release was sent twice");
        };
        sent.answered(true);
        assert_eq!(*again.wait_for(Option::is_some).await.unwrap(), Some(true));
        drop(sent);
        assert_eq!(
            *late.wait_for(Option::is_some).await.unwrap(),
            Some(true),
            "a late caller must get the result"
        );
        let abandoned = first(&leaves, id);
        let Leave::Again(mut again) = leaves.begin(id) else {
            panic!("the release was sent twice")
        };
        drop(abandoned);
        assert!(
            again.wait_for(Option::is_some).await.is_err(),
            "an abandoned release must have no result"
        );
        drop(first(&leaves, id));
    }

    #[test]
    fn release_after_a_new_join_is_a_new_release() {
        let (leaves, id) = (Arc::<InFlightLeaves>::default(), ClaimId::random().unwrap());
        let before = first(&leaves, id);
        leaves.forget(id);
        let after = first(&leaves, id);
        assert!(before.is_overtaken() && !after.is_overtaken());
    }

    #[test]
    fn slow_release_is_superseded_by_a_new_one() {
        let (leaves, id) = (Arc::<InFlightLeaves>::default(), ClaimId::random().unwrap());
        let slow = first(&leaves, id);
        assert!(!slow.is_overtaken());
        if let Some(now) = locked(&leaves.0).get_mut(&id) {
            now.since -= SLOW;
        }
        let second = first(&leaves, id);
        assert!(slow.is_overtaken() && !second.is_overtaken());
        drop(slow);
        assert!(
            matches!(leaves.begin(id), Leave::Again(_)),
            "the second release is still in progress"
        );
    }
}
