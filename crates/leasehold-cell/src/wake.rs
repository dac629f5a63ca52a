//! Who waits looks: at first often, then less. The longest pause is the URL's `poll_ms`; it grows with the number of
//! those in front, up to 2 s, so that the looks of a crowd do not grow with the square of its size. Who is next
//! looks more often than who stands far behind, and whoever came nearer begins anew. Each pause is by
//! chance half as long or half as long again, so that a crowd does not come all at once.
//!
//! Where the system has [bells](crate::Bells), whoever lets somebody in tells exactly that one, whatever the
//! queue's length. Looks are then what is left when nobody could tell: the one before died, or a message was
//! lost. A grant that was heard is believed as one that was looked at, under its token; the next heartbeat
//! looks. Whoever evicts tells the claim's client in the same way, and that one asks.

use std::sync::Weak;
use std::time::Duration;

use leasehold_core::Claim;
use leasehold_core::store::{Renewal, Signal, Standing};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::cells::Heard;
use crate::shared::Shared;
use crate::text;

/// The first pause of who is next is this part of the longest.
const FIRST: u32 = 50;
/// The same of who would have been told.
const FIRST_UNTOLD: Duration = Duration::from_millis(250);
/// How often who is next sees to it that those in front live, at most.
const SESSIONS: Duration = Duration::from_millis(400);

/// With so many more in front a waiter's longest pause is as long again.
const CROWD: u32 = 8;
/// The longest pause of who stands far behind: a heartbeat's.
const FAR: Duration = Duration::from_secs(2);

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
            let pause = pause.mul_f64(0.5 + self.chance());
            let Some(inbox) = self.claims.inbox(claim.id) else { return Signal::Ask };
            tokio::select! {
                biased;
                news = inbox.news() => if news != Signal::Ask {
                    return news;
                },
                () = self.sleep(pause) => unasked += pause,
            }
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
        let first = if self.cells.bells().is_some() { FIRST_UNTOLD } else { self.poll / FIRST };
        let first = first.saturating_mul(far.max(1));
        // Who stands far behind cannot be next soon, and looks at each heartbeat all the same.
        let longest = self.poll.saturating_mul(1 + far / CROWD).min(self.poll.max(FAR));
        (last + last / 2).max(first).min(longest)
    }
}

/// Passes on what is heard, for as long as the client lives.
pub(crate) async fn hear(shared: Weak<Shared>, mut heard: UnboundedReceiver<Heard>) {
    while let Some(heard) = heard.recv().await {
        let Some(now) = shared.upgrade() else { return };
        match heard {
            Heard::Missed => now.claims.ask_all(),
            // What is no word of ours is nobody's.
            Heard::Said(said) => {
                if let Some((id, token)) = text::heard(&said) {
                    now.claims.tell(id, Signal::Granted(token));
                } else if let Some(id) = text::heard_evicted(&said) {
                    now.ears.ask(id);
                }
            }
        }
    }
}
