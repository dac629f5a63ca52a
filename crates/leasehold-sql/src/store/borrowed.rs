//! Connections out of the caller's own pool.
//!
//! A service that has a pool of connections need not have a second one for its locks. The client keeps one
//! connection of its own, for renewals and for what is told to it, so that a pool of which all is in use, or
//! whose runtime is blocked, costs no lease. Calls that find it busy borrow: for a statement or a short
//! transaction, and nobody who waits for a lock keeps what he borrowed.
//!
//! - *It is made where it lives.* A connection is driven by the runtime that made it. So the pool is asked on
//!   its owner's runtime, and gets back what it lent there.
//! - *It comes back as it was*: nothing prepared, no setting changed, no transaction open. What a session is to
//!   be told is told to each transaction, as behind a pooler.
//! - *If a call is dropped, or fails, with it in its hands*, nobody knows what is open on it: it is closed, which
//!   rolls back everywhere, and the pool makes another.

use std::fmt;

use async_trait::async_trait;
use sqlx::pool::PoolConnection;
use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::limits::SLOW;
use super::wire::{Connect, Wire};

/// A connection that was borrowed. Dropped, it goes back if it was said to be clean, and is closed otherwise.
pub(super) struct Borrowed<DB: Database> {
    /// There until it is dropped or closed.
    connection: Option<PoolConnection<DB>>,
    /// The pool's.
    runtime: Handle,
    is_clean: bool,
}

impl<DB: Database> Borrowed<DB> {
    /// What is sent on it.
    pub(super) fn connection(&mut self) -> sqlx::Result<&mut DB::Connection> {
        self.connection.as_deref_mut().ok_or(sqlx::Error::PoolClosed)
    }

    /// Nothing is under way on it any more.
    pub(super) fn is_clean(&mut self) {
        self.is_clean = true;
    }

    /// Not the pool's any more.
    pub(super) fn detached(mut self) -> sqlx::Result<DB::Connection> {
        let runtime = self.runtime.clone();
        let _there = runtime.enter();
        self.connection.take().map(PoolConnection::detach).ok_or(sqlx::Error::PoolClosed)
    }
}

impl<DB: Database> Drop for Borrowed<DB> {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        // The pool takes it back, or makes another, in a task of its own.
        let _there = self.runtime.enter();
        match self.is_clean {
            true => drop(connection),
            false => drop(connection.detach()),
        }
    }
}

/// A pool that lends its connections.
pub(super) struct Lender<DB: Database> {
    pool: Pool<DB>,
    /// Its owner's.
    runtime: Handle,
    /// How its connections are spoken to.
    wire: Speak<DB>,
}

/// How a connection that was borrowed is spoken to.
pub(super) type Speak<DB> = Box<dyn Fn(Borrowed<DB>) -> sqlx::Result<Box<dyn Wire>> + Send + Sync>;

impl<DB: Database> Lender<DB> {
    pub(super) fn new(pool: Pool<DB>, runtime: Handle, wire: Speak<DB>) -> Self {
        Self { pool, runtime, wire }
    }
}

impl<DB: Database> fmt::Debug for Lender<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("pool", &self.pool).finish_non_exhaustive()
    }
}

#[async_trait]
impl<DB: Database> Connect for Lender<DB> {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let pool = self.pool.clone();
        // Ended with this call, if that is dropped.
        let mut asked = JoinSet::new();
        asked.spawn_on(async move { pool.acquire().await }, &self.runtime);
        // All in use, or closed, or its owner's runtime is blocked or has ended: whatever it is, ours will do.
        let lent = tokio::time::timeout(SLOW, asked.join_next()).await.ok().flatten();
        let lent = lent.and_then(Result::ok).and_then(Result::ok);
        let connection = Some(lent.ok_or(sqlx::Error::PoolTimedOut)?);
        let runtime = self.runtime.clone();
        (self.wire)(Borrowed { connection, runtime, is_clean: false })
    }
}
