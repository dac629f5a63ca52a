//! The control files: one lock's queue each, worked on by one client at a time.
//!
//! A **section** is flock, fstat, read, work, write, unlock: microseconds, all in one poll, nothing
//! awaited. So every call on the store is atomic to everybody, and a dropped future was either
//! before its section or after it.
//!
//! # What if we die here
//! - *Before the write*: the kernel drops the flock, nothing has changed.
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

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

use super::fault::fault;
use super::held::{self, Held, PAGE};
use super::path;
use super::place::Place;
use super::tokens::Tokens;
use crate::claim::{ClaimId, Kind};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::queue::Queue;

/// How many control files a client keeps open.
const KEPT_OPEN: usize = 128;
/// How often in a row a file may be replaced under us before we let others run.
const REPLACED: usize = 64;
/// The only format there is.
const FORMAT: u32 = 1;

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
    /// The first page. It differs whenever anything differs.
    text: Vec<u8>,
    /// What the file says, parsed: good for as long as `text` is what it starts with.
    queue: Option<Queue>,
    /// Where the queue is, if it is longer than the first page.
    long: Option<Long>,
    /// Kept for the next reading.
    spare: Vec<u8>,
}

#[derive(Serialize)]
struct Written<'a> {
    leasehold: u32,
    queue: &'a Queue,
}

#[derive(Serialize, Deserialize)]
struct Found {
    leasehold: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queue: Option<Queue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    long: Option<Long>,
}

/// What a first page says of a queue that is longer.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
        let slot = self.slot(name);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        self.enter_slot(&mut slot, &|| self.path(name), create, work)
    }

    /// As [`enter`](Self::enter), for a look at a file that is not worth keeping open; what nobody
    /// is in any more is removed.
    pub(super) fn visit<T>(
        &self,
        name: &Name,
        work: impl FnOnce(&mut Queue) -> T,
    ) -> Result<Turn<T>> {
        let mut slot = None;
        let path = || self.path(name);
        let turn = self.enter_slot(&mut slot, &path, false, |queue| Some(work(queue)))?;
        self.retire(&path(), slot);
        Ok(match turn {
            Turn::Done(Some(done)) => Turn::Done(done),
            Turn::Done(None) | Turn::Absent => Turn::Absent,
            Turn::Locked => Turn::Locked,
        })
    }

    fn enter_slot<T>(
        &self,
        slot: &mut Option<Control>,
        path: &dyn Fn() -> PathBuf,
        create: bool,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<Turn<Option<T>>> {
        for _ in 0..REPLACED {
            let control = match slot {
                Some(control) => control,
                None => match self.open(&path(), create)? {
                    Some(file) => slot.insert(Control::new(file)),
                    None => return Ok(Turn::Absent),
                },
            };
            let failed = |e| fault("lock", &path(), e);
            let Some(held) = Held::try_take(&control.file).map_err(failed)? else {
                return Ok(Turn::Locked);
            };
            let stat = held.stat().map_err(failed)?;
            if stat.st_nlink == 0 {
                *slot = None;
                continue;
            }
            return self.section(control, &stat, path, work);
        }
        Ok(Turn::Locked)
    }

    /// The section itself, while the file is held.
    fn section<T>(
        &self,
        control: &mut Control,
        stat: &Stat,
        path: &dyn Fn() -> PathBuf,
        work: impl FnOnce(&mut Queue) -> Option<T>,
    ) -> Result<Turn<Option<T>>> {
        let len = control.read(stat).map_err(|e| fault("read", &path(), e))?;
        // Taken out, so that work that fails or panics leaves no half-changed queue to be believed.
        let mut queue = match control.queue.take() {
            Some(queue) => queue,
            None => match control.parse(stat, path)? {
                Some(queue) => queue,
                None => {
                    held::share(&control.file, self.place.mode);
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
            self.write(control, &queue, len, path)?;
        }
        control.queue = Some(queue);
        Ok(Turn::Done(Some(done)))
    }

    fn write(
        &self,
        control: &mut Control,
        queue: &Queue,
        len: usize,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<()> {
        let failed = |e| fault("write", &path(), e);
        let mut text = std::mem::take(&mut control.spare);
        text.clear();
        let written = serde_json::to_writer(&mut text, &Written { leasehold: FORMAT, queue });
        written.map_err(|e| failed(e.into()))?;
        text.push(b'\n');
        let mut long = None;
        if text.len() > PAGE {
            let new = control.room_for(text.len())?;
            control.file.write_all_at(&text, new.at).map_err(failed)?;
            text.clear();
            let first = Found { leasehold: FORMAT, queue: None, long: Some(new.clone()) };
            serde_json::to_writer(&mut text, &first).map_err(|e| failed(e.into()))?;
            long = Some(new);
        }
        let covered = if long.is_some() { PAGE } else { len.min(PAGE) };
        text.resize(text.len().max(covered), b'\n');
        held::write_page(&control.file, &text).map_err(failed)?;
        control.long = long;
        control.spare = std::mem::replace(&mut control.text, text);
        Ok(())
    }

    fn open(&self, path: &Path, create: bool) -> Result<Option<File>> {
        for _ in 0..REPLACED {
            match held::open(path, create, self.place.mode) {
                Ok(file) => return Ok(Some(file)),
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(fault("open", path, e));
                }
                Err(_) if !create => return Ok(None),
                // A directory of a long name, perhaps removed this moment by who used it last.
                Err(_) => self.place.create_below(path.parent().unwrap_or(&self.locks))?,
            }
        }
        Err(fault("create", path, io::ErrorKind::NotFound.into()))
    }

    fn slot(&self, name: &Name) -> Slot {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
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
        if let Some((name, (slot, _))) = gone {
            self.retire_slot(&name, &slot);
        }
        slot
    }

    fn retire_slot(&self, name: &Name, slot: &Slot) {
        let control = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.retire(&self.path(name), control);
    }

    /// Closes a control file, and removes it if nobody is in its queue. Whatever fails only leaves
    /// a small file behind.
    fn retire(&self, path: &Path, control: Option<Control>) {
        let Some(mut control) = control else { return };
        let Ok(Some(held)) = Held::try_take(&control.file) else { return };
        let Ok(stat) = held.stat() else { return };
        if stat.st_nlink == 0 || control.read(&stat).is_err() {
            return;
        }
        let queue = match control.queue.take() {
            Some(queue) => Some(queue),
            None => match control.parse(&stat, &|| path.to_owned()) {
                Ok(queue) => queue,
                Err(_) => return,
            },
        };
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
        let mut names = Vec::new();
        let mut dirs = vec![PathBuf::new()];
        while let Some(dir) = dirs.pop() {
            let whole = self.locks.join(&dir);
            let entries = match fs::read_dir(&whole) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(fault("read the directory", &whole, e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| fault("read the directory", &whole, e))?;
                let below = dir.join(entry.file_name());
                let bytes = entry.file_name().into_encoded_bytes();
                match bytes.last() {
                    Some(b'+') => dirs.push(below),
                    _ => names.extend(path::decode(&below)),
                }
            }
        }
        names.sort();
        Ok(names)
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        let cache = self.cache.get_mut().unwrap_or_else(PoisonError::into_inner);
        let slots = std::mem::take(&mut cache.slots);
        for (name, (slot, _)) in slots {
            self.retire_slot(&name, &slot);
        }
    }
}

impl Control {
    fn new(file: File) -> Self {
        let (text, spare) = (Vec::new(), Vec::new());
        Self { file: Arc::new(file), text, queue: None, long: None, spare }
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
    fn parse(&mut self, stat: &Stat, path: &dyn Fn() -> PathBuf) -> Result<Option<Queue>> {
        self.long = None;
        if self.said().is_empty() {
            return Ok(None);
        }
        let why = match self.found(stat).map_err(|e| fault("read", &path(), e))? {
            Ok(Found { leasehold: FORMAT, queue: Some(queue), .. }) => return Ok(Some(queue)),
            Ok(found) if found.leasehold != FORMAT => {
                format!("it has format {}, and this is {FORMAT}", found.leasehold)
            }
            _ if before_boot(stat) => return Ok(None),
            Ok(_) => "it holds no queue".to_owned(),
            Err(e) => e.to_string(),
        };
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{:?} is no control file of this version of leasehold ({}); if nothing holds this \
                 lock, delete it",
                path().to_string_lossy(),
                why.lines().next().unwrap_or_default(),
            ),
        ))
    }

    /// The first page, without the zeros that whoever died between the two writes of a long queue
    /// left behind the old text.
    fn said(&self) -> &[u8] {
        let end = self.text.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        &self.text[..end]
    }

    fn found(&mut self, stat: &Stat) -> io::Result<serde_json::Result<Found>> {
        let first = serde_json::from_slice::<Found>(self.said());
        let Ok(Found { leasehold: FORMAT, long: Some(long), .. }) = first else {
            return Ok(first);
        };
        // Both come from a file: what it cannot hold is not made room for.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let len = long.len.min(size.saturating_sub(long.at));
        let mut text = Vec::new();
        held::read(&self.file, long.at, usize::try_from(len).unwrap_or(0), &mut text)?;
        self.long = Some(long);
        Ok(serde_json::from_slice(&text))
    }
}

/// Whether the file was last changed before the machine was started: all claims in it are dead.
fn before_boot(stat: &Stat) -> bool {
    let up = Duration::from_nanos(Clock::default().now().as_nanos());
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let boot = since_1970.saturating_sub(up).as_secs();
    u64::try_from(stat.st_mtime).is_ok_and(|changed| changed < boot)
}

/// Differs whenever an operation changed the queue: only joining raises `last`, everything else
/// makes the queue shorter or turns waiters into holders and holders into departed ones, which
/// never go back.
#[derive(PartialEq, Eq)]
struct Mark {
    last: u64,
    len: usize,
    holding: usize,
    departed: usize,
}

impl Mark {
    fn of(queue: &Queue) -> Self {
        use crate::store::Standing::{Departed, Holding};
        let entries = queue.entries();
        let (last, len) = (queue.last_token(), entries.len());
        let (mut holding, mut departed) = (0, 0);
        for entry in entries {
            holding += usize::from(entry.standing == Holding);
            departed += usize::from(entry.standing == Departed);
        }
        Self { last, len, holding, departed }
    }
}
