//! One release that wakes all who wait.

use std::time::Duration;

use leasehold::{Guard, Leasehold};
use testbed::{Proxy, Server, ZooKeeper};
use tokio::task::JoinSet;
use zookeeper_client::Client;

use crate::naive::zookeeper as naive_zookeeper;
use crate::ours::{self, LONG, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{Stage, client, thing};
use crate::story::Story;
use crate::trouble::{Result, Trouble};

pub(crate) const STORY: Story = Story {
    name: "herd",
    line: "one release wakes all who wait, and all but one go back to waiting",
    rows: "R47",
    server: Server::ZooKeeper,
    telling: [
        "Ten clients wait, each watches the first node of the queue; when that is deleted all ten \
         are told and all ten ask again, for one of them to hold and nine to watch the next: 55 \
         wake-ups until ten have had their turn.",
        "A watch on the same node for all says that something changed and not whose turn it is, so \
         the cost of a turn grows with the number of those who wait.",
        "In leasehold's queue a release lets in exactly one and wakes no other; those near the \
         front hear of it from ZooKeeper, in one message that says all, and ask nothing.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] =
    &[client("A"), client("ten"), thing("woken"), thing("in all"), thing("holds")];
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
    let mut stage = Stage::naive("ephemeral sequential nodes, all watch the first", LANES);
    let address = format!("127.0.0.1:{}", server.port());
    let first = Client::connect(&address).await?;
    naive_zookeeper::begin(&first).await?;
    let mine = naive_zookeeper::stand(&first).await?;
    stage.step(A, "makes a node, which is the first").holds().shows(HOLDS, "A");
    let (mut waiting, mut watched) = (Vec::new(), Vec::new());
    for _ in 0..WAITERS {
        let client = Client::connect(&address).await?;
        let mine = naive_zookeeper::stand(&client).await?;
        let watcher = naive_zookeeper::look(&client, &mine).await?;
        watched.push(watcher.ok_or_else(|| Trouble::new("held while A holds"))?);
        waiting.push((client, mine));
    }
    stage.step(TEN, "make a node each, and watch the first").waits();
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
        let holder = holder.ok_or_else(|| Trouble::new("woken, and nobody holds"))?;
        let (client, mine) = waiting.remove(holder);
        if all == woken {
            let says = format!("{woken} are woken and ask: one holds, {} watch it", woken - 1);
            let told = stage.step(TEN, says).shows(WOKEN, woken.to_string());
            told.shows(ALL, all.to_string()).shows(HOLDS, "one").bad();
        }
        naive_zookeeper::leave(&client, &mine).await?;
    }
    let says = format!("nine releases later: woken {all} times for {WAITERS} turns");
    let told = stage.step(TEN, says).has_nothing();
    told.shows(WOKEN, "1").shows(ALL, all.to_string()).shows(HOLDS, "–").bad();
    let verdict = format!("One release woke {at_first} clients, and ten turns took {all}.");
    Ok(stage.ends(at_first == 1, verdict))
}

/// Waits for the lock.
async fn waiter(locks: Leasehold) -> Result<Guard> {
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
    stage.step(TEN, "lock(), each on its own connection → wait").waits();
    settle(&proxy).await?;
    let before = proxy.requests();
    guard.release().await?;
    stage.step(A, "release()").has_nothing().shows(HOLDS, "–");
    let mut all = 0;
    let guard = next(&mut waiting).await?;
    settle(&proxy).await?;
    let asked = proxy.requests() - before;
    all += 1;
    let others = waiting.len();
    let is_one = others == WAITERS - 1 && waiting.try_join_next().is_none();
    let is_quiet = asked < WAITERS;
    let says = match is_one && is_quiet {
        true => format!("one is woken, and holds; the {others} others are not"),
        false => format!("{} were woken, and asked {asked} times", WAITERS - others),
    };
    let told = stage.step(TEN, says).shows(WOKEN, "1");
    told.shows(ALL, all.to_string()).shows(HOLDS, "one").good();
    guard.release().await?;
    while !waiting.is_empty() {
        next(&mut waiting).await?.release().await?;
        all += 1;
    }
    let says = format!("nine releases later: woken {all} times for {WAITERS} turns");
    stage.step(TEN, says).has_nothing().shows(ALL, all.to_string()).shows(HOLDS, "–").good();
    let verdict = format!("One release woke one client, and ten turns took {all}.");
    Ok(stage.ends(is_one && is_quiet && all == WAITERS, verdict))
}

/// The next that holds.
async fn next(waiting: &mut JoinSet<Result<Guard>>) -> Result<Guard> {
    waiting.join_next().await.ok_or_else(|| Trouble::new("nobody waits"))??
}

/// Returns when nobody has asked for a while: what follows is then the answer to what is done next.
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
    Err(Trouble::new("ZooKeeper's clients do not come to rest"))
}
