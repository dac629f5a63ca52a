//! PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::ConnectOptions;
use sqlx::Row as _;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgListener, PgPoolOptions, PgQueryResult, PgRow,
};

use super::fault::Failure;
use super::url::SqlUrl;
use super::waiters::Waiters;
use super::wire::{Arg, Connect, Done, Row, Statement, Wire, wire};
use crate::claim::ClaimId;
use crate::error::Result;
use crate::store::Signal;

fn text(row: &PgRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &PgQueryResult) -> u64 {
    0
}

wire!(PgConnection, std::convert::identity, text, no_id);

#[derive(Debug)]
pub(super) struct Postgres {
    options: PgConnectOptions,
    pooler: bool,
}

impl Postgres {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let options = url.driver.parse::<PgConnectOptions>().map_err(Failure::from);
        let options = options.map_err(Failure::into_error)?.disable_statement_logging();
        let mut options = match options.get_application_name() {
            Some(_) => options,
            None => options.application_name("leasehold"),
        };
        if url.pooler {
            // A prepared statement would be looked for on another server connection.
            options = options.statement_cache_capacity(0);
        }
        Ok(Self { options, pooler: url.pooler })
    }

    pub(super) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }
}

#[async_trait]
impl Connect for Postgres {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let connection = self.options.connect().await?;
        Ok(match self.pooler {
            true => Box::new(BehindPooler { connection, within: false }),
            false => Box::new(connection),
        })
    }
}

/// A connection through a pooler that lends its server connections for one transaction each. A
/// statement with arguments is several messages, which must meet one server: each is put into a
/// transaction.
struct BehindPooler {
    connection: PgConnection,
    within: bool,
}

impl BehindPooler {
    async fn enter(&mut self) -> sqlx::Result<()> {
        match self.within {
            true => Ok(()),
            false => Wire::raw(&mut self.connection, "BEGIN").await,
        }
    }

    async fn exit<T>(&mut self, done: sqlx::Result<T>) -> sqlx::Result<T> {
        if !self.within {
            let end = if done.is_ok() { "COMMIT" } else { "ROLLBACK" };
            Wire::raw(&mut self.connection, end).await?;
        }
        done
    }
}

#[async_trait]
impl Wire for BehindPooler {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>> {
        self.enter().await?;
        let done = self.connection.rows(statement, args).await;
        self.exit(done).await
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        self.enter().await?;
        let done = self.connection.run(statement, args).await;
        self.exit(done).await
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        self.within = sql.starts_with("BEGIN");
        Wire::raw(&mut self.connection, sql).await
    }
}

/// How long after a failure listening begins anew.
const LISTEN_AGAIN: Duration = Duration::from_millis(200);

/// Listens for what other clients grant to ours, on one connection of its own. Never ends by
/// itself. What was sent while nobody listened is made good by asking.
pub(super) async fn listen(options: PgConnectOptions, channel: String, waiters: Arc<Waiters>) {
    while waiters.count() == 0 {
        waiters.more().await;
    }
    loop {
        let _ = listen_once(options.clone(), &channel, &waiters).await;
        waiters.ask_all();
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

async fn listen_once(
    options: PgConnectOptions,
    channel: &str,
    waiters: &Waiters,
) -> sqlx::Result<()> {
    // The listener wants a pool; this one is its only connection.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(options);
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(channel).await?;
    waiters.ask_all();
    while let Some(message) = listener.try_recv().await? {
        if let Some((id, signal)) = read(message.payload()) {
            waiters.tell(id, signal);
        }
    }
    Ok(())
}

/// What is sent to the client of a claim that was granted.
pub(super) fn message(id: ClaimId, token: crate::claim::Token) -> String {
    format!("{} {token}", id.to_hex())
}

fn read(message: &str) -> Option<(ClaimId, Signal)> {
    let (id, token) = message.split_once(' ')?;
    Some((ClaimId::from_hex(id)?, Signal::Granted(token.parse().ok()?)))
}
