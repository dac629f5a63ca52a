//! PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgListener, PgPoolOptions, PgQueryResult, PgRow,
};
use sqlx::{ConnectOptions, Row};

use super::fault::Failure;
use super::url::SqlUrl;
use super::waiters::Waiters;
use super::wire::{Connect, Wire, wire};
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
pub(super) struct Postgres(PgConnectOptions);

impl Postgres {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let options = url.driver.parse::<PgConnectOptions>().map_err(Failure::from);
        let options = options.map_err(Failure::into_error)?.disable_statement_logging();
        Ok(Self(if options.get_application_name().is_none() {
            options.application_name("leasehold")
        } else {
            options
        }))
    }

    pub(super) fn options(&self) -> PgConnectOptions {
        self.0.clone()
    }
}

#[async_trait]
impl Connect for Postgres {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        Ok(Box::new(self.0.connect().await?))
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
