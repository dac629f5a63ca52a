//! A claim that stands in the queue, as its caller and the keeper share it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::lease::Granted;
use super::telemetry::Gauged;
use crate::base::clock::Moment;
use crate::base::locked::locked;
use crate::words::answer::{Place, Renewal};
use crate::words::claim::Claim;
use crate::words::error::Error;
use crate::words::token::Token;

/// A claim that stands in the queue, as its caller and the keeper share it.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) claim: Claim,
    state: Mutex<WaitingState>,
    news: Notify,
    _gauged: Gauged,
}

#[derive(Debug)]
struct WaitingState {
    /// When the last request that was answered "waiting" was sent.
    last_answer: Moment,
    place: Place,
    outcome: Option<Outcome>,
    place_is_news: bool,
    /// Since when, until it was looked at who holds the lock.
    unquestioned: Option<Moment>,
}

/// What a heartbeat found out.
#[derive(Debug)]
pub(crate) enum Outcome {
    Holding { token: Token, granted: Granted },
    Gone,
    Failed(Error),
}

/// What wakes a waiting caller.
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
            unquestioned: Some(sent),
        };
        let (_gauged, news) = (Gauged::waiting(&claim), Notify::new());
        Arc::new(Self { claim, state: Mutex::new(state), news, _gauged })
    }

    fn lock(&self) -> MutexGuard<'_, WaitingState> {
        locked(&self.state)
    }

    /// A pushed grant cannot be older than this.
    pub(crate) fn last_answer(&self) -> Moment {
        self.lock().last_answer
    }

    /// Whether a grant of this token is a grant of the place that last answered.
    pub(crate) fn stands_under(&self, token: Token) -> bool {
        self.lock().place.token == Some(token)
    }

    /// Waits for news. May be dropped and called again.
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

    /// Takes in what the store answered to a request sent at `sent`.
    pub(crate) fn answered(&self, sent: Moment, renewal: Renewal) {
        let mut state = self.lock();
        if matches!(state.outcome, Some(Outcome::Failed(_))) {
            // Somebody asked meanwhile, and there was more to say.
            return;
        }
        match renewal {
            // The place that was ours is gone: a late duplicate of the join has made another, of
            // which we know neither since when it stands nor what was pushed to it.
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
            // It moves nothing; whoever asks takes it for the error that it is.
            Renewal::Unknown { .. } => {}
        }
        let news = state.outcome.is_some() || state.place_is_news;
        drop(state);
        // Of a place that is as it was nobody needs to hear: thousands may wait.
        if news {
            self.news.notify_one();
        }
    }

    pub(crate) fn fail(&self, error: Error) {
        self.lock().outcome = Some(Outcome::Failed(error));
        self.news.notify_one();
    }

    /// Takes in an error after which asking again would not help. A grant that came meanwhile stands.
    pub(crate) fn refused(&self, error: &Error) {
        if matches!(self.lock().outcome, Some(Outcome::Holding { .. })) {
            return;
        }
        let what = "the store returned an error while this call was waiting";
        self.fail(Error::new(error.kind(), what).hinted_by(error).because(error.reason()));
    }

    /// Whether it has waited so long that one should look who holds the lock; once.
    pub(super) fn is_long(&self, now: Moment) -> bool {
        let long = self.claim.waiter_lease;
        self.lock().unquestioned.take_if(|since| now.since(*since) >= long).is_some()
    }

    pub(super) fn is_decided(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// When to ask next: at the heartbeat, or when the lease ends that blocks the head.
    pub(super) fn next_beat(&self, now: Moment) -> Moment {
        let state = self.lock();
        let lease = self.claim.waiter_lease;
        let beat = aligned(state.last_answer.plus(lease / 3), lease);
        match state.place.head_remaining {
            // A lease end that has just passed must not make us ask in a tight loop.
            Some(left) => beat.min(state.last_answer.plus(left)).max(now.plus(ASK_PAUSE)),
            None => beat.max(now.plus(ASK_PAUSE)),
        }
    }
}

/// The least time between two heartbeats of one waiter.
const ASK_PAUSE: Duration = Duration::from_millis(1);

/// Rounds up to the grid on which claims with this lease meet.
pub(super) fn aligned(moment: Moment, lease: Duration) -> Moment {
    let grid = u64::try_from((lease / 30).as_nanos()).unwrap_or(u64::MAX).max(1);
    Moment::from_nanos(moment.as_nanos().div_ceil(grid).saturating_mul(grid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::claim::Kind;
    use crate::words::name::Name;

    /// A late duplicate of the join made a second place after the first had expired.
    #[test]
    fn p8_another_place_of_the_same_claim_is_not_taken_for_ours() {
        let claim = Claim::new(Name::new("q").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let token = |n| Token::new(n).unwrap();
        let place = |n| Place { ahead: 1, head_remaining: None, token: Some(token(n)) };
        let sent = Moment::from_nanos(1);
        let stand = || Waiting::new(claim.clone(), sent, place(7));
        let holding = |n| Renewal::Holding { token: token(n), remaining: None };
        let outcome = |waiting: Arc<Waiting>| waiting.lock().outcome.take();

        assert!(stand().stands_under(token(7)));
        assert!(!stand().stands_under(token(6)), "a push for the earlier place");

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
