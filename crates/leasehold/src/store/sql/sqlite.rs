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
