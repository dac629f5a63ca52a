//! SQLite: one file, one machine; whoever writes, writes alone.
//!
//! The file should have nothing else in it: a transaction of the application's that writes for as
//! long as a lease stands in the way of the lease's own renewal. Where it has, its journal mode is
//! left as it is (the mode is the file's, not the connection's), and people are told. On a network
//! file system SQLite's own locks do not exclude other machines, so there it is refused.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteQueryResult, SqliteRow, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Row};

use super::rows::Cells;
use super::url::{SqlUrl, Synchronous};
use super::wire::{Connect, Statement, Wire, wire};
use leasehold_core::{Error, ErrorKind, Result, kit};

fn text(row: &SqliteRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &SqliteQueryResult) -> u64 {
    0
}

wire!(SqliteConnection, std::convert::identity, text, no_id);

#[derive(Debug)]
pub(super) struct Sqlite {
    options: SqliteConnectOptions,
    foreign: String,
}

/// Finds a table or a view that is not ours.
pub(super) fn foreign(url: &SqlUrl) -> String {
    let ours = ["locks", "claims", "schema"].map(|table| format!("'{}{table}'", url.prefix));
    format!(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') \
         AND substr(name, 1, 7) <> 'sqlite_' AND name NOT IN ({}) ORDER BY name LIMIT 1",
        ours.join(", ")
    )
}

/// The name of such a table in the file, if there is one.
pub(super) async fn shared_with(
    wire: &mut dyn Wire,
    foreign: &str,
) -> sqlx::Result<Option<String>> {
    let statement = Statement { sql: foreign.into(), shape: "t" };
    let rows = wire.rows(&statement, Vec::new()).await?;
    let name = rows.into_iter().next().and_then(|row| Cells::new(row).text().ok());
    Ok(name.map(|name| name.chars().filter(|c| !c.is_control()).take(60).collect()))
}

/// Refuses what other machines see as well.
fn local(path: &Path) -> Result<()> {
    let beside = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = beside.unwrap_or(Path::new("."));
    // What cannot be looked at cannot be opened either, and that error says why.
    let magic = kit::magic(path).or_else(|_| kit::magic(directory));
    magic.map_or(Ok(()), of_this_machine)
}

/// Refuses a file system by its number, as statfs(2) tells it.
fn of_this_machine(magic: u32) -> Result<()> {
    match kit::remote(magic) {
        None => Ok(()),
        Some(name) => {
            let what = format!(
                "the database file is on {name}, where SQLite's locks do not exclude other machines: \
                 use a file on a local disk, or, for many machines, a store with a server"
            );
            Err(Error::new(ErrorKind::Config, what))
        }
    }
}

impl Sqlite {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        local(Path::new(url.path()?))?;
        let options = SqliteConnectOptions::new()
            .filename(url.path()?)
            .create_if_missing(true)
            .synchronous(match url.synchronous {
                Synchronous::Full => SqliteSynchronous::Full,
                Synchronous::Normal => SqliteSynchronous::Normal,
                Synchronous::Off => SqliteSynchronous::Off,
            })
            .busy_timeout(Duration::from_secs(4))
            .disable_statement_logging();
        Ok(Self { options, foreign: foreign(url) })
    }
}

#[async_trait]
impl Connect for Sqlite {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let mut connection = self.options.connect().await?;
        if shared_with(&mut connection, &self.foreign).await?.is_none() {
            Wire::raw(&mut connection, "PRAGMA journal_mode = WAL").await?;
        }
        Ok(Box::new(connection))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SqlStore;
    use super::super::pool::Pooled;
    use super::super::rows::Cells;
    use super::super::wire::Statement;

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

    #[test]
    fn f33_a_file_on_a_network_file_system_is_refused() {
        let told = super::of_this_machine(0x6969).unwrap_err();
        assert_eq!(told.kind(), leasehold_core::ErrorKind::Config);
        assert!(told.to_string().contains("is on NFS"), "{told}");
        super::of_this_machine(0xef53).unwrap();
        let here = tempfile::tempdir().unwrap();
        super::local(&here.path().join("not there yet.db")).unwrap();
    }
}
