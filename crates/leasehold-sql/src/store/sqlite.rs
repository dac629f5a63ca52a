//! The connection to SQLite. The database is one file on one machine, and has one writer at a time.
//!
//! The file should contain only leasehold's tables. An application's transaction that writes for as
//! long as a lease blocks the lease's renewal. If the file contains other tables, its journal mode
//! is not changed, because the mode belongs to the file and not to the connection. Instead, a
//! warning is reported. A file on a network file system is refused, because SQLite's locks do not
//! exclude other machines there.

mod listen;
mod located;
pub(super) mod notify_fifo;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteQueryResult, SqliteRow, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Row};

use self::located::{Checked, Located, not_mounted_alone};
use self::notify_fifo::NotifyFifos;
use super::fault;
use super::rows;
use super::schema;
use super::url::{SqlUrl, Synchronous};
use super::wire::{Arg, Connect, Done, Row as Cells, Statement, Step, Wire, wire};
use leasehold_core::{Error, ErrorKind, Result, kit};

fn text(row: &SqliteRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &SqliteQueryResult) -> u64 {
    0
}

wire!(SqliteConnection, std::convert::identity, text, no_id);

/// A connection of our own.
///
/// A transaction begins together with its first statement. Each message to the driver's thread
/// costs two thread switches, and during a transaction all other clients wait.
///
/// If another client is writing, the statement is retried here. SQLite would sleep for at least a
/// millisecond, and one of our transactions takes a tenth of that. Releases and joins often collide
/// in this way. Within a transaction only a COMMIT or ROLLBACK that is sent alone is retried,
/// because statements that were sent together may be partially executed.
struct Alone {
    connection: SqliteConnection,
    begun: Begun,
}

/// The state of a transaction.
enum Begun {
    No,
    /// The transaction begins with this statement, which is sent together with the next one.
    Next(String),
    Yes,
}

#[async_trait]
impl Wire for Alone {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        let mut others = Others::default();
        let together = match &self.begun {
            Begun::Yes => return self.connection.rows(statement, args).await,
            Begun::Next(begin) => {
                let sql = format!("{begin}; {}", statement.sql).into();
                Some(Statement { sql, shape: statement.shape })
            }
            Begun::No => None,
        };
        loop {
            let statement = together.as_ref().unwrap_or(statement);
            match self.connection.rows(statement, args.clone()).await {
                Err(error) if others.are_waited_for(&error).await => {}
                done => {
                    self.begun = if together.is_some() { Begun::Yes } else { Begun::No };
                    return done;
                }
            }
        }
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        match std::mem::replace(&mut self.begun, Begun::Yes) {
            Begun::Yes => return self.connection.run(statement, args).await,
            // This BEGIN is sent separately, because the rows changed by the last statement would
            // be counted again.
            Begun::Next(begin) => {
                self.now(&begin).await?;
                return self.connection.run(statement, args).await;
            }
            Begun::No => self.begun = Begun::No,
        }
        let mut others = Others::default();
        loop {
            match self.connection.run(statement, args.clone()).await {
                Err(error) if others.are_waited_for(&error).await => {}
                done => return done,
            }
        }
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        let ends = matches!(sql, COMMIT | "ROLLBACK");
        match std::mem::replace(&mut self.begun, Begun::No) {
            Begun::No if sql.starts_with("BEGIN") => self.begun = Begun::Next(sql.to_owned()),
            // `sql` ends a transaction that never began.
            Begun::Next(_) if ends => {}
            Begun::Next(begin) => {
                self.begun = Begun::Yes;
                self.now(&format!("{begin}; {sql}")).await?;
            }
            Begun::Yes if !ends => {
                self.begun = Begun::Yes;
                Wire::raw(&mut self.connection, sql).await?;
            }
            Begun::Yes | Begun::No => self.now(sql).await?,
        }
        Ok(())
    }

    /// Runs the steps one by one, except that the writes at the end of a transaction are sent with
    /// its COMMIT.
    async fn script(
        &mut self,
        steps: Vec<Step<'_>>,
        done: &mut Vec<Vec<Cells>>,
    ) -> sqlx::Result<()> {
        let mut writes = Vec::new();
        for step in steps {
            match step {
                Step::One(statement, args) => writes.push((statement, args)),
                Step::Raw(sql) if sql == COMMIT && !writes.is_empty() => {
                    let steps = writes.len() + 1;
                    self.end_with(std::mem::take(&mut writes)).await?;
                    done.extend(std::iter::repeat_with(Vec::new).take(steps));
                }
                Step::Raw(sql) => {
                    self.raw(&sql).await?;
                    done.push(Vec::new());
                }
                Step::Rows(statement, args) => done.push(self.rows(statement, args).await?),
            }
        }
        Ok(())
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        sqlx::Connection::close(self.connection).await
    }
}

const COMMIT: &str = "COMMIT";

/// Fails unless the previous statement changed one row. The smallest integer is the only argument
/// for which SQLite's abs() fails.
const CHANGED_ONE: &str = "SELECT iif(changes() = 1, 1, abs(-9223372036854775808))";

impl Alone {
    /// Sends several writes and their COMMIT together.
    async fn end_with(&mut self, writes: Vec<(&Statement, Vec<Arg>)>) -> sqlx::Result<()> {
        let (mut sql, mut all) = (String::new(), Vec::new());
        for (statement, args) in writes {
            sql.push_str(&format!("{}; {CHANGED_ONE}; ", statement.sql));
            all.extend(args);
        }
        sql.push_str(COMMIT);
        let ended = self.rows(&Statement { sql: sql.into(), shape: "" }, all).await;
        match ended {
            Ok(_) => {
                self.begun = Begun::No;
                Ok(())
            }
            Err(error) if fault::is_refused(&error) => Err(sqlx::Error::RowNotFound),
            Err(error) => Err(error),
        }
    }

    async fn now(&mut self, sql: &str) -> sqlx::Result<()> {
        let mut others = Others::default();
        loop {
            match Wire::raw(&mut self.connection, sql).await {
                Err(error) if others.are_waited_for(&error).await => {}
                done => return done,
            }
        }
    }
}

/// The start of one statement's wait for other writers, and the number of its retries.
#[derive(Default)]
struct Others {
    since: Option<Instant>,
    tries: u32,
}

impl Others {
    /// Returns whether to retry a statement that failed because of another writer. Pauses first if
    /// necessary.
    async fn are_waited_for(&mut self, error: &sqlx::Error) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if !fault::is_busy(error) || since.elapsed() > PATIENCE {
            return false;
        }
        self.tries += 1;
        if let Some(slow) = self.tries.checked_sub(EAGER) {
            tokio::time::sleep(PAUSE * (slow + 1).min(10)).await;
        }
        true
    }
}

/// The maximum time to wait for other writers.
const PATIENCE: Duration = Duration::from_secs(4);
/// The number of immediate retries. Together they take about as long as a short transaction that
/// does not wait for its disk.
const EAGER: u32 = 30;
/// The first pause after the immediate retries.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Sqlite {
    options: SqliteConnectOptions,
    foreign: String,
    path: PathBuf,
    /// The store's URL, shown when a change of the file is reported.
    shown: String,
    /// The statements that create the tables, and the query for their version.
    tables: Vec<String>,
    version: String,
    /// Whether this client may create the file and the tables.
    create: bool,
    /// The file that is known to have the tables.
    known: Mutex<Option<Located>>,
}

/// Returns a query that finds a table or view that is not ours.
pub(super) fn foreign(url: &SqlUrl) -> String {
    let ours = ["locks", "claims", "schema"].map(|table| format!("'{}{table}'", url.prefix));
    format!(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') \
         AND substr(name, 1, 7) <> 'sqlite_' AND name NOT IN ({}) ORDER BY name LIMIT 1",
        ours.join(", ")
    )
}

/// Returns the name of a table or view in the file that is not ours, if there is one.
pub(super) async fn shared_with(
    wire: &mut dyn Wire,
    foreign: &str,
) -> sqlx::Result<Option<String>> {
    let statement = Statement { sql: foreign.into(), shape: "t" };
    let rows = wire.rows(&statement, Vec::new()).await?;
    let name = rows.into_iter().next().and_then(|row| rows::Cells::new(row).text().ok());
    Ok(name.map(|name| name.chars().filter(|c| !c.is_control()).take(60).collect()))
}

/// Returns whether this process may read and write a file.
pub(super) fn may_write(path: &Path) -> bool {
    use rustix::fs::{Access, AtFlags, CWD};
    rustix::fs::accessat(CWD, path, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

/// Returns an error message if this user may write the database file, but not SQLite's files next
/// to it. These have the primary group of their creator, unless the directory sets another group.
fn closed_to_us(path: &Path, may_write: impl Fn(&Path) -> bool) -> Option<String> {
    let real = std::fs::canonicalize(path).ok().filter(|real| may_write(real))?;
    let closed = ["-wal", "-shm"].into_iter().find_map(|end| {
        let mut beside = real.clone().into_os_string();
        beside.push(end);
        let beside = PathBuf::from(beside);
        (beside.exists() && !may_write(&beside)).then_some(beside)
    })?;
    let directory = real.parent().unwrap_or(Path::new("/")).display();
    Some(format!(
        "{} belongs to another user and group, so this user may not write to it: run `chgrp GROUP {directory} && \
         chmod 2770 {directory}` with the group of all its users, and restart them",
        closed.display()
    ))
}

/// Returns an error for a file on a network file system, which other machines may share.
fn local(path: &Path) -> Result<()> {
    let beside = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = beside.unwrap_or(Path::new("."));
    // If the directory cannot be examined, it cannot be opened either, and that error explains why.
    let magic = kit::magic(path).or_else(|_| kit::magic(directory));
    magic.map_or(Ok(()), of_this_machine)
}

/// Returns an error for a network file system, given its number from statfs(2).
fn of_this_machine(magic: u32) -> Result<()> {
    match kit::remote(magic) {
        None => Ok(()),
        Some(name) => {
            let what = format!(
                "the database file is on {name}, where SQLite's locks do not exclude other machines"
            );
            let hint = "use a file on a local disk; for many machines use a server, such as \
                        postgres: or redis:";
            Err(Error::new(ErrorKind::Config, what).with_hint(hint))
        }
    }
}

impl Sqlite {
    pub(super) fn new(url: &SqlUrl, shown: &str) -> Result<Self> {
        let path = path(url)?;
        local(&path)?;
        not_mounted_alone(&path)?;
        if !url.create && matches!(path.try_exists(), Ok(false)) {
            let missing = kit::no_store(format!("the file {} does not exist", path.display()));
            return Err(missing.with_hint(
                "check the path; a client creates the file when it connects, unless the URL \
                 contains create=no",
            ));
        }
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(url.create)
            .synchronous(match url.synchronous {
                Synchronous::Full => SqliteSynchronous::Full,
                Synchronous::Normal => SqliteSynchronous::Normal,
                Synchronous::Off => SqliteSynchronous::Off,
            })
            .busy_timeout(PATIENCE)
            .disable_statement_logging();
        Ok(Self {
            options,
            foreign: foreign(url),
            path,
            shown: shown.to_owned(),
            tables: schema::statements(url),
            version: format!("SELECT version FROM {}", url.table("schema")),
            create: url.create,
            known: Mutex::default(),
        })
    }

    /// Opens a connection and reads from the file, so that its log and index exist.
    async fn opened(&self) -> sqlx::Result<SqliteConnection> {
        let mut connection = self.options.connect().await?;
        let may_change = self.create || self.tables_version(&mut connection).await?.is_some();
        if shared_with(&mut connection, &self.foreign).await?.is_none() && may_change {
            Wire::raw(&mut connection, "PRAGMA journal_mode = WAL").await?;
        }
        Ok(connection)
    }

    /// Returns the version of the tables, or `None` if they are missing or incomplete.
    async fn tables_version(&self, connection: &mut SqliteConnection) -> sqlx::Result<Option<i64>> {
        let statement = Statement { sql: self.version.as_str().into(), shape: "i" };
        let row = match Wire::rows(connection, &statement, Vec::new()).await {
            Err(error) if fault::is_missing_table(&error) => None,
            rows => rows?.into_iter().next(),
        };
        Ok(row.and_then(|row| rows::Cells::new(row).count::<i64>().ok()))
    }

    /// Prepares a file that this client has not used before. It may have no tables, or tables of
    /// another version.
    async fn prepare(&self, connection: &mut SqliteConnection) -> sqlx::Result<()> {
        if self.create {
            for statement in &self.tables {
                Wire::raw(connection, statement).await?;
            }
        }
        let found = self.tables_version(connection).await?;
        match found {
            Some(schema::VERSION) => Ok(()),
            found => Err(fault::changed(format!(
                "the database file {} was replaced by one whose tables are of version {}: this leasehold uses version {}",
                self.path.display(),
                found.unwrap_or_default(),
                schema::VERSION
            ))),
        }
    }
}

/// Returns the absolute path of the database file, which does not depend on the current directory.
fn path(url: &SqlUrl) -> Result<PathBuf> {
    let path = url.path()?;
    Ok(std::path::absolute(path).unwrap_or_else(|_| path.into()))
}

/// Returns the FIFOs by which the clients of this file are notified of their grants.
pub(super) fn notify_fifos(url: &SqlUrl) -> std::io::Result<NotifyFifos> {
    NotifyFifos::beside(&path(url).map_err(std::io::Error::other)?)
}

#[async_trait]
impl Connect for Sqlite {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let before = Located::before(&self.path);
        let mut connection =
            self.opened().await.map_err(|error| match closed_to_us(&self.path, may_write) {
                Some(what) => fault::refused(
                    Error::new(ErrorKind::Denied, what).with_source(error.to_string()),
                ),
                // An earlier connection could open the file. Now file descriptors are used up, or
                // the directory is temporarily missing.
                None if kit::locked(&self.known).is_some() && fault::cannot_open(&error) => {
                    let what =
                        format!("the database file {} cannot be opened now", self.path.display());
                    fault::refused(
                        Error::new(ErrorKind::Unreachable, what).with_source(error.to_string()),
                    )
                }
                None => error,
            })?;
        let located =
            Located::now(&self.path, before).map_err(sqlx::Error::Io)?.ok_or_else(|| {
                fault::changed(format!(
                    "the database file {} was replaced as it was opened",
                    self.path.display()
                ))
            })?;
        let known = kit::locked(&self.known).clone();
        if known.as_ref().is_some_and(|known| !known.is_same_as(&located)) {
            self.prepare(&mut connection).await?;
            leasehold_core::telemetry::store_changed(&self.shown);
        }
        *kit::locked(&self.known) = Some(located.clone());
        Wire::raw(&mut connection, "PRAGMA busy_timeout = 0").await?;
        let wire = Alone { connection, begun: Begun::No };
        Ok(Box::new(Checked { wire, located, is_open: |wire| matches!(wire.begun, Begun::Yes) }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SqlStore;
    use super::super::pool::Pooled;
    use super::super::rows::Cells;
    use super::super::wire::{Arg, Statement, Step};
    use super::COMMIT;
    use leasehold_core::store::{Mode, Store};
    use leasehold_core::{Claim, Kind, Name};

    async fn setting(pooled: &mut Pooled, sql: &str, shape: &'static str) -> String {
        let statement = Statement { sql: sql.into(), shape };
        let rows = pooled.wire.rows(&statement, Vec::new()).await.unwrap();
        let mut cells = Cells::new(rows.into_iter().next().unwrap());
        match shape {
            "i" => cells.count::<i64>().unwrap().to_string(),
            _ => cells.text().unwrap(),
        }
    }

    // S61
    #[tokio::test]
    async fn connections_sync_as_configured_in_the_url() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        for (wish, expected) in [
            ("", "2"),
            ("?synchronous=full", "2"),
            ("?synchronous=normal", "1"),
            ("?synchronous=off", "0"),
        ] {
            let here = tokio::runtime::Handle::current();
            let store = SqlStore::open(&format!("{url}{wish}"), &here).await.unwrap();
            for pool in [&store.shared.pool, &store.shared.renewal_pool] {
                let mut pooled = pool.take().await.unwrap();
                let synchronous = setting(&mut pooled, "PRAGMA synchronous", "i").await;
                assert_eq!(synchronous, expected, "{wish}");
                assert_eq!(setting(&mut pooled, "PRAGMA journal_mode", "t").await, "wal");
            }
        }
    }

    /// If no other client writes, each write finds its row. If one write does not find its row,
    /// nothing is committed.
    #[tokio::test]
    async fn writes_sent_together_are_committed_all_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        let store = SqlStore::open(&url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = Claim::new(Name::new("x").unwrap(), Kind::Mutex, 1, 1).unwrap();
        store.join(&claim, Mode::Try).await.unwrap();
        let sql = &store.shared.sql;
        let release =
            || Step::One(&sql.release, vec![Arg::Name("x".into()), claim.id.to_hex().into()]);
        let mut pooled = store.shared.pool.take().await.unwrap();
        for (mut writes, done) in [(vec![release(), release()], false), (vec![release()], true)] {
            pooled.wire.raw(sql.begin).await.unwrap();
            let version = pooled.wire.rows(&sql.version, Vec::new()).await.unwrap();
            assert_eq!(version.len(), 1);
            writes.push(Step::Raw(COMMIT.into()));
            let mut answers = Vec::new();
            assert_eq!(pooled.wire.script(writes, &mut answers).await.is_ok(), done);
            assert_eq!(answers.len(), if done { 2 } else { 0 });
            if !done {
                pooled.wire.raw("ROLLBACK").await.unwrap();
            }
            assert_eq!(store.read(&claim.name).await.unwrap().is_none(), done);
        }
    }

    #[test]
    fn log_of_another_group_is_named_with_the_fix() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("l.db");
        for end in ["", "-wal", "-shm"] {
            std::fs::write(directory.path().join(format!("l.db{end}")), "").unwrap();
        }
        let closed = |closed: &'static str| {
            super::closed_to_us(&file, move |path| !path.to_string_lossy().ends_with(closed))
        };
        assert_eq!(super::closed_to_us(&file, |_| true), None);
        // If `l.db` is inaccessible, the problem is the database file itself and not its log.
        assert_eq!(closed("l.db"), None);
        for end in ["-wal", "-shm"] {
            let finding = closed(end).unwrap();
            assert!(
                finding.contains(&format!("l.db{end}")) && finding.contains("chmod 2770"),
                "{finding}"
            );
        }
    }

    // F33
    #[test]
    fn a_file_on_a_network_file_system_is_refused() {
        let message = super::of_this_machine(0x6969).unwrap_err();
        assert_eq!(message.kind(), leasehold_core::ErrorKind::Config);
        assert!(message.to_string().contains("is on NFS"), "{message}");
        super::of_this_machine(0xef53).unwrap();
        let here = tempfile::tempdir().unwrap();
        super::local(&here.path().join("not there yet.db")).unwrap();
    }
}
