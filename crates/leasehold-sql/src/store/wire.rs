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
    /// A lock's name: text, or bytes where text would be folded or padded when compared.
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

/// SQL, and what its columns are: `i` a number, `t` text.
#[derive(Clone, Debug)]
pub(super) struct Statement {
    pub(super) sql: Arc<str>,
    pub(super) shape: &'static str,
}

/// What a statement without rows did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) affected: u64,
    /// MySQL: what the statement gave to LAST_INSERT_ID().
    pub(super) last_id: u64,
}

/// One step of a [script](Wire::script).
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// Words without arguments, each of them one statement.
    Raw(Cow<'a, str>),
    /// Its rows.
    Rows(&'a Statement, Vec<Arg>),
    /// Changes exactly one row, or fails with what [`Failure`](super::fault::Failure) calls a conflict.
    One(&'a Statement, Vec<Arg>),
}

/// One connection to a database.
#[async_trait]
pub(super) trait Wire: Send {
    /// Runs a statement and reads its rows.
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>>;
    /// Runs a statement that has none.
    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done>;
    /// Runs several statements without arguments in one round trip.
    async fn raw(&mut self, sql: &str) -> sqlx::Result<()>;
    /// Runs these steps one after the other, in one round trip where the database can. It stops at the
    /// first that fails; `done` gets the rows of those that were done.
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
    /// Says goodbye, as the server's protocol wants it.
    async fn close(self: Box<Self>) -> sqlx::Result<()>;
    /// Whether it is somebody else's.
    fn is_borrowed(&self) -> bool {
        false
    }
    /// Nothing is under way on it any more: one that is borrowed goes back as it is dropped.
    fn rests(&mut self) {}
    /// The next message that was sent to the channel it listens to; may be dropped at any time. `None`:
    /// the connection is gone.
    async fn hear(&mut self) -> sqlx::Result<Option<String>> {
        std::future::pending().await
    }
}

/// A connection that is sqlx's.
pub(super) fn itself<C>(connection: C) -> sqlx::Result<C> {
    Ok(connection)
}

/// [`Wire`] for one of sqlx's connections. `$name` binds a lock's name, `$text` reads text,
/// `$last_id` reads LAST_INSERT_ID.
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
    // `$inner` finds sqlx's connection in ours, and `$whole` takes it out, if it is there; `$kept` is whether it
    // keeps prepared statements.
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

/// What a pool is a pool of.
#[async_trait]
pub(super) trait Connect: fmt::Debug + Send + Sync {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>>;
}
