//! A free lock, taken and released by one statement each, in the caller's task (`here.rs`).
//!
//! What comes to nothing that way, for whatever reason, is done in full on the client's thread, as if it
//! had not been tried: all is decided by the claim's id. Sections are never done here. Whoever lets go of
//! a join that is under way finds it in [`Joins`](super::joins::Joins), as any other, and a leave in
//! [`Leaves`](super::leaves::Leaves).
//!
//! A caller that does something else meanwhile, even if it waits for another call of ours, keeps a connection
//! in its hands. So only one that lies idle is taken, never the one that listens and never the last for
//! which there is room, and a join leaves a turn for another: whatever else is called gets on. And renewals
//! have connections of their own.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Answer, Call, Told, in_time};
use super::fault::{self, Failure, closed, given_up, no_answer};
use super::leaves::First;
use super::shared::Shared;
use leasehold_core::store::Joined;
use leasehold_core::{Claim, Result};

impl Shared {
    /// A join that has [begun](super::joins::Joins::begin), by one statement. `None`: that was not enough.
    pub(super) async fn take_or_leave(&self, claim: Claim) -> Option<Result<Joined>> {
        let taken = match self.joining.try_acquire_many(2).ok().and_then(|mut two| two.split(1)) {
            Some(_turn) => self.once(&Call::Take(claim.clone())).await,
            None => None,
        };
        if self.joins.end(claim.id, false).given_up {
            // Unheard, the claim's lease says it later.
            let id = claim.id;
            if taken.is_some() {
                let _ = self.call(Call::Leave(claim, None, Told::Waits), &|| false).await;
            }
            self.waiters.dismiss(id);
            return Some(Err(given_up()));
        }
        match taken? {
            Ok(Answer::Taken(Some(token))) => {
                // It may have waited in a place that ran out.
                self.waiters.dismiss(claim.id);
                Some(Ok(Joined::Holding { token, remaining: Some(claim.lease) }))
            }
            Ok(_) => {
                self.contended.note(&claim.name);
                None
            }
            Err(_) => None,
        }
    }

    /// A leave of a claim that never waited: by one statement, or, if somebody waits, in full.
    pub(super) async fn release_or_leave(
        self: Arc<Self>,
        claim: Claim,
        keep: Option<Duration>,
        first: First,
    ) -> Result<Answer> {
        let (in_doubt, told) = match self.once(&Call::Release(claim.clone())).await {
            Some(Ok(Answer::Left(true))) => {
                first.answered(true);
                return Ok(Answer::Left(true));
            }
            None => (false, Told::Whatever),
            Some(Ok(_) | Err(Failure::Conflict(_) | Failure::Changed(_))) => (false, Told::Waits),
            Some(Err(Failure::Broken(error))) if fault::had_failed_before(&error) => {
                (false, Told::Waits)
            }
            Some(Err(_)) => (true, Told::Waits),
        };
        let leave = async move { self.leave_first(claim, keep, told, in_doubt, &first).await };
        let left = tokio::spawn(leave).await.unwrap_or_else(|_| Err(closed()));
        left.map(Answer::Left)
    }

    /// A call that is one statement, once. `None`: nothing was sent.
    async fn once(&self, call: &Call) -> Option<Result<Answer, Failure>> {
        let mut pooled = self.pool.at_rest()?;
        let done = in_time(&self.pool, self.perform(&mut *pooled.wire, call, false)).await;
        let done = done.unwrap_or_else(|| Err(no_answer().into()));
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

    /// More callers than there are connections begin, and are not asked how they are getting on: as in a
    /// `select!` whose other branch waits for something.
    async fn who_is_stopped_keeps_nobody_from_anything(url: &str) {
        let here = tokio::runtime::Handle::current();
        let store = SqlStore::open(url, &here).await.unwrap();
        let claims: Vec<Claim> = (0..12).map(|n| claim(format!("stopped {n}"))).collect();
        // Connections that lie idle.
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
        // But those whom the server answers before they can be stopped.
        let begin = || {
            let mut joins: Vec<_> = claims.iter().map(|c| store.join(c, Mode::Try)).collect();
            joins.retain_mut(|join| {
                join.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
            });
            joins
        };
        let joins = begin();
        assert!(store.shared.pool.free() > 0, "they have taken all there are");
        let another = async {
            let another = claim("another".into());
            holds(&store, &another).await;
            assert!(store.leave(&another, None).await.unwrap());
        };
        tokio::time::timeout(Duration::from_secs(20), another).await.expect("they are in the way");
        for join in joins {
            let joined = join.await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        }
        for claim in &claims {
            assert!(store.leave(claim, None).await.unwrap());
        }
        // Who lets go of a join has not taken anything for long.
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
        tokio::time::timeout(Duration::from_secs(20), free).await.expect("something was left");
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn who_is_stopped_on_sqlite_keeps_nobody_from_anything() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        who_is_stopped_keeps_nobody_from_anything(&url).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn who_is_stopped_on_postgres_keeps_nobody_from_anything() {
        who_is_stopped_keeps_nobody_from_anything(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn who_is_stopped_on_mariadb_keeps_nobody_from_anything() {
        who_is_stopped_keeps_nobody_from_anything(&testbed::mariadb().database()).await;
    }
}
