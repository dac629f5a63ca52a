//! Locks a name inside the caller's own transaction, like `SELECT … FOR UPDATE`, but without its
//! pitfalls.
//!
//! Use it when the data is in the same database as the lock. The lock needs no lease, token or
//! renewal, because it is held until the transaction ends: by commit, rollback or a broken
//! connection. One statement writes the lock's row and creates it if necessary.
//!
//! **Why it is safe.** The table's primary key identifies the row. Two transactions that lock the
//! same name write the same row, so the second waits until the first ends. The row is *written*,
//! not only read `FOR UPDATE`. Otherwise, under REPEATABLE READ, a waiter whose snapshot is older
//! than the holder's commit would get the lock together with stale data. SQLite, and PostgreSQL
//! under REPEATABLE READ and SERIALIZABLE, reject such a write with a serialization failure
//! ([`ErrorKind::Conflict`]). Under READ COMMITTED, PostgreSQL's default, the lock is granted, and
//! each later statement reads fresh data, so do not use anything that you read before the lock.
//! MySQL does not reject such a write either, because a write uses the latest committed row, even
//! if the snapshot is older. The snapshot begins with the first plain read. So lock *before* you
//! read anything in the transaction, or read with `FOR UPDATE`.
//!
//! **It locks one row, not the table.** `FOR UPDATE` on a column without an index locks every row
//! that it scans. `lock_in` succeeds only if exactly one row of a unique index was locked:
//! PostgreSQL and SQLite check this themselves, and on MySQL `lock_in` reads the catalog.
//! Transactions that lock different names do not wait for each other, except on SQLite, which has
//! one write lock for the whole database.
//!
//! **The lock occupies a connection**, as any open transaction does, so keep the transaction short.
//! Lock several names in the same order everywhere. Otherwise a deadlock can occur, which is
//! reported as [`ErrorKind::Conflict`]: run the transaction again. For long work use a
//! [`Mutex`](leasehold_core::Mutex), which occupies no connection.
//!
//! The table `leasehold_row_lock` keeps one row per name. Deleting rows is always safe.

use std::time::Duration;

mod row;

use crate::database::{Dialect, Savepoint, Transaction, fill, named};
use leasehold_core::{Error, ErrorKind, Name, Result};

/// Locks `name` until `tx` ends.
///
/// Waits for as long as the database lets a statement wait (by default, PostgreSQL: forever; MySQL:
/// 50 s; SQLite with sqlx: 5 s).
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::database::error;
/// let mut tx = pool.begin().await.map_err(error)?;
/// leasehold::lock_in(&mut tx, "account:7").await?;
/// // read, decide, write: no other transaction holds this lock
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// Needs the table `leasehold_row_lock`, see [`database::install`](crate::database::install).
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
///
/// # Errors
/// - [`ErrorKind::Conflict`]: a deadlock or a serialization failure; run the transaction again.
/// - [`ErrorKind::Timeout`]: another transaction holds the lock.
/// - [`ErrorKind::Corrupt`]: the table cannot lock a single row.
/// - Any error of the database.
///
/// Roll back after any error, because PostgreSQL accepts no other statement then. Only
/// [`lock_in_timeout`] and [`try_lock_in`] leave the transaction usable when the lock is not free.
pub async fn lock_in<T: Transaction + ?Sized>(tx: &mut T, name: impl AsRef<str>) -> Result<()> {
    let name = named(name, "lock_in")?;
    take(tx, &name).await.map_err(|e| e.with_operation("lock_in").with_lock(&name))
}

/// Locks `name` like [`lock_in`], but waits at most `wait`. After a timeout the transaction is
/// unchanged and usable.
///
/// MySQL and MariaDB wait for whole seconds, rounded up. SQLite fails immediately where waiting
/// would end in a deadlock.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// # use std::time::Duration;
/// use leasehold::{ErrorKind, database::error, lock_in_timeout};
/// let mut tx = pool.begin().await.map_err(error)?;
/// match lock_in_timeout(&mut tx, "account:7", Duration::from_secs(2)).await {
///     Ok(()) => {} // read, decide, write
///     Err(e) if e.kind() == ErrorKind::Timeout => println!("busy; continuing without it"),
///     Err(e) => return Err(e),
/// }
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. Roll back the transaction. On
/// SQLite and MySQL the connection may also keep the short wait, which is a setting of the
/// connection.
///
/// # Errors
/// - [`ErrorKind::Timeout`]: another transaction still held the lock after `wait`.
/// - The errors of [`lock_in`].
pub async fn lock_in_timeout<T: Transaction + ?Sized>(
    tx: &mut T,
    name: impl AsRef<str>,
    wait: Duration,
) -> Result<()> {
    bounded(tx, name, wait, "lock_in_timeout").await
}

/// Locks `name` like [`lock_in`], but does not wait. If the lock is not free, the transaction is
/// unchanged and usable.
///
/// MySQL and MariaDB wait up to one second.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::{ErrorKind, database::error, try_lock_in};
/// let mut tx = pool.begin().await.map_err(error)?;
/// match try_lock_in(&mut tx, "account:7").await {
///     Ok(()) => {} // read, decide, write
///     Err(e) if e.kind() == ErrorKind::Contended => println!("another transaction holds it"),
///     Err(e) => return Err(e),
/// }
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: see [`lock_in_timeout`].
///
/// # Errors
/// - [`ErrorKind::Contended`]: another transaction holds the lock.
/// - The errors of [`lock_in`].
pub async fn try_lock_in<T: Transaction + ?Sized>(tx: &mut T, name: impl AsRef<str>) -> Result<()> {
    bounded(tx, name, Duration::ZERO, "try_lock_in").await.map_err(|e| match e.kind() {
        ErrorKind::Timeout => {
            let what = "another transaction holds the lock";
            let mut contended = Error::new(ErrorKind::Contended, what)
                .with_hint("retry later, or call lock_in to wait")
                .with_operation("try_lock_in");
            if let Some(name) = e.name() {
                contended = contended.with_lock(name);
            }
            contended
        }
        _ => e,
    })
}

/// Returns the lock as SQL text, for programs in other languages.
///
/// Such programs use the same lock names and the same table. The statement has one parameter,
/// `:name`.
///
/// ```
/// use leasehold::database::Dialect;
/// let text = leasehold::lock_in::text(Dialect::Postgres);
/// assert!(text.contains("INSERT INTO leasehold_row_lock"));
/// ```
pub fn text(dialect: Dialect) -> String {
    let (wait, stale) = match dialect {
        Dialect::Postgres => (
            "run SET LOCAL lock_timeout = '5s' after a savepoint. SQLSTATE 55P03 means that the \
             wait timed out: go back to the savepoint, or ROLL BACK",
            "SQLSTATE 40001 and 40P01 mean: run the transaction again",
        ),
        Dialect::Sqlite => (
            "run PRAGMA busy_timeout = 5000. SQLITE_BUSY means that the wait timed out. Locks on \
             different names wait for each other, too",
            "SQLITE_BUSY_SNAPSHOT means: run the transaction again",
        ),
        Dialect::Mysql => (
            "run SET SESSION innodb_lock_wait_timeout = 5. Error 1205 means that the wait timed \
             out",
            "Error 1213 means: run the transaction again. Plain reads see the data as of the \
             first plain read, so lock first",
        ),
    };
    format!(
        "-- Run this in the transaction, before it reads or writes. The statement waits until the \
         lock is free. You then\n\
         -- hold the lock until COMMIT or ROLLBACK. (The table must be created as leasehold's \
         schema prints it: without its\n\
         -- primary key nothing is locked.)\n\
         {};\n\
         -- To limit the wait: {wait}.\n\
         -- {stale}.\n",
        fill(row::statement(dialect), &[":name"]),
    )
}

async fn take<T: Transaction + ?Sized>(tx: &mut T, name: &Name) -> Result<()> {
    match row::take(tx, name).await? {
        row::Taken::OneRow => Ok(()),
        row::Taken::Unsure(what) => Err(Error::new(
            ErrorKind::Corrupt,
            format!("the table leasehold_row_lock cannot lock a single row: {what}"),
        )
        .with_hint("recreate it with the statements of leasehold::database::schema")),
    }
}

/// Takes the lock within a savepoint, so that the transaction is unchanged after a timeout. The
/// wait limit is set for this lock only and is always reset.
async fn bounded<T: Transaction + ?Sized>(
    tx: &mut T,
    name: impl AsRef<str>,
    wait: Duration,
    operation: &'static str,
) -> Result<()> {
    let name = named(name, operation)?;
    let attempt = async {
        let savepoint = Savepoint::set(tx).await?;
        let before = row::set_wait(tx, wait).await?;
        match take(tx, &name).await {
            Ok(()) => {
                row::reset_wait(tx, before).await?;
                Ok(savepoint.keep(tx).await?)
            }
            Err(error) => {
                let back = savepoint.undo(tx).await;
                let reset = row::reset_wait(tx, before).await;
                // On MySQL a deadlock ends the whole transaction including the savepoint. In this
                // case the deadlock error is the one to report.
                if error.kind() != ErrorKind::Conflict {
                    back?;
                    reset?;
                }
                Err(error)
            }
        }
    };
    attempt.await.map_err(|e: Error| e.with_operation(operation).with_lock(&name))
}
