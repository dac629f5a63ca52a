//! What a statement fails with: each driver's error in our words, and the code by which a few are known.

use std::error::Error as StdError;
use std::fmt;

use super::dialect::Dialect;
use super::said;
use leasehold_core::{Error, ErrorKind};

/// Why a statement of a [`Session`](crate::database::Session) failed.
///
/// ```
/// use leasehold::database::{Dialect, Fault};
/// use leasehold::{Error, ErrorKind};
///
/// // The database said so: the code decides.
/// let fault = Fault::answered(Dialect::Postgres, "40P01", "deadlock detected");
/// assert_eq!(fault.code(), Some("40P01"));
/// assert_eq!(Error::from(fault).kind(), ErrorKind::Conflict); // run the transaction again
/// // Nobody knows whether it was done.
/// let error = Error::from(Fault::unanswered("connection reset"));
/// assert_eq!(error.kind(), ErrorKind::Unreachable);
/// // The statement was done, and the answer is not what the table should hold.
/// assert_eq!(Error::from(Fault::unreadable("a text")).kind(), ErrorKind::Corrupt);
/// ```
#[derive(Debug)]
pub struct Fault {
    code: Option<(Dialect, String)>,
    error: Error,
}

/// What a driver tells of the cause: an error, or text.
pub(crate) type Because = Box<dyn StdError + Send + Sync>;

impl Fault {
    /// The database answered with this error: PostgreSQL's SQLSTATE, MySQL's number, SQLite's extended
    /// result code.
    pub fn answered(
        dialect: Dialect,
        code: impl Into<String>,
        because: impl Into<Because>,
    ) -> Self {
        let (code, because) = (code.into(), because.into());
        let (kind, what) = said::known(dialect, &code, &because.to_string()).unwrap_or((
            ErrorKind::Config,
            "the database refuses the statement; mend what it names",
        ));
        Self { code: Some((dialect, code)), error: Error::new(kind, what).because(because) }
    }

    /// The connection broke, or was never there: the statement may have been done or not.
    pub fn unanswered(because: impl Into<Because>) -> Self {
        let what = "the database does not answer; retry";
        Error::new(ErrorKind::Unreachable, what).because(because).into()
    }

    /// The answer cannot be read as what was asked for.
    pub fn unreadable(because: impl Into<Because>) -> Self {
        let what = "the table is not as leasehold's schema() prints it; compare them";
        Error::new(ErrorKind::Corrupt, what).because(because).into()
    }

    /// The database's code, if it gave one.
    pub fn code(&self) -> Option<&str> {
        self.code.as_ref().map(|(_, code)| code.as_str())
    }

    /// Whether it is the duplicate key that [`Dialect::or_nothing`] does not swallow.
    pub(crate) fn is_duplicate(&self) -> bool {
        matches!(&self.code, Some((Dialect::Mysql, code)) if code == "1062")
    }

    /// Whether two `CREATE TABLE IF NOT EXISTS` met.
    pub(crate) fn is_catalogue_race(&self) -> bool {
        let Some((dialect, code)) = &self.code else { return false };
        match dialect {
            Dialect::Sqlite => false,
            Dialect::Postgres => matches!(code.as_str(), "23505" | "42P07" | "42710"),
            Dialect::Mysql => code == "1050",
        }
    }

    /// Whether it is said that the conflict's column has no unique index.
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
    /// A fault that is none of the database's.
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

/// Each driver's error in our words: what happened, whether a retry helps, and what to do. Of `sqlx` 0.9, and of
/// each driver that a feature brings; of others by [`Fault`].
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
