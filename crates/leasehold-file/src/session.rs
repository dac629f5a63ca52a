//! One client's session: a FIFO that is both its sign of life and its inbox.
//!
//! **Alive.** A client is alive while the FIFO's read end is open, because only that client opened
//! the FIFO for reading. The kernel closes the read end when the process ends for whatever reason,
//! and a paused process keeps it open. To check, another client opens the FIFO for writing without
//! blocking. `ENXIO` (no reader) and `ENOENT` mean dead.
//!
//! A dead session never lives again. Ids are random and never reused, and a FIFO gets its name only
//! after it was opened, so no session is visible before it is alive. All other errors, including
//! `EACCES`, count as alive, because a lock is never taken away in case of doubt.
//!
//! **Gone.** For other clients, this client lives only while its FIFO is where they look for it. If
//! the FIFO was deleted, or a directory above it was moved, replaced or mounted over, other clients
//! consider this one dead or use another store. So every join and every renewal checks that path
//! first, and a session that is gone never returns. Its FIFO is unlinked wherever it is now.
//! Otherwise its old holds would seem to be alive if the directory is moved back.
//!
//! **Notifications of deaths.** A write end that is kept open (`peers.rs`) gets `EPOLLERR` when the
//! last read end is closed. So a waiter notices a death without polling. The descriptor is
//! close-on-exec. A child that inherits it on purpose
//! ([`Store::lifeline`](leasehold_core::store::Store::lifeline)) keeps the session alive after its
//! parent has ended.
//!
//! **Inbox.** A client that notifies a claim writes one line, `granted ID TOKEN` or `ask ID`. The
//! line is written in one piece (shorter than `PIPE_BUF`) and without blocking. The line is a hint.
//! It is lost if the pipe is full or the client crashes in between, and the heartbeat is the
//! fallback. An evicted holder receives `ask ID`. Other lines are ignored.

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
use super::permissions::Acting;
use super::place::Place;
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Error, ErrorKind, Result, Token};

/// Maximum length of a line that is accepted.
const LONGEST_LINE: usize = 128;
/// Suffix of a FIFO's name until the session starts.
pub(super) const UNBORN: &str = ".new~";

/// This client's session, until it is dropped.
#[derive(Debug)]
pub(super) struct Session {
    id: String,
    path: PathBuf,
    fifo: Arc<File>,
    inode: Inode,
    /// The directory in which the session was created, wherever that directory is now.
    clients: File,
}

impl Session {
    /// Starts a session in the directory of all sessions.
    pub(super) fn begin(place: &Place, clients: &Clients) -> Result<Self> {
        let clients = &clients.dir;
        place.create_below(clients)?;
        let id = ClaimId::random()?.to_hex();
        let path = clients.join(&id);
        let unborn = clients.join(format!("{id}{UNBORN}"));
        let mode = place.permissions.inbox_mode();
        let born = (|| {
            let bits = Mode::from_raw_mode(mode);
            rustix::fs::mknodat(rustix::fs::CWD, &unborn, FileType::Fifo, bits, 0)?;
            let fifo = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed())
                .open(&unborn)
                .map(held::unnoted)?;
            place.permissions.share(&fifo, mode);
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

    /// Returns whether other clients no longer find this one. Other clients may then acquire
    /// everything that this one holds or acquires. If the check fails, the session counts as not
    /// gone.
    pub(super) fn is_gone(&self) -> bool {
        let gone = matches!(self.inode.at_path(&self.path), Ok(None));
        if gone {
            self.unlink();
        }
        gone
    }

    /// Fails if this session is [gone](Self::is_gone).
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

    /// Returns the FIFO that other clients write to.
    pub(super) fn inbox(&self) -> Arc<File> {
        self.fifo.clone()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Directory of all sessions.
#[derive(Clone, Debug)]
pub(super) struct Clients {
    pub(super) dir: PathBuf,
    acting: Acting,
}

impl Clients {
    pub(super) fn of(place: &Place) -> Self {
        Self { dir: place.root.join("clients"), acting: place.acting }
    }

    /// Checks whether this session lives. Unlinks the FIFO of a dead session.
    pub(super) fn probe(&self, id: &str) -> Life {
        let _as_owner = self.acting.now();
        probe(&self.dir, id)
    }

    /// Returns whether this FIFO is where other clients look for that session. If the check fails,
    /// returns `true`.
    pub(super) fn is_at(&self, id: &str, fifo: Inode) -> bool {
        let _as_owner = self.acting.now();
        !matches!(fifo.at_path(&self.dir.join(id)), Ok(None))
    }
}

/// Whether a session lives.
#[derive(Debug)]
pub(super) enum Life<F = File> {
    /// A process has the FIFO's read end open. Contains a write end, if this user may open it.
    Alive(Option<F>),
    /// The session has ended forever.
    Dead,
}

fn probe(clients: &Path, id: &str) -> Life {
    // The id comes from a file that others can write, so it may not be a session's name.
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
                // A socket without a listener gives the same error, and is not leasehold's.
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

/// Waits until the session with this write end has died.
pub(super) async fn death(fifo: &Sender) {
    while let Ok(ready) = fifo.ready(Interest::ERROR).await {
        if ready.is_error() {
            return;
        }
    }
}

/// Sends a session a notification about one of its claims, if its inbox has room.
pub(super) fn notify(fifo: impl AsFd, id: ClaimId, signal: Signal) {
    let line = match signal {
        Signal::Granted(token) => format!("granted {} {token}\n", id.to_hex()),
        Signal::Ask => format!("ask {}\n", id.to_hex()),
    };
    // Rust's runtime ignores SIGPIPE. A failure only loses a hint.
    let _ = rustix::io::write(fifo, line.as_bytes());
}

/// Splits incoming bytes into lines, and passes on only valid ones.
#[derive(Debug, Default)]
pub(super) struct Lines {
    begun: Vec<u8>,
    too_long: bool,
}

impl Lines {
    pub(super) fn feed(&mut self, bytes: &[u8], notify: &mut impl FnMut(ClaimId, Signal)) {
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
                notify(id, signal);
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
        assert!(
            matches!(probe(&clients, &id), Life::Dead),
            "a session without a file must be dead"
        );

        // This is the state after kill -9: closed, but not unlinked. A check removes it.
        let session = begin(tmp.path());
        let (id, path, moved) = (session.id().to_owned(), session.path.clone(), clients.join("m"));
        fs::rename(&path, &moved).unwrap();
        drop(session);
        fs::rename(&moved, &path).unwrap();
        assert!(matches!(probe(&clients, &id), Life::Dead));
        assert!(!path.exists());
    }

    #[test]
    fn client_detects_that_its_fifo_was_deleted() {
        let tmp = tempfile::tempdir().unwrap();
        let clients = tmp.path().join("clients");
        let session = begin(tmp.path());
        fs::remove_dir_all(&clients).unwrap();
        assert_eq!(session.check().unwrap_err().kind(), ErrorKind::Corrupt);
    }

    // S90
    #[test]
    fn a_session_read_from_a_file_is_never_a_path() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("x"), "").unwrap();
        fs::create_dir(tmp.path().join("clients")).unwrap();
        assert!(matches!(probe(&tmp.path().join("clients"), "../x"), Life::Dead));
        assert!(matches!(probe(&tmp.path().join("clients"), ""), Life::Dead));
        assert!(tmp.path().join("x").exists());
    }

    #[test]
    fn invalid_inbox_lines_are_skipped() {
        let id = ClaimId::random().unwrap();
        let mut notified = Vec::new();
        let mut lines = Lines::default();
        let mut feed =
            |bytes: &[u8]| lines.feed(bytes, &mut |id, signal| notified.push((id, signal)));
        feed(b"\n\n\xff\xfe\nask\nask me\ngranted 1 2\n");
        feed(&[b'x'; 100_000]);
        feed(format!("\nask {} more\n", id.to_hex()).as_bytes());
        feed(format!("granted {} 0\nask {}", id.to_hex(), id.to_hex()).as_bytes());
        feed(format!("\ngranted {} 77\n", id.to_hex()).as_bytes());
        assert_eq!(notified, [(id, Signal::Ask), (id, Signal::Granted(Token::new(77).unwrap()))]);
        assert!(lines.begun.capacity() < 1_000);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_inbox_line_is_a_notification_or_ignored(text in testbed::texts(&[
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
