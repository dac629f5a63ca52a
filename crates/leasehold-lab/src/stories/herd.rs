//! One release that wakes all waiters.

use std::time::{Duration, Instant};

use leasehold::{Client, MutexGuard};
use testbed::{Proxy, Server, ZooKeeper};
use tokio::task::JoinSet;
use zookeeper_client::Client as Session;

use crate::naive::zookeeper as naive_zookeeper;
use crate::ours::{self, LONG, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};

pub(crate) const STORY: Story = Story {
    name: "herd",
    line: "one release wakes every waiter, and all but one go back to waiting",
    server: Server::ZooKeeper,
    telling: [
        "Ten clients watch the first node of the queue. When it is deleted, all ten read the \
         queue; one acquires the lock and nine watch the next node. It takes 55 wake-ups until \
         all ten have held the lock.",
        "The notification does not say whose turn it is, so the cost of each hand-over grows with \
         the number of waiters.",
        "In leasehold's queue, a release hands the lock to exactly one waiter and wakes no other. \
         Each waiter watches only the node ahead of it, so the cost of a hand-over does not depend \
         on the number of waiters.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] =
    &[client("A"), client("ten"), thing("woken"), thing("total"), thing("holder")];
const A: usize = 0;
const TEN: usize = 1;
const WOKEN: usize = 2;
const ALL: usize = 3;
const HOLDS: usize = 4;

const WAITERS: usize = 10;

async fn play() -> Result<Played> {
    let server = server::zookeeper();
    Ok(Played { naive: naive(&server).await?, ours: ours(&server).await? })
}

async fn naive(server: &ZooKeeper) -> Result<Half> {
    let mut stage = Stage::naive("ephemeral sequential nodes; all waiters watch the first", LANES);
    let address = format!("127.0.0.1:{}", server.port());
    let first = Session::connect(&address).await?;
    naive_zookeeper::begin(&first).await?;
    let mine = naive_zookeeper::stand(&first).await?;
    stage.step(A, "creates the first node").holds().shows(HOLDS, "A");
    let (mut waiting, mut watched) = (Vec::new(), Vec::new());
    for _ in 0..WAITERS {
        let client = Session::connect(&address).await?;
        let mine = naive_zookeeper::stand(&client).await?;
        let watcher = naive_zookeeper::look(&client, &mine).await?;
        watched.push(watcher.ok_or_else(|| Trouble::new("acquired the lock while A holds it"))?);
        waiting.push((client, mine));
    }
    stage.step(TEN, "each creates a node and watches the first").waits();
    naive_zookeeper::leave(&first, &mine).await?;
    stage.step(A, "deletes its node").has_nothing().shows(HOLDS, "–");
    let (mut all, mut at_first) = (0, 0);
    while !waiting.is_empty() {
        let woken = watched.len();
        for watcher in watched.drain(..) {
            watcher.changed().await;
        }
        all += woken;
        at_first = at_first.max(woken);
        let mut holder = None;
        for (at, (client, mine)) in waiting.iter().enumerate() {
            match naive_zookeeper::look(client, mine).await? {
                Some(watcher) => watched.push(watcher),
                None => holder = Some(at),
            }
        }
        let holder =
            holder.ok_or_else(|| Trouble::new("all are woken, but no client holds the lock"))?;
        let (client, mine) = waiting.remove(holder);
        if all == woken {
            let says =
                format!("{woken} are woken and read the queue: one holds, {} watch it", woken - 1);
            let step = stage.step(TEN, says).shows(WOKEN, woken.to_string());
            step.shows(ALL, all.to_string()).shows(HOLDS, "one").bad();
        }
        naive_zookeeper::leave(&client, &mine).await?;
    }
    let says = format!("nine releases later: {all} wake-ups for {WAITERS} hand-overs");
    let step = stage.step(TEN, says).has_nothing();
    step.shows(WOKEN, "1").shows(ALL, all.to_string()).shows(HOLDS, "–").bad();
    let verdict =
        format!("One release woke {at_first} clients. Ten hand-overs took {all} wake-ups.");
    Ok(stage.ends(at_first == 1, verdict))
}

/// Waits for the lock and returns its guard.
async fn waiter(locks: Client) -> Result<MutexGuard> {
    Ok(locks.mutex(NAME).lock_timeout(LONG).await?)
}

async fn ours(server: &ZooKeeper) -> Result<Half> {
    let mut stage = Stage::ours("mutex.lock()", LANES);
    let proxy = Proxy::before(server.port());
    let url = |port: u16| format!("zookeeper://127.0.0.1:{port}?session=60s");
    let first = ours::client(&url(server.port()), "A").await?;
    let guard = first.mutex(NAME).lock().await?;
    stage.step(A, "lock() → held").holds().shows(HOLDS, "A");
    let mut waiting = JoinSet::new();
    for count in 1..=WAITERS {
        let locks = ours::client(&url(proxy.port()), "one").await?;
        waiting.spawn(waiter(locks));
        ours::until_waiting(&first, count).await?;
    }
    stage.step(TEN, "lock(), each on its own connection → all wait").waits();
    settle(&proxy).await?;
    let (before, began) = (proxy.requests(), Instant::now());
    guard.release().await?;
    stage.step(A, "release()").has_nothing().shows(HOLDS, "–");
    let mut all = 0;
    let guard = next(&mut waiting).await?;
    settle(&proxy).await?;
    let asked = proxy.requests() - before;
    // On a busy machine this takes so long that waiters send heartbeats, one every two seconds.
    let heartbeats = WAITERS as f64 * began.elapsed().as_secs_f64() / 2.0;
    all += 1;
    let others = waiting.len();
    let is_one = others == WAITERS - 1 && waiting.try_join_next().is_none();
    let is_quiet = (asked as f64) < WAITERS as f64 + heartbeats;
    let says = match is_one && is_quiet {
        true => format!("one is woken and holds; the {others} others are not woken"),
        false => format!("{} were woken and sent {asked} requests", WAITERS - others),
    };
    let step = stage.step(TEN, says).shows(WOKEN, "1");
    step.shows(ALL, all.to_string()).shows(HOLDS, "one").good();
    guard.release().await?;
    while !waiting.is_empty() {
        next(&mut waiting).await?.release().await?;
        all += 1;
    }
    let says = format!("nine releases later: {all} wake-ups for {WAITERS} hand-overs");
    stage.step(TEN, says).has_nothing().shows(ALL, all.to_string()).shows(HOLDS, "–").good();
    let verdict = format!("One release woke one client. Ten hand-overs took {all} wake-ups.");
    Ok(stage.ends(is_one && is_quiet && all == WAITERS, verdict))
}

/// Waits for the next holder and returns its guard.
async fn next(waiting: &mut JoinSet<Result<MutexGuard>>) -> Result<MutexGuard> {
    waiting.join_next().await.ok_or_else(|| Trouble::new("no client waits"))??
}

/// Waits until the server has received no requests for a while. Later requests are then caused by
/// the next step.
async fn settle(proxy: &Proxy) -> Result<()> {
    let mut quiet = 0;
    for _ in 0..2_000 {
        let before = proxy.requests();
        tokio::time::sleep(Duration::from_millis(10)).await;
        quiet = if proxy.requests() == before { quiet + 1 } else { 0 };
        if quiet == 10 {
            return Ok(());
        }
    }
    Err(Trouble::new("ZooKeeper's clients keep sending requests"))
}
