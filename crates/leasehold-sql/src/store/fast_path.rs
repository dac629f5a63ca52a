//! Acquires and releases a free lock with a single statement each, in the caller's task
//! (`inline_then_spawn.rs`).
//!
//! If the statement does not succeed, for whatever reason, the full call runs on the client's
//! thread, as if nothing had been tried. This is safe because the claim's ID decides everything.
//! Sections never run here. A join whose caller drops it is registered in
//! [`InFlightJoins`](super::in_flight_joins::InFlightJoins), like any other join. A leave is
//! registered in [`InFlightLeaves`](super::in_flight_leaves::InFlightLeaves).
//!
//! A caller that does not poll its call keeps a connection in use, even while it waits for another
//! of our calls. So only an idle connection is used, never the listening one, and only if there is
//! room for one more. A join also leaves one permit for another join. So other calls always make
//! progress. Renewals have connections of their own.

use std::sync::Arc;
use std::time::Duration;

use super::call::{ReleaseHint, in_time};
use super::fault::{self, Failure, closed, given_up, no_answer};
use super::in_flight_leaves::FirstLeave;
use super::pool::Pooled;
use super::shared::Shared;
use leasehold_core::store::Joined;
use leasehold_core::{Claim, Result};

impl Shared {
    /// Tries a join that has [begun](super::in_flight_joins::InFlightJoins::begin), with a single
    /// statement. Returns `None` if the full join is necessary.
    pub(super) async fn take_or_leave(&self, claim: Claim) -> Option<Result<Joined>> {
        let wanted = &claim;
        let take = |mut on: Pooled| async move { (self.take(&mut *on.wire, wanted).await, on) };
        let taken = match self.joining.try_acquire_many(2).ok().and_then(|mut two| two.split(1)) {
            Some(_turn) => self.once(take).await,
            None => None,
        };
        let ended = self.joins.end(claim.id, false, taken.is_some());
        if ended.given_up {
            self.waiters.dismiss(claim.id);
            if let Some(last) = ended.last {
                self.leave_given_up(claim, last).await;
            }
            return Some(Err(given_up()));
        }
        match taken? {
            Ok(Some(token)) => {
                // The claim may have waited in a place that has expired.
                self.waiters.dismiss(claim.id);
                Some(Ok(Joined::Holding { token, remaining: Some(claim.lease) }))
            }
            Ok(_) => {
                self.contention_hints.note(&claim.name);
                None
            }
            Err(_) => None,
        }
    }

    /// Releases a claim that never waited, with a single statement. Falls back to the full release
    /// if that statement does not succeed, for example because another claim is waiting.
    pub(super) async fn release_or_leave(
        self: Arc<Self>,
        claim: Claim,
        keep: Option<Duration>,
        first: FirstLeave,
    ) -> Result<bool> {
        let (shared, held) = (&self, &claim);
        let release =
            |mut on: Pooled| async move { (shared.release(&mut *on.wire, held).await, on) };
        let (in_doubt, hint) = match self.once(release).await {
            Some(Ok(true)) => {
                first.answered(true);
                return Ok(true);
            }
            None => (false, ReleaseHint::OtherReply),
            Some(Ok(false) | Err(Failure::Conflict(_) | Failure::Changed(_))) => {
                (false, ReleaseHint::Waiting)
            }
            Some(Err(Failure::Broken(error))) if fault::had_failed_before(&error) => {
                (false, ReleaseHint::Waiting)
            }
            Some(Err(_)) => (true, ReleaseHint::Waiting),
        };
        let leave = async move { self.leave_first(claim, keep, hint, in_doubt, &first).await };
        tokio::spawn(leave).await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs `work`, which sends one statement, without retries. Returns `None` if no idle connection was available.
    async fn once<T, F>(&self, work: impl FnOnce(Pooled) -> F) -> Option<Result<T, Failure>>
    where
        F: Future<Output = (Result<T, Failure>, Pooled)>,
    {
        let pooled = self.pool.at_rest()?;
        let Some((done, pooled)) = in_time(&self.pool, work(pooled)).await else {
            return Some(Err(no_answer().into()));
        };
        if matches!(done, Ok(_) | Err(Failure::Conflict(_))) {
            self.pool.put(pooled);
        }
        Some(done)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::super::SqlStore;
    use super::*;
    use leasehold_core::store::{Mode, Store};
    use leasehold_core::{Kind, Name};

    fn claim(name: String) -> Claim {
        Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
    }

    async fn holds(store: &SqlStore, claim: &Claim) {
        let joined = store.join(claim, Mode::Try).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    }

    /// More callers begin than there are connections, and then their futures are not polled. This
    /// happens in a `select!` whose other branch waits for something.
    async fn who_is_stopped_keeps_nobody_from_anything(url: &str) {
        let here = tokio::runtime::Handle::current();
        let store = SqlStore::open(url, &here).await.unwrap();
        let claims: Vec<Claim> = (0..12).map(|n| claim(format!("stopped {n}"))).collect();
        // Makes some connections idle.
        let warm = claims.iter().map(|c| {
            let store = store.clone();
            let c = c.clone();
            tokio::spawn(async move {
                holds(&store, &c).await;
                assert!(store.leave(&c, None).await.unwrap());
            })
        });
        for done in warm.collect::<Vec<_>>() {
            done.await.unwrap();
        }
        // Joins that complete at their first poll are left out.
        let begin = || {
            let mut joins: Vec<_> = claims.iter().map(|c| store.join(c, Mode::Try)).collect();
            joins.retain_mut(|join| {
                join.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
            });
            joins
        };
        let joins = begin();
        assert!(store.shared.pool.free() > 0, "the joins use all connections");
        let another = async {
            let another = claim("another".into());
            holds(&store, &another).await;
            assert!(store.leave(&another, None).await.unwrap());
        };
        tokio::time::timeout(Duration::from_secs(20), another)
            .await
            .expect("another lock had to wait for the joins");
        for join in joins {
            let joined = join.await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        }
        for claim in &claims {
            assert!(store.leave(claim, None).await.unwrap());
        }
        // A dropped join does not hold its lock for long.
        drop(begin());
        for claim in &claims {
            store.leave(claim, None).await.unwrap();
        }
        let free = async {
            for claim in &claims {
                while store.read(&claim.name).await.unwrap().is_some() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), free)
            .await
            .expect("claims remain in the store");
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn unpolled_calls_block_no_other_calls_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        who_is_stopped_keeps_nobody_from_anything(&url).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn unpolled_calls_block_no_other_calls_on_postgres() {
        who_is_stopped_keeps_nobody_from_anything(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn unpolled_calls_block_no_other_calls_on_mariadb() {
        who_is_stopped_keeps_nobody_from_anything(&testbed::mariadb().database()).await;
    }
}
