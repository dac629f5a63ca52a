//! Tokens that keep rising over crashes, deleted control files, set-back clocks and reboots, with
//! one fsync a minute and none per lock.
//!
//! A token is drawn in the lock's own queue: `max(last + 1, wall clock in µs)`. Two files see to
//! it that this rises where the queue's `last` does not survive:
//!
//! - `tokens` is **durable**: a ceiling that no answered token exceeds. It is raised to a minute
//!   ahead by write, fsync, rename, fsync of the directory.
//! - `tokens.boot` is **of this boot** and never synced: the ceiling that is known to have reached
//!   the disk; `base`, the durable ceiling as this boot found it; and `high`, the highest token of
//!   all control files that were deleted while nobody used them.
//!
//! A queue that is read starts above `base`, a new one above `high` as well (`high >= base`).
//!
//! # Why it rises
//! While the machine is up, files are what was last written: a control file knows its last token,
//! and one that is deleted has raised `high` *before*. After the machine went down, files may be
//! any older state; then `tokens.boot` is of another boot (or gone, or torn) and is not believed:
//! `base` becomes the durable ceiling, above every token that was ever answered, since a token
//! above the ceiling that `tokens.boot` shows is not answered before a higher one is durable, and
//! a ceiling is shown there only *after* its directory was synced.
//!
//! # If we die here
//! Before the rename: a stray temporary. After it: a ceiling that nobody uses yet; it is only
//! higher. Two that raise at once: the rename is done under the lock of `tokens.boot`, and only if
//! `tokens` is still what was read, so a ceiling is never lowered.

use leasehold_core::kit::locked;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fault::fault;
use super::held::{self, Held, Inode};
use super::place::Place;
use super::rights::{Acting, Rights};
use leasehold_core::{Error, ErrorKind, Result, Token};

/// How long after one client began to clear up another does, in microseconds.
const SWEEPS_APART: u64 = 1_000_000;
/// How far ahead the ceiling is raised, in microseconds: as often as this there is one fsync.
const AHEAD: u64 = 60_000_000;

#[derive(Debug)]
pub(super) struct Tokens {
    durable: PathBuf,
    of_boot: PathBuf,
    rights: Rights,
    acting: Acting,
    boot: String,
    open: Mutex<Option<Arc<File>>>,
    base: AtomicU64,
    ceiling: AtomicU64,
}

/// The only format of a store that there is; what does not say has this one.
const FORMAT: u32 = 1;

fn format_1() -> u32 {
    FORMAT
}

#[derive(Serialize, Deserialize)]
struct Durable {
    #[serde(default = "format_1")]
    leasehold: u32,
    ceiling: u64,
    /// What a later version keeps here is its own: it is written back as it was.
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

/// Who cleared up last (see `sweep`): when, by the wall clock in µs, and how far in each directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Swept {
    pub(super) at: u64,
    pub(super) root: u64,
    pub(super) clients: u64,
    pub(super) locks: u64,
}

impl Tokens {
    /// The tokens of the store there. `boot` is different after each start of the machine.
    pub(super) fn open(place: &Place, boot: String) -> Result<Self> {
        let tokens = Self {
            durable: place.root.join("tokens"),
            of_boot: place.root.join("tokens.boot"),
            rights: place.rights,
            acting: place.acting,
            boot,
            open: Mutex::default(),
            base: AtomicU64::new(0),
            ceiling: AtomicU64::new(0),
        };
        // Also where this boot has no use of it: it says which format the store has. Opening it
        // opens it to others, where it is ours and was made before the store was.
        if tokens.rights.is_shared() {
            let _ = held::open(&tokens.durable, false, tokens.rights);
        }
        tokens.read_durable()?;
        tokens.patiently(|| tokens.with(|_| {}))?;
        Ok(tokens)
    }

    /// No token of an earlier boot is above this.
    pub(super) fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// No token above this may be answered.
    pub(super) fn ceiling(&self) -> u64 {
        self.ceiling.load(Ordering::Relaxed)
    }

    /// Where a new queue starts; `None`: somebody is at it, try again.
    pub(super) fn floor(&self) -> Result<Option<u64>> {
        self.with(|of_boot| of_boot.high)
    }

    /// To be called before a control file whose last token this is may be deleted; `false`:
    /// somebody is at it, leave the file.
    pub(super) fn remember(&self, last: u64) -> Result<bool> {
        Ok(self.with(|of_boot| of_boot.high = of_boot.high.max(last))?.is_some())
    }

    /// What no token that was ever answered is above, in this boot or an earlier one; `None`:
    /// somebody is at it, try again.
    pub(super) fn highest(&self) -> Result<Option<u64>> {
        self.with(|of_boot| of_boot.high.max(of_boot.ceiling))
    }

    /// Whether it is this client's turn to clear up, at `now`, and from where on.
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

    /// Notes how far it came.
    pub(super) fn end_sweep(&self, reached: Swept) -> Result<()> {
        self.with(|of_boot| of_boot.swept = reached).map(|_| ())
    }

    /// Makes it right to answer this token. Waits for the disk: not to be called while anything is
    /// held, nor on a thread that must not wait.
    pub(super) fn raise_ceiling(&self, token: u64) -> Result<()> {
        let _as_owner = self.acting.now();
        // Another client may have raised it, and shown it, already.
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

    /// Works on what this boot knows, under its lock; `None`: somebody is at it.
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

    /// Holds `tokens.boot` for one piece of work; `None`: somebody else holds it.
    fn with_file<T>(&self, work: impl FnOnce(&File) -> Result<T>) -> Result<Option<T>> {
        let failed = |e| fault("open or lock", &self.of_boot, e);
        let mut open = locked(&self.open);
        loop {
            let file = match &mut *open {
                Some(file) => file.clone(),
                none => {
                    let opened = held::open(&self.of_boot, true, self.rights);
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

    /// Sections here are short, but for a client that is stopped inside one.
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
        let bytes = match fs::read(&self.durable) {
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
                format!(
                    "{:?} is damaged; tokens would restart at the wall clock if you deleted it",
                    self.durable.to_string_lossy()
                ),
            )
            .because(e)),
        }
    }

    fn write_durable(&self, text: &[u8]) -> Result<PathBuf> {
        let path = held::temporary(&self.durable).map_err(|e| fault("write", &self.durable, e))?;
        let written = held::create_new(&path, self.rights).and_then(|mut file| {
            file.write_all(text)?;
            file.sync_all()
        });
        if written.is_err() {
            let _ = fs::remove_file(&path);
        }
        written.map_err(|e| fault("write", &path, e))?;
        Ok(path)
    }

    /// Puts the new file in the old one's place. In a sticky directory only the owner of the old
    /// one may do so: everybody else writes the same into it. That is a few bytes of one sector,
    /// which a disk writes as a whole or not at all.
    fn replace_durable(&self, new: &Path, text: &[u8]) -> Result<()> {
        let refused = match fs::rename(new, &self.durable) {
            Ok(()) => return Ok(()),
            Err(e) => e,
        };
        if !matches!(Errno::from_io_error(&refused), Some(Errno::PERM | Errno::ACCESS)) {
            return Err(fault("replace", &self.durable, refused));
        }
        let written = (|| {
            let (file, _) = held::open(&self.durable, false, self.rights)?;
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

/// The error of what a later version of leasehold has written. Others may be using it this moment,
/// so nothing is said of deleting it or of going elsewhere.
pub(super) fn newer(path: &Path, format: u64) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{:?} was written by a newer leasehold (format {format}; this one knows {FORMAT}), and \
             is left as it is: upgrade this one",
            path.to_string_lossy()
        ),
    )
}

/// The error of a file that stays locked.
pub(super) fn stuck(path: &Path) -> Error {
    Error::new(
        ErrorKind::Unreachable,
        format!(
            "{:?} stays locked by a program that was stopped while it worked on it, or is not \
             ours: find it with `fuser` on that path and continue or end it, then try again",
            path.to_string_lossy()
        ),
    )
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
    fn a_ceiling_is_on_disk_before_a_token_below_it_is_answered() {
        let tmp = tempfile::tempdir().unwrap();
        let tokens = open(tmp.path(), "one");
        assert_eq!(tokens.ceiling(), 0, "nothing may be answered before the first fsync");
        tokens.raise_ceiling(1_000).unwrap();
        assert_eq!(tokens.ceiling(), 1_000 + AHEAD);
        assert_eq!(durable(&tokens), Some(1_000 + AHEAD));
        // Another client finds it without an fsync of its own; nobody lowers it.
        let other = open(tmp.path(), "one");
        assert_eq!(other.ceiling(), 1_000 + AHEAD);
        other.raise_ceiling(5).unwrap();
        assert_eq!(durable(&other), Some(1_000 + AHEAD));
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 2, "no temporaries stay");
    }

    #[test]
    fn s61_another_boot_resumes_from_the_ceiling_whatever_was_lost() {
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
    fn a_damaged_ceiling_is_told_and_not_guessed() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("tokens"), "rubbish").unwrap();
        let error = try_open(tmp.path(), "one").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("tokens"), "{error}");
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn what_a_later_version_keeps_is_written_back(text in testbed::texts(&[
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
