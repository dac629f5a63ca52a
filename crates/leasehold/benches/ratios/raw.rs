//! The raw limits on one machine: what the kernel asks for a lock without queue, token or holder.

use std::fs::File;
use std::io;
use std::path::Path;

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
