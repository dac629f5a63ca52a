//! A row with status "locked" for a client that has crashed.

use sqlx::{Connection, PgConnection, Row};
use testbed::{Postgres, Server};

use crate::naive::sql as naive_sql;
use crate::ours::{self, LONG, NAME, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;

pub(crate) const STORY: Story = Story {
    name: "dead-holders-status-row",
    line: "a row says \"locked\" for a client that has crashed",
    server: Server::Postgres,
    telling: [
        "A sets the row's status to `locked`, commits and crashes. B waits until a person \
         notices.",
        "The committed row outlives the client, and B cannot distinguish a crashed holder from a \
         slow one.",
        "leasehold's row contains the time when the lease expires, by the database's clock, and a \
         live holder renews it. B acquires the lock as soon as A's lease expires.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("row")];
const A: usize = 0;
const B: usize = 1;
const ROW: usize = 2;

async fn play() -> Result<Played> {
    let postgres = server::postgres();
    Ok(Played { naive: naive(&postgres).await?, ours: ours(&postgres).await? })
}

/// Tries to take the row, and returns how many rows were changed.
async fn take(connection: &mut PgConnection, me: &str) -> Result<u64> {
    Ok(sqlx::query(naive_sql::TAKE_STATUS).bind(me).execute(connection).await?.rows_affected())
}

async fn naive(postgres: &Postgres) -> Result<Half> {
    let mut stage = Stage::naive("UPDATE job SET status = 'locked' WHERE status = 'free'", LANES);
    let url = postgres.database();
    let (mut a, mut b) = (PgConnection::connect(&url).await?, PgConnection::connect(&url).await?);
    for statement in naive_sql::STATUS_ROW {
        sqlx::query(statement).execute(&mut a).await?;
    }
    stage.begins(ROW, "free");

    let rows = take(&mut a, "A").await?;
    stage.step(A, format!("UPDATE … SET status = 'locked' → {rows} row")).holds().shows(ROW, "A");
    a.close_hard().await?;
    stage.step(A, "is killed; its connection closes").dies();
    let changed = take(&mut b, "B").await?;
    stage.step(B, format!("UPDATE … WHERE status = 'free' → {changed} rows")).waits();
    let row = sqlx::query("SELECT status, holder FROM job").fetch_one(&mut b).await?;
    let (status, holder): (String, String) = (row.try_get(0)?, row.try_get(1)?);
    let says = format!("SELECT status, holder → {status}, {holder}: crashed or slow?");
    stage.step(B, says).shows(ROW, &holder).bad();
    let again = take(&mut b, "B").await?;
    stage.step(B, format!("UPDATE … WHERE status = 'free' → {again} rows, forever")).bad();
    Ok(stage.ends(
        changed + again > 0,
        "The row stays locked by a crashed client until a person intervenes.",
    ))
}

async fn ours(postgres: &Postgres) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock(), postgres:", LANES);
    let url = postgres.database();
    let locks = [ours::client(&url, "A").await?, ours::client(&url, "B").await?];

    let guard = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    stage.step(A, "lock() → held, with a lease").holds().shows(ROW, "A");
    ours::dies(guard);
    stage.step(A, "is killed").dies();
    stage.step(B, "lock() → waits, at most until that lease expires").waits();
    let guard = locks[B].mutex(NAME).lock_timeout(LONG).await?;
    let holder = ours::holder(&locks[B]).await?;
    stage.step(B, "→ held").holds().shows(ROW, &holder).good();
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(ROW, NOTHING);
    Ok(stage.ends(holder == "B", "The crashed client's lock was freed automatically."))
}
