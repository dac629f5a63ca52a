//! Removal of dead clients' data, a little at a time.
//!
//! A killed process leaves behind its FIFO, its claims, and possibly a file that it was just
//! creating. They are harmless. But a machine that runs many short commands, some of which are
//! killed, would fill its store with them.
//!
//! So each client that opens a store does a part of the cleanup, unless another client did so
//! within the last second. It processes about a hundred entries of each directory, and continues
//! where the last cleanup ended. The position is stored in `tokens.boot`. If a directory was
//! created again or its order changed, some entries are checked twice or later.
//!
//! **Only leasehold's own files are removed**, because an operator may have used any directory as a
//! store:
//! - FIFOs that are named like a session.
//! - Files that are named like leasehold's temporary files, with 32 random digits, and unchanged
//!   for a minute.
//! - Control files that identify themselves and have an empty queue.
//!
//! Nothing else is touched, however old it is.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};

use super::session::UNBORN;
use leasehold_core::ClaimId;

/// Entries of one directory that one cleanup processes.
pub(super) const BATCH: usize = 128;
/// Age in µs after which a temporary file is no longer in use, unless its process is paused.
const IN_USE: u64 = 60_000_000;

/// Returns some names of a directory, starting at the position `from`, and the next position (0 at
/// the end).
pub(super) fn batch(dir: &Path, from: u64) -> io::Result<(Vec<std::ffi::OsString>, u64)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(dir, flags, Mode::empty())?;
    if from > 0 {
        // If the position is not valid any more, the kernel chooses where to continue.
        let _ = rustix::fs::seek(&fd, SeekFrom::Start(from));
    }
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&fd, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(std::ffi::OsString::from_vec(name.to_vec()));
        }
        if names.len() == BATCH {
            return Ok((names, entry.next_entry_cookie()));
        }
    }
    Ok((names, 0))
}

/// Removes a temporary file of leasehold that is out of use at `now`, in µs.
pub(super) fn remove_temporary(path: &Path, now: u64, is_ours: impl Fn(&str) -> bool) {
    let name = path.file_name().map(|name| name.as_bytes()).and_then(|b| str::from_utf8(b).ok());
    if !name.is_some_and(|name| stem(name).is_some_and(&is_ours)) {
        return;
    }
    let Ok(seen) = fs::symlink_metadata(path) else { return };
    let changed = u64::try_from(seen.ctime()).unwrap_or(0).saturating_mul(1_000_000);
    if now.saturating_sub(changed) > IN_USE {
        // A directory that is not empty stays.
        let _ = match seen.is_dir() {
            true => fs::remove_dir(path),
            false => fs::remove_file(path),
        };
    }
}

/// Returns the name of a temporary file before its random part. The name of a session consists only
/// of the random part.
fn stem(name: &str) -> Option<&str> {
    if let Some(id) = name.strip_suffix(UNBORN) {
        return is_random(id).then_some("");
    }
    let (stem, random) = name.strip_suffix('~')?.rsplit_once('.')?;
    (!stem.is_empty() && is_random(random)).then_some(stem)
}

/// Returns whether this is a random name in leasehold's format.
pub(super) fn is_random(text: &str) -> bool {
    ClaimId::from_hex(text).is_some_and(|id| id.to_hex() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    // F01
    #[test]
    fn only_names_with_our_random_part_are_temporaries() {
        let random = "0123456789abcdef0123456789abcdef";
        assert_eq!(stem(&format!("tokens.{random}~")), Some("tokens"));
        assert_eq!(stem(&format!("{random}.new~")), Some(""));
        for of_users in [
            "notes.txt~",
            "~",
            "tokens~",
            "a.new~",
            &format!("{random}~"),
            &format!(".{random}~"),
            &format!("tokens.{random}"),
            &format!("tokens.{}~", random.to_uppercase()),
            &format!("tokens.{}~", &random[1..]),
        ] {
            assert_eq!(stem(of_users), None, "{of_users}");
        }
    }

    // F42
    #[test]
    fn batches_cover_a_directory_of_any_size() {
        let tmp = tempfile::tempdir().unwrap();
        let expected: std::collections::HashSet<_> =
            (0..BATCH * 3 + 7).map(|i| std::ffi::OsString::from(i.to_string())).collect();
        for name in &expected {
            fs::write(tmp.path().join(name), "").unwrap();
        }
        let (mut seen, mut from) = (std::collections::HashSet::new(), 0);
        for _ in 0..4 {
            let (names, next) = batch(tmp.path(), from).unwrap();
            assert!(names.len() <= BATCH);
            seen.extend(names);
            from = next;
        }
        assert_eq!((seen, from), (expected, 0));
    }
}
