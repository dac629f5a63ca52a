//! Polling by waiters, frequently at first, then less often.
//!
//! The longest pause of the next waiter is `poll_ms` in the URL. It grows with the number of claims
//! ahead, up to the longer of 2 s and `poll_ms`. So the traffic of a long queue does not grow with
//! the square of its length. The next waiter polls more often than a waiter far from the head. A
//! waiter whose position improves starts again with short pauses. Each pause varies randomly by
//! half, so that not all waiters poll at once.
//!
//! If the system has messages between clients ([`Messenger`](crate::Messenger)), the client that
//! grants a claim notifies exactly the new holder, whatever the length of the queue. Polls are then
//! needed only if the previous holder has crashed or a message was lost. A grant in a message has
//! the same effect as one that was read from the queue, and the next renewal reads the queue. An
//! eviction is also reported to the claim's client, which then polls.

use std::sync::Weak;
use std::time::Duration;

use leasehold_core::Claim;
use leasehold_core::store::{ClaimState, Renewal, Signal};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::cells::Message;
use crate::shared::Shared;
use crate::text;

/// The first pause of the next waiter is `poll_ms` divided by this number.
const FIRST: u32 = 50;
/// The first pause if new holders are notified.
const FIRST_WITH_MESSAGES: Duration = Duration::from_millis(250);
/// Minimum interval at which the next waiter checks whether the claims at the front are alive.
const SESSIONS: Duration = Duration::from_millis(400);

/// Number of claims ahead by which a waiter's longest pause grows by another `poll_ms`.
const CROWD: u32 = 8;
/// The longest pause between two polls of a waiter far from the head of the queue, unless `poll_ms`
/// is longer. It equals the renewal interval.
const FAR: Duration = Duration::from_secs(2);

impl Shared {
    /// Waits until the claim is granted, is missing, or has a new position.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. The next call polls again, so it misses
    /// nothing.
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
            // A failed read is repeated later. The renewals report errors that persist.
            let Ok(mut seen) = self.read_queue(&claim.name).await else { continue };
            let next = seen.queue.entries().find(|entry| entry.state == ClaimState::Waiting);
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
        let first =
            if self.cells.messenger().is_some() { FIRST_WITH_MESSAGES } else { self.poll / FIRST };
        let first = first.saturating_mul(far.max(1));
        // A waiter far from the head cannot be next soon, and its renewals read the queue anyway.
        let longest = self.poll.saturating_mul(1 + far / CROWD).min(self.poll.max(FAR));
        (last + last / 2).max(first).min(longest)
    }
}

/// Passes on messages from other clients for as long as this client exists.
pub(crate) async fn receive_messages(
    shared: Weak<Shared>,
    mut messages: UnboundedReceiver<Message>,
) {
    while let Some(received) = messages.recv().await {
        let Some(now) = shared.upgrade() else { return };
        match received {
            Message::Missed => now.claims.ask_all(),
            // Other texts are not from leasehold and are ignored.
            Message::Text(message) => {
                if let Some((id, token)) = text::parse_granted(&message) {
                    now.claims.notify(id, Signal::Granted(token));
                } else if let Some(id) = text::parse_evicted(&message) {
                    now.listeners.ask(id);
                }
            }
        }
    }
}
