//! A claim that waits in the queue, shared by its caller and the renewer.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::lease::Granted;
use super::telemetry::Gauged;
use crate::types::answer::{Place, Renewal};
use crate::types::claim::Claim;
use crate::types::error::Error;
use crate::types::token::Token;
use crate::util::clock::Moment;
use crate::util::locked::locked;

/// A claim that waits in the queue, shared by its caller and the renewer.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) claim: Claim,
    state: Mutex<WaitingState>,
    news: Notify,
    _gauged: Gauged,
}

#[derive(Debug)]
struct WaitingState {
    /// When the client sent the last request that got the reply "waiting".
    last_answer: Moment,
    place: Place,
    outcome: Option<Outcome>,
    place_is_news: bool,
    /// The error of the last request, if the store answered it with an error.
    refusal: Option<Error>,
    /// The time at which the wait began, or `None` once [`is_long`](Waiting::is_long) has returned
    /// `true`.
    unquestioned: Option<Moment>,
}

/// The result of a heartbeat that ends the wait.
#[derive(Debug)]
pub(crate) enum Outcome {
    Holding { token: Token, granted: Granted },
    Gone,
    Failed(Error),
}

/// The event that wakes a waiting caller.
#[derive(Debug)]
pub(crate) enum WaiterEvent {
    Place(Place),
    Outcome(Outcome),
}

impl Waiting {
    pub(crate) fn new(claim: Claim, sent: Moment, place: Place) -> Arc<Self> {
        let state = WaitingState {
            last_answer: sent,
            place,
            outcome: None,
            place_is_news: false,
            refusal: None,
            unquestioned: Some(sent),
        };
        let (_gauged, news) = (Gauged::waiting(&claim), Notify::new());
        Arc::new(Self { claim, state: Mutex::new(state), news, _gauged })
    }

    fn lock(&self) -> MutexGuard<'_, WaitingState> {
        locked(&self.state)
    }

    /// Returns when the last request was sent that was answered with "waiting". A pushed grant
    /// cannot be older.
    pub(crate) fn last_answer(&self) -> Moment {
        self.lock().last_answer
    }

    /// Returns whether a grant with this token belongs to the queue position in the last answer.
    pub(crate) fn stands_under(&self, token: Token) -> bool {
        self.lock().place.token == Some(token)
    }

    /// Waits for the next event. May be dropped and called again.
    pub(crate) async fn news(&self) -> WaiterEvent {
        loop {
            {
                let mut state = self.lock();
                if let Some(outcome) = state.outcome.take() {
                    return WaiterEvent::Outcome(outcome);
                }
                if std::mem::take(&mut state.place_is_news) {
                    return WaiterEvent::Place(state.place);
                }
            }
            self.news.notified().await;
        }
    }

    /// Applies the result of a request that was sent at `sent`.
    pub(crate) fn answered(&self, sent: Moment, renewal: Renewal) {
        let mut state = self.lock();
        if matches!(state.outcome, Some(Outcome::Failed(_))) {
            // Another request has failed in the meantime, and its error has more details.
            return;
        }
        if !matches!(renewal, Renewal::Unknown { .. }) {
            state.refusal = None;
        }
        match renewal {
            // Our position has expired, and a late duplicate of the join has created another one.
            // We do not know when that one was last extended or what was pushed to it.
            Renewal::Waiting(place) if place.token != state.place.token => {
                state.outcome = Some(Outcome::Gone);
            }
            Renewal::Holding { token, .. } if state.place.token.is_some_and(|t| t != token) => {
                state.outcome = Some(Outcome::Gone);
            }
            Renewal::Waiting(place) => {
                state.last_answer = state.last_answer.max(sent);
                state.place_is_news |= state.place.ahead != place.ahead;
                state.place = place;
            }
            Renewal::Holding { token, remaining } => {
                let granted = Granted { sent, remaining };
                state.outcome = Some(Outcome::Holding { token, granted });
            }
            Renewal::Lost => state.outcome = Some(Outcome::Gone),
            // Nothing changes. The renewer treats an unknown result as an error.
            Renewal::Unknown { .. } => {}
        }
        let news = state.outcome.is_some() || state.place_is_news;
        drop(state);
        // An unchanged position is not published, because there may be thousands of waiters.
        if news {
            self.news.notify_one();
        }
    }

    pub(crate) fn fail(&self, error: Error) {
        self.lock().outcome = Some(Outcome::Failed(error));
        self.news.notify_one();
    }

    /// Applies an error that a retry would not fix. A grant that arrived in the meantime stays.
    pub(crate) fn refused(&self, error: &Error) {
        if matches!(self.lock().outcome, Some(Outcome::Holding { .. })) {
            return;
        }
        self.fail(while_waiting(error));
    }

    /// Remembers an error that may pass. If the caller's time limit ends first, the caller gets it.
    pub(crate) fn note(&self, error: &Error) {
        let refusal = (!error.is_transient()).then(|| while_waiting(error));
        self.lock().refusal = refusal;
    }

    /// Returns the error of the last request, if the store answered it with an error.
    pub(crate) fn refusal(&self) -> Option<Error> {
        self.lock().refusal.take()
    }

    /// Returns `true` once: when the call has waited long enough to check for a deadlock with a
    /// hold of its own client.
    pub(super) fn is_long(&self, now: Moment) -> bool {
        let long = self.claim.waiter_lease;
        self.lock().unquestioned.take_if(|since| now.since(*since) >= long).is_some()
    }

    pub(super) fn is_decided(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// Returns when to send the next request. This is at the next heartbeat or, for the first
    /// waiter, when a lease that blocks it expires.
    pub(super) fn next_beat(&self, now: Moment) -> Moment {
        let state = self.lock();
        let lease = self.claim.waiter_lease;
        let beat = aligned(state.last_answer.plus(lease / 3), lease);
        match state.place.head_remaining {
            // If that lease has just expired, the client must not poll in a tight loop.
            Some(left) => beat.min(state.last_answer.plus(left)).max(now.plus(ASK_PAUSE)),
            None => beat.max(now.plus(ASK_PAUSE)),
        }
    }
}

/// The shortest pause between two heartbeats of one waiter.
const ASK_PAUSE: Duration = Duration::from_millis(1);

/// Rounds `moment` up to the grid on which claims with this lease are batched.
pub(super) fn aligned(moment: Moment, lease: Duration) -> Moment {
    let grid = u64::try_from((lease / 30).as_nanos()).unwrap_or(u64::MAX).max(1);
    Moment::from_nanos(moment.as_nanos().div_ceil(grid).saturating_mul(grid))
}

/// Returns the error of a request that was sent while a call waited.
fn while_waiting(error: &Error) -> Error {
    let what = "the store returned an error while this call was waiting";
    Error::new(error.kind(), what).hinted_by(error).with_source(error.reason())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::claim::Kind;
    use crate::types::name::Name;

    // P8
    /// A late duplicate of the join creates a second position after the first one has expired.
    #[test]
    fn duplicate_queue_position_of_a_claim_is_not_accepted() {
        let claim = Claim::new(Name::new("q").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let token = |n| Token::new(n).unwrap();
        let place = |n| Place { ahead: 1, head_remaining: None, token: Some(token(n)) };
        let sent = Moment::from_nanos(1);
        let stand = || Waiting::new(claim.clone(), sent, place(7));
        let holding = |n| Renewal::Holding { token: token(n), remaining: None };
        let outcome = |waiting: Arc<Waiting>| waiting.lock().outcome.take();

        assert!(stand().stands_under(token(7)));
        assert!(!stand().stands_under(token(6)), "a push for an earlier claim was accepted");

        let ours = stand();
        ours.answered(sent, Renewal::Waiting(place(7)));
        assert!(!ours.is_decided());
        ours.answered(sent, holding(7));
        assert!(matches!(outcome(ours), Some(Outcome::Holding { token: t, .. }) if t == token(7)));

        for other in [Renewal::Waiting(place(9)), holding(9)] {
            let waiting = stand();
            waiting.answered(sent, other);
            assert!(matches!(outcome(waiting), Some(Outcome::Gone)));
        }
    }
}
