//! A writer becomes a reader, or a reader that is alone a writer: one change of the queue, as any other.
//!
//! *A write that is still under way* when the next one is asked for is refused once that has written; and a hold
//! that was ever to become lighter is not made heavier by its client.

use leasehold_core::queue::Queue;
use leasehold_core::store::Reweighed;
use leasehold_core::{Claim, Result};

use crate::shared::{About, Shared, Turn};

impl Shared {
    pub(crate) async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        let now = self.clock.now();
        let _gate = self.claims.enter(claim, now.plus(claim.lease)).await;
        let Some(session) = self.claims.standing(claim.id, now) else { return Ok(Reweighed::Lost) };
        let weighed = |queue: &mut Queue| {
            let ours = queue.entries().find(|e| e.id == claim.id && e.session == session);
            let Some(before) = ours.map(|e| e.weight) else { return Turn::Told(Reweighed::Lost) };
            match queue.reweigh(claim, self.time().now) {
                done @ Reweighed::Done { .. } if before != claim.weight => Turn::Write(done),
                told => Turn::Told(told),
            }
        };
        self.change(&claim.name, About::Nobody, None, weighed).await
    }
}
