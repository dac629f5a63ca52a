//! One connection, and the small bounded pool of them.
//!
//! Not sqlx's own pool: a `begin()` of it that is cancelled halfway can leave a transaction open on
//! a connection that others then use. Here a connection goes back to the pool only after an
//! operation has ended on it, and is closed otherwise; closing is what rolls back everywhere.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{LIMIT, lock};

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
    /// Says goodbye, as the server's protocol wants it.
    async fn close(self: Box<Self>) -> sqlx::Result<()>;
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
            std::convert::identity,
            true
        );
    };
    // `$inner` finds sqlx's connection in ours, and `$whole` takes it out; `$kept` is whether it keeps
    // prepared statements.
    ($connection:ty, $name:expr, $text:expr, $last_id:expr, $inner:expr, $whole:expr, $kept:expr) => {
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

            async fn close(self: Box<Self>) -> sqlx::Result<()> {
                sqlx::Connection::close($whole(*self)).await
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

/// How long a goodbye may take: SQLite writes its log back to the file.
const FAREWELL: Duration = Duration::from_secs(4);

/// Connections on which nothing is under way.
type Idle = Mutex<Vec<Box<dyn Wire>>>;

/// At most so many connections.
pub(super) struct Pool {
    connect: Arc<dyn Connect>,
    idle: Arc<Idle>,
    size: usize,
    room: Arc<Semaphore>,
    /// Held while connecting: one at a time. When a server comes back, all its clients want their
    /// connections at once, and making one costs both sides some milliseconds of hashing the
    /// password; meanwhile the first may have come free.
    connecting: tokio::sync::Mutex<()>,
    /// Whose idle connection is as good as a new one, and there already.
    lender: Option<Arc<Idle>>,
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
    doubt: Doubt,
}

/// A connection that does not come back was found dead, or silent, or was given up for being so. Its
/// like lie idle beside it: they go with it, so that nobody finds that out one by one.
struct Doubt(Option<Arc<Idle>>);

impl Drop for Doubt {
    fn drop(&mut self) {
        if let Some(idle) = &self.0 {
            forget(idle);
        }
    }
}

fn forget(idle: &Idle) {
    // Closed after the lock.
    let connections = std::mem::take(&mut *lock(idle));
    drop(connections);
}

impl Pool {
    pub(super) fn new(connect: Arc<dyn Connect>, size: usize) -> Self {
        let (idle, room) = (Arc::default(), Arc::new(Semaphore::new(size)));
        Self { connect, idle, size, room, connecting: tokio::sync::Mutex::default(), lender: None }
    }

    /// Another pool of such connections, which takes an idle one of ours before it makes one.
    pub(super) fn beside(&self, size: usize) -> Self {
        Self { lender: Some(self.idle.clone()), ..Self::new(self.connect.clone(), size) }
    }

    fn idle(&self) -> Option<Box<dyn Wire>> {
        let own = lock(&self.idle).pop();
        own.or_else(|| self.lender.as_ref().and_then(|lender| lock(lender).pop()))
    }

    pub(super) async fn take(&self) -> sqlx::Result<Pooled> {
        let room = self.room.clone().acquire_owned().await;
        let room = room.map_err(|_| sqlx::Error::PoolClosed)?;
        // The last one used is the likeliest to be alive.
        if let Some(wire) = self.idle() {
            return Ok(self.pooled(wire, true, room));
        }
        let _alone = self.connecting.lock().await;
        if let Some(wire) = self.idle() {
            return Ok(self.pooled(wire, true, room));
        }
        // Whoever accepts and then says nothing must not keep a place in the pool for ever.
        let connected = tokio::time::timeout(LIMIT, self.connect.connect()).await;
        let wire = connected.unwrap_or_else(|_| {
            let what = format!("no connection within {LIMIT:?}");
            Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, what)))
        })?;
        Ok(self.pooled(wire, false, room))
    }

    fn pooled(&self, wire: Box<dyn Wire>, used: bool, room: OwnedSemaphorePermit) -> Pooled {
        Pooled { wire, used, _room: room, doubt: Doubt(Some(self.idle.clone())) }
    }

    /// Takes back a connection on which nothing is under way.
    pub(super) fn put(&self, pooled: Pooled) {
        let Pooled { wire, _room, mut doubt, .. } = pooled;
        doubt.0 = None;
        lock(&self.idle).push(wire);
    }

    /// Closes what lies idle: one of them does not answer.
    pub(super) fn forget_idle(&self) {
        forget(&self.idle);
    }

    /// Says goodbye on every connection. Those that are just in use are waited for, not for long;
    /// who comes meanwhile or later is served as before.
    pub(super) async fn disconnect(&self) {
        let used = Instant::now() + FAREWELL;
        while self.room.available_permits() < self.size && Instant::now() < used {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let idle = std::mem::take(&mut *lock(&self.idle));
        for wire in idle {
            // Who does not answer is gone all the same.
            let _ = tokio::time::timeout(FAREWELL, wire.close()).await;
        }
    }
}
