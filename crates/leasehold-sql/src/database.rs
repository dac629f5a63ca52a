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

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use sqlx::Pool;

use leasehold_core::{Error, ErrorKind, Name, Result};

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

/// Which SQL to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dialect {
    /// SQLite.
    Sqlite,
    /// PostgreSQL.
    Postgres,
    /// MySQL and MariaDB.
    Mysql,
}

/// The tables of `lock_in`, `once` and `fence::sql`, as statements for a migration. Running them
/// again changes nothing.
pub fn schema(dialect: Dialect) -> String {
    let (name, bytes, text, int, tail) = match dialect {
        Dialect::Sqlite => ("TEXT COLLATE BINARY", 0, "TEXT", "INTEGER", " WITHOUT ROWID"),
        Dialect::Postgres => ("TEXT COLLATE \"C\"", 0, "TEXT", "BIGINT", ""),
        Dialect::Mysql => {
            ("VARBINARY", 512, "LONGTEXT CHARACTER SET utf8mb4", "BIGINT", " ENGINE=InnoDB")
        }
    };
    let name = if bytes > 0 { format!("{name}({bytes})") } else { name.to_owned() };
    // clean_up finds old keys by these, and so locks no others.
    let (inner, outer) = match dialect {
        Dialect::Mysql => (
            ",\n  INDEX leasehold_once_done (done_at),\n  \
             INDEX leasehold_once_started (state, lease_end)",
            "",
        ),
        _ => (
            "",
            "CREATE INDEX IF NOT EXISTS leasehold_once_done ON leasehold_once (done_at);\n\
             CREATE INDEX IF NOT EXISTS leasehold_once_started ON leasehold_once \
             (state, lease_end);\n",
        ),
    };
    format!(
        "-- leasehold: lock_in. One row a lock name; `taken` counts the committed holds.\n\
         CREATE TABLE IF NOT EXISTS leasehold_row_lock (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 taken {int} NOT NULL\n\
         ){tail};\n\
         -- leasehold: once. One row an idempotency key; state is 'started' or 'done'; times are\n\
         -- microseconds since 1970 by the database's clock.\n\
         CREATE TABLE IF NOT EXISTS leasehold_once (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 state VARCHAR(8) NOT NULL,\n\
         \x20 attempt {int} NOT NULL,\n\
         \x20 attempt_id VARCHAR(32) NOT NULL,\n\
         \x20 lease_end {int} NOT NULL,\n\
         \x20 done_at {int},\n\
         \x20 outcome {text}{inner}\n\
         ){tail};\n{outer}\
         -- leasehold: fence::sql. One row a resource; `seen` is the greatest token seen.\n\
         CREATE TABLE IF NOT EXISTS leasehold_fence (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 seen {int} NOT NULL\n\
         ){tail};\n"
    )
}

/// Creates the tables that are missing. Any number of processes may do so at once.
///
/// # Errors
/// [`ErrorKind::Denied`] without the right to create tables, [`ErrorKind::Unreachable`].
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

/// A database that leasehold can speak to inside the caller's transaction: [`sqlx::Sqlite`],
/// [`sqlx::Postgres`] and [`sqlx::MySql`], by their features.
pub trait Database: sealed::Speak {
    /// Its SQL.
    const DIALECT: Dialect;
}

/// A value for a column of the caller's own table.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// `NULL`.
    Null,
    /// A whole number.
    Int(i64),
    /// True or false: `BOOLEAN` on PostgreSQL, 1 or 0 elsewhere.
    Bool(bool),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Text that stands for a value of another type of the database's; made by [`Value::typed`].
    Typed(Typed),
}

/// See [`Value::typed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Typed {
    of: String,
    text: String,
}

impl Value {
    /// A value of a type that Rust's own numbers and texts are not, as text: PostgreSQL takes no
    /// text for a `uuid`, a `timestamptz`, a `jsonb` or a `numeric` column unless it is told. There
    /// it is `CAST('…' AS type_name)`; SQLite and MySQL take the text as it is, and convert it to
    /// what the column is. `type_name` is letters, digits and `_`
    /// (`schema.type` for a type of your own), and is refused by the first use if it is not.
    ///
    /// ```
    /// use leasehold::database::Value;
    /// let key = Value::typed("uuid", "7f1c7a3e-7ac5-4d44-93a8-2f6c5c3f1b11");
    /// let price = Value::typed("numeric", "12.50");
    /// # let _ = (key, price);
    /// ```
    pub fn typed(type_name: impl Into<String>, text: impl Into<String>) -> Self {
        Self::Typed(Typed { of: type_name.into(), text: text.into() })
    }
}

macro_rules! value_from {
    ($($from:ty => $make:expr),+ $(,)?) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                #[allow(clippy::redundant_closure_call)]
                ($make)(value)
            }
        }
    )+};
}
value_from! {
    bool => Value::Bool,
    i64 => Value::Int,
    i32 => |v: i32| Value::Int(v.into()),
    u32 => |v: u32| Value::Int(v.into()),
    f64 => Value::Float,
    String => Value::Text,
    &str => |v: &str| Value::Text(v.into()),
    Vec<u8> => Value::Bytes,
    &[u8] => |v: &[u8]| Value::Bytes(v.into()),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
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

impl Value {
    /// The number, or 0 where there is none.
    pub(crate) fn int(&self) -> i64 {
        if let Self::Int(v) = self { *v } else { 0 }
    }

    /// The text, or nothing.
    pub(crate) fn text(self) -> String {
        if let Self::Text(v) = self { v } else { String::new() }
    }
}

/// An identifier of the caller's own schema, quoted. Only letters, digits and `_`, so that it is
/// an identifier and nothing else; `schema.table` where a table is meant.
pub(crate) fn identifier<DB: Database>(text: &str) -> Result<String> {
    if !is_identifier(text) {
        let shown: String = text.chars().take(40).collect();
        let what = format!("{shown:?} is no table or column name: use letters, digits and _");
        return Err(Error::new(ErrorKind::Config, what));
    }
    let quote = DB::QUOTE;
    let quoted: Vec<String> = text.split('.').map(|p| format!("{quote}{p}{quote}")).collect();
    Ok(quoted.join("."))
}

/// Whether it is `name` or `schema.name`, and needs no quoting.
fn is_identifier(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty()
            && part.len() <= 63
            && !part.starts_with(|c: char| c.is_ascii_digit())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    text.split('.').count() <= 2 && text.split('.').all(plain)
}

impl Typed {
    /// What is bound.
    pub(crate) fn text(self) -> String {
        self.text
    }
}

/// Where a value of the caller's is bound: `?`, or a cast of it.
pub(crate) fn place<DB: Database>(value: &Value) -> Result<Cow<'static, str>> {
    let Value::Typed(typed) = value else { return Ok("?".into()) };
    if !is_identifier(&typed.of) {
        let shown: String = typed.of.chars().take(40).collect();
        let what = format!("{shown:?} is no type's name: use letters, digits and _");
        return Err(Error::new(ErrorKind::Config, what));
    }
    Ok(match DB::DIALECT {
        Dialect::Postgres => format!("CAST(? AS {})", typed.of).into(),
        Dialect::Sqlite | Dialect::Mysql => "?".into(),
    })
}

/// `, column = ?` for each column, and the values for it.
pub(crate) fn assignments<DB: Database>(
    columns: &[(&str, Value)],
    with: &mut Vec<Value>,
) -> Result<String> {
    let mut sql = String::new();
    for (column, value) in columns {
        let column = identifier::<DB>(column)?;
        // A bound NULL has a type, which need not be the column's.
        if *value == Value::Null {
            sql.push_str(&format!(", {column} = NULL"));
        } else {
            sql.push_str(&format!(", {column} = {}", place::<DB>(value)?));
            with.push(value.clone());
        }
    }
    Ok(sql)
}

/// `d` in µs, for an interval on the database's clock.
pub(crate) fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

/// The name, checked, or the error that says what was being done.
pub(crate) fn named(name: impl AsRef<str>, operation: &'static str) -> Result<Name> {
    Name::new(name).map_err(|e| e.during(operation))
}

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

type Known = Option<(ErrorKind, &'static str)>;

fn known(error: &dyn sqlx::error::DatabaseError) -> Known {
    #[cfg(feature = "postgres")]
    if let Some(e) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        return postgres::known(e.code());
    }
    #[cfg(feature = "mysql")]
    if let Some(e) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return mysql::known(e.number());
    }
    #[cfg(feature = "sqlite")]
    if let Some(e) = error.try_downcast_ref::<sqlx::sqlite::SqliteError>() {
        return sqlite::known(e);
    }
    let _ = error;
    None
}

/// What each dialect says of the errors that all of them have.
#[allow(dead_code)]
pub(crate) mod said {
    use super::Known;
    use leasehold_core::ErrorKind::{
        Config, Conflict, Contended, Denied, Full, Timeout, Unreachable,
    };

    pub(crate) const DEADLOCK: Known =
        Some((Conflict, "a deadlock was broken: roll back and run the transaction again"));
    pub(crate) const SERIALIZATION: Known = Some((
        Conflict,
        "another transaction changed what this one has seen: roll back and run it again",
    ));
    pub(crate) const FAILED_BEFORE: Known = Some((
        Conflict,
        "an earlier statement of this transaction failed: roll back and run it again",
    ));
    pub(crate) const WAITED: Known =
        Some((Timeout, "another transaction holds it and did not finish in time: retry later"));
    pub(crate) const BUSY: Known = Some((Contended, "another transaction holds it: retry later"));
    pub(crate) const NO_TABLE: Known = Some((
        Config,
        "a table is missing: run leasehold::database::install, or what schema() prints",
    ));
    pub(crate) const DENIED: Known =
        Some((Denied, "the database refuses this user; grant SELECT, INSERT, UPDATE and DELETE"));
    pub(crate) const READ_ONLY: Known =
        Some((Denied, "the database or the transaction is read-only; use the primary"));
    pub(crate) const FULL: Known = Some((Full, "the database has no room left"));
    pub(crate) const GONE: Known =
        Some((Unreachable, "the database ended the connection; run the transaction again"));
}
