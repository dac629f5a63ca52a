//! A row lock that locks the whole table.

use leasehold::{ErrorKind, database, lock_in, try_lock_in};
use sqlx::{Executor, MySqlPool, Row};
use testbed::{MariaDb, Server};

use crate::naive::sql as naive_sql;
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;

pub(crate) const STORY: Story = Story {
    name: "for-update-without-index",
    line: "SELECT … FOR UPDATE on a column without an index locks the whole table",
    server: Server::MariaDb,
    telling: [
        "A locks order 7 with `SELECT … FOR UPDATE` on a column that has no index. B wants order \
         8 and cannot lock it.",
        "InnoDB locks the rows that it reads, not the rows that it returns. Without an index that \
         is the whole table.",
        "`lock_in` locks one row of its own table by primary key, and verifies the index in the \
         catalog. Two names can be held at the same time.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), client("C"), thing("7"), thing("8")];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const SEVEN: usize = 3;
const EIGHT: usize = 4;

/// Number of orders.
const ORDERS: u32 = 100;

async fn play() -> Result<Played> {
    let mariadb = server::mariadb();
    let pool = MySqlPool::connect(&mariadb.database()).await?;
    let played = Played { naive: naive(&mariadb, &pool).await?, ours: ours(&pool).await? };
    pool.close().await;
    Ok(played)
}

async fn naive(mariadb: &MariaDb, pool: &MySqlPool) -> Result<Half> {
    let mut stage = Stage::naive("SELECT … WHERE nr = ? FOR UPDATE", LANES);
    pool.execute(naive_sql::WITHOUT_INDEX).await?;
    let numbers: Vec<String> = (1..=ORDERS).map(|nr| format!("({nr})")).collect();
    let fill = format!("INSERT INTO orders (nr) VALUES {}", numbers.join(", "));
    pool.execute(sqlx::AssertSqlSafe(fill)).await?;

    let (mut a, mut b) = (pool.begin().await?, pool.begin().await?);
    let found = a.fetch_all(sqlx::AssertSqlSafe(naive_sql::for_update(7))).await?;
    let says = format!("SELECT … WHERE nr = 7 FOR UPDATE → {} row", found.len());
    stage.step(A, says).holds_another().shows(SEVEN, "A");
    let locked = mariadb.admin("SELECT MAX(trx_rows_locked) FROM information_schema.innodb_trx");
    let locked: u32 = locked.trim().parse()?;
    let is_all = locked >= ORDERS;
    let says = if is_all { "all" } else { "not all" };
    let says = format!("innodb_trx.trx_rows_locked → {says} of the {ORDERS} rows");
    stage.step(A, says).shows(EIGHT, if is_all { "A" } else { NOTHING }).bad();
    let wanted = format!("{} NOWAIT", naive_sql::for_update(8));
    let is_refused = b.execute(sqlx::AssertSqlSafe(wanted)).await.is_err();
    let says = if is_refused { "error: locked, so it would have to wait for A" } else { "1 row" };
    let says = format!("SELECT … WHERE nr = 8 FOR UPDATE NOWAIT → {says}");
    stage.step(B, says).waits().bad();
    a.rollback().await?;
    b.rollback().await?;
    let verdict = "A wanted to lock one order, but no client can lock any other.";
    Ok(stage.ends(!is_all && !is_refused, verdict))
}

async fn ours(pool: &MySqlPool) -> Result<Half> {
    let mut stage = Stage::ours("lock_in(&mut tx, name)", LANES);
    database::install(pool).await?;
    let (mut a, mut b, mut c) = (pool.begin().await?, pool.begin().await?, pool.begin().await?);
    lock_in(&mut a, "order:7").await?;
    stage.step(A, "lock_in(tx, \"order:7\") → held").holds_another().shows(SEVEN, "A");
    lock_in(&mut b, "order:8").await?;
    stage
        .step(B, "lock_in(tx, \"order:8\") → held, immediately")
        .holds_another()
        .shows(EIGHT, "B")
        .good();
    let error = try_lock_in(&mut c, "order:7").await.err();
    let is_out = error.is_some_and(|error| error.kind() == ErrorKind::Contended);
    let says = if is_out { "error: Contended" } else { "held" };
    stage.step(C, format!("try_lock_in(tx, \"order:7\") → {says}")).good();
    a.commit().await?;
    stage.step(A, "COMMIT, which releases the lock").has_nothing().shows(SEVEN, NOTHING);
    lock_in(&mut c, "order:7").await?;
    stage.step(C, "lock_in(tx, \"order:7\") → held").holds_another().shows(SEVEN, "C");
    b.commit().await?;
    c.commit().await?;
    let rows = sqlx::query("SELECT COUNT(*) FROM leasehold_row_lock").fetch_one(pool).await?;
    let rows: i64 = rows.try_get(0)?;
    Ok(stage.ends(is_out && rows == 2, "Each order has its own lock."))
}
