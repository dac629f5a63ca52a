//! A fence in two steps, first the check of the token and then the write.

use leasehold::{ErrorKind, fence};
use testbed::{Redis, Server};

use crate::naive::fence as naive_fence;
use crate::ours::{self, NAME, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "check-then-write",
    line: "the token is checked in one step and the write is done in the next",
    server: Server::Redis,
    telling: [
        "A's token is compared with the highest token seen and accepted. Before A's write \
         arrives, B acquires the lock, presents a higher token and writes. Then A's write \
         overwrites B's.",
        "Between check and write, another client can acquire the lock, write and release it.",
        "`fence::redis` checks and writes in one script, `fence::sql` in one transaction.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("lock"), thing("stock"), thing("highest")];
const A: usize = 0;
const B: usize = 1;
const LOCK: usize = 2;
const STOCK: usize = 3;
const MARK: usize = 4;

async fn play() -> Result<Played> {
    let redis = server::redis();
    let naive = naive(&redis).await?;
    redis.command(&["FLUSHALL"]);
    Ok(Played { naive, ours: ours(&redis).await? })
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::naive("GET highest, compare, SET stock", LANES);
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wire = Wire::open(redis.port()).await?;
    wire.say(&["SET", "stock", "10"]).await?;
    stage.begins(STOCK, "10");

    let first = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let late = first.token();
    let t1 = stage.token(late)?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    let is_good = naive_fence::is_good(&mut wire, late).await?;
    let says = if is_good { "no higher token seen" } else { "stale" };
    stage.step(A, format!("GET stock → 10; GET highest, compares {t1} → {says}")).shows(MARK, &t1);
    stage.step(A, "is paused; its lease expires").stands_still().shows(LOCK, NOTHING);
    let guard = locks[B].mutex(NAME).lock().await?;
    let t2 = stage.token(guard.token())?;
    let says = format!("lock() → held, token {t2}");
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    let is_next = naive_fence::is_good(&mut wire, guard.token()).await?;
    let says = if is_next { "no higher token seen" } else { "stale" };
    stage.step(B, format!("GET stock → 10; GET highest, compares {t2} → {says}")).shows(MARK, &t2);
    let wrote = wire.say(&["SET", "stock", "8"]).await?;
    stage.step(B, format!("sells two: {wrote}")).shows(STOCK, "8");
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let wrote = wire.say(&["SET", "stock", "9"]).await?;
    let left = wire.ask(&["GET", "stock"]).await?;
    let says = format!("resumes; its check has passed: {wrote}");
    stage.step(A, says).has_nothing().shows(STOCK, &left).bad();
    let verdict = format!("Three of 10 items were sold, but {left} are left: B's update is lost.");
    Ok(stage.ends(!is_good || !is_next || left != "9", verdict))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("fence::redis::set, one step", LANES);
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wire = Wire::open(redis.port()).await?;
    wire.say(&["SET", "stock", "10"]).await?;
    stage.begins(STOCK, "10");

    let first = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let late = first.token();
    let t1 = stage.token(late)?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    fence::redis::check(wire.driver(), "stock", late).await?;
    let read = wire.say(&["GET", "stock"]).await?;
    stage.step(A, format!("check(stock, {t1}) → OK; {read}")).shows(MARK, &t1);
    stage.step(A, "is paused; its lease expires").stands_still().shows(LOCK, NOTHING);
    let guard = locks[B].mutex(NAME).lock().await?;
    let t2 = stage.token(guard.token())?;
    let says = format!("lock() → held, token {t2}");
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    fence::redis::check(wire.driver(), "stock", &guard).await?;
    let read = wire.say(&["GET", "stock"]).await?;
    stage.step(B, format!("check(stock, {t2}) → OK; {read}")).shows(MARK, &t2);
    fence::redis::set(wire.driver(), "stock", &guard, "8").await?;
    stage.step(B, format!("sells two: set(stock, {t2}, 8) → OK")).shows(STOCK, "8");
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let wrote = fence::redis::set(wire.driver(), "stock", late, "9").await;
    let is_refused = wrote.is_err_and(|error| error.kind() == ErrorKind::StaleToken);
    let answer = if is_refused { "rejected: StaleToken" } else { "OK" };
    let left = wire.ask(&["GET", "stock"]).await?;
    let says = format!("resumes; the token is checked again: set(stock, {t1}, 9) → {answer}");
    stage.step(A, says).has_nothing().shows(STOCK, &left).good();
    let verdict =
        format!("Two of 10 items were sold, and {left} are left. A knows that its sale failed.");
    Ok(stage.ends(is_refused && left == "8", verdict))
}
