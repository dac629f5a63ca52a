//! The requests of the service, and the job that closes the books.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use leasehold::once::Ran;
use leasehold::{Client, MutexGuard, database, fence, once};
use serde::Deserialize;
use sqlx::PgPool;

use crate::app::App;
use crate::error::{Failure, Reply};
use crate::locked::Locked;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS bank_orders (id BIGSERIAL PRIMARY KEY, item TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS bank_accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
    CREATE TABLE IF NOT EXISTS bank_books (term BIGINT NOT NULL, entry BIGSERIAL)";

/// Creates the tables. Only one instance does so at a time, because concurrent `CREATE TABLE IF NOT
/// EXISTS` can fail in PostgreSQL.
pub(crate) async fn install(pool: &PgPool, locks: &Client) -> leasehold::Result<()> {
    let make = async |_| sqlx::raw_sql(TABLES).execute(pool).await.map_err(database::error);
    locks.mutex("bank:install").try_run(make).await.map(drop)
}

#[derive(Deserialize)]
pub(crate) struct Order {
    item: String,
}

/// Executes an order once per key, however often it is sent, and whichever instance receives it.
/// The key and the order are in one transaction. No lock is needed for that.
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
    // If the commit is not answered, the client repeats the request with its key.
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

/// Deposits money: reads the balance, computes, and writes it.
///
/// Two concurrent deposits would lose money, so the account is locked. If this process is paused
/// for longer than its lease, another client may acquire the lock. So the deposit presents its
/// token to the fence before it reads anything, in the transaction that writes. From there to the
/// commit, no other client passes the fence. If a client with a greater token has passed the fence
/// before, this deposit is refused.
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
    // If the commit is not answered, its outcome is unknown.
    tx.commit().await.map_err(Failure::unknown)?;
    Ok(after.to_string())
}

/// Makes a report. Reports are expensive, so only two run at a time across all machines. A third
/// request is refused immediately and does not wait.
pub(crate) async fn report(State(app): State<App>) -> Reply<&'static str> {
    let _permit = app.locks.semaphore("reports", 2).try_acquire().await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok("all is well\n")
}

/// Closes the books while this instance leads. Another instance takes over when this one stops
/// leading.
pub(crate) async fn close_the_books(app: App) {
    let election = app.books.clone().on_pause(|error, pause| {
        eprintln!("{error}; campaigning again in {pause:?}");
    });
    let ended = election.lead(async |term| {
        let ended = keep_books(&app, &term).await;
        eprintln!("term {} ends: {ended:?}", term.token());
        // Campaign again, because the database may answer in the next term.
        ControlFlow::<()>::Continue(())
    });
    if let Err(error) = ended.await {
        // This is a permanent error, such as a missing permission or an invalid name.
        eprintln!("this instance cannot close the books: {error}");
    }
}

/// Writes an entry every 100 ms, with the token of `term`. Entries of an earlier term are refused.
/// Returns the error that ended the loop.
async fn keep_books(app: &App, term: &MutexGuard) -> Reply<Infallible> {
    loop {
        let mut tx = app.pool.begin().await?;
        fence::sql::check_guard(&mut tx, term).await?;
        let entry = sqlx::query("INSERT INTO bank_books (term) VALUES ($1)");
        entry.bind(i64::from(term.token())).execute(&mut *tx).await?;
        tx.commit().await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
