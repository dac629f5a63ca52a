//! A grant that is lost with the server that made it.

use leasehold::{ErrorKind, fence};
use testbed::{Proxy, Redis, Server};

use crate::naive::redis as naive_redis;
use crate::ours::{self, LONG, NAME};
use crate::scene::{Half, Lane, Played};
use crate::server;
use crate::stage::{NOTHING, Stage, client, thing};
use crate::story::Story;
use crate::trouble::Result;
use crate::wire::Wire;

pub(crate) const STORY: Story = Story {
    name: "lost-failover",
    line: "a master grants a lock and crashes before its replica knows; the replica grants it again",
    server: Server::Redis,
    telling: [
        "A acquires the lock on the master, which crashes before the replica has the key. The \
         replica is promoted and grants the lock to B as well.",
        "Redis replies before its replicas have the write, so a fail-over can undo a grant. \
         Neither client can detect this.",
        "leasehold does not guarantee a single holder across a Redis fail-over either. With \
         `replicas=1`, a replica confirms each grant, but another may be promoted. A fenced stock \
         rejects the first holder's writes once the second has presented its token.",
    ],
    play: || Box::pin(play()),
};

const LANES: &[Lane] =
    &[client("A"), client("B"), thing("master"), thing("replica"), thing("stock")];
const A: usize = 0;
const B: usize = 1;
const MASTER: usize = 2;
const REPLICA: usize = 3;
const STOCK: usize = 4;

/// A master, and a replica whose replication can be interrupted. The stock is on a separate server.
struct Servers {
    master: Redis,
    replica: Redis,
    between: Proxy,
    stock: Redis,
}

impl Servers {
    fn start() -> Self {
        let master = server::redis();
        let between = Proxy::before(master.port());
        let replica = server::replica_of(between.port());
        master.wait_for_replicas(1);
        let stock = server::redis();
        stock.command(&["SET", "stock", "10"]);
        Self { master, replica, between, stock }
    }

    /// Fails over as sentinels do when the master is gone.
    fn fail_over(&self) -> String {
        self.master.kill();
        let answer = self.replica.command(&["REPLICAOF", "NO", "ONE"]);
        self.replica.wait_for_master();
        answer
    }
}

async fn play() -> Result<Played> {
    Ok(Played { naive: naive(&Servers::start()).await?, ours: ours(&Servers::start()).await? })
}

async fn naive(servers: &Servers) -> Result<Half> {
    let mut stage = Stage::naive("SET NX PX on the master", LANES);
    let (mut a, mut b) =
        (Wire::open(servers.master.port()).await?, Wire::open(servers.replica.port()).await?);
    let mut stock = Wire::open(servers.stock.port()).await?;
    stage.begins(STOCK, "10");

    servers.between.freeze();
    let reply = naive_redis::take(&mut a, "A", "60000").await?;
    let says = format!("{reply}; the replica does not have it yet");
    stage.step(A, says).holds().shows(MASTER, "A");
    let read = stock.say(&["GET", "stock"]).await?;
    stage.step(A, format!("{read}; sells one, so 9 are left"));
    let answer = servers.fail_over();
    stage.step(MASTER, "crashes").shows(MASTER, "down").bad();
    stage.step(REPLICA, format!("is promoted: REPLICAOF NO ONE → {answer}"));
    let second = naive_redis::take(&mut b, "B", "60000").await?;
    stage.step(B, second.to_string()).holds().shows(REPLICA, "B").bad();
    let read = stock.say(&["GET", "stock"]).await?;
    let wrote = stock.say(&["SET", "stock", "8"]).await?;
    stage.step(B, format!("{read}; sells two: {wrote}")).shows(STOCK, "8");
    let wrote = stock.say(&["SET", "stock", "9"]).await?;
    let left = stock.ask(&["GET", "stock"]).await?;
    stage.step(A, format!("continues: {wrote}")).shows(STOCK, &left).bad();
    let verdict = format!("Three of 10 items were sold, but {left} are left: B's update is lost.");
    Ok(stage.ends(left == "7", verdict))
}

async fn ours(servers: &Servers) -> Result<Half> {
    let mut stage = Stage::ours("redis://…?replicas=1, and fence::redis", LANES);
    let mut stock = Wire::open(servers.stock.port()).await?;
    stage.begins(STOCK, "10");

    let url = servers.master.url();
    let careful = ours::client(&format!("{url}?replicas=1&replicas_ms=300"), "A").await?;
    servers.between.freeze();
    let error = careful.mutex(NAME).try_lock().await.err();
    let is_refused = error.is_some_and(|error| error.kind() == ErrorKind::Unconfirmed);
    let given_back = ours::holder(&careful).await?;
    let says = if is_refused { "error: Unconfirmed, lock released" } else { "held" };
    let says = format!("replicas=1: try_lock() → {says}");
    stage.step(A, says).shows(MASTER, &given_back).good();

    let locks = ours::client(&url, "A").await?;
    let first = locks.mutex(NAME).lease(LONG).lock().await?;
    let t1 = stage.token(first.token())?;
    let says = format!("without replicas=1: lock() → held, token {t1}");
    stage.step(A, says).holds().shows(MASTER, ours::holder(&locks).await?);
    fence::redis::check(stock.driver(), "stock", first.token()).await?;
    let read = stock.say(&["GET", "stock"]).await?;
    stage.step(A, format!("presents {t1} to the stock; {read}; sells one, so 9 are left"));
    let answer = servers.fail_over();
    stage.step(MASTER, "crashes").shows(MASTER, "down");
    stage.step(REPLICA, format!("is promoted: REPLICAOF NO ONE → {answer}"));
    let next = ours::client(&servers.replica.url(), "B").await?;
    let second = next.mutex(NAME).lock().await?;
    let t2 = stage.token(second.token())?;
    let says =
        format!("lock() → held, token {t2}, higher than {t1}: two clients believe they hold it");
    stage.step(B, says).holds().shows(REPLICA, ours::holder(&next).await?);
    fence::redis::check(stock.driver(), "stock", &second).await?;
    let read = stock.say(&["GET", "stock"]).await?;
    fence::redis::set(stock.driver(), "stock", &second, "8").await?;
    let says = format!("presents {t2}; {read}; sells two: set(stock, {t2}, 8) → OK");
    stage.step(B, says).shows(STOCK, "8");
    let late = fence::redis::set(stock.driver(), "stock", first.token(), "9").await;
    let is_stale = late.is_err_and(|error| error.kind() == ErrorKind::StaleToken);
    let answer = if is_stale { "rejected: StaleToken" } else { "OK" };
    let left = stock.ask(&["GET", "stock"]).await?;
    let says = format!("continues: set(stock, {t1}, 9) → {answer}; starts over");
    stage.step(A, says).has_nothing().shows(STOCK, &left).good();
    // The server that granted this lock is gone.
    ours::dies(first);
    second.release().await?;
    stage.step(B, "release()").has_nothing().shows(REPLICA, NOTHING);
    let is_kept = is_refused && given_back == NOTHING && is_stale && left == "8";
    let verdict = "Two clients believed they held the lock, as documented for a fail-over. The stock \
                   accepted only the later one's writes.";
    Ok(stage.ends(is_kept, verdict))
}
