//! What the service does, under its locks.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use leasehold::once::Ran;
use leasehold::{Guard, Leasehold, database, fence, once};
use serde::Deserialize;
use sqlx::PgPool;

use crate::app::App;
use crate::error::{Failure, Reply};
use crate::locked::Locked;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS bank_orders (id BIGSERIAL PRIMARY KEY, item TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS bank_accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
    CREATE TABLE IF NOT EXISTS bank_books (term BIGINT NOT NULL, entry BIGSERIAL)";

/// Makes the tables. One instance at a time: `CREATE TABLE IF NOT EXISTS` of two at once fails in PostgreSQL.
pub(crate) async fn install(pool: &PgPool, locks: &Leasehold) -> leasehold::Result<()> {
    let make = async |_| sqlx::raw_sql(TABLES).execute(pool).await.map_err(database::error);
    locks.mutex("bank:install").try_run(make).await.map(drop)
}

#[derive(Deserialize)]
pub(crate) struct Order {
    item: String,
}

/// Done once for each key, however often it is sent, and whichever instance gets it: key and order are in one
/// transaction. No lock is needed for that.
pub(crate) async fn order(
    State(app): State<App>,
    headers: HeaderMap,
    Query(order): Query<Order>,
) -> Reply<(StatusCode, String)> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let key = key.ok_or_else(|| Failure::bad("say which order it is: Idempotency-Key"))?;
    let mut tx = app.pool.begin().await?;
    let ran = once(format!("order:{key}")).run_in(&mut tx, async |tx| {
        let insert = "INSERT INTO bank_orders (item) VALUES ($1) RETURNING id";
        let insert = sqlx::query_scalar(insert).bind(&order.item);
        let id: i64 = insert.fetch_one(&mut **tx).await?;
        Ok::<_, Failure>(id.to_string())
    });
    let ran = ran.await?;
    // Without an answer it is asked again, under its key.
    tx.commit().await?;
    Ok(match ran {
        Ran::First(id) => (StatusCode::CREATED, id),
        Ran::Duplicate(id) => (StatusCode::OK, id),
    })
}

#[derive(Deserialize)]
pub(crate) struct Deposit {
    amount: i64,
}

/// Reads, thinks, writes: two at once would lose money, so the account is locked. And if this process is stopped
/// for longer than its lease, somebody else may have the lock: so it shows its token to the fence before it reads
/// anything, in the transaction that writes. From there to the commit nobody else gets past the fence, and whoever
/// has been past it with a greater token has this one refused.
pub(crate) async fn deposit(
    State(app): State<App>,
    locked: Locked,
    Query(deposit): Query<Deposit>,
) -> Reply<String> {
    let balance = "SELECT balance FROM bank_accounts WHERE id = $1";
    let mut tx = app.pool.begin().await?;
    fence::sql::check_guard(&mut tx, &locked.guard).await?;
    let reading = sqlx::query_scalar(balance).bind(locked.id);
    let before: Option<i64> = reading.fetch_optional(&mut *tx).await?;
    let after = before.unwrap_or(0).checked_add(deposit.amount);
    let after = after.ok_or_else(|| Failure::bad("more than there is"))?;
    let write =
        "INSERT INTO bank_accounts VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET balance = $2";
    sqlx::query(write).bind(locked.id).bind(after).execute(&mut *tx).await?;
    // Of a commit without an answer nobody knows what became of it.
    tx.commit().await.map_err(Failure::unknown)?;
    Ok(after.to_string())
}

/// Dear, so only two at once, on all machines; who comes third is told so at once, and does not wait.
pub(crate) async fn report(State(app): State<App>) -> Reply<&'static str> {
    let _permit = app.locks.semaphore("reports", 2).try_acquire().await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok("all is well\n")
}

/// One instance does this, for as long as it leads; another takes over.
pub(crate) async fn close_the_books(app: App) {
    let election = app.books.clone().on_pause(|error, pause| {
        eprintln!("{error}; standing again in {pause:?}");
    });
    let ended = election.lead(async |term| {
        let ended = keep_books(&app, &term).await;
        eprintln!("term {} ends: {ended:?}", term.token());
        // Stand again: the next term may have a database that answers.
        ControlFlow::<()>::Continue(())
    });
    if let Err(error) = ended.await {
        // No permission, a bad name: what no waiting mends.
        eprintln!("nobody closes the books here: {error}");
    }
}

/// Writes an entry now and then, each with the term: one of an earlier term is refused. Why it cannot go on.
async fn keep_books(app: &App, term: &Guard) -> Reply<Infallible> {
    loop {
        let mut tx = app.pool.begin().await?;
        fence::sql::check_guard(&mut tx, term).await?;
        let entry = sqlx::query("INSERT INTO bank_books (term) VALUES ($1)");
        entry.bind(i64::from(term.token())).execute(&mut *tx).await?;
        tx.commit().await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
