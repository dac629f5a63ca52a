//! Small files that one client at a time works on: flock for the time of one section.
//!
//! A section is a few system calls long and never awaits. flock belongs to the open file, not to
//! the process: closing another descriptor of the same file ends nothing (fcntl locks would be
//! gone), and the kernel ends it with the process. Descriptors are close-on-exec.
//!
//! What is written in place is written by **one** `pwrite` below one page: the kernel copies it
//! under the page's own lock, so whoever is killed has written all of it or nothing.

//!
//! A file that others share is made under a name of its own, opened to them, and only then given
//! its name: nobody ever finds one that is not open to him yet, and whoever dies on the way leaves
//! none behind that never will be. `O_CREAT` is only used with `O_EXCL`: in sticky directories the
//! kernel refuses it for files of others (`fs.protected_regular`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags, Stat};
use rustix::io::Errno;

use super::rights::Rights;
use leasehold_core::ClaimId;

/// The most bytes that one `pwrite` at offset 0 changes in one step.
pub(super) const PAGE: usize = 4096;

/// Which file it is, whatever it is called: the same for as long as somebody has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inode(u64, u64);

impl Inode {
    fn seen(stat: &Stat) -> Self {
        Self(stat.st_dev, stat.st_ino)
    }

    /// That of an open file.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        Ok(Self::seen(&rustix::fs::fstat(file)?))
    }

    /// What the file is now, if it is what `path` leads to.
    pub(super) fn at_path(self, path: &Path) -> io::Result<Option<Stat>> {
        match rustix::fs::lstat(path) {
            Ok(found) => Ok((Self::seen(&found) == self).then_some(found)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// The exclusive flock of an open file, until this is dropped.
pub(super) struct Held(Arc<File>);

impl Held {
    /// Takes it if it is free now.
    pub(super) fn try_take(file: &Arc<File>) -> io::Result<Option<Self>> {
        loop {
            match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self(file.clone()))),
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Said and not left to closing: a forked child may have the same open file.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Opens a file to be held, and creates it if told so; never through a symbolic link. Tells
/// whether it was created.
pub(super) fn open(path: &Path, create: bool, rights: Rights) -> io::Result<(File, bool)> {
    /// How often in a row it may be created and deleted under us.
    const RACES: usize = 64;
    for _ in 0..RACES {
        match existing(path, rights) {
            Err(e) if create && e.kind() == io::ErrorKind::NotFound => {}
            other => return other.map(|file| (unnoted(file), false)),
        }
        match created(path, rights) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => return other.map(|file| (unnoted(file), true)),
        }
    }
    Err(Errno::AGAIN.into())
}

/// That it is read is not to be noted: the kernel would write the file's inode with each reading
/// that follows a writing, a tenth of what a pair costs. Only a file's owner may have it so.
pub(super) fn unnoted(file: File) -> File {
    let _ = rustix::fs::fcntl_setfl(&file, OFlags::NONBLOCK | OFlags::NOATIME);
    file
}

fn existing(path: &Path, rights: Rights) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    let seen = file.metadata()?;
    if !seen.is_file() {
        return Err(Errno::EXIST.into());
    }
    rights.mend(&file, &seen);
    Ok(file)
}

fn created(path: &Path, rights: Rights) -> io::Result<File> {
    if !rights.is_shared() {
        return create_new(path, rights);
    }
    let unborn = temporary(path)?;
    let file = create_new(&unborn, rights)?;
    let born = fs::hard_link(&unborn, path);
    let _ = fs::remove_file(&unborn);
    born.map(|()| file)
}

/// A fresh file that nobody has but us, open to whom the store is.
pub(super) fn create_new(path: &Path, rights: Rights) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create_new(true).mode(rights.file_mode()).open(path)?;
    rights.share(&file, rights.file_mode());
    Ok(file)
}

/// A path beside this one that nobody else uses, and that is told from all others.
pub(super) fn temporary(path: &Path) -> io::Result<PathBuf> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}~", ClaimId::random().map_err(io::Error::other)?.to_hex()));
    Ok(path.with_file_name(name))
}

/// `len` bytes of the file from `from` on, or as many as there are.
pub(super) fn read(file: &File, from: u64, len: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
    bytes.resize(len, 0);
    let mut done = 0;
    while done < len {
        match file.read_at(&mut bytes[done..], from + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    bytes.truncate(done);
    Ok(())
}

/// Overwrites the file's first page in one step. `bytes` must cover what was there before, which is
/// `before` (its first page) in a file of `len` bytes: if not all can be written (no room, a quota,
/// a limit on the size of files), that is put back.
pub(super) fn write_page(file: &File, bytes: &[u8], before: &[u8], len: u64) -> io::Result<()> {
    debug_assert!(bytes.len() <= PAGE);
    loop {
        match file.write_at(bytes, 0) {
            Ok(n) if n == bytes.len() => return Ok(()),
            Ok(n) => {
                // What was overwritten has its place on the disk: that can be written again.
                file.write_all_at(&before[..n.min(before.len())], 0)?;
                file.set_len(len)?;
                return Err(Errno::NOSPC.into());
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
