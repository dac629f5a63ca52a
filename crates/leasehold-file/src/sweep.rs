//! Clearing up after the dead, a little at a time.
//!
//! Who is killed leaves his FIFO, his claims, and perhaps a file that he was just making. Nobody is
//! harmed by them, but a machine that runs short commands, of which some are killed, would fill its
//! store with them. So whoever opens a store clears up, if nobody did in the last second: some
//! hundred entries of each directory, going on where the last one ended. The place is noted in
//! `tokens.boot`; where a directory was begun anew or its order changed, some are looked at twice
//! or later.
//!
//! **Only what is certainly ours is removed**, since a person may have named any directory as a
//! store: what is a FIFO and called as a session is; what is called as our temporaries are, with 32
//! random digits, and has been left alone for a minute; and control files that say of themselves
//! that they are one, with nobody in their queue. Nothing else is touched, however old it is.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};

use super::session::UNBORN;
use leasehold_core::ClaimId;

/// How many entries of one directory are looked at in one go.
pub(super) const BATCH: usize = 128;
/// A temporary is in use for less than this, in µs, unless whoever made it was stopped.
const IN_USE: u64 = 60_000_000;

/// Some names in a directory, from where the last look ended; and where this one did (0: the end).
pub(super) fn batch(dir: &Path, from: u64) -> io::Result<(Vec<std::ffi::OsString>, u64)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(dir, flags, Mode::empty())?;
    if from > 0 {
        // A place that is none any more: then from wherever that leads to.
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

/// Removes this if it is a temporary of ours that nobody works on any more at `now`, in µs.
pub(super) fn remove_temporary(path: &Path, now: u64, is_ours: impl Fn(&str) -> bool) {
    let name = path.file_name().map(|name| name.as_bytes()).and_then(|b| str::from_utf8(b).ok());
    if !name.is_some_and(|name| stem(name).is_some_and(&is_ours)) {
        return;
    }
    let Ok(seen) = fs::symlink_metadata(path) else { return };
    let changed = u64::try_from(seen.ctime()).unwrap_or(0).saturating_mul(1_000_000);
    if now.saturating_sub(changed) > IN_USE {
        // A directory with something in it stays.
        let _ = match seen.is_dir() {
            true => fs::remove_dir(path),
            false => fs::remove_file(path),
        };
    }
}

/// What a temporary is one of: the name before its random part (that of a session is nothing but
/// random).
fn stem(name: &str) -> Option<&str> {
    if let Some(id) = name.strip_suffix(UNBORN) {
        return is_random(id).then_some("");
    }
    let (stem, random) = name.strip_suffix('~')?.rsplit_once('.')?;
    (!stem.is_empty() && is_random(random)).then_some(stem)
}

/// Whether this is a random name as we draw them.
pub(super) fn is_random(text: &str) -> bool {
    ClaimId::from_hex(text).is_some_and(|id| id.to_hex() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f01_only_names_with_our_random_part_are_temporaries() {
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

    #[test]
    fn f42_batches_go_through_a_directory_of_any_size() {
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
