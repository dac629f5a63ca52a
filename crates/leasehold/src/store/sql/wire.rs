//! One connection, and the small bounded pool of them.
//!
//! Not sqlx's own pool: a `begin()` of it that is cancelled halfway can leave a transaction open on
//! a connection that others then use. Here a connection goes back to the pool only after an
//! operation has ended on it, and is closed otherwise; closing is what rolls back everywhere.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::LIMIT;

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

/// One connection to a database.
#[async_trait]
pub(super) trait Wire: Send {
    /// Runs a statement and reads its rows.
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>>;
    /// Runs a statement that has none.
    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done>;
    /// Runs several statements without arguments in one round trip.
    async fn raw(&mut self, sql: &str) -> sqlx::Result<()>;
}

/// [`Wire`] for one of sqlx's connections. `$name` binds a lock's name, `$text` reads text,
/// `$last_id` reads LAST_INSERT_ID.
macro_rules! wire {
    ($connection:ty, $name:expr, $text:expr, $last_id:expr) => {
        crate::store::sql::wire::wire!(
            $connection,
            $name,
            $text,
            $last_id,
            std::convert::identity,
            true
        );
    };
    // `$inner` finds sqlx's connection in ours; `$kept` is whether it keeps prepared statements.
    ($connection:ty, $name:expr, $text:expr, $last_id:expr, $inner:expr, $kept:expr) => {
        #[async_trait::async_trait]
        impl crate::store::sql::wire::Wire for $connection {
            async fn rows(
                &mut self,
                statement: &crate::store::sql::wire::Statement,
                args: Vec<crate::store::sql::wire::Arg>,
            ) -> sqlx::Result<Vec<crate::store::sql::wire::Row>> {
                use crate::store::sql::wire::{Arg, Cell};
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
                let rows = query.fetch_all($inner(&mut *self)).await?;
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
                statement: &crate::store::sql::wire::Statement,
                args: Vec<crate::store::sql::wire::Arg>,
            ) -> sqlx::Result<crate::store::sql::wire::Done> {
                use crate::store::sql::wire::{Arg, Done};
                let query = sqlx::query(sqlx::AssertSqlSafe(statement.sql.clone()));
                let mut query = query.persistent($kept);
                for arg in args {
                    query = match arg {
                        Arg::Int(n) => query.bind(n),
                        Arg::Text(text) => query.bind(text),
                        Arg::Name(name) => query.bind($name(name)),
                    };
                }
                let done = query.execute($inner(&mut *self)).await?;
                Ok(Done { affected: done.rows_affected(), last_id: $last_id(&done) })
            }

            async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
                use sqlx::Executor;
                let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
                $inner(&mut *self).execute(sql).await.map(|_| ())
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

/// At most so many connections.
pub(super) struct Pool {
    connect: Arc<dyn Connect>,
    idle: Mutex<Vec<Box<dyn Wire>>>,
    room: Arc<Semaphore>,
    /// Held while connecting: one at a time. When a server comes back, all its clients want their
    /// connections at once, and making one costs both sides some milliseconds of hashing the
    /// password; meanwhile the first may have come free.
    connecting: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("room", &self.room).finish_non_exhaustive()
    }
}

/// A connection out of the pool; closed when dropped.
pub(super) struct Pooled {
    pub(super) wire: Box<dyn Wire>,
    /// Whether it was used before, so that the server may have closed it meanwhile.
    pub(super) used: bool,
    _room: OwnedSemaphorePermit,
}

impl Pool {
    pub(super) fn new(connect: Arc<dyn Connect>, size: usize) -> Self {
        let (idle, room) = (Mutex::default(), Arc::new(Semaphore::new(size)));
        Self { connect, idle, room, connecting: tokio::sync::Mutex::default() }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Box<dyn Wire>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn take(&self) -> sqlx::Result<Pooled> {
        let room = self.room.clone().acquire_owned().await;
        let room = room.map_err(|_| sqlx::Error::PoolClosed)?;
        // The last one used is the likeliest to be alive.
        if let Some(wire) = self.idle().pop() {
            return Ok(Pooled { wire, used: true, _room: room });
        }
        let _alone = self.connecting.lock().await;
        if let Some(wire) = self.idle().pop() {
            return Ok(Pooled { wire, used: true, _room: room });
        }
        let connected = tokio::time::timeout(LIMIT, self.connect.connect()).await;
        let wire = connected.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
        Ok(Pooled { wire, used: false, _room: room })
    }

    /// Takes back a connection on which nothing is under way.
    pub(super) fn put(&self, pooled: Pooled) {
        let Pooled { wire, _room, .. } = pooled;
        self.idle().push(wire);
    }

    /// Closes what lies idle: the server went away under one of them.
    pub(super) fn forget_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }
}
