//! A lock whose value is the time at which it ends, by its clients' clocks.

use leasehold::ErrorKind;
use testbed::{Redis, Server};

use crate::naive::redis::Timed;
use crate::ours::{self, LONG, NAME, SEEN};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "setnx-time-getset",
    line: "the lock's value is an expiry time: clocks differ, and GETSET calls race",
    server: Server::Redis,
    telling: [
        "B's clock is one minute fast. B finds A's lock expired and takes it with `GETSET` while \
         A is still working. Later, C and D both find a crashed client's lock expired. C wins, \
         but D overwrites C's expiry time.",
        "Each client goes by its own clock, and `GETSET` writes before the client knows whether it \
         won. C no longer finds its own value when it releases, and leaves behind a lock that no \
         client holds.",
        "leasehold's leases expire by the server's clock, the queue determines the next client, \
         and a release compares with a value that no other client can have written.",
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
    let mut stage = Stage::naive("SETNX with a time as the value, GETSET to take over", LANES);
    let mut wire = Wire::open(redis.port()).await?;
    let are_two = ahead(&mut stage, &mut wire).await?;
    let is_left = race(&mut stage, &mut wire).await?;
    let verdict = "A and B worked at the same time. Then C was done, but the lock stayed taken.";
    Ok(stage.ends(!are_two && !is_left, verdict))
}

/// Plays the case of a clock that is ahead. The true time is 1000, and B's clock shows 60 more.
/// Returns whether both clients believe that they hold the lock.
async fn ahead(stage: &mut Stage, wire: &mut Wire) -> Result<bool> {
    let a = Timed { clock: 1000, lease: 30 };
    let reply = a.set_if_free(wire).await?;
    stage.step(A, format!("at 1000: {reply}")).holds().shows(LOCK, a.end());
    let b = Timed { clock: 1060, lease: 30 };
    let reply = b.set_if_free(wire).await?;
    stage.step(B, format!("its clock shows 1060: {reply}")).waits();
    let read = wire.say(&["GET", NAME]).await?;
    let is_over = b.is_over(&read)?;
    let says = if is_over { "less than 1060, so it has expired" } else { "not expired" };
    stage.step(B, format!("{read}: {says}")).bad();
    let reply = b.get_and_set(wire).await?;
    let is_taken = reply.answer == read.answer && is_over;
    let shows = wire.ask(&["GET", NAME]).await?;
    let says = format!("{reply}, the value it read: B was first and holds");
    stage.step(B, says).holds().shows(LOCK, shows).bad();
    Ok(is_taken)
}

/// Plays the race after both clients have crashed. All clocks show 1100. Returns whether the lock
/// is left taken without a holder.
async fn race(stage: &mut Stage, wire: &mut Wire) -> Result<bool> {
    stage.step(A, "is killed").dies();
    stage.step(B, "is killed").dies();
    let (c, d) = (Timed { clock: 1100, lease: 30 }, Timed { clock: 1101, lease: 30 });
    let read = wire.say(&["GET", NAME]).await?;
    let mut is_over = c.is_over(&read)?;
    stage.step(C, format!("at 1100: {read}: expired")).waits();
    let read = wire.say(&["GET", NAME]).await?;
    is_over &= d.is_over(&read)?;
    stage.step(D, format!("at 1101: {read}: expired")).waits();
    let first = c.get_and_set(wire).await?;
    let says = format!("{first}, the value it read: C was first and holds");
    stage.step(C, says).holds().shows(LOCK, c.end());
    let second = d.get_and_set(wire).await?;
    let says = format!("{second}, not the value it read: C was first, but the value is now D's");
    stage.step(D, says).shows(LOCK, wire.ask(&["GET", NAME]).await?).bad();
    let found = wire.say(&["GET", NAME]).await?;
    let is_left = is_over && first.answer == read.answer && found.answer != c.end();
    let says = format!("is done: {found}, not its own {}: C does not delete it", c.end());
    stage.step(C, says).has_nothing().bad();
    stage.step(D, "waits for a lock that no client holds");
    Ok(is_left)
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock()", LANES);
    let url = redis.url();
    let (a, b) = (ours::client(&url, "A").await?, ours::client(&url, "B").await?);
    let (c, d) = (ours::client(&url, "C").await?, ours::client(&url, "D").await?);

    let guard = a.mutex(NAME).lease(LONG).lock().await?;
    stage.step(A, "lock() → held").holds().shows(LOCK, ours::holder(&a).await?);
    let error = b.mutex(NAME).try_lock().await.err();
    let is_kept_out = error.is_some_and(|error| error.kind() == ErrorKind::Contended);
    let says = if is_kept_out { "error: Contended, held by A" } else { "held" };
    let says = format!("regardless of its clock: try_lock() → {says}");
    stage.step(B, says).shows(LOCK, ours::holder(&a).await?).good();
    guard.release().await?;
    let dead = a.mutex(NAME).lease(SEEN).no_renewal().lock().await?;
    ours::dies(dead);
    stage.step(A, "release(), lock() again, then it is killed").dies();

    let first = tokio::spawn({
        let lock = c.mutex(NAME);
        async move { lock.lock_timeout(LONG).await }
    });
    ours::until_waiting(&d, 1).await?;
    stage.step(C, "lock() → waits").waits();
    let second = tokio::spawn({
        let lock = d.mutex(NAME);
        async move { lock.lock_timeout(LONG).await }
    });
    ours::until_waiting(&c, 2).await?;
    stage.step(D, "lock() → waits behind C").waits();
    let guard = first.await??;
    let in_turn = !second.is_finished();
    let says = "→ held, once the server has seen A's lease expire";
    stage.step(C, says).holds().shows(LOCK, ours::holder(&c).await?).good();
    let is_released = guard.release().await.is_ok();
    let holder = ours::holder(&d).await?;
    let says = format!("release() → its own lock, which passes to {holder}");
    stage.step(C, says).has_nothing().shows(LOCK, &holder);
    let guard = second.await??;
    stage.step(D, "→ held, immediately").holds().shows(LOCK, &holder).good();
    guard.release().await?;
    stage.step(D, "release()").has_nothing().shows(LOCK, NOTHING);
    let is_kept = is_kept_out && in_turn && is_released && holder == "D";
    Ok(stage.ends(is_kept, "One client at a time, by one clock, and no lock is left behind."))
}
