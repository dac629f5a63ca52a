//! Which file a connection to SQLite has open, and whether its path still leads there.
//!
//! A connection has its files by their descriptors: whoever moves, removes, replaces or mounts over the database
//! file leaves it with files that no other client finds. Both sides would hold the same lock, and neither would
//! notice. SQLite itself looks only as it opens a rollback journal, which it never does in WAL mode.
//!
//! # The argument
//! - *What is compared.* Device and inode of the database file as its path leads to it, and of its log (`-wal`)
//!   and index (`-shm`), which hold locks and commits that are not in the database file. They are noted right after
//!   the connection has read from the file, and the path's inode must be the same before it was opened. A number
//!   is not used again while the connection has the file open.
//! - *When.* After every statement outside of a transaction, after every COMMIT, and after every failure: so before
//!   any grant or renewal is reported. If the path leads to our file after the commit, whoever opens it from
//!   then on sees the commit. What was committed to a file that has gone is not reported to anyone.
//! - *And then.* All connections of the client are closed, and the call is repeated on a new one, which opens what
//!   the path leads to. All is decided by the rows there: a claim of the old file has none, so its holder loses it
//!   at its next renewal, and its waiter joins the new queue. Tokens come from the clock and rise.
//! - *No identity is kept in the file.* A copy of the file has the same one. Each claim's row is its own: who renews
//!   finds 128 random bits of its own there, or has lost its place.
//! - *What is left.* Between the mishap and the old holder's next renewal (a third of its lease) two may hold.
//!
//! Files are looked at by their names only: whoever opens and closes one of SQLite's loses the locks of its process.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;

use super::fault;
use super::wire::{Arg, Done, Row, Statement, Step, Wire};
use leasehold_core::{Error, Result};

type Inode = (u64, u64);

/// The inode of what is at this path; `None` if nothing is.
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
pub(super) struct Located {
    path: PathBuf,
    database: Inode,
    /// Log and index, those that were there.
    beside: Vec<(PathBuf, Inode)>,
}

impl Located {
    /// Those of a connection that has just read from the file. `before` is what was there before it was opened.
    /// `None`: the file was replaced meanwhile.
    pub(super) fn now(path: &Path, before: Option<Inode>) -> std::io::Result<Option<Self>> {
        let found = inode(path)?;
        let Some(database) = found.filter(|_| before.is_none() || before == found) else {
            return Ok(None);
        };
        // SQLite has them beside the file itself, not beside a link to it.
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

    /// What is at this path before it is opened.
    pub(super) fn before(path: &Path) -> Option<Inode> {
        inode(path).ok().flatten()
    }

    /// Whether both are one file.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        self.database == other.database
    }

    /// Whether others who open the path find these files. What cannot be looked at is not known to have gone.
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

/// Refuses a file that is a mount of its own: its log would be in another directory for each who mounts it.
pub(super) fn not_mounted_alone(path: &Path) -> Result<()> {
    let Ok(real) = std::fs::canonicalize(path) else { return Ok(()) };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match is_mount(&mounts, &real) {
        true => Err(Error::new(
            leasehold_core::ErrorKind::Config,
            format!(
                "the database file {} is mounted on its own, so its log is not shared and it excludes nothing: mount \
                 its directory instead",
                real.display()
            ),
        )),
        false => Ok(()),
    }
}

/// Whether a path is a mount's root, as `mountinfo` lists them: blanks and the like are in octal there.
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

/// A connection whose answers count only while its path leads to its file.
pub(super) struct Checked<W> {
    pub(super) wire: W,
    pub(super) located: Located,
    /// Whether a transaction is open: what is done in it counts as it is committed.
    pub(super) is_open: fn(&W) -> bool,
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
            // Nothing of it counts as done.
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
    fn file_that_is_a_mount_is_known() {
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
    fn files_are_there_until_one_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("l.db");
        let log = directory.path().join("l.db-wal");
        std::fs::write(&file, "").unwrap();
        std::fs::write(&log, "").unwrap();
        let located = Located::now(&file, Located::before(&file)).unwrap().unwrap();
        assert!(located.is_there());
        std::fs::write(&file, "more").unwrap();
        assert!(located.is_there(), "it was only written to");
        std::fs::rename(&log, directory.path().join("other")).unwrap();
        assert!(!located.is_there(), "the log has gone");
        std::fs::rename(directory.path().join("other"), &log).unwrap();
        assert!(located.is_there(), "it is back");
        std::fs::write(directory.path().join("new"), "").unwrap();
        std::fs::rename(directory.path().join("new"), &file).unwrap();
        assert!(!located.is_there(), "replaced");
        assert!(Located::now(&file, Some((1, 1))).unwrap().is_none(), "replaced as it was opened");
    }
}
