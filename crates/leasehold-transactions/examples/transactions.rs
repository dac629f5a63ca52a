//! A lock, a version column, an idempotency key and a fence, each in a transaction of the program's
//! own database.
//!
//! ```sh
//! cargo run -p leasehold-transactions --features sqlite --example transactions
//! ```

use leasehold::database::{self, error};
use leasehold::versioned::{Retry, Versioned, retry};
use leasehold::{ErrorKind, fence, lock_in, once};

#[tokio::main]
async fn main() -> leasehold::Result<()> {
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1); // or PgPool, MySqlPool
    let pool = pool.connect("sqlite::memory:").await.map_err(error)?;
    database::install(&pool).await?;
    let stock =
        "CREATE TABLE stock (id BIGINT PRIMARY KEY, amount BIGINT, version BIGINT NOT NULL)";
    sqlx::query(stock).execute(&pool).await.map_err(error)?;
    sqlx::query("INSERT INTO stock VALUES (7, 10, 1)").execute(&pool).await.map_err(error)?;

    // A lock that commit and rollback release
    let mut tx = pool.begin().await.map_err(error)?;
    lock_in(&mut tx, "stock:7").await?; // before anything is read
    let sell = "UPDATE stock SET amount = amount - 1, version = version + 1 WHERE id = 7";
    sqlx::query(sell).execute(&mut *tx).await.map_err(error)?;
    tx.commit().await.map_err(error)?;

    // A version column: if another client was faster, read again
    let stock = Versioned::new("stock", "id", "version");
    retry(Retry::default(), || async {
        let mut tx = pool.begin().await.map_err(error)?;
        let read = sqlx::query_as("SELECT amount, version FROM stock WHERE id = 7");
        let (amount, version): (i64, i64) = read.fetch_one(&mut *tx).await.map_err(error)?;
        stock.update(&mut tx, 7, version, &[("amount", (amount - 1).into())]).await?;
        tx.commit().await.map_err(error)
    })
    .await?;

    // An idempotency key: work and key commit together, once
    for time in 1..=2 {
        let mut tx = pool.begin().await.map_err(error)?;
        let ran = once("payment:8a1f").run_in(&mut tx, async |tx| {
            sqlx::query(sell).execute(&mut **tx).await.map_err(error)?;
            Ok::<_, leasehold::Error>("paid 100".to_owned())
        });
        let ran = ran.await?;
        tx.commit().await.map_err(error)?;
        assert_eq!((ran.is_first(), &*ran.into_outcome()), (time == 1, "paid 100"));
    }

    // A fence: the transaction rejects a late holder of a lock that is elsewhere
    let locks = leasehold::connect("memory:").await?;
    let late = locks.mutex("stock:7").lock().await?.token(); // this hold has ended
    let guard = locks.mutex("stock:7").lock().await?;
    let mut tx = pool.begin().await.map_err(error)?;
    fence::sql::check_guard(&mut tx, &guard).await?; // before anything is read
    sqlx::query(sell).execute(&mut *tx).await.map_err(error)?;
    tx.commit().await.map_err(error)?;
    let mut tx = pool.begin().await.map_err(error)?;
    let refused = fence::sql::check(&mut tx, "stock:7", late).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StaleToken);
    tx.rollback().await.map_err(error)?;

    let left = sqlx::query_scalar::<_, i64>("SELECT amount FROM stock WHERE id = 7");
    println!("{} items left", left.fetch_one(&pool).await.map_err(error)?);
    Ok(())
}
