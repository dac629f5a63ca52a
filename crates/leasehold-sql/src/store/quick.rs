//! A free lock on SQLite: taken and released by one statement each, in the caller's task (`here.rs`).
//!
//! What comes to nothing that way, for whatever reason, is done in full on the client's thread, as if it
//! had not been tried: all is decided by the claim's id. Sections are never done here. Whoever lets go of
//! a join that is under way finds it in [`Joins`](super::joins::Joins), as any other.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Answer, Call, Told, in_time};
use super::fault::{Failure, closed, given_up, no_answer};
use super::shared::Shared;
use leasehold_core::store::Joined;
use leasehold_core::{Claim, Result};

impl Shared {
    /// A join that has [begun](super::joins::Joins::begin), by one statement. `None`: that was not enough.
    pub(super) async fn take_or_leave(&self, claim: Claim) -> Option<Result<Joined>> {
        let taken = self.once(&Call::Take(claim.clone())).await;
        if self.joins.end(claim.id, false).given_up {
            // Unheard, the claim's lease says it later.
            let id = claim.id;
            let _ = self.call(Call::Leave(claim, None, Told::Waits), &|| false).await;
            self.waiters.dismiss(id);
            return Some(Err(given_up()));
        }
        match taken {
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
    ) -> Result<Answer> {
        let in_doubt = match self.once(&Call::Release(claim.clone())).await {
            Ok(Answer::Left(true)) => return Ok(Answer::Left(true)),
            Ok(_) | Err(Failure::Conflict(_)) => false,
            Err(_) => true,
        };
        let leave =
            async move { self.call(Call::Leave(claim, keep, Told::Waits), &|| false).await };
        match tokio::spawn(leave).await.unwrap_or_else(|_| Err(closed()))? {
            Answer::Left(left) => Ok(Answer::Left(left || in_doubt)),
            other => Ok(other),
        }
    }

    /// A call that is one statement, once.
    async fn once(&self, call: &Call) -> Result<Answer, Failure> {
        let _turn = self.turn(call).await;
        let mut pooled = self.pool.take().await?;
        let done = in_time(&self.pool, self.perform(&mut *pooled.wire, call, false)).await;
        let done = done.unwrap_or_else(|| Err(no_answer().into()));
        if matches!(done, Ok(_) | Err(Failure::Conflict(_))) {
            self.pool.put(pooled);
        }
        done
    }
}
