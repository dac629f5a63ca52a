//! The other clients that this one deals with: of each a write end of its FIFO, kept open.
//!
//! Who hands a lock back and forth meets the same few clients again and again: whether they live, to
//! tell them, to hear of their deaths. Opening their FIFOs was a quarter of a turn's system calls.
//!
//! # What a kept end knows
//! - *That its client died*: the kernel says `POLLERR` as soon as nobody reads. Dead is for ever, so
//!   the end is closed and the FIFO buried. Where somebody waits for that, the end is in the
//!   runtime's epoll too, and stays there for the next who waits.
//! - *Not that its FIFO is no more where it was.* A client whose FIFO was deleted or moved counts as
//!   dead though it runs. So the path is looked at again when the last look is [`TRUSTED`] ago. Until
//!   then such a client is taken for alive, which only ever makes others wait: until the next
//!   heartbeat, as those do that watched it already.
//! - *That it is that client's*: names are random and never used again, and what was opened once
//!   stays the same FIFO whatever its path leads to.
//!
//! Keeping an end open keeps nobody alive: only who reads is. At most [`KEPT`] are kept that nobody waits
//! for, and none when descriptors run out.

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

/// How many are kept that nobody here waits for.
const KEPT: usize = 32;
/// For how long a path that was looked at is not looked at again.
const TRUSTED: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Peers {
    clients: Clients,
    known: HashMap<String, Peer>,
    uses: u64,
}

/// One client's FIFO, to write into. What is listened to is another descriptor, in the runtime's epoll.
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

/// Another client that lived when we last looked.
#[derive(Debug)]
pub(super) struct Peer {
    fifo: WriteEnd,
    inode: Inode,
    looked: Instant,
    used: u64,
    /// Those here that wait for its death.
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

impl Peers {
    pub(super) fn new(clients: Clients) -> Self {
        Self { clients, known: HashMap::new(), uses: 0 }
    }

    /// Looks whether this session lives, and keeps its write end. The dead are buried.
    pub(super) fn probe(&mut self, session: &str) -> Life<WriteEnd> {
        if let Some(fifo) = self.kept(session) {
            return Life::Alive(Some(fifo));
        }
        match self.open(session) {
            Life::Dead => {
                // Those who wait for that are told by who listens for them.
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
            // There may be a descriptor for it when others are closed.
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
        let (looked, used) = (Instant::now(), self.uses);
        let peer = Peer { fifo, inode, looked, used, waiters, death };
        self.known.insert(session.to_owned(), peer);
    }

    /// The kept end of one that certainly lived a moment ago.
    fn kept(&mut self, session: &str) -> Option<WriteEnd> {
        let peer = self.known.get_mut(session)?;
        if is_unread(&peer.fifo) {
            return None;
        }
        if peer.looked.elapsed() >= TRUSTED {
            if !self.clients.is_at(session, peer.inode) {
                return None;
            }
            peer.looked = Instant::now();
        }
        self.uses += 1;
        peer.used = self.uses;
        Some(peer.fifo.clone())
    }

    /// Lets a claim wait for this session's death; `listen` makes the task that tells of it. Tells
    /// whether it still lives.
    pub(super) fn watch(
        &mut self,
        id: ClaimId,
        session: &str,
        listen: impl FnOnce(File) -> Option<(Arc<Sender>, AbortHandle)>,
    ) -> bool {
        // One that is listened to tells of its death by itself.
        if self.known.get(session).is_none_or(|peer| peer.death.is_none()) {
            match self.open(session) {
                Life::Dead => return false,
                // Who is not ours to open is looked at again by the heartbeat.
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

    /// A claim waits for these deaths no more.
    pub(super) fn unwatch(&mut self, id: ClaimId, sessions: &[String]) {
        for session in sessions {
            if let Some(peer) = self.known.get_mut(session) {
                peer.waiters.remove(&id);
            }
        }
        self.let_go(KEPT);
    }

    /// This one died: who waited for that?
    pub(super) fn died(&mut self, session: &str) -> Vec<ClaimId> {
        let peer = self.known.remove(session);
        peer.map(|peer| peer.waiters.iter().copied().collect()).unwrap_or_default()
    }

    /// Closes ends that nobody waits for, the longest unused first, until only so many are left. Tells
    /// whether it closed any.
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

/// Whether the last one who read it is gone.
fn is_unread(fifo: &WriteEnd) -> bool {
    let mut one = [PollFd::new(fifo, PollFlags::empty())];
    // A failure to ask tells nothing.
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
    fn a_kept_end_sees_the_death_of_its_client_at_once() {
        let (_tmp, place, clients) = store();
        let mut peers = Peers::new(clients.clone());
        let session = Session::begin(&place, &clients).unwrap();
        let id = session.id().to_owned();
        let Life::Alive(Some(first)) = peers.probe(&id) else { panic!("dead") };
        let Life::Alive(Some(again)) = peers.probe(&id) else { panic!("dead") };
        assert_eq!(first.as_fd().as_raw_fd(), again.as_fd().as_raw_fd(), "opened twice");
        // As kill -9 leaves it: closed, and still there.
        let (path, moved) = (clients.dir.join(&id), clients.dir.join("m"));
        fs::rename(&path, &moved).unwrap();
        drop(session);
        fs::rename(&moved, &path).unwrap();
        assert!(matches!(peers.probe(&id), Life::Dead));
        assert!(!path.exists() && peers.known.is_empty());
    }

    #[test]
    fn f04_a_client_whose_fifo_is_gone_is_dead_soon_though_it_runs() {
        let (_tmp, place, clients) = store();
        let mut peers = Peers::new(clients.clone());
        let session = Session::begin(&place, &clients).unwrap();
        assert!(matches!(peers.probe(session.id()), Life::Alive(Some(_))));
        let path = clients.dir.join(session.id());
        fs::remove_file(&path).unwrap();
        std::thread::sleep(TRUSTED);
        assert!(matches!(peers.probe(session.id()), Life::Dead));
        // Nor is another FIFO of that name the one that was kept.
        let other = Session::begin(&place, &clients).unwrap();
        let kept = clients.dir.join(other.id());
        assert!(matches!(peers.probe(other.id()), Life::Alive(Some(_))));
        fs::rename(&kept, &path).unwrap();
        std::thread::sleep(TRUSTED);
        assert!(matches!(peers.probe(other.id()), Life::Dead));
    }

    #[test]
    fn f42_only_so_many_are_kept_that_nobody_waits_for() {
        let (_tmp, place, clients) = store();
        let mut peers = Peers::new(clients.clone());
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
