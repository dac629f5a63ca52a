//! The waiters of this process: whom to wake, and whose deaths they must hear of.
//!
//! A waiter is enlisted inside the section that puts its claim into the queue, so that no push
//! finds nobody. One watch for each session is shared by all waiters here (`peers.rs`).

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::net::unix::pipe::Sender;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::peers::{Peers, WriteEnd};
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
    peers: Peers,
}

#[derive(Debug, Default)]
struct Waiter {
    inbox: Arc<Inbox>,
    watching: Vec<String>,
}

impl Waiters {
    pub(super) fn new(clients: Clients, runtime: Handle) -> Arc<Self> {
        let state = State { waiters: HashMap::new(), peers: Peers::new(clients) };
        Arc::new(Self { runtime, state: Mutex::new(state) })
    }

    /// Looks whether a session lives, as [`Peers`] know.
    pub(super) fn probe(&self, session: &str) -> Life<WriteEnd> {
        self.lock().peers.probe(session)
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
            state.peers.unwatch(id, &waiter.watching);
        }
    }

    /// Whether it waited here: whoever was told of its grant holds.
    pub(super) fn tell(&self, id: ClaimId, signal: Signal) -> bool {
        let inbox = {
            let mut state = self.lock();
            let Some(waiter) = state.waiters.get_mut(&id) else { return false };
            let inbox = waiter.inbox.clone();
            if let Signal::Granted(_) = signal {
                // Nothing is in its way any more.
                let watching = std::mem::take(&mut waiter.watching);
                state.peers.unwatch(id, &watching);
            }
            inbox
        };
        let waited = inbox.granted().is_none();
        inbox.tell(signal);
        waited
    }

    /// Whether there is no more than one here that still waits.
    pub(super) fn has_but_one(&self) -> bool {
        let state = self.lock();
        state.waiters.values().filter(|w| w.inbox.granted().is_none()).nth(1).is_none()
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
        let mut all_live = true;
        for session in sessions {
            let listen = |fifo| self.await_death(&session, fifo);
            all_live &= state.peers.watch(id, &session, listen);
        }
        state.peers.unwatch(id, &ended);
        all_live
    }

    /// Without descriptors or memory to wait with, the heartbeat looks again: `None`.
    fn await_death(
        self: &Arc<Self>,
        session: &str,
        fifo: File,
    ) -> Option<(Arc<Sender>, AbortHandle)> {
        let _context = self.runtime.enter();
        let fifo = Arc::new(Sender::from_file(fifo).ok()?);
        let told = fifo.clone();
        let (waiters, session) = (Arc::downgrade(self), session.to_owned());
        let task = self.runtime.spawn(async move {
            session::death(&told).await;
            if let Some(waiters) = waiters.upgrade() {
                waiters.died(&session);
            }
        });
        Some((fifo, task.abort_handle()))
    }

    fn died(&self, session: &str) {
        let told = self.lock().peers.died(session);
        for id in told {
            self.tell(id, Signal::Ask);
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.waiters.len(), state.peers.watched())
    }
}
