//! The interface to a database driver: runs statements in the caller's transaction.
//!
//! leasehold writes the statements in the [`Dialect`] of the session and always binds their
//! parameters, so user input is never part of the SQL text. A driver adds neither transactions nor
//! retries, because each statement is atomic on its own. A lost reply is reported as a [`Fault`].

use std::future::Future;

use super::dialect::Dialect;
use super::fault::Fault;
use super::value::{Param, Value};

/// A connection to a database that runs one statement at a time.
///
/// Implemented for:
/// - the connections and transactions of `sqlx` 0.9 (features `sqlite`, `postgres`, `mysql`),
/// - `tokio_postgres::Transaction`, `Client` and `Arc<Client>` (feature `tokio-postgres`),
/// - `sea_orm::DatabaseTransaction` (feature `sea-orm`),
/// - `sqlx` 0.8 (features `sqlx-08-postgres` and `sqlx-08-mysql`).
///
/// For any other driver, implement these four methods. `examples/diesel-transactions` implements
/// them for `diesel-async`.
///
/// ```
/// use leasehold::database::{Column, Dialect, Fault, Param, Session, Transaction, Value};
/// # mod driver { // Any driver.
/// # pub struct Connection; pub struct Row; #[derive(Debug)] pub struct Failed { pub sqlstate: Option<String> }
/// # impl std::fmt::Display for Failed { fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { Ok(()) } }
/// # impl std::error::Error for Failed {}
/// # impl Row {
/// #   pub fn number(&self, _: usize) -> Option<i64> { Some(1) }
/// #   pub fn text(&self, _: usize) -> Option<String> { None }
/// # }
/// # impl Connection {
/// #   pub async fn execute(&mut self, _: &str, _: Vec<String>) -> Result<u64, Failed> { Ok(1) }
/// #   pub async fn first(&mut self, _: &str, _: Vec<String>) -> Result<Option<Row>, Failed> { Ok(Some(Row)) }
/// #   pub async fn simple(&mut self, _: &str) -> Result<(), Failed> { Ok(()) }
/// # }}
/// struct Mine<'a>(&'a mut driver::Connection); // within its transaction
///
/// fn fault(error: driver::Failed) -> Fault {
///     match &error.sqlstate {
///         Some(code) => Fault::answered(Dialect::Postgres, code.clone(), error),
///         None => Fault::unanswered(error),
///     }
/// }
/// # fn bind(with: &[Param<'_>]) -> Vec<String> { with.iter().map(|p| format!("{p:?}")).collect() }
///
/// impl Session for Mine<'_> {
///     fn dialect(&self) -> Dialect {
///         Dialect::Postgres
///     }
///     async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
///         self.0.execute(sql, bind(with)).await.map_err(fault)
///     }
///     async fn row(
///         &mut self,
///         sql: &str,
///         with: &[Param<'_>],
///         columns: &[Column],
///     ) -> Result<Option<Vec<Value>>, Fault> {
///         let row = self.0.first(sql, bind(with)).await.map_err(fault)?;
///         Ok(row.map(|row| Column::read(columns, |i| row.number(i), |i| row.text(i))))
///     }
///     async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
///         self.0.simple(sql).await.map_err(fault)
///     }
/// }
/// impl Transaction for Mine<'_> {}
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let mut connection = driver::Connection;
/// leasehold::lock_in(&mut Mine(&mut connection), "account:7").await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
pub trait Session: Send {
    /// Returns the SQL dialect. Statements use the parameter syntax of this dialect.
    fn dialect(&self) -> Dialect;

    /// Runs one statement and returns the number of changed rows; on MySQL, of *matched* rows
    /// (`CLIENT_FOUND_ROWS`).
    ///
    /// Each parameter is bound with the type that [`Param`] names.
    fn run(
        &mut self,
        sql: &str,
        with: &[Param<'_>],
    ) -> impl Future<Output = Result<u64, Fault>> + Send;

    /// Runs one statement and returns the first row of its result, with the types in `columns`.
    fn row(
        &mut self,
        sql: &str,
        with: &[Param<'_>],
        columns: &[Column],
    ) -> impl Future<Output = Result<Option<Vec<Value>>, Fault>> + Send;

    /// Runs statements without parameters and without preparing them, because MySQL cannot prepare
    /// `SAVEPOINT`. Only [`install`](crate::database::install) sends several statements at once,
    /// separated by semicolons.
    fn batch(&mut self, sql: &str) -> impl Future<Output = Result<(), Fault>> + Send;
}

/// A session in a transaction that the caller has begun and will end.
///
/// Outside of a transaction, a lock or a check would end with its statement. Functions that need a
/// transaction therefore require this trait. If a driver has a separate type for transactions,
/// implement it for that type only.
pub trait Transaction: Session {}

/// A source of sessions for operations outside of the caller's transactions:
/// [`install`](crate::database::install), [`Once::run`](crate::once::Once::run) and
/// [`clean_up`](crate::once::clean_up).
///
/// Implemented for the pools of `sqlx` and for `Arc<tokio_postgres::Client>`. Another pool needs
/// these lines:
///
/// ```
/// # #[cfg(feature = "tokio-postgres")] mod m {
/// use std::sync::Arc;
/// use leasehold::database::{Fault, Pool};
/// struct Connects(tokio_postgres::Config);
///
/// impl Pool for Connects {
///     type Session = Arc<tokio_postgres::Client>;
///     async fn session(&self) -> Result<Self::Session, Fault> {
///         let (client, connection) = self.0.connect(tokio_postgres::NoTls).await?;
///         tokio::spawn(connection);
///         Ok(Arc::new(client))
///     }
/// }
/// # }
/// ```
pub trait Pool: Send + Sync {
    /// The type of its sessions.
    type Session: Session;

    /// Returns a session outside of any transaction. Dropping it returns it to the pool.
    fn session(&self) -> impl Future<Output = Result<Self::Session, Fault>> + Send;

    /// Returns a session without waiting for the pool, for renewals that must not be late. By
    /// default, calls [`session`](Self::session).
    fn beside(&self) -> impl Future<Output = Result<Self::Session, Fault>> + Send {
        self.session()
    }
}

/// The type in which a result column is read.
///
/// ```
/// use leasehold::database::{Column, Value};
/// let row = ["7", "paid"]; // as a driver returns it
/// let number = |i: usize| row[i].parse().ok();
/// let text = |i: usize| Some(row[i].to_owned());
/// let columns = [Column::Int, Column::Text];
/// assert_eq!(Column::read(&columns, number, text), [Value::from(7i64), "paid".into()]);
/// // If a column can have another type:
/// let number = |i: usize| row[i].parse().map(Some);
/// assert!(Column::try_read(&[Column::Int, Column::Int], number, |_| Ok(None)).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// [`Value::Int`]: a `BIGINT`, or `NULL`.
    Int,
    /// [`Value::Text`], or `NULL`.
    Text,
}

impl Column {
    /// Reads each of `columns` by its index, with `number` for integers and `text` for text.
    pub fn read(
        columns: &[Self],
        number: impl Fn(usize) -> Option<i64>,
        text: impl Fn(usize) -> Option<String>,
    ) -> Vec<Value> {
        let read = |(i, column): (usize, &Self)| match column {
            Self::Int => number(i).into(),
            Self::Text => text(i).into(),
        };
        columns.iter().enumerate().map(read).collect()
    }

    /// Reads columns like [`read`](Self::read), with functions that can fail.
    ///
    /// # Errors
    /// The first error of `number` or `text`.
    pub fn try_read<E>(
        columns: &[Self],
        number: impl Fn(usize) -> Result<Option<i64>, E>,
        text: impl Fn(usize) -> Result<Option<String>, E>,
    ) -> Result<Vec<Value>, E> {
        let read = |(i, column): (usize, &Self)| match column {
            Self::Int => number(i).map(Value::from),
            Self::Text => text(i).map(Value::from),
        };
        columns.iter().enumerate().map(read).collect()
    }
}

/// Runs one of leasehold's statements, whose parameters are written as `?`.
pub(crate) async fn run<S: Session + ?Sized>(
    session: &mut S,
    sql: &str,
    with: &[Value],
) -> Result<u64, Fault> {
    let with: Vec<Param<'_>> = with.iter().map(Value::param).collect();
    let sql = session.dialect().spell(sql);
    session.run(&sql, &with).await
}

/// Returns the first row of the result of one of leasehold's statements.
pub(crate) async fn row<S: Session + ?Sized>(
    session: &mut S,
    sql: &str,
    with: &[Value],
    columns: &[Column],
) -> Result<Option<Vec<Value>>, Fault> {
    let with: Vec<Param<'_>> = with.iter().map(Value::param).collect();
    let sql = session.dialect().spell(sql);
    session.row(&sql, &with, columns).await
}

/// Returns the number in the first column of a statement's result, if there is a row.
pub(crate) async fn number<S: Session + ?Sized>(
    session: &mut S,
    sql: &str,
    with: &[Value],
) -> Result<Option<i64>, Fault> {
    let row = row(session, sql, with, &[Column::Int]).await?;
    Ok(row.map(|row| row.first().map_or(0, Value::int)))
}
