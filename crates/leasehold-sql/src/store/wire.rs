//! One connection to a database: statements, their arguments and their rows.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

/// A value bound to a statement.
#[derive(Clone, Debug)]
pub(super) enum Arg {
    Int(i64),
    Text(String),
    /// A lock's name. It is sent as bytes if the database would fold or pad text in comparisons.
    Name(String),
}

impl From<i64> for Arg {
    fn from(n: i64) -> Self {
        Self::Int(n)
    }
}

impl From<&str> for Arg {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Arg {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A value of a row.
#[derive(Clone, Debug)]
pub(super) enum Cell {
    Int(Option<i64>),
    Text(Option<String>),
}

pub(super) type Row = Vec<Cell>;

/// SQL, and the types of its columns: `i` for a number and `t` for text.
#[derive(Clone, Debug)]
pub(super) struct Statement {
    pub(super) sql: Arc<str>,
    pub(super) shape: &'static str,
}

/// The result of a statement without rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) affected: u64,
    /// MySQL: the value that the statement passed to LAST_INSERT_ID().
    #[cfg_attr(not(feature = "mysql"), expect(dead_code, reason = "only MySQL has it"))]
    pub(super) last_id: u64,
}

/// One step of a [script](Wire::script).
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// SQL without arguments, which may be several statements.
    Raw(Cow<'a, str>),
    /// A statement whose rows are read.
    Rows(&'a Statement, Vec<Arg>),
    /// A statement that changes exactly one row. If it changes a different number of rows, it fails
    /// with a conflict (see [`Failure`](super::fault::Failure)).
    One(&'a Statement, Vec<Arg>),
}

/// One connection to a database.
#[async_trait]
pub(super) trait Wire: Send {
    /// Runs a statement and reads its rows.
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>>;
    /// Runs a statement without rows.
    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done>;
    /// Runs several statements without arguments in one round trip.
    async fn raw(&mut self, sql: &str) -> sqlx::Result<()>;
    /// Runs these steps in order, in one round trip if the database supports it. Stops at the first
    /// step that fails. `done` receives the rows of the steps that were executed.
    async fn script(&mut self, steps: Vec<Step<'_>>, done: &mut Vec<Vec<Row>>) -> sqlx::Result<()> {
        for step in steps {
            done.push(match step {
                Step::Raw(sql) => {
                    self.raw(&sql).await?;
                    Vec::new()
                }
                Step::Rows(statement, args) => self.rows(statement, args).await?,
                Step::One(statement, args) => match self.run(statement, args).await?.affected {
                    1 => Vec::new(),
                    _ => return Err(sqlx::Error::RowNotFound),
                },
            });
        }
        Ok(())
    }
    /// Disconnects as the server's protocol requires.
    async fn close(self: Box<Self>) -> sqlx::Result<()>;
    /// Returns whether the connection is borrowed from the caller's pool.
    fn is_borrowed(&self) -> bool {
        false
    }
    /// Records that no operation is in progress. A borrowed connection then returns to its pool
    /// when it is dropped.
    fn rests(&mut self) {}
    /// Waits for the next message on the channels that this connection listens to. The future may
    /// be dropped at any time. Returns `None` if the connection is lost.
    #[cfg(feature = "postgres")]
    async fn notification(&mut self) -> sqlx::Result<Option<String>> {
        std::future::pending().await
    }
}

/// Returns the connection itself, for connections of sqlx's own types.
pub(super) fn itself<C>(connection: C) -> sqlx::Result<C> {
    Ok(connection)
}

/// Implements [`Wire`] for one of sqlx's connections. `$name` binds a lock's name, `$text` reads
/// text, and `$last_id` reads LAST_INSERT_ID.
macro_rules! wire {
    ($connection:ty, $name:expr, $text:expr, $last_id:expr) => {
        crate::store::wire::wire!(
            $connection,
            $name,
            $text,
            $last_id,
            crate::store::wire::itself,
            crate::store::wire::itself,
            true
        );
    };
    // `$inner` finds sqlx's connection in ours. `$whole` extracts it, if it exists. `$kept` states
    // whether it keeps prepared statements.
    ($connection:ty, $name:expr, $text:expr, $last_id:expr, $inner:expr, $whole:expr, $kept:expr) => {
        #[async_trait::async_trait]
        impl crate::store::wire::Wire for $connection {
            async fn rows(
                &mut self,
                statement: &crate::store::wire::Statement,
                args: Vec<crate::store::wire::Arg>,
            ) -> sqlx::Result<Vec<crate::store::wire::Row>> {
                use crate::store::wire::{Arg, Cell};
                use sqlx::Row;
                let query = sqlx::query(sqlx::AssertSqlSafe(statement.sql.clone()));
                let mut query = query.persistent($kept);
                for arg in args {
                    query = match arg {
                        Arg::Int(n) => query.bind(n),
                        Arg::Text(text) => query.bind(text),
                        Arg::Name(name) => query.bind($name(name)),
                    };
                }
                let rows = query.fetch_all($inner(&mut *self)?).await?;
                let cells = |row| -> sqlx::Result<Vec<Cell>> {
                    let cell = |(i, kind)| match kind {
                        b'i' => <_ as Row>::try_get::<Option<i64>, _>(&row, i).map(Cell::Int),
                        _ => $text(&row, i).map(Cell::Text),
                    };
                    statement.shape.bytes().enumerate().map(cell).collect()
                };
                rows.into_iter().map(cells).collect()
            }

            async fn run(
                &mut self,
                statement: &crate::store::wire::Statement,
                args: Vec<crate::store::wire::Arg>,
            ) -> sqlx::Result<crate::store::wire::Done> {
                use crate::store::wire::{Arg, Done};
                let query = sqlx::query(sqlx::AssertSqlSafe(statement.sql.clone()));
                let mut query = query.persistent($kept);
                for arg in args {
                    query = match arg {
                        Arg::Int(n) => query.bind(n),
                        Arg::Text(text) => query.bind(text),
                        Arg::Name(name) => query.bind($name(name)),
                    };
                }
                let done = query.execute($inner(&mut *self)?).await?;
                Ok(Done { affected: done.rows_affected(), last_id: $last_id(&done) })
            }

            async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
                use sqlx::Executor;
                let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
                $inner(&mut *self)?.execute(sql).await.map(|_| ())
            }

            async fn close(self: Box<Self>) -> sqlx::Result<()> {
                sqlx::Connection::close($whole(*self)?).await
            }
        }
    };
}
pub(super) use wire;

/// Opens the connections of a pool.
#[async_trait]
pub(super) trait Connect: fmt::Debug + Send + Sync {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>>;
}
