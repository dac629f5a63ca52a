//! Out of the queue, and what is owed to it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::kit::spawn_on;
use leasehold_core::queue::Queue;
use leasehold_core::{Claim, ClaimId, ErrorKind, Name, Result};

use crate::known::Guess;
use crate::shared::{About, Shared, Turn};

/// The first and the longest pause after a departure that the store did not take.
const AGAIN: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(10)];
/// So many departures are under way at once.
pub(crate) const REAPING: usize = 16;

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
        let mut is_guess = guess.is_some();
        let left = self.change(name, About::Leaves(id), guess, |queue| {
            let turn = self.without(queue, id);
            let is_seen = !std::mem::take(&mut is_guess) && matches!(turn, Turn::Write(true));
            if is_seen {
                // Seen in this call: if it is gone at the next look, it left, by what was sent or as if by that.
                self.claims.leaves(id, true);
            }
            turn
        });
        Ok(left.await? || self.claims.is_leaving(id))
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

    /// Takes out what was given up, for as long as that takes. Nothing is to be done for a claim whose session is
    /// over: all clients see that it is dead.
    async fn reap_one(self: Arc<Self>, id: ClaimId, name: Name) {
        let mut pause = AGAIN[0];
        loop {
            {
                let Some(_gate) = self.claims.enter_known(id).await else { return };
                // It was asked for again.
                if !self.claims.is_given_up(id) {
                    return;
                }
                if self.is_dead(id) {
                    return self.claims.forget(id);
                }
                let Ok(_permit) = self.reaping.acquire().await else { return };
                match self.take_out(&name, id).await {
                    Ok(_) => return self.claims.forget(id),
                    // What is there is not a queue of ours, or this client has ended.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Closed) =>
                    {
                        return self.claims.forget(id);
                    }
                    // Also where the store refuses: it may be for now, and until the session is over the claim is in
                    // the way of others.
                    Err(_) => {}
                }
            }
            tokio::time::sleep(pause.mul_f64(0.5 + self.chance())).await;
            pause = (pause * 2).min(AGAIN[1]);
        }
    }

    /// Whether the session that a claim stands under is over, or was to stand under.
    fn is_dead(&self, id: ClaimId) -> bool {
        let now = self.clock.now();
        let current = self.sessions.current().filter(|session| session.certain() > now);
        match (self.claims.session(id), current) {
            (Some(session), Some(current)) => session != current.id,
            (_, None) => true,
            // It was never seen standing: perhaps it was written under this one.
            (None, Some(_)) => false,
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
