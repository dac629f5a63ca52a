//! A resource of two nodes, each with its own memory of the greatest token.

use leasehold::{ErrorKind, Token, fence};
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
    line: "the resource has two nodes, and the new holder has been to one of them",
    rows: "R51",
    server: Server::Redis,
    telling: [
        "B has shown its token to the node N1 and has not been to N2 yet; A wakes, is refused by N1, \
         and N2, which has seen nothing greater, takes its write.",
        "Each node can only compare with what it has seen itself, and a holder that shows its token \
         where it happens to write leaves the others open to those before it.",
        "Whoever holds shows its token to all nodes before it reads or writes on any, `check` on \
         each: from then on none lets an older one in.",
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

/// The same steps, with the token shown to all nodes first or to each as it comes.
async fn half(redis: &Redis, nodes: &[Redis; 2], shows_first: bool) -> Result<Half> {
    let mut stage = match shows_first {
        true => Stage::ours("fence::redis::check on all nodes, then set", LANES),
        false => Stage::naive("the token is shown to each node as it is written", LANES),
    };
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wires = [Wire::open(nodes[0].port()).await?, Wire::open(nodes[1].port()).await?];

    let first = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let late = first.token();
    let t1 = stage.token(late)?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    let says = "stands still before it writes anything, and its lease is over";
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
    stage.step(A, format!("asks its guard, without I/O: {says}")).has_nothing();
    let found = wires[1].say(&["GET", "total"]).await?;
    let told = stage.step(B, format!("on N2: {found}"));
    if found.answer == "nil" {
        told.good()
    } else {
        told.bad()
    };
    set(&mut stage, &mut wires, (B, 1), (guard.token(), &t2), "B").await?;
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = match to_other {
        false => "Neither node took anything of A's once B had begun.",
        true => "B had begun on N1, and on N2 it found what A wrote after that.",
    };
    Ok(stage.ends(is_lost && !to_one && !to_other && found.answer == "nil", verdict))
}

/// Writes on a node, and tells whether it was taken.
async fn set(
    stage: &mut Stage,
    wires: &mut [Wire; 2],
    (who, node): (usize, usize),
    (token, name): (Token, &str),
    value: &str,
) -> Result<bool> {
    let wire = &mut wires[node];
    let wrote = fence::redis::set(wire.driver(), "total", token, value).await;
    let is_refused = match wrote {
        Ok(()) => false,
        Err(error) if error.kind() == ErrorKind::StaleToken => true,
        Err(error) => return Err(error.into()),
    };
    let answer = if is_refused { "refused: StaleToken" } else { "OK" };
    let wakes = if who == A && node == 0 { "wakes; " } else { "" };
    let says = format!("{wakes}on N{}: set(total, {name}, {value}) → {answer}", node + 1);
    let shows = wire.ask(&["GET", "total"]).await?;
    let told = stage.step(who, says).shows(NODES[node], shows);
    match (who == A, is_refused) {
        (true, true) => told.good(),
        (true, false) => told.bad(),
        (false, _) => told,
    };
    Ok(!is_refused)
}
