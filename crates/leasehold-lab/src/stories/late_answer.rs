//! A lock whose grant arrives when its lease has almost or completely expired.

use testbed::{Proxy, Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, LONG, NAME, SEEN};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "late-answer",
    line: "the reply arrives after the lease has expired and is trusted for a whole lease",
    server: Server::Redis,
    telling: [
        "The server executes A's `SET`, but the reply is delayed for longer than the lease. B has \
         the lock by then. A counts its lease from the reply.",
        "The key's expiry starts before the reply is sent, so A relies on a lock that has \
         expired.",
        "leasehold counts a lease from before the request was sent. After a late reply, A asks \
         again and queues behind B. `min_validity` requires a minimum of remaining time.",
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
    let mut stage = Stage::naive("SET NX PX, lease counted from the reply", LANES);
    let proxy = Proxy::before(redis.port());
    let (mut a, mut b) = (Wire::open(proxy.port()).await?, Wire::open(redis.port()).await?);
    a.say(&["PING"]).await?;

    proxy.hold_replies();
    let taking = tokio::spawn(async move { naive_redis::take(&mut a, "A", "2000").await });
    b.say_until(&["EXISTS", NAME], "1").await?;
    let says = "SET order A NX PX 2000 → the reply is delayed";
    stage.step(A, says).waits().shows(LOCK, "A");
    let second = naive_redis::take_at_last(&mut b, "B", "60000").await?;
    let says = format!("A's key has expired: {second}");
    stage.step(B, says).holds().shows(LOCK, "B");
    proxy.thaw();
    let first = match taking.await? {
        Ok(reply) => reply,
        Err(trouble) => return Err(trouble),
    };
    let shows = b.ask(&["GET", NAME]).await?;
    let says = format!("{first}: A believes it holds for two seconds from now");
    stage.step(A, says).holds().shows(LOCK, &shows).bad();
    let is_kept = first.answer != "OK" || shows != "B";
    Ok(stage.ends(
        is_kept,
        "A and B work at the same time: A's lease had expired before the reply arrived.",
    ))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock()", LANES);
    let proxy = Proxy::before(redis.port());
    let through = format!("redis://127.0.0.1:{}/", proxy.port());
    let locks = [ours::client(&through, "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wire = Wire::open(redis.port()).await?;
    // This opens the connection and loads the scripts.
    locks[A].mutex("warm").lock().await?.release().await?;

    proxy.hold_replies();
    let taking = tokio::spawn({
        let lock = locks[A].mutex(NAME).lease(SEEN);
        async move { lock.lock_timeout(LONG).await }
    });
    wire.say_until(&["EXISTS", NAME], "1").await?;
    let says = "lock() → the reply is delayed";
    stage.step(A, says).waits().shows(LOCK, ours::holder(&locks[B]).await?);
    let second = locks[B].mutex(NAME).lock_timeout(LONG).await?;
    let says = "A's lease has expired: lock() → held";
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    proxy.thaw();
    ours::until_waiting(&locks[B], 1).await?;
    let is_waiting = !taking.is_finished() && second.is_held();
    let says = if is_waiting { "A asks again and waits behind B" } else { "it holds" };
    let says = format!("the reply arrives too late: {says}");
    stage.step(A, says).shows(LOCK, ours::holder(&locks[B]).await?).good();
    second.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, "A");
    let guard = taking.await??;
    let holder = ours::holder(&locks[B]).await?;
    stage.step(A, "→ held").holds().shows(LOCK, &holder).good();
    guard.release().await?;
    stage.step(A, "release()").has_nothing().shows(LOCK, NOTHING);
    let is_kept = is_waiting && holder == "A";
    Ok(stage.ends(is_kept, "A did not trust the late reply and got the lock when its turn came."))
}
