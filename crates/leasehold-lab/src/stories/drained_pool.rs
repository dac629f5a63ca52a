//! A lock that occupies a connection for its holder and for each waiter.

use std::time::{Duration, Instant};

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Acquire, Executor};
use testbed::{Postgres, Server};

use crate::naive::sql as naive_sql;
use crate::ours::{self, LONG, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};

pub(crate) const STORY: Story = Story {
    name: "drained-pool",
    line: "every waiter for a row lock occupies a connection, and soon the pool is empty",
    server: Server::Postgres,
    telling: [
        "A locks a row and calls a slow service. B and C wait for the row, and the pool of three \
         is exhausted. D needs no lock, but gets no connection.",
        "A row lock belongs to a transaction, so every holder and every waiter occupies a \
         connection the whole time.",
        "A leasehold mutex is a row with a lease. Holders and waiters keep no transaction open and \
         occupy no connection of the program's pool. `lock_in` is for short transactions.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] =
    &[client("A"), client("B"), client("C"), client("D"), thing("pool"), thing("open")];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const D: usize = 3;
const POOL: usize = 4;
const OPEN: usize = 5;

/// Counts long transactions, which hold a lock or wait for one.
const LASTING: &str = "SELECT COUNT(*) FROM pg_stat_activity WHERE state = 'idle in transaction' \
                       OR wait_event_type = 'Lock'";

async fn play() -> Result<Played> {
    let postgres = server::postgres();
    Ok(Played { naive: naive(&postgres).await?, ours: ours(&postgres).await? })
}

/// Opens a program's connections to its database.
async fn pool(url: &str) -> Result<PgPool> {
    let three = PgPoolOptions::new().max_connections(3).acquire_timeout(LONG);
    Ok(three.connect(url).await?)
}

/// Waits until `used` connections are in use and `open` long transactions are open, because a
/// connection that was just returned may still be on its way. Returns both numbers as text.
async fn settled(
    postgres: &Postgres,
    pool: &PgPool,
    (used, open): (usize, usize),
) -> Result<(String, String)> {
    let end = Instant::now() + LONG;
    loop {
        let in_use = (pool.size() as usize).saturating_sub(pool.num_idle());
        let lasting = postgres.admin("postgres", LASTING);
        if in_use == used && lasting == open.to_string() {
            return Ok((format!("{in_use} of 3"), lasting));
        }
        if Instant::now() > end {
            let found = format!("{in_use} connections in use and {lasting} open transactions");
            return Err(Trouble::new(format!("{found}, expected {used} and {open}")));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns whether a request that needs no lock is served within `limit`.
async fn is_served(pool: &PgPool, limit: Duration) -> Result<bool> {
    match tokio::time::timeout(limit, pool.execute("SELECT 1")).await {
        Ok(answer) => Ok(answer.map(|_| true)?),
        Err(_) => Ok(false),
    }
}

/// Waits for the row and releases it.
async fn wait_for_row(pool: PgPool) -> Result<()> {
    let mut connection = pool.acquire().await?;
    let mut tx = connection.begin().await?;
    tx.execute(naive_sql::LOCK_STOCK).await?;
    Ok(tx.commit().await?)
}

async fn naive(postgres: &Postgres) -> Result<Half> {
    let mut stage = Stage::naive("BEGIN, SELECT … FOR UPDATE, slow work, COMMIT", LANES);
    let pool = pool(&postgres.database()).await?;
    for statement in naive_sql::STOCK {
        pool.execute(statement).await?;
    }
    stage.begins(POOL, settled(postgres, &pool, (0, 0)).await?.0);

    let mut tx = pool.begin().await?;
    tx.execute(naive_sql::LOCK_STOCK).await?;
    let (used, open) = settled(postgres, &pool, (1, 1)).await?;
    let says = "BEGIN; SELECT … FOR UPDATE → held; calls a slow service";
    stage.step(A, says).holds().shows(POOL, used).shows(OPEN, open);
    let mut waiting = Vec::new();
    for (lane, count) in [(B, 2), (C, 3)] {
        waiting.push(tokio::spawn(wait_for_row(pool.clone())));
        let (used, open) = settled(postgres, &pool, (count, count)).await?;
        let step = stage.step(lane, "BEGIN; SELECT … FOR UPDATE → waits").waits();
        step.shows(POOL, used).shows(OPEN, open);
    }
    let is_kept = is_served(&pool, Duration::from_secs(1)).await?;
    let says = if is_kept { "1" } else { "error: no connection within a second" };
    stage.step(D, format!("needs no lock: SELECT 1 → {says}")).bad();
    tx.commit().await?;
    for waiting in waiting {
        waiting.await??;
    }
    settled(postgres, &pool, (0, 0)).await?;
    pool.close().await;
    Ok(stage.ends(is_kept, "Three clients that wanted one row have stopped the whole program."))
}

async fn ours(postgres: &Postgres) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock(), postgres:", LANES);
    let url = postgres.database();
    let pool = pool(&url).await?;
    let locks = ours::client(&url, "A").await?;
    pool.execute("SELECT 1").await?;
    stage.begins(POOL, settled(postgres, &pool, (0, 0)).await?.0);

    let guard = locks.mutex(NAME).lock().await?;
    let (used, open) = settled(postgres, &pool, (0, 0)).await?;
    let says = "lock() → held; calls a slow service";
    stage.step(A, says).holds().shows(POOL, used).shows(OPEN, open);
    let mut waiting = Vec::new();
    for lane in [B, C] {
        let lock = locks.mutex(NAME);
        waiting.push(tokio::spawn(async move { lock.lock_timeout(LONG).await }));
        ours::until_waiting(&locks, waiting.len()).await?;
        let (used, open) = settled(postgres, &pool, (0, 0)).await?;
        stage.step(lane, "lock() → waits").waits().shows(POOL, used).shows(OPEN, open);
    }
    let is_served = is_served(&pool, LONG).await?;
    let says = if is_served { "1" } else { "error: no connection within a second" };
    stage.step(D, format!("needs no lock: SELECT 1 → {says}")).good();
    guard.release().await?;
    stage.step(A, "release()").has_nothing();
    for (lane, waiting) in [B, C].into_iter().zip(waiting) {
        let guard = waiting.await??;
        stage.step(lane, "→ held").holds();
        guard.release().await?;
        stage.step(lane, "release()").has_nothing();
    }
    pool.close().await;
    Ok(stage.ends(is_served, "Waiting for the lock delays only the waiters."))
}
