//! Who waits looks: at first often, then less, and never less often than the URL's `poll_ms`. Who is next
//! looks more often than who stands far behind, and whoever came nearer begins anew. Each pause is by
//! chance half as long or half as long again, so that a crowd does not come all at once.

use std::time::Duration;

use leasehold_core::Claim;
use leasehold_core::store::{Renewal, Signal, Standing};

use crate::shared::Shared;

/// The first pause of who is next.
const FIRST: Duration = Duration::from_millis(2);
/// How often who is next sees to it that those in front live, at most.
const SESSIONS: Duration = Duration::from_millis(400);

impl Shared {
    /// Resolves when the claim holds, or is not there any more, or has come nearer.
    ///
    /// # Cancel safety
    /// May be dropped and called again: nothing is told twice or not at all, since each look is new.
    pub(crate) async fn changed(&self, claim: &Claim) -> Signal {
        let mut unasked = Duration::ZERO;
        loop {
            let Some((ahead, last)) = self.claims.waits(claim.id) else { return Signal::Ask };
            let pause = self.next_pause(ahead, last);
            self.claims.pauses(claim.id, pause);
            let pause = pause.mul_f64(0.5 + fastrand::f64());
            self.sleep(pause).await;
            unasked += pause;
            // What cannot be read now can be later; the heartbeat tells of what lasts.
            let Ok(mut seen) = self.look(&claim.name).await else { continue };
            let next = seen.queue.entries().find(|entry| entry.standing == Standing::Waiting);
            let is_next = next.is_some_and(|entry| entry.id == claim.id);
            if is_next && unasked >= SESSIONS {
                unasked = Duration::ZERO;
                if self.clear_front(&claim.name, &mut seen).await.is_err() {
                    continue;
                }
            }
            match seen.queue.peek(claim.id, self.time().now) {
                Some(Renewal::Holding { token, .. }) => return Signal::Granted(token),
                Some(Renewal::Waiting(place)) if place.ahead == ahead => {}
                _ => return Signal::Ask,
            }
        }
    }

    fn next_pause(&self, ahead: usize, last: Duration) -> Duration {
        let far = u32::try_from(ahead).unwrap_or(u32::MAX);
        let first = FIRST.saturating_mul(far.max(1));
        (last + last / 2).max(first).min(self.poll)
    }
}
