//! Each driver's error in our words.

use super::said::Known;
use leasehold_core::{Error, ErrorKind};

/// Each driver's error in our words: what happened, whether a retry helps, and what to do.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn f(pool: sqlx::PgPool) -> leasehold::Result<()> {
/// use leasehold::database::error;
/// let tx = pool.begin().await.map_err(error)?;
/// # drop(tx); Ok(()) }
/// ```
pub fn error(error: sqlx::Error) -> Error {
    use ErrorKind::{Closed, Config, Corrupt, Unreachable};
    let (kind, what) = match &error {
        sqlx::Error::Database(e) => known(e.as_ref())
            .unwrap_or((Config, "the database refuses the statement; mend what it names")),
        sqlx::Error::PoolTimedOut => {
            (Unreachable, "no connection came free in the pool: make it larger, or hold less")
        }
        sqlx::Error::PoolClosed => (Closed, "the connection pool was closed"),
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => (Unreachable, "the database does not answer; retry"),
        sqlx::Error::Configuration(_) => (Config, "the database's address cannot work"),
        _ => (Corrupt, "the table is not as leasehold's schema() prints it; compare them"),
    };
    Error::new(kind, what).because(error)
}

fn known(error: &dyn sqlx::error::DatabaseError) -> Known {
    #[cfg(feature = "postgres")]
    if let Some(e) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        return super::postgres::known(e.code());
    }
    #[cfg(feature = "mysql")]
    if let Some(e) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return super::mysql::known(e.number());
    }
    #[cfg(feature = "sqlite")]
    if let Some(e) = error.try_downcast_ref::<sqlx::sqlite::SqliteError>() {
        return super::sqlite::known(e);
    }
    let _ = error;
    None
}
