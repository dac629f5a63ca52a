//! A lease as long as the work was estimated to take.

use std::time::{Duration, Instant};

use leasehold::ErrorKind;
use testbed::{Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, LONG, NAME, SEEN, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "guessed-lease",
    line: "one lease is too short for the work, and the next is much too long",
    server: Server::Redis,
    telling: [
        "A's lease is as long as the work usually takes. This time the work takes longer, and B \
         acquires the lock as well. B's lease is therefore one hour. B crashes, and C waits for \
         the rest of the hour.",
        "The lease has to be longer than the work, but it is also the time that others wait after \
         a crash.",
        "leasehold's lease is short, so a crash costs little, and the holder renews it, so the \
         work may take any time.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), client("C"), thing("lock")];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const LOCK: usize = 3;

async fn play() -> Result<Played> {
    let redis = server::redis();
    let naive = naive(&redis).await?;
    redis.command(&["FLUSHALL"]);
    Ok(Played { naive, ours: ours(&redis).await? })
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage =
        Stage::naive("SET NX PX with the expected duration of the work, no renewal", LANES);
    let mut wire = Wire::open(redis.port()).await?;

    let reply = naive_redis::take(&mut wire, "A", "500").await?;
    stage.step(A, reply.to_string()).holds().shows(LOCK, "A");
    wire.say_until(&["EXISTS", NAME], "0").await?;
    stage.step(A, "is still working; the key has expired").shows(LOCK, NOTHING);
    let beside = naive_redis::take(&mut wire, "B", "3600000").await?;
    let says = format!("{beside}, while A is working");
    stage.step(B, says).holds().shows(LOCK, "B").bad();
    stage.step(A, "is done").has_nothing();
    stage.step(B, "is killed").dies();
    let reply = naive_redis::take(&mut wire, "C", "3600000").await?;
    stage.step(C, reply.to_string()).waits();
    let left = wire.ask(&["PTTL", NAME]).await?;
    let left: i64 = left.parse().map_err(|_| Trouble::new(format!("PTTL: {left}")))?;
    let is_long = left > 3_000_000;
    let says = if is_long { "nearly an hour" } else { "not long" };
    stage.step(C, format!("PTTL order → {says} to wait for a crashed client")).bad();
    let is_kept = beside.answer != "OK" && !is_long;
    Ok(stage.ends(is_kept, "Two clients worked at the same time, and then none for an hour."))
}

/// Waits until the lock has been held for longer than a lease, according to the store.
async fn outlast(locks: &leasehold::Client, lease: Duration) -> Result<()> {
    let end = Instant::now() + LONG;
    while Instant::now() < end {
        let info = locks.inspect(NAME).await?;
        if info.iter().flat_map(|info| info.holders()).any(|claim| claim.since > lease) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(Trouble::new("the lock was not held for longer than its lease"))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lease(d).lock(), renewed", LANES);
    let url = redis.url();
    let (a, b) = (ours::client(&url, "A").await?, ours::client(&url, "B").await?);
    let c = ours::client(&url, "C").await?;

    let guard = a.mutex(NAME).lease(SEEN).lock().await?;
    stage.step(A, "lock() → held").holds().shows(LOCK, ours::holder(&a).await?);
    outlast(&b, SEEN).await?;
    stage.step(A, "works for longer than a lease, which is renewed");
    let error = b.mutex(NAME).try_lock().await.err();
    let is_out = error.is_some_and(|error| error.kind() == ErrorKind::Contended);
    let says = if is_out { "error: Contended, held by A" } else { "held" };
    let shows = ours::holder(&b).await?;
    stage.step(B, format!("try_lock() → {says}")).shows(LOCK, shows).good();
    let is_held = guard.is_held();
    guard.release().await?;
    stage.step(A, "is done: release()").has_nothing().shows(LOCK, NOTHING);
    let dead = b.mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    ours::dies(dead);
    stage.step(B, "lock() → held; then B is killed").dies().shows(LOCK, "B");
    let guard = c.mutex(NAME).lock_timeout(LONG).await?;
    let holder = ours::holder(&c).await?;
    let says = "lock() → held, after one short lease";
    stage.step(C, says).holds().shows(LOCK, &holder).good();
    guard.release().await?;
    stage.step(C, "release()").has_nothing().shows(LOCK, NOTHING);
    let is_kept = is_out && is_held && holder == "C";
    Ok(stage.ends(is_kept, "A took as long as it needed, and the crash cost one short lease."))
}
