//! The waiters of this client: the notifications for each, and the task that watches for it.

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

/// A waiting claim and its entry in a queue.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) token: Token,
    inbox: Inbox,
    /// Makes the task read the queue again, whatever the task watches.
    reread: Notify,
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
    /// Registers a claim whose entry has this token. Returns `None` if it is already registered
    /// with this token.
    pub(super) fn enlist(&self, id: ClaimId, token: Token) -> Option<Arc<Waiter>> {
        let mut all = locked(&self.all);
        if all.get(&id).is_some_and(|waiter| waiter.token == token) {
            return None;
        }
        let waiter = Arc::new(Waiter {
            token,
            inbox: Inbox::default(),
            reread: Notify::new(),
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

    /// Makes the claim's task read the queue again.
    pub(super) fn reread(&self, id: ClaimId) {
        if let Some(waiter) = locked(&self.all).get(&id) {
            waiter.reread.notify_one();
        }
    }

    /// Waits for the next notification of a claim. Returns immediately for a claim that does not
    /// wait here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        let waiter = locked(&self.all).get(&id).cloned();
        match waiter {
            Some(waiter) => waiter.inbox.news().await,
            None => Signal::Ask,
        }
    }
}

impl Waiter {
    /// Sets the task that watches for the claim. The task is aborted when the claim is dismissed.
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

    pub(super) fn notify(&self, signal: Signal) {
        self.inbox.notify(match signal {
            // The claim's entry has this token, and it cannot be granted with another one.
            Signal::Granted(_) => Signal::Granted(self.token),
            Signal::Ask => Signal::Ask,
        });
    }

    /// Waits until its task should read the queue again.
    pub(super) async fn reread_requested(&self) {
        self.reread.notified().await;
    }
}
