//! The lock inside the caller's own transaction: `SELECT … FOR UPDATE`, without its traps.
//!
//! For data that lives in the same database as the lock, no lease, token or renewal is needed: the
//! transaction *is* the lease. One statement writes the lock's row, creating it if it is new; the
//! row's lock is held until the transaction ends, by commit, rollback or a broken connection. So
//! lock and writes can never be out of step.
//!
//! **The argument.** The row is named by the table's primary key, so two transactions that lock the
//! same name write the same row, and the second waits for the end of the first. The row is
//! *written*, not only read `FOR UPDATE`: under REPEATABLE READ a waiter whose snapshot is older
//! than the holder's commit would otherwise get the lock together with a stale view of the data;
//! as it is, PostgreSQL and SQLite refuse it with a serialization failure ([`ErrorKind::Conflict`]).
//! MySQL has no such refusal (its snapshot begins with the first plain read): there, take the lock
//! *before* you read anything in the transaction, or read with `FOR UPDATE`.
//!
//! **One row, not the table.** `FOR UPDATE` on a column without an index locks every row that it
//! scans. `lock_in` takes the lock only where it can show that one row of a unique index was hit:
//! the server itself refuses on PostgreSQL and SQLite, the catalogue is asked on MySQL. Two
//! transactions hold two different names at once; only SQLite, which has one write lock for
//! the whole database, makes them wait for each other.
//!
//! **A held row lock pins a connection**, as any open transaction does: keep it short, and lock
//! several names in one order everywhere, or be told of the deadlock ([`ErrorKind::Conflict`]) and
//! run the transaction again. For long work use a [`Mutex`](leasehold_core::Mutex), which pins none.
//!
//! One row per name stays in `leasehold_row_lock`. Deleting rows is safe at any time.

use std::time::Duration;

mod row;

use crate::database::{Dialect, Savepoint, Transaction, fill, named};
use leasehold_core::{Error, ErrorKind, Name, Result};

/// Locks `name` until `tx` ends, waiting as long as the database's own settings let a statement
/// wait (PostgreSQL: for ever; MySQL: 50 s; SQLite with sqlx: 5 s).
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
/// // read, decide, write: nobody else is in here
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// Needs the table `leasehold_row_lock`: see [`database::install`](crate::database::install).
/// Dropping the future in mid-wait leaves the transaction as the driver leaves it: roll it back.
///
/// # Cancel safety
/// Dropped meanwhile, it leaves the transaction as the driver leaves it: roll back.
///
/// # Errors
/// [`ErrorKind::Conflict`] (deadlock, serialization failure: run the transaction again),
/// [`ErrorKind::Timeout`], [`ErrorKind::Corrupt`] if one row of a unique index could not be shown
/// to be locked, and what the database may answer to any statement. After any error but that of
/// [`lock_in_timeout`] and [`try_lock_in`] roll back: PostgreSQL accepts nothing else.
pub async fn lock_in<T: Transaction + ?Sized>(tx: &mut T, name: impl AsRef<str>) -> Result<()> {
    let name = named(name, "lock_in")?;
    take(tx, &name).await.map_err(|e| e.during("lock_in").on(&name))
}

/// As [`lock_in`], but gives up after about `wait`; the transaction is as it was before, and
/// usable. MySQL and MariaDB count whole seconds, rounded up; SQLite gives up at once, whatever
/// the time, where waiting could only end in a deadlock.
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
///     Err(e) if e.kind() == ErrorKind::Timeout => println!("busy; the transaction goes on without it"),
///     Err(e) => return Err(e),
/// }
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// As [`lock_in`]. On SQLite and MySQL the wait is a setting of the connection, set back afterwards: a
/// future that is dropped in between leaves the short wait.
///
/// # Errors
/// [`ErrorKind::Timeout`], and those of [`lock_in`].
pub async fn lock_in_timeout<T: Transaction + ?Sized>(
    tx: &mut T,
    name: impl AsRef<str>,
    wait: Duration,
) -> Result<()> {
    bounded(tx, name, wait, "lock_in_timeout").await
}

/// As [`lock_in`], but does not wait (MySQL and MariaDB: up to a second); the transaction is as it
/// was before, and usable.
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
///     Err(e) if e.kind() == ErrorKind::Contended => println!("somebody else is at it"),
///     Err(e) => return Err(e),
/// }
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// As [`lock_in_timeout`].
///
/// # Errors
/// [`ErrorKind::Contended`], and those of [`lock_in`].
pub async fn try_lock_in<T: Transaction + ?Sized>(tx: &mut T, name: impl AsRef<str>) -> Result<()> {
    bounded(tx, name, Duration::ZERO, "try_lock_in").await.map_err(|e| match e.kind() {
        ErrorKind::Timeout => {
            let what = "another transaction holds it: try again later, or wait with lock_in";
            let mut contended = Error::new(ErrorKind::Contended, what).during("try_lock_in");
            if let Some(name) = e.name() {
                contended = contended.on(name);
            }
            contended
        }
        _ => e,
    })
}

/// The lock as SQL text, for programs that are not written in Rust: the same names, in the same table. Its parameter is
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
            "SET LOCAL lock_timeout = '5s'; SQLSTATE 55P03 is: in vain. Do so behind a savepoint, or ROLL BACK",
            "SQLSTATE 40001 and 40P01 are: run the transaction again",
        ),
        Dialect::Sqlite => (
            "PRAGMA busy_timeout = 5000; SQLITE_BUSY is: in vain. One name waits for any other",
            "SQLITE_BUSY_SNAPSHOT is: run the transaction again",
        ),
        Dialect::Mysql => (
            "SET SESSION innodb_lock_wait_timeout = 5; error 1205 is: in vain",
            "Error 1213 is: run the transaction again. Plain reads see what was before the first of them, so lock first",
        ),
    };
    format!(
        "-- In the transaction that reads and writes, before it does. When it is answered, the lock is yours until COMMIT or\n\
         -- ROLLBACK; until then it waits. (The table must be as leasehold's schema prints it: without its primary key\n\
         -- nothing is locked.)\n\
         {};\n\
         -- To wait no longer than so: {wait}.\n\
         -- {stale}.\n",
        fill(row::statement(dialect), &[":name"]),
    )
}

async fn take<T: Transaction + ?Sized>(tx: &mut T, name: &Name) -> Result<()> {
    match row::take(tx, name).await? {
        row::Taken::OneRow => Ok(()),
        row::Taken::Unsure(what) => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "table leasehold_row_lock cannot lock one row: {what}; create it as \
                 leasehold::database::schema() prints it"
            ),
        )),
    }
}

/// Takes within a savepoint, so that a time-out costs the caller nothing but the lock, and under
/// a wait of our own, which is set back in every case.
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
                // A deadlock has ended the whole transaction on MySQL, savepoint and all: then
                // the error that says so is the one to report.
                if error.kind() != ErrorKind::Conflict {
                    back?;
                    reset?;
                }
                Err(error)
            }
        }
    };
    attempt.await.map_err(|e: Error| e.during(operation).on(&name))
}
