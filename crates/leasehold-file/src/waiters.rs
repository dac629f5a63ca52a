//! The waiters of this process: whom to wake, and whose deaths they must hear of.
//!
//! A waiter is enlisted inside the section that puts its claim into the queue, so that no push
//! finds nobody. One watch for each session is shared by all waiters here.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::net::unix::pipe::Sender;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::session::{self, Clients, Life};
use leasehold_core::ClaimId;
use leasehold_core::kit::{Inbox, locked};
use leasehold_core::store::Signal;

#[derive(Debug)]
pub(super) struct Waiters {
    clients: Clients,
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiters: HashMap<ClaimId, Waiter>,
    watches: HashMap<String, Watch>,
}

#[derive(Debug, Default)]
struct Waiter {
    inbox: Arc<Inbox>,
    watching: Vec<String>,
}

#[derive(Debug)]
struct Watch {
    waiters: HashSet<ClaimId>,
    task: AbortHandle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Waiters {
    pub(super) fn new(clients: Clients, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { clients, runtime, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two consistent states.
        locked(&self.state)
    }

    /// Keeps what this claim is told from now on; what it was told before is answered by the
    /// section that this is called in.
    pub(super) fn enlist(&self, id: ClaimId) {
        let inbox = self.lock().waiters.entry(id).or_default().inbox.clone();
        inbox.asked();
    }

    /// Forgets a claim that waits no more.
    pub(super) fn dismiss(&self, id: ClaimId) {
        let mut state = self.lock();
        if let Some(waiter) = state.waiters.remove(&id) {
            state.unwatch(id, &waiter.watching);
        }
    }

    pub(super) fn tell(&self, id: ClaimId, signal: Signal) {
        let inbox = {
            let mut state = self.lock();
            let Some(waiter) = state.waiters.get_mut(&id) else { return };
            let inbox = waiter.inbox.clone();
            if let Signal::Granted(_) = signal {
                // Nothing is in its way any more.
                let watching = std::mem::take(&mut waiter.watching);
                state.unwatch(id, &watching);
            }
            inbox
        };
        inbox.tell(signal);
    }

    /// The next news of a claim; at once for one that does not wait here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        let inbox = self.lock().waiters.get(&id).map(|waiter| waiter.inbox.clone());
        match inbox {
            Some(inbox) => inbox.news().await,
            None => Signal::Ask,
        }
    }

    /// Lets this claim hear of the deaths of these sessions, and of no others. Tells whether they
    /// all still live.
    pub(super) fn watch(self: &Arc<Self>, id: ClaimId, sessions: Vec<String>) -> bool {
        let mut state = self.lock();
        let Some(waiter) = state.waiters.get_mut(&id) else { return true };
        let before = std::mem::replace(&mut waiter.watching, sessions.clone());
        let ended: Vec<String> = before.into_iter().filter(|s| !sessions.contains(s)).collect();
        state.unwatch(id, &ended);
        let mut all_live = true;
        for session in sessions {
            match state.watches.get_mut(&session) {
                Some(watch) => {
                    watch.waiters.insert(id);
                }
                None => match self.clients.probe(&session) {
                    Life::Dead => all_live = false,
                    // Not ours to open: the heartbeat looks again.
                    Life::Alive(None) => {}
                    Life::Alive(Some(fifo)) => {
                        if let Some(task) = self.await_death(&session, fifo) {
                            let waiters = HashSet::from([id]);
                            state.watches.insert(session, Watch { waiters, task });
                        }
                    }
                },
            }
        }
        all_live
    }

    /// Without descriptors or memory to wait with, the heartbeat looks again: `None`.
    fn await_death(self: &Arc<Self>, session: &str, fifo: std::fs::File) -> Option<AbortHandle> {
        let _context = self.runtime.enter();
        let fifo = Sender::from_file(fifo).ok()?;
        let (waiters, session) = (Arc::downgrade(self), session.to_owned());
        let task = self.runtime.spawn(async move {
            session::death(fifo).await;
            if let Some(waiters) = waiters.upgrade() {
                waiters.died(&session);
            }
        });
        Some(task.abort_handle())
    }

    fn died(&self, session: &str) {
        let watch = self.lock().watches.remove(session);
        for id in watch.iter().flat_map(|w| &w.waiters) {
            self.tell(*id, Signal::Ask);
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.waiters.len(), state.watches.len())
    }
}

impl State {
    fn unwatch(&mut self, id: ClaimId, sessions: &[String]) {
        for session in sessions {
            if let Some(watch) = self.watches.get_mut(session) {
                watch.waiters.remove(&id);
                if watch.waiters.is_empty() {
                    self.watches.remove(session);
                }
            }
        }
    }
}
