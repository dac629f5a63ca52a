//! Uses `lock_in`, `once`, `versioned` and `fence::sql` in transactions of `diesel-async` on
//! PostgreSQL. It implements the four methods of a [`Session`].
//!
//! ```no_run
//! use diesel_async::{AsyncConnection as _, AsyncPgConnection};
//! use diesel_transactions::{Diesel, Failed};
//!
//! # async fn f(connection: &mut AsyncPgConnection) -> Result<(), Failed> {
//! connection
//!     .transaction(async |connection| {
//!         leasehold::lock_in(&mut Diesel(connection), "account:7").await?;
//!         // read, decide, write: no other client holds the lock
//!         Ok::<(), Failed>(())
//!     })
//!     .await
//! # }
//! ```
//!
//! Diesel passes on PostgreSQL's error messages without their codes. So a few errors are recognized
//! by their English texts. If the server's messages are in another language, these errors are
//! reported as rejected statements. To prevent that, set `lc_messages = 'C'`.

use diesel::deserialize::{self, FromSql, QueryableByName};
use diesel::pg::Pg;
use diesel::result::{DatabaseErrorKind, Error};
use diesel::row::{Field as _, NamedRow, Row};
use diesel::sql_types::{BigInt, Binary, Bool, Double, Nullable, Text};
use diesel_async::{AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _};
use leasehold::database::{Column, Dialect, Fault, Param, Session, Transaction, Value};

/// Builds a statement with its parameters. Each parameter is bound with its own type.
macro_rules! statement {
    ($sql:expr, $with:expr) => {{
        let query = diesel::sql_query($sql).into_boxed::<Pg>();
        $with.iter().fold(query, |query, param| match *param {
            Param::Null => query.bind::<Nullable<Text>, _>(None::<String>),
            Param::Int(v) => query.bind::<BigInt, _>(v),
            Param::Bool(v) => query.bind::<Bool, _>(v),
            Param::Float(v) => query.bind::<Double, _>(v),
            Param::Text(v) => query.bind::<Text, _>(v.to_owned()),
            Param::Bytes(v) => query.bind::<Binary, _>(v.to_owned()),
        })
    }};
}
/// A connection within a transaction.
pub struct Diesel<'a>(pub &'a mut AsyncPgConnection);

impl Session for Diesel<'_> {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
        let rows = statement!(sql, with).execute(self.0).await.map_err(fault)?;
        Ok(rows as u64)
    }

    async fn row(
        &mut self,
        sql: &str,
        with: &[Param<'_>],
        _: &[Column],
    ) -> Result<Option<Vec<Value>>, Fault> {
        let rows: Vec<Cells> = statement!(sql, with).load(self.0).await.map_err(fault)?;
        Ok(rows.into_iter().next().map(|Cells(row)| row))
    }

    async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
        self.0.batch_execute(sql).await.map_err(fault)
    }
}

impl Transaction for Diesel<'_> {}

/// A row of numbers and texts.
struct Cells(Vec<Value>);

/// PostgreSQL's type ID of `BIGINT`.
const INT8: u32 = 20;

impl QueryableByName<Pg> for Cells {
    fn build<'a>(row: &impl NamedRow<'a, Pg>) -> deserialize::Result<Self> {
        let cell = |i| {
            let field = Row::get(row, i).ok_or("the answer has fewer columns than it says")?;
            Ok(match field.value() {
                None => Value::Null,
                Some(value) if value.get_oid().get() == INT8 => {
                    <i64 as FromSql<BigInt, Pg>>::from_sql(value)?.into()
                }
                Some(value) => <String as FromSql<Text, Pg>>::from_sql(value)?.into(),
            })
        };
        (0..row.field_count()).map(cell).collect::<deserialize::Result<_>>().map(Self)
    }
}

/// Converts an error of Diesel to an error of leasehold.
pub fn fault(error: Error) -> Fault {
    let code = match &error {
        Error::DatabaseError(DatabaseErrorKind::UnableToSendCommand, _)
        | Error::DatabaseError(DatabaseErrorKind::ClosedConnection, _) => {
            return Fault::unanswered(error);
        }
        Error::DatabaseError(kind, info) => code(kind, info.message()),
        _ => return Fault::unreadable(error),
    };
    Fault::answered(Dialect::Postgres, code, error)
}

fn code(kind: &DatabaseErrorKind, says: &str) -> &'static str {
    let codes = [
        ("deadlock detected", "40P01"),
        ("canceling statement due to", "57014"),
        ("no unique or exclusion constraint matching the ON CONFLICT", "42P10"),
        ("current transaction is aborted", "25P02"),
        ("permission denied", "42501"),
        ("terminating connection", "57P01"),
    ];
    match kind {
        DatabaseErrorKind::SerializationFailure => "40001",
        DatabaseErrorKind::UniqueViolation => "23505",
        DatabaseErrorKind::ReadOnlyTransaction => "25006",
        _ if says.starts_with("relation ") && says.ends_with(" does not exist") => "42P01",
        _ => codes.iter().find(|(text, _)| says.contains(text)).map_or("XX000", |(_, code)| code),
    }
}

/// The error of a transaction, from Diesel or from leasehold.
#[derive(Debug)]
pub struct Failed(pub leasehold::Error);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(fault(error).into())
    }
}

impl From<leasehold::Error> for Failed {
    fn from(error: leasehold::Error) -> Self {
        Self(error)
    }
}
