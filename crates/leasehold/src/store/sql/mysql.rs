//! MySQL and MariaDB, InnoDB.

use async_trait::async_trait;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlQueryResult, MySqlRow};
use sqlx::{ConnectOptions, Row};

use super::fault::Failure;
use super::url::SqlUrl;
use super::wire::{Connect, Wire, wire};
use crate::error::Result;

fn text(row: &MySqlRow, i: usize) -> sqlx::Result<Option<String>> {
    let bytes: Option<Vec<u8>> = row.try_get(i)?;
    let decoded = bytes.map(String::from_utf8).transpose();
    decoded.map_err(|e| sqlx::Error::Decode(e.into()))
}

fn last_id(done: &MySqlQueryResult) -> u64 {
    done.last_insert_id()
}

wire!(MySqlConnection, String::into_bytes, text, last_id);

#[derive(Debug)]
pub(super) struct MySql(MySqlConnectOptions);

impl MySql {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let driver = url.driver.replacen("mariadb:", "mysql:", 1);
        let options = driver.parse::<MySqlConnectOptions>().map_err(Failure::from);
        Ok(Self(options.map_err(Failure::into_error)?.disable_statement_logging()))
    }
}

#[async_trait]
impl Connect for MySql {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let mut connection = self.0.connect().await?;
        // Each statement sees what was committed before it, and locks no gaps. The time zone has no
        // summer, so that SYSDATE() can be read back without doubt. The mode is ours, since some
        // change the meaning of a statement (MariaDB: SIMULTANEOUS_ASSIGNMENT).
        let session = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                       SET SESSION time_zone = '+00:00', autocommit = 1, innodb_lock_wait_timeout = 5, \
                       sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'";
        for statement in session.split("; ") {
            Wire::raw(&mut connection, statement).await?;
        }
        Ok(Box::new(connection))
    }
}
