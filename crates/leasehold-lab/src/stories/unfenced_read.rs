//! A fence that checks the token of writes, but not of reads.

use leasehold::{ErrorKind, fence};
use testbed::{Redis, Server};

use crate::ours::{self, NAME, SHORT};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "unfenced-read",
    line: "late writes arrive in token order, and the fence notices nothing",
    server: Server::Redis,
    telling: [
        "A is paused until B has the lock and has read the stock. A resumes and writes, and its \
         token is still the highest seen. Then B writes a value that it computed from its earlier \
         read.",
        "A fence learns of a new holder only when that holder presents its token, and B read \
         without presenting it. A's update is lost.",
        "Also present the token before reads that lead to a write, with `fence::redis::check`. \
         From then on, no older holder can change what was read.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] = &[client("A"), client("B"), thing("lock"), thing("stock"), thing("highest")];
const A: usize = 0;
const B: usize = 1;
const LOCK: usize = 2;
const STOCK: usize = 3;
const MARK: usize = 4;

async fn play() -> Result<Played> {
    let redis = server::redis();
    let naive = half(&redis, false).await?;
    redis.command(&["FLUSHALL"]);
    Ok(Played { naive, ours: half(&redis, true).await? })
}

/// Plays the steps. The token is either presented before reading or not.
async fn half(redis: &Redis, shows_first: bool) -> Result<Half> {
    let mut stage = match shows_first {
        true => Stage::ours("fence::redis::check, then read, then set", LANES),
        false => Stage::naive("a token with each write, but not with reads", LANES),
    };
    let locks = [ours::client(&redis.url(), "A").await?, ours::client(&redis.url(), "B").await?];
    let mut wire = Wire::open(redis.port()).await?;
    wire.say(&["SET", "stock", "10"]).await?;
    stage.begins(STOCK, "10");

    let first = locks[A].mutex(NAME).lease(SHORT).no_renewal().lock().await?;
    let late = first.token();
    let t1 = stage.token(late)?;
    stage.step(A, format!("lock() → held, token {t1}")).holds().shows(LOCK, "A");
    read(&mut stage, &mut wire, A, (late, &t1), shows_first).await?;
    stage.step(A, "is paused; its lease expires").stands_still().shows(LOCK, NOTHING);
    let guard = locks[B].mutex(NAME).lock().await?;
    let t2 = stage.token(guard.token())?;
    let says = format!("lock() → held, token {t2}");
    stage.step(B, says).holds().shows(LOCK, ours::holder(&locks[B]).await?);
    read(&mut stage, &mut wire, B, (guard.token(), &t2), shows_first).await?;

    let wrote = fence::redis::set(wire.driver(), "stock", late, "9").await;
    let is_refused = wrote.is_err_and(|error| error.kind() == ErrorKind::StaleToken);
    let answer = if is_refused { "rejected: StaleToken" } else { "OK" };
    let says = format!("resumes: set(stock, {t1}, 9) → {answer}");
    let left = wire.ask(&["GET", "stock"]).await?;
    let mark = if is_refused { &t2 } else { &t1 };
    let step = stage.step(A, says).has_nothing().shows(STOCK, left).shows(MARK, mark);
    if is_refused {
        step.good()
    } else {
        step
    };
    fence::redis::set(wire.driver(), "stock", &guard, "8").await?;
    let left = wire.ask(&["GET", "stock"]).await?;
    let says = format!("set(stock, {t2}, 8) → OK");
    let step = stage.step(B, says).shows(STOCK, &left).shows(MARK, &t2);
    if is_refused {
        step
    } else {
        step.bad()
    };
    guard.release().await?;
    stage.step(B, "release()").has_nothing().shows(LOCK, NOTHING);
    let verdict = match is_refused {
        true => {
            format!("Two of 10 items were sold, and {left} are left. A knows that its sale failed.")
        }
        false => format!("Three of 10 items were sold, but {left} are left: A's update is lost."),
    };
    Ok(stage.ends(is_refused && left == "8", verdict))
}

/// Reads the stock, with or without presenting the token.
async fn read(
    stage: &mut Stage,
    wire: &mut Wire,
    who: usize,
    (token, name): (leasehold::FencingToken, &str),
    shows_first: bool,
) -> Result<()> {
    if shows_first {
        fence::redis::check(wire.driver(), "stock", token).await?;
        stage.step(who, format!("check(stock, {name}) → OK")).shows(MARK, name);
    }
    let read = wire.say(&["GET", "stock"]).await?;
    let sells = if who == A { "one" } else { "two" };
    stage.step(who, format!("{read}; sells {sells}"));
    Ok(())
}
