//! The location of the store: the directory of a URL, and whether locks can be kept there.
//!
//! - `file:` is found through the user database by the effective user id, never through `$HOME` or
//!   `$XDG_STATE_HOME`. So cron, a shell, `sudo -E` and a service of one user use the same store.
//!   Root's store is `/var/lib/leasehold`, and other users' stores are `~/.local/state/leasehold`.
//! - `file:/abs/dir` and `file:///abs/dir` name a directory, percent-decoded. A relative path is
//!   rejected, because it would be another store in each working directory.
//!
//! A directory that leasehold creates is accessible only to the user (0700). An existing one keeps
//! its mode, and the same users can access the files in it (see
//! [`permissions`](super::permissions)). To share a store with a group, an administrator creates
//! the directory for that group.
//!
//! # The owner
//! The owner of the directory can evict every lock in it, so it must be this user or root. Another
//! user's directory is accepted only if neither it nor its parent directory is writable by all
//! users. In `/tmp`, any user could create a directory with the expected name in advance.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use super::fault::fault;
use super::held;
use super::permissions::{Acting, FilePermissions};
use leasehold_core::kit::{magic, remote};
use leasehold_core::{Error, ErrorKind, Result};

/// Root's own store.
const OF_ROOT: &str = "/var/lib/leasehold";
/// Other users' stores, below the home directory.
const OF_USER: &str = ".local/state/leasehold";

/// A directory that is suitable for locks.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) root: PathBuf,
    pub(super) permissions: FilePermissions,
    pub(super) acting: Acting,
    /// The directory with a shared lock, which is kept as long as the client runs. tmpfiles.d does
    /// not clean up a locked directory. Without the lock, it would delete the files of a lock that
    /// is held for weeks.
    _not_aged: File,
}

impl Place {
    /// Finds, creates and checks the directory of this URL.
    pub(super) fn find(url: &str) -> Result<Self> {
        let root = directory(url)?;
        create(&root)?;
        let dir = open_directory(&root, OFlags::empty())
            .map_err(|e| fault("open the store's directory", &root, e))?;
        let seen = dir.metadata().map_err(|e| fault("inspect", &root, e))?;
        let magic = magic(&root).map_err(|e| fault("inspect", &root, e))?;
        if let Some(what) = remote(magic) {
            return Err(refused(&root, what));
        }
        check_owner(&root, &seen)?;
        let acting = Acting::in_store(&seen).ok_or_else(|| not_as_owner(&root, seen.uid()))?;
        // If this fails, the directory is only not protected from tmpfiles.d.
        let _ = rustix::fs::flock(&dir, FlockOperation::NonBlockingLockShared);
        Ok(Self { permissions: FilePermissions::of(&seen, acting), acting, root, _not_aged: dir })
    }

    /// Creates a directory below the root with the root's permissions. If the root itself is gone,
    /// it is not created again.
    pub(super) fn create_below(&self, path: &Path) -> Result<()> {
        let failed = |e| fault("create the directory", path, e);
        let missing: Vec<&Path> = path.ancestors().take_while(|dir| *dir != self.root).collect();
        for dir in missing.into_iter().rev() {
            self.create_one(dir).map_err(failed)?;
        }
        Ok(())
    }

    fn create_one(&self, path: &Path) -> io::Result<()> {
        match open_directory(path, OFlags::NOFOLLOW) {
            Ok(dir) => {
                self.permissions.repair_directory(&dir, &dir.metadata()?);
                return Ok(());
            }
            // The directory exists, but this user may not read it.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            Err(_) => {}
        }
        let mode = self.permissions.directory_mode();
        if !self.permissions.is_shared() {
            return made_by_any(DirBuilder::new().mode(mode).create(path));
        }
        // No client may find the directory before it can access it. See `held`.
        let unborn = held::temporary(path)?;
        DirBuilder::new().mode(mode & 0o777).create(&unborn)?;
        self.permissions.share(&open_directory(&unborn, OFlags::NOFOLLOW)?, mode);
        let born = rustix::fs::renameat_with(CWD, &unborn, CWD, path, RenameFlags::NOREPLACE);
        let made = match born {
            Err(Errno::INVAL | Errno::NOSYS) => {
                DirBuilder::new().mode(mode & 0o777).create(path).and_then(|()| {
                    self.permissions.share(&open_directory(path, OFlags::NOFOLLOW)?, mode);
                    Ok(())
                })
            }
            other => other.map_err(Into::into),
        };
        // After a successful rename, this path does not exist any more.
        let _ = fs::remove_dir(&unborn);
        made_by_any(made)
    }
}

fn open_directory(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::DIRECTORY;
    fs::OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Accepts a directory that another client created at the same time.
fn made_by_any(made: io::Result<()>) -> io::Result<()> {
    match made {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Rejects a directory, or a symbolic link to it, that belongs to an unexpected user.
fn check_owner(root: &Path, seen: &Metadata) -> Result<()> {
    let me = rustix::process::geteuid().as_raw();
    let named = fs::symlink_metadata(root).map_err(|e| fault("inspect", root, e))?;
    let whole = fs::canonicalize(root).map_err(|e| fault("inspect", root, e))?;
    for (path, of) in [(root, &named), (whole.as_path(), seen)] {
        if of.uid() == me || of.uid() == 0 {
            continue;
        }
        let above = path.parent().and_then(|above| fs::metadata(above).ok());
        let why = if above.is_some_and(|above| above.mode() & 0o002 != 0) {
            "is in a directory to which every user may write"
        } else if of.is_dir() && of.mode() & 0o002 != 0 {
            "is writable by every user"
        } else {
            continue;
        };
        let what = format!(
            "{:?} belongs to user {}, who could evict any holder, and {why}",
            path.to_string_lossy(),
            of.uid()
        );
        let hint =
            "use a directory of your own or of root, or share one with a group: `chmod 2770 DIR`";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    Ok(())
}

fn not_as_owner(root: &Path, owner: u32) -> Error {
    let root = root.to_string_lossy();
    if is_unmapped(owner) {
        let what = format!(
            "{root:?} belongs to a user outside this user namespace (a rootless container), so \
             this root process cannot act as its owner"
        );
        let hint = "on the host, chown the directory to the user that runs the container; or, with \
                    podman: --userns=keep-id --group-add keep-groups";
        return Error::new(ErrorKind::Denied, what).with_hint(hint);
    }
    let what = format!(
        "{root:?} belongs to user {owner}, but this root process may not act as that user \
         (CAP_SETUID), so the owner could not use the files that it creates"
    );
    Error::new(ErrorKind::Denied, what).with_hint(format!("run as user {owner}"))
}

/// Returns whether this is the number that a user namespace shows for users without a mapping.
fn is_unmapped(user: u32) -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let overflow = read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(65534);
    let map = read("/proc/self/uid_map");
    let is_first = map.split_whitespace().eq(["0", "0", "4294967295"]);
    user == overflow && !map.is_empty() && !is_first
}

fn create(root: &Path) -> Result<()> {
    if root.is_dir() {
        return Ok(());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(root)
        .map_err(|e| fault("create the store's directory", root, e))
}

/// Returns the directory that a URL names.
fn directory(url: &str) -> Result<PathBuf> {
    let hint = "use file: (this user's store), file:/abs/dir or file:///abs/dir";
    let refused = |what: &str| {
        let url: String = url.chars().take(200).collect();
        let what = format!("invalid store URL {url:?}: {what}");
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    };
    let Some(rest) = url.strip_prefix("file:") else { return refused("missing \"file:\"") };
    if rest.is_empty() {
        return of_user(rustix::process::geteuid().as_raw());
    }
    if let Some(c) = rest.chars().find(|c| matches!(c, '?' | '#')) {
        let part = if c == '?' { "parameter" } else { "fragment" };
        let what = format!("{c:?} starts a URL {part}, but file: URLs take none");
        let hint = format!("in a path, write ? as %3F and # as %23; {hint}");
        return refused(&what).map_err(|e| e.with_hint(hint));
    }
    let path = match rest.strip_prefix("//") {
        None => rest,
        Some(rest) => match rest.strip_prefix("localhost/") {
            Some(_) => &rest["localhost".len()..],
            None => rest,
        },
    };
    if !path.starts_with('/') {
        return refused("the path is relative");
    }
    let Some(bytes) = leasehold_core::kit::decoded_bytes(path) else {
        return refused("invalid percent-encoding (write %25 for a literal %)");
    };
    if bytes.contains(&0) {
        return refused("the path contains a NUL byte");
    }
    use std::os::unix::ffi::OsStringExt;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

fn of_user(uid: u32) -> Result<PathBuf> {
    if uid == 0 {
        return Ok(OF_ROOT.into());
    }
    // Directories below /tmp and /var/tmp are excluded, because a systemd unit may have its own.
    let hint = format!(
        "use file:/DIR, a directory of user {uid} that all its programs see; for a systemd unit: \
         StateDirectory=NAME and file:/var/lib/NAME"
    );
    let found = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
    let refused = |what: String| Error::new(ErrorKind::Config, what).with_hint(hint);
    match found {
        Ok(Some(user)) if user.dir.is_absolute() => Ok(user.dir.join(OF_USER)),
        Ok(Some(_)) => Err(refused(format!("user {uid} has no home directory"))),
        Ok(None) => Err(refused(format!("unknown user {uid}: no entry in the user database"))),
        Err(e) => Err(refused(format!("cannot look up user {uid} in the user database: {e}"))),
    }
}

fn refused(root: &Path, what: &str) -> Error {
    let root = root.to_string_lossy();
    let hint = "use a directory on a local disk, such as file:/var/lib/NAME; for many machines use \
                a server, such as postgres: or redis:";
    let what = format!("{root:?} is on {what}, where locks may not exclude other machines");
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_urls_are_parsed_as_directories() {
        let dir = |url| directory(url).unwrap();
        assert_eq!(dir("file:/a/b"), Path::new("/a/b"));
        assert_eq!(dir("file:///a/b"), Path::new("/a/b"));
        assert_eq!(dir("file://localhost/a"), Path::new("/a"));
        assert_eq!(dir("file:/a%20b/%25/%3f"), Path::new("/a b/%/?"));
        for bad in ["file:a/b", "file:./a", "file://host/a", "file:/a%2", "file:/%00", "file:/a?b"]
        {
            let error = directory(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(format!("{error:#}").contains("file:/abs/dir"), "{error}");
        }
    }

    #[test]
    fn the_default_comes_from_the_user_database() {
        assert_eq!(of_user(0).unwrap(), Path::new(OF_ROOT));
        let error = of_user(u32::MAX - 7).unwrap_err();
        assert!(format!("{error:#}").contains("StateDirectory=NAME"), "{error}");
        if let Ok(Some(daemon)) = nix::unistd::User::from_name("daemon") {
            assert_eq!(of_user(daemon.uid.as_raw()).unwrap(), daemon.dir.join(OF_USER));
        }
    }

    #[test]
    fn remote_file_systems_are_rejected() {
        for (magic, name) in [(0x6969, "NFS"), (0xff53_4d42, "CIFS"), (0x6573_5546, "FUSE")] {
            assert_eq!(remote(magic), Some(name));
        }
        // ext4, xfs, btrfs, tmpfs, overlayfs, zfs, f2fs
        for local in
            [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0x2fc1_2fc1, 0xf2f5_2010]
        {
            assert_eq!(remote(local), None, "{local:x}");
        }
        let error = refused(Path::new("/net/home"), "NFS").to_string();
        assert!(error.contains("file:/var/lib/NAME"), "{error}");
    }

    #[test]
    fn created_directory_is_private_to_its_owner() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().join("new/store");
        let place = Place::find(&format!("file:{}", root.display())).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!place.permissions.is_shared());
    }

    #[test]
    fn path_that_is_not_a_directory_is_rejected_by_name() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Place::find(&format!("file:{}", path.display())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains(file.to_str().unwrap()), "{error}");
        }
    }

    // F54
    #[test]
    fn impossible_directory_is_a_permanent_error() {
        // No user can create a directory there.
        for url in ["file:///proc/nope", "file:/proc/self/nope/below"] {
            let error = Place::find(url).unwrap_err();
            assert!(!error.is_retryable(), "{error}");
            assert!(format!("{error:#}").contains("nope"), "{error}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_an_absolute_directory_or_rejected(url in testbed::texts(&[
            "file:///var/tmp/a%20b", "file:/a/b", "file://localhost/x", "file:",
        ])) {
            match directory(&url) {
                Ok(path) => proptest::prop_assert!(path.is_absolute()),
                Err(error) => proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1),
            }
        }
    }
}
