//! One client's session: a FIFO that is its sign of life and its inbox in one.
//!
//! **Alive** is who has the FIFO's read end: only its client opened it for reading. The kernel
//! closes it with the process, however that ends, and a process that is stopped still has it.
//! Whoever wants to know opens it for writing without blocking: `ENXIO` (nobody reads) and
//! `ENOENT` mean dead, and dead is for ever: ids are random and never used again, and a FIFO gets
//! its name only after it was opened, so none is ever seen before its life began. Everything else,
//! `EACCES` too, counts as alive: never take a lock away on a doubt.
//!
//! **Gone.** To everybody else we live only while our FIFO is where they look for it. If it is not
//! (deleted, or a directory above it moved, replaced, or mounted over), others take us for dead, or
//! are in another store. So every join and every renewal looks there first, and what is gone once
//! is gone for good: the FIFO is unlinked wherever it is now, so that what we held is not found
//! held by somebody alive when the directory is moved back.
//!
//! **Who is told.** A write end that is kept open (`peers.rs`) gets `EPOLLERR` when the last read end
//! closes: that is how a waiter learns of a death without asking. The descriptor is close-on-exec; a child
//! that inherits it on purpose ([`Store::lifeline`](leasehold_core::store::Store::lifeline)) keeps the
//! session alive after its parent.
//!
//! **Inbox.** Who grants a claim writes one line, `granted ID TOKEN` or `ask ID`, in one piece
//! (shorter than `PIPE_BUF`) and without blocking. It is a hint: a full pipe or a death in between
//! loses it, and the heartbeat is the fallback. Who holds is told `ask ID` when it was evicted. What is no
//! such line is skipped.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::net::unix::pipe::Sender;

use super::fault::fault;
use super::held::{self, Inode};
use super::place::Place;
use super::rights::Acting;
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Error, ErrorKind, Result, Token};

/// The longest line that is believed to be ours.
const LONGEST_LINE: usize = 128;
/// What the name of a FIFO ends with until it is a session's.
pub(super) const UNBORN: &str = ".new~";

/// This client's session, until it is dropped.
#[derive(Debug)]
pub(super) struct Session {
    id: String,
    path: PathBuf,
    fifo: Arc<File>,
    inode: Inode,
    /// The directory that it was made in, wherever that is now.
    clients: File,
}

impl Session {
    /// Begins a session in the directory of all of them.
    pub(super) fn begin(place: &Place, clients: &Clients) -> Result<Self> {
        let clients = &clients.dir;
        place.create_below(clients)?;
        let id = ClaimId::random()?.to_hex();
        let path = clients.join(&id);
        let unborn = clients.join(format!("{id}{UNBORN}"));
        let mode = place.rights.inbox_mode();
        let born = (|| {
            let bits = Mode::from_raw_mode(mode);
            rustix::fs::mknodat(rustix::fs::CWD, &unborn, FileType::Fifo, bits, 0)?;
            let fifo = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed())
                .open(&unborn)
                .map(held::unnoted)?;
            place.rights.share(&fifo, mode);
            fs::rename(&unborn, &path)?;
            Ok((Inode::of(&fifo)?, Arc::new(fifo), File::open(clients)?))
        })();
        if born.is_err() {
            let _ = fs::remove_file(&unborn);
        }
        let (inode, fifo, clients) = born.map_err(|e| fault("create the FIFO", &path, e))?;
        Ok(Self { id, path, fifo, inode, clients })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Whether others find us no more: whatever we have, or take, is taken by others too. On a
    /// doubt they do.
    pub(super) fn is_gone(&self) -> bool {
        let gone = matches!(self.inode.at_path(&self.path), Ok(None));
        if gone {
            self.unlink();
        }
        gone
    }

    /// Fails if we are [gone](Self::is_gone).
    pub(super) fn check(&self) -> Result<()> {
        match self.is_gone() {
            false => Ok(()),
            true => {
                let what = format!(
                    "the session file {:?} of this client is gone: it was deleted, or the store's \
                     directory was moved or replaced",
                    self.path.to_string_lossy()
                );
                Err(Error::new(ErrorKind::Corrupt, what).with_hint("connect again"))
            }
        }
    }

    fn unlink(&self) {
        let _ = rustix::fs::unlinkat(&self.clients, self.id.as_str(), AtFlags::empty());
    }

    pub(super) fn lifeline(&self) -> BorrowedFd<'_> {
        self.fifo.as_fd()
    }

    /// The FIFO that others write to.
    pub(super) fn inbox(&self) -> Arc<File> {
        self.fifo.clone()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// The directory of all sessions.
#[derive(Clone, Debug)]
pub(super) struct Clients {
    pub(super) dir: PathBuf,
    acting: Acting,
}

impl Clients {
    pub(super) fn of(place: &Place) -> Self {
        Self { dir: place.root.join("clients"), acting: place.acting }
    }

    /// Looks whether this session lives. The dead are buried: their FIFO is unlinked.
    pub(super) fn probe(&self, id: &str) -> Life {
        let _as_owner = self.acting.now();
        probe(&self.dir, id)
    }

    /// Whether this FIFO is where others look for that session. On a doubt it is.
    pub(super) fn is_at(&self, id: &str, fifo: Inode) -> bool {
        let _as_owner = self.acting.now();
        !matches!(fifo.at_path(&self.dir.join(id)), Ok(None))
    }
}

/// Whether a session lives.
#[derive(Debug)]
pub(super) enum Life<F = File> {
    /// Somebody has its read end. With its write end, if we may open that.
    Alive(Option<F>),
    /// Gone, for ever.
    Dead,
}

fn probe(clients: &Path, id: &str) -> Life {
    // Read from a file that others can write: a name of ours, or no session at all.
    if ClaimId::from_hex(id).is_none() {
        return Life::Dead;
    }
    let path = clients.join(id);
    let opened = OpenOptions::new()
        .write(true)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed())
        .open(&path);
    match opened {
        Ok(fifo) => Life::Alive(Some(fifo)),
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::NXIO) => {
                // A socket that nobody listens at is answered so too, and is none of ours.
                if fs::symlink_metadata(&path).is_ok_and(|seen| seen.file_type().is_fifo()) {
                    let _ = fs::remove_file(&path);
                }
                Life::Dead
            }
            Some(Errno::NOENT) => Life::Dead,
            _ => Life::Alive(None),
        },
    }
}

/// Resolves when the session whose write end this is has died.
pub(super) async fn death(fifo: &Sender) {
    while let Ok(ready) = fifo.ready(Interest::ERROR).await {
        if ready.is_error() {
            return;
        }
    }
}

/// Tells a session something about one of its claims, if there is room in its inbox.
pub(super) fn tell(fifo: impl AsFd, id: ClaimId, signal: Signal) {
    let line = match signal {
        Signal::Granted(token) => format!("granted {} {token}\n", id.to_hex()),
        Signal::Ask => format!("ask {}\n", id.to_hex()),
    };
    // SIGPIPE is ignored by Rust's runtime; a failure is a lost hint.
    let _ = rustix::io::write(fifo, line.as_bytes());
}

/// Cuts what arrives into lines, and keeps only what is one of ours.
#[derive(Debug, Default)]
pub(super) struct Lines {
    begun: Vec<u8>,
    too_long: bool,
}

impl Lines {
    pub(super) fn feed(&mut self, bytes: &[u8], told: &mut impl FnMut(ClaimId, Signal)) {
        for &byte in bytes {
            if byte != b'\n' {
                self.too_long |= self.begun.len() == LONGEST_LINE;
                if !self.too_long {
                    self.begun.push(byte);
                }
                continue;
            }
            let line = std::str::from_utf8(&self.begun).ok().filter(|_| !self.too_long);
            if let Some((id, signal)) = line.and_then(parse) {
                told(id, signal);
            }
            self.begun.clear();
            self.too_long = false;
        }
    }
}

fn parse(line: &str) -> Option<(ClaimId, Signal)> {
    let mut words = line.split(' ');
    let (verb, id) = (words.next()?, ClaimId::from_hex(words.next()?)?);
    let signal = match verb {
        "granted" => Signal::Granted(words.next()?.parse::<Token>().ok()?),
        "ask" => Signal::Ask,
        _ => return None,
    };
    words.next().is_none().then_some((id, signal))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(root: &Path) -> Session {
        let place = Place::find(&format!("file:{}", root.display())).unwrap();
        Session::begin(&place, &Clients::of(&place)).unwrap()
    }

    #[test]
    fn a_session_lives_as_long_as_its_read_end() {
        let tmp = tempfile::tempdir().unwrap();
        let clients = tmp.path().join("clients");
        let session = begin(tmp.path());
        let id = session.id().to_owned();
        assert!(matches!(probe(&clients, &id), Life::Alive(Some(_))));
        session.check().unwrap();
        drop(session);
        assert!(matches!(probe(&clients, &id), Life::Dead), "unlinked is dead");

        // As kill -9 leaves it: closed, but not unlinked. Looking at it buries it.
        let session = begin(tmp.path());
        let (id, path, moved) = (session.id().to_owned(), session.path.clone(), clients.join("m"));
        fs::rename(&path, &moved).unwrap();
        drop(session);
        fs::rename(&moved, &path).unwrap();
        assert!(matches!(probe(&clients, &id), Life::Dead));
        assert!(!path.exists());
    }

    #[test]
    fn a_deleted_fifo_is_noticed_by_its_client() {
        let tmp = tempfile::tempdir().unwrap();
        let clients = tmp.path().join("clients");
        let session = begin(tmp.path());
        fs::remove_dir_all(&clients).unwrap();
        assert_eq!(session.check().unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn s90_a_session_read_from_a_file_is_never_a_path() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("x"), "").unwrap();
        fs::create_dir(tmp.path().join("clients")).unwrap();
        assert!(matches!(probe(&tmp.path().join("clients"), "../x"), Life::Dead));
        assert!(matches!(probe(&tmp.path().join("clients"), ""), Life::Dead));
        assert!(tmp.path().join("x").exists());
    }

    #[test]
    fn rubbish_in_the_inbox_is_skipped() {
        let id = ClaimId::random().unwrap();
        let mut told = Vec::new();
        let mut lines = Lines::default();
        let mut feed = |bytes: &[u8]| lines.feed(bytes, &mut |id, signal| told.push((id, signal)));
        feed(b"\n\n\xff\xfe\nask\nask me\ngranted 1 2\n");
        feed(&[b'x'; 100_000]);
        feed(format!("\nask {} more\n", id.to_hex()).as_bytes());
        feed(format!("granted {} 0\nask {}", id.to_hex(), id.to_hex()).as_bytes());
        feed(format!("\ngranted {} 77\n", id.to_hex()).as_bytes());
        assert_eq!(told, [(id, Signal::Ask), (id, Signal::Granted(Token::new(77).unwrap()))]);
        assert!(lines.begun.capacity() < 1_000);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_line_from_outside_is_news_or_none(text in testbed::texts(&[
            "granted 0123456789abcdef0123456789abcdef 42", "ask 0123456789abcdef0123456789abcdef",
        ])) {
            if let Some((id, signal)) = parse(&text) {
                let written = match signal {
                    Signal::Granted(token) => format!("granted {} {token}", id.to_hex()),
                    Signal::Ask => format!("ask {}", id.to_hex()),
                };
                proptest::prop_assert_eq!(parse(&written), Some((id, signal)));
            }
        }
    }
}
