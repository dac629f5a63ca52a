//! Compares `zookeeper:` with the bare protocol, the driver's own lock recipe, and kazoo.
//!
//! The bare protocol is the lower limit for any lock of this kind: create a child and delete it
//! again, sent by the same driver. All clients use one server without `fsync`, so that messages are
//! compared and not disks. Between acquire and release, a contender only reads the clock. A
//! *hand-over* is the time from one such read to the next, by another contender.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::Client;
use testbed::ZooKeeper;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use zookeeper_client::{Acls, Client as Session, CreateMode, LockPrefix};

use crate::figures::Kind;
use crate::measure::{
    Effort, Measured, Result, Subject, alternate, digits, duration, jain, keep, now, percentile,
    rate, table,
};
use crate::pair::show;

const CONTENDERS: [usize; 2] = [8, 32];
/// Number of clients that the contenders share.
const CLIENTS: usize = 4;
const PARENT: &str = "/bench/lock";

/// Measures everything about ZooKeeper.
pub(crate) fn all(effort: Effort) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let server = ZooKeeper::start();
    runtime.block_on(prepare(&server))?;
    pairs(&runtime, &server, effort)?;
    many_names(&runtime, &server, effort)?;
    for n in CONTENDERS {
        contention(&runtime, &server, effort, n)?;
    }
    crowd(&runtime, &server, effort)
}

fn hosts(server: &ZooKeeper) -> String {
    format!("127.0.0.1:{}", server.port())
}

fn url(server: &ZooKeeper) -> String {
    // With this naming, nodes stay, so no container is removed during the run.
    format!("{}/bench?naming=kazoo&session=60s", server.url())
}

async fn prepare(server: &ZooKeeper) -> Result<()> {
    let client = Session::connect(&hosts(server)).await?;
    client.mkdir(PARENT, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await?;
    Ok(())
}

/// Returns nanoseconds per pair. The clock is read once per ten pairs, which take a millisecond.
fn time_pairs<'a>(
    runtime: &'a Runtime,
    effort: Effort,
    pair: impl AsyncFn() -> Result<()> + 'a,
) -> impl FnMut() -> Result<f64> + 'a {
    move || {
        runtime.block_on(async {
            let (started, mut pairs) = (Instant::now(), 0_u32);
            while started.elapsed() < effort.time {
                for _ in 0..10 {
                    pair().await?;
                }
                pairs += 10;
            }
            Ok(started.elapsed().as_nanos() as f64 / f64::from(pairs))
        })
    }
}

fn pairs(runtime: &Runtime, server: &ZooKeeper, effort: Effort) -> Result<()> {
    let (raw, locks) = runtime.block_on(async {
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((
            Session::connect(&hosts(server)).await?,
            leasehold::connect(url(server)).await?,
        ))
    })?;
    let bare = time_pairs(runtime, effort, async || {
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let prefix = format!("{PARENT}/raw-");
        let (_, sequence) = raw.create(&prefix, b"", &options).await?;
        Ok(raw.delete(&format!("{prefix}{sequence}"), None).await?)
    });
    let recipe = time_pairs(runtime, effort, async || {
        let prefix = LockPrefix::new_curator("/bench/recipe", "lock-")?;
        let parents = CreateMode::Persistent.with_acls(Acls::anyone_all());
        let options = zookeeper_client::LockOptions::new(Acls::anyone_all())
            .with_ancestor_options(parents)?;
        let held = raw.lock(prefix, b"", options).await?;
        // It releases in the background, and a pair is complete when that is done.
        let path = held.lock_path().to_owned();
        drop(held);
        while raw.check_stat(&path).await?.is_some() {}
        Ok(())
    });
    let kazoo = || kazoo_pairs(server, effort);
    let released = locks.mutex("pair");
    let release = time_pairs(runtime, effort, async move || {
        Ok(released.lock().await?.release().await.map(drop)?)
    });
    let measured = alternate(
        effort,
        vec![
            Subject::new("create + delete", bare),
            Subject::new("the driver's lock recipe", recipe),
            Subject::new("kazoo", kazoo),
            Subject::new("leasehold, lock + release", release),
        ],
    )?;
    show("zookeeper:, uncontended pair", &measured, 1);
    Ok(())
}

/// Runs kazoo's work in its own process and returns its output.
fn kazoo(server: &ZooKeeper, work: &[&str]) -> Result<String> {
    let mut python = Command::new(testbed::python());
    python.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../leasehold-zookeeper/tests/interop/kazoo_peer.py"
    ));
    python.args([&hosts(server), "/bench/kazoo"]).args(work);
    let output = python.stdin(Stdio::null()).output()?;
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the nanoseconds for one of kazoo's pairs.
fn kazoo_pairs(server: &ZooKeeper, effort: Effort) -> Result<f64> {
    Ok(kazoo(server, &["pairs", &effort.time.as_secs_f64().to_string()])?.trim().parse()?)
}

/// Runs kazoo's threads, on as many clients as the other subjects have. The requests include those
/// of its start and end.
fn kazoo_contends(server: &ZooKeeper, time: Duration, n: usize) -> Result<Round> {
    let received = server.metric("zk_packets_received");
    let (seconds, n_text) = (time.as_secs_f64().to_string(), n.to_string());
    let output = kazoo(server, &["contend", &seconds, &n_text, &CLIENTS.to_string()])?;
    let note = |line: &str| -> Result<(u64, usize)> {
        let (who, at) = line.split_once(' ').ok_or("kazoo tells no turn")?;
        Ok((at.parse()?, who.parse()?))
    };
    let notes: Result<Vec<_>> = output.lines().map(note).collect();
    Ok(Round::of(notes?, n, server.metric("zk_packets_received") - received))
}

/// Measures 64 tasks, each on its own name.
fn many_names(runtime: &Runtime, server: &ZooKeeper, effort: Effort) -> Result<()> {
    const TASKS: usize = 64;
    let raw = Arc::new(runtime.block_on(Session::connect(&hosts(server)))?);
    let locks = runtime.block_on(leasehold::connect(url(server)))?;
    let bare = || {
        let raw = raw.clone();
        together(runtime, TASKS, effort, move |i| {
            let raw = raw.clone();
            async move {
                let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
                let prefix = format!("{PARENT}/raw-{i}-");
                let (_, sequence) = raw.create(&prefix, b"", &options).await?;
                Ok(raw.delete(&format!("{prefix}{sequence}"), None).await?)
            }
        })
    };
    let ours = || {
        let locks = locks.clone();
        together(runtime, TASKS, effort, move |i| {
            let lock = locks.mutex(format!("name-{i}"));
            async move { Ok(lock.lock().await?.release().await.map(drop)?) }
        })
    };
    let subjects = vec![Subject::new("create + delete", bare), Subject::new("leasehold", ours)];
    let measured = alternate(effort, subjects)?;
    show(
        "zookeeper:, 64 tasks, each on a name of its own (time for one pair of all)",
        &measured,
        1,
    );
    Ok(())
}

/// Returns nanoseconds per pair while `tasks` tasks run.
fn together<F>(
    runtime: &Runtime,
    tasks: usize,
    effort: Effort,
    pair: impl Fn(usize) -> F,
) -> Result<f64>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let numbered = |i: usize| {
        let pair = pair(i);
        async move { pair.await.map(|()| i) }
    };
    runtime.block_on(async {
        let (started, mut pairs) = (Instant::now(), 0_u32);
        let mut running = JoinSet::new();
        for i in 0..tasks {
            running.spawn(numbered(i));
        }
        while let Some(done) = running.join_next().await {
            let i = done??;
            pairs += 1;
            if started.elapsed() < effort.time {
                running.spawn(numbered(i));
            }
        }
        Ok(started.elapsed().as_nanos() as f64 / f64::from(pairs))
    })
}

/// The results of one round of contention.
struct Round {
    turns: f64,
    handovers: Vec<f64>,
    shares: Vec<f64>,
    /// Number of requests that the server received per turn.
    requests: f64,
}

impl Round {
    /// Evaluates a round. `notes` are the times at which each of `n` contenders had the lock, and
    /// `received` is the number of requests that the server received.
    fn of(mut notes: Vec<(u64, usize)>, n: usize, received: i64) -> Self {
        notes.sort_unstable();
        let mut shares = vec![0.0; n];
        notes.iter().for_each(|(_, i)| shares[*i] += 1.0);
        let changed = notes.windows(2).filter(|two| two[0].1 != two[1].1);
        let span = notes.last().map_or(0, |l| l.0) - notes.first().map_or(0, |f| f.0);
        Self {
            turns: notes.len() as f64 * 1e9 / span.max(1) as f64,
            handovers: changed.map(|two| (two[1].0 - two[0].0) as f64).collect(),
            shares,
            requests: received as f64 / notes.len().max(1) as f64,
        }
    }
}

/// Runs `n` tasks that want one lock. Each records when it had it.
fn contend<F>(
    runtime: &Runtime,
    server: &ZooKeeper,
    n: usize,
    time: Duration,
    turn: impl Fn(usize) -> F,
) -> Result<Round>
where
    F: Future<Output = Result<u64>> + Send + 'static,
{
    let received = server.metric("zk_packets_received");
    let (started, mut notes) = (Instant::now(), Vec::new());
    runtime.block_on(async {
        let mut running = JoinSet::new();
        let again = |i: usize| {
            let turn = turn(i);
            async move { (i, turn.await) }
        };
        for i in 0..n {
            running.spawn(again(i));
        }
        while let Some(done) = running.join_next().await {
            let (i, at) = done?;
            notes.push((at?, i));
            if started.elapsed() < time {
                running.spawn(again(i));
            }
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })?;
    Ok(Round::of(notes, n, server.metric("zk_packets_received") - received))
}

fn contention(runtime: &Runtime, server: &ZooKeeper, effort: Effort, n: usize) -> Result<()> {
    let (raws, locks) = clients(runtime, server)?;
    let recipe = || {
        contend(runtime, server, n, effort.time, |i| {
            let raw = raws[i % CLIENTS].clone();
            async move {
                let prefix = LockPrefix::new_curator(PARENT, "lock-")?;
                let held = raw.lock(prefix, b"", Acls::anyone_all()).await?;
                let at = now();
                drop(held);
                Ok(at)
            }
        })
    };
    let ours = || contend(runtime, server, n, effort.time, one_of_ours(&locks));
    let subjects = vec![
        Subject::new("change + watch event, bare", || hops(runtime, server, effort.time, &raws)),
        Subject::new("the driver's lock recipe", recipe),
        Subject::new("kazoo", || kazoo_contends(server, effort.time, n)),
        Subject::new("leasehold", ours),
    ];
    show_rounds(&format!("zookeeper:, {n} contenders"), &alternate(effort, subjects)?);
    Ok(())
}

/// Measures the minimum time to wake a waiter, from before a node is written until another client's
/// watch fires. Its turns are those hops, one after the other, each with a new watch.
fn hops(
    runtime: &Runtime,
    server: &ZooKeeper,
    time: Duration,
    raws: &[Arc<Session>],
) -> Result<Round> {
    let [writes, watches, ..] = raws else { return Err("two clients are needed".into()) };
    let received = server.metric("zk_packets_received");
    let (started, mut handovers) = (Instant::now(), Vec::new());
    runtime.block_on(async {
        while started.elapsed() < time {
            let (_, _, watcher) = watches.get_and_watch_data(PARENT).await?;
            let before = now();
            writes.set_data(PARENT, b"", None).await?;
            watcher.changed().await;
            handovers.push((now() - before) as f64);
        }
        Ok::<_, zookeeper_client::Error>(())
    })?;
    let (hops, span) = (handovers.len() as f64, started.elapsed().as_secs_f64());
    let requests = (server.metric("zk_packets_received") - received) as f64 / hops;
    Ok(Round { turns: hops / span, handovers, shares: vec![1.0], requests })
}

/// Measures a waiting crowd. The driver's recipe is left out, because its clean-up of a thousand
/// contenders takes longer than the measurement.
fn crowd(runtime: &Runtime, server: &ZooKeeper, effort: Effort) -> Result<()> {
    let (_, locks) = clients(runtime, server)?;
    let ours = || contend(runtime, server, effort.crowd, effort.time * 4, one_of_ours(&locks));
    let measured = alternate(effort, vec![Subject::new("leasehold", ours)])?;
    show_rounds(&format!("zookeeper:, {} contenders", effort.crowd), &measured);
    Ok(())
}

type Turn = std::pin::Pin<Box<dyn Future<Output = Result<u64>> + Send>>;

fn one_of_ours(locks: &[Client]) -> impl Fn(usize) -> Turn {
    move |i| {
        let lock = locks[i % CLIENTS].mutex("contention");
        Box::pin(async move {
            let guard = lock.lock().await?;
            let at = now();
            guard.release().await?;
            Ok(at)
        })
    }
}

type Clients = (Vec<Arc<Session>>, Vec<Client>);

fn clients(runtime: &Runtime, server: &ZooKeeper) -> Result<Clients> {
    runtime.block_on(async {
        let (mut raws, mut locks) = (Vec::new(), Vec::new());
        for _ in 0..CLIENTS {
            raws.push(Arc::new(Session::connect(&hosts(server)).await?));
            locks.push(leasehold::connect(url(server)).await?);
        }
        Ok((raws, locks))
    })
}

fn show_rounds(title: &str, measured: &[Measured<'_, Round>]) {
    keep(Kind::HandOver, title, measured, |round| percentile(round.handovers.clone(), 0.5));
    let first = &measured[0];
    let head = ["", "turns/s", "of the first", "hand-over p50", "p99", "Jain", "requests a turn"];
    let row = |m: &Measured<'_, Round>| {
        let handovers: Vec<f64> = m.rounds.iter().flat_map(|r| r.handovers.clone()).collect();
        vec![
            m.name.to_owned(),
            rate(m.median(|r| r.turns)),
            digits(m.ratio(first, |r| r.turns)),
            duration(percentile(handovers.clone(), 0.5)),
            duration(percentile(handovers, 0.99)),
            digits(m.median(|r| jain(&r.shares))),
            digits(m.median(|r| r.requests)),
        ]
    };
    table(title, &head, measured.iter().map(row).collect());
}
