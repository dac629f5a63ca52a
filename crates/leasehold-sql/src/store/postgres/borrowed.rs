//! Connections borrowed from the caller's own pool.
//!
//! A service that has a connection pool does not need a second one for its locks. The client keeps
//! one connection of its own for renewals and notifications. No lease is lost when the caller's
//! pool is exhausted or its runtime is blocked. While this connection is busy, calls borrow others,
//! each for one statement or a short transaction. A waiter keeps no borrowed connection.
//!
//! - **Runtime.** A connection is driven by the runtime that opened it. The client therefore
//!   requests connections on the runtime of the pool's owner, and returns them there.
//! - **State.** A connection is returned unchanged: nothing prepared, no setting changed, no open
//!   transaction. Session settings are sent with each transaction, as behind a pooler.
//! - **Dropped or failed calls.** It is then unknown what is open on the connection. The connection
//!   is closed, which rolls back its transaction in any case, and the pool opens another.

use std::fmt;

use async_trait::async_trait;
use sqlx::pool::PoolConnection;
use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::store::limits::SLOW;
use crate::store::wire::{Connect, Wire};

/// A borrowed connection. When dropped, it is returned to the pool if it was marked as clean, and
/// closed otherwise.
pub(in crate::store) struct Borrowed<DB: Database> {
    /// `Some` until this value is dropped or the connection is detached.
    connection: Option<PoolConnection<DB>>,
    /// The runtime of the pool.
    runtime: Handle,
    is_clean: bool,
}

impl<DB: Database> Borrowed<DB> {
    /// Returns the connection, to send statements on it.
    pub(in crate::store) fn connection(&mut self) -> sqlx::Result<&mut DB::Connection> {
        self.connection.as_deref_mut().ok_or(sqlx::Error::PoolClosed)
    }

    /// Marks the connection as clean, because no operation is in progress on it.
    pub(in crate::store) fn is_clean(&mut self) {
        self.is_clean = true;
    }

    /// Removes the connection from the pool and returns it.
    pub(in crate::store) fn detached(mut self) -> sqlx::Result<DB::Connection> {
        let runtime = self.runtime.clone();
        let _there = runtime.enter();
        self.connection.take().map(PoolConnection::detach).ok_or(sqlx::Error::PoolClosed)
    }
}

impl<DB: Database> Drop for Borrowed<DB> {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        // The pool takes the connection back, or opens another, in a task of its own.
        let _there = self.runtime.enter();
        match self.is_clean {
            true => drop(connection),
            false => drop(connection.detach()),
        }
    }
}

/// A pool of the caller that lends its connections.
pub(in crate::store) struct BorrowedPool<DB: Database> {
    pool: Pool<DB>,
    /// The runtime of the pool's owner.
    runtime: Handle,
    /// Creates the `Wire` for a borrowed connection.
    wire: Speak<DB>,
}

/// A function that creates the `Wire` for a borrowed connection.
pub(in crate::store) type Speak<DB> =
    Box<dyn Fn(Borrowed<DB>) -> sqlx::Result<Box<dyn Wire>> + Send + Sync>;

impl<DB: Database> BorrowedPool<DB> {
    pub(in crate::store) fn new(pool: Pool<DB>, runtime: Handle, wire: Speak<DB>) -> Self {
        Self { pool, runtime, wire }
    }
}

impl<DB: Database> fmt::Debug for BorrowedPool<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowedPool").field("pool", &self.pool).finish_non_exhaustive()
    }
}

#[async_trait]
impl<DB: Database> Connect for BorrowedPool<DB> {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let pool = self.pool.clone();
        // The `JoinSet` stops the request if this call is dropped.
        let mut requests = JoinSet::new();
        requests.spawn_on(async move { pool.acquire().await }, &self.runtime);
        // The pool is exhausted or closed, or its owner's runtime is blocked or has ended. In each
        // case the caller uses one of the client's own connections.
        let lent = tokio::time::timeout(SLOW, requests.join_next()).await.ok().flatten();
        let lent = lent.and_then(Result::ok).and_then(Result::ok);
        let connection = Some(lent.ok_or(sqlx::Error::PoolTimedOut)?);
        let runtime = self.runtime.clone();
        (self.wire)(Borrowed { connection, runtime, is_clean: false })
    }
}
