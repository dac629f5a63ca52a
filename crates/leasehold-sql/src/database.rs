//! What `lock_in`, `once`, `versioned` and `fence::sql` need of a database: three small tables and
//! one way to speak to SQLite, PostgreSQL and MySQL/MariaDB.
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

use sqlx::Pool;

use leasehold_core::{Name, Result};

mod error;
mod identifier;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod said;
mod schema;
mod speak;
#[cfg(feature = "sqlite")]
mod sqlite;
mod value;

pub use error::error;
pub(crate) use identifier::{assignments, identifier, place};
pub use schema::{Dialect, schema};
pub(crate) use speak::Column;
pub use speak::Database;
pub(crate) use speak::sealed;
pub use value::{Typed, Value};

/// Creates the tables that are missing. Any number of processes may do so at once.
///
/// # Cancel safety
/// Dropped, some of the tables may have been made: run it again.
///
/// # Errors
/// [`Denied`](leasehold_core::ErrorKind::Denied) without the right to create tables, [`Unreachable`](leasehold_core::ErrorKind::Unreachable).
pub async fn install<DB: Database>(pool: &Pool<DB>) -> Result<()> {
    let sql = match DB::DIALECT {
        // For this transaction: it would tell of each table that it is there already.
        Dialect::Postgres => {
            format!("SET LOCAL client_min_messages = warning;\n{}", schema(DB::DIALECT))
        }
        _ => schema(DB::DIALECT),
    };
    let mut left = 5;
    loop {
        let mut connection = pool.acquire().await.map_err(error)?;
        match DB::script(&mut connection, sql.clone()).await {
            Ok(()) => return Ok(()),
            // IF NOT EXISTS looks before it leaps: two first users meet in the catalogue.
            Err(e) if left > 0 && DB::is_catalogue_race(&e) => left -= 1,
            Err(e) => return Err(error(e).during("install")),
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
