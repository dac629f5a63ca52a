//! The database side of `lock_in`, `once`, `versioned` and `fence::sql`: three small tables, and a
//! [`Session`] that runs the statements with any driver.
//!
//! These four use *your* connections, usually inside your transaction. They never create tables on
//! their own: on MySQL `CREATE TABLE` commits the current transaction, and on PostgreSQL two
//! concurrent first users would abort each other. Call [`install`] once at start-up, or add
//! [`schema`] to your migrations. The three tables are independent of each other, so you only need
//! those that you use.
//!
//! Names in these tables are compared byte by byte (`Job`, `job` and `job ` are three names). The
//! primary key makes them unique.

use std::time::Duration;

use leasehold_core::{Error, Name, Result};

mod dialect;
mod drivers;
mod fault;
mod identifier;
mod savepoint;
mod schema;
mod server_errors;
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
/// The version of `sqlx` whose pools and transactions leasehold accepts.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[doc(no_inline)]
pub use sqlx;
pub use value::{Param, Typed, Value};

/// Creates the missing tables. Any number of processes may call it concurrently.
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
/// Not cancel safe: some of the tables may have been created. Call it again.
///
/// # Errors
/// - [`Denied`](leasehold_core::ErrorKind::Denied): this user may not create tables.
/// - [`Unreachable`](leasehold_core::ErrorKind::Unreachable): the database does not respond.
pub async fn install<P: Pool>(pool: &P) -> Result<()> {
    let mut left = 5;
    loop {
        let mut session = pool.session().await?;
        let sql = match session.dialect() {
            // The setting applies to this transaction only. Without it, the server sends a notice
            // for each existing table.
            Dialect::Postgres => {
                format!("SET LOCAL client_min_messages = warning;\n{}", schema(Dialect::Postgres))
            }
            other => schema(other),
        };
        match session.batch(&sql).await {
            Ok(()) => return Ok(()),
            // Two concurrent first calls can collide in the catalog, because IF NOT EXISTS checks
            // before it creates.
            Err(fault) if left > 0 && fault.is_catalogue_race() => left -= 1,
            Err(fault) => return Err(Error::from(fault).with_operation("install")),
        }
    }
}

/// Returns `d` in µs, for an interval on the database's clock.
pub(crate) fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

/// Returns the checked name, or an error that names the operation.
pub(crate) fn named(name: impl AsRef<str>, operation: &'static str) -> Result<Name> {
    Name::new(name).map_err(|e| e.with_operation(operation))
}
