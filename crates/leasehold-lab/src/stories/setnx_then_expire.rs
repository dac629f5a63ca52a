//! A lock that is taken in one step and given an expiry in another.

use std::time::Duration;

use testbed::{Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, LONG, NAME, SEEN};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "setnx-then-expire",
    line: "a client crashes between SETNX and EXPIRE: the lock is never freed",
    server: Server::Redis,
    telling: [
        "A takes the lock with `SETNX` and crashes before it sends `EXPIRE`. The key stays \
         forever.",
        "A client can crash between any two commands.",
        "leasehold sets lock and lease in one step at the server. B acquires the lock as soon as \
         A's lease expires.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("lock")];
const A: usize = 0;
const B: usize = 1;
const LOCK: usize = 2;

async fn play() -> Result<Played> {
    let redis = server::redis();
    let naive = naive(&redis).await?;
    redis.command(&["FLUSHALL"]);
    Ok(Played { naive, ours: ours(&redis).await? })
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::naive("SETNX, then EXPIRE", LANES);
    let (mut a, mut b) = (Wire::open(redis.port()).await?, Wire::open(redis.port()).await?);

    let reply = naive_redis::set_if_free(&mut a, "A").await?;
    stage.step(A, reply.to_string()).holds().shows(LOCK, "A");
    drop(a);
    stage.step(A, "is killed before it sends EXPIRE").dies().bad();
    let reply = naive_redis::set_if_free(&mut b, "B").await?;
    stage.step(B, reply.to_string()).waits();
    let left = b.say(&["PTTL", NAME]).await?;
    stage.step(B, format!("{left}: this key has no expiry")).bad();
    let taken = naive_redis::set_if_free(&mut b, "B").await?;
    let shows = b.ask(&["GET", NAME]).await?;
    stage.step(B, format!("{taken}, today and in a year's time")).shows(LOCK, shows).bad();
    let is_kept = left.answer != "-1" || taken.answer != "0";
    Ok(stage.ends(is_kept, "The lock is held by a crashed client forever."))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock()", LANES);
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wire = Wire::open(redis.port()).await?;

    let guard = locks[A].mutex(NAME).lease(SEEN).no_renewal().lock().await?;
    stage.step(A, "lock() → held: key and lease in one script").holds().shows(LOCK, "A");
    let left = wire.ask(&["PTTL", NAME]).await?;
    let left: i64 = left.parse().map_err(|_| Trouble::new(format!("PTTL: {left}")))?;
    ours::dies(guard);
    stage.step(A, "is killed").dies();
    let ends = (1..=i64::try_from(SEEN.as_millis())?).contains(&left);
    let says = if ends { "at most one lease" } else { "unexpected" };
    stage.step(B, format!("PTTL order → {says}")).waits();
    let guard = locks[B].mutex(NAME).lock_timeout(LONG).await?;
    let holder = ours::holder(&locks[B]).await?;
    let says = "lock() → held, as soon as that expires";
    stage.step(B, says).holds().shows(LOCK, &holder).good();
    let is_held = guard.ensure(Duration::from_millis(1)).is_ok();
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = "The crashed client's lock was freed automatically.";
    Ok(stage.ends(ends && holder == "B" && is_held, verdict))
}
