//! The machine, file and file system of stores on this machine's disks.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::words::claim::ClaimId;
use crate::words::doctor::Finding;

/// Returns an ID that differs after each start of the machine.
pub fn boot_id() -> String {
    // Without it every client would be in a boot of its own: safe, if nobody else's.
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let unknown = |_| ClaimId::random().map(ClaimId::to_hex).unwrap_or_default();
    read.unwrap_or_else(unknown).trim().to_owned()
}

/// Returns the identity of a store in this file or directory. It is the same by every path and in
/// every container of this kernel, and different on every other machine and after a restart.
pub fn identity_of(scheme: &str, path: &Path) -> String {
    let boot = boot_id();
    match std::fs::metadata(path) {
        Ok(seen) => format!("{scheme}:{boot}/{:x}-{:x}", seen.dev(), seen.ino()),
        // It was removed under us: nobody else can be meant by it.
        Err(_) => format!("{scheme}:{boot}/gone"),
    }
}

/// Returns the number that identifies the type of a file system. It does not open the file, because
/// closing a file of SQLite would lose this process's locks on it.
pub fn magic(path: &Path) -> io::Result<u32> {
    let kind = rustix::fs::statfs(path)?;
    // The type of `f_type` differs from platform to platform; all magic numbers are 32 bits.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    Ok(kind.f_type as u32)
}

/// Returns the name of a file system on which flock, FIFOs or rename may not be those of this
/// machine's kernel, or `None` for other file systems.
pub fn remote(magic: u32) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "NFS",
        0xff53_4d42 => "CIFS",
        0xfe53_4d42 => "SMB",
        0x517b => "SMB",
        0x0102_1997 => "9p",
        0x00c3_6400 => "Ceph",
        0x0bd0_0bd0 => "Lustre",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x7375_7245 => "Coda",
        0x0116_1970 => "GFS2",
        0x7461_636f => "OCFS2",
        0x6573_5546 => "FUSE",
        0x6a65_6a63 => "virtiofs",
        0x564c => "NCP",
        0x1997_0521 => "OrangeFS",
        0x2030_1528 => "OrangeFS",
        0x4750_4653 | 0x4750_4652 => "GPFS",
        0xaad7_aaea => "PanFS",
        0x013a_511e => "SnFS",
        0x786f_4256 => "a VirtualBox shared folder",
        0xbacb_acbc => "a VMware shared folder",
        0x1983_0326 => "BeeGFS",
        _ => return None,
    })
}

/// Checks the file system of `path`. `what` describes the path in the findings.
pub fn file_system(path: &Path, what: &str) -> Vec<Finding> {
    match magic(path).and_then(|magic| Ok((magic, rustix::fs::statvfs(path)?))) {
        Err(e) => vec![Finding::weak(
            "file-system",
            format!("cannot read {what}: {e}"),
            "the type of its file system is unknown",
            "give this user read access",
        )],
        Ok((magic, space)) => {
            let kind = kind_of_file_system(magic, what);
            kind.into_iter().chain(room(&space, what)).chain(private(path, what)).collect()
        }
    }
}

fn kind_of_file_system(magic: u32, what: &str) -> Option<Finding> {
    if let Some(name) = remote(magic) {
        return Some(Finding::broken(
            "file-system",
            format!("{what} is on {name}"),
            "a lock on it may be visible to one machine and not to another, so two clients can hold the same \
             lock",
            "use a directory on a local disk; for several machines, use a store with a server",
        ));
    }
    match magic {
        // tmpfs, ramfs
        0x0102_1994 | 0x8584_58f6 => Some(Finding::weak(
            "file-system",
            format!("{what} is in memory (tmpfs)"),
            "a reboot deletes it. Cooldowns (at_least, lock_delay) are then forgotten, and only the clock \
             keeps new tokens larger than old ones",
            "use a directory on disk",
        )),
        // overlayfs
        0x794c_7630 => Some(Finding::weak(
            "file-system",
            format!("{what} is in the writable layer of a container (overlayfs)"),
            "other containers cannot see it, and it is deleted with this container",
            "mount a host directory that all containers share",
        )),
        // ext2-4, XFS, Btrfs, ZFS, F2FS, bcachefs
        0xef53 | 0x5846_5342 | 0x9123_683e | 0x2fc1_2fc1 | 0xf2f5_2010 | 0xca45_1a4e => None,
        other => Some(Finding::note(
            "file-system",
            format!("{what} is on a file system of type {other:#x}"),
            "leasehold was not tested on it. It must be local, and flock and rename must work as on \
             other Linux file systems",
        )),
    }
}

/// Whether other programs find something else at this path. A systemd unit with `PrivateTmp=` has
/// its own /tmp and /var/tmp, and one with `ProtectHome=tmpfs` its own /home.
///
/// The path is looked up in the mount namespace of the first process. Only root may do that; for
/// other users systemd's names of private directories are enough.
fn private(path: &Path, what: &str) -> Option<Finding> {
    let (whole, seen) = (path.canonicalize().ok()?, path.metadata().ok()?);
    let outside = Path::new("/proc/1/root").join(whole.strip_prefix("/").ok()?);
    let is_private = match outside.metadata() {
        Ok(other) => (other.dev(), other.ino()) != (seen.dev(), seen.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(_) => {
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            mounted_at(&whole, &mounts).is_some_and(|source| source.contains("/systemd-private-"))
        }
    };
    is_private.then(|| {
        Finding::weak(
            "private-mount",
            format!(
                "{what} is private: the first process of this machine finds another one, or none, \
                 at this path"
            ),
            "programs outside this mount namespace (a systemd unit with PrivateTmp=, a container) \
             do not share these locks",
            "use a directory that all programs see; for systemd units: StateDirectory=NAME and \
             file:/var/lib/NAME",
        )
    })
}

/// The directory of its file system that is mounted where this path is, as mountinfo says.
fn mounted_at<'a>(path: &Path, mounts: &'a str) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(3);
        Some((words.next()?, Path::new(words.next()?)))
    });
    let above = mounts.filter(|(_, point)| path.starts_with(point));
    // Of several at one path, the last one covers the others.
    above.max_by_key(|(_, point)| point.components().count()).map(|(source, _)| source)
}

fn room(space: &rustix::fs::StatVfs, what: &str) -> Option<Finding> {
    let bytes = space.f_bavail.saturating_mul(space.f_frsize);
    // Some file systems have no fixed number of inodes, and say 0 of 0.
    let inodes = (space.f_files > 0).then_some(space.f_favail);
    (bytes < 1 << 20 || inodes.is_some_and(|left| left < 16)).then(|| {
        Finding::broken(
            "full",
            format!("the disk of {what} is full"),
            "locks cannot be acquired, renewed or released",
            "free space or inodes on this disk",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::doctor::Severity;

    #[test]
    fn a_private_directory_of_systemd_is_found_in_the_mounts() {
        let mounts = "\
            22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
            91 22 8:2 / /var rw - ext4 /dev/sda2 rw\n\
            90 91 8:1 /var/tmp/systemd-private-5e-app.service-x/tmp /var/tmp rw - ext4 /dev/sda1 rw\n";
        let source = |path: &str| mounted_at(Path::new(path), mounts);
        assert_eq!(source("/var/tmp/locks"), Some("/var/tmp/systemd-private-5e-app.service-x/tmp"));
        assert_eq!([source("/var/lib/x"), source("/srv")], [Some("/"); 2]);
    }

    #[test]
    fn file_systems_are_told_apart() {
        let severity = |magic| kind_of_file_system(magic, "x").map(|f| f.severity);
        assert_eq!(severity(0xef53), None);
        assert_eq!(severity(0x0102_1994), Some(Severity::Weak));
        assert_eq!(severity(0x6969), Some(Severity::Broken));
        assert_eq!(severity(0x1234_5678), Some(Severity::Note));
    }
}
