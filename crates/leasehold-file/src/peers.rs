//! The other clients that this one interacts with. Write ends of their FIFOs are kept open.
//!
//! Clients that hand a lock back and forth interact with the same few peers again and again. They
//! check whether these peers live, notify them, and watch for their deaths. Opening the FIFOs each
//! time would take a quarter of a hand-over's system calls.
//!
//! # What an open write end shows
//! - *The death of its client.* The kernel reports `POLLERR` as soon as no process reads. A dead
//!   client never lives again, so the end is closed and the FIFO removed. If a waiter watches the
//!   client, the end is also in the runtime's epoll, and stays there for the next waiter.
//! - *Not that the FIFO has moved.* A client whose FIFO was deleted or moved counts as dead
//!   although it runs. So the path is checked again if the last check is older than [`TRUSTED`].
//!   Until then such a client counts as alive. That only makes other clients wait until the next
//!   heartbeat, like those that were already watching it.
//! - *The identity of the client.* Names are random and never reused, and an open file stays the
//!   same FIFO whatever its path leads to.
//!
//! An open write end keeps no client alive, because only a reader counts. At most [`KEPT`] write
//! ends are kept that no waiter watches, and none when descriptors run out.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::unix::pipe::Sender;
use tokio::task::AbortHandle;

use super::held::Inode;
use super::session::{Clients, Life};
use leasehold_core::ClaimId;

/// Maximum number of write ends that are kept although no waiter of this client watches them.
const KEPT: usize = 32;
/// Time for which a checked path is not checked again.
const TRUSTED: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct PeerRegistry {
    clients: Clients,
    known: HashMap<String, Peer>,
    uses: u64,
}

/// A write end of one client's FIFO. `Listened` is a separate descriptor in the runtime's epoll.
#[derive(Clone, Debug)]
pub(super) enum WriteEnd {
    Plain(Arc<File>),
    Listened(Arc<Sender>),
}

impl AsFd for WriteEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(fifo) => fifo.as_fd(),
            Self::Listened(fifo) => fifo.as_fd(),
        }
    }
}

/// Another client that was alive at the last check.
#[derive(Debug)]
pub(super) struct Peer {
    fifo: WriteEnd,
    inode: Inode,
    checked: Instant,
    used: u64,
    /// The waiters of this client that watch for the peer's death.
    waiters: HashSet<ClaimId>,
    death: Option<AbortHandle>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(task) = &self.death {
            task.abort();
        }
    }
}

impl PeerRegistry {
    pub(super) fn new(clients: Clients) -> Self {
        Self { clients, known: HashMap::new(), uses: 0 }
    }

    /// Checks whether this session is alive, and caches the write end of its FIFO. Removes the FIFO
    /// of a dead session.
    pub(super) fn probe(&mut self, session: &str) -> Life<WriteEnd> {
        if let Some(fifo) = self.kept(session) {
            return Life::Alive(Some(fifo));
        }
        match self.open(session) {
            Life::Dead => {
                // The task that listens for the session's death notifies the waiters that watch it.
                if self.known.get(session).is_some_and(|peer| peer.death.is_none()) {
                    self.known.remove(session);
                }
                Life::Dead
            }
            Life::Alive(None) => Life::Alive(None),
            Life::Alive(Some(fifo)) => {
                let inode = Inode::of(&fifo);
                let fifo = WriteEnd::Plain(Arc::new(fifo));
                if let Ok(inode) = inode {
                    self.keep(session, fifo.clone(), inode, None);
                }
                Life::Alive(Some(fifo))
            }
        }
    }

    fn open(&mut self, session: &str) -> Life {
        match self.clients.probe(session) {
            // After closing other descriptors, one may be free for this FIFO.
            Life::Alive(None) if self.let_go(0) => self.clients.probe(session),
            life => life,
        }
    }

    fn keep(&mut self, session: &str, fifo: WriteEnd, inode: Inode, death: Option<AbortHandle>) {
        self.let_go(KEPT - 1);
        self.uses += 1;
        let waiters = match self.known.get_mut(session) {
            Some(before) => std::mem::take(&mut before.waiters),
            None => HashSet::new(),
        };
        let (checked, used) = (Instant::now(), self.uses);
        let peer = Peer { fifo, inode, checked, used, waiters, death };
        self.known.insert(session.to_owned(), peer);
    }

    /// Returns the kept write end of a client that was certainly alive a moment ago.
    fn kept(&mut self, session: &str) -> Option<WriteEnd> {
        let peer = self.known.get_mut(session)?;
        if is_unread(&peer.fifo) {
            return None;
        }
        if peer.checked.elapsed() >= TRUSTED {
            if !self.clients.is_at(session, peer.inode) {
                return None;
            }
            peer.checked = Instant::now();
        }
        self.uses += 1;
        peer.used = self.uses;
        Some(peer.fifo.clone())
    }

    /// Makes a claim watch for this session's death. `listen` creates the task that reports it.
    /// Returns whether the session still lives.
    pub(super) fn watch(
        &mut self,
        id: ClaimId,
        session: &str,
        listen: impl FnOnce(File) -> Option<(Arc<Sender>, AbortHandle)>,
    ) -> bool {
        // A session with a listening task reports its death on its own.
        if self.known.get(session).is_none_or(|peer| peer.death.is_none()) {
            match self.open(session) {
                Life::Dead => return false,
                // A FIFO that this user cannot open is checked by the heartbeat.
                Life::Alive(None) => {}
                Life::Alive(Some(fifo)) => {
                    if let (Ok(inode), Some((fifo, death))) = (Inode::of(&fifo), listen(fifo)) {
                        self.keep(session, WriteEnd::Listened(fifo), inode, Some(death));
                    }
                }
            }
        }
        if let Some(peer) = self.known.get_mut(session) {
            peer.waiters.insert(id);
        }
        true
    }

    /// Ends a claim's watch for these deaths.
    pub(super) fn unwatch(&mut self, id: ClaimId, sessions: &[String]) {
        for session in sessions {
            if let Some(peer) = self.known.get_mut(session) {
                peer.waiters.remove(&id);
            }
        }
        self.let_go(KEPT);
    }

    /// Removes a dead session, and returns the claims that watched it.
    pub(super) fn died(&mut self, session: &str) -> Vec<ClaimId> {
        let peer = self.known.remove(session);
        peer.map(|peer| peer.waiters.iter().copied().collect()).unwrap_or_default()
    }

    /// Closes write ends that no waiter watches, the least recently used first, until at most
    /// `most` are left. Returns whether any were closed.
    fn let_go(&mut self, most: usize) -> bool {
        let before = self.known.len();
        while self.known.len() > most {
            let idle = self.known.iter().filter(|(_, peer)| peer.waiters.is_empty());
            let oldest = idle.min_by_key(|(_, peer)| peer.used).map(|(session, _)| session.clone());
            let Some(oldest) = oldest else { break };
            self.known.remove(&oldest);
        }
        self.known.len() < before
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.known.values().filter(|peer| !peer.waiters.is_empty()).count()
    }
}

/// Returns whether the last reader is gone.
fn is_unread(fifo: &WriteEnd) -> bool {
    let mut one = [PollFd::new(fifo, PollFlags::empty())];
    // If the check fails, nothing is known.
    poll(&mut one, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && one[0].revents().contains(PollFlags::ERR)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::place::Place;
    use crate::session::Session;

    fn store() -> (tempfile::TempDir, Place, Clients) {
        let tmp = tempfile::tempdir().unwrap();
        let place = Place::find(&format!("file:{}", tmp.path().display())).unwrap();
        let clients = Clients::of(&place);
        (tmp, place, clients)
    }

    #[test]
    fn cached_fifo_detects_a_crashed_client_immediately() {
        let (_tmp, place, clients) = store();
        let mut peers = PeerRegistry::new(clients.clone());
        let session = Session::begin(&place, &clients).unwrap();
        let id = session.id().to_owned();
        let Life::Alive(Some(first)) = peers.probe(&id) else { panic!("dead") };
        let Life::Alive(Some(again)) = peers.probe(&id) else { panic!("dead") };
        assert_eq!(
            first.as_fd().as_raw_fd(),
            again.as_fd().as_raw_fd(),
            "the session's file was opened twice"
        );
        // This is the state after kill -9: the FIFO is closed, but still exists.
        let (path, moved) = (clients.dir.join(&id), clients.dir.join("m"));
        fs::rename(&path, &moved).unwrap();
        drop(session);
        fs::rename(&moved, &path).unwrap();
        assert!(matches!(peers.probe(&id), Life::Dead));
        assert!(!path.exists() && peers.known.is_empty());
    }

    // F04
    #[test]
    fn client_with_a_deleted_fifo_soon_counts_as_dead() {
        let (_tmp, place, clients) = store();
        let mut peers = PeerRegistry::new(clients.clone());
        let session = Session::begin(&place, &clients).unwrap();
        assert!(matches!(peers.probe(session.id()), Life::Alive(Some(_))));
        let path = clients.dir.join(session.id());
        fs::remove_file(&path).unwrap();
        std::thread::sleep(TRUSTED);
        assert!(matches!(peers.probe(session.id()), Life::Dead));
        // Another FIFO with that name is not the one that was kept.
        let other = Session::begin(&place, &clients).unwrap();
        let kept = clients.dir.join(other.id());
        assert!(matches!(peers.probe(other.id()), Life::Alive(Some(_))));
        fs::rename(&kept, &path).unwrap();
        std::thread::sleep(TRUSTED);
        assert!(matches!(peers.probe(other.id()), Life::Dead));
    }

    // F42
    #[test]
    fn number_of_cached_unwatched_peers_is_limited() {
        let (_tmp, place, clients) = store();
        let mut peers = PeerRegistry::new(clients.clone());
        let begin = |_| Session::begin(&place, &clients).unwrap();
        let sessions: Vec<Session> = (0..KEPT * 3).map(begin).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _context = runtime.enter();
        let listen = |fifo| {
            let task = runtime.spawn(std::future::pending::<()>());
            Some((Arc::new(Sender::from_file(fifo).unwrap()), task.abort_handle()))
        };
        let claim = ClaimId::random().unwrap();
        let watched: Vec<String> = sessions.iter().take(KEPT * 2).map(|s| s.id().into()).collect();
        for session in &watched {
            assert!(peers.watch(claim, session, listen));
        }
        for session in &sessions {
            assert!(matches!(peers.probe(session.id()), Life::Alive(Some(_))));
        }
        assert_eq!(peers.watched(), KEPT * 2);
        assert!(peers.known.len() <= KEPT * 2 + 1);
        peers.unwatch(claim, &watched);
        assert_eq!((peers.watched(), peers.known.len()), (0, KEPT));
        assert!(peers.let_go(0) && peers.known.is_empty());
    }
}
