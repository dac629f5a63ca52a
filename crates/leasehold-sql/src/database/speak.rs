//! What leasehold says to a database inside the caller's transaction, and how each dialect says it.

use std::future::Future;
use std::pin::Pin;

use super::schema::Dialect;
use super::value::Value;

/// A database that leasehold can speak to inside the caller's transaction: [`sqlx::Sqlite`],
/// [`sqlx::Postgres`] and [`sqlx::MySql`], by their features.
pub trait Database: sealed::Speak {
    /// Its SQL.
    const DIALECT: Dialect;
}

/// One column of an answer.
#[derive(Clone, Copy)]
pub(crate) enum Column {
    Int,
    Text,
}

/// What a column held.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = sqlx::Result<T>> + Send + 'a>>;

pub(crate) mod sealed {
    use super::{Answer, Column, Value};
    use leasehold_core::Name;

    /// The few words that each dialect has of its own.
    #[allow(unreachable_pub, private_interfaces)]
    pub trait Speak: sqlx::Database {
        /// The database's clock at the moment of evaluation, in µs since 1970, never frozen at
        /// the transaction's start.
        const NOW: &'static str;
        /// The type that a whole number is cast to before it is read.
        const BIGINT: &'static str;
        /// What quotes an identifier.
        const QUOTE: char;
        /// What an `INSERT` of a key that may exist ends with; empty where the duplicate is an
        /// error that does not end the transaction.
        const OR_NOTHING: &'static str;
        /// What makes a read see the row as it is now, not as it was at the transaction's start.
        const AS_IT_IS: &'static str;

        /// A name as the tables store it.
        fn name(name: &Name) -> Value;
        /// Runs statements without parameters.
        fn script(c: &mut Self::Connection, sql: String) -> Answer<'_, ()>;
        /// Runs one statement; the number of rows that it matched.
        fn execute<'c>(c: &'c mut Self::Connection, sql: &str, with: Vec<Value>)
        -> Answer<'c, u64>;
        /// The first row of an answer.
        fn row<'c>(
            c: &'c mut Self::Connection,
            sql: &str,
            with: Vec<Value>,
            columns: &'static [Column],
        ) -> Answer<'c, Option<Vec<Value>>>;
        /// Whether two `CREATE TABLE IF NOT EXISTS` met.
        fn is_catalogue_race(error: &sqlx::Error) -> bool;
        /// Whether this is the duplicate key that `OR_NOTHING` does not swallow.
        fn is_duplicate(error: &sqlx::Error) -> bool;
        /// Takes the lock row in the caller's transaction; see `lock_in`.
        fn take<'c>(c: &'c mut Self::Connection, name: &Name) -> Answer<'c, Taken>;
        /// Sets how long a statement waits for a lock; what to set it back to.
        fn set_wait(c: &mut Self::Connection, wait: std::time::Duration) -> Answer<'_, Value>;
        /// Sets it back.
        fn reset_wait(c: &mut Self::Connection, before: Value) -> Answer<'_, ()>;
    }

    /// What taking a lock row found out.
    #[allow(unreachable_pub)]
    #[derive(Debug)]
    pub enum Taken {
        /// One row of a unique index is locked.
        OneRow,
        /// It cannot be shown that one row was locked: this is wrong with the table.
        Unsure(&'static str),
    }
}

/// Writes a dialect's part that is the same text for each: binding and reading.
macro_rules! speak {
    () => {
        fn script(c: &mut Self::Connection, sql: String) -> Answer<'_, ()> {
            Box::pin(
                async move { sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(c).await.map(|_| ()) },
            )
        }

        fn execute<'c>(
            c: &'c mut Self::Connection,
            sql: &str,
            with: Vec<Value>,
        ) -> Answer<'c, u64> {
            let sql = spell(sql);
            Box::pin(async move {
                let query = bind(sql, with).persistent(keeps_prepared(c));
                Ok(query.execute(c).await?.rows_affected())
            })
        }

        fn row<'c>(
            c: &'c mut Self::Connection,
            sql: &str,
            with: Vec<Value>,
            columns: &'static [Column],
        ) -> Answer<'c, Option<Vec<Value>>> {
            use sqlx::Row as _;
            let sql = spell(sql);
            Box::pin(async move {
                let query = bind(sql, with).persistent(keeps_prepared(c));
                let Some(row) = query.fetch_optional(c).await? else {
                    return Ok(None);
                };
                let read = |(i, column): (usize, &Column)| {
                    Ok(match column {
                        Column::Int => row.try_get::<Option<i64>, _>(i)?.into(),
                        Column::Text => row.try_get::<Option<String>, _>(i)?.into(),
                    })
                };
                columns.iter().enumerate().map(read).collect::<sqlx::Result<_>>().map(Some)
            })
        }
    };
}
/// Binds values to a dialect's query.
macro_rules! bind {
    ($db:ty) => {
        fn bind(
            sql: String,
            with: Vec<Value>,
        ) -> sqlx::query::Query<'static, $db, <$db as sqlx::Database>::Arguments> {
            let query = sqlx::query(sqlx::AssertSqlSafe(sql));
            with.into_iter().fold(query, |query, value| match value {
                Value::Null => query.bind(None::<String>),
                Value::Bool(v) => query.bind(v),
                Value::Int(v) => query.bind(v),
                Value::Float(v) => query.bind(v),
                Value::Text(v) => query.bind(v),
                Value::Bytes(v) => query.bind(v),
                Value::Typed(v) => query.bind(v.text()),
            })
        }
    };
}
#[allow(unused_imports)]
pub(crate) use {bind, speak};
