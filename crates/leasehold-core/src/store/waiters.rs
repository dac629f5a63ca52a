//! The waiters of this client, and their notifications.
//!
//! A waiter is registered before its claim is sent, so that every grant finds its waiter. For
//! stores that are notified of grants by messages.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::inbox::Inbox;
use crate::types::answer::Signal;
use crate::types::claim::ClaimId;
use crate::util::locked::locked;

/// The waiters, each with a value that the store keeps for it.
#[derive(Debug)]
pub struct Waiters<T = ()> {
    all: Mutex<HashMap<ClaimId, Arc<Waiter<T>>>>,
    /// Notified when a claim is registered.
    more: Notify,
}

#[derive(Debug)]
struct Waiter<T> {
    kept: T,
    inbox: Inbox,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self { all: Mutex::default(), more: Notify::new() }
    }
}

impl<T: Clone> Waiters<T> {
    /// Registers a claim, and returns the value that is kept for it. The value is created when the
    /// claim is first registered.
    pub fn enlist(&self, id: ClaimId, keep: impl FnOnce() -> T) -> T {
        let waiter = |kept| Waiter { kept, inbox: Inbox::default() };
        let kept = {
            let mut all = locked(&self.all);
            all.entry(id).or_insert_with(|| Arc::new(waiter(keep()))).kept.clone()
        };
        self.more.notify_one();
        kept
    }

    /// Returns the value of a claim that was last seen waiting and has not been notified of a grant
    /// since.
    pub fn waiting(&self, id: ClaimId) -> Option<T> {
        let waiter = locked(&self.all).get(&id).cloned()?;
        waiter.inbox.granted().is_none().then(|| waiter.kept.clone())
    }

    /// Returns the value that is kept for a claim, if the claim is registered.
    pub fn kept(&self, id: ClaimId) -> Option<T> {
        locked(&self.all).get(&id).map(|waiter| waiter.kept.clone())
    }

    /// Returns the values of all claims.
    pub fn all_kept(&self) -> Vec<T> {
        locked(&self.all).values().map(|waiter| waiter.kept.clone()).collect()
    }

    /// Removes a claim.
    pub fn dismiss(&self, id: ClaimId) {
        locked(&self.all).remove(&id);
    }

    /// Returns whether this claim is registered.
    pub fn has(&self, id: ClaimId) -> bool {
        locked(&self.all).contains_key(&id)
    }

    /// Notifies a waiter, if it is registered.
    pub fn notify(&self, id: ClaimId, signal: Signal) {
        let waiter = locked(&self.all).get(&id).cloned();
        if let Some(waiter) = waiter {
            waiter.inbox.notify(signal);
        }
    }

    /// Makes all waiters poll, because notifications may have been missed.
    pub fn ask_all(&self) {
        let all: Vec<ClaimId> = locked(&self.all).keys().copied().collect();
        for id in all {
            self.notify(id, Signal::Ask);
        }
    }

    /// Returns how many waiters have not been notified of a grant.
    pub fn count(&self) -> usize {
        locked(&self.all).values().filter(|w| w.inbox.granted().is_none()).count()
    }

    /// Waits until a waiter has been registered since the last call.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No registration is missed.
    pub async fn more(&self) {
        self.more.notified().await;
    }

    /// Waits for the next notification of a claim and returns it. Returns immediately for a claim
    /// that is not registered.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No notification is missed.
    pub async fn news(&self, id: ClaimId) -> Signal {
        let waiter = locked(&self.all).get(&id).cloned();
        match waiter {
            Some(waiter) => waiter.inbox.news().await,
            None => Signal::Ask,
        }
    }
}
