//! Where the store is: the directory of a URL, and whether locks can live there at all.
//!
//! - `file:` is found through the user database by the effective user id, never through `$HOME` or
//!   `$XDG_STATE_HOME`: cron, a shell, `sudo -E` and a service of one user must meet in one store.
//!   Root's is `/var/lib/leasehold`, everybody else's `~/.local/state/leasehold`.
//! - `file:/abs/dir` and `file:///abs/dir` name a directory, percent-decoded. A relative path is
//!   refused: it would be another store in each working directory.
//!
//! A directory that we create is the user's alone (0700). One that is there keeps its mode, and the
//! files in it are open to whom the directory is: an administrator who wants a store to be shared
//! by a group creates the directory for that group.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};

use super::fault::fault;
use crate::error::{Error, ErrorKind, Result};
use crate::store::machine::{magic, remote};

/// Root's own store.
const OF_ROOT: &str = "/var/lib/leasehold";
/// Everybody else's, below the home directory.
const OF_USER: &str = ".local/state/leasehold";

/// A directory that is fit to keep locks.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) root: PathBuf,
    /// The permissions of the files in it (directories: also executable where readable).
    pub(super) mode: u32,
    /// Locked shared for as long as we live: tmpfiles.d's ageing leaves a locked directory alone,
    /// which would otherwise delete the files of a lock that is held for weeks.
    _not_aged: File,
}

impl Place {
    /// Finds, creates and checks the directory of this URL.
    pub(super) fn find(url: &str) -> Result<Self> {
        let root = directory(url)?;
        create(&root)?;
        let dir = fs::OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECTORY.bits().cast_signed())
            .open(&root)
            .map_err(|e| fault("open the store's directory", &root, e))?;
        let seen = dir.metadata().map_err(|e| fault("inspect", &root, e))?;
        let magic = magic(&root).map_err(|e| fault("inspect", &root, e))?;
        if let Some(what) = remote(magic) {
            return Err(refused(&root, what));
        }
        // A failure only means that ageing is not held off.
        let _ = rustix::fs::flock(&dir, FlockOperation::NonBlockingLockShared);
        Ok(Self { mode: file_mode(seen.mode()), root, _not_aged: dir })
    }

    /// Creates a directory below the root, open to whom the root is.
    pub(super) fn create_below(&self, path: &Path) -> Result<()> {
        let made = DirBuilder::new().recursive(true).mode(dir_mode(self.mode)).create(path);
        made.map_err(|e| fault("create the directory", path, e))?;
        // The umask must not close to a group what the administrator opened to it.
        if self.mode != 0o600 {
            let _ = fs::set_permissions(
                path,
                std::os::unix::fs::PermissionsExt::from_mode(dir_mode(self.mode)),
            );
        }
        Ok(())
    }
}

/// Who may write to the directory may read and write the files, nobody else may do either: they
/// hold claim ids, and whoever knows one may release.
fn file_mode(dir: u32) -> u32 {
    let group = if dir & 0o020 != 0 { 0o060 } else { 0 };
    let others = if dir & 0o002 != 0 { 0o006 } else { 0 };
    0o600 | group | others
}

fn dir_mode(files: u32) -> u32 {
    files | (files & 0o444) >> 2
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
    let Some(bytes) = percent_decoded(path) else {
        return refused("has a % that two hexadecimal digits do not follow (a % itself is %25)");
    };
    if bytes.contains(&0) {
        return refused("holds a NUL");
    }
    use std::os::unix::ffi::OsStringExt;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, others @ ..] = rest {
        rest = others;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, others @ ..] = rest else { return None };
        let digit = |b: u8| char::from(b).to_digit(16);
        bytes.push(u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?);
        rest = others;
    }
    Some(bytes)
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
            assert!(error.to_string().contains("file:/abs/dir"), "{error}");
        }
    }

    #[test]
    fn the_default_comes_from_the_user_database() {
        assert_eq!(of_user(0).unwrap(), Path::new(OF_ROOT));
        let error = of_user(u32::MAX - 7).unwrap_err();
        assert!(error.to_string().contains("file:/var/tmp/leasehold-"), "{error}");
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
    fn files_are_open_to_those_whom_the_directory_is_open_to() {
        assert_eq!(file_mode(0o700), 0o600);
        assert_eq!(file_mode(0o755), 0o600, "claim ids are secrets");
        assert_eq!(file_mode(0o2775), 0o660);
        assert_eq!(file_mode(0o1777), 0o666);
        assert_eq!(dir_mode(0o600), 0o700);
        assert_eq!(dir_mode(0o660), 0o770);

        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().join("new/store");
        let place = Place::find(&format!("file:{}", root.display())).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(place.mode, 0o600);
    }

    #[test]
    fn what_is_no_directory_is_one_clear_line() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Place::find(&format!("file:{}", path.display())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
        }
        let error = Place::find("file:/proc/leasehold").unwrap_err();
        assert!(matches!(
            error.kind(),
            ErrorKind::Config | ErrorKind::Denied | ErrorKind::Unreachable
        ));
    }
}
