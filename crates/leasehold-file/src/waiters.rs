//! The waiters of this process: their notifications, and the sessions whose deaths they watch.
//!
//! A waiter is registered inside the section that adds its claim to the queue, so that every
//! notification finds it. All waiters of this process share one watch per session (`peers.rs`).

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::net::unix::pipe::Sender;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::peers::{PeerRegistry, WriteEnd};
use super::session::{self, Clients, Life};
use leasehold_core::ClaimId;
use leasehold_core::kit::{Inbox, locked};
use leasehold_core::store::Signal;

#[derive(Debug)]
pub(super) struct Waiters {
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    waiters: HashMap<ClaimId, Waiter>,
    peers: PeerRegistry,
}

#[derive(Debug, Default)]
struct Waiter {
    inbox: Arc<Inbox>,
    watching: Vec<String>,
}

impl Waiters {
    pub(super) fn new(clients: Clients, runtime: Handle) -> Arc<Self> {
        let state = State { waiters: HashMap::new(), peers: PeerRegistry::new(clients) };
        Arc::new(Self { runtime, state: Mutex::new(state) })
    }

    /// Checks whether a session lives, using the write ends that [`PeerRegistry`] keeps.
    pub(super) fn probe(&self, session: &str) -> Life<WriteEnd> {
        self.lock().peers.probe(session)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two consistent states.
        locked(&self.state)
    }

    /// Stores notifications for this claim from now on. Earlier ones are covered by the result of
    /// the section that calls this function.
    pub(super) fn enlist(&self, id: ClaimId) {
        let inbox = self.lock().waiters.entry(id).or_default().inbox.clone();
        inbox.asked();
    }

    /// Removes a claim that does not wait any more.
    pub(super) fn dismiss(&self, id: ClaimId) {
        let mut state = self.lock();
        if let Some(waiter) = state.waiters.remove(&id) {
            state.peers.unwatch(id, &waiter.watching);
        }
    }

    /// Notifies a claim. Returns whether it was waiting here, which is not the case after a grant.
    pub(super) fn notify(&self, id: ClaimId, signal: Signal) -> bool {
        let inbox = {
            let mut state = self.lock();
            let Some(waiter) = state.waiters.get_mut(&id) else { return false };
            let inbox = waiter.inbox.clone();
            if let Signal::Granted(_) = signal {
                // A holder has no predecessor to watch.
                let watching = std::mem::take(&mut waiter.watching);
                state.peers.unwatch(id, &watching);
            }
            inbox
        };
        let waited = inbox.granted().is_none();
        inbox.notify(signal);
        waited
    }

    /// Returns whether at most one claim here still waits.
    pub(super) fn has_but_one(&self) -> bool {
        let state = self.lock();
        state.waiters.values().filter(|w| w.inbox.granted().is_none()).nth(1).is_none()
    }

    /// Waits for the next notification of a claim. Returns immediately for a claim that does not
    /// wait here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        let inbox = self.lock().waiters.get(&id).map(|waiter| waiter.inbox.clone());
        match inbox {
            Some(inbox) => inbox.news().await,
            None => Signal::Ask,
        }
    }

    /// Makes this claim watch exactly these sessions. Returns whether all of them are still alive.
    pub(super) fn watch(self: &Arc<Self>, id: ClaimId, sessions: Vec<String>) -> bool {
        let mut state = self.lock();
        let Some(waiter) = state.waiters.get_mut(&id) else { return true };
        let before = std::mem::replace(&mut waiter.watching, sessions.clone());
        let ended: Vec<String> = before.into_iter().filter(|s| !sessions.contains(s)).collect();
        let mut all_live = true;
        for session in sessions {
            let listen = |fifo| self.await_death(&session, fifo);
            all_live &= state.peers.watch(id, &session, listen);
        }
        state.peers.unwatch(id, &ended);
        all_live
    }

    /// Starts to watch a session. Returns `None` without free descriptors or memory, in which case
    /// the heartbeat checks the session.
    fn await_death(
        self: &Arc<Self>,
        session: &str,
        fifo: File,
    ) -> Option<(Arc<Sender>, AbortHandle)> {
        let _context = self.runtime.enter();
        let fifo = Arc::new(Sender::from_file(fifo).ok()?);
        let target = fifo.clone();
        let (waiters, session) = (Arc::downgrade(self), session.to_owned());
        let task = self.runtime.spawn(async move {
            session::death(&target).await;
            if let Some(waiters) = waiters.upgrade() {
                waiters.died(&session);
            }
        });
        Some((fifo, task.abort_handle()))
    }

    fn died(&self, session: &str) {
        let dead = self.lock().peers.died(session);
        for id in dead {
            self.notify(id, Signal::Ask);
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.waiters.len(), state.peers.watched())
    }
}
