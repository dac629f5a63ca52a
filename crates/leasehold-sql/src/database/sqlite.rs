//! SQLite's words.

use std::time::Duration;

use super::said::{self, Known};
use super::schema::Dialect;
use super::speak::sealed::{Speak, Taken};
use super::speak::{Answer, Column, Database, bind, speak};
use super::value::Value;
use leasehold_core::Name;

impl Database for sqlx::Sqlite {
    const DIALECT: Dialect = Dialect::Sqlite;
}

#[allow(private_interfaces)]
impl Speak for sqlx::Sqlite {
    const NOW: &'static str = "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)";
    const BIGINT: &'static str = "INTEGER";
    const QUOTE: char = '"';
    const OR_NOTHING: &'static str = " ON CONFLICT (name) DO NOTHING";
    const AS_IT_IS: &'static str = "";

    speak!();

    fn name(name: &Name) -> Value {
        Value::Text(name.as_str().to_owned())
    }

    fn is_catalogue_race(_: &sqlx::Error) -> bool {
        false
    }

    fn is_duplicate(_: &sqlx::Error) -> bool {
        false
    }

    /// SQLite has one write lock for the whole database, and this takes it. A transaction that
    /// has read before somebody else wrote cannot get it any more (SQLITE_BUSY_SNAPSHOT): it is
    /// told to start again, and never sees a stale view under the lock.
    fn take<'c>(c: &'c mut Self::Connection, name: &Name) -> Answer<'c, Taken> {
        let name = Self::name(name);
        Box::pin(async move {
            let sql = "INSERT INTO leasehold_row_lock (name, taken) VALUES (?, 1) \
                       ON CONFLICT (name) DO UPDATE SET taken = taken + 1";
            match Self::execute(c, sql, vec![name]).await {
                Ok(1) => Ok(Taken::OneRow),
                Ok(_) => Ok(Taken::Unsure("its row was not written")),
                Err(e) if e.to_string().contains("ON CONFLICT clause does not match") => {
                    Ok(Taken::Unsure("column name has no unique index"))
                }
                Err(e) => Err(e),
            }
        })
    }

    fn set_wait(c: &mut Self::Connection, wait: Duration) -> Answer<'_, Value> {
        Box::pin(async move {
            let before = Self::row(c, "PRAGMA busy_timeout", vec![], &[Column::Int])
                .await?
                .and_then(|mut row| row.pop())
                .unwrap_or(Value::Int(5000));
            let ms = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX).min(i32::MAX.into());
            Self::reset_wait(c, Value::Int(ms)).await?;
            Ok(before)
        })
    }

    fn reset_wait(c: &mut Self::Connection, before: Value) -> Answer<'_, ()> {
        let sql = format!("PRAGMA busy_timeout = {}", before.int());
        Box::pin(async move { Self::execute(c, &sql, vec![]).await.map(|_| ()) })
    }
}

bind!(sqlx::Sqlite);

fn spell(sql: &str) -> String {
    sql.to_owned()
}

pub(super) fn known(error: &sqlx::sqlite::SqliteError) -> Known {
    use sqlx::error::DatabaseError as _;
    let code: i32 = error.code().and_then(|c| c.parse().ok()).unwrap_or(0);
    // The low byte is the primary code; 517 is SQLITE_BUSY_SNAPSHOT.
    match (code, code & 0xff) {
        (517, _) => said::SERIALIZATION,
        (_, 5 | 6) => said::WAITED,
        (_, 3 | 23) => said::DENIED,
        (_, 8) => said::READ_ONLY,
        (_, 13) => said::FULL,
        (_, 1) if error.message().starts_with("no such table") => said::NO_TABLE,
        _ => None,
    }
}

/// The driver sees to it.
fn keeps_prepared(_: &sqlx::SqliteConnection) -> bool {
    true
}
