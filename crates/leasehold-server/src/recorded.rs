//! A store whose calls are recorded in the [`History`].
//!
//! [`Recorded`] forwards every call. If the store behind it reports changes, it also lists the
//! locks after changes, to observe the holds of other servers and clients. These lists are at least
//! a second apart, and take at most a fiftieth of the time, so that a large store is not kept busy.
//! Without changes, it lists nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::wall_micros;
use leasehold_core::store::{
    Converted, Evict, EvictionListener, Follow, Joined, LockInfo, Mode, Ownership, Queues, Renew,
    Renewal, Signal, Store, StoreInfo, Wakeup,
};
use leasehold_core::{Claim, Name, Result, Token};
use leasehold_http::wire::HoldEnd;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use crate::history::History;

/// The minimum interval between two listings of the locks.
const LIST_EVERY: Duration = Duration::from_secs(1);
/// After it lists the locks, the task pauses for this many times as long as that took.
const PAUSE: u32 = 50;
/// The pause before the task subscribes again, after the store failed to answer.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Recorded {
    inner: Arc<dyn Store>,
    history: Arc<History>,
    watching: Option<AbortHandle>,
}

impl Recorded {
    /// Records the calls of this store. With `watch`, also lists its locks after changes. Must be
    /// called in a tokio runtime.
    pub(crate) fn new(inner: Arc<dyn Store>, history: Arc<History>, watch: bool) -> Self {
        let reports = inner.guarantees().followed == Wakeup::Push;
        let watching = (watch && reports).then(|| {
            let watching = tokio::spawn(observe(Arc::downgrade(&inner), history.clone()));
            watching.abort_handle()
        });
        Self { inner, history, watching }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(watching) = &self.watching {
            watching.abort();
        }
    }
}

/// Lists the locks after each change, until the store is dropped or cannot report changes.
async fn observe(store: Weak<dyn Store>, history: Arc<History>) {
    let queues = Queues::All(String::new());
    loop {
        let Some(following) = store.upgrade() else { return };
        let followed = following.follow(&queues).await;
        drop(following);
        match followed {
            Ok(Some(follow)) => {
                history.set_watches_store(true);
                list_after_changes(&store, &history, &queues, follow).await;
                history.set_watches_store(false);
            }
            Ok(None) => return,
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}

/// Lists the locks, and again after each change. Returns when the store fails to list them or is
/// dropped.
async fn list_after_changes(
    store: &Weak<dyn Store>,
    history: &History,
    queues: &Queues,
    follow: Follow,
) {
    loop {
        let started = Instant::now();
        // A change during the listing causes another one.
        let at = wall_micros();
        let Some(listing) = store.upgrade() else { return };
        let Ok(locks) = listing.list("").await else { return };
        drop(listing);
        history.listed(at, &locks, Some(queues));
        sleep(LIST_EVERY.max(started.elapsed() * PAUSE)).await;
        follow.changed().await;
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Recorded {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let joined = self.inner.join(claim, mode).await?;
        if let Joined::Holding { token, .. } = &joined {
            self.history.held(claim, *token);
        }
        Ok(joined)
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let results = self.inner.renew(renewals).await?;
        for (renew, renewal) in renewals.iter().zip(&results) {
            match renewal {
                Renewal::Holding { token, .. } => self.history.held(&renew.claim, *token),
                Renewal::Lost => self.history.ended(&renew.claim, HoldEnd::Lost),
                Renewal::Waiting(_) | Renewal::Unknown { .. } => {}
            }
        }
        Ok(results)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let is_repeated = self.history.begin_release(claim);
        let left = self.inner.leave(claim, keep).await?;
        // Only the first call proves a loss. A later one may not find the claim because an earlier
        // one, whose reply was lost, has removed it.
        let is_released = left || is_repeated;
        self.history.ended(claim, if is_released { HoldEnd::Released } else { HoldEnd::Lost });
        Ok(left)
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let converted = self.inner.convert(claim).await?;
        match &converted {
            Converted::Done { token } => self.history.held(claim, *token),
            Converted::Busy => {}
            Converted::Lost => self.history.ended(claim, HoldEnd::Lost),
        }
        Ok(converted)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let signal = self.inner.changed(claim).await?;
        if let Signal::Granted(token) = signal {
            self.history.held(claim, token);
        }
        Ok(signal)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let started = wall_micros();
        let lock = self.inner.read(name).await?;
        self.history.listed(started, lock.as_slice(), Some(&Queues::Of(name.clone())));
        Ok(lock)
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let started = wall_micros();
        let lock = self.inner.holders(name, token).await?;
        // The answer may omit some holders, so holds that are missing have not necessarily ended.
        self.history.listed(started, lock.as_slice(), None);
        Ok(lock)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let started = wall_micros();
        let locks = self.inner.list(prefix).await?;
        self.history.listed(started, &locks, Some(&Queues::All(prefix.to_owned())));
        Ok(locks)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let open = self.history.open_of(name);
        let evicted = self.inner.evict(name, which).await?;
        if evicted > 0 {
            self.history.evicted(open, which);
        }
        Ok(evicted)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inner.on_eviction(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.inner.follow(queues).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.diagnose().await
    }

    async fn disconnect(&self) {
        self.inner.disconnect().await;
    }

    fn longest_lease(&self) -> Duration {
        self.inner.longest_lease()
    }

    fn shard(&self, name: &Name) -> u64 {
        self.inner.shard(name)
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.inner.confirmed(claim)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        self.inner.ownership(claim)
    }

    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.inner.lifeline()
    }
}

#[cfg(test)]
mod tests {
    use leasehold::testing::{Fault, Op, TestStore};
    use leasehold_core::Kind;

    use super::*;

    #[tokio::test]
    async fn only_the_first_release_that_finds_no_claim_is_recorded_as_a_loss() {
        let store = TestStore::new().unwrap();
        let locks = store.client().unwrap();
        let history = Arc::new(History::new(10, 10));
        let recorded = Recorded::new(locks.store().clone(), history.clone(), false);
        let claim = |name: &str| Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
        let end_of = |claim: &Claim| history.of(&claim.name).holds[0].end;

        let released = claim("released");
        recorded.join(&released, Mode::Try).await.unwrap();
        // The lock is released, but the reply is an error. So the client releases it again.
        store.faults().next(Op::Leave, 1, Fault::ErrorAfter);
        recorded.leave(&released, None).await.unwrap_err();
        assert_eq!(end_of(&released), None);
        assert!(!recorded.leave(&released, None).await.unwrap());
        assert_eq!(end_of(&released), Some(HoldEnd::Released));

        let lost = claim("lost");
        recorded.join(&lost, Mode::Try).await.unwrap();
        locks.store().evict(&lost.name, Evict::Holders).await.unwrap();
        assert!(!recorded.leave(&lost, None).await.unwrap());
        assert_eq!(end_of(&lost), Some(HoldEnd::Lost));
    }
}
