//! The doorbell: how, on one machine, whoever grants a claim tells the client that waits for it.
//!
//! SQLite has no server that could tell anybody. So a client that waits hangs up a *bell*: a FIFO beside
//! the database file, `locks.db-bell-0123456789abcdef`, under the client's name as its claims' rows
//! have it. Whoever grants writes one line into it, `CLAIM TOKEN`, after the COMMIT. Whoever evicts writes
//! `CLAIM evicted` into all that hang there, since the row of who holds does not say which bell is its client's;
//! so one who wants to hear of that has a bell from the beginning. (A FIFO, since it
//! has no longest path, is reached by whoever reaches the file, in other containers too, and has the
//! rights that the file has.)
//!
//! # The argument
//! - *What is atomic*: the grant, which is the COMMIT. The line is a hint of it, written in one piece
//!   (shorter than `PIPE_BUF`) and without blocking; a second one says nothing new.
//! - *The line is lost* (there is no bell yet, its pipe is full, we may not write it, we die or are
//!   dropped between the COMMIT and the line, the granting client is an older one that rings nowhere):
//!   the waiter's client looks by itself, seldom while it is told of its grants and often while it is
//!   not (`listen.rs`), and each heartbeat looks too.
//! - *It comes late*: what is pushed counts from the last heartbeat that was answered "waiting", whenever
//!   it is read, and only for the place whose token it names.
//! - *It is forged*: it makes a waiter believe that it holds. So a bell is open to those who may write
//!   the database file, and to nobody else: they can give any lock to anybody as it is. Only its client
//!   reads it. Where the mode does not say who may write the file (it has an access list), a bell is open
//!   to its own user only, and others' grants are found by looking.
//! - *Somebody takes it down, or moves the directory*: its client finds it gone as it next looks, and hangs
//!   up another.
//! - *A client died*: nobody reads its bell, which the kernel says to whoever opens it (`ENXIO`). Then
//!   it is removed, by who rings it and by each client that hangs up its own. Only what is certainly a
//!   dead client's is: a FIFO under such a name, which nobody reads and which is not so young that its
//!   client may be about to open it. Bells have random names that are never used again.
//! - *Names are data*: a row's session becomes a file's name only if it ends as ours do, with 16 digits.
//!   What is found there is written to only if it is a FIFO.

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

/// What stands between the database file's name and the client's.
const BELL: &str = "-bell-";
/// What is said of a claim that is gone, in the place of its token.
const EVICTED: &str = "evicted";
/// How many digits a client's name ends with.
const DIGITS: usize = 16;
/// The longest name of a file.
const LONGEST_NAME: usize = 255;
/// How much is read at once; and the most that may come without an end of a line.
const PAGE: usize = 4096;
const LONGEST_LINE: usize = 128;
/// How long after it was made a bell is young.
const YOUNG: Duration = Duration::from_secs(60);

/// Where the clients of one database file hang up their bells.
#[derive(Debug)]
pub(super) struct Doorbells {
    /// The file itself, not a symbolic link to it: so all find the same bells, as SQLite finds the log.
    database: PathBuf,
    /// A bell that is no older may be about to be opened by its client.
    young: Duration,
}

impl Doorbells {
    /// Those beside this file, which need not be there yet.
    ///
    /// # Errors
    /// No file can be made there.
    pub(super) fn beside(database: &Path) -> io::Result<Self> {
        let database = real(database)?;
        let name = database.file_name().unwrap_or_default();
        if name.len() + BELL.len() + DIGITS > LONGEST_NAME {
            return Err(Errno::NAMETOOLONG.into());
        }
        let may = Access::WRITE_OK | Access::EXEC_OK;
        let directory = database.parent().unwrap_or(Path::new("/"));
        rustix::fs::accessat(CWD, directory, may, AtFlags::EACCESS)?;
        Ok(Self { database, young: YOUNG })
    }

    /// Hangs up a bell and takes it down again. Needs a runtime with I/O.
    pub(super) fn try_one(&self) -> io::Result<()> {
        let id = ClaimId::random().map_err(io::Error::other)?.to_hex();
        self.hang(&format!("_{}", &id[..DIGITS])).map(drop)
    }

    /// Hangs up this client's bell. Needs a runtime with I/O.
    pub(super) fn hang(&self, session: &str) -> io::Result<Bell> {
        let path = self.bell_of(session).ok_or(Errno::INVAL)?;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let hung = self.open_to_us(&path);
        if hung.is_err() {
            let _ = fs::remove_file(&path);
        }
        hung
    }

    fn open_to_us(&self, path: &Path) -> io::Result<Bell> {
        // Open for writing as well, it has no end.
        let fifo = open(path, OpenOptions::new().read(true).write(true))?;
        self.share(&fifo)?;
        let seen = fifo.metadata()?;
        let inode = (seen.dev(), seen.ino());
        let inbox = Receiver::from_file(fifo)?;
        Ok(Bell { path: path.to_owned(), inode, inbox, begun: Vec::new() })
    }

    /// Opens a bell that we made to those who may write the database file.
    fn share(&self, bell: &File) -> io::Result<()> {
        let (file, ours) = (fs::metadata(&self.database)?, bell.metadata()?);
        // Whoever may rename files here could have put another in its place.
        if ours.nlink() != 1 || ours.uid() != rustix::process::geteuid().as_raw() {
            return Err(Errno::PERM.into());
        }
        let may_write = file.mode() & 0o022;
        let listed = rustix::fs::getxattr_query(&self.database, ACCESS_LIST).is_ok_and(|n| n > 0)
            || rustix::fs::fgetxattr_query(bell, ACCESS_LIST).is_ok_and(|n| n > 0);
        if may_write != 0 && !listed {
            let same_group =
                ours.gid() == file.gid() || fchown(bell, None, Some(file.gid())).is_ok();
            let group = if same_group { may_write & 0o020 } else { 0 };
            bell.set_permissions(Permissions::from_mode(0o600 | group | may_write & 0o002))?;
        }
        if ours.uid() != file.uid() {
            // Only root can; other users' bells are for their groups.
            let _ = fchown(bell, Some(file.uid()), None);
        }
        Ok(())
    }

    /// Tells the client of this session that its claim was granted, if it has a bell that we may ring
    /// and there is room for a line.
    pub(super) fn ring(&self, session: &str, id: ClaimId, token: Token) {
        let Some(bell) = self.bell_of(session) else { return };
        if let Some(mut bell) = self.living(&bell) {
            let _ = bell.write(line(id, token).as_bytes());
        }
    }

    /// Tells all clients that these claims were evicted.
    pub(super) fn ring_all(&self, evicted: &[ClaimId]) {
        if evicted.is_empty() {
            return;
        }
        for mut bell in self.all().iter().filter_map(|bell| self.living(bell)) {
            for id in evicted {
                let _ = bell.write(format!("{} {EVICTED}\n", id.to_hex()).as_bytes());
            }
        }
    }

    /// The write end of a living client's bell. A dead one's is removed.
    fn living(&self, bell: &Path) -> Option<File> {
        let opened = open(bell, OpenOptions::new().write(true));
        let nobody_reads = |e| Errno::from_io_error(e) == Some(Errno::NXIO);
        if opened.as_ref().is_err_and(nobody_reads) && self.is_dead(bell) {
            let _ = fs::remove_file(bell);
        }
        opened.ok()
    }

    /// Whether this, which nobody reads, is a bell that nobody will ever read again.
    fn is_dead(&self, bell: &Path) -> bool {
        let Ok(seen) = fs::symlink_metadata(bell) else { return false };
        let made = Duration::from_secs(seen.ctime().try_into().unwrap_or(0));
        let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + made);
        seen.file_type().is_fifo() && age.is_ok_and(|age| age > self.young)
    }

    /// Takes this client's bell down: others look for it in vain from now on.
    pub(super) fn take_down(&self, session: &str) {
        if let Some(bell) = self.bell_of(session) {
            let _ = fs::remove_file(bell);
        }
    }

    /// Removes the bells of the dead.
    pub(super) fn sweep(&self) {
        self.all().iter().for_each(|bell| drop(self.living(bell)));
    }

    /// All bells that hang here.
    fn all(&self) -> Vec<PathBuf> {
        let Some(Ok(beside)) = self.database.parent().map(fs::read_dir) else { return Vec::new() };
        let bell = |found: fs::DirEntry| {
            let name = found.file_name();
            let (_, id) = name.to_str()?.rsplit_once('-')?;
            let bell = self.bell_of(&format!("_{id}"))?;
            (bell.file_name() == Some(&name)).then_some(bell)
        };
        beside.flatten().filter_map(bell).collect()
    }

    /// Where this client's bell is, if it has one.
    fn bell_of(&self, session: &str) -> Option<PathBuf> {
        let (_, id) = session.rsplit_once('_')?;
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let is_ours = id.len() == DIGITS && id.bytes().all(is_digit);
        let mut name: OsString = self.database.file_name()?.to_owned();
        name.push(BELL);
        name.push(id);
        is_ours.then(|| self.database.with_file_name(name))
    }
}

/// Access control lists, as Linux keeps them.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// The file that a path leads to, or will when it is made.
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

/// This client's bell, until it is dropped.
#[derive(Debug)]
pub(super) struct Bell {
    path: PathBuf,
    inode: (u64, u64),
    inbox: Receiver,
    /// The beginning of a line.
    begun: Vec<u8>,
}

/// What a bell was rung for.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rung {
    pub(super) granted: Vec<(ClaimId, Token)>,
    pub(super) evicted: Vec<ClaimId>,
    /// So much that there may have been no room for more.
    pub(super) is_full: bool,
}

impl Bell {
    /// Whether others find it.
    pub(super) fn hangs(&self) -> bool {
        let there = fs::symlink_metadata(&self.path);
        there.is_ok_and(|seen| (seen.dev(), seen.ino()) == self.inode)
    }

    /// What it is rung for next. Dropped, it loses nothing.
    pub(super) async fn rung(&mut self) -> io::Result<Rung> {
        let mut page = [0; PAGE];
        loop {
            self.inbox.readable().await?;
            match self.inbox.try_read(&mut page) {
                Ok(n) => {
                    self.begun.extend_from_slice(&page[..n]);
                    return Ok(Rung { is_full: n == PAGE, ..lines(&mut self.begun) });
                }
                Err(e) => match e.kind() {
                    ErrorKind::WouldBlock | ErrorKind::Interrupted => {}
                    _ => return Err(e),
                },
            }
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        if self.hangs() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn line(id: ClaimId, token: Token) -> String {
    format!("{} {token}\n", id.to_hex())
}

/// Takes the whole lines out of what was read. What is none of ours is skipped.
fn lines(read: &mut Vec<u8>) -> Rung {
    let whole = read.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
    let mut rung = Rung::default();
    for line in read[..whole].split(|&b| b == b'\n') {
        let words = std::str::from_utf8(line).ok().and_then(|line| line.split_once(' '));
        let Some((id, said)) = words.and_then(|(id, said)| Some((ClaimId::from_hex(id)?, said)))
        else {
            continue;
        };
        if said == EVICTED {
            rung.evicted.push(id);
        }
        rung.granted.extend(said.parse().ok().map(|token| (id, token)));
    }
    read.drain(..whole);
    if read.len() > LONGEST_LINE {
        read.clear();
    }
    rung
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: &str = "leasehold_asks_0123456789abcdef";
    const OTHER: &str = "leasehold_asks_00000000000000aa";

    /// A directory with a database file of these permissions, whose dead are buried at once.
    fn place(mode: u32) -> (tempfile::TempDir, Doorbells) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let bells = Doorbells { young: Duration::ZERO, ..Doorbells::beside(&file).unwrap() };
        (directory, bells)
    }

    fn bells_in(directory: &Path) -> Vec<OsString> {
        let found = fs::read_dir(directory).unwrap().map(|found| found.unwrap().file_name());
        found.filter(|name| name != "locks.db").collect()
    }

    fn granted() -> (ClaimId, Token) {
        (ClaimId::random().unwrap(), Token::new(7).unwrap())
    }

    async fn next(bell: &mut Bell) -> Option<Rung> {
        tokio::time::timeout(Duration::from_millis(50), bell.rung()).await.ok()?.ok()
    }

    #[tokio::test]
    async fn a_bell_is_rung_for_its_client_alone_and_for_nobody_when_it_is_down() {
        let (directory, bells) = place(0o600);
        let (id, token) = granted();
        bells.ring(ME, id, token);
        let (mut bell, mut other) = (bells.hang(ME).unwrap(), bells.hang(OTHER).unwrap());
        assert!(bells.hang(ME).is_err(), "somebody else's");
        bells.ring(ME, id, token);
        assert_eq!(next(&mut bell).await.unwrap().granted, [(id, token)]);
        assert!(next(&mut other).await.is_none());
        assert!(bell.hangs());
        bells.take_down(ME);
        assert!(!bell.hangs());
        bells.ring(ME, id, token);
        assert!(next(&mut bell).await.is_none());
        // Another in its place is not the old one's to take along.
        let again = bells.hang(ME).unwrap();
        drop(bell);
        assert!(again.hangs());
        drop((again, other));
        assert_eq!(bells_in(directory.path()), [""; 0]);
    }

    #[tokio::test]
    async fn all_are_told_of_who_was_evicted_and_nobody_of_nobody() {
        let (_directory, bells) = place(0o600);
        let (mut bell, mut other) = (bells.hang(ME).unwrap(), bells.hang(OTHER).unwrap());
        let gone = [granted().0, granted().0];
        bells.ring_all(&[]);
        bells.ring_all(&gone);
        for bell in [&mut bell, &mut other] {
            let rung = next(bell).await.unwrap();
            assert_eq!(rung.evicted, gone);
            assert!(rung.granted.is_empty() && next(bell).await.is_none());
        }
    }

    #[tokio::test]
    async fn a_bell_that_is_full_blocks_nobody_and_says_so() {
        let (_directory, bells) = place(0o600);
        let mut bell = bells.hang(ME).unwrap();
        let (id, token) = granted();
        (0..5_000).for_each(|_| bells.ring(ME, id, token));
        let mut rung = next(&mut bell).await.unwrap();
        assert!(rung.is_full);
        while let Some(more) = next(&mut bell).await {
            rung.granted.extend(more.granted);
        }
        assert!(rung.granted.len() > 1_000 && rung.granted.iter().all(|g| *g == (id, token)));
        bells.ring(ME, id, token);
        let rung = next(&mut bell).await.unwrap();
        assert!(!rung.is_full && rung.granted == [(id, token)]);
    }

    /// Whoever may ring can make a client believe that it holds.
    #[tokio::test]
    async fn s90_a_bell_is_open_to_those_who_may_write_the_file_and_to_nobody_else() {
        let mode_of = |bell: &Bell| fs::metadata(&bell.path).unwrap().mode() & 0o7777;
        for (file, bell) in
            [(0o600, 0o600), (0o644, 0o600), (0o660, 0o620), (0o664, 0o620), (0o666, 0o622)]
        {
            let (_directory, bells) = place(file);
            assert_eq!(mode_of(&bells.hang(ME).unwrap()), bell, "{file:o}");
        }
        if rustix::process::geteuid().is_root() {
            let (_directory, bells) = place(0o660);
            std::os::unix::fs::chown(&bells.database, Some(4_711), Some(4_712)).unwrap();
            let bell = bells.hang(ME).unwrap();
            let seen = fs::metadata(&bell.path).unwrap();
            assert_eq!((seen.uid(), seen.gid(), mode_of(&bell)), (4_711, 4_712, 0o620));
        }
        // An access list may give the group less than the mode, which is its mask, says: here nothing.
        let (_directory, bells) = place(0o600);
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, may, who) in [(1, 6, !0), (2, 6, 4_711_u32), (4, 0, !0), (16, 6, !0), (32, 0, !0)]
        {
            list.extend([u16::to_le_bytes(tag), u16::to_le_bytes(may)].concat());
            list.extend(who.to_le_bytes());
        }
        let flags = rustix::fs::XattrFlags::empty();
        if rustix::fs::setxattr(&bells.database, ACCESS_LIST, &list, flags).is_ok() {
            assert_eq!(fs::metadata(&bells.database).unwrap().mode() & 0o777, 0o660);
            assert_eq!(mode_of(&bells.hang(ME).unwrap()), 0o600);
        }
    }

    #[tokio::test]
    async fn only_a_bell_that_nobody_will_read_again_is_removed() {
        let (directory, bells) = place(0o600);
        let fifo = |name: &str| {
            let path = directory.path().join(name);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            path
        };
        let living = bells.hang(ME).unwrap();
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
        let patient = Doorbells { young: YOUNG, database: bells.database.clone() };
        patient.sweep();
        assert!(dead.exists(), "its client may be about to open it");
        bells.sweep();
        assert!(!dead.exists());
        assert!(living.hangs() && others.iter().all(|other| other.exists()));
        // Whoever rings one that is dead finds that out too; what is no bell is left alone.
        let (id, token) = granted();
        let dead = fifo("locks.db-bell-00000000000000aa");
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        bells.ring(OTHER, id, token);
        assert!(!dead.exists());
        bells.ring("_00000000000000bb", id, token);
        assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
    }

    #[test]
    fn s90_a_session_read_from_a_row_is_never_a_path() {
        let (directory, bells) = place(0o600);
        let bell = directory.path().canonicalize().unwrap().join("locks.db-bell-0123456789abcdef");
        assert_eq!(bells.bell_of(ME), Some(bell.clone()));
        assert_eq!(bells.bell_of("../x_0123456789abcdef"), Some(bell));
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
            assert_eq!(bells.bell_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn bells_hang_beside_the_file_itself() {
        let (directory, bells) = place(0o600);
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink("locks.db", &link).unwrap();
        assert_eq!(Doorbells::beside(&link).unwrap().bell_of(ME), bells.bell_of(ME));
        let new = directory.path().join("not there yet.db");
        assert!(Doorbells::beside(&new).unwrap().bell_of(ME).is_some());
        assert!(Doorbells::beside(&directory.path().join("x".repeat(240))).is_err());
    }

    #[test]
    fn rubbish_is_skipped() {
        let (id, token) = granted();
        let mut read = b"\n\n\xff\xfe\nx\n1 2\n".to_vec();
        read.extend(format!("{} 0\n{} 7 8\n", id.to_hex(), id.to_hex()).into_bytes());
        read.extend(line(id, token).into_bytes());
        read.extend(b"begun");
        assert_eq!(lines(&mut read).granted, [(id, token)]);
        assert_eq!(read, b"begun");
        read.extend([b'x'; 100_000]);
        assert_eq!(lines(&mut read), Rung::default());
        assert!(read.is_empty());
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_line_from_outside_is_news_or_none(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef 42", "0123456789abcdef0123456789abcdef evicted",
        ])) {
            let rung = lines(&mut format!("{text}\n").into_bytes());
            for &(id, token) in &rung.granted {
                let again = lines(&mut line(id, token).into_bytes());
                proptest::prop_assert_eq!(again.granted, [(id, token)]);
            }
            proptest::prop_assert!(rung.granted.is_empty() || rung.evicted.is_empty());
        }
    }
}
