//! A lock that was taken, but whose client never received the reply.

use std::time::Duration;

use testbed::{Proxy, Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "lost-reply",
    line: "the lock is granted, the reply is lost, and the client waits for itself",
    server: Server::Redis,
    telling: [
        "The server executes A's `SET`, but its reply is lost with the connection. A tries again, \
         finds the lock taken, and waits a whole lease for a lock that is its own.",
        "A cannot know whether a command without a reply was executed, and the second `SET NX` \
         cannot distinguish A's own key from another client's.",
        "In leasehold, A chooses an id for its claim before it sends anything. A repeats the \
         request with this id, and the server returns the same grant with the same token.",
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

/// Waits until the proxy has dropped a reply, and then closes the connection.
async fn lose(proxy: &Proxy) -> Result<()> {
    for _ in 0..12_000 {
        if proxy.has_dropped() {
            proxy.pass_replies();
            proxy.cut();
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err(Trouble::new("no reply arrived that could be dropped"))
}

async fn naive(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::naive("SET NX PX, and again after an error", LANES);
    let proxy = Proxy::before(redis.port());
    let (mut a, mut b) = (Wire::open(proxy.port()).await?, Wire::open(redis.port()).await?);
    a.say(&["PING"]).await?;

    proxy.drop_replies_after(0);
    let taking = tokio::spawn(async move { naive_redis::take(&mut a, "A", "60000").await.is_ok() });
    lose(&proxy).await?;
    let is_told = taking.await?;
    let holder = b.ask(&["GET", NAME]).await?;
    let says = if is_told { "answered" } else { "the connection breaks; was it executed?" };
    let says = format!("SET order A NX PX 60000 → {says}");
    stage.step(A, says).waits().shows(LOCK, &holder);
    let mut a = Wire::open(proxy.port()).await?;
    let again = naive_redis::take(&mut a, "A", "60000").await?;
    let says = format!("reconnects: {again}: taken");
    stage.step(A, says).shows(LOCK, &holder).bad();
    let reply = naive_redis::take(&mut b, "B", "60000").await?;
    stage.step(B, reply.to_string()).waits();
    stage.step(A, "waits a minute for its own key").bad();
    let is_kept = is_told || again.answer == "OK" || holder != "A";
    Ok(stage
        .ends(is_kept, "No client works for a whole lease: A has the lock and does not know it."))
}

async fn ours(redis: &Redis) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock()", LANES);
    let proxy = Proxy::before(redis.port());
    let through = format!("redis://127.0.0.1:{}/", proxy.port());
    let locks = [ours::client(&through, "A").await?, ours::client(&redis.url(), "B").await?];
    // This opens the connection and loads the scripts.
    locks[A].mutex("warm").lock().await?.release().await?;

    proxy.drop_replies_after(0);
    let taking = tokio::spawn({
        let lock = locks[A].mutex(NAME);
        async move { lock.lock().await }
    });
    lose(&proxy).await?;
    let info = locks[B].inspect(NAME).await?;
    let granted = info.iter().flat_map(|info| info.holders()).find_map(|claim| claim.token);
    let holder = ours::holder(&locks[B]).await?;
    let says = "lock() → the connection breaks; was it executed?";
    stage.step(A, says).waits().shows(LOCK, &holder);
    let guard = taking.await??;
    let is_same = granted == Some(guard.grant());
    let token = stage.token(guard.token())?;
    let says = if is_same { "the same grant" } else { "another grant" };
    let says = format!("reconnects and retries with the same id → held, token {token}: {says}");
    stage.step(A, says).holds().shows(LOCK, ours::holder(&locks[B]).await?).good();
    guard.release().await?;
    let free = ours::holder(&locks[B]).await?;
    stage.step(A, "release()").has_nothing().shows(LOCK, &free);
    let guard = locks[B].mutex(NAME).try_lock().await?;
    stage.step(B, "try_lock() → held").holds().shows(LOCK, "B");
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = "A holds the lock that it was granted, and no client waits needlessly.";
    Ok(stage.ends(is_same && free == NOTHING, verdict))
}
