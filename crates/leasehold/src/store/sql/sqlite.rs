//! SQLite: one file, one machine; whoever writes, writes alone.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteQueryResult, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{ConnectOptions, Row};

use super::url::{SqlUrl, Synchronous};
use super::wire::{Connect, Wire, wire};
use crate::error::Result;

fn text(row: &SqliteRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &SqliteQueryResult) -> u64 {
    0
}

wire!(SqliteConnection, std::convert::identity, text, no_id);

#[derive(Debug)]
pub(super) struct Sqlite(SqliteConnectOptions);

impl Sqlite {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(url.path()?)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(match url.synchronous {
                Synchronous::Full => SqliteSynchronous::Full,
                Synchronous::Normal => SqliteSynchronous::Normal,
                Synchronous::Off => SqliteSynchronous::Off,
            })
            .busy_timeout(Duration::from_secs(4))
            .disable_statement_logging();
        Ok(Self(options))
    }
}

#[async_trait]
impl Connect for Sqlite {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        Ok(Box::new(self.0.connect().await?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SqlStore;
    use super::super::rows::Cells;
    use super::super::wire::{Pooled, Statement};

    async fn setting(pooled: &mut Pooled, sql: &str, shape: &'static str) -> String {
        let statement = Statement { sql: sql.into(), shape };
        let rows = pooled.wire.rows(&statement, Vec::new()).await.unwrap();
        let mut cells = Cells::new(rows.into_iter().next().unwrap());
        match shape {
            "i" => cells.count::<i64>().unwrap().to_string(),
            _ => cells.text().unwrap(),
        }
    }

    #[tokio::test]
    async fn s61_connections_sync_as_the_url_says() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        for (wish, expected) in [
            ("", "2"),
            ("?synchronous=full", "2"),
            ("?synchronous=normal", "1"),
            ("?synchronous=off", "0"),
        ] {
            let here = tokio::runtime::Handle::current();
            let store = SqlStore::open(&format!("{url}{wish}"), &here).await.unwrap();
            for pool in [&store.shared.pool, &store.shared.beats] {
                let mut pooled = pool.take().await.unwrap();
                let synchronous = setting(&mut pooled, "PRAGMA synchronous", "i").await;
                assert_eq!(synchronous, expected, "{wish}");
                assert_eq!(setting(&mut pooled, "PRAGMA journal_mode", "t").await, "wal");
            }
        }
    }
}
