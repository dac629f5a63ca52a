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
        if let Some(what) = super::elsewhere::elsewhere(&code, &error.to_string()) {
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
                let what = "concurrent transactions kept conflicting with this one";
                let error = Error::new(ErrorKind::Unreachable, what).because(shown(&error));
                error.with_hint("retry later")
            }
            Self::Broken(error) if class_of(&error) == Class::NoRoom => {
                let what = "the database has reached its connection limit";
                let hint = "raise max_connections, or lower pool=N in the URLs of its clients";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error)).with_hint(hint)
            }
            Self::Broken(error) if class_of(&error) == Class::TooLong => {
                let what = "the database rejected a message of this size";
                let hint = "raise max_allowed_packet on the server";
                Error::new(ErrorKind::Unreachable, what).because(shown(&error)).with_hint(hint)
            }
            Self::Broken(error @ sqlx::Error::Database(_)) if class_of(&error) != Class::Gone => {
                let what = "the database cannot serve this now";
                let hint = "check the database's log if this persists";
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
    let what = "a connection pooler is in front of the database, but the URL does not say so";
    let hint = "add pooler=transaction to the URL, or connect to the database directly";
    Error::new(ErrorKind::Config, what).with_hint(hint)
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
