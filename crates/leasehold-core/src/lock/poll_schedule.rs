//! Schedules polls of lock queues: as soon as the store reports a change, and periodically
//! otherwise.
//!
//! # Why no change is missed
//! - *The subscription begins before the first poll*, so the store reports every change after that
//!   poll. If the subscription breaks or the store does not report changes, the polls are only
//!   periodic.
//! - *After a later subscription*, including a repeated one, a poll follows [soon](CATCH_UP_PAUSE),
//!   because earlier changes are not reported.
//! - *Only a poll consumes a notification.* If the task is dropped while it waits or polls, the
//!   notification stays pending.
//! - *A change that is never reported*, such as an unnoticed expiry of a lease, is found by the
//!   next periodic poll.
//!
//! Even if there are many changes, there is [a pause](SHORTEST_PAUSE) between two polls.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::client::core::Core;
use crate::store::{Follow, Queues};
use crate::util::clock::Moment;

/// The shortest pause between two polls.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause while the store reports changes.
const NOTIFIED_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause between two polls if a new subscription began between them.
const CATCH_UP_PAUSE: Duration = Duration::from_millis(500);
/// The time limit for a subscription, after which polling continues without it.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

/// A schedule of polls.
#[derive(Debug)]
pub(crate) struct PollSchedule {
    core: Arc<Core>,
    /// The queues to follow, or `None` if the name is invalid or the store does not report changes.
    queues: Option<Queues>,
    /// The longest pause while the store does not report changes.
    every: Duration,
    /// Whether the caller has set `every`. Then `every` is the limit even if the store reports
    /// changes.
    chosen: bool,
    follow: Option<Follow>,
    /// Whether no poll has been made since the subscription began.
    unpolled: bool,
    /// The time of the last poll.
    last_poll: Option<Moment>,
    /// Whether a poll is due that has not been made yet.
    due: bool,
}

/// A clone has its own subscription, and starts with its own first poll.
impl Clone for PollSchedule {
    fn clone(&self) -> Self {
        let (core, queues) = (self.core.clone(), self.queues.clone());
        Self { core, queues, follow: None, unpolled: false, last_poll: None, due: false, ..*self }
    }
}

impl PollSchedule {
    pub(crate) fn new(core: &Arc<Core>, queues: Option<Queues>, every: Duration) -> Self {
        let core = core.clone();
        Self {
            core,
            queues,
            every,
            chosen: false,
            follow: None,
            unpolled: false,
            last_poll: None,
            due: false,
        }
    }

    /// Sets the longest pause, even while the store reports changes.
    pub(crate) fn every(&mut self, pause: Duration) {
        (self.every, self.chosen) = (pause, true);
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Waits until a poll is due. The first one is due immediately. A poll stays due until
    /// [`polled`](Self::polled) is called.
    pub(crate) async fn until_due(&mut self) {
        if self.due {
            return;
        }
        let is_first = self.last_poll.is_none();
        if self.follow.is_none() {
            self.subscribe().await;
        }
        if !is_first {
            self.pause().await;
        }
        self.due = true;
    }

    /// Records that a poll was made, and whether it succeeded.
    pub(crate) fn polled(&mut self, succeeded: bool) {
        self.last_poll = Some(self.core.clock.now());
        (self.due, self.unpolled) = (false, false);
        if !succeeded {
            // The cause of the failure may also have broken the subscription.
            self.follow = None;
        }
    }

    async fn subscribe(&mut self) {
        let Some(queues) = &self.queues else { return };
        let followed = {
            let followed = async { self.core.ours()?.follow(queues).await };
            let mut followed = pin!(followed);
            let followed = self.core.background.with_runtime(followed.as_mut());
            self.core.background.within(|| SUBSCRIBE_TIMEOUT, followed).await
        };
        // If following fails now, polling continues, and the next round tries again.
        match followed {
            Some(Ok(Some(follow))) => (self.follow, self.unpolled) = (Some(follow), true),
            // The store does not support subscriptions, so the client does not try again.
            Some(Ok(None)) => self.queues = None,
            Some(Err(_)) | None => {}
        }
    }

    async fn pause(&self) {
        let since = self.last_poll.map_or(Duration::ZERO, |at| self.core.clock.now().since(at));
        let most = match &self.follow {
            Some(_) if self.unpolled => CATCH_UP_PAUSE.min(self.every),
            Some(_) if !self.chosen => NOTIFIED_PAUSE.max(self.every),
            _ => self.every,
        };
        let until = |pause: Duration| self.core.background.sleep(pause.saturating_sub(since));
        until(SHORTEST_PAUSE.min(most)).await;
        let Some(follow) = &self.follow else { return until(most).await };
        tokio::select! {
            biased;
            () = follow.changed() => {}
            () = until(most) => {}
        }
    }
}
