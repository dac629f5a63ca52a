//! Keeps the history in a file, so a restart does not lose it.
//!
//! The first line states the format and the store. Each other line is one JSON object: a hold when
//! it begins or ends. The last line about a hold is the valid one.
//!
//! **Calls do not wait for the disk.** They mark the holds that they change, and a thread writes
//! these holds a few times per second. If it cannot write, it tries again later, and then writes
//! the whole history. So a full disk leaves no gap. If the server or its machine crashes, the last
//! changes are missing.
//!
//! **The file is bounded.** When it is more than twice as long as the history in memory, and longer
//! than a megabyte, the thread replaces it with the history in memory. The new file is complete
//! before it gets the name of the old one, so a crash leaves one of the two.
//!
//! **Only one server writes a file.** It holds a lock on it. If another file is at the path later,
//! the server writes nothing any more.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::history::{History, Line};

/// The pause between two writes.
const WRITE_EVERY: Duration = Duration::from_millis(250);
/// The pause after a failed write.
const RETRY: Duration = Duration::from_secs(5);
/// The size in bytes up to which a file is not replaced.
const SMALL: u64 = 1 << 20;
/// The longest first line, in bytes.
const MAX_HEADER: u64 = 16 << 10;
/// The shortest time between two reports of problems.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// The first line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    /// The identity of the store.
    store: String,
}

impl Header {
    fn new(store: &str) -> Self {
        let format = "leasehold-service-history".to_owned();
        Self { format, version: 1, store: store.to_owned() }
    }
}

/// The thread that writes a file, until this is closed or dropped.
#[derive(Debug)]
pub(crate) struct HistoryFile {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl HistoryFile {
    /// Adds the holds in the file to the history, and starts the thread. `store` is the store's
    /// identity.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the file cannot be read or written, contains something
    ///   else, or another server uses it.
    pub(crate) fn open(path: &Path, store: &str, history: &Arc<History>) -> Result<Self> {
        let failed = |what: String| {
            let what = format!("cannot keep the history in {}: {what}", path.display());
            Error::new(ErrorKind::Config, what).with_hint(
                "give each server its own file, in a directory that the server can write to",
            )
        };
        let io = |e: io::Error| failed(e.to_string());
        let file = open_locked(path).map_err(failed)?;
        // If this is a symbolic link, the file that it points to is replaced.
        let path = path.canonicalize().map_err(io)?;
        let header = Header::new(store);
        let found = Found::read(&file, &header).map_err(failed)?;
        if let Some(why) = found.odd {
            let kept = with_suffix(&path, ".leasehold-old");
            std::fs::copy(&path, &kept).map_err(io)?;
            let (path, kept) = (path.display(), kept.display());
            tracing::warn!("history in {path}: {why}; the file was copied to {kept}");
        }
        history.restore(found.lines);
        let mut writer = Writer {
            path,
            header,
            history: Arc::downgrade(history),
            file: BufWriter::new(file),
            size: 0,
            limit: SMALL,
            retry: None,
            reported: None,
        };
        writer.replace(history).map_err(io)?;
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("leasehold-history".to_owned());
        let thread = thread.spawn(move || writer.run(&stopped)).map_err(io)?;
        Ok(Self { stop, thread })
    }

    /// Writes the whole history, and ends the thread.
    pub(crate) fn close(self) {
        drop(self.stop);
        let _ = self.thread.join();
    }
}

/// Opens the file, or creates it, and locks it. It contains names and labels, so only its owner may
/// read it.
fn open_locked(path: &Path) -> std::result::Result<File, String> {
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path).map_err(|e| e.to_string())?;
        if !file.metadata().map_err(|e| e.to_string())?.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        file.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => "another server uses this file".to_owned(),
            TryLockError::Error(e) => e.to_string(),
        })?;
        // A server that has just ended may have replaced the file after it was opened here.
        if at(path).map_err(|e| e.to_string())?.is_some_and(|there| is_same(&there, &file)) {
            return Ok(file);
        }
    }
}

/// Returns what is at this path, if anything is.
fn at(path: &Path) -> io::Result<Option<Metadata>> {
    match std::fs::metadata(path) {
        Ok(there) => Ok(Some(there)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn is_same(there: &Metadata, file: &File) -> bool {
    file.metadata().is_ok_and(|of| (there.dev(), there.ino()) == (of.dev(), of.ino()))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut longer = path.to_owned().into_os_string();
    longer.push(suffix);
    longer.into()
}

/// The content of a file.
#[derive(Debug, Default)]
struct Found {
    lines: Vec<Line>,
    /// Why some of the content is not used.
    odd: Option<String>,
}

impl Found {
    fn read(file: &File, expected: &Header) -> std::result::Result<Self, String> {
        let mut reader = BufReader::new(file);
        let mut first = Vec::new();
        let read = (&mut reader).take(MAX_HEADER).read_until(b'\n', &mut first);
        if read.map_err(|e| e.to_string())? == 0 {
            return Ok(Self::default());
        }
        let header: Header = serde_json::from_slice(&first).map_err(|_| {
            let starts: String = String::from_utf8_lossy(&first).chars().take(40).collect();
            format!("it starts with {starts:?}, so it contains something else")
        })?;
        if (&header.format, header.version) != (&expected.format, expected.version) {
            let Header { format, version, .. } = header;
            return Err(format!("it has the format {format:?} in version {version}"));
        }
        if header.store != expected.store {
            let why = format!("it was of another store ({:?})", header.store);
            return Ok(Self { lines: Vec::new(), odd: Some(why) });
        }
        let mut found = Self::default();
        let mut invalid = 0;
        let mut lines = reader.split(b'\n').peekable();
        while let Some(line) = lines.next() {
            match serde_json::from_slice(&line.map_err(|e| e.to_string())?) {
                Ok(line) => found.lines.push(line),
                // A crash can cut the last line.
                Err(_) if lines.peek().is_none() => {}
                Err(_) => invalid += 1,
            }
        }
        found.odd = (invalid > 0).then(|| format!("{invalid} lines were invalid"));
        Ok(found)
    }
}

/// The thread's state.
struct Writer {
    path: PathBuf,
    header: Header,
    history: Weak<History>,
    file: BufWriter<File>,
    /// The size of the file, and the size at which it is replaced, in bytes.
    size: u64,
    limit: u64,
    /// When to write the whole history again, after a write has failed.
    retry: Option<Instant>,
    reported: Option<Instant>,
}

impl Writer {
    fn run(mut self, stopped: &Receiver<()>) {
        loop {
            let is_last = stopped.recv_timeout(WRITE_EVERY) != Err(RecvTimeoutError::Timeout);
            let Some(history) = self.history.upgrade() else { return };
            let written = match is_last {
                true => self.replace(&history),
                false => self.write(&history),
            };
            if let Err(error) = written {
                self.retry = Some(Instant::now() + RETRY);
                self.report(&error, is_last);
            }
            if is_last {
                return;
            }
        }
    }

    /// Writes the holds that have changed.
    fn write(&mut self, history: &History) -> io::Result<()> {
        if let Some(retry) = self.retry {
            return if Instant::now() < retry { Ok(()) } else { self.replace(history) };
        }
        let lines = history.take_changes();
        if lines.is_empty() {
            return Ok(());
        }
        let is_there = at(&self.path)?.is_some_and(|there| is_same(&there, self.file.get_ref()));
        if self.size > self.limit || !is_there {
            return self.replace(history);
        }
        for line in lines {
            self.size += append(&mut self.file, &line)?;
        }
        self.file.flush()
    }

    /// Replaces the file with the history in memory.
    fn replace(&mut self, history: &History) -> io::Result<()> {
        if at(&self.path)?.is_some_and(|there| !is_same(&there, self.file.get_ref())) {
            return Err(io::Error::other("another file is at this path"));
        }
        let new = with_suffix(&self.path, ".leasehold-new");
        // An earlier server has left it when it crashed.
        let _ = std::fs::remove_file(&new);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let written = self.fill(file, history).and_then(|()| std::fs::rename(&new, &self.path));
        if written.is_err() {
            let _ = std::fs::remove_file(&new);
        }
        written
    }

    /// Writes the history in memory to this file, and uses it from now on.
    fn fill(&mut self, file: File, history: &History) -> io::Result<()> {
        file.try_lock()?;
        let mut file = BufWriter::new(file);
        let mut size = append(&mut file, &self.header)?;
        for line in history.snapshot() {
            size += append(&mut file, &line)?;
        }
        file.flush()?;
        file.get_ref().sync_data()?;
        (self.file, self.size, self.limit, self.retry) = (file, size, (2 * size).max(SMALL), None);
        Ok(())
    }

    /// Logs a problem.
    fn report(&mut self, error: &io::Error, is_last: bool) {
        if self.reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) && !is_last {
            return;
        }
        self.reported = Some(Instant::now());
        tracing::error!("cannot write the history to {}: {error}", self.path.display());
    }
}

/// Appends a line, and returns its length in bytes.
fn append(file: &mut BufWriter<File>, line: &impl Serialize) -> io::Result<u64> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)?;
    Ok(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Claim, Kind, Name, Token};
    use leasehold_http::wire::HoldEnd;
    use tempfile::TempDir;

    use super::*;

    fn claim(name: &str) -> Claim {
        Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
    }

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    /// A history that is kept in a file.
    struct Kept {
        history: Arc<History>,
        file: HistoryFile,
    }

    impl Kept {
        fn close(self) {
            self.file.close();
        }
    }

    impl std::ops::Deref for Kept {
        type Target = History;

        fn deref(&self) -> &History {
            &self.history
        }
    }

    fn kept_in(path: &Path) -> Kept {
        with_store(path, "store", History::new(100, 10)).unwrap()
    }

    fn with_store(path: &Path, store: &str, history: History) -> Result<Kept> {
        let history = Arc::new(history);
        Ok(Kept { file: HistoryFile::open(path, store, &history)?, history })
    }

    /// Returns the message of the error for this file.
    fn refused(path: &Path) -> String {
        with_store(path, "store", History::new(100, 10)).err().unwrap().to_string()
    }

    /// Returns the tokens and the ends of the lock's holds, the latest first.
    fn found(history: &History, name: &str) -> Vec<(u64, Option<HoldEnd>)> {
        let holds = history.of(&Name::new(name).unwrap()).holds;
        holds.iter().map(|hold| (hold.token.get(), hold.end)).collect()
    }

    fn eventually(what: &str, check: impl Fn() -> bool) {
        let start = Instant::now();
        while !check() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn contains(path: &Path, text: &str) -> bool {
        std::fs::read_to_string(path).is_ok_and(|content| content.contains(text))
    }

    #[test]
    fn a_restart_keeps_the_holds() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("history.jsonl");
        let (a, b) = (claim("a"), claim("b"));
        let first = kept_in(&path);
        first.held(&a, token(1));
        first.held(&b, token(2));
        first.ended(&a, HoldEnd::Released);
        let before = first.of(&a.name).holds;
        first.close();

        let second = kept_in(&path);
        assert_eq!(format!("{:?}", second.of(&a.name).holds), format!("{before:?}"));
        assert_eq!(found(&second, "b"), [(2, None)]);
        // The client of the first server releases through this one.
        assert!(!second.begin_release(&b));
        second.ended(&b, HoldEnd::Released);
        second.close();
        assert_eq!(found(&kept_in(&path), "b"), [(2, Some(HoldEnd::Released))]);
        let mode = std::fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "other users can read the names");
    }

    #[test]
    fn a_crash_loses_at_most_the_last_changes() {
        let directory = TempDir::new().unwrap();
        let (path, copy) = (directory.path().join("file"), directory.path().join("copy"));
        let first = kept_in(&path);
        let a = claim("a");
        first.held(&a, token(1));
        eventually("the grant is in the file", || contains(&path, r#""token":1"#));
        first.ended(&a, HoldEnd::Released);
        first.held(&a, token(2));
        eventually("the end is in the file", || contains(&path, "released"));
        std::fs::copy(&path, &copy).unwrap();
        // The last line was cut off.
        let mut file = OpenOptions::new().append(true).open(&copy).unwrap();
        write!(file, r#"{{"lock":"a","ho"#).unwrap();
        let second = kept_in(&copy);
        assert_eq!(found(&second, "a"), [(2, None), (1, Some(HoldEnd::Released))]);
        assert!(!directory.path().join("copy.leasehold-old").exists());
        second.close();

        // A line in the middle is invalid, so the file was changed by something else.
        let content = std::fs::read_to_string(&copy).unwrap();
        std::fs::write(&copy, content.replacen(r#"{"lock""#, r#"{"block""#, 1)).unwrap();
        assert_eq!(found(&kept_in(&copy), "a").len(), 1);
        assert!(contains(&directory.path().join("copy.leasehold-old"), r#"{"block""#));
    }

    #[test]
    fn other_files_are_refused_and_not_changed() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("history.jsonl");
        let first = kept_in(&path);
        let in_use = refused(&path);
        assert!(in_use.contains("another server uses this file"), "{in_use}");
        first.held(&claim("a"), token(1));
        first.close();
        let second = kept_in(&path);
        assert_eq!(found(&second, "a"), [(1, None)]);
        let in_use = refused(&path);
        assert!(in_use.contains("another server uses this file"), "{in_use}");
        second.close();
        // The tokens of another store mean nothing here.
        let third = with_store(&path, "another store", History::new(100, 10)).unwrap();
        assert_eq!(found(&third, "a"), []);
        assert!(contains(&directory.path().join("history.jsonl.leasehold-old"), r#""token":1"#));

        let other = directory.path().join("other");
        let newer = r#"{"format":"leasehold-service-history","version":2,"store":"store"}"#;
        for content in ["127.0.0.1 localhost\n", "\n", "{}", newer] {
            std::fs::write(&other, content).unwrap();
            refused(&other);
            assert_eq!(std::fs::read_to_string(&other).unwrap(), content);
        }
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        refused(&directory.path().join("missing/history"));
    }

    #[test]
    fn the_file_is_bounded_and_has_what_is_in_memory() {
        let directory = TempDir::new().unwrap();
        let (path, link) = (directory.path().join("file"), directory.path().join("link"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        std::fs::write(&path, "").unwrap();
        const MOST: u64 = 500;
        let kept_in = |path| with_store(path, "store", History::new(500, 100)).unwrap();
        let first = kept_in(&link);
        let long = "x".repeat(400);
        let (mut written, mut largest) = (0, 0);
        for n in 1.. {
            let held = claim(&format!("{long}{}", n % 5));
            first.held(&held, token(n));
            first.ended(&held, HoldEnd::Released);
            if n % MOST == 0 {
                let now = format!(r#""token":{n},"#);
                eventually("the holds are in the file", || contains(&path, &now));
                written += MOST * 600;
                largest = largest.max(std::fs::metadata(&path).unwrap().len());
                if written > 3 * SMALL {
                    break;
                }
            }
        }
        assert!((SMALL / 2..2 * SMALL).contains(&largest), "{largest}");
        let before: Vec<_> = (0..5).map(|n| found(&first, &format!("{long}{n}"))).collect();
        first.close();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        let second = kept_in(&path);
        let after: Vec<_> = (0..5).map(|n| found(&second, &format!("{long}{n}"))).collect();
        assert_eq!(after, before);
    }

    #[test]
    fn a_deleted_file_is_written_again_and_a_foreign_one_is_not_replaced() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("history.jsonl");
        let history = kept_in(&path);
        std::fs::remove_file(&path).unwrap();
        history.held(&claim("a"), token(1));
        eventually("the whole history is there", || contains(&path, r#""token":1"#));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "foreign").unwrap();
        history.held(&claim("b"), token(2));
        history.close();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "foreign");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
