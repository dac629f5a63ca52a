//! Tokens in a file: for a service of one process, across restarts and power failures.
//!
//! The file is a log. Each raised token is one line, which is on disk before the request is
//! accepted. A token that is not larger than the stored one is not written, so only a holder's
//! first request costs a write. A line that a power failure left incomplete was never answered, and
//! is dropped when the file is opened again. When most lines are outdated, the tokens are written
//! to a new file that replaces the old one.
//!
//! Only one process can use the file, because each process trusts what it has read at its start. A
//! second one gets an error. (The lock is on a separate file, `….lock`, which stays when the log is
//! replaced.)

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use super::TokenStorage;
use leasehold_core::kit::{Escaped, unescape};
use leasehold_core::{Error, ErrorKind, FencingToken, Name, Result};

/// The file is rewritten once it has more lines than twice the number of resources plus this
/// number.
const SLACK: usize = 256;

/// Keeps the highest tokens seen in a file, for a service of one process, across restarts and power
/// failures.
///
/// Each larger token is on disk before its request is accepted. Only one process can have the file
/// open.
#[derive(Clone, Debug)]
pub struct FileMemory(Arc<Mutex<Log>>);

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    marks: HashMap<Name, FencingToken>,
    lines: usize,
    /// Whether a write has failed. If so, the contents of the file are unknown, and nothing more is
    /// written.
    failed: bool,
    _locked: File,
}

impl FileMemory {
    /// Opens the file, or creates it with access for its owner only. It reads the whole file, so
    /// call it before you serve requests.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let file = folder.path().join("marks");
    /// let marks = leasehold::fence::http::FileMemory::open(file)?;
    /// # let _ = marks; Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// - [`Contended`](ErrorKind::Contended): another process has the file open.
    /// - [`Corrupt`](ErrorKind::Corrupt): the file is damaged, or is another kind of file.
    /// - [`Denied`](ErrorKind::Denied), [`Config`](ErrorKind::Config): the file cannot be opened.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = Log::open(path).map_err(|e| e.with_operation("open"))?;
        Ok(Self(Arc::new(Mutex::new(opened))))
    }
}

#[async_trait]
impl TokenStorage for FileMemory {
    async fn raise(&self, resource: &Name, offered: FencingToken) -> Result<FencingToken> {
        let (log, resource) = (self.0.clone(), resource.clone());
        let raise = move || locked(&log).raise(&resource, offered);
        // The call may wait for the disk, so it does not run on a thread that serves other
        // requests.
        match tokio::runtime::Handle::try_current() {
            Err(_) => raise(),
            Ok(runtime) => runtime.spawn_blocking(raise).await.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Closed, "the runtime was shut down"))
            }),
        }
    }
}

impl Log {
    fn open(path: &Path) -> Result<Self> {
        let open = |path: &Path| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options.open(path).map_err(|e| fault("open", path, e))
        };
        let beside = sibling(path, ".lock");
        let locked = open(&beside)?;
        match locked.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("another process has {:?} open", path.to_string_lossy());
                let hint =
                    "use one process, or keep the tokens of several in a database (SqlMemory)";
                return Err(Error::new(ErrorKind::Contended, what).with_hint(hint));
            }
            Err(TryLockError::Error(e)) => return Err(fault("lock", &beside, e)),
        }
        let mut file = open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| fault("read", path, e))?;
        let read = parse(&bytes).ok_or_else(|| {
            let what =
                format!("{:?} is damaged, or is not a file of FileMemory", path.to_string_lossy());
            Error::new(ErrorKind::Corrupt, what)
        })?;
        // An incomplete line from before a power cut must not become the beginning of the next
        // line.
        let sound = u64::try_from(read.sound).unwrap_or(u64::MAX);
        file.set_len(sound)
            .and_then(|()| file.seek(io::SeekFrom::Start(sound)))
            .and_then(|_| file.sync_all())
            .and_then(|()| sync_directory(path))
            .map_err(|e| fault("write", path, e))?;
        let Contents { marks, lines, .. } = read;
        Ok(Self { path: path.to_owned(), file, marks, lines, failed: false, _locked: locked })
    }

    fn raise(&mut self, resource: &Name, offered: FencingToken) -> Result<FencingToken> {
        match self.marks.get(resource) {
            Some(mark) if *mark >= offered => return Ok(*mark),
            _ => {}
        }
        if self.failed {
            let what = format!("an earlier write to {:?} failed", self.path.to_string_lossy());
            let hint = "fix the disk, then restart this program";
            return Err(Error::new(ErrorKind::Unreachable, what).with_hint(hint));
        }
        let write = |log: &mut Self| {
            let line = format!("{offered} {}\n", Escaped(resource.as_str()));
            log.file.write_all(line.as_bytes())?;
            log.file.sync_data()
        };
        if let Err(e) = write(self) {
            self.failed = true;
            return Err(fault("write", &self.path, e));
        }
        self.lines += 1;
        self.marks.insert(resource.clone(), offered);
        if self.lines > 2 * self.marks.len() + SLACK {
            // If the new log cannot be written, the old one grows, and the next raise tries again.
            let _ = self.rewrite();
        }
        Ok(offered)
    }

    /// Replaces the log with one without outdated lines. The old log is valid until the new one has
    /// its name.
    fn rewrite(&mut self) -> io::Result<()> {
        let new = sibling(&self.path, ".new");
        let mut text = String::new();
        for (name, mark) in &self.marks {
            let _ = writeln!(text, "{mark} {}", Escaped(name.as_str()));
        }
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        // The old file has no name any more, so all further lines go to the new one.
        self.file = file;
        self.lines = self.marks.len();
        // The new name survives a power cut only after this step. Without it, the old file could
        // come back, without the lines written from here on.
        let synced = sync_directory(&self.path);
        self.failed = synced.is_err();
        synced
    }
}

/// The contents of a log.
struct Contents {
    marks: HashMap<Name, FencingToken>,
    lines: usize,
    /// The number of bytes in complete and valid lines.
    sound: usize,
}

/// Parses a log. Returns `None` if a line other than the last one is invalid.
fn parse(bytes: &[u8]) -> Option<Contents> {
    let mut read = Contents { marks: HashMap::new(), lines: 0, sound: 0 };
    let mut rest = bytes;
    while let Some(end) = rest.iter().position(|b| *b == b'\n') {
        let (line, more) = (&rest[..end], &rest[end + 1..]);
        match parse_line(line) {
            Some((name, token)) => {
                let mark = read.marks.entry(name).or_insert(token);
                *mark = token.max(*mark);
            }
            None if more.is_empty() => break,
            None => return None,
        }
        read.lines += 1;
        read.sound += end + 1;
        rest = more;
    }
    Some(read)
}

fn parse_line(line: &[u8]) -> Option<(Name, FencingToken)> {
    let (token, name) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    Some((Name::new(unescape(name)?).ok()?, token.parse().ok()?))
}

fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn fault(what: &str, path: &Path, e: io::Error) -> Error {
    let kind = match e.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Denied,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Full,
        io::ErrorKind::NotFound | io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => {
            ErrorKind::Config
        }
        _ => ErrorKind::Unreachable,
    };
    Error::new(kind, format!("cannot {what} {:?}", path.to_string_lossy())).with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn token(n: u64) -> FencingToken {
        FencingToken::new(n).unwrap()
    }

    fn raise(memory: &FileMemory, resource: &str, n: u64) -> u64 {
        pollster::block_on(memory.raise(&name(resource), token(n))).unwrap().get()
    }

    // R51
    #[test]
    fn tokens_survive_restarts_and_partially_written_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        let memory = FileMemory::open(&path).unwrap();
        assert_eq!((raise(&memory, "a b%é", 5), raise(&memory, "a b%é", 3)), (5, 5));
        assert_eq!(raise(&memory, "other", 1), 1);
        drop(memory);
        for torn in ["7 a%20b", "9", "\0\0\0\0\n", "12 x\0\n"] {
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(torn.as_bytes()).unwrap();
            let memory = FileMemory::open(&path).unwrap();
            assert_eq!(raise(&memory, "a b%é", 4), 5, "{torn:?}");
            assert_eq!(raise(&memory, "other", 1), 1, "{torn:?}");
        }
        assert_eq!(raise(&FileMemory::open(&path).unwrap(), "a b%é", 6), 6);
        assert_eq!(raise(&FileMemory::open(&path).unwrap(), "a b%é", 1), 6);
    }

    // R51
    #[test]
    fn token_file_in_use_or_of_another_program_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        let memory = FileMemory::open(&path).unwrap();
        assert_eq!(FileMemory::open(&path).unwrap_err().kind(), ErrorKind::Contended);
        drop(memory);
        fs::write(&path, "dear diary\n1 a\n").unwrap();
        assert_eq!(FileMemory::open(&path).unwrap_err().kind(), ErrorKind::Corrupt);
        let directory = dir.path().join("directory");
        fs::create_dir(&directory).unwrap();
        assert_eq!(FileMemory::open(directory).unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn log_is_compacted_without_losing_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        let memory = FileMemory::open(&path).unwrap();
        let rounds = 3 * SLACK as u64;
        for n in 1..=rounds {
            assert_eq!(raise(&memory, if n % 2 == 0 { "even" } else { "odd" }, n), n);
        }
        let size = fs::metadata(&path).unwrap().len();
        assert!(size < 15 * (SLACK as u64 + 10), "{size} bytes");
        drop(memory);
        let memory = FileMemory::open(&path).unwrap();
        assert_eq!((raise(&memory, "even", 1), raise(&memory, "odd", 1)), (rounds, rounds - 1));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_log_is_read_up_to_its_first_invalid_line(text in testbed::texts(&[
            "7 order%3A42\n9 x\n", "1 a\n2 a\n3 b",
        ])) {
            if let Some(read) = parse(text.as_bytes()) {
                proptest::prop_assert!(read.sound <= text.len() && read.marks.len() <= read.lines);
                let again = parse(&text.as_bytes()[..read.sound]).unwrap();
                proptest::prop_assert_eq!(again.marks, read.marks);
            }
        }
    }
}
