//! PostgreSQL's words.

use std::time::Duration;

use super::said::{self, Known};
use super::schema::Dialect;
use super::speak::sealed::{Speak, Taken};
use super::speak::{Answer, Column, Database, bind, speak};
use super::value::Value;
use leasehold_core::Name;

impl Database for sqlx::Postgres {
    const DIALECT: Dialect = Dialect::Postgres;
}

#[allow(private_interfaces)]
impl Speak for sqlx::Postgres {
    // now() would be the start of the transaction.
    const NOW: &'static str =
        "CAST(floor(extract(epoch FROM clock_timestamp()) * 1000000) AS BIGINT)";
    const BIGINT: &'static str = "BIGINT";
    const QUOTE: char = '"';
    // An error would end the whole transaction here.
    const OR_NOTHING: &'static str = " ON CONFLICT (name) DO NOTHING";
    const AS_IT_IS: &'static str = "";

    speak!();

    fn name(name: &Name) -> Value {
        Value::Text(name.as_str().to_owned())
    }

    fn is_catalogue_race(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|e| e.code());
        matches!(code.as_deref(), Some("23505" | "42P07" | "42710"))
    }

    fn is_duplicate(_: &sqlx::Error) -> bool {
        false
    }

    /// `ON CONFLICT (name)` needs a unique index on exactly that column: without one the server
    /// itself refuses (42P10), so one row of a unique index is what is locked. The row is
    /// *changed*, not merely locked: a transaction that took its snapshot before it waited here
    /// then gets a serialization failure, instead of the lock and a stale view.
    fn take<'c>(c: &'c mut Self::Connection, name: &Name) -> Answer<'c, Taken> {
        let name = Self::name(name);
        Box::pin(async move {
            let sql = "INSERT INTO leasehold_row_lock AS l (name, taken) VALUES (?, 1) \
                       ON CONFLICT (name) DO UPDATE SET taken = l.taken + 1";
            match Self::execute(c, sql, vec![name]).await {
                Ok(1) => Ok(Taken::OneRow),
                Ok(_) => Ok(Taken::Unsure("a trigger or a rule keeps its row from being written")),
                Err(e) => match e.as_database_error().and_then(|e| e.code()).as_deref() {
                    Some("42P10") => Ok(Taken::Unsure("column name has no unique index")),
                    _ => Err(e),
                },
            }
        })
    }

    fn set_wait(c: &mut Self::Connection, wait: Duration) -> Answer<'_, Value> {
        Box::pin(async move {
            let before =
                Self::row(c, "SELECT current_setting('lock_timeout')", vec![], &[Column::Text])
                    .await?
                    .and_then(|mut row| row.pop())
                    .unwrap_or(Value::Null);
            // 0 would mean "for ever".
            let ms = wait.as_millis().clamp(1, i32::MAX as u128);
            let set = vec![Value::Text(ms.to_string())];
            Self::row(c, "SELECT set_config('lock_timeout', ?, true)", set, &[Column::Text])
                .await?;
            Ok(before)
        })
    }

    fn reset_wait(c: &mut Self::Connection, before: Value) -> Answer<'_, ()> {
        Box::pin(async move {
            let set = "SELECT set_config('lock_timeout', ?, true)";
            Self::row(c, set, vec![before], &[Column::Text]).await.map(|_| ())
        })
    }
}

bind!(sqlx::Postgres);

/// `?` as PostgreSQL counts it. Our statements hold no other question mark.
fn spell(sql: &str) -> String {
    let mut out = String::with_capacity(sql.len() + 8);
    let mut n = 0;
    for c in sql.chars() {
        if c == '?' {
            n += 1;
            out.push('$');
            out.push_str(&n.to_string());
        } else {
            out.push(c);
        }
    }
    out
}

pub(super) fn known(code: &str) -> Known {
    match code {
        "40P01" => said::DEADLOCK,
        "40001" => said::SERIALIZATION,
        "25P02" => said::FAILED_BEFORE,
        "55P03" | "57014" => said::WAITED,
        "42P01" | "3F000" => said::NO_TABLE,
        "42501" | "28000" | "28P01" => said::DENIED,
        "25006" => said::READ_ONLY,
        "53100" => said::FULL,
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04" | "53300" => said::GONE,
        c if c.starts_with("08") => said::GONE,
        _ => None,
    }
}

/// Whether the caller's driver keeps statements prepared on this connection. If it keeps none
/// (`statement-cache-capacity=0`) there may be a pooler that lends the connection to others: a
/// statement prepared under a name would be theirs tomorrow. That nothing is kept *yet* looks the
/// same, and costs one round trip.
fn keeps_prepared(c: &sqlx::PgConnection) -> bool {
    sqlx::Connection::cached_statements_size(c) > 0
}
