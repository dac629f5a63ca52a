//! Detects whether the path of a SQLite database still leads to the file that a connection has
//! open.
//!
//! A connection accesses its files through descriptors. If the database file is moved, removed,
//! replaced or mounted over, the connection keeps files that no other client finds. Clients on both
//! sides could hold the same lock without noticing. SQLite itself checks only when it opens a
//! rollback journal, which never happens in WAL mode.
//!
//! # The argument
//! - *What is compared.* Device and inode of the database file that the path leads to, and of its
//!   log (`-wal`) and index (`-shm`). The log and index hold locks and commits that are not in the
//!   database file. The inodes are noted right after the connection has read from the file. The
//!   path's inode must have been the same before the file was opened. An inode number is not reused
//!   while the connection has the file open.
//! - *When.* After every statement outside of a transaction, after every COMMIT, and after every
//!   failure. So it happens before any grant or renewal is reported. If the path leads to our file
//!   after the commit, every client that opens it later sees the commit. A commit to a file that
//!   has gone is not reported.
//! - *What follows.* All connections of the client are closed, and the call is repeated on a new
//!   one, which opens the file that the path leads to. The rows in that file decide everything. A
//!   claim of the old file has no row there, so a holder loses the lock at its next renewal, and a
//!   waiter joins the new queue. Tokens come from the clock and keep increasing.
//! - *No identity is stored in the file,* because a copy of the file would have the same one. Each
//!   claim's row identifies itself. A renewal finds its claim's 128 random bits there, or the claim
//!   has lost its place.
//! - *What remains.* Until the old holder's next renewal (a third of its lease), two clients may
//!   hold the lock.
//!
//! The files are examined only by name. Opening and closing a file of SQLite would release the
//! locks that this process has on it.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;

use crate::store::fault;
use crate::store::wire::{Arg, Done, Row, Statement, Step, Wire};
use leasehold_core::{Error, Result};

type Inode = (u64, u64);

/// Returns the inode of the file at this path, or `None` if the file does not exist.
fn inode(path: &Path) -> std::io::Result<Option<Inode>> {
    match std::fs::metadata(path) {
        Ok(seen) => Ok(Some((seen.dev(), seen.ino()))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The files that a connection has open.
#[derive(Clone, Debug)]
pub(in crate::store) struct Located {
    path: PathBuf,
    database: Inode,
    /// The log and index files that existed.
    beside: Vec<(PathBuf, Inode)>,
}

impl Located {
    /// Returns the files of a connection that has just read from the database file. `before` is the
    /// inode before the file was opened. Returns `None` if the file was replaced in between.
    pub(in crate::store) fn now(
        path: &Path,
        before: Option<Inode>,
    ) -> std::io::Result<Option<Self>> {
        let found = inode(path)?;
        let Some(database) = found.filter(|_| before.is_none() || before == found) else {
            return Ok(None);
        };
        // SQLite creates its other files next to the database file itself, not next to a link to
        // it.
        let real = std::fs::canonicalize(path)?;
        let mut beside = Vec::new();
        for end in ["-wal", "-shm"] {
            let mut path = real.clone().into_os_string();
            path.push(end);
            let path = PathBuf::from(path);
            beside.extend(inode(&path)?.map(|inode| (path, inode)));
        }
        Ok(Some(Self { path: path.to_owned(), database, beside }))
    }

    /// Returns the inode of the file at this path, before the file is opened.
    pub(in crate::store) fn before(path: &Path) -> Option<Inode> {
        inode(path).ok().flatten()
    }

    /// Returns whether both values are the same database file.
    pub(in crate::store) fn is_same_as(&self, other: &Self) -> bool {
        self.database == other.database
    }

    /// Returns whether other clients that open the path find these files. A file that cannot be
    /// examined is assumed to exist.
    fn is_there(&self) -> bool {
        let same = |path: &Path, ours| inode(path).map_or(true, |found| found == Some(ours));
        same(&self.path, self.database) && self.beside.iter().all(|(path, ours)| same(path, *ours))
    }

    fn check(&self) -> sqlx::Result<()> {
        match self.is_there() {
            true => Ok(()),
            false => Err(fault::changed(format!(
                "the database file {} or its log was moved, removed or replaced while it was in use: locks held in \
                 the old file are lost",
                self.path.display()
            ))),
        }
    }
}

/// Returns an error for a file that is a mount point, because each client that mounts it would have
/// its log in another directory.
pub(in crate::store) fn not_mounted_alone(path: &Path) -> Result<()> {
    let Ok(real) = std::fs::canonicalize(path) else { return Ok(()) };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match is_mount(&mounts, &real) {
        true => Err(Error::new(
            leasehold_core::ErrorKind::Config,
            format!(
                "the database file {} is mounted on its own, so its log is not shared and its locks do not exclude \
                 other clients: mount its directory instead",
                real.display()
            ),
        )),
        false => Ok(()),
    }
}

/// Returns whether `mounts`, the text of `mountinfo`, lists the path as the root of a mount. That
/// text contains blanks and similar characters in octal.
fn is_mount(mounts: &str, path: &Path) -> bool {
    let escaped: String = path.to_string_lossy().chars().fold(String::new(), |mut text, c| {
        match c {
            ' ' | '\t' | '\n' | '\\' => text.push_str(&format!("\\{:03o}", c as u32)),
            c => text.push(c),
        }
        text
    });
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(escaped.as_str()))
}

/// A connection whose results are reported only while its path leads to its file.
pub(in crate::store) struct Checked<W> {
    pub(in crate::store) wire: W,
    pub(in crate::store) located: Located,
    /// Returns whether a transaction is open. In a transaction, only the COMMIT and failures are
    /// checked.
    pub(in crate::store) is_open: fn(&W) -> bool,
}

impl<W> Checked<W> {
    fn counts<T>(&self, done: sqlx::Result<T>) -> sqlx::Result<T> {
        if done.is_err() || !(self.is_open)(&self.wire) {
            self.located.check()?;
        }
        done
    }
}

#[async_trait]
impl<W: Wire> Wire for Checked<W> {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>> {
        let done = self.wire.rows(statement, args).await;
        self.counts(done)
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        let done = self.wire.run(statement, args).await;
        self.counts(done)
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        let done = self.wire.raw(sql).await;
        self.counts(done)
    }

    async fn script(&mut self, steps: Vec<Step<'_>>, done: &mut Vec<Vec<Row>>) -> sqlx::Result<()> {
        let before = done.len();
        let sent = self.wire.script(steps, done).await;
        let is_open = (self.is_open)(&self.wire);
        if sent.is_err() || !is_open {
            // None of the steps count as done.
            self.located.check().inspect_err(|_| done.truncate(before))?;
        }
        sent
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        Box::new(self.wire).close().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_file_is_recognized() {
        let mounts = "36 35 98:0 / / rw - ext4 /dev/x rw\n\
                      37 36 98:0 /h/l.db /data/l.db rw - ext4 /dev/x rw\n\
                      38 36 98:0 /h/m.db /my\\040data/m.db rw - ext4 /dev/x rw\n";
        for (path, expected) in
            [("/data/l.db", true), ("/my data/m.db", true), ("/data", false), ("/h/l.db", false)]
        {
            assert_eq!(is_mount(mounts, Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn moved_or_replaced_file_is_detected() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("l.db");
        let log = directory.path().join("l.db-wal");
        std::fs::write(&file, "").unwrap();
        std::fs::write(&log, "").unwrap();
        let located = Located::now(&file, Located::before(&file)).unwrap().unwrap();
        assert!(located.is_there());
        std::fs::write(&file, "more").unwrap();
        assert!(located.is_there(), "a write was taken for a replacement");
        std::fs::rename(&log, directory.path().join("other")).unwrap();
        assert!(!located.is_there(), "a missing log was not noticed");
        std::fs::rename(directory.path().join("other"), &log).unwrap();
        assert!(located.is_there(), "the log exists again");
        std::fs::write(directory.path().join("new"), "").unwrap();
        std::fs::rename(directory.path().join("new"), &file).unwrap();
        assert!(!located.is_there(), "a replaced file was not noticed");
        assert!(
            Located::now(&file, Some((1, 1))).unwrap().is_none(),
            "a replacement during the opening was not noticed"
        );
    }
}
