//! The control files. Each contains the queue of one lock, and only one client at a time works on
//! it.
//!
//! A **section** is flock, lstat, read, work, write and unlock. It takes microseconds, all in one
//! poll, and awaits nothing. So every call on the store is atomic for all clients. A dropped future
//! has either not entered its section or completed it.
//!
//! # If the client crashes
//! - *Before the write*: the kernel releases the flock, and nothing has changed.
//! - *The write is incomplete* (no space, a quota, a limit on file sizes): the old text is
//!   restored, and the call fails. If even that fails, the file is damaged. leasehold does not
//!   guess which claims it contained. [`Controls::repair`] creates an empty queue when an operator
//!   requests it.
//! - *During the write of a short queue*: a queue that fits into a page (about sixteen claims) is
//!   written by one `pwrite` that covers the old text. Blank lines fill up a shorter text. This is
//!   all or nothing, even with kill -9.
//! - *During the write of a longer queue*: the queue is written after the first page, to a place
//!   that the first page does not refer to. Then one `pwrite` makes the first page refer to it.
//! - *After the write, before the notifications*: the hint is lost, and the death of this client
//!   notifies the waiters.
//!
//! Renaming a new file over the old one would also be atomic. But ext4 starts to write such a file
//! to the disk immediately. That takes a third of a millisecond per change (measured), compared
//! with about ten microseconds.
//!
//! After a power failure a control file may have any older state, or be partially written. All
//! claims in it are dead then, and new tokens start above `base` (see [`tokens`](super::tokens)).
//! So an older state is harmless. A partially written file that was last changed before this boot
//! counts as empty.
//!
//! # Names that are used once leave nothing behind
//! A client keeps its most recently used control files open ([`Controls::enter`] then takes five
//! system calls). When a file leaves this cache and its queue is empty, it is unlinked under its
//! flock. Before that, its last token is stored as a lower bound for the tokens of all new files.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustix::fs::Stat;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::fault::fault;
use super::held::{self, Held, Inode, PAGE};
use super::path;
use super::place::Place;
use super::sweep;
use super::text::{self, Holders};
use super::tokens::{self, Tokens};
use leasehold_core::queue::Queue;
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Kind, Name, Result};

/// Control files that a client keeps open.
const KEPT_OPEN: usize = 128;
/// Maximum number of consecutive replacements of a file by other clients before this client yields.
const REPLACED: usize = 64;
/// The only format so far. Every change of a control file's content needs a new number, even a
/// single new field. Otherwise an older version would drop that field when it writes the queue
/// back. Every format begins with [`BEGINNING`] and its number, so that it can be recognized.
const FORMAT: u32 = 1;
/// The beginning of a control file in any format. The number of the format follows.
const BEGINNING: &[u8] = b"{\"leasehold\":";

/// Result of one attempt to work on a queue.
#[derive(Debug)]
pub(super) enum AttemptResult<T> {
    /// The work was done, and its changes are written.
    Done(T),
    /// The control file does not exist, and was not to be created.
    Absent,
    /// Another client is working on the control file.
    Locked,
}

#[derive(Debug)]
pub(super) struct Controls {
    place: Place,
    locks: PathBuf,
    pub(super) tokens: Tokens,
    kept_open: usize,
    cache: Mutex<Cache>,
}

type Slot = Arc<Mutex<Option<Control>>>;

#[derive(Debug, Default)]
struct Cache {
    slots: HashMap<Name, (Slot, u64)>,
    uses: u64,
}

/// An open control file, and its last known content.
#[derive(Debug)]
struct Control {
    file: Arc<File>,
    inode: Inode,
    path: PathBuf,
    /// Whether the file is certainly leasehold's, because this client created it or it identifies
    /// itself.
    ours: bool,
    /// The first page. Every change of the file also changes this page.
    text: Vec<u8>,
    /// The parsed queue, which is valid as long as the file begins with `text`.
    queue: Option<Queue>,
    /// The location of the queue, if it is longer than the first page.
    long: Option<Long>,
    /// Buffer for the next read.
    spare: Vec<u8>,
    /// Cached holders that were read from this file or written to it.
    holders: Holders,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ControlContents {
    leasehold: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queue: Option<Queue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    long: Option<Long>,
}

/// Reference in the first page to a longer queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Long {
    /// Offset of the queue in the file.
    at: u64,
    /// Length of the queue in bytes.
    len: u64,
    /// Random id of the last change.
    change: ClaimId,
}

impl Controls {
    pub(super) fn new(place: Place, tokens: Tokens) -> Result<Self> {
        let locks = place.root.join("locks");
        place.create_below(&locks)?;
        Ok(Self { place, locks, tokens, kept_open: KEPT_OPEN, cache: Mutex::default() })
    }

    #[cfg(test)]
    pub(super) fn keep_open(&mut self, files: usize) {
        self.kept_open = files;
    }

    /// Returns the path of this name's control file.
    pub(super) fn path(&self, name: &Name) -> PathBuf {
        self.locks.join(path::encode(name))
    }

    /// Tries once to work on the queue of `name`. If `work` returns `None`, nothing is written or
    /// changed.
    pub(super) fn enter<T>(
        &self,
        name: &Name,
        create: bool,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<AttemptResult<Option<T>>> {
        let _as_owner = self.place.acting.now();
        let slot = self.slot(name);
        let mut slot = locked(&slot);
        self.enter_slot(&mut slot, name, create, |control, stat| {
            self.section(control, stat, create, work)
        })
    }

    /// Tries once to work on a queue, like [`enter`](Self::enter), without keeping the file open.
    /// Removes the file if its queue is empty.
    pub(super) fn visit<T>(
        &self,
        name: &Name,
        work: impl FnOnce(&mut Queue) -> T,
    ) -> Result<AttemptResult<T>> {
        let _as_owner = self.place.acting.now();
        let mut slot = None;
        let result = self.enter_slot(&mut slot, name, false, |control, stat| {
            self.section(control, stat, false, |queue| Some(work(queue)))
        })?;
        self.retire(slot);
        Ok(match result {
            AttemptResult::Done(Some(done)) => AttemptResult::Done(done),
            AttemptResult::Done(None) | AttemptResult::Absent => AttemptResult::Absent,
            AttemptResult::Locked => AttemptResult::Locked,
        })
    }

    /// Replaces a damaged control file with an empty queue, on an operator's request. Returns
    /// whether the file was damaged. Returns an error for a file of another program or of a later
    /// version, and does not change it.
    pub(super) fn repair(&self, name: &Name) -> Result<AttemptResult<bool>> {
        let _as_owner = self.place.acting.now();
        let mut slot = None;
        self.enter_slot(&mut slot, name, false, |control, stat| {
            let len = control.read(stat).map_err(|e| fault("read", &control.path, e))?;
            match control.parse(stat) {
                Ok(_) => return Ok(AttemptResult::Done(false)),
                Err(_) if control.is_damaged() => {}
                Err(e) => return Err(e),
            }
            // It is unknown which tokens were drawn in the damaged file.
            let Some(highest) = self.tokens.highest()? else { return Ok(AttemptResult::Locked) };
            let mut queue = Queue::new(Kind::Mutex, 1, false);
            queue.raise_last_token(highest);
            self.write(control, &queue, len)?;
            Ok(AttemptResult::Done(true))
        })
    }

    /// Does `work` while the control file is locked, and while it is the file at the path.
    fn enter_slot<T>(
        &self,
        slot: &mut Option<Control>,
        name: &Name,
        create: bool,
        work: impl FnOnce(&mut Control, &Stat) -> Result<AttemptResult<T>>,
    ) -> Result<AttemptResult<T>> {
        for _ in 0..REPLACED {
            let control = match slot {
                Some(control) => control,
                None => match self.open(self.path(name), create)? {
                    Some(control) => slot.insert(control),
                    None => return Ok(AttemptResult::Absent),
                },
            };
            let failed = |e| fault("lock", &self.path(name), e);
            let Some(_held) = Held::try_take(&control.file).map_err(failed)? else {
                return Ok(AttemptResult::Locked);
            };
            let Some(stat) = control.inode.at_path(&control.path).map_err(failed)? else {
                *slot = None;
                continue;
            };
            return work(control, &stat);
        }
        Ok(AttemptResult::Locked)
    }

    /// Runs `work` on the queue of the locked control file. Writes the queue if `work` returned a
    /// result and changed the queue.
    fn section<T>(
        &self,
        control: &mut Control,
        stat: &Stat,
        create: bool,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<AttemptResult<Option<T>>> {
        let len = control.read(stat).map_err(|e| fault("read", &control.path, e))?;
        // The queue is taken out of the cache. If the work fails or panics, no partially changed
        // queue remains.
        let mut queue = match control.queue.take() {
            Some(queue) => queue,
            None => match control.parse(stat)? {
                Some(queue) => queue,
                None if !create => return Ok(AttemptResult::Absent),
                None => {
                    let mut queue = Queue::new(Kind::Mutex, 1, false);
                    let Some(floor) = self.tokens.floor()? else {
                        return Ok(AttemptResult::Locked);
                    };
                    queue.raise_last_token(floor);
                    queue
                }
            },
        };
        queue.raise_last_token(self.tokens.base());
        let before = QueueFingerprint::of(&queue);
        let Some(done) = work(&mut queue) else { return Ok(AttemptResult::Done(None)) };
        if QueueFingerprint::of(&queue) != before {
            self.write(control, &queue, len)?;
        }
        control.queue = Some(queue);
        Ok(AttemptResult::Done(Some(done)))
    }

    fn write(&self, control: &mut Control, queue: &Queue, len: usize) -> Result<()> {
        let mut text = std::mem::take(&mut control.spare);
        text.clear();
        let written = text::write(FORMAT, queue, &mut control.holders, &mut text);
        written.map_err(|e| fault("write", &control.path, e.into()))?;
        text.push(b'\n');
        let mut long = None;
        if text.len() > PAGE {
            let new = control.room_for(text.len())?;
            let failed = |e| fault("write", &control.path, e);
            control.file.write_all_at(&text, new.at).map_err(failed)?;
            text.clear();
            let first = ControlContents { leasehold: FORMAT, queue: None, long: Some(new.clone()) };
            serde_json::to_writer(&mut text, &first).map_err(|e| failed(e.into()))?;
            long = Some(new);
        }
        let covered = if long.is_some() { PAGE } else { len.min(PAGE) };
        text.resize(text.len().max(covered), b'\n');
        let written = held::write_page(&control.file, &text, &control.text, len as u64);
        written.map_err(|e| fault("write", &control.path, e))?;
        (control.long, control.ours) = (long, true);
        control.spare = std::mem::replace(&mut control.text, text);
        Ok(())
    }

    fn open(&self, path: PathBuf, create: bool) -> Result<Option<Control>> {
        for _ in 0..REPLACED {
            match held::open(&path, create, self.place.permissions) {
                Ok((file, created)) => {
                    let opened = Control::new(file, path.clone(), created);
                    return opened.map(Some).map_err(|e| fault("inspect", &path, e));
                }
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(fault("open", &path, e));
                }
                Err(_) if !create => return Ok(None),
                // The directory of a long name may have just been removed by its last user.
                Err(_) => self.place.create_below(path.parent().unwrap_or(&self.locks))?,
            }
        }
        Err(fault("create", &path, Errno::NOENT.into()))
    }

    fn slot(&self, name: &Name) -> Slot {
        let mut cache = locked(&self.cache);
        cache.uses += 1;
        let now = cache.uses;
        if let Some((slot, used)) = cache.slots.get_mut(name) {
            *used = now;
            return slot.clone();
        }
        let mut gone = None;
        if cache.slots.len() >= self.kept_open {
            // Only slots that no other thread uses are removed. Otherwise a thread would use a slot
            // that is not cached.
            let idle = cache.slots.iter().filter(|(_, (slot, _))| Arc::strong_count(slot) == 1);
            let oldest = idle.min_by_key(|(_, (_, used))| *used).map(|(name, _)| name.clone());
            gone = oldest.and_then(|name| cache.slots.remove_entry(&name));
        }
        let slot = Slot::default();
        cache.slots.insert(name.clone(), (slot.clone(), now));
        drop(cache);
        if let Some((_, (slot, _))) = gone {
            self.retire_slot(&slot);
        }
        slot
    }

    fn retire_slot(&self, slot: &Slot) {
        let control = locked(slot).take();
        self.retire(control);
    }

    /// Closes a control file, and removes it if its queue is empty. A failure only leaves a small
    /// file behind.
    fn retire(&self, control: Option<Control>) {
        let Some(mut control) = control else { return };
        let Ok(Some(_held)) = Held::try_take(&control.file) else { return };
        let Ok(Some(stat)) = control.inode.at_path(&control.path) else { return };
        if control.read(&stat).is_err() {
            return;
        }
        let queue = match control.queue.take() {
            Some(queue) => Some(queue),
            None => match control.parse(&stat) {
                Ok(queue) => queue,
                Err(_) => return,
            },
        };
        if !control.ours {
            return;
        }
        let path = control.path.as_path();
        if let Some(queue) = queue {
            let forgotten = queue.is_empty()
                && self.tokens.remember(queue.last_token()).is_ok_and(|remembered| remembered);
            if !forgotten {
                return;
            }
        }
        if fs::remove_file(path).is_ok() {
            // Removes the directories of a long name. A directory in use is not empty, so it stays.
            let above = path.ancestors().skip(1).take_while(|dir| *dir != self.locks);
            for dir in above {
                if fs::remove_dir(dir).is_err() {
                    break;
                }
            }
        }
    }

    /// Returns all names that have a control file.
    pub(super) fn names(&self) -> Result<Vec<Name>> {
        let _as_owner = self.place.acting.now();
        let mut names = Vec::new();
        self.names_below(vec![PathBuf::new()], usize::MAX, &mut names)?;
        names.sort();
        Ok(names)
    }

    /// Returns some names from the position `from` on, and the next position (0 at the end).
    /// Removes temporary files of dead clients on the way.
    pub(super) fn some_names(&self, from: u64, now: u64) -> Result<(Vec<Name>, u64)> {
        let _as_owner = self.place.acting.now();
        let failed = |e| fault("read the directory", &self.locks, e);
        let (found, reached) = sweep::batch(&self.locks, from).map_err(failed)?;
        let (mut names, mut dirs) = (Vec::new(), Vec::new());
        for entry in found.into_iter().map(PathBuf::from) {
            match entry.as_os_str().as_encoded_bytes().last() {
                Some(b'+') => dirs.push(entry),
                Some(b'~') => sweep::remove_temporary(&self.locks.join(entry), now, |stem| {
                    stem.ends_with('+') || path::decode(Path::new(stem)).is_some()
                }),
                _ => names.extend(path::decode(&entry)),
            }
        }
        self.names_below(dirs, sweep::BATCH, &mut names)?;
        Ok((names, reached))
    }

    /// Returns the names in these directories and the directories below, at most `most` per
    /// directory.
    fn names_below(
        &self,
        mut dirs: Vec<PathBuf>,
        most: usize,
        names: &mut Vec<Name>,
    ) -> Result<()> {
        while let Some(dir) = dirs.pop() {
            let whole = self.locks.join(&dir);
            let entries = match fs::read_dir(&whole) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(fault("read the directory", &whole, e)),
            };
            for entry in entries.take(most) {
                let entry = entry.map_err(|e| fault("read the directory", &whole, e))?;
                let below = dir.join(entry.file_name());
                let bytes = entry.file_name().into_encoded_bytes();
                match bytes.last() {
                    // Symbolic links are not followed.
                    Some(b'+') if entry.file_type().is_ok_and(|kind| kind.is_dir()) => {
                        dirs.push(below);
                    }
                    _ => names.extend(path::decode(&below)),
                }
            }
        }
        Ok(())
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        let _as_owner = self.place.acting.now();
        let cache = self.cache.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let slots = std::mem::take(&mut cache.slots);
        for (slot, _) in slots.into_values() {
            self.retire_slot(&slot);
        }
    }
}

impl Control {
    fn new(file: File, path: PathBuf, ours: bool) -> io::Result<Self> {
        let (inode, file) = (Inode::of(&file)?, Arc::new(file));
        let (text, spare, holders) = (Vec::new(), Vec::new(), Holders::default());
        Ok(Self { file, inode, path, ours, text, queue: None, long: None, spare, holders })
    }

    /// Reads the first page, and discards the parsed queue if the page changed. Returns the file's
    /// length.
    fn read(&mut self, stat: &Stat) -> io::Result<usize> {
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        held::read(&self.file, 0, len.min(PAGE), &mut self.spare)?;
        if self.spare != self.text {
            self.queue = None;
            std::mem::swap(&mut self.spare, &mut self.text);
        }
        Ok(len)
    }

    /// Returns a location for `len` bytes that overlaps no valid data, either before or after the
    /// current queue. So the file is never longer than the first page plus three times its longest
    /// queue.
    fn room_for(&self, len: usize) -> Result<Long> {
        let (first, len) = (PAGE as u64, len as u64);
        let at = match &self.long {
            Some(now) if first + len > now.at => now.at + now.len,
            _ => first,
        };
        Ok(Long { at, len, change: ClaimId::random()? })
    }

    /// Parses the file. Returns `None` if it is empty.
    fn parse(&mut self, stat: &Stat) -> Result<Option<Queue>> {
        self.long = None;
        if self.content().is_empty() {
            return Ok(None);
        }
        let found = self.found(stat).map_err(|e| fault("read", &self.path, e))?;
        let why = match found {
            Ok(ControlContents { leasehold: FORMAT, queue: Some(queue), .. }) => {
                self.ours = true;
                return Ok(Some(queue));
            }
            found => found.err().map_or_else(|| "no queue in it".to_owned(), |e| e.to_string()),
        };
        if let Some(format) = self.newer(&why) {
            return Err(tokens::newer(&self.path, format));
        }
        if self.is_damaged() && before_boot(stat) {
            self.ours = true;
            return Ok(None);
        }
        let (path, why) = (self.path.to_string_lossy(), why.lines().next().unwrap_or_default());
        let (what, hint) = match self.is_damaged() {
            true => (
                format!(
                    "corrupt lock file {path:?} ({why}), probably a partial write. A current \
                     holder keeps the lock"
                ),
                format!(
                    "when no client holds the lock, run `leasehold evict {}`",
                    self.shown_name()
                ),
            ),
            false => (
                format!("the file {path:?} belongs to another program ({why})"),
                "move it away, or use another directory as the store".to_owned(),
            ),
        };
        Err(Error::new(ErrorKind::Corrupt, what).with_hint(hint))
    }

    /// Returns the lock's name for a command line, derived from the path.
    fn shown_name(&self) -> String {
        let mut above = self.path.ancestors().filter(|dir| dir.ends_with("locks"));
        let name = above.find_map(|locks| path::decode(self.path.strip_prefix(locks).ok()?));
        name.map_or_else(|| "NAME".to_owned(), |name| format!("{:?}", name.as_str()))
    }

    /// Returns the format of the file if a later version wrote it.
    fn newer(&self, why: &str) -> Option<u64> {
        let number = self.content().strip_prefix(BEGINNING)?;
        let digits = number.iter().take_while(|b| b.is_ascii_digit()).count();
        let format = str::from_utf8(&number[..digits]).ok()?.parse().ok()?;
        // By rule, each new field needs a new format. If a version broke that rule, its field must
        // still not be lost.
        let whole = || serde_json::from_slice::<serde::de::IgnoredAny>(self.content()).is_ok();
        let is_newer = format != u64::from(FORMAT) || (why.starts_with("unknown ") && whole());
        is_newer.then_some(format)
    }

    /// Returns whether unreadable content began as a control file of leasehold.
    fn is_damaged(&self) -> bool {
        let ours = [BEGINNING, FORMAT.to_string().as_bytes()].concat();
        let text = self.content();
        let (both, same) = (ours.len().min(text.len()), |n: usize| text[..n] == ours[..n]);
        let ended = text.get(ours.len()).is_none_or(|b| !b.is_ascii_digit());
        !text.is_empty() && same(both) && ended
    }

    /// Returns the first page without trailing zeros. They appear if a client crashed between the
    /// two writes of a long queue.
    fn content(&self) -> &[u8] {
        let end = self.text.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        &self.text[..end]
    }

    fn found(&mut self, stat: &Stat) -> io::Result<serde_json::Result<ControlContents>> {
        let line = line(&self.text);
        if let Some(queue) =
            line.and_then(|text_read| text::read(FORMAT, text_read, &mut self.holders))
        {
            return Ok(Ok(ControlContents { leasehold: FORMAT, queue: Some(queue), long: None }));
        }
        let first = serde_json::from_slice::<ControlContents>(line.unwrap_or(self.content()));
        let Ok(ControlContents { leasehold: FORMAT, long: Some(long), .. }) = first else {
            return Ok(first);
        };
        // The offset and the length come from a file, so they are untrusted. A length that exceeds
        // the file is not allocated.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let len = long.len.min(size.saturating_sub(long.at));
        let mut text = Vec::new();
        held::read(&self.file, long.at, usize::try_from(len).unwrap_or(0), &mut text)?;
        self.long = Some(long);
        if let Some(queue) = text::read(FORMAT, &text, &mut self.holders) {
            return Ok(Ok(ControlContents { leasehold: FORMAT, queue: Some(queue), long: None }));
        }
        Ok(serde_json::from_slice(&text))
    }
}

/// Returns the first line of a text if only blank lines follow it.
fn line(text: &[u8]) -> Option<&[u8]> {
    const BLANK: [u8; PAGE] = [b'\n'; PAGE];
    let (line, blank) = text.split_at(text.iter().position(|&b| b == b'\n')?);
    BLANK.starts_with(blank).then_some(line)
}

/// Returns whether the file was last changed before the machine started. All claims in it are then
/// dead.
fn before_boot(stat: &Stat) -> bool {
    let up = Duration::from_nanos(Clock::default().now().as_nanos());
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let boot = since_1970.saturating_sub(up).as_secs();
    u64::try_from(stat.st_mtime).is_ok_and(|changed| changed < boot)
}

/// Fingerprint that differs whenever an operation changed the queue.
///
/// Only joining raises `last`. All other operations make the queue shorter, turn waiters into
/// holders, turn holders into departed entries, or change a holder's weight. Waiters and holders
/// never change back.
#[derive(PartialEq, Eq)]
struct QueueFingerprint {
    last: u64,
    len: usize,
    holding: usize,
    departed: usize,
    /// Total weight of the holders.
    weight: u64,
}

impl QueueFingerprint {
    fn of(queue: &Queue) -> Self {
        use leasehold_core::store::ClaimState::{Cooldown, Holding};
        let entries = queue.entries();
        let (last, len) = (queue.last_token(), entries.len());
        let (mut holding, mut departed, mut weight) = (0, 0, 0);
        for entry in entries {
            let holds = entry.state == Holding;
            holding += usize::from(holds);
            weight += if holds { u64::from(entry.weight) } else { 0 };
            departed += usize::from(entry.state == Cooldown);
        }
        Self { last, len, holding, departed, weight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_control_file_is_a_working_queue_or_rejected(
            text in testbed::texts(&[
                "{\"leasehold\":1,\"queue\":{\"kind\":\"Semaphore\",\"capacity\":4,\"leases\":false,\"last\":7,\"entries\":[{\"id\":\"0123456789abcdef0123456789abcdef\",\"token\":6,\"weight\":3,\"standing\":\"Holding\",\"since\":5,\"lock_delay\":9,\"holder\":{\"host\":\"h\",\"pid\":1,\"label\":\"\"},\"session\":\"s\"},{\"id\":\"1123456789abcdef0123456789abcdef\",\"token\":7,\"weight\":2,\"standing\":\"Waiting\",\"since\":6,\"expires\":99,\"holder\":{\"host\":\"h\",\"pid\":2,\"label\":\"x\"}}]}}",
                "{\"leasehold\":1,\"long\":{\"at\":4096,\"len\":9000,\"change\":\"0123456789abcdef0123456789abcdef\"}}",
            ]),
            now in proptest::prelude::any::<u64>(),
        ) {
            let found = serde_json::from_slice::<ControlContents>(text.as_bytes());
            if let Ok(ControlContents { queue: Some(mut queue), .. }) = found {
                let claim = leasehold_core::Claim::new(
                    Name::new("x").unwrap(), queue.kind(), 1, queue.capacity(),
                ).unwrap();
                let at = leasehold_core::queue::StoreTime { now, stamp: now };
                let _ = QueueFingerprint::of(&queue);
                let _ = queue.join(&claim, leasehold_core::store::Mode::Wait, at, "");
                let lease = std::time::Duration::MAX;
                let _ = queue.renew(&claim, lease, now.wrapping_add(1));
                let shown = queue.claims(now);
                proptest::prop_assert_eq!(shown.len(), queue.entries().len());
                queue.leave(claim.id, Some(lease), now);
                queue.evict(leasehold_core::store::Evict::Holders, now);
                let written = serde_json::to_string(&queue).unwrap();
                let again: Queue = serde_json::from_str(&written).unwrap();
                proptest::prop_assert_eq!(again.last_token(), queue.last_token());
            }
        }
    }
}
