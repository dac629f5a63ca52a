//! The waiters of this client, and what they were told.
//!
//! A waiter is enlisted before its claim goes out, so that no grant finds nobody. Shared by the stores
//! that are told of grants by messages.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::inbox::Inbox;
use crate::base::locked::locked;
use crate::words::answer::Signal;
use crate::words::claim::ClaimId;

/// The waiters, each with what the store keeps for it.
#[derive(Debug)]
pub struct Waiters<T = ()> {
    all: Mutex<HashMap<ClaimId, Arc<Waiter<T>>>>,
    /// Somebody was enlisted.
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
    /// Enlists a claim; tells what is kept for it, which is made when it is enlisted first.
    pub fn enlist(&self, id: ClaimId, keep: impl FnOnce() -> T) -> T {
        let waiter = |kept| Waiter { kept, inbox: Inbox::default() };
        let kept = {
            let mut all = locked(&self.all);
            all.entry(id).or_insert_with(|| Arc::new(waiter(keep()))).kept.clone()
        };
        self.more.notify_one();
        kept
    }

    /// What is kept for a claim that was last seen waiting and was not told of a grant since.
    pub fn waiting(&self, id: ClaimId) -> Option<T> {
        let waiter = locked(&self.all).get(&id).cloned()?;
        waiter.inbox.granted().is_none().then(|| waiter.kept.clone())
    }

    /// What is kept for a claim.
    pub fn kept(&self, id: ClaimId) -> Option<T> {
        locked(&self.all).get(&id).map(|waiter| waiter.kept.clone())
    }

    /// What is kept for each.
    pub fn all_kept(&self) -> Vec<T> {
        locked(&self.all).values().map(|waiter| waiter.kept.clone()).collect()
    }

    /// Forgets a claim.
    pub fn dismiss(&self, id: ClaimId) {
        locked(&self.all).remove(&id);
    }

    /// Whether this claim was last seen waiting.
    pub fn has(&self, id: ClaimId) -> bool {
        locked(&self.all).contains_key(&id)
    }

    /// Tells a waiter, if it is enlisted.
    pub fn tell(&self, id: ClaimId, signal: Signal) {
        let waiter = locked(&self.all).get(&id).cloned();
        if let Some(waiter) = waiter {
            waiter.inbox.tell(signal);
        }
    }

    /// Lets everybody ask: what was pushed meanwhile may have been missed.
    pub fn ask_all(&self) {
        let all: Vec<ClaimId> = locked(&self.all).keys().copied().collect();
        for id in all {
            self.tell(id, Signal::Ask);
        }
    }

    /// How many have not been told of a grant.
    pub fn count(&self) -> usize {
        locked(&self.all).values().filter(|w| w.inbox.granted().is_none()).count()
    }

    /// Resolves when somebody was enlisted since it last did.
    ///
    /// # Cancel safety
    /// May be dropped and called again: nothing is missed.
    pub async fn more(&self) {
        self.more.notified().await;
    }

    /// The next news of a claim; at once for one that does not wait here.
    ///
    /// # Cancel safety
    /// May be dropped and called again: nothing is missed.
    pub async fn news(&self, id: ClaimId) -> Signal {
        let waiter = locked(&self.all).get(&id).cloned();
        match waiter {
            Some(waiter) => waiter.inbox.news().await,
            None => Signal::Ask,
        }
    }
}
