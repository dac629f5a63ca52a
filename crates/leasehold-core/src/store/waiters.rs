//! The waiters of this client, and what they were told.
//!
//! A waiter is enlisted before its claim goes out, so that no grant finds nobody; what it is told
//! is kept until it leaves, so that nothing is lost between the answer "waiting" and `changed`.
//! Shared by the stores that are told of grants by messages.

use crate::base::locked::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use crate::words::answer::Signal;
use crate::words::claim::ClaimId;
use crate::words::token::Token;

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
    told: Mutex<Told>,
    wake: Notify,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self { all: Mutex::default(), more: Notify::new() }
    }
}

#[derive(Debug, Default)]
struct Told {
    granted: Option<Token>,
    ask: bool,
}

impl<T: Clone> Waiters<T> {
    /// Enlists a claim; tells what is kept for it, which is made when it is enlisted first.
    pub fn enlist(&self, id: ClaimId, keep: impl FnOnce() -> T) -> T {
        let waiter = |kept| Waiter { kept, told: Mutex::default(), wake: Notify::new() };
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
        let granted = locked(&waiter.told).granted.is_some();
        (!granted).then(|| waiter.kept.clone())
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
        let Some(waiter) = locked(&self.all).get(&id).cloned() else { return };
        {
            let mut told = locked(&waiter.told);
            match signal {
                Signal::Granted(token) if told.granted == Some(token) => return,
                Signal::Granted(token) => told.granted = Some(token),
                Signal::Ask => told.ask = true,
            }
        }
        waiter.wake.notify_one();
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
        locked(&self.all).values().filter(|w| locked(&w.told).granted.is_none()).count()
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
        let Some(waiter) = locked(&self.all).get(&id).cloned() else { return Signal::Ask };
        loop {
            {
                let mut told = locked(&waiter.told);
                if let Some(token) = told.granted {
                    return Signal::Granted(token);
                }
                if std::mem::take(&mut told.ask) {
                    return Signal::Ask;
                }
            }
            waiter.wake.notified().await;
        }
    }
}
