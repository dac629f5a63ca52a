//! Changing the weight of a claim: a writer becomes a reader, or a sole reader becomes a writer.
//! This is one change of the queue like any other.
//!
//! If an earlier write is still under way, the next write causes it to be refused. The client never
//! increases the weight of a hold again after it has requested a decrease.

use leasehold_core::queue::Queue;
use leasehold_core::store::Converted;
use leasehold_core::{Claim, Result};

use crate::shared::{ClaimEffect, QueueEdit, Shared};

impl Shared {
    pub(crate) async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let now = self.clock.now();
        let _gate = self.claims.enter(claim, now.plus(claim.lease)).await;
        let Some(session) = self.claims.session_of(claim.id, now) else {
            return Ok(Converted::Lost);
        };
        let weighed = |queue: &mut Queue| {
            let ours = queue.entries().find(|e| e.id == claim.id && e.session == session);
            let Some(before) = ours.map(|e| e.weight) else {
                return QueueEdit::Unchanged(Converted::Lost);
            };
            match queue.convert(claim, self.time().now) {
                done @ Converted::Done { .. } if before != claim.weight => QueueEdit::Write(done),
                result => QueueEdit::Unchanged(result),
            }
        };
        self.change(&claim.name, ClaimEffect::None, None, weighed).await
    }
}
