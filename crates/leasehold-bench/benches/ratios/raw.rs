//! The raw limits on one machine: the kernel's cost of a lock without queue, token or holder, and
//! of passing a turn without a lock.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;

/// An open file to flock.
pub(crate) struct Flock(File);

impl Flock {
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join("raw.lock");
        File::options().create(true).truncate(false).write(true).open(path).map(Self)
    }

    /// Waits, holds and releases. Returns the result of `held`.
    pub(crate) fn with<T>(&self, held: impl FnOnce() -> T) -> io::Result<T> {
        self.0.lock()?;
        let usage = held();
        self.0.unlock()?;
        Ok(usage)
    }

    /// Waits and holds until the file is closed.
    pub(crate) fn hold(&self) -> io::Result<()> {
        self.0.lock()
    }
}

/// Opens the file, waits, and releases by closing it.
pub(crate) fn open_flock_close(dir: &Path) -> io::Result<()> {
    Flock::open(dir)?.hold()
}

/// A contender's FIFO and the next contender's FIFO. A byte circulates, and the contender that has
/// it holds. It is first come, first served like a lock with a queue, and consists only of
/// wake-ups.
pub(crate) struct Ring {
    mine: File,
    next: File,
}

impl Ring {
    pub(crate) fn open(dir: &Path, me: usize, of: usize) -> io::Result<Self> {
        Ok(Self { mine: fifo(dir, me)?, next: fifo(dir, (me + 1) % of)? })
    }

    /// Puts the byte into the ring. Exactly one contender does this, once.
    pub(crate) fn start(&self) -> io::Result<()> {
        (&self.mine).write_all(&[0])
    }

    /// Waits, holds and passes the byte on. Returns the result of `held`.
    pub(crate) fn with<T>(&self, held: impl FnOnce() -> T) -> io::Result<T> {
        (&self.mine).read_exact(&mut [0])?;
        let usage = held();
        (&self.next).write_all(&[0])?;
        Ok(usage)
    }
}

fn fifo(dir: &Path, of: usize) -> io::Result<File> {
    let path = dir.join(format!("ring.{of}"));
    match mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    // The FIFO is opened for both directions. So the opening does not block, and the end of another
    // contender has no effect.
    File::options().read(true).write(true).open(path)
}
