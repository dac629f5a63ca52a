//! Out of the queue, and what is owed to it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::kit::spawn_on;
use leasehold_core::queue::Queue;
use leasehold_core::{Claim, ClaimId, ErrorKind, Name, Result};

use crate::known::Guess;
use crate::shared::{About, Shared, Turn};

/// After a departure that the system did not hear of.
const AGAIN: Duration = Duration::from_millis(300);

impl Shared {
    pub(crate) async fn leave(&self, claim: &Claim) -> Result<bool> {
        let _gate = self.claims.enter(claim, self.clock.now().plus(claim.lease)).await;
        let left = self.take_out(&claim.name, claim.id).await?;
        self.claims.forget(claim.id);
        Ok(left)
    }

    /// Takes a claim out of its queue for good. Whether it was there, or was perhaps taken out before.
    /// With the gate of the claim in hand.
    pub(crate) async fn take_out(&self, name: &Name, id: ClaimId) -> Result<bool> {
        // Alone, or nearly: a longer queue is not kept in mind.
        let guess = self.known.guess(name, Guess::Alone, |queue| queue.position(id).is_some());
        let was_leaving = self.claims.is_leaving(id);
        let left = self.change(name, About::Leaves(id), guess, |queue| self.without(queue, id));
        Ok(left.await? || was_leaving)
    }

    fn without(&self, queue: &mut Queue, id: ClaimId) -> Turn<bool> {
        match queue.leave(id, None, self.time().now) {
            true => Turn::Write(true),
            // What was sent to join may still come. Once the cell was written, it is refused.
            false if self.claims.is_doubtful(id) => Turn::Write(false),
            // Or the look is older than its place, which would stay there for as long as we live.
            false if self.cells.system().looks_behind => Turn::Write(false),
            false => Turn::Told(false),
        }
    }

    /// Takes out what was given up, for as long as that takes.
    async fn reap_one(self: Arc<Self>, id: ClaimId, name: Name) {
        loop {
            {
                let Some(_gate) = self.claims.enter_known(id).await else { return };
                // Somebody has asked for it anew.
                if !self.claims.is_given_up(id) {
                    return;
                }
                match self.take_out(&name, id).await {
                    Ok(_) => return self.claims.forget(id),
                    // Nobody will ever read it again; or nobody is left to.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Closed) =>
                    {
                        return self.claims.forget(id);
                    }
                    Err(_) => {}
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// Gives up what ends, for as long as the client lives.
pub(crate) async fn reap(shared: Weak<Shared>) {
    loop {
        let Some(now) = shared.upgrade() else { return };
        let (over, next) = now.claims.give_up(now.clock.now());
        for (id, name) in over {
            spawn_on(&now.runtime, Arc::clone(&now).reap_one(id, name));
        }
        // So long that whether the client still lives is looked at now and then.
        let pause = next.since(now.clock.now()).min(Duration::from_secs(1));
        tokio::select! {
            biased;
            () = now.claims.sooner.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
