//! Identifies the machine, the file and the file system of a store on this machine's disks.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::types::claim::ClaimId;
use crate::types::doctor::Finding;

/// Returns an ID that changes each time the machine boots.
pub fn boot_id() -> String {
    // Without this file, each client gets its own ID. That is safe, but then no two clients have
    // the same store identity.
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let unknown = |_| ClaimId::random().map(ClaimId::to_hex).unwrap_or_default();
    read.unwrap_or_else(unknown).trim().to_owned()
}

/// Returns the identity of a store in this file or directory. It is the same by every path and in
/// every container of this kernel, and different on every other machine and after a reboot.
pub fn identity_of(scheme: &str, path: &Path) -> String {
    let boot = boot_id();
    match std::fs::metadata(path) {
        Ok(seen) => format!("{scheme}:{boot}/{:x}-{:x}", seen.dev(), seen.ino()),
        // The file was removed, so no other client can open the same one.
        Err(_) => format!("{scheme}:{boot}/gone"),
    }
}

/// Returns the number that identifies the type of the file system. Does not open the file, because
/// closing a SQLite file would release this process's locks on it.
pub fn magic(path: &Path) -> io::Result<u32> {
    let kind = rustix::fs::statfs(path)?;
    // The type of `f_type` depends on the platform, but all magic numbers have 32 bits.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    Ok(kind.f_type as u32)
}

/// Returns the name of a file system on which flock, FIFOs or rename may behave differently from
/// those of a local one, or `None` for other file systems.
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
            "a reboot deletes it. Cooldowns (min_hold, lock_delay) are then forgotten, and only the clock \
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

/// Returns a finding if other programs see a different file at this path. A systemd unit with
/// `PrivateTmp=` has its own /tmp and /var/tmp, and one with `ProtectHome=tmpfs` has its own /home.
///
/// The path is looked up in the mount namespace of process 1. Only root may do that. For other
/// users, the names of systemd's private directories are sufficient.
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
                "{what} is private: process 1 of this machine finds something else, or nothing, \
                 at this path"
            ),
            "programs outside this mount namespace (a systemd unit with PrivateTmp=, a container) \
             do not share these locks",
            "use a directory that all programs see; for systemd units: StateDirectory=NAME and \
             file:/var/lib/NAME",
        )
    })
}

/// Returns which directory of its file system is mounted at or above this path, according to
/// mountinfo.
fn mounted_at<'a>(path: &Path, mounts: &'a str) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(3);
        Some((words.next()?, Path::new(words.next()?)))
    });
    let above = mounts.filter(|(_, point)| path.starts_with(point));
    // If several are mounted at one path, the last one covers the others.
    above.max_by_key(|(_, point)| point.components().count()).map(|(source, _)| source)
}

fn room(space: &rustix::fs::StatVfs, what: &str) -> Option<Finding> {
    let bytes = space.f_bavail.saturating_mul(space.f_frsize);
    // Some file systems have no fixed number of inodes, and report 0 of 0.
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
    use crate::types::doctor::Severity;

    #[test]
    fn systemd_private_directory_is_found_in_the_mounts() {
        let mounts = "\
            22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
            91 22 8:2 / /var rw - ext4 /dev/sda2 rw\n\
            90 91 8:1 /var/tmp/systemd-private-5e-app.service-x/tmp /var/tmp rw - ext4 /dev/sda1 rw\n";
        let source = |path: &str| mounted_at(Path::new(path), mounts);
        assert_eq!(source("/var/tmp/locks"), Some("/var/tmp/systemd-private-5e-app.service-x/tmp"));
        assert_eq!([source("/var/lib/x"), source("/srv")], [Some("/"); 2]);
    }

    #[test]
    fn file_system_type_determines_the_severity() {
        let severity = |magic| kind_of_file_system(magic, "x").map(|f| f.severity);
        assert_eq!(severity(0xef53), None);
        assert_eq!(severity(0x0102_1994), Some(Severity::Weak));
        assert_eq!(severity(0x6969), Some(Severity::Broken));
        assert_eq!(severity(0x1234_5678), Some(Severity::Note));
    }
}
