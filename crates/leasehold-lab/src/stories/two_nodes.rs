//! A resource of two nodes, each of which stores its own highest token.

use leasehold::{ErrorKind, FencingToken, fence};
use testbed::{Redis, Server};

use crate::ours::{self, NAME, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "two-nodes",
    line: "the resource has two nodes, and the new holder has contacted only one",
    server: Server::Redis,
    telling: [
        "B has presented its token to node N1, but not yet to N2. A resumes, and N1 rejects its \
         write. N2 has seen no higher token and accepts it.",
        "Each node knows only the tokens that it has seen itself.",
        "A holder must present its token to all nodes, with `check` on each, before it reads or \
         writes on any. From then on, no node accepts an older token.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("lock"), thing("N1"), thing("N2")];
const A: usize = 0;
const B: usize = 1;
const LOCK: usize = 2;
const NODES: [usize; 2] = [3, 4];

async fn play() -> Result<Played> {
    let (locks, nodes) = (server::redis(), [server::redis(), server::redis()]);
    let naive = half(&locks, &nodes, false).await?;
    for server in [&locks, &nodes[0], &nodes[1]] {
        server.command(&["FLUSHALL"]);
    }
    Ok(Played { naive, ours: half(&locks, &nodes, true).await? })
}

/// Plays the steps. The token is either presented to all nodes first, or to each node when it is
/// written.
async fn half(redis: &Redis, nodes: &[Redis; 2], shows_first: bool) -> Result<Half> {
    let mut stage = match shows_first {
        true => Stage::ours("fence::redis::check on all nodes, then set", LANES),
        false => Stage::naive("the token is presented to each node when it is written", LANES),
    };
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wires = [Wire::open(nodes[0].port()).await?, Wire::open(nodes[1].port()).await?];

    let first = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let late = first.token();
    let t1 = stage.token(late)?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    let says = "is paused before it writes anything; its lease expires";
    stage.step(A, says).stands_still().shows(LOCK, NOTHING);
    let guard = locks[B].mutex(NAME).lock().await?;
    let t2 = stage.token(guard.token())?;
    let says = format!("lock() → held, token {t2}");
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    if shows_first {
        for wire in &mut wires {
            fence::redis::check(wire.driver(), "total", &guard).await?;
        }
        stage.step(B, format!("check(total, {t2}) on N1 and on N2 → OK")).good();
    }
    set(&mut stage, &mut wires, (B, 0), (guard.token(), &t2), "B").await?;
    let to_one = set(&mut stage, &mut wires, (A, 0), (late, &t1), "A").await?;
    let to_other = set(&mut stage, &mut wires, (A, 1), (late, &t1), "A").await?;
    let is_lost = !first.is_held();
    let says = if is_lost { "Lost" } else { "Held" };
    stage.step(A, format!("checks its guard, without I/O: {says}")).has_nothing();
    let found = wires[1].say(&["GET", "total"]).await?;
    let step = stage.step(B, format!("on N2: {found}"));
    if found.answer == "nil" {
        step.good()
    } else {
        step.bad()
    };
    set(&mut stage, &mut wires, (B, 1), (guard.token(), &t2), "B").await?;
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = match to_other {
        false => "Neither node accepted a write of A's after B had started.",
        true => "B had started on N1, and on N2 it found what A wrote after that.",
    };
    Ok(stage.ends(is_lost && !to_one && !to_other && found.answer == "nil", verdict))
}

/// Writes to a node, and returns whether the write was accepted.
async fn set(
    stage: &mut Stage,
    wires: &mut [Wire; 2],
    (who, node): (usize, usize),
    (token, name): (FencingToken, &str),
    value: &str,
) -> Result<bool> {
    let wire = &mut wires[node];
    let wrote = fence::redis::set(wire.driver(), "total", token, value).await;
    let is_refused = match wrote {
        Ok(()) => false,
        Err(error) if error.kind() == ErrorKind::StaleToken => true,
        Err(error) => return Err(error.into()),
    };
    let answer = if is_refused { "rejected: StaleToken" } else { "OK" };
    let wakes = if who == A && node == 0 { "resumes; " } else { "" };
    let says = format!("{wakes}on N{}: set(total, {name}, {value}) → {answer}", node + 1);
    let shows = wire.ask(&["GET", "total"]).await?;
    let step = stage.step(who, says).shows(NODES[node], shows);
    match (who == A, is_refused) {
        (true, true) => step.good(),
        (true, false) => step.bad(),
        (false, _) => step,
    };
    Ok(!is_refused)
}
