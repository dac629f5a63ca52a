//! Notification FIFOs, by which clients on one machine notify each other of grants.
//!
//! SQLite has no server that could notify clients. A waiting client therefore creates a FIFO next
//! to the database file. It is named `locks.db-bell-0123456789abcdef`, after the client's session
//! name in the rows of its claims. The client that grants a claim writes one line into it after the
//! COMMIT: `CLAIM TOKEN`. The client that evicts a claim writes `CLAIM evicted` into all FIFOs,
//! because a lock's row does not name the holder's client. A client that wants to be notified of
//! evictions creates its FIFO at the start.
//!
//! A FIFO has three advantages. Its path may have any length. It can be reached from wherever the
//! database file can be reached, including other containers. It has the permissions of a file.
//!
//! # The argument
//! - **What is atomic?** The grant, by the COMMIT. The line is only a hint. It is written in one
//!   piece (shorter than `PIPE_BUF`) and without blocking. Writing it twice is harmless.
//! - **The line is lost.** The FIFO may not exist yet, its pipe may be full, or it may not be
//!   writable for this user. The granting client may crash or be dropped between the COMMIT and the
//!   line, or it may be an older version that writes none. The waiter's client therefore also
//!   polls, rarely while it receives notifications and often otherwise (`listen.rs`). Each
//!   heartbeat finds the grant too.
//! - **The line arrives late.** The lease of a notified grant is counted from the last heartbeat
//!   whose reply was "waiting", no matter when the line is read. The line is valid only for the
//!   queue position whose token it contains.
//! - **The line is forged.** A forged line can make a waiter believe that it holds the lock. A FIFO
//!   is therefore writable only for users that may write the database file, because such users can
//!   give any lock to any client anyway. Only the FIFO's own client reads it. If the file has an
//!   access control list, its mode does not show all users with write permission. The FIFO is then
//!   writable for its own user only, and grants by other users are found by polling.
//! - **The FIFO is removed, or the directory is moved.** Its client notices that at its next check
//!   and creates another FIFO.
//! - **A client crashed.** Its FIFO then has no reader, and opening it for writing fails with
//!   `ENXIO`. The client that tried to write removes it, and so does each client that creates its
//!   own FIFO. Only FIFOs of clients that are certainly dead are removed: FIFOs with such a name,
//!   without a reader, and old enough that their client cannot be about to open them. FIFOs have
//!   random names that are never reused.
//! - **Names are data.** A row's session becomes part of a file name only if it ends with 16
//!   hexadecimal digits, like leasehold's own. Only a FIFO of that name is written to.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::net::unix::pipe::Receiver;

use leasehold_core::{ClaimId, Token};

/// The text between the database file's name and the client's ID.
const INFIX: &str = "-bell-";
/// The text in place of the token for a claim that was evicted.
const EVICTED: &str = "evicted";
/// The number of digits at the end of a client's name.
const DIGITS: usize = 16;
/// The maximum length of a file name.
const LONGEST_NAME: usize = 255;
/// The number of bytes read at once.
const PAGE: usize = 4096;
/// The maximum length of a line, in bytes.
const LONGEST_LINE: usize = 128;
/// The age up to which a FIFO's client may still be about to open the FIFO.
const YOUNG: Duration = Duration::from_secs(60);

/// The FIFOs of all clients of one database file.
#[derive(Debug)]
pub(in crate::store) struct NotifyFifos {
    /// The path of the database file itself, not of a symbolic link to it. This way all clients
    /// find the same FIFOs. SQLite locates its log the same way.
    database: PathBuf,
    /// The age up to which a FIFO's client may still be about to open the FIFO.
    young: Duration,
}

impl NotifyFifos {
    /// Returns the FIFOs next to this file, which may not exist yet.
    ///
    /// # Errors
    /// An I/O error if no file can be created there.
    pub(in crate::store) fn beside(database: &Path) -> io::Result<Self> {
        let database = real(database)?;
        let name = database.file_name().unwrap_or_default();
        if name.len() + INFIX.len() + DIGITS > LONGEST_NAME {
            return Err(Errno::NAMETOOLONG.into());
        }
        let may = Access::WRITE_OK | Access::EXEC_OK;
        let directory = database.parent().unwrap_or(Path::new("/"));
        rustix::fs::accessat(CWD, directory, may, AtFlags::EACCESS)?;
        Ok(Self { database, young: YOUNG })
    }

    /// Checks whether a FIFO can be created, and removes it again. Needs a runtime with I/O.
    pub(in crate::store) fn try_one(&self) -> io::Result<()> {
        let id = ClaimId::random().map_err(io::Error::other)?.to_hex();
        self.create(&format!("_{}", &id[..DIGITS])).map(drop)
    }

    /// Creates this client's FIFO. Needs a runtime with I/O.
    pub(in crate::store) fn create(&self, session: &str) -> io::Result<NotifyFifo> {
        let path = self.path_of(session).ok_or(Errno::INVAL)?;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let created = self.open_to_us(&path);
        if created.is_err() {
            let _ = fs::remove_file(&path);
        }
        created
    }

    fn open_to_us(&self, path: &Path) -> io::Result<NotifyFifo> {
        // The FIFO is also opened for writing, so that reading never reaches an end of file.
        let fifo = open(path, OpenOptions::new().read(true).write(true))?;
        self.share(&fifo)?;
        let seen = fifo.metadata()?;
        let inode = (seen.dev(), seen.ino());
        let inbox = Receiver::from_file(fifo)?;
        Ok(NotifyFifo { path: path.to_owned(), inode, inbox, begun: Vec::new() })
    }

    /// Makes this client's new FIFO writable for users that may write the database file.
    fn share(&self, fifo: &File) -> io::Result<()> {
        let (file, ours) = (fs::metadata(&self.database)?, fifo.metadata()?);
        // A user that may rename files here could have replaced the FIFO with another file.
        if ours.nlink() != 1 || ours.uid() != rustix::process::geteuid().as_raw() {
            return Err(Errno::PERM.into());
        }
        let may_write = file.mode() & 0o022;
        let listed = rustix::fs::getxattr_query(&self.database, ACCESS_LIST).is_ok_and(|n| n > 0)
            || rustix::fs::fgetxattr_query(fifo, ACCESS_LIST).is_ok_and(|n| n > 0);
        if may_write != 0 && !listed {
            let same_group =
                ours.gid() == file.gid() || fchown(fifo, None, Some(file.gid())).is_ok();
            let group = if same_group { may_write & 0o020 } else { 0 };
            fifo.set_permissions(Permissions::from_mode(0o600 | group | may_write & 0o002))?;
        }
        if ours.uid() != file.uid() {
            // Only root can change the owner. FIFOs of other users are shared through their group.
            let _ = fchown(fifo, Some(file.uid()), None);
        }
        Ok(())
    }

    /// Notifies the client of this session that its claim was granted, if its FIFO is writable and
    /// has room for a line.
    pub(in crate::store) fn notify(&self, session: &str, id: ClaimId, token: Token) {
        let Some(fifo) = self.path_of(session) else { return };
        if let Some(mut fifo) = self.open_writer(&fifo) {
            let _ = fifo.write(line(id, token).as_bytes());
        }
    }

    /// Notifies all clients that these claims were evicted.
    pub(in crate::store) fn notify_evicted(&self, evicted: &[ClaimId]) {
        if evicted.is_empty() {
            return;
        }
        for mut fifo in self.all().iter().filter_map(|fifo| self.open_writer(fifo)) {
            for id in evicted {
                let _ = fifo.write(format!("{} {EVICTED}\n", id.to_hex()).as_bytes());
            }
        }
    }

    /// Returns the write end of a living client's FIFO. The FIFO of a dead client is removed.
    fn open_writer(&self, fifo: &Path) -> Option<File> {
        let opened = open(fifo, OpenOptions::new().write(true));
        let has_no_reader = |e| Errno::from_io_error(e) == Some(Errno::NXIO);
        if opened.as_ref().is_err_and(has_no_reader) && self.is_dead(fifo) {
            let _ = fs::remove_file(fifo);
        }
        opened.ok()
    }

    /// Returns whether this FIFO without a reader is the FIFO of a dead client.
    fn is_dead(&self, fifo: &Path) -> bool {
        let Ok(seen) = fs::symlink_metadata(fifo) else { return false };
        let made = Duration::from_secs(seen.ctime().try_into().unwrap_or(0));
        let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + made);
        seen.file_type().is_fifo() && age.is_ok_and(|age| age > self.young)
    }

    /// Removes this client's FIFO, so that other clients no longer find it.
    pub(in crate::store) fn remove(&self, session: &str) {
        if let Some(fifo) = self.path_of(session) {
            let _ = fs::remove_file(fifo);
        }
    }

    /// Removes the FIFOs of dead clients.
    pub(in crate::store) fn sweep(&self) {
        self.all().iter().for_each(|fifo| drop(self.open_writer(fifo)));
    }

    /// Returns all FIFOs next to the database file.
    fn all(&self) -> Vec<PathBuf> {
        let Some(Ok(beside)) = self.database.parent().map(fs::read_dir) else { return Vec::new() };
        let fifo = |found: fs::DirEntry| {
            let name = found.file_name();
            let (_, id) = name.to_str()?.rsplit_once('-')?;
            let fifo = self.path_of(&format!("_{id}"))?;
            (fifo.file_name() == Some(&name)).then_some(fifo)
        };
        beside.flatten().filter_map(fifo).collect()
    }

    /// Returns the path of this client's FIFO, or `None` if the name does not have the form of
    /// leasehold's session names.
    fn path_of(&self, session: &str) -> Option<PathBuf> {
        let (_, id) = session.rsplit_once('_')?;
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let is_ours = id.len() == DIGITS && id.bytes().all(is_digit);
        let mut name: OsString = self.database.file_name()?.to_owned();
        name.push(INFIX);
        name.push(id);
        is_ours.then(|| self.database.with_file_name(name))
    }
}

/// The attribute in which Linux stores access control lists.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Resolves a path to the file to which it leads, even if that file does not exist yet.
fn real(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let beside = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let directory = beside.unwrap_or(Path::new(".")).canonicalize()?;
            Ok(directory.join(path.file_name().ok_or(Errno::INVAL)?))
        }
        real => real,
    }
}

fn open(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file = how.custom_flags(flags.bits().cast_signed()).open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        true => Ok(file),
        false => Err(Errno::NXIO.into()),
    }
}

/// This client's FIFO, which is removed when dropped.
#[derive(Debug)]
pub(in crate::store) struct NotifyFifo {
    path: PathBuf,
    inode: (u64, u64),
    inbox: Receiver,
    /// The beginning of an incomplete line.
    begun: Vec<u8>,
}

/// The notifications that were read from a FIFO.
#[derive(Debug, Default, PartialEq)]
pub(in crate::store) struct Notifications {
    pub(in crate::store) granted: Vec<(ClaimId, Token)>,
    pub(in crate::store) evicted: Vec<ClaimId>,
    /// Whether the pipe may have been full, so that notifications may be missing.
    pub(in crate::store) is_full: bool,
}

impl NotifyFifo {
    /// Returns whether other clients find this FIFO.
    pub(in crate::store) fn is_in_place(&self) -> bool {
        let there = fs::symlink_metadata(&self.path);
        there.is_ok_and(|seen| (seen.dev(), seen.ino()) == self.inode)
    }

    /// Waits for the next notifications.
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub(in crate::store) async fn next(&mut self) -> io::Result<Notifications> {
        let mut page = [0; PAGE];
        loop {
            self.inbox.readable().await?;
            match self.inbox.try_read(&mut page) {
                Ok(n) => {
                    self.begun.extend_from_slice(&page[..n]);
                    return Ok(Notifications { is_full: n == PAGE, ..lines(&mut self.begun) });
                }
                Err(e) => match e.kind() {
                    ErrorKind::WouldBlock | ErrorKind::Interrupted => {}
                    _ => return Err(e),
                },
            }
        }
    }
}

impl Drop for NotifyFifo {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn line(id: ClaimId, token: Token) -> String {
    format!("{} {token}\n", id.to_hex())
}

/// Removes the complete lines from what was read, and parses them. Unknown lines are skipped.
fn lines(read: &mut Vec<u8>) -> Notifications {
    let whole = read.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
    let mut found = Notifications::default();
    for line in read[..whole].split(|&b| b == b'\n') {
        let words = std::str::from_utf8(line).ok().and_then(|line| line.split_once(' '));
        let Some((id, message)) =
            words.and_then(|(id, message)| Some((ClaimId::from_hex(id)?, message)))
        else {
            continue;
        };
        if message == EVICTED {
            found.evicted.push(id);
        }
        found.granted.extend(message.parse().ok().map(|token| (id, token)));
    }
    read.drain(..whole);
    if read.len() > LONGEST_LINE {
        read.clear();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: &str = "leasehold_asks_0123456789abcdef";
    const OTHER: &str = "leasehold_asks_00000000000000aa";

    /// Returns a directory with a database file that has these permissions, and the FIFOs beside
    /// that file. The FIFOs of dead clients are removed without delay.
    fn place(mode: u32) -> (tempfile::TempDir, NotifyFifos) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let fifos = NotifyFifos { young: Duration::ZERO, ..NotifyFifos::beside(&file).unwrap() };
        (directory, fifos)
    }

    fn fifos_in(directory: &Path) -> Vec<OsString> {
        let found = fs::read_dir(directory).unwrap().map(|found| found.unwrap().file_name());
        found.filter(|name| name != "locks.db").collect()
    }

    fn granted() -> (ClaimId, Token) {
        (ClaimId::random().unwrap(), Token::new(7).unwrap())
    }

    async fn next(fifo: &mut NotifyFifo) -> Option<Notifications> {
        tokio::time::timeout(Duration::from_millis(50), fifo.next()).await.ok()?.ok()
    }

    #[tokio::test]
    async fn fifo_notifies_only_its_client_and_none_after_its_removal() {
        let (directory, fifos) = place(0o600);
        let (id, token) = granted();
        fifos.notify(ME, id, token);
        let (mut fifo, mut other) = (fifos.create(ME).unwrap(), fifos.create(OTHER).unwrap());
        assert!(fifos.create(ME).is_err(), "a client opened another client's FIFO");
        fifos.notify(ME, id, token);
        assert_eq!(next(&mut fifo).await.unwrap().granted, [(id, token)]);
        assert!(next(&mut other).await.is_none());
        assert!(fifo.is_in_place());
        fifos.remove(ME);
        assert!(!fifo.is_in_place());
        fifos.notify(ME, id, token);
        assert!(next(&mut fifo).await.is_none());
        // The old FIFO must not remove a newer FIFO in its place.
        let again = fifos.create(ME).unwrap();
        drop(fifo);
        assert!(again.is_in_place());
        drop((again, other));
        assert_eq!(fifos_in(directory.path()), [""; 0]);
    }

    #[tokio::test]
    async fn evictions_are_announced_to_all_and_empty_lists_to_none() {
        let (_directory, fifos) = place(0o600);
        let (mut fifo, mut other) = (fifos.create(ME).unwrap(), fifos.create(OTHER).unwrap());
        let gone = [granted().0, granted().0];
        fifos.notify_evicted(&[]);
        fifos.notify_evicted(&gone);
        for fifo in [&mut fifo, &mut other] {
            let found = next(fifo).await.unwrap();
            assert_eq!(found.evicted, gone);
            assert!(found.granted.is_empty() && next(fifo).await.is_none());
        }
    }

    #[tokio::test]
    async fn full_fifo_blocks_no_writer_and_is_reported() {
        let (_directory, fifos) = place(0o600);
        let mut fifo = fifos.create(ME).unwrap();
        let (id, token) = granted();
        (0..5_000).for_each(|_| fifos.notify(ME, id, token));
        let mut found = next(&mut fifo).await.unwrap();
        assert!(found.is_full);
        while let Some(more) = next(&mut fifo).await {
            found.granted.extend(more.granted);
        }
        assert!(found.granted.len() > 1_000 && found.granted.iter().all(|g| *g == (id, token)));
        fifos.notify(ME, id, token);
        let found = next(&mut fifo).await.unwrap();
        assert!(!found.is_full && found.granted == [(id, token)]);
    }

    // S90
    /// Write permission on a FIFO allows a user to make its client believe that it holds the lock.
    #[tokio::test]
    async fn fifo_is_writable_only_by_users_that_may_write_the_file() {
        let mode_of = |fifo: &NotifyFifo| fs::metadata(&fifo.path).unwrap().mode() & 0o7777;
        for (file, fifo) in
            [(0o600, 0o600), (0o644, 0o600), (0o660, 0o620), (0o664, 0o620), (0o666, 0o622)]
        {
            let (_directory, fifos) = place(file);
            assert_eq!(mode_of(&fifos.create(ME).unwrap()), fifo, "{file:o}");
        }
        if rustix::process::geteuid().is_root() {
            let (_directory, fifos) = place(0o660);
            std::os::unix::fs::chown(&fifos.database, Some(4_711), Some(4_712)).unwrap();
            let fifo = fifos.create(ME).unwrap();
            let seen = fs::metadata(&fifo.path).unwrap();
            assert_eq!((seen.uid(), seen.gid(), mode_of(&fifo)), (4_711, 4_712, 0o620));
        }
        // With an access control list, the mode shows only the mask of the list, and the group may
        // have fewer rights. In this test it has none.
        let (_directory, fifos) = place(0o600);
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, may, who) in [(1, 6, !0), (2, 6, 4_711_u32), (4, 0, !0), (16, 6, !0), (32, 0, !0)]
        {
            list.extend([u16::to_le_bytes(tag), u16::to_le_bytes(may)].concat());
            list.extend(who.to_le_bytes());
        }
        let flags = rustix::fs::XattrFlags::empty();
        if rustix::fs::setxattr(&fifos.database, ACCESS_LIST, &list, flags).is_ok() {
            assert_eq!(fs::metadata(&fifos.database).unwrap().mode() & 0o777, 0o660);
            assert_eq!(mode_of(&fifos.create(ME).unwrap()), 0o600);
        }
    }

    #[tokio::test]
    async fn only_fifos_of_dead_clients_are_removed() {
        let (directory, fifos) = place(0o600);
        let fifo = |name: &str| {
            let path = directory.path().join(name);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            path
        };
        let living = fifos.create(ME).unwrap();
        let dead = fifo("locks.db-bell-00000000000000aa");
        let others = [
            fifo("locks.db-bell-00000000000000AA"),
            fifo("locks.db-bell-0000000000000000a"),
            fifo("locks.db-bell-"),
            fifo("other.db-bell-00000000000000aa"),
            fifo("00000000000000aa"),
        ];
        let file = directory.path().join("locks.db-bell-00000000000000bb");
        fs::write(&file, "theirs").unwrap();
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        let patient = NotifyFifos { young: YOUNG, database: fifos.database.clone() };
        patient.sweep();
        assert!(dead.exists(), "the FIFO of a new client was deleted");
        fifos.sweep();
        assert!(!dead.exists());
        assert!(living.is_in_place() && others.iter().all(|other| other.exists()));
        // A client that writes to a dead FIFO removes it too. Other files are left alone.
        let (id, token) = granted();
        let dead = fifo("locks.db-bell-00000000000000aa");
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        fifos.notify(OTHER, id, token);
        assert!(!dead.exists());
        fifos.notify("_00000000000000bb", id, token);
        assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
    }

    // S90
    #[test]
    fn a_session_read_from_a_row_is_never_a_path() {
        let (directory, fifos) = place(0o600);
        let fifo = directory.path().canonicalize().unwrap().join("locks.db-bell-0123456789abcdef");
        assert_eq!(fifos.path_of(ME), Some(fifo.clone()));
        assert_eq!(fifos.path_of("../x_0123456789abcdef"), Some(fifo));
        for bad in [
            "",
            "x",
            "_",
            "_0123456789abcde",
            "_0123456789abcdef0",
            "_0123456789ABCDEF",
            "_../../../../../et",
            "_0123456789abcde/",
            "leasehold_asks_0123456789abcde\0",
        ] {
            assert_eq!(fifos.path_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn fifos_are_created_beside_the_resolved_file() {
        let (directory, fifos) = place(0o600);
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink("locks.db", &link).unwrap();
        assert_eq!(NotifyFifos::beside(&link).unwrap().path_of(ME), fifos.path_of(ME));
        let new = directory.path().join("not there yet.db");
        assert!(NotifyFifos::beside(&new).unwrap().path_of(ME).is_some());
        assert!(NotifyFifos::beside(&directory.path().join("x".repeat(240))).is_err());
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let (id, token) = granted();
        let mut read = b"\n\n\xff\xfe\nx\n1 2\n".to_vec();
        read.extend(format!("{} 0\n{} 7 8\n", id.to_hex(), id.to_hex()).into_bytes());
        read.extend(line(id, token).into_bytes());
        read.extend(b"begun");
        assert_eq!(lines(&mut read).granted, [(id, token)]);
        assert_eq!(read, b"begun");
        read.extend([b'x'; 100_000]);
        assert_eq!(lines(&mut read), Notifications::default());
        assert!(read.is_empty());
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_fifo_line_is_parsed_or_ignored(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef 42", "0123456789abcdef0123456789abcdef evicted",
        ])) {
            let found = lines(&mut format!("{text}\n").into_bytes());
            for &(id, token) in &found.granted {
                let again = lines(&mut line(id, token).into_bytes());
                proptest::prop_assert_eq!(again.granted, [(id, token)]);
            }
            proptest::prop_assert!(found.granted.is_empty() || found.evicted.is_empty());
        }
    }
}
