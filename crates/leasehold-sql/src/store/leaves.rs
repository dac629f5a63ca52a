//! The leaves of this client that are under way, so that one which is only slow is not said again and again.
//!
//! Who leaves waits for an answer for a third of its lease, and then says it again: it may have been lost. On a
//! server that needs longer than that, each leave would come several times, and each time wait for the
//! lock's row; the more of them there are the longer that takes, and nothing else gets through. So a leave that
//! is said again soon waits for the answer to the one before. After a [while](SLOW) it is sent again, on a
//! connection that is known to lead somewhere; the one before is not sent any more if it was not yet.
//!
//! A leave says nothing of times, so an answer to the first one is right for those after it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::watch;

use super::limits::SLOW;
use leasehold_core::ClaimId;
use leasehold_core::kit::locked;

type Answer = Option<bool>;

#[derive(Debug, Default)]
pub(super) struct Leaves(Mutex<HashMap<ClaimId, UnderWay>>);

#[derive(Debug)]
struct UnderWay {
    since: Instant,
    answer: watch::Sender<Answer>,
}

/// What becomes of a leave that is asked for.
pub(super) enum Leave {
    /// It is to be sent.
    First(First),
    /// One like it is under way. Without an answer when that is given up.
    Again(watch::Receiver<Answer>),
}

/// The leave that is sent for all who ask for it. Forgotten when dropped.
pub(super) struct First {
    leaves: Arc<Leaves>,
    id: ClaimId,
    answer: watch::Sender<Answer>,
}

impl Leaves {
    pub(super) fn begin(self: &Arc<Self>, id: ClaimId) -> Leave {
        let mut all = locked(&self.0);
        if let Some(before) = all.get(&id).filter(|before| before.since.elapsed() < SLOW) {
            return Leave::Again(before.answer.subscribe());
        }
        let answer = watch::Sender::new(None);
        all.insert(id, UnderWay { since: Instant::now(), answer: answer.clone() });
        Leave::First(First { leaves: self.clone(), id, answer })
    }

    /// The claim is asked for again: what was said before says nothing of that.
    pub(super) fn forget(&self, id: ClaimId) {
        locked(&self.0).remove(&id);
    }
}

impl First {
    /// Whether another one is under way, after this one took long.
    pub(super) fn is_overtaken(&self) -> bool {
        locked(&self.leaves.0)
            .get(&self.id)
            .is_none_or(|now| !now.answer.same_channel(&self.answer))
    }

    pub(super) fn answered(&self, left: bool) {
        self.answer.send_replace(Some(left));
    }
}

impl Drop for First {
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

    /// Somebody has locked the lock's row for as long as several leaves are waited for.
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
        assert_eq!(store.shared.pool.free(), free - 1, "each was sent");
        let commits = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            section.wire.raw("COMMIT").await.unwrap();
        };
        let (left, ()) = tokio::join!(store.leave(&held, None), commits);
        assert!(left.unwrap());
        assert!(store.read(&name).await.unwrap().is_none(), "it is gone");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn a_leave_that_is_only_slow_is_sent_once_to_postgres() {
        a_leave_that_is_only_slow_is_sent_once(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn a_leave_that_is_only_slow_is_sent_once_to_mariadb() {
        a_leave_that_is_only_slow_is_sent_once(&testbed::mariadb().database()).await;
    }

    fn first(leaves: &Arc<Leaves>, id: ClaimId) -> First {
        match leaves.begin(id) {
            Leave::First(first) => first,
            Leave::Again(_) => panic!("one is under way"),
        }
    }

    #[tokio::test]
    async fn a_leave_that_is_said_again_soon_has_the_answer_of_the_first() {
        let (leaves, id) = (Arc::<Leaves>::default(), ClaimId::random().unwrap());
        let sent = first(&leaves, id);
        let _of_another = first(&leaves, ClaimId::random().unwrap());
        let (Leave::Again(mut again), Leave::Again(mut late)) =
            (leaves.begin(id), leaves.begin(id))
        else {
            panic!("sent twice");
        };
        sent.answered(true);
        assert_eq!(*again.wait_for(Option::is_some).await.unwrap(), Some(true));
        drop(sent);
        assert_eq!(
            *late.wait_for(Option::is_some).await.unwrap(),
            Some(true),
            "it comes too late to hear it"
        );
        let unheard = first(&leaves, id);
        let Leave::Again(mut again) = leaves.begin(id) else { panic!("sent twice") };
        drop(unheard);
        assert!(
            again.wait_for(Option::is_some).await.is_err(),
            "of what was given up nothing comes"
        );
        drop(first(&leaves, id));
    }

    #[test]
    fn who_joins_again_leaves_again() {
        let (leaves, id) = (Arc::<Leaves>::default(), ClaimId::random().unwrap());
        let before = first(&leaves, id);
        leaves.forget(id);
        let after = first(&leaves, id);
        assert!(before.is_overtaken() && !after.is_overtaken());
    }

    #[test]
    fn one_that_takes_long_is_overtaken() {
        let (leaves, id) = (Arc::<Leaves>::default(), ClaimId::random().unwrap());
        let slow = first(&leaves, id);
        assert!(!slow.is_overtaken());
        if let Some(now) = locked(&leaves.0).get_mut(&id) {
            now.since -= SLOW;
        }
        let second = first(&leaves, id);
        assert!(slow.is_overtaken() && !second.is_overtaken());
        drop(slow);
        assert!(matches!(leaves.begin(id), Leave::Again(_)), "the second is under way still");
    }
}
