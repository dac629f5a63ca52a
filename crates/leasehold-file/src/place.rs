//! Where the store is: the directory of a URL, and whether locks can live there at all.
//!
//! - `file:` is found through the user database by the effective user id, never through `$HOME` or
//!   `$XDG_STATE_HOME`: cron, a shell, `sudo -E` and a service of one user must meet in one store.
//!   Root's is `/var/lib/leasehold`, everybody else's `~/.local/state/leasehold`.
//! - `file:/abs/dir` and `file:///abs/dir` name a directory, percent-decoded. A relative path is
//!   refused: it would be another store in each working directory.
//!
//! A directory that we create is the user's alone (0700). One that is there keeps its mode, and the
//! files in it are open to whom the directory is (see [`rights`](super::rights)): an administrator
//! who wants a store to be shared by a group creates the directory for that group.
//!
//! # Whose it is
//! Whoever owns the directory can take every lock in it away, so it must be ours or root's. Another
//! user's is taken if it was shared with a group, and stands where nobody but that user and root
//! could have put it: in `/tmp` anybody could have put a directory under the name that we are about
//! to use.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use super::fault::fault;
use super::held;
use super::rights::{Acting, Rights};
use leasehold_core::kit::{magic, remote};
use leasehold_core::{Error, ErrorKind, Result};

/// Root's own store.
const OF_ROOT: &str = "/var/lib/leasehold";
/// Everybody else's, below the home directory.
const OF_USER: &str = ".local/state/leasehold";

/// A directory that is fit to keep locks.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) root: PathBuf,
    pub(super) rights: Rights,
    pub(super) acting: Acting,
    /// Locked shared for as long as we live: tmpfiles.d's ageing leaves a locked directory alone,
    /// which would otherwise delete the files of a lock that is held for weeks.
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
        // A failure only means that ageing is not held off.
        let _ = rustix::fs::flock(&dir, FlockOperation::NonBlockingLockShared);
        Ok(Self { rights: Rights::of(&seen, acting), acting, root, _not_aged: dir })
    }

    /// Creates a directory below the root, open to whom the root is; the root itself is not made
    /// again if it is gone.
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
                self.rights.mend_directory(&dir, &dir.metadata()?);
                return Ok(());
            }
            // There, and not ours to read.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            Err(_) => {}
        }
        let mode = self.rights.directory_mode();
        if !self.rights.is_shared() {
            return made_by_any(DirBuilder::new().mode(mode).create(path));
        }
        // Nobody is to find it before it is open to him: see `held`.
        let unborn = held::temporary(path)?;
        DirBuilder::new().mode(mode & 0o777).create(&unborn)?;
        self.rights.share(&open_directory(&unborn, OFlags::NOFOLLOW)?, mode);
        let born = rustix::fs::renameat_with(CWD, &unborn, CWD, path, RenameFlags::NOREPLACE);
        let made = match born {
            Err(Errno::INVAL | Errno::NOSYS) => {
                DirBuilder::new().mode(mode & 0o777).create(path).and_then(|()| {
                    self.rights.share(&open_directory(path, OFlags::NOFOLLOW)?, mode);
                    Ok(())
                })
            }
            other => other.map_err(Into::into),
        };
        // Nothing is there any more if it was given its name.
        let _ = fs::remove_dir(&unborn);
        made_by_any(made)
    }
}

fn open_directory(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::DIRECTORY;
    fs::OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// It is the same who of many made it.
fn made_by_any(made: io::Result<()>) -> io::Result<()> {
    match made {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Refuses a directory, or a symbolic link to it, of a user whom nobody meant.
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
            "stands where anybody could have put it"
        } else if of.is_dir() && of.mode() & 0o002 != 0 {
            "is open to everybody"
        } else {
            continue;
        };
        let what = format!(
            "{:?} belongs to user {}, who could take every lock in it away, and {why}: use a \
             directory of your own or of root's, or one that is shared with a group (chmod 2770)",
            path.to_string_lossy(),
            of.uid()
        );
        return Err(Error::new(ErrorKind::Config, what));
    }
    Ok(())
}

fn not_as_owner(root: &Path, owner: u32) -> Error {
    let what = format!(
        "{:?} belongs to user {owner}, and this process of root's has no right to work as that \
         user (CAP_SETUID), so what it made would be closed to the owner: run as user {owner}",
        root.to_string_lossy()
    );
    Error::new(ErrorKind::Denied, what)
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

/// The directory that a URL names.
fn directory(url: &str) -> Result<PathBuf> {
    let refused = |what: &str| {
        let url: String = url.chars().take(200).collect();
        let fix = "write file: (the user's own store), file:/abs/dir or file:///abs/dir";
        Err(Error::new(ErrorKind::Config, format!("{url:?} {what}: {fix}")))
    };
    let Some(rest) = url.strip_prefix("file:") else { return refused("is no file: URL") };
    if rest.is_empty() {
        return of_user(rustix::process::geteuid().as_raw());
    }
    if let Some(c) = rest.chars().find(|c| matches!(c, '?' | '#')) {
        let what = format!(
            "has options after {c:?}, which a file store has none of (in a path, write %3f or %23)"
        );
        return refused(&what);
    }
    let path = match rest.strip_prefix("//") {
        None => rest,
        Some(rest) => match rest.strip_prefix("localhost/") {
            Some(_) => &rest["localhost".len()..],
            None => rest,
        },
    };
    if !path.starts_with('/') {
        return refused("names a relative path, which would be another store in each directory");
    }
    let Some(bytes) = leasehold_core::kit::decoded_bytes(path) else {
        return refused("has a % that two hexadecimal digits do not follow (a % itself is %25)");
    };
    if bytes.contains(&0) {
        return refused("holds a NUL");
    }
    use std::os::unix::ffi::OsStringExt;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

fn of_user(uid: u32) -> Result<PathBuf> {
    if uid == 0 {
        return Ok(OF_ROOT.into());
    }
    let fix = format!("name a directory: file:/var/tmp/leasehold-{uid}");
    let found = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
    let refused = |what: String| Error::new(ErrorKind::Config, format!("{what}; {fix}"));
    match found {
        Ok(Some(user)) if user.dir.is_absolute() => Ok(user.dir.join(OF_USER)),
        Ok(Some(_)) => Err(refused(format!("the user database gives user {uid} no home"))),
        Ok(None) => Err(refused(format!("user {uid} is not in the user database"))),
        Err(e) => Err(refused(format!("the user database does not answer for user {uid}: {e}"))),
    }
}

fn refused(root: &Path, what: &str) -> Error {
    let uid = rustix::process::geteuid().as_raw();
    let root = root.to_string_lossy();
    Error::new(
        ErrorKind::Config,
        format!(
            "{root:?} is on {what}, where a lock could be seen by one machine and not by another; \
             use a directory on a local disk, such as file:/var/tmp/leasehold-{uid}, or for many \
             machines a store with a server"
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn urls_name_directories() {
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
        assert!(format!("{error:#}").contains("file:/var/tmp/leasehold-"), "{error}");
        if let Ok(Some(daemon)) = nix::unistd::User::from_name("daemon") {
            assert_eq!(of_user(daemon.uid.as_raw()).unwrap(), daemon.dir.join(OF_USER));
        }
    }

    #[test]
    fn file_systems_of_other_machines_are_refused() {
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
        assert!(error.contains("file:/var/tmp/leasehold-"), "{error}");
    }

    #[test]
    fn a_directory_that_we_make_is_ours_alone() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().join("new/store");
        let place = Place::find(&format!("file:{}", root.display())).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!place.rights.is_shared());
    }

    #[test]
    fn what_is_no_directory_is_one_clear_line() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Place::find(&format!("file:{}", path.display())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains(file.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn f54_what_cannot_heal_is_told_at_once() {
        // Nobody can make a directory there.
        for url in ["file:///proc/nope", "file:/proc/self/nope/below"] {
            let error = Place::find(url).unwrap_err();
            assert!(!error.is_retryable(), "{error}");
            assert!(format!("{error:#}").contains("nope"), "{error}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_directory_from_outside_is_absolute_or_refused_in_one_line(url in testbed::texts(&[
            "file:///var/tmp/a%20b", "file:/a/b", "file://localhost/x", "file:",
        ])) {
            match directory(&url) {
                Ok(path) => proptest::prop_assert!(path.is_absolute()),
                Err(error) => proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1),
            }
        }
    }
}
