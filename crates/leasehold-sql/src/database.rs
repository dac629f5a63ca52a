//! What `lock_in`, `once`, `versioned` and `fence::sql` need of a database: three small tables, and
//! a [`Session`] to run their statements on, which is any driver's.
//!
//! These four work inside *the caller's* transaction, on the connection that the caller already
//! has. So they never create a table by themselves: on MySQL a `CREATE TABLE` commits the
//! transaction it stands in, and on PostgreSQL two first users would abort each other. Run
//! [`install`] once at start-up, or give [`schema`] to whoever owns the migrations. Each of the
//! three tables is independent of the others; what is not used need not exist.
//!
//! Rows in these tables are named by binary names (`Job`, `job` and `job ` are three), unique by
//! the table's primary key.

use std::time::Duration;

use leasehold_core::{Error, Name, Result};

pub(crate) mod codes;
mod dialect;
mod drivers;
mod fault;
mod identifier;
mod said;
mod savepoint;
mod schema;
mod session;
mod value;

pub use dialect::Dialect;
pub(crate) use dialect::fill;
pub use fault::{Fault, error};
pub(crate) use identifier::{assignments, identifier, place};
pub(crate) use savepoint::Savepoint;
pub use schema::schema;
pub use session::{Column, Pool, Session, Transaction};
pub(crate) use session::{number, row, run};
/// The version of `sqlx` whose pools and transactions leasehold takes.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[doc(no_inline)]
pub use sqlx;
pub use value::{Param, Typed, Value};

/// Creates the tables that are missing. Any number of processes may do so at once.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// leasehold::database::install(&pool).await?; // at start-up, in every process
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Dropped, some of the tables may have been made: run it again.
///
/// # Errors
/// [`Denied`](leasehold_core::ErrorKind::Denied) without the right to create tables,
/// [`Unreachable`](leasehold_core::ErrorKind::Unreachable).
pub async fn install<P: Pool>(pool: &P) -> Result<()> {
    let mut left = 5;
    loop {
        let mut session = pool.session().await?;
        let sql = match session.dialect() {
            // For this transaction: it would tell of each table that it is there already.
            Dialect::Postgres => {
                format!("SET LOCAL client_min_messages = warning;\n{}", schema(Dialect::Postgres))
            }
            other => schema(other),
        };
        match session.batch(&sql).await {
            Ok(()) => return Ok(()),
            // IF NOT EXISTS looks before it leaps: two first users meet in the catalogue.
            Err(fault) if left > 0 && fault.is_catalogue_race() => left -= 1,
            Err(fault) => return Err(Error::from(fault).during("install")),
        }
    }
}

/// `d` in µs, for an interval on the database's clock.
pub(crate) fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

/// The name, checked, or the error that says what was being done.
pub(crate) fn named(name: impl AsRef<str>, operation: &'static str) -> Result<Name> {
    Name::new(name).map_err(|e| e.during(operation))
}
