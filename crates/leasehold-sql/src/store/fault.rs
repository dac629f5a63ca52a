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
                let what = "concurrent transactions kept conflicting with this one";
                let error = Error::new(ErrorKind::Unreachable, what).because(shown(&error));
                error.with_hint("retry later")
            }
            Self::Broken(error) if code_of(&error).is_some_and(|code| is_full(&code)) => {
                let what = "the database has reached its connection limit";
                let hint = "raise max_connections, or lower pool=N in the URLs of its clients";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error)).with_hint(hint)
            }
            Self::Broken(error) => {
                let what = "cannot reach the database";
                let hint = "check that it is running, and host and port in the URL";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error)).with_hint(hint)
            }
        }
    }
}

/// What a caller is told while the server that takes no writes any more is being replaced.
pub(super) fn replaced(error: &sqlx::Error) -> Error {
    let what =
        "the database has become read-only: it is failing over, or the URL now leads to a replica";
    let hint = "if it stays read-only, connect to the primary";
    Error::new(ErrorKind::Unreachable, what).because(shown(error)).with_hint(hint)
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
    let what = "a connection pooler is in front of the database, but the URL does not say so";
    let hint = "add pooler=transaction to the URL, or connect to the database directly";
    Error::new(ErrorKind::Config, what).with_hint(hint)
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

/// The error for what a retry cannot fix.
fn explain(error: sqlx::Error) -> Error {
    let code = code_of(&error).unwrap_or_default();
    let (kind, what, hint) = match code.as_str() {
        "28P01" | "28000" | "m1045" | "m1698" => (
            ErrorKind::Denied,
            "the database rejected the user name or the password",
            "check user and password in the URL; percent-encode special characters",
        ),
        "42501" | "m1044" | "m1142" | "m1143" | "m1227" => (
            ErrorKind::Denied,
            "this database user lacks a permission",
            "as the tables' owner, run the statements that `leasehold schema` prints, then GRANT \
             SELECT, INSERT, UPDATE, DELETE on these tables to this user",
        ),
        "25006" | "m1290" | "m1792" | "m1836" | "s8" => (
            ErrorKind::Denied,
            "the database is read-only (a replica, or a file that this user may not write)",
            "connect to the primary, or fix the permissions of the file and its directory",
        ),
        "3D000" | "m1049" => (
            ErrorKind::Config,
            "the database does not exist",
            "create it, or correct its name in the URL",
        ),
        "26000" | "42P05" => return undeclared_pooler().because(shown(&error)),
        "3F000" => (
            ErrorKind::Config,
            "the schema does not exist",
            "create it, or correct schema= in the URL",
        ),
        "s14" => (
            ErrorKind::Config,
            "cannot open the database file",
            "check that its directory exists, and that this user may write to it",
        ),
        "s26" | "s11" => (
            ErrorKind::Corrupt,
            "the file is damaged, or belongs to another program",
            "use another path, or restore the file from a backup",
        ),
        "53100" | "m1114" | "m1021" | "s13" => {
            (ErrorKind::Full, "the database's disk is full", "free disk space")
        }
        "42P01" | "42703" | "m1146" | "m1054" | "s1" | "42804" | "22001" | "m1406" => (
            ErrorKind::Corrupt,
            "the tables differ from those of this version of leasehold",
            "compare them with the output of `leasehold schema`; until all clients use the same \
             tables, they do not exclude each other",
        ),
        _ => match &error {
            sqlx::Error::Configuration(reason) => return unusable_url(&reason.to_string()),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => (
                ErrorKind::Corrupt,
                "unexpected value in leasehold's tables",
                "find the other program that writes to these tables",
            ),
            _ => (
                ErrorKind::Corrupt,
                "the database rejected a statement",
                "compare the tables with the output of `leasehold schema`; if they are equal, \
                 report this as a bug",
            ),
        },
    };
    Error::new(kind, what).because(shown(&error)).with_hint(hint)
}

/// What is wrong with URLs in general. A driver's other reasons may quote the URL with its
/// password.
const REASONS: &[&str] = &[
    "empty host",
    "invalid domain character",
    "invalid international domain name",
    "invalid IPv4 address",
    "invalid IPv6 address",
    "invalid port number",
    "relative URL without a base",
];

fn unusable_url(reason: &str) -> Error {
    let what = match REASONS.iter().find(|known| **known == reason) {
        Some(known) => format!("invalid store URL: {known}"),
        None => "the database driver rejected the store URL".to_owned(),
    };
    let hint = "check host, port and parameters, and percent-encode special characters in user \
                and password";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

/// The database's own words on one line; a driver's error about a URL may quote the URL.
fn shown(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Configuration(_) => "invalid URL or settings".to_owned(),
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
    Error::new(ErrorKind::Closed, "the runtime of this client was shut down")
        .with_hint("connect again")
}

pub(super) fn given_up() -> Error {
    let what = "the caller gave up before the operation was complete";
    Error::new(ErrorKind::Unreachable, what).with_hint("retry")
}

pub(super) fn no_answer() -> Error {
    let what = format!("the database did not respond within {LIMIT:?}");
    Error::new(ErrorKind::Unreachable, what).with_hint("check that it is running and reachable")
}
