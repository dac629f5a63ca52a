//! The raw limits on one machine: what the kernel asks for a lock without queue, token or holder,
//! and for passing a turn on without a lock.

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

    /// Waits, holds, lets go. Tells what `held` does.
    pub(crate) fn with<T>(&self, held: impl FnOnce() -> T) -> io::Result<T> {
        self.0.lock()?;
        let told = held();
        self.0.unlock()?;
        Ok(told)
    }

    /// Waits and holds until the file is closed.
    pub(crate) fn hold(&self) -> io::Result<()> {
        self.0.lock()
    }
}

/// Opens, waits, lets go by closing.
pub(crate) fn open_flock_close(dir: &Path) -> io::Result<()> {
    Flock::open(dir)?.hold()
}

/// A FIFO of our own and the next contender's: a byte goes round, and who has it holds. First
/// come, first served as a lock with a queue is, and nothing but the wake-ups.
pub(crate) struct Ring {
    mine: File,
    next: File,
}

impl Ring {
    pub(crate) fn open(dir: &Path, me: usize, of: usize) -> io::Result<Self> {
        Ok(Self { mine: fifo(dir, me)?, next: fifo(dir, (me + 1) % of)? })
    }

    /// Puts the byte into the ring; done by one contender, once.
    pub(crate) fn start(&self) -> io::Result<()> {
        (&self.mine).write_all(&[0])
    }

    /// Waits, holds, passes it on. Tells what `held` does.
    pub(crate) fn with<T>(&self, held: impl FnOnce() -> T) -> io::Result<T> {
        (&self.mine).read_exact(&mut [0])?;
        let told = held();
        (&self.next).write_all(&[0])?;
        Ok(told)
    }
}

fn fifo(dir: &Path, of: usize) -> io::Result<File> {
    let path = dir.join(format!("ring.{of}"));
    match mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    // For both, so that neither opening nor the end of a neighbour is waited for or noticed.
    File::options().read(true).write(true).open(path)
}
