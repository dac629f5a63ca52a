//! Small files that one client at a time works on, protected by flock during one section.
//!
//! A section takes a few system calls and never awaits. flock belongs to the open file, not to the
//! process. Closing another descriptor of the same file does not unlock it (unlike fcntl locks),
//! and the kernel unlocks it when the process ends. Descriptors are close-on-exec.
//!
//! Data is overwritten by **one** `pwrite` of at most one page. The kernel copies it under the
//! page's own lock, so a killed process has written all of it or nothing.

//!
//! A file for several users is created under a temporary name, made accessible to them, and only
//! then renamed to its final name. So no client ever finds a file that it cannot open yet, and a
//! client that crashes in between leaves no such file behind. `O_CREAT` is only used with `O_EXCL`,
//! because in sticky directories the kernel refuses it for other users' files
//! (`fs.protected_regular`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags, Stat};
use rustix::io::Errno;

use super::permissions::FilePermissions;
use leasehold_core::ClaimId;

/// Maximum bytes that one `pwrite` at offset 0 changes atomically.
pub(super) const PAGE: usize = 4096;

/// Identity of a file, whatever its name is. It is unique while any process has the file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inode(u64, u64);

impl Inode {
    fn seen(stat: &Stat) -> Self {
        Self(stat.st_dev, stat.st_ino)
    }

    /// Returns the identity of an open file.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        Ok(Self::seen(&rustix::fs::fstat(file)?))
    }

    /// Returns the file's metadata, if `path` leads to it.
    pub(super) fn at_path(self, path: &Path) -> io::Result<Option<Stat>> {
        match rustix::fs::lstat(path) {
            Ok(found) => Ok((Self::seen(&found) == self).then_some(found)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// Exclusive flock of an open file, which is released when this value is dropped.
pub(super) struct Held(Arc<File>);

impl Held {
    /// Takes the flock if it is free now.
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
        // Unlocks explicitly. Closing the file is not enough, because a forked child may share the
        // open file.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Opens a file to be locked, and creates it if `create` is set. Does not follow symbolic links.
/// Returns whether the file was created.
pub(super) fn open(
    path: &Path,
    create: bool,
    permissions: FilePermissions,
) -> io::Result<(File, bool)> {
    /// Maximum consecutive attempts while other clients create and delete the file.
    const RACES: usize = 64;
    for _ in 0..RACES {
        match existing(path, permissions) {
            Err(e) if create && e.kind() == io::ErrorKind::NotFound => {}
            other => return other.map(|file| (unnoted(file), false)),
        }
        match created(path, permissions) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => return other.map(|file| (unnoted(file), true)),
        }
    }
    Err(Errno::AGAIN.into())
}

/// Turns off updates of the file's access time, if possible. Otherwise the kernel would write the
/// inode at each read after a write, a tenth of the cost of an acquisition and release. Only the
/// file's owner may do that.
pub(super) fn unnoted(file: File) -> File {
    let _ = rustix::fs::fcntl_setfl(&file, OFlags::NONBLOCK | OFlags::NOATIME);
    file
}

fn existing(path: &Path, permissions: FilePermissions) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    let seen = file.metadata()?;
    if !seen.is_file() {
        return Err(Errno::EXIST.into());
    }
    permissions.repair(&file, &seen);
    Ok(file)
}

fn created(path: &Path, permissions: FilePermissions) -> io::Result<File> {
    if !permissions.is_shared() {
        return create_new(path, permissions);
    }
    let unborn = temporary(path)?;
    let file = create_new(&unborn, permissions)?;
    let born = fs::hard_link(&unborn, path);
    let _ = fs::remove_file(&unborn);
    born.map(|()| file)
}

/// Creates a new file with the permissions of the store, which no other process has open.
pub(super) fn create_new(path: &Path, permissions: FilePermissions) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create_new(true).mode(permissions.file_mode()).open(path)?;
    permissions.share(&file, permissions.file_mode());
    Ok(file)
}

/// Returns a path in the same directory with a unique name that is recognizable as temporary.
pub(super) fn temporary(path: &Path) -> io::Result<PathBuf> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}~", ClaimId::random().map_err(io::Error::other)?.to_hex()));
    Ok(path.with_file_name(name))
}

/// Reads up to `len` bytes of the file, starting at `from`.
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

/// Overwrites the file's first page in one step.
///
/// `bytes` must cover the previous content `before`, which is the first page of a file of `len`
/// bytes. If not all bytes can be written (no space, a quota, a limit on file sizes), the previous
/// content is restored.
pub(super) fn write_page(file: &File, bytes: &[u8], before: &[u8], len: u64) -> io::Result<()> {
    debug_assert!(bytes.len() <= PAGE);
    loop {
        match file.write_at(bytes, 0) {
            Ok(n) if n == bytes.len() => return Ok(()),
            Ok(n) => {
                // The overwritten bytes have space on the disk, so they can be written again.
                file.write_all_at(&before[..n.min(before.len())], 0)?;
                file.set_len(len)?;
                return Err(Errno::NOSPC.into());
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
