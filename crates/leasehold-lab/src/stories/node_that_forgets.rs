//! A server of a majority that restarts without its data and votes again.

use std::time::Duration;

use testbed::{Redis, Server, redlock_url};

use crate::naive::redlock;
use crate::ours::{self, LONG, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "node-that-forgets",
    line: "Redlock: a server restarts without its data and votes again",
    server: Server::Redis,
    telling: [
        "A has the votes of N1 and N2 while N3 is down. N2 restarts without its data, N3 comes \
         back, and both vote for B. Two clients have a majority of the same three servers.",
        "A vote has to last until the lease expires, but a server without persistence forgets it \
         at a restart.",
        "leasehold does not count a server's vote until the server has been up for the longest \
         lease that a client may request. By then, every forgotten lease has expired.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("N1"), thing("N2"), thing("N3")];
const A: usize = 0;
const B: usize = 1;
const N1: usize = 2;
const N2: usize = 3;
const N3: usize = 4;

/// The query of a URL that limits leases, and a lease within this limit.
const URL: &str = "?max_lease_ms=3000&node_timeout_ms=1000";
const LEASE: Duration = Duration::from_millis(2_900);

async fn play() -> Result<Played> {
    let nodes = [server::redis(), server::redis(), server::redis()];
    let naive = naive(&nodes).await?;
    nodes.iter().for_each(Redis::restart_empty);
    Ok(Played { naive, ours: ours(&nodes).await? })
}

async fn naive(nodes: &[Redis; 3]) -> Result<Half> {
    let mut stage = Stage::naive("Redlock with servers that vote as soon as they are up", LANES);
    nodes[2].kill();
    stage.step(N3, "is down").shows(N3, "down");
    let [n1, n2, _] = nodes;
    let mut up = [Some(Wire::open(n1.port()).await?), Some(Wire::open(n2.port()).await?), None];
    let first = redlock::votes(&mut up, "A").await?;
    let says = format!("requests votes from N1, N2, N3 → {}: two of three", first.join(", "));
    stage.step(A, says).holds().shows(N1, "A").shows(N2, "A");
    n2.restart_empty();
    stage.step(N2, "restarts without its data").shows(N2, NOTHING).bad();
    nodes[2].restart();
    stage.step(N3, "is up again").shows(N3, NOTHING);
    let mut up = [None, None, None];
    for (wire, node) in up.iter_mut().zip(nodes) {
        *wire = Some(Wire::open(node.port()).await?);
    }
    let second = redlock::votes(&mut up, "B").await?;
    let says = format!("requests votes from N1, N2, N3 → {}: two of three", second.join(", "));
    stage.step(B, says).holds().shows(N2, "B").shows(N3, "B").bad();
    let are_two = redlock::is_majority(&first) && redlock::is_majority(&second);
    Ok(stage.ends(!are_two, "A and B each have a majority and work at the same time."))
}

async fn ours(nodes: &[Redis; 3]) -> Result<Half> {
    let mut stage = Stage::ours("redlock: with its delay after a restart", LANES);
    let url = redlock_url(nodes.iter().map(Redis::port)) + URL;
    let locks = [ours::client(&url, "A").await?, ours::client(&url, "B").await?];
    // Servers that were just restarted do not vote yet, so this waits until they do.
    for locks in &locks {
        locks.mutex("warm").lease(LEASE).lock_timeout(LONG).await?.release().await?;
    }

    nodes[2].kill();
    stage.step(N3, "is down").shows(N3, "down");
    let first = locks[A].mutex(NAME).lease(LEASE).no_renewal().lock_timeout(LONG).await?;
    let t1 = stage.token(first.token())?;
    let says = format!("lock() → held by N1 and N2, token {t1}");
    stage.step(A, says).holds().shows(N1, "A").shows(N2, "A");
    nodes[1].restart_empty();
    stage.step(N2, "restarts without its data").shows(N2, NOTHING);
    nodes[2].restart();
    stage.step(N3, "is up again").shows(N3, NOTHING);
    let tried = locks[B].mutex(NAME).lease(LEASE).try_lock().await;
    let is_kept_out = tried.is_err() && first.is_held();
    let says = if is_kept_out { "not held: N2 and N3 may not vote yet" } else { "held" };
    stage.step(B, format!("try_lock() → {says}")).waits().good();
    let second = locks[B].mutex(NAME).lease(LEASE).lock_timeout(LONG).await?;
    let is_alone = !first.is_held();
    stage.step(A, "its lease expires").has_nothing().shows(N1, NOTHING);
    let t2 = stage.token(second.token())?;
    let says = format!("lock() → held, token {t2}, once A's lease has certainly expired");
    stage.step(B, says).holds().shows(N1, "B").shows(N2, "B").shows(N3, "B").good();
    second.release().await?;
    let step = stage.step(B, "release()").has_nothing();
    step.shows(N1, NOTHING).shows(N2, NOTHING).shows(N3, NOTHING);
    let verdict = "B waited until every lease that N2 forgot had expired.";
    Ok(stage.ends(is_kept_out && is_alone, verdict))
}
