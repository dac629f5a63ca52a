//! The waiters of this client, and what they were told.
//!
//! A waiter is enlisted before its claim goes out, so that no grant finds nobody; what it is told
//! is kept until it leaves, so that nothing is lost between the answer "waiting" and `changed`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::claim::{ClaimId, Token};
use crate::store::Signal;

#[derive(Debug, Default)]
pub(super) struct Waiters {
    all: Mutex<HashMap<ClaimId, Arc<Waiter>>>,
    /// Somebody was enlisted.
    more: Notify,
}

#[derive(Debug, Default)]
struct Waiter {
    told: Mutex<Told>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Told {
    granted: Option<Token>,
    ask: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs between two consistent states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiters {
    pub(super) fn enlist(&self, id: ClaimId) {
        locked(&self.all).entry(id).or_default();
        self.more.notify_one();
    }

    /// Tells whether it was enlisted.
    pub(super) fn dismiss(&self, id: ClaimId) -> bool {
        locked(&self.all).remove(&id).is_some()
    }

    /// Whether this claim was last seen waiting.
    pub(super) fn has(&self, id: ClaimId) -> bool {
        locked(&self.all).contains_key(&id)
    }

    pub(super) fn tell(&self, id: ClaimId, signal: Signal) {
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
    pub(super) fn ask_all(&self) {
        let all: Vec<ClaimId> = locked(&self.all).keys().copied().collect();
        for id in all {
            self.tell(id, Signal::Ask);
        }
    }

    /// How many have not been told of a grant.
    pub(super) fn count(&self) -> usize {
        locked(&self.all).values().filter(|w| locked(&w.told).granted.is_none()).count()
    }

    /// Resolves when somebody was enlisted since it last did.
    pub(super) async fn more(&self) {
        self.more.notified().await;
    }

    /// The next news of a claim; at once for one that does not wait here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
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
