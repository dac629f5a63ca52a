//! Tokens that keep rising after crashes, deleted control files, clocks that were set back, and
//! reboots. They need one fsync a minute, and none per lock.
//!
//! A token is drawn in the lock's own queue, as `max(last + 1, wall clock in µs)`. Two files make
//! it rise even if the queue's `last` is lost:
//!
//! - `tokens` is **durable**. It contains a ceiling that no returned token exceeds. The ceiling is
//!   raised to a minute ahead by write, fsync, rename and fsync of the directory.
//! - `tokens.boot` is **valid for this boot** and never synced. It contains the ceiling that is
//!   known to be on the disk, and `base`, the durable ceiling at the start of this boot. It also
//!   contains `high`, the highest token of all control files that were deleted because they were
//!   unused.
//!
//! An existing queue starts above `base`, a new one also above `high` (`high >= base`).
//!
//! # Why tokens rise
//! While the machine is up, files contain what was last written. A control file contains its last
//! token, and `high` was raised *before* a control file is deleted.
//!
//! After the machine went down, files may have any older state. Then `tokens.boot` is from another
//! boot (or missing or partially written) and is ignored, and `base` becomes the durable ceiling.
//! That ceiling is above every token that was ever returned, for two reasons. A token above the
//! ceiling in `tokens.boot` is not returned before a higher ceiling is durable. And a ceiling is
//! written to `tokens.boot` only *after* the directory was synced.
//!
//! # If the client crashes
//! Before the rename it leaves a temporary file behind. After the rename it leaves a higher ceiling
//! that is not used yet, which is harmless.
//!
//! Two clients may raise the ceiling at once. The rename is done under the lock of `tokens.boot`,
//! and only if `tokens` has not changed since it was read. So a ceiling is never lowered.

use leasehold_core::kit::locked;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fault::fault;
use super::held::{self, Held, Inode};
use super::permissions::{Acting, FilePermissions};
use super::place::Place;
use leasehold_core::{Error, ErrorKind, Result, Token};

/// Minimum time between the starts of two cleanups, in microseconds.
const SWEEPS_APART: u64 = 1_000_000;
/// Distance by which the ceiling is raised, in microseconds. There is one fsync in that time.
const AHEAD: u64 = 60_000_000;

#[derive(Debug)]
pub(super) struct Tokens {
    durable: PathBuf,
    of_boot: PathBuf,
    permissions: FilePermissions,
    acting: Acting,
    boot: String,
    open: Mutex<Option<Arc<File>>>,
    base: AtomicU64,
    ceiling: AtomicU64,
}

/// The only format of a store so far. A file without a number has this format.
const FORMAT: u32 = 1;
/// The maximum number of bytes that are read from the durable file.
const MOST_BYTES: u64 = 4096;

fn format_1() -> u32 {
    FORMAT
}

#[derive(Serialize, Deserialize)]
struct Durable {
    #[serde(default = "format_1")]
    leasehold: u32,
    ceiling: u64,
    /// Fields of a later version, which are written back unchanged.
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Clone, Serialize, Deserialize)]
struct OfBoot {
    boot: String,
    base: u64,
    high: u64,
    ceiling: u64,
    #[serde(default)]
    swept: Swept,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Last cleanup (see `sweep`): its wall-clock time in µs, and its position in each directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Swept {
    pub(super) at: u64,
    pub(super) root: u64,
    pub(super) clients: u64,
    pub(super) locks: u64,
}

impl Tokens {
    /// Opens the tokens of the store. `boot` is different after each start of the machine.
    pub(super) fn open(place: &Place, boot: String) -> Result<Self> {
        let tokens = Self {
            durable: place.root.join("tokens"),
            of_boot: place.root.join("tokens.boot"),
            permissions: place.permissions,
            acting: place.acting,
            boot,
            open: Mutex::default(),
            base: AtomicU64::new(0),
            ceiling: AtomicU64::new(0),
        };
        // This is done even if this boot does not need the file, because it contains the format of
        // the store. Opening the file also updates its permissions, if this user created it before
        // the store was shared.
        if tokens.permissions.is_shared() {
            let _ = held::open(&tokens.durable, false, tokens.permissions);
        }
        tokens.read_durable()?;
        tokens.patiently(|| tokens.with(|_| {}))?;
        Ok(tokens)
    }

    /// Returns a number that no token of an earlier boot exceeds.
    pub(super) fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// Returns the number that no returned token may exceed.
    pub(super) fn ceiling(&self) -> u64 {
        self.ceiling.load(Ordering::Relaxed)
    }

    /// Returns the token above which a new queue starts, or `None` if another client has locked the
    /// file.
    pub(super) fn floor(&self) -> Result<Option<u64>> {
        self.with(|of_boot| of_boot.high)
    }

    /// Stores the last token of a control file before that file is deleted. Returns `false` if
    /// another client has locked `tokens.boot`, and the control file must then stay.
    pub(super) fn remember(&self, last: u64) -> Result<bool> {
        Ok(self.with(|of_boot| of_boot.high = of_boot.high.max(last))?.is_some())
    }

    /// Returns a number that no token ever returned exceeds, in this boot or an earlier one.
    /// Returns `None` if another client has locked `tokens.boot`.
    pub(super) fn highest(&self) -> Result<Option<u64>> {
        self.with(|of_boot| of_boot.high.max(of_boot.ceiling))
    }

    /// Returns the start positions if a cleanup is due at `now`, and records that the cleanup has
    /// begun.
    pub(super) fn begin_sweep(&self, now: u64) -> Result<Option<Swept>> {
        let begun = self.with(|of_boot| {
            let recent = now.checked_sub(of_boot.swept.at).is_some_and(|age| age < SWEEPS_APART);
            (!recent).then(|| {
                of_boot.swept.at = now;
                of_boot.swept
            })
        });
        Ok(begun?.flatten())
    }

    /// Stores the positions that a cleanup reached.
    pub(super) fn end_sweep(&self, reached: Swept) -> Result<()> {
        self.with(|of_boot| of_boot.swept = reached).map(|_| ())
    }

    /// Raises the ceiling, if necessary, so that this token may be returned. Waits for the disk, so
    /// do not call it while a control file is locked, or on a thread that must not block.
    pub(super) fn raise_ceiling(&self, token: u64) -> Result<()> {
        let _as_owner = self.acting.now();
        // Another client may have raised the ceiling already.
        self.patiently(|| self.with(|_| {}))?;
        if token <= self.ceiling() {
            return Ok(());
        }
        loop {
            let seen = self.read_durable()?;
            let ceiling = |durable: &Option<Durable>| durable.as_ref().map(|d| d.ceiling);
            let above =
                token.max(ceiling(&seen).unwrap_or(0)).saturating_add(AHEAD).min(Token::MAX);
            let others = seen.as_ref().map(|d| d.others.clone()).unwrap_or_default();
            let text = Durable { leasehold: FORMAT, ceiling: above, others };
            let mut text =
                serde_json::to_vec(&text).map_err(|e| fault("write", &self.durable, e.into()))?;
            text.push(b'\n');
            let new = self.write_durable(&text)?;
            let raised = self.patiently(|| {
                self.with_file(|_| match ceiling(&self.read_durable()?) == ceiling(&seen) {
                    true => self.replace_durable(&new, &text).map(|()| true),
                    false => Ok(false),
                })
            });
            if !matches!(raised, Ok(true)) {
                let _ = fs::remove_file(&new);
            }
            if raised? {
                self.sync_directory()?;
                self.patiently(|| self.with(|o| o.ceiling = o.ceiling.max(above)))?;
                return Ok(());
            }
        }
    }

    /// Works on the data of this boot under its lock. Returns `None` if another client holds the
    /// lock.
    fn with<T>(&self, work: impl FnOnce(&mut OfBoot) -> T) -> Result<Option<T>> {
        self.with_file(|file| {
            let failed = |e| fault("read or write", &self.of_boot, e);
            let mut bytes = Vec::with_capacity(256);
            let whole = file.metadata().map_err(failed)?.len();
            let len = usize::try_from(whole).unwrap_or(usize::MAX).min(held::PAGE);
            held::read(file, 0, len, &mut bytes).map_err(failed)?;
            let found = serde_json::from_slice::<OfBoot>(&bytes).ok();
            let mut of_boot = match found.filter(|o| o.boot == self.boot) {
                Some(of_boot) => of_boot,
                None => {
                    let ceiling = self.read_durable()?.map_or(0, |durable| durable.ceiling);
                    let (boot, base, high) = (self.boot.clone(), ceiling, ceiling);
                    let (swept, others) = (Swept::default(), Map::new());
                    OfBoot { boot, base, high, ceiling, swept, others }
                }
            };
            let done = work(&mut of_boot);
            let mut text = serde_json::to_vec(&of_boot).map_err(|e| failed(e.into()))?;
            text.resize((text.len() + 1).max(len), b'\n');
            if text != bytes {
                held::write_page(file, &text, &bytes, whole).map_err(failed)?;
            }
            self.base.store(of_boot.base, Ordering::Relaxed);
            self.ceiling.store(of_boot.ceiling, Ordering::Relaxed);
            Ok(done)
        })
    }

    /// Runs `work` while holding the lock on `tokens.boot`. Returns `None` if another client holds
    /// the lock.
    fn with_file<T>(&self, work: impl FnOnce(&File) -> Result<T>) -> Result<Option<T>> {
        let failed = |e| fault("open or lock", &self.of_boot, e);
        let mut open = locked(&self.open);
        loop {
            let file = match &mut *open {
                Some(file) => file.clone(),
                none => {
                    let opened = held::open(&self.of_boot, true, self.permissions);
                    none.insert(Arc::new(opened.map_err(failed)?.0)).clone()
                }
            };
            let Some(_held) = Held::try_take(&file).map_err(failed)? else { return Ok(None) };
            let found = Inode::of(&file).and_then(|inode| inode.at_path(&self.of_boot));
            if found.map_err(failed)?.is_none() {
                *open = None;
                continue;
            }
            return work(&file).map(Some);
        }
    }

    /// Retries for about two seconds. Sections on `tokens.boot` are short, unless a client is
    /// paused inside one.
    fn patiently<T>(&self, mut work: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        for _ in 0..2_000 {
            if let Some(done) = work()? {
                return Ok(done);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(stuck(&self.of_boot))
    }

    fn read_durable(&self) -> Result<Option<Durable>> {
        let bytes = match read_regular(&self.durable) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fault("read", &self.durable, e)),
        };
        match serde_json::from_slice::<Durable>(&bytes) {
            Ok(durable) if durable.leasehold != FORMAT => {
                Err(newer(&self.durable, u64::from(durable.leasehold)))
            }
            Ok(durable) => Ok(Some(durable)),
            Err(e) => Err(Error::new(
                ErrorKind::Corrupt,
                format!("corrupt token file {:?}", self.durable.to_string_lossy()),
            )
            .with_hint(
                "restore it from a backup; if you delete it, new tokens restart at the wall clock",
            )
            .with_source(e)),
        }
    }

    fn write_durable(&self, text: &[u8]) -> Result<PathBuf> {
        let path = held::temporary(&self.durable).map_err(|e| fault("write", &self.durable, e))?;
        let written = held::create_new(&path, self.permissions).and_then(|mut file| {
            file.write_all(text)?;
            file.sync_all()
        });
        if written.is_err() {
            let _ = fs::remove_file(&path);
        }
        written.map_err(|e| fault("write", &path, e))?;
        Ok(path)
    }

    /// Replaces the old file by the new one. In a sticky directory only the old file's owner may
    /// rename over it, so other users write the same content into it. That is a few bytes of one
    /// sector, which a disk writes completely or not at all.
    fn replace_durable(&self, new: &Path, text: &[u8]) -> Result<()> {
        let refused = match fs::rename(new, &self.durable) {
            Ok(()) => return Ok(()),
            Err(e) => e,
        };
        if !matches!(Errno::from_io_error(&refused), Some(Errno::PERM | Errno::ACCESS)) {
            return Err(fault("replace", &self.durable, refused));
        }
        let written = (|| {
            let (file, _) = held::open(&self.durable, false, self.permissions)?;
            let len = file.metadata()?.len();
            let mut text = text.to_vec();
            text.resize(text.len().max(usize::try_from(len).unwrap_or(0).min(held::PAGE)), b'\n');
            file.write_all_at(&text, 0)?;
            file.sync_all()?;
            fs::remove_file(new)
        })();
        written.map_err(|e| fault("write", &self.durable, e))
    }

    fn sync_directory(&self) -> Result<()> {
        let root = self.durable.parent().unwrap_or(Path::new("/"));
        let synced = File::open(root).and_then(|dir| dir.sync_all());
        synced.map_err(|e| fault("sync", root, e))
    }
}

/// Returns the error for a file of a later version. Other clients may be using it, so the hint
/// never advises to delete it or to use another directory.
pub(super) fn newer(path: &Path, format: u64) -> Error {
    let what = format!(
        "{:?} was written by a newer leasehold (format {format}, this version supports {FORMAT}), \
         and was left unchanged",
        path.to_string_lossy()
    );
    Error::new(ErrorKind::Unsupported, what).with_hint("upgrade this leasehold")
}

/// Reads a small regular file. Another member of the directory's group may have put something else
/// there: a FIFO, whose reader blocks, or a link to a device without an end.
fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the error for a file that stays locked.
pub(super) fn stuck(path: &Path) -> Error {
    let path = path.to_string_lossy();
    let what = format!("{path:?} stays locked by another process, which may be paused");
    let hint = format!("find the process with `fuser {path:?}`, resume or end it, then retry");
    Error::new(ErrorKind::Unreachable, what).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn try_open(root: &Path, boot: &str) -> Result<Tokens> {
        Tokens::open(&Place::find(&format!("file:{}", root.display())).unwrap(), boot.into())
    }

    fn open(root: &Path, boot: &str) -> Tokens {
        try_open(root, boot).unwrap()
    }

    fn durable(tokens: &Tokens) -> Option<u64> {
        tokens.read_durable().unwrap().map(|durable| durable.ceiling)
    }

    #[test]
    fn ceiling_is_on_disk_before_tokens_below_it_are_returned() {
        let tmp = tempfile::tempdir().unwrap();
        let tokens = open(tmp.path(), "one");
        assert_eq!(tokens.ceiling(), 0, "a token may be returned before the first fsync");
        tokens.raise_ceiling(1_000).unwrap();
        assert_eq!(tokens.ceiling(), 1_000 + AHEAD);
        assert_eq!(durable(&tokens), Some(1_000 + AHEAD));
        // Another client finds the ceiling without its own fsync, and never lowers it.
        let other = open(tmp.path(), "one");
        assert_eq!(other.ceiling(), 1_000 + AHEAD);
        other.raise_ceiling(5).unwrap();
        assert_eq!(durable(&other), Some(1_000 + AHEAD));
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 2, "temporary files remain");
    }

    #[test]
    fn only_a_regular_token_file_is_read() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("tokens");
        let reason = || read_regular(&file).unwrap_err().to_string();
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        assert_eq!(reason(), "not a regular file");
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        assert!(reason().contains("symbolic link"), "{}", reason());
        fs::remove_file(&file).unwrap();
        fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(read_regular(&file).unwrap().len() as u64, MOST_BYTES);
    }

    // S61
    #[test]
    fn another_boot_resumes_from_the_ceiling_whatever_was_lost() {
        let tmp = tempfile::tempdir().unwrap();
        open(tmp.path(), "one").raise_ceiling(1_000).unwrap();
        let ceiling = 1_000 + AHEAD;
        let after = open(tmp.path(), "two");
        assert_eq!((after.base(), after.floor().unwrap()), (ceiling, Some(ceiling)));
        assert!(after.remember(ceiling + 7).unwrap());
        assert_eq!(open(tmp.path(), "two").floor().unwrap(), Some(ceiling + 7));
        assert_eq!(open(tmp.path(), "two").base(), ceiling);
        for torn in ["", "{\"boot\":\"two\",\"ba", "\0\0\0"] {
            fs::write(tmp.path().join("tokens.boot"), torn).unwrap();
            assert_eq!(open(tmp.path(), "two").floor().unwrap(), Some(ceiling));
        }
    }

    #[test]
    fn racing_raises_never_lower_the_ceiling() {
        let tmp = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for client in 0..4 {
                let root = tmp.path();
                scope.spawn(move || {
                    let tokens = open(root, "one");
                    for i in 1..6 {
                        let token = (client + 4 * i) * 2 * AHEAD;
                        tokens.raise_ceiling(token).unwrap();
                        assert!(tokens.ceiling() >= token);
                        assert!(durable(&tokens) >= Some(tokens.ceiling()));
                    }
                });
            }
        });
        assert!(open(tmp.path(), "one").ceiling() >= 23 * 2 * AHEAD);
    }

    #[test]
    fn damaged_ceiling_is_reported_and_not_guessed() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("tokens"), "rubbish").unwrap();
        let error = try_open(tmp.path(), "one").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("tokens"), "{error}");
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn fields_of_a_newer_version_are_preserved(text in testbed::texts(&[
            "{\"leasehold\":1,\"ceiling\":17,\"more\":{\"a\":[1,2]}}",
            "{\"boot\":\"b\",\"base\":1,\"high\":2,\"ceiling\":3,\"swept\":{\"at\":1},\"more\":null}",
        ])) {
            let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            if let Ok(durable) = serde_json::from_str::<Durable>(&text) {
                let (written, before) = (serde_json::to_value(&durable).unwrap(), value(&text));
                for (key, kept) in before.as_object().unwrap() {
                    proptest::prop_assert_eq!(&written[key], kept);
                }
            }
            if let Ok(of_boot) = serde_json::from_str::<OfBoot>(&text) {
                let (written, before) = (serde_json::to_value(&of_boot).unwrap(), value(&text));
                proptest::prop_assert_eq!(&written["high"], &before["high"]);
            }
        }
    }
}
