//! A holder that is paused for longer than its lease, and then writes.

use leasehold::{ErrorKind, State, fence};
use testbed::{Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, NAME, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "paused-holder",
    line: "a holder is paused for longer than its lease, resumes and writes",
    server: Server::Redis,
    telling: [
        "A reads the stock under the lock and is paused (garbage collection, SIGSTOP, a VM \
         migration) until its lease expires. B takes the lock, sells two items and releases it. A \
         resumes and writes the value that it computed before the pause.",
        "The lock and the stock are separate, and the stock does not know that A has lost the \
         lock.",
        "leasehold cannot stop A from sending the write either. But each holder's token is higher \
         than the previous one's, and the stock, protected by `fence::redis`, rejects tokens lower \
         than the highest it has seen.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("lock"), thing("stock")];
const A: usize = 0;
const B: usize = 1;
const LOCK: usize = 2;
const STOCK: usize = 3;

async fn play() -> Result<Played> {
    let redis = server::redis();
    Ok(Played { naive: naive(&redis).await?, ours: ours(&redis).await? })
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::naive("SET NX PX, then a script that compares and deletes", LANES);
    let (mut a, mut b) = (Wire::open(redis.port()).await?, Wire::open(redis.port()).await?);
    a.say(&["SET", "stock", "10"]).await?;
    stage.begins(STOCK, "10");

    let reply = naive_redis::take(&mut a, "A", "500").await?;
    stage.step(A, reply.to_string()).holds().shows(LOCK, "A");
    let read = a.say(&["GET", "stock"]).await?;
    stage.step(A, format!("{read}; sells one, so 9 are left"));
    stage.step(A, "is paused; its lease expires").stands_still().shows(LOCK, NOTHING);
    let reply = naive_redis::take_at_last(&mut b, "B", "60000").await?;
    stage.step(B, reply.to_string()).holds().shows(LOCK, "B");
    let read = b.say(&["GET", "stock"]).await?;
    let wrote = b.say(&["SET", "stock", "8"]).await?;
    stage.step(B, format!("{read}; sells two: {wrote}")).shows(STOCK, "8");
    let reply = naive_redis::release(&mut b, "B").await?;
    stage.step(B, reply.to_string()).has_nothing().shows(LOCK, NOTHING);
    let wrote = a.say(&["SET", "stock", "9"]).await?;
    let left = a.ask(&["GET", "stock"]).await?;
    stage.step(A, format!("resumes: {wrote}")).holds().shows(STOCK, &left).bad();
    let reply = naive_redis::release(&mut a, "A").await?;
    stage.step(A, format!("{reply}: A finds out only now")).has_nothing();
    let verdict = format!("Three of 10 items were sold, but {left} are left: B's update is lost.");
    Ok(stage.ends(left == "7", verdict))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock() and fence::redis", LANES);
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let (mut a, mut b) = (Wire::open(redis.port()).await?, Wire::open(redis.port()).await?);
    a.say(&["SET", "stock", "10"]).await?;
    stage.begins(STOCK, "10");

    // A paused client does not renew.
    let late = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let t1 = stage.token(late.token())?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    fence::redis::check(a.driver(), "stock", late.token()).await?;
    let read = a.say(&["GET", "stock"]).await?;
    stage.step(A, format!("presents {t1} to the stock; {read}; sells one, so 9 are left"));
    stage.step(A, "is paused; its lease expires").stands_still().shows(LOCK, NOTHING);
    let guard = locks[B].mutex(NAME).lock().await?;
    let t2 = stage.token(guard.token())?;
    let says = format!("lock() → held, token {t2}, higher than {t1}");
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    fence::redis::check(b.driver(), "stock", &guard).await?;
    let read = b.say(&["GET", "stock"]).await?;
    fence::redis::set(b.driver(), "stock", &guard, "8").await?;
    let says = format!("presents {t2}; {read}; sells two: set(stock, {t2}, 8) → OK");
    stage.step(B, says).shows(STOCK, "8");
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let refused = fence::redis::set(a.driver(), "stock", late.token(), "9").await;
    let is_refused = refused.is_err_and(|error| error.kind() == ErrorKind::StaleToken);
    let answer = if is_refused { "rejected: StaleToken" } else { "OK" };
    let left = a.ask(&["GET", "stock"]).await?;
    let says = format!("resumes and sends its write: set(stock, {t1}, 9) → {answer}");
    stage.step(A, says).holds().shows(STOCK, &left).good();
    let is_lost = matches!(late.state(), State::Lost(_));
    let says = format!("checks its guard, without I/O: {}", if is_lost { "Lost" } else { "Held" });
    stage.step(A, says).has_nothing();
    let guard = locks[A].mutex(NAME).lock().await?;
    let t3 = stage.token(guard.token())?;
    fence::redis::check(a.driver(), "stock", &guard).await?;
    let read = a.say(&["GET", "stock"]).await?;
    fence::redis::set(a.driver(), "stock", &guard, "7").await?;
    let left = a.ask(&["GET", "stock"]).await?;
    let says = format!("starts over with token {t3}: {read}, set(stock, {t3}, 7) → OK");
    stage.step(A, says).holds().shows(LOCK, "A").shows(STOCK, &left);
    guard.release().await?;
    stage.step(A, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = format!("Three of 10 items were sold, and {left} are left: no update is lost.");
    Ok(stage.ends(is_refused && is_lost && left == "7", verdict))
}
