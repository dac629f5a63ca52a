//! The control files: one lock's queue each, worked on by one client at a time.
//!
//! A **section** is flock, lstat, read, work, write, unlock: microseconds, all in one poll, nothing
//! awaited. So every call on the store is atomic to everybody, and a dropped future was either
//! before its section or after it.
//!
//! # What if we die here
//! - *Before the write*: the kernel drops the flock, nothing has changed.
//! - *The write ends before all is written* (no room, a quota, a limit on the size of files): the
//!   old text is put back, and the call fails. If even that fails, the file is damaged: nobody
//!   guesses who was in it, and [`Controls::mend`] makes it new when a person says so.
//! - *In the write*: a queue that fits a page (some sixteen claims) is written by one `pwrite`
//!   that covers the old text (blank lines fill up what it is shorter), which is all or nothing
//!   even to kill -9. A longer one is written behind the first page, where nothing is that the
//!   first page refers to; then the first page, in one `pwrite` again, refers to it. (A new file
//!   renamed over the old one would do as well, but ext4 starts writing such a file to the disk at
//!   once: a third of a millisecond for each change, measured, against some ten microseconds.)
//! - *After the write, before the others are told*: the hint is lost and our death tells them.
//!
//! After a power cut a control file may be any older state, or torn. All claims in it are dead
//! then, and its tokens start above `base` (see [`tokens`](super::tokens)), so that an older state
//! is harmless and a torn one, if it was last changed before this boot, counts as empty.
//!
//! # Once-used names leave nothing behind
//! A client keeps its last used control files open ([`Controls::enter`] is five system calls then).
//! When one goes from this cache and its queue is empty, it is unlinked under its flock, after its
//! last token was remembered for all new files.

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

/// How many control files a client keeps open.
const KEPT_OPEN: usize = 128;
/// How often in a row a file may be replaced under us before we let others run.
const REPLACED: usize = 64;
/// The only format there is. Whatever changes what is in a control file, be it one field more,
/// makes another one: who knows only the older would drop the field as it writes the queue back.
/// Every format begins with [`BEGINNING`] and its number, so that it can be told.
const FORMAT: u32 = 1;
const BEGINNING: &[u8] = b"{\"leasehold\":";

/// What became of one try to work on a queue.
#[derive(Debug)]
pub(super) enum Turn<T> {
    /// The work was done, and what it changed is written.
    Done(T),
    /// There is no control file, and none was to be created.
    Absent,
    /// Somebody else is at it now.
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

/// An open control file, and what was in it when we last looked.
#[derive(Debug)]
struct Control {
    file: Arc<File>,
    inode: Inode,
    path: PathBuf,
    /// Whether it is ours beyond doubt: we made it, or it said so.
    ours: bool,
    /// The first page. It differs whenever anything differs.
    text: Vec<u8>,
    /// What the file says, parsed: good for as long as `text` is what it starts with.
    queue: Option<Queue>,
    /// Where the queue is, if it is longer than the first page.
    long: Option<Long>,
    /// Kept for the next reading.
    spare: Vec<u8>,
    /// Those that were read or written here.
    holders: Holders,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Found {
    leasehold: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queue: Option<Queue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    long: Option<Long>,
}

/// What a first page says of a queue that is longer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Long {
    /// The byte of the file that it starts with.
    at: u64,
    /// How many bytes it has.
    len: u64,
    /// Another one with each change.
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

    /// The control file of this name.
    pub(super) fn path(&self, name: &Name) -> PathBuf {
        self.locks.join(path::encode(name))
    }

    /// Tries once to work on the queue of `name`. If `work` answers `None`, nothing is written and
    /// nothing has changed.
    pub(super) fn enter<T>(
        &self,
        name: &Name,
        create: bool,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<Turn<Option<T>>> {
        let _as_owner = self.place.acting.now();
        let slot = self.slot(name);
        let mut slot = locked(&slot);
        self.enter_slot(&mut slot, name, create, |control, stat| {
            self.section(control, stat, create, work)
        })
    }

    /// As [`enter`](Self::enter), for a look at a file that is not worth keeping open; what nobody
    /// is in any more is removed.
    pub(super) fn visit<T>(
        &self,
        name: &Name,
        work: impl FnOnce(&mut Queue) -> T,
    ) -> Result<Turn<T>> {
        let _as_owner = self.place.acting.now();
        let mut slot = None;
        let turn = self.enter_slot(&mut slot, name, false, |control, stat| {
            self.section(control, stat, false, |queue| Some(work(queue)))
        })?;
        self.retire(slot);
        Ok(match turn {
            Turn::Done(Some(done)) => Turn::Done(done),
            Turn::Done(None) | Turn::Absent => Turn::Absent,
            Turn::Locked => Turn::Locked,
        })
    }

    /// Makes a damaged control file an empty queue, by a person's order; tells whether it was
    /// damaged. What is not ours, or a later version's, stays and is an error.
    pub(super) fn mend(&self, name: &Name) -> Result<Turn<bool>> {
        let _as_owner = self.place.acting.now();
        let mut slot = None;
        self.enter_slot(&mut slot, name, false, |control, stat| {
            let len = control.read(stat).map_err(|e| fault("read", &control.path, e))?;
            match control.parse(stat) {
                Ok(_) => return Ok(Turn::Done(false)),
                Err(_) if control.is_damaged() => {}
                Err(e) => return Err(e),
            }
            // Nobody knows which tokens were drawn in it.
            let Some(highest) = self.tokens.highest()? else { return Ok(Turn::Locked) };
            let mut queue = Queue::new(Kind::Mutex, 1, false);
            queue.raise_last_token(highest);
            self.write(control, &queue, len)?;
            Ok(Turn::Done(true))
        })
    }

    /// Does `work` while the control file is held, and is what everybody else finds there.
    fn enter_slot<T>(
        &self,
        slot: &mut Option<Control>,
        name: &Name,
        create: bool,
        work: impl FnOnce(&mut Control, &Stat) -> Result<Turn<T>>,
    ) -> Result<Turn<T>> {
        for _ in 0..REPLACED {
            let control = match slot {
                Some(control) => control,
                None => match self.open(self.path(name), create)? {
                    Some(control) => slot.insert(control),
                    None => return Ok(Turn::Absent),
                },
            };
            let failed = |e| fault("lock", &self.path(name), e);
            let Some(_held) = Held::try_take(&control.file).map_err(failed)? else {
                return Ok(Turn::Locked);
            };
            let Some(stat) = control.inode.at_path(&control.path).map_err(failed)? else {
                *slot = None;
                continue;
            };
            return work(control, &stat);
        }
        Ok(Turn::Locked)
    }

    /// The section itself, while the file is held.
    fn section<T>(
        &self,
        control: &mut Control,
        stat: &Stat,
        create: bool,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<Turn<Option<T>>> {
        let len = control.read(stat).map_err(|e| fault("read", &control.path, e))?;
        // Taken out, so that work that fails or panics leaves no half-changed queue to be believed.
        let mut queue = match control.queue.take() {
            Some(queue) => queue,
            None => match control.parse(stat)? {
                Some(queue) => queue,
                None if !create => return Ok(Turn::Absent),
                None => {
                    let mut queue = Queue::new(Kind::Mutex, 1, false);
                    let Some(floor) = self.tokens.floor()? else { return Ok(Turn::Locked) };
                    queue.raise_last_token(floor);
                    queue
                }
            },
        };
        queue.raise_last_token(self.tokens.base());
        let before = Mark::of(&queue);
        let Some(done) = work(&mut queue) else { return Ok(Turn::Done(None)) };
        if Mark::of(&queue) != before {
            self.write(control, &queue, len)?;
        }
        control.queue = Some(queue);
        Ok(Turn::Done(Some(done)))
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
            let first = Found { leasehold: FORMAT, queue: None, long: Some(new.clone()) };
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
            match held::open(&path, create, self.place.rights) {
                Ok((file, created)) => {
                    let opened = Control::new(file, path.clone(), created);
                    return opened.map(Some).map_err(|e| fault("inspect", &path, e));
                }
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(fault("open", &path, e));
                }
                Err(_) if !create => return Ok(None),
                // A directory of a long name, perhaps removed this moment by who used it last.
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
            // Only what no other thread is about to use: it would be used without being kept.
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

    /// Closes a control file, and removes it if nobody is in its queue. Whatever fails only leaves
    /// a small file behind.
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
            // The directories of a long name; one that is in use is not empty.
            let above = path.ancestors().skip(1).take_while(|dir| *dir != self.locks);
            for dir in above {
                if fs::remove_dir(dir).is_err() {
                    break;
                }
            }
        }
    }

    /// All names that have a control file.
    pub(super) fn names(&self) -> Result<Vec<Name>> {
        let _as_owner = self.place.acting.now();
        let mut names = Vec::new();
        self.names_below(vec![PathBuf::new()], usize::MAX, &mut names)?;
        names.sort();
        Ok(names)
    }

    /// Some names, from where the last look ended, and where this one did (0: at the end). What
    /// dead clients were just making is removed on the way.
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

    /// The names in these directories and those below them; of each only so many.
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
                    // Not through a symbolic link.
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

    /// Reads the first page; what was parsed is forgotten if it changed. Tells the file's length.
    fn read(&mut self, stat: &Stat) -> io::Result<usize> {
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        held::read(&self.file, 0, len.min(PAGE), &mut self.spare)?;
        if self.spare != self.text {
            self.queue = None;
            std::mem::swap(&mut self.spare, &mut self.text);
        }
        Ok(len)
    }

    /// Where this many bytes overwrite nothing that counts: before the queue that is there now,
    /// or behind it. So the file is at most three times as long as the longest queue was.
    fn room_for(&self, len: usize) -> Result<Long> {
        let (first, len) = (PAGE as u64, len as u64);
        let at = match &self.long {
            Some(now) if first + len > now.at => now.at + now.len,
            _ => first,
        };
        Ok(Long { at, len, change: ClaimId::random()? })
    }

    /// What the file says; `None`: nothing.
    fn parse(&mut self, stat: &Stat) -> Result<Option<Queue>> {
        self.long = None;
        if self.said().is_empty() {
            return Ok(None);
        }
        let found = self.found(stat).map_err(|e| fault("read", &self.path, e))?;
        let why = match found {
            Ok(Found { leasehold: FORMAT, queue: Some(queue), .. }) => {
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
                     holder is not affected"
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

    /// The lock's name for a command line, from the path.
    fn shown_name(&self) -> String {
        let mut above = self.path.ancestors().filter(|dir| dir.ends_with("locks"));
        let name = above.find_map(|locks| path::decode(self.path.strip_prefix(locks).ok()?));
        name.map_or_else(|| "NAME".to_owned(), |name| format!("{:?}", name.as_str()))
    }

    /// The format that a later version wrote this in, if one did.
    fn newer(&self, why: &str) -> Option<u64> {
        let number = self.said().strip_prefix(BEGINNING)?;
        let digits = number.iter().take_while(|b| b.is_ascii_digit()).count();
        let format = str::from_utf8(&number[..digits]).ok()?.parse().ok()?;
        // The rule is that another field is another number. Who broke it still loses no field.
        let whole = || serde_json::from_slice::<serde::de::IgnoredAny>(self.said()).is_ok();
        let is_newer = format != u64::from(FORMAT) || (why.starts_with("unknown ") && whole());
        is_newer.then_some(format)
    }

    /// Whether what cannot be read here began as a control file of ours.
    fn is_damaged(&self) -> bool {
        let ours = [BEGINNING, FORMAT.to_string().as_bytes()].concat();
        let said = self.said();
        let (both, same) = (ours.len().min(said.len()), |n: usize| said[..n] == ours[..n]);
        let ended = said.get(ours.len()).is_none_or(|b| !b.is_ascii_digit());
        !said.is_empty() && same(both) && ended
    }

    /// The first page, without the zeros that whoever died between the two writes of a long queue
    /// left behind the old text.
    fn said(&self) -> &[u8] {
        let end = self.text.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        &self.text[..end]
    }

    fn found(&mut self, stat: &Stat) -> io::Result<serde_json::Result<Found>> {
        let line = line(&self.text);
        if let Some(queue) = line.and_then(|said| text::read(FORMAT, said, &mut self.holders)) {
            return Ok(Ok(Found { leasehold: FORMAT, queue: Some(queue), long: None }));
        }
        let first = serde_json::from_slice::<Found>(line.unwrap_or(self.said()));
        let Ok(Found { leasehold: FORMAT, long: Some(long), .. }) = first else {
            return Ok(first);
        };
        // Both come from a file: what it cannot hold is not made room for.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let len = long.len.min(size.saturating_sub(long.at));
        let mut text = Vec::new();
        held::read(&self.file, long.at, usize::try_from(len).unwrap_or(0), &mut text)?;
        self.long = Some(long);
        if let Some(queue) = text::read(FORMAT, &text, &mut self.holders) {
            return Ok(Ok(Found { leasehold: FORMAT, queue: Some(queue), long: None }));
        }
        Ok(serde_json::from_slice(&text))
    }
}

/// A text that is one line, and nothing but blank lines behind it.
fn line(text: &[u8]) -> Option<&[u8]> {
    const BLANK: [u8; PAGE] = [b'\n'; PAGE];
    let (line, blank) = text.split_at(text.iter().position(|&b| b == b'\n')?);
    BLANK.starts_with(blank).then_some(line)
}

/// Whether the file was last changed before the machine was started: all claims in it are dead.
fn before_boot(stat: &Stat) -> bool {
    let up = Duration::from_nanos(Clock::default().now().as_nanos());
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let boot = since_1970.saturating_sub(up).as_secs();
    u64::try_from(stat.st_mtime).is_ok_and(|changed| changed < boot)
}

/// Differs whenever an operation changed the queue: only joining raises `last`, everything else
/// makes the queue shorter, turns waiters into holders and holders into departed ones, which
/// never go back, or changes what a holder weighs.
#[derive(PartialEq, Eq)]
struct Mark {
    last: u64,
    len: usize,
    holding: usize,
    departed: usize,
    /// Of those that hold.
    weight: u64,
}

impl Mark {
    fn of(queue: &Queue) -> Self {
        use leasehold_core::store::Standing::{Departed, Holding};
        let entries = queue.entries();
        let (last, len) = (queue.last_token(), entries.len());
        let (mut holding, mut departed, mut weight) = (0, 0, 0);
        for entry in entries {
            let holds = entry.standing == Holding;
            holding += usize::from(holds);
            weight += if holds { u64::from(entry.weight) } else { 0 };
            departed += usize::from(entry.standing == Departed);
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
        fn a_control_file_from_outside_is_a_queue_that_works_or_is_refused(
            text in testbed::texts(&[
                "{\"leasehold\":1,\"queue\":{\"kind\":\"Semaphore\",\"capacity\":4,\"leases\":false,\"last\":7,\"entries\":[{\"id\":\"0123456789abcdef0123456789abcdef\",\"token\":6,\"weight\":3,\"standing\":\"Holding\",\"since\":5,\"lock_delay\":9,\"holder\":{\"host\":\"h\",\"pid\":1,\"label\":\"\"},\"session\":\"s\"},{\"id\":\"1123456789abcdef0123456789abcdef\",\"token\":7,\"weight\":2,\"standing\":\"Waiting\",\"since\":6,\"expires\":99,\"holder\":{\"host\":\"h\",\"pid\":2,\"label\":\"x\"}}]}}",
                "{\"leasehold\":1,\"long\":{\"at\":4096,\"len\":9000,\"change\":\"0123456789abcdef0123456789abcdef\"}}",
            ]),
            now in proptest::prelude::any::<u64>(),
        ) {
            let found = serde_json::from_slice::<Found>(text.as_bytes());
            if let Ok(Found { queue: Some(mut queue), .. }) = found {
                let claim = leasehold_core::Claim::new(
                    Name::new("x").unwrap(), queue.kind(), 1, queue.capacity(),
                ).unwrap();
                let at = leasehold_core::queue::StoreTime { now, stamp: now };
                let _ = Mark::of(&queue);
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
