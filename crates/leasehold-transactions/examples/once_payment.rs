//! A payment that is made once, however often the customer presses the button.
//!
//! ```sh
//! cargo run -p leasehold-transactions --features sqlite --example once_payment
//! ```
//!
//! A lock is neither necessary nor sufficient for this. The outcome must be stored permanently,
//! under a key that the *client* has generated (here `payment:8a1f`). `once` does that in the
//! caller's own database. Eight requests with one key arrive at the same time, and again after a
//! "restart". The bank receives one request, and all callers get the same receipt. The bank gets
//! the key too. If an attempt crashes after the bank's answer and before the outcome is stored, the
//! next attempt sends the same key. A bank that supports such keys then still pays only once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::once::Ran;
use leasehold::{Error, database, once};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

/// Simulates the bank, and counts how often it has paid.
async fn ask_the_bank(key: &str, paid: &AtomicU32) -> String {
    tokio::time::sleep(Duration::from_millis(100)).await;
    let number = paid.fetch_add(1, Ordering::SeqCst) + 1;
    format!("receipt {number} for {key}")
}

async fn pay(pool: &sqlx::SqlitePool, key: &str, paid: &AtomicU32) -> Result<String, Error> {
    let work = |_attempt| async { Ok::<_, Error>(ask_the_bank(key, paid).await) };
    match once(key).run(pool, work).await? {
        Ran::First(receipt) => Ok(receipt),
        Ran::Duplicate(receipt) => Ok(format!("{receipt} (again)")),
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let path = std::env::temp_dir().join(format!("leasehold-example-{}.db", std::process::id()));
    let open = || {
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_secs(30));
        SqlitePoolOptions::new().max_connections(4).connect_with(options)
    };
    let paid = Arc::new(AtomicU32::new(0));
    for restart in 0..2 {
        let pool = open().await.map_err(database::error)?;
        database::install(&pool).await?;
        let request = |_| {
            let (pool, paid) = (pool.clone(), paid.clone());
            tokio::spawn(async move { pay(&pool, "payment:8a1f", &paid).await })
        };
        for request in (0..8).map(request).collect::<Vec<_>>() {
            let receipt = request.await.expect("no panic")?;
            println!("start {restart}: {receipt}");
            assert!(receipt.starts_with("receipt 1 for payment:8a1f"));
        }
        pool.close().await;
    }
    println!("16 requests, paid {} time", paid.load(Ordering::SeqCst));
    assert_eq!(paid.load(Ordering::SeqCst), 1);
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", path.display()));
    }
    Ok(())
}
