//! The lock's row: the statement that writes it, the proof that a single row was locked, and the
//! limit of the wait.
//!
//! - **PostgreSQL.** `ON CONFLICT (name)` requires a unique index on exactly that column. Without
//!   one the server rejects the statement (42P10), so a statement that succeeds has locked one row
//!   of a unique index. The row is *changed*, not only locked. A transaction whose snapshot is
//!   older than its wait then gets a serialization failure, instead of the lock together with stale
//!   data.
//! - **SQLite** has one write lock for the whole database, and the statement takes it. A
//!   transaction that read before another one wrote cannot take that lock any more
//!   (SQLITE_BUSY_SNAPSHOT). Such a transaction has to start again, so it never sees stale data
//!   under the lock.
//! - **MySQL.** If the name exists, the statement reports 2 rows. It has found the name by a unique
//!   index, so InnoDB locked only one record. For a new name it reports 1 row. A table without a
//!   unique index, which would lock nothing useful, reports 1 row too, so the catalog is read in
//!   this case. Each name is therefore checked once, when it is new. INSERT IGNORE with SELECT FOR
//!   UPDATE would not work, because its waiters all get a shared lock and then deadlock over the
//!   exclusive one. SELECT FOR UPDATE with INSERT deadlocks over gap locks.

use std::time::Duration;

use crate::database::{Column, Dialect, Fault, Session, Transaction, Value, number, row, run};
use leasehold_core::Name;

/// The result of writing a lock's row.
pub(super) enum Taken {
    /// One row of a unique index is locked.
    OneRow,
    /// It cannot be shown that one row was locked. The text names the problem with the table.
    Unsure(&'static str),
}

/// Returns the statement that writes the row of a name. Its only parameter is the name.
pub(super) const fn statement(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Sqlite => {
            "INSERT INTO leasehold_row_lock (name, taken) VALUES (?, 1) \
             ON CONFLICT (name) DO UPDATE SET taken = taken + 1"
        }
        Dialect::Postgres => {
            "INSERT INTO leasehold_row_lock AS l (name, taken) VALUES (?, 1) \
             ON CONFLICT (name) DO UPDATE SET taken = l.taken + 1"
        }
        Dialect::Mysql => {
            "INSERT INTO leasehold_row_lock (name, taken) VALUES (?, 1) \
             ON DUPLICATE KEY UPDATE taken = taken + 1"
        }
    }
}

pub(super) async fn take<T: Transaction + ?Sized>(tx: &mut T, name: &Name) -> Result<Taken, Fault> {
    let dialect = tx.dialect();
    let written = run(tx, statement(dialect), &[dialect.name(name)]).await;
    match (dialect, written) {
        (_, Err(fault)) if fault.is_without_index() => {
            Ok(Taken::Unsure("the column `name` has no unique index"))
        }
        (_, Err(fault)) => Err(fault),
        (Dialect::Sqlite | Dialect::Postgres, Ok(1)) | (Dialect::Mysql, Ok(2)) => Ok(Taken::OneRow),
        (Dialect::Sqlite | Dialect::Postgres, Ok(_)) => {
            Ok(Taken::Unsure("a trigger or a rule prevents writes to its rows"))
        }
        (Dialect::Mysql, Ok(_)) => look(tx).await,
    }
}

/// Checks in MySQL's catalog whether the table can lock a single row.
async fn look<T: Transaction + ?Sized>(tx: &mut T) -> Result<Taken, Fault> {
    let sql = "SELECT \
        (SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() \
         AND table_name = 'leasehold_row_lock' AND engine = 'InnoDB'), \
        (SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() \
         AND table_name = 'leasehold_row_lock' AND column_name = 'name' \
         AND data_type = 'varbinary'), \
        (SELECT COUNT(*) FROM information_schema.statistics s \
         WHERE table_schema = DATABASE() AND table_name = 'leasehold_row_lock' \
         AND non_unique = 0 AND column_name = 'name' AND seq_in_index = 1 \
         AND sub_part IS NULL AND NOT EXISTS (SELECT 1 FROM information_schema.statistics \
         t WHERE t.table_schema = s.table_schema AND t.table_name = s.table_name \
         AND t.index_name = s.index_name AND t.seq_in_index = 2))";
    let row = row(tx, sql, &[], &[Column::Int; 3]).await?.unwrap_or_default();
    Ok(match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
        [0, ..] => Taken::Unsure("its engine is not InnoDB"),
        [_, 0, _] => Taken::Unsure("the column `name` is not VARBINARY"),
        [_, _, n] if n > 0 => Taken::OneRow,
        _ => Taken::Unsure("the column `name` has no unique index of its own"),
    })
}

/// Sets how long a statement waits for a lock, and returns the previous setting.
pub(super) async fn set_wait<S: Session + ?Sized>(
    session: &mut S,
    wait: Duration,
) -> Result<Value, Fault> {
    let ms = wait.as_millis().clamp(0, i32::MAX as u128);
    let (before, wait) = match session.dialect() {
        Dialect::Sqlite => {
            let before = number(session, "PRAGMA busy_timeout", &[]).await?.unwrap_or(5000);
            (Value::Int(before), Value::Int(i64::try_from(ms).unwrap_or(i64::MAX)))
        }
        Dialect::Postgres => {
            let sql = "SELECT current_setting('lock_timeout')";
            let before = row(session, sql, &[], &[Column::Text]).await?;
            let before = before.and_then(|mut row| row.pop()).unwrap_or(Value::Null);
            // 0 would mean "without limit".
            (before, Value::Text(ms.max(1).to_string()))
        }
        // The server supports whole seconds only. At least 1, because MySQL does not accept 0.
        Dialect::Mysql => {
            let sql = "SELECT CAST(@@SESSION.innodb_lock_wait_timeout AS SIGNED)";
            let before = number(session, sql, &[]).await?.unwrap_or(50);
            let whole = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            let seconds = i64::try_from(whole.clamp(1, 1 << 30)).unwrap_or(1 << 30);
            (Value::Int(before), Value::Int(seconds))
        }
    };
    reset_wait(session, wait).await?;
    Ok(before)
}

/// Sets how long a statement waits for a lock, to a value that [`set_wait`] returned or computed.
pub(super) async fn reset_wait<S: Session + ?Sized>(
    session: &mut S,
    wait: Value,
) -> Result<(), Fault> {
    match session.dialect() {
        Dialect::Sqlite => session.batch(&format!("PRAGMA busy_timeout = {}", wait.int())).await,
        Dialect::Postgres => {
            let set = "SELECT set_config('lock_timeout', ?, true)";
            row(session, set, &[wait], &[Column::Text]).await.map(|_| ())
        }
        Dialect::Mysql => {
            let set = format!("SET SESSION innodb_lock_wait_timeout = {}", wait.int());
            session.batch(&set).await
        }
    }
}
