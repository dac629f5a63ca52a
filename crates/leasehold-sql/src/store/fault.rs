//! What a database's errors mean: whether to try again, and one line that says what to do.

use std::borrow::Cow;

use super::limits::LIMIT;
use crate::database::codes::{self, Class};
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
    /// The connection does not lead to the store that this client has used: nothing that was sent on it counts.
    Changed(Error),
    /// Trying again does not help.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// What is behind the URL is not what this client has used.
#[derive(Debug)]
struct Changed(String);

impl std::fmt::Display for Changed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Changed {}

/// The error of a connection that does not lead to the store that this client has used.
pub(super) fn changed(what: String) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(Changed(what)))
}

/// An error of leasehold's own on its way through the driver's.
#[derive(Debug)]
struct Refused(Error);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {}

/// The error of a connection that may not be used, in our words.
pub(super) fn refused(error: Error) -> sqlx::Error {
    sqlx::Error::Configuration(Box::new(Refused(error)))
}

/// Whether a right is missing.
#[cfg(feature = "postgres")]
pub(super) fn is_denied(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "42501")
}

/// Who refuses a feature before anything was asked refuses what our sessions are started with: a proxy, such as that
/// of Amazon RDS.
#[cfg(feature = "postgres")]
pub(super) fn as_pooler(error: sqlx::Error) -> sqlx::Error {
    match code_of(&error).as_deref() {
        Some("0A000") => refused(undeclared_pooler().because(shown(&error))),
        _ => error,
    }
}

/// Whether the transaction that the connection is in had failed before: nothing was done.
pub(super) fn had_failed_before(error: &sqlx::Error) -> bool {
    class_of(error) == Class::FailedBefore
}

/// Whether there is no such table.
pub(super) fn is_missing_table(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| match code.as_str() {
        "42P01" | "m1146" => true,
        "s1" => error.to_string().contains("no such table"),
        _ => false,
    })
}

/// Whether a connection leads elsewhere.
pub(super) fn is_changed(error: &sqlx::Error) -> bool {
    as_changed(error).is_some()
}

/// What such an error says, if it is one. The URL may lead back: who waits, waits on.
fn as_changed(error: &sqlx::Error) -> Option<Error> {
    let sqlx::Error::Io(error) = error else { return None };
    let changed = error.get_ref()?.downcast_ref::<Changed>()?;
    Some(Error::new(ErrorKind::Unreachable, changed.0.clone()))
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        if let Some(changed) = as_changed(&error) {
            return Self::Changed(changed);
        }
        let error = match error {
            sqlx::Error::Configuration(boxed) => match boxed.downcast::<Refused>() {
                Ok(refused) => return Self::Final(refused.0),
                Err(boxed) => sqlx::Error::Configuration(boxed),
            },
            error => error,
        };
        let code = code_of(&error).unwrap_or_default();
        #[cfg(feature = "postgres")]
        if let Some(what) = super::place::elsewhere(&code, &error.to_string()) {
            return Self::Changed(Error::new(ErrorKind::Unreachable, what));
        }
        match &error {
            sqlx::Error::Database(_) => {}
            sqlx::Error::Configuration(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Decode(_) => return Self::Final(explain(error)),
            sqlx::Error::Protocol(what) if what.contains(UNKNOWN_LOGIN) => {
                return Self::Final(unknown_login(what));
            }
            // A row was changed meanwhile, of which a script was to change what it had read.
            sqlx::Error::RowNotFound => return Self::Conflict(error),
            _ => return Self::Broken(error),
        }
        // A script's write has not changed the row that it was to change.
        if matches!(code.as_str(), "22012" | "m1242") {
            return Self::Conflict(error);
        }
        if is_undeclared_pooler(&code, &error) {
            return Self::Final(undeclared_pooler().because(shown(&error)));
        }
        match class_of(&error) {
            Class::Deadlock
            | Class::Serialization
            | Class::Waited
            | Class::Busy
            | Class::StoodStill
            | Class::Exists => match code.as_str() {
                // The sleeper's statement was ended by a session of its kind, or by an administrator.
                "m1317" => Self::Broken(error),
                _ => Self::Conflict(error),
            },
            Class::FailedBefore
            | Class::Gone
            | Class::Stale
            | Class::Unavailable
            | Class::NoRoom
            | Class::TooLong
            | Class::Unknown => Self::Broken(error),
            Class::ReadOnly if !code.starts_with('s') => Self::ReadOnly(error),
            Class::ReadOnly
            | Class::Full
            | Class::Refused
            | Class::Denied
            | Class::NoDatabase
            | Class::NoSchema
            | Class::NoTable
            | Class::Unprepared
            | Class::Damaged
            | Class::CannotOpen
            | Class::Permanent => Self::Final(explain(error)),
        }
    }
}

/// What the driver says of a login that it does not know.
const UNKNOWN_LOGIN: &str = "unknown authentication plugin";

fn unknown_login(says: &str) -> Error {
    let plugin: String = says.rsplit(": ").next().unwrap_or_default().chars().take(60).collect();
    let what = format!(
        "the database user logs in by {plugin:?}, which is not supported: use a user with caching_sha2_password, \
         mysql_native_password or unix_socket"
    );
    Error::new(ErrorKind::Config, what)
}

impl Failure {
    /// What the caller is told when there is no more trying.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Final(error) | Self::Changed(error) => error,
            Self::ReadOnly(error) => explain(error),
            Self::Conflict(error) => {
                let what = "others are in the way in the database again and again: try again later";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
            Self::Broken(error) if class_of(&error) == Class::NoRoom => {
                let what = "the database has no room for another connection: raise its limit, or \
                            lower pool= in the URLs of its clients";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
            Self::Broken(error) if class_of(&error) == Class::TooLong => {
                let what = "the database takes no message of this length: raise max_allowed_packet";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error))
            }
            Self::Broken(error @ sqlx::Error::Database(_)) if class_of(&error) != Class::Gone => {
                let what = "the database cannot serve this now: check its log if this lasts";
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

/// SQLite: whether the file could not be opened.
#[cfg(feature = "sqlite")]
pub(super) fn cannot_open(error: &sqlx::Error) -> bool {
    class_of(error) == Class::CannotOpen
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

/// What the database's error means.
fn class_of(error: &sqlx::Error) -> Class {
    let Some(database) = error.as_database_error() else { return Class::Unknown };
    #[cfg(feature = "mysql")]
    if let Some(mysql) = database.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return codes::mysql(mysql.number(), mysql.code().unwrap_or_default());
    }
    #[cfg(feature = "sqlite")]
    if database.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some() {
        let code = database.code().and_then(|c| c.parse::<i32>().ok());
        return code.map_or(Class::Unknown, codes::sqlite);
    }
    database.code().map_or(Class::Unknown, |code| codes::postgres(&code))
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

/// Another session has ended our statement, and nothing else.
#[cfg(feature = "mysql")]
pub(super) fn is_interrupted(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "m1317")
}

/// The server has no room for another connection, or nobody lends one.
pub(super) fn has_no_room(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::PoolTimedOut) || class_of(error) == Class::NoRoom
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
