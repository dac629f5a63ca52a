//! A lock that is deleted by a client that does not hold it.

use leasehold::{Client, ErrorKind};
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
    name: "del-without-looking",
    line: "a client whose lease has expired, or that never had the lock, deletes another client's lock",
    server: Server::Redis,
    telling: [
        "A takes longer than its lease, and B acquires the lock. A then deletes B's key, and C \
         acquires the lock while B is still working. D does not get the lock, but runs the same \
         `finally` block and deletes C's key.",
        "`DEL` does not check which client owns the key, and the `finally` block also runs in a \
         client that did not get the lock.",
        "Only a leasehold guard can release a lock, and only a holder has a guard. The server \
         compares owners: A gets the error `Lost`, and B keeps the lock.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), client("C"), client("D"), thing("lock")];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const D: usize = 3;
const LOCK: usize = 4;

async fn play() -> Result<Played> {
    let redis = server::redis();
    let naive = naive(&redis).await?;
    redis.command(&["FLUSHALL"]);
    Ok(Played { naive, ours: ours(&redis).await? })
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::naive("SET NX PX, then DEL in a finally block", LANES);
    let mut wire = Wire::open(redis.port()).await?;
    let key = ["GET", NAME];

    let reply = naive_redis::take(&mut wire, "A", "500").await?;
    stage.step(A, reply.to_string()).holds().shows(LOCK, "A");
    let reply = naive_redis::take_at_last(&mut wire, "B", "60000").await?;
    stage.step(B, format!("A is slow and its lease has expired: {reply}")).holds().shows(LOCK, "B");
    let reply = naive_redis::delete(&mut wire).await?;
    let says = format!("is done; its finally block: {reply}, which was B's key");
    stage.step(A, says).has_nothing().shows(LOCK, wire.ask(&key).await?).bad();
    let beside = naive_redis::take(&mut wire, "C", "60000").await?;
    let says = format!("{beside}, while B is working");
    stage.step(C, says).holds().shows(LOCK, wire.ask(&key).await?).bad();
    let reply = naive_redis::take(&mut wire, "D", "60000").await?;
    stage.step(D, format!("{reply}: does not get the lock"));
    let reply = naive_redis::delete(&mut wire).await?;
    let free = wire.ask(&key).await?;
    let says = format!("gives up; its finally block: {reply}, which was C's key");
    stage.step(D, says).shows(LOCK, &free).bad();
    let is_kept = beside.answer != "OK" && free != "nil";
    Ok(stage.ends(is_kept, "B and C work at the same time, and the next client can join them."))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock(), guard.release()", LANES);
    let url = redis.url();
    let locks: [Client; 4] = [
        ours::client(&url, "A").await?,
        ours::client(&url, "B").await?,
        ours::client(&url, "C").await?,
        ours::client(&url, "D").await?,
    ];

    let late = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    stage.step(A, "lock() → held, without renewal").holds().shows(LOCK, "A");
    let guard = locks[B].mutex(NAME).lock().await?;
    let says = "A is slow and its lease has expired: lock() → held";
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    let outcome = late.release().await;
    let is_told = outcome.is_err_and(|error| error.kind() == ErrorKind::Lost);
    let says = format!("is done: release() → {}", if is_told { "error: Lost" } else { "released" });
    let still = ours::holder(&locks[B]).await?;
    stage.step(A, says).has_nothing().shows(LOCK, &still).good();
    let mut are_kept_out = true;
    for (lane, guardless) in [(C, "has no guard"), (D, "has no guard and nothing to release")] {
        let error = locks[lane].mutex(NAME).try_lock().await.err();
        let is_out = error.is_some_and(|error| error.kind() == ErrorKind::Contended);
        are_kept_out &= is_out;
        let says = if is_out { "error: Contended, held by B" } else { "held" };
        let shows = ours::holder(&locks[B]).await?;
        let outcome = stage.step(lane, format!("try_lock() → {says}; {guardless}"));
        outcome.shows(LOCK, shows).good();
    }
    let is_held = guard.is_held();
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let is_kept = is_told && still == "B" && are_kept_out && is_held;
    Ok(stage.ends(is_kept, "B worked alone, and A knows that it lost the lock."))
}
