//! Contending clients, and the counters of their server.

use std::time::Duration;

use leasehold::Client;
use sqlx::{Connection, MySqlConnection, PgConnection};
use tokio::runtime::{Builder, Runtime};

use crate::contention::Outcome;
use crate::measure::{Effort, Result};
use crate::queued;

const CLIENTS: usize = 8;

/// Where a server counts the statements that it receives.
pub(crate) enum Counter {
    Postgres(String),
    /// The URL, and the schema of the counters.
    MariaDb(String, &'static str),
}

/// A connection for reading the counter.
enum Counting {
    Postgres(PgConnection),
    MariaDb(MySqlConnection, &'static str),
}

impl Counter {
    async fn connect(&self) -> Result<Counting> {
        Ok(match self {
            Self::Postgres(url) => Counting::Postgres(PgConnection::connect(url).await?),
            Self::MariaDb(url, counters) => {
                Counting::MariaDb(MySqlConnection::connect(url).await?, counters)
            }
        })
    }
}

impl Counting {
    async fn count(&mut self) -> Result<f64> {
        let count: i64 = match self {
            Self::Postgres(c) => {
                let sql = "SELECT sum(calls)::bigint FROM pg_stat_statements";
                sqlx::query_scalar(sql).fetch_one(c).await?
            }
            Self::MariaDb(c, counters) => {
                let sql = format!(
                    "SELECT CAST(variable_value AS SIGNED) FROM {counters}.global_status WHERE \
                     variable_name = 'QUESTIONS'"
                );
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(c).await?
            }
        };
        Ok(count as f64)
    }
}

/// Contending clients.
pub(crate) struct Bed {
    pub(crate) runtime: Runtime,
    clients: Vec<Client>,
    counter: Option<Counter>,
}

impl Bed {
    pub(crate) fn new(url: &str, n: usize, counter: impl Fn() -> Option<Counter>) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let connect = || runtime.block_on(leasehold::connect(url));
        // One more client holds the lock until all contenders wait.
        let clients: Result<Vec<_>, _> = (0..=CLIENTS.min(n)).map(|_| connect()).collect();
        Ok(Self { runtime, clients: clients?, counter: counter() })
    }

    pub(crate) fn contend(&self, n: usize, effort: Effort) -> Result<Outcome> {
        self.runtime.block_on(self.contend_here(n, effort))
    }

    async fn contend_here(&self, n: usize, effort: Effort) -> Result<Outcome> {
        let mut counting = match &self.counter {
            Some(counter) => Some(counter.connect().await?),
            None => None,
        };
        let count = async || match &mut counting {
            Some(counting) => counting.count().await,
            None => Ok(0.0),
        };
        queued::contend(&self.clients, n, effort, Duration::ZERO, count).await
    }
}
