//! Small files that one client at a time works on: flock for the time of one section.
//!
//! A section is a few system calls long and never awaits. flock belongs to the open file, not to
//! the process: closing another descriptor of the same file ends nothing (fcntl locks would be
//! gone), and the kernel ends it with the process. Descriptors are close-on-exec.
//!
//! What is written in place is written by **one** `pwrite` below one page: the kernel copies it
//! under the page's own lock, so whoever is killed has written all of it or nothing.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags, Stat};
use rustix::io::Errno;

/// The most bytes that one `pwrite` at offset 0 changes in one step.
pub(super) const PAGE: usize = 4096;

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

    /// What the file is now. With no links left it was unlinked or replaced between our opening
    /// and our locking it: its lock means nothing, and the path must be opened again.
    pub(super) fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.0)?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Said and not left to closing: a forked child may have the same open file.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Opens a file to be held, and creates it if told so; never through a symbolic link.
pub(super) fn open(path: &Path, create: bool, mode: u32) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .mode(mode)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Errno::EXIST.into()),
    }
}

/// A fresh file that nobody has but us.
pub(super) fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(path)?;
    share(&file, mode);
    Ok(file)
}

/// Undoes what the umask took from a store that is shared by a group.
pub(super) fn share(file: &File, mode: u32) {
    if mode != 0o600 {
        // Not ours to change if somebody else created it: then they did it.
        let _ = file.set_permissions(std::fs::Permissions::from_mode(mode));
    }
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

/// Overwrites the file's first page in one step. `bytes` must cover what was there before.
pub(super) fn write_page(file: &File, bytes: &[u8]) -> io::Result<()> {
    debug_assert!(bytes.len() <= PAGE);
    loop {
        match file.write_at(bytes, 0) {
            Ok(n) if n == bytes.len() => return Ok(()),
            Ok(_) => return Err(Errno::NOSPC.into()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
