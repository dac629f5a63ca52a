//! Classification of a database's errors: whether to retry, and a message with a hint.

use std::borrow::Cow;

use super::limits::LIMIT;
use crate::codes::{self, Class};
use leasehold_core::{Error, ErrorKind};

/// An operation that failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The database rolled the operation back because of other transactions. Retry it.
    Conflict(sqlx::Error),
    /// The connection is unusable. The statements that were sent may or may not have been executed.
    Broken(sqlx::Error),
    /// The server accepts no writes. When a client connects, this is a permanent error. Later it
    /// means that the server is being replaced, so the client connects again by the same host name.
    ReadOnly(sqlx::Error),
    /// The connection does not lead to the store that this client has used. Nothing that was sent
    /// on it counts.
    Changed(Error),
    /// A retry does not help.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// The error that the URL no longer leads to the store that this client has used.
#[derive(Debug)]
struct Changed(String);

impl std::fmt::Display for Changed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Changed {}

/// Returns the error for a connection that reaches a different store from the one this client has
/// used.
pub(super) fn changed(what: String) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(Changed(what)))
}

/// A login that fails while the password is being changed.
#[derive(Debug)]
struct PasswordChanging(String);

impl std::fmt::Display for PasswordChanging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PasswordChanging {}

/// Converts the error of a failed login to a transient one, for a client that has logged in before.
///
/// Such a client reads its password again for each connection. A failure means that the password is
/// being changed, and that either the server or the file still has the old one.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn while_password_changes(error: sqlx::Error) -> sqlx::Error {
    let what = match &error {
        sqlx::Error::Configuration(boxed) => boxed.to_string(),
        error if class_of(error) == Class::Refused => shown(error),
        _ => return error,
    };
    sqlx::Error::Io(std::io::Error::other(PasswordChanging(what)))
}

fn as_password_changing(error: &sqlx::Error) -> Option<&PasswordChanging> {
    let sqlx::Error::Io(error) = error else { return None };
    error.get_ref()?.downcast_ref()
}

/// Returns whether a server rejects this client, so that other hosts of the URL probably would,
/// too.
#[cfg(feature = "postgres")]
pub(super) fn is_refusal(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(_) => !matches!(
            class_of(error),
            Class::Gone | Class::Unavailable | Class::ReadOnly | Class::Unknown
        ),
        sqlx::Error::Configuration(_) => true,
        _ => false,
    }
}

/// An error of leasehold that is passed through the driver's error type.
#[derive(Debug)]
struct Refused(Error);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {}

/// Returns the error for a connection that may not be used, with leasehold's own message.
pub(super) fn refused(error: Error) -> sqlx::Error {
    sqlx::Error::Configuration(Box::new(Refused(error)))
}

/// Returns whether a permission is missing.
#[cfg(feature = "postgres")]
pub(super) fn is_denied(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "42501")
}

/// Converts an error to [`undeclared_pooler`], if a feature was rejected before any statement was
/// sent. In that case a proxy, such as Amazon RDS Proxy, has rejected the settings with which
/// sessions start.
#[cfg(feature = "postgres")]
pub(super) fn as_pooler(error: sqlx::Error) -> sqlx::Error {
    match code_of(&error).as_deref() {
        Some("0A000") => refused(undeclared_pooler().with_source(shown(&error))),
        _ => error,
    }
}

/// Returns whether the connection's transaction had failed before, so that nothing was done.
pub(super) fn had_failed_before(error: &sqlx::Error) -> bool {
    class_of(error) == Class::FailedBefore
}

/// Returns whether a table is missing.
pub(super) fn is_missing_table(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| match code.as_str() {
        "42P01" | "m1146" => true,
        "s1" => error.to_string().contains("no such table"),
        _ => false,
    })
}

/// Returns whether the error means that a connection reached a different store than before.
pub(super) fn is_changed(error: &sqlx::Error) -> bool {
    as_changed(error).is_some()
}

/// Returns an `Unreachable` error if `error` means that a connection reached a different store than
/// before. The returned error is transient, because the URL may lead to the former store again.
/// Waiters continue to wait.
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
        if let Some(what) = super::postgres::elsewhere::elsewhere(&code, &error.to_string()) {
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
            // A script's write found its row changed since the row was read.
            sqlx::Error::RowNotFound => return Self::Conflict(error),
            _ => return Self::Broken(error),
        }
        // A script's write did not change the row that it had to change.
        if matches!(code.as_str(), "22012" | "m1242") {
            return Self::Conflict(error);
        }
        if is_undeclared_pooler(&code, &error) {
            return Self::Final(undeclared_pooler().with_source(shown(&error)));
        }
        match class_of(&error) {
            Class::Deadlock
            | Class::Serialization
            | Class::Waited
            | Class::Busy
            | Class::StoodStill
            | Class::Exists => match code.as_str() {
                // Another client, or an administrator, ended the statement that sleeps.
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

/// The driver's message for an unsupported login method.
const UNKNOWN_LOGIN: &str = "unknown authentication plugin";

fn unknown_login(says: &str) -> Error {
    let plugin: String = says.rsplit(": ").next().unwrap_or_default().chars().take(60).collect();
    let what = format!(
        "the database user authenticates with {plugin:?}, which is not supported: use a user with \
         caching_sha2_password, mysql_native_password or unix_socket"
    );
    Error::new(ErrorKind::Config, what)
}

impl Failure {
    /// Returns the error for the caller after the last retry.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Final(error) | Self::Changed(error) => error,
            Self::ReadOnly(error) => explain(error),
            Self::Conflict(error) => {
                let what = "concurrent transactions kept conflicting with this one";
                let error = Error::new(ErrorKind::Unreachable, what).with_source(shown(&error));
                error.with_hint("retry later")
            }
            Self::Broken(error) if class_of(&error) == Class::NoRoom => {
                let (what, hint) = match code_of(&error).as_deref() {
                    Some("m1226") => (
                        "this database user has reached a limit of its account",
                        "raise the limit: ALTER USER ... WITH MAX_USER_CONNECTIONS N (or \
                         MAX_QUERIES_PER_HOUR, MAX_CONNECTIONS_PER_HOUR)",
                    ),
                    _ => (
                        "the database has reached its connection limit",
                        "raise max_connections, or lower pool=N in the URLs of its clients",
                    ),
                };
                Error::new(ErrorKind::Unreachable, what).with_source(shown(&error)).with_hint(hint)
            }
            Self::Broken(error) if class_of(&error) == Class::TooLong => {
                let what = "the database rejected a message of this size";
                let hint = "raise max_allowed_packet on the server";
                Error::new(ErrorKind::Unreachable, what).with_source(shown(&error)).with_hint(hint)
            }
            Self::Broken(error @ sqlx::Error::Database(_)) if class_of(&error) != Class::Gone => {
                let what = "the database cannot process the request at the moment";
                let hint = "check the database's log if this persists";
                Error::new(ErrorKind::Unreachable, what).with_source(shown(&error)).with_hint(hint)
            }
            Self::Broken(error) if as_password_changing(&error).is_some() => {
                let what = "the database rejected the user name or the password, which were accepted before";
                let why = as_password_changing(&error).map(PasswordChanging::to_string);
                let hint = "write the current password into the file that password_file names";
                Error::new(ErrorKind::Unreachable, what)
                    .with_source(why.unwrap_or_default())
                    .with_hint(hint)
            }
            Self::Broken(error) => {
                let what = "cannot reach the database";
                let hint = "check that it is running, and check the host and port in the URL";
                Error::new(ErrorKind::Unreachable, what).with_source(shown(&error)).with_hint(hint)
            }
        }
    }
}

/// Returns the error for a server that has become read-only, while it is being replaced.
pub(super) fn replaced(error: &sqlx::Error) -> Error {
    let what =
        "the database has become read-only: it is failing over, or the URL now leads to a replica";
    let hint = "if it stays read-only, connect to the primary";
    Error::new(ErrorKind::Unreachable, what).with_source(shown(error)).with_hint(hint)
}

/// Returns the error code. MySQL's numbers begin with `m`, SQLite's primary codes with `s`, and
/// PostgreSQL's SQLSTATE has no prefix.
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

/// Returns whether the row already exists.
#[cfg(feature = "mysql")]
pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "m1062")
}

/// SQLite: returns whether the file could not be opened.
#[cfg(feature = "sqlite")]
pub(super) fn cannot_open(error: &sqlx::Error) -> bool {
    class_of(error) == Class::CannotOpen
}

/// SQLite: returns whether a statement failed with the generic error.
#[cfg(feature = "sqlite")]
pub(super) fn is_refused(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "s1")
}

/// SQLite: returns whether another connection is writing.
#[cfg(feature = "sqlite")]
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "s5")
}

/// Returns the class of the database's error.
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

/// Returns whether a pooler rejected the settings with which sessions start. PgBouncer uses this
/// code for all of its own errors, so the message is checked too.
fn is_undeclared_pooler(code: &str, error: &sqlx::Error) -> bool {
    code == "08P01" && error.to_string().contains("unsupported startup parameter")
}

/// Returns the error for a pooler that shares the server's sessions between clients, but is not
/// declared in the URL.
pub(super) fn undeclared_pooler() -> Error {
    let what = "a connection pooler is in front of the database, but the URL does not say so";
    let hint = "add pooler=transaction to the URL, or connect to the database directly";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

/// Returns whether another session ended this session's statement. Nothing else has happened.
#[cfg(feature = "mysql")]
pub(super) fn is_interrupted(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| code == "m1317")
}

/// Returns whether the server's connection limit is reached, or the caller's pool did not provide a
/// connection in time.
pub(super) fn has_no_room(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::PoolTimedOut) || class_of(error) == Class::NoRoom
}

/// Returns the error for a failure that a retry cannot fix.
fn explain(error: sqlx::Error) -> Error {
    let (code, class) = (code_of(&error).unwrap_or_default(), class_of(&error));
    let (kind, what, hint) = match code.as_str() {
        "m1130" => (
            ErrorKind::Denied,
            "the database accepts no connections from this host",
            "create the user for this host: CREATE USER 'name'@'host'",
        ),
        "m1046" => (
            ErrorKind::Config,
            "the URL names no database",
            "add it after the host: mysql://user@host/database",
        ),
        "m1820" | "m1862" | "m3118" | "m4151" => (
            ErrorKind::Denied,
            "this database account is locked, or its password has expired",
            "as an administrator: ALTER USER ... ACCOUNT UNLOCK, or set a new password",
        ),
        _ if class == Class::Refused => (
            ErrorKind::Denied,
            "the database rejected the user name or the password",
            "check the user name and password in the URL; percent-encode special characters",
        ),
        _ if class == Class::Denied => (
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
        _ if class == Class::NoDatabase => (
            ErrorKind::Config,
            "the database does not exist",
            "create it, or correct its name in the URL",
        ),
        "26000" | "42P05" => return undeclared_pooler().with_source(shown(&error)),
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
        _ if class == Class::Full => {
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
    Error::new(kind, what).with_source(shown(&error)).with_hint(hint)
}

/// Known messages about invalid URLs. A driver's other messages may contain the URL with its
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
    let hint = "check the host, port and parameters, and percent-encode special characters in the \
                user name and password";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

/// Returns the database's own message on one line. A driver's error about a URL may contain the
/// URL, so it is not shown.
pub(super) fn shown(error: &sqlx::Error) -> String {
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
