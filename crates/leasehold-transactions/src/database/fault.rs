//! Errors of statements: translates each driver's errors, and keeps the database's error code.

use std::error::Error as StdError;
use std::fmt;

use super::dialect::Dialect;
use super::server_errors::{self, Described};
use leasehold_core::Error;

/// An error of a statement of a [`Session`](crate::database::Session).
///
/// ```
/// use leasehold::database::{Dialect, Fault};
/// use leasehold::{Error, ErrorKind};
///
/// // The database replied with an error: its code determines the kind.
/// let fault = Fault::answered(Dialect::Postgres, "40P01", "deadlock detected");
/// assert_eq!(fault.code(), Some("40P01"));
/// assert_eq!(Error::from(fault).kind(), ErrorKind::Conflict); // run the transaction again
/// // No reply: it is unknown whether the statement was executed.
/// let error = Error::from(Fault::unanswered("connection reset"));
/// assert_eq!(error.kind(), ErrorKind::Unreachable);
/// // The statement was executed, but its result does not have the expected type.
/// assert_eq!(Error::from(Fault::unreadable("a text")).kind(), ErrorKind::Corrupt);
/// ```
#[derive(Debug)]
pub struct Fault {
    code: Option<(Dialect, String)>,
    error: Error,
}

/// The cause of a fault: the driver's error, or text.
pub(crate) type Because = Box<dyn StdError + Send + Sync>;

impl Fault {
    /// Creates a fault for an error that the database reported.
    ///
    /// `code` is PostgreSQL's SQLSTATE, MySQL's error number or SQLite's extended result code.
    pub fn answered(
        dialect: Dialect,
        code: impl Into<String>,
        because: impl Into<Because>,
    ) -> Self {
        let (code, because) = (code.into(), because.into());
        let (kind, what, hint) = server_errors::known(dialect, &code, &because.to_string())
            .unwrap_or(server_errors::REJECTED);
        let error = Error::new(kind, what).with_source(because).with_hint(hint);
        Self { code: Some((dialect, code)), error }
    }

    /// Creates a fault for a connection that broke or could not be opened. The statement may or may
    /// not have been executed.
    pub fn unanswered(because: impl Into<Because>) -> Self {
        Self::of(server_errors::NO_RESPONSE, because)
    }

    /// Creates a fault for a result that does not have the expected type.
    pub fn unreadable(because: impl Into<Because>) -> Self {
        Self::of(server_errors::OTHER_TABLE, because)
    }

    pub(crate) fn of((kind, what, hint): Described, because: impl Into<Because>) -> Self {
        Error::new(kind, what).with_source(because).with_hint(hint).into()
    }

    /// Returns the database's error code, if there is one.
    pub fn code(&self) -> Option<&str> {
        self.code.as_ref().map(|(_, code)| code.as_str())
    }

    /// Returns whether this is the duplicate-key error that [`Dialect::or_nothing`] does not
    /// suppress.
    pub(crate) fn is_duplicate(&self) -> bool {
        matches!(&self.code, Some((Dialect::Mysql, code)) if code == "1062")
    }

    /// Returns whether two concurrent `CREATE TABLE IF NOT EXISTS` collided.
    pub(crate) fn is_catalogue_race(&self) -> bool {
        let Some((dialect, code)) = &self.code else { return false };
        match dialect {
            Dialect::Sqlite => false,
            Dialect::Postgres => matches!(code.as_str(), "23505" | "42P07" | "42710"),
            Dialect::Mysql => code == "1050",
        }
    }

    /// Returns whether the database reports that the column of `ON CONFLICT` has no unique index.
    pub(crate) fn is_without_index(&self) -> bool {
        let Some((dialect, code)) = &self.code else { return false };
        match dialect {
            Dialect::Sqlite => {
                let says = self.error.source().map(ToString::to_string).unwrap_or_default();
                says.contains("ON CONFLICT clause does not match")
            }
            Dialect::Postgres => code == "42P10",
            Dialect::Mysql => false,
        }
    }
}

impl From<Error> for Fault {
    /// Wraps an error that does not come from the database.
    fn from(error: Error) -> Self {
        Self { code: None, error }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        fault.error
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl StdError for Fault {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

/// Converts a driver's error into an [`Error`] that states what happened, whether a retry helps and
/// what to do.
///
/// It accepts errors of `sqlx` 0.9 and of each driver that is enabled by a feature. For other
/// drivers use [`Fault`].
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::{ErrorKind, database::error};
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// let pool = options.connect("sqlite::memory:").await.map_err(error)?;
/// pool.close().await;
/// assert_eq!(error(pool.begin().await.unwrap_err()).kind(), ErrorKind::Closed);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
pub fn error<E: Into<Fault>>(error: E) -> Error {
    error.into().into()
}
