//! What the system refuses, as one line that names the path and what to do.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use leasehold_core::{Error, ErrorKind};

/// The error of `doing` something to `path`.
pub(super) fn fault(doing: &str, path: &Path, source: io::Error) -> Error {
    let (kind, fix) = match Errno::from_io_error(&source) {
        Some(Errno::ACCESS | Errno::PERM) => (
            ErrorKind::Denied,
            "run as a user who may write there, or name another directory (file:/abs/dir)",
        ),
        Some(Errno::ROFS) => {
            (ErrorKind::Denied, "the file system is read-only: name another directory")
        }
        Some(Errno::NOSPC) => (
            ErrorKind::Full,
            "the disk is full, or a limit on the size of files is reached: make room, try again",
        ),
        Some(Errno::DQUOT) => (ErrorKind::Full, "the disk quota is used up: make room, try again"),
        Some(Errno::FBIG) => {
            (ErrorKind::Full, "a limit on the size of files is reached: raise it (ulimit -f)")
        }
        Some(Errno::NOTDIR | Errno::EXIST | Errno::ISDIR | Errno::LOOP) => (
            ErrorKind::Config,
            "the path must be a directory that leasehold has to itself: name another one",
        ),
        // None of these goes away by itself: who waited for them would wait in vain.
        Some(
            Errno::NOENT
            | Errno::INVAL
            | Errno::NAMETOOLONG
            | Errno::NOSYS
            | Errno::OPNOTSUPP
            | Errno::NODEV
            | Errno::NXIO,
        ) => (
            ErrorKind::Config,
            "no store can be kept there, or it was deleted: name a directory on a local disk",
        ),
        Some(Errno::MFILE | Errno::NFILE) => (
            ErrorKind::Unreachable,
            "no descriptors are left: raise the limit (ulimit -n) or hold fewer locks at once",
        ),
        _ => (ErrorKind::Unreachable, "check the directory and its file system"),
    };
    let whose = if kind == ErrorKind::Denied { whose(path) } else { String::new() };
    let path = path.to_string_lossy();
    let what = format!("cannot {doing} {:?}{whose}; {fix}", path.as_ref());
    Error::new(kind, what).because(source)
}

/// What is closed to us, and was made by somebody else, is his to open.
fn whose(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let me = rustix::process::geteuid().as_raw();
    match std::fs::symlink_metadata(path) {
        Ok(seen) if seen.uid() != me => {
            let (owner, mode) = (seen.uid(), seen.mode() & 0o7777);
            format!(", which belongs to user {owner} with mode {mode:o}")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_its_kind_and_names_the_path() {
        let of = |errno: Errno| fault("write", Path::new("/a\nb"), errno.into());
        for (errno, kind) in [
            (Errno::ACCESS, ErrorKind::Denied),
            (Errno::ROFS, ErrorKind::Denied),
            (Errno::NOSPC, ErrorKind::Full),
            (Errno::DQUOT, ErrorKind::Full),
            (Errno::NOTDIR, ErrorKind::Config),
            (Errno::FBIG, ErrorKind::Full),
            (Errno::NOENT, ErrorKind::Config),
            (Errno::MFILE, ErrorKind::Unreachable),
            (Errno::IO, ErrorKind::Unreachable),
        ] {
            let error = of(errno);
            assert_eq!(error.kind(), kind, "{error}");
            let line = format!("{error:#}");
            assert!(line.contains(r#""/a\nb""#) && line.lines().count() == 1, "{line}");
        }
        assert!(of(Errno::NOSPC).is_retryable() && !of(Errno::ACCESS).is_retryable());
    }
}
