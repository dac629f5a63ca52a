//! What a database's errors mean: whether to try again, and one line that says what to do.

use std::borrow::Cow;

use super::limits::LIMIT;
use leasehold_core::{Error, ErrorKind};

/// An operation that failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Others were in the way, and the database has undone ours: again.
    Conflict(sqlx::Error),
    /// The connection is no good any more; what was sent may have been done.
    Broken(sqlx::Error),
    /// The server takes no writes. One that was refused for it when we connected stays so; one that we
    /// have written to is being replaced, and whoever has its name next may be asked.
    ReadOnly(sqlx::Error),
    /// Trying again does not help.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        let code = code_of(&error);
        match (&error, code.as_deref()) {
            (sqlx::Error::Database(_), Some(code)) if is_conflict(code) => Self::Conflict(error),
            (sqlx::Error::Database(_), Some(code)) if is_undeclared_pooler(code, &error) => {
                Self::Final(undeclared_pooler().because(shown(&error)))
            }
            (sqlx::Error::Database(_), Some(code)) if is_ending(code) => Self::Broken(error),
            (sqlx::Error::Database(_), Some("25006" | "m1290" | "m1836")) => Self::ReadOnly(error),
            (sqlx::Error::Database(_), _) | (sqlx::Error::Configuration(_), _) => {
                Self::Final(explain(error))
            }
            (sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_), _) => {
                Self::Final(explain(error))
            }
            // A row was changed meanwhile, of which a script was to change what it had read.
            (sqlx::Error::RowNotFound, _) => Self::Conflict(error),
            _ => Self::Broken(error),
        }
    }
}

impl Failure {
    /// What the caller is told when there is no more trying.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Final(error) => error,
            Self::ReadOnly(error) => explain(error),
            Self::Conflict(error) => {
                let what = "others are in the way in the database again and again: try again later";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
            Self::Broken(error) if code_of(&error).is_some_and(|code| is_full(&code)) => {
                let what = "the database has no room for another connection: raise its limit, or \
                            lower pool= in the URLs of its clients";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
            Self::Broken(error) => {
                let what = "the database cannot be reached: check that it runs and that host and port \
                     are right";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
        }
    }
}

/// What a caller is told while the server that takes no writes any more is being replaced.
pub(super) fn replaced(error: &sqlx::Error) -> Error {
    let what = "the database has become read-only: it is failing over, or the URL leads to a replica \
                by now";
    Error::new(ErrorKind::Unreachable, what).because(shown(error))
}

/// PostgreSQL's SQLSTATE, MySQL's number, SQLite's extended code: they do not overlap in length.
fn code_of(error: &sqlx::Error) -> Option<String> {
    let database = error.as_database_error()?;
    #[cfg(feature = "mysql")]
    if let Some(mysql) = database.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return Some(format!("m{}", mysql.number()));
    }
    #[cfg(feature = "sqlite")]
    if database.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some() {
        let code = database.code().and_then(|c| c.parse::<i32>().ok())?;
        return Some(format!("s{}", code & 0xff));
    }
    database.code().map(Cow::into_owned)
}

/// Whether the row is there already.
#[cfg(feature = "mysql")]
pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "m1062")
}

/// SQLite: whether a statement has refused to go on.
#[cfg(feature = "sqlite")]
pub(super) fn is_refused(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "s1")
}

/// SQLite: whether somebody else is writing just now.
#[cfg(feature = "sqlite")]
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "s5")
}

/// Undone by the database, because of others: serialization, deadlock, lock wait, busy; and what
/// two that create the tables at once do to each other.
fn is_conflict(code: &str) -> bool {
    matches!(
        code,
        // The last of each: a statement that the server's own limit, or a person, cut short.
        "40001"
            | "40P01"
            | "55P03"
            | "23505"
            | "42P07"
            | "42710"
            | "57014"
            // A script's write has not changed the row that it was to change.
            | "22012"
            | "m1242"
            // What we have seen was changed by somebody since (MariaDB with innodb_snapshot_isolation, its
            // default from 11.6 on).
            | "m1020"
            // We stood still in a transaction for longer than the server lets us: it has undone it, and
            // ended the session.
            | "25P03"
            | "25P04"
            | "m1213"
            | "m1205"
            | "m1062"
            | "m1969"
            | "m3024"
            | "s5"
            | "s6"
    )
}

/// PgBouncer has this code for all that it says itself; this it says to what our sessions are
/// started with.
fn is_undeclared_pooler(code: &str, error: &sqlx::Error) -> bool {
    code == "08P01" && error.to_string().contains("unsupported startup parameter")
}

/// A pooler that lends the server's sessions to one client after the other, and nobody said so.
pub(super) fn undeclared_pooler() -> Error {
    let what = "a pooler is in front of the database: write pooler=transaction into the URL, or \
                connect to the database itself";
    Error::new(ErrorKind::Config, what)
}

/// The server ends the session, or has no room for one; or a statement that was prepared on this
/// connection does not fit the tables any more (0A000, 1615).
fn is_ending(code: &str) -> bool {
    code.starts_with("08")
        || is_full(code)
        || matches!(
            code,
            "57P01"
                | "57P02"
                | "57P03"
                | "57P05"
                | "0A000"
                | "m1053"
                | "m1317"
                | "m1615"
                | "m1927"
                | "m4031"
        )
}

/// The server has no room for another connection.
fn is_full(code: &str) -> bool {
    matches!(code, "53300" | "m1040" | "m1203" | "m1226")
}

/// Another session has ended our statement, and nothing else.
#[cfg(feature = "mysql")]
pub(super) fn is_interrupted(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "m1317")
}

/// The server has no room for another connection, or nobody lends one.
pub(super) fn has_no_room(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::PoolTimedOut) || code_of(error).is_some_and(|code| is_full(&code))
}

/// One line for what no repetition can help.
fn explain(error: sqlx::Error) -> Error {
    let code = code_of(&error).unwrap_or_default();
    let (kind, what) = match code.as_str() {
        "28P01" | "28000" | "m1045" | "m1698" => {
            (ErrorKind::Denied, "the database refuses the user or the password: check the URL")
        }
        "42501" | "m1044" | "m1142" | "m1143" | "m1227" => (
            ErrorKind::Denied,
            "this database user lacks a right: as the tables' owner run what `leasehold schema` \
             prints, and grant SELECT, INSERT, UPDATE and DELETE on them",
        ),
        "25006" | "m1290" | "m1792" | "m1836" | "s8" => (
            ErrorKind::Denied,
            "the database is read-only here (a replica, or a file that is not ours): connect to \
             one that may be written to",
        ),
        "3D000" | "m1049" => {
            (ErrorKind::Config, "there is no such database: create it, or mend the URL")
        }
        "26000" | "42P05" => return undeclared_pooler().because(shown(&error)),
        "3F000" => (ErrorKind::Config, "there is no such schema: create it, or mend the URL"),
        "s14" => (
            ErrorKind::Config,
            "the database file cannot be opened: check that its directory exists and is ours to \
             write to",
        ),
        "s26" | "s11" => {
            (ErrorKind::Corrupt, "this file is no SQLite database, or damaged: use another path")
        }
        "53100" | "m1114" | "m1021" | "s13" => {
            (ErrorKind::Full, "the database's disk is full: make room")
        }
        "42P01" | "42703" | "m1146" | "m1054" | "s1" | "42804" | "22001" | "m1406" => (
            ErrorKind::Corrupt,
            "the tables are not the ones that this version of leasehold makes: compare them with \
             what `leasehold schema` prints; clients whose tables differ exclude nobody",
        ),
        _ => match &error {
            sqlx::Error::Configuration(_) => {
                (ErrorKind::Config, "the store's URL cannot be understood")
            }
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
                (ErrorKind::Corrupt, "the tables hold what leasehold did not write there")
            }
            _ => (ErrorKind::Corrupt, "the database refused a statement of leasehold's"),
        },
    };
    Error::new(kind, what).because(shown(&error))
}

/// The database's own words on one line; a driver's error about a URL may quote the URL.
fn shown(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Configuration(_) => "see the documentation of the store's URL".to_owned(),
        sqlx::Error::Database(database) => {
            let code = database.code().unwrap_or_default();
            let words: String =
                database.message().chars().filter(|c| !c.is_control()).take(200).collect();
            format!("{words} ({code})")
        }
        other => other.to_string(),
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the client's runtime was shut down: connect again")
}

pub(super) fn given_up() -> Error {
    Error::new(ErrorKind::Unreachable, "given up by its caller before it was done: ask again")
}

pub(super) fn no_answer() -> Error {
    let what = format!("the database did not answer within {LIMIT:?}: check that it runs");
    Error::new(ErrorKind::Unreachable, what)
}
