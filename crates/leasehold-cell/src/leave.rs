//! Releasing claims, and cleaning up claims that were given up.

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::kit::spawn_on;
use leasehold_core::queue::Queue;
use leasehold_core::{Claim, ClaimId, ErrorKind, Name, Result};

use crate::last_writes::Guess;
use crate::shared::{ClaimEffect, QueueEdit, Shared};

/// The first and the longest pause after a failed release.
const AGAIN: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(10)];
/// Maximum number of concurrent releases of claims that were given up.
pub(crate) const REAPING: usize = 16;

impl Shared {
    pub(crate) async fn leave(&self, claim: &Claim) -> Result<bool> {
        let _gate = self.claims.enter(claim, self.clock.now().plus(claim.lease)).await;
        let left = self.take_out(&claim.name, claim.id).await?;
        self.claims.forget(claim.id);
        Ok(left)
    }

    /// Removes a claim from its queue permanently. Returns whether it was there, or may have been
    /// removed by an earlier request. The caller has the claim's gate.
    pub(crate) async fn take_out(&self, name: &Name, id: ClaimId) -> Result<bool> {
        // Only short queues are remembered, so the claim is alone in its queue, or nearly.
        let is_there = |queue: &Queue| queue.position(id).is_some();
        let guess = self.last_writes.guess(name, Guess::Alone, is_there);
        let mut is_guess = guess.is_some();
        let left = self.change(name, ClaimEffect::Leaves(id), guess, |queue| {
            let edit = self.without(queue, id);
            let is_seen = !std::mem::take(&mut is_guess) && matches!(edit, QueueEdit::Write(true));
            if is_seen {
                // This call has seen the claim in the queue. If the next read does not find it, a
                // request of this call removed it, or it makes no difference that another client
                // did.
                self.claims.leaves(id, true);
            }
            edit
        });
        Ok(left.await? || self.claims.is_leaving(id))
    }

    fn without(&self, queue: &mut Queue, id: ClaimId) -> QueueEdit<bool> {
        match queue.leave(id, None, self.time().now) {
            true => QueueEdit::Write(true),
            // A join that is still under way may add the claim. Once this write is done, that join
            // is refused.
            false if self.claims.is_doubtful(id) => QueueEdit::Write(false),
            // The read may also be older than the claim's entry, which would otherwise stay in the
            // queue as long as the client lives.
            false if self.cells.system().looks_behind => QueueEdit::Write(false),
            false => QueueEdit::Unchanged(false),
        }
    }

    /// Removes a claim that was given up, and retries without limit. If the claim's session has
    /// ended, nothing is done, because all clients see that the claim is dead.
    async fn reap_one(self: Arc<Self>, id: ClaimId, name: Name) {
        let mut pause = AGAIN[0];
        loop {
            {
                let Some(_gate) = self.claims.enter_known(id).await else { return };
                // The claim was requested again.
                if !self.claims.is_given_up(id) {
                    return;
                }
                if self.is_dead(id) {
                    return self.claims.forget(id);
                }
                let Ok(_permit) = self.reaping.acquire().await else { return };
                match self.take_out(&name, id).await {
                    Ok(_) => return self.claims.forget(id),
                    // The value is not our queue, or this client has been closed.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Closed) =>
                    {
                        return self.claims.forget(id);
                    }
                    // This includes refusals by the store. They may be temporary, and the claim
                    // blocks other clients until the session ends.
                    Err(_) => {}
                }
            }
            tokio::time::sleep(pause.mul_f64(0.5 + self.chance())).await;
            pause = (pause * 2).min(AGAIN[1]);
        }
    }

    /// Returns whether the session that the claim belongs to, or was to belong to, has ended.
    fn is_dead(&self, id: ClaimId) -> bool {
        let now = self.clock.now();
        let current = self.sessions.current().filter(|session| session.certain() > now);
        match (self.claims.session(id), current) {
            (Some(session), Some(current)) => session != current.id,
            (_, None) => true,
            // The claim was never seen in its queue. It may have been written under the current
            // session.
            (None, Some(_)) => false,
        }
    }
}

/// Gives up claims when they end, for as long as the client lives.
pub(crate) async fn reap(shared: Weak<Shared>) {
    loop {
        let Some(now) = shared.upgrade() else { return };
        let (over, next) = now.claims.give_up(now.clock.now());
        for (id, name) in over {
            spawn_on(&now.runtime, Arc::clone(&now).reap_one(id, name));
        }
        // The limit makes the task check regularly whether the client still lives.
        let pause = next.since(now.clock.now()).min(Duration::from_secs(1));
        tokio::select! {
            biased;
            () = now.claims.sooner.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
