//! The waiters of this client: what they were told, and the task that watches for each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use leasehold_core::kit::{Inbox, locked};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Token};

#[derive(Debug, Default)]
pub(super) struct Waiters {
    all: Mutex<HashMap<ClaimId, Arc<Waiter>>>,
}

/// One place in a queue, and who stands there.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) token: Token,
    inbox: Inbox,
    /// Its task should look again, whatever it watches.
    look: Notify,
    task: Mutex<Task>,
}

#[derive(Debug, Default)]
enum Task {
    #[default]
    None,
    Of(AbortHandle),
    Ended,
}

impl Waiters {
    /// Enlists a claim that stands under this token; `None` if it is there already.
    pub(super) fn enlist(&self, id: ClaimId, token: Token) -> Option<Arc<Waiter>> {
        let mut all = locked(&self.all);
        if all.get(&id).is_some_and(|waiter| waiter.token == token) {
            return None;
        }
        let waiter = Arc::new(Waiter {
            token,
            inbox: Inbox::default(),
            look: Notify::new(),
            task: Mutex::default(),
        });
        if let Some(before) = all.insert(id, waiter.clone()) {
            before.end();
        }
        Some(waiter)
    }

    pub(super) fn dismiss(&self, id: ClaimId) {
        if let Some(waiter) = locked(&self.all).remove(&id) {
            waiter.end();
        }
    }

    pub(super) fn dismiss_all(&self) {
        for waiter in locked(&self.all).drain().map(|(_, waiter)| waiter) {
            waiter.end();
        }
    }

    /// Has the claim's task look again.
    pub(super) fn look(&self, id: ClaimId) {
        if let Some(waiter) = locked(&self.all).get(&id) {
            waiter.look.notify_one();
        }
    }

    /// The next news of a claim; at once for one that does not wait here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        let waiter = locked(&self.all).get(&id).cloned();
        match waiter {
            Some(waiter) => waiter.inbox.news().await,
            None => Signal::Ask,
        }
    }
}

impl Waiter {
    /// The task that watches for it, and ends when it is dismissed.
    pub(super) fn watched_by(&self, task: AbortHandle) {
        match &mut *locked(&self.task) {
            Task::Ended => task.abort(),
            slot => *slot = Task::Of(task),
        }
    }

    fn end(&self) {
        if let Task::Of(task) = std::mem::replace(&mut *locked(&self.task), Task::Ended) {
            task.abort();
        }
    }

    pub(super) fn tell(&self, signal: Signal) {
        self.inbox.tell(match signal {
            // It stands under this one, and is granted under no other.
            Signal::Granted(_) => Signal::Granted(self.token),
            Signal::Ask => Signal::Ask,
        });
    }

    /// Resolves when somebody wants its task to look again.
    pub(super) async fn wanted(&self) {
        self.look.notified().await;
    }
}
