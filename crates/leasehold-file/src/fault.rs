//! Errors of the operating system, with the path and a hint.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use leasehold_core::{Error, ErrorKind};

/// Returns the error for a failed operation on `path`. `doing` names the operation.
pub(super) fn fault(doing: &str, path: &Path, source: io::Error) -> Error {
    let (kind, hint) = match Errno::from_io_error(&source) {
        Some(Errno::ACCESS | Errno::PERM) => (
            ErrorKind::Denied,
            "run as a user who may write there, or use another directory: file:/abs/dir",
        ),
        Some(Errno::ROFS) => {
            (ErrorKind::Denied, "use a directory on a writable disk: file:/abs/dir")
        }
        Some(Errno::NOSPC) => (
            ErrorKind::Full,
            "free disk space; if there is enough, raise the limit on file sizes: `ulimit -f`",
        ),
        Some(Errno::DQUOT) => (ErrorKind::Full, "free disk space, or raise the user's disk quota"),
        Some(Errno::FBIG) => (ErrorKind::Full, "raise the limit on file sizes: `ulimit -f`"),
        Some(Errno::NOTDIR | Errno::EXIST | Errno::ISDIR | Errno::LOOP) => (
            ErrorKind::Config,
            "use the path of a directory that only leasehold uses: file:/abs/dir",
        ),
        // These errors are permanent, so waiting would not help.
        Some(
            Errno::NOENT
            | Errno::INVAL
            | Errno::NAMETOOLONG
            | Errno::NOSYS
            | Errno::OPNOTSUPP
            | Errno::NODEV
            | Errno::NXIO,
        ) => (ErrorKind::Config, "use an existing directory on a local disk: file:/abs/dir"),
        Some(Errno::MFILE | Errno::NFILE) => (
            ErrorKind::Unreachable,
            "raise the limit of open files (`ulimit -n`), or hold fewer locks at once",
        ),
        _ => (ErrorKind::Unreachable, "check the directory and its file system"),
    };
    let whose = if kind == ErrorKind::Denied { whose(path) } else { String::new() };
    let path = path.to_string_lossy();
    let what = format!("cannot {doing} {:?}{whose}", path.as_ref());
    Error::new(kind, what).with_hint(hint).with_source(source)
}

/// Returns a text about the owner and the mode of a file that belongs to another user, because only
/// that user can change its permissions.
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
    fn os_errors_have_their_kind_and_name_the_path() {
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
            let shown = format!("{error:#}");
            assert!(shown.contains(r#""/a\nb""#) && shown.lines().count() == 1, "{shown}");
        }
        assert!(of(Errno::NOSPC).is_retryable() && !of(Errno::ACCESS).is_retryable());
    }
}
