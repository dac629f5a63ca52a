//! Measures ten thousand waiters for one lock, and ten thousand locks held by one client, on each
//! store.
//!
//! *A crowd waits* compares a hand-over with ten thousand in the queue with one with ten. The cost
//! of a turn must not grow with the number of waiters.
//!
//! *Many are held* measures the client's cost of keeping ten thousand locks renewed, as a share of
//! one processor. It also shows how many locks it still holds in the end.

use std::any::Any;
use std::time::{Duration, Instant};

use leasehold::Client;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::contention::Outcome;
use crate::figures::Kind;
use crate::measure::{Effort, Result, digits, duration, keep, rate, table};
use crate::measure::{Subject, alternate};
use crate::queued;
use crate::scratch::Scratch;

const CLIENTS: usize = 8;
const FEW: usize = 10;

/// A store, and the server or directory that it needs.
struct Place {
    name: &'static str,
    url: String,
    _server: Box<dyn Any>,
}

fn place(name: &'static str, url: String, server: impl Any) -> Place {
    Place { name, url, _server: Box::new(server) }
}

/// Measures the stores one after the other, so that each has the machine to itself.
fn each(mut work: impl FnMut(&Place) -> Result<()>) -> Result<()> {
    work(&place("memory:", "memory:crowds".into(), ()))?;
    let scratch = Scratch::new()?;
    work(&place("file:", scratch.url(), scratch))?;
    #[cfg(feature = "sqlite")]
    {
        let scratch = Scratch::new()?;
        let url = format!("sqlite:{}", scratch.path().join("locks.db").display());
        work(&place("sqlite:", url, scratch))?;
    }
    #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    {
        use testbed::{MariaDb, Postgres, Setup};
        let server = Postgres::with(Setup::new().fast());
        work(&place("postgres:", server.database(), server))?;
        let server = MariaDb::with(Setup::new().fast());
        work(&place("mysql: (MariaDB)", server.database(), server))?;
    }
    #[cfg(feature = "redis")]
    {
        let server = testbed::Redis::with(testbed::Setup::new().fast());
        work(&place("redis:", server.url(), server))?;
    }
    #[cfg(feature = "redlock")]
    {
        let servers = testbed::Redlock::with(3, testbed::Setup::new().fast());
        let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000&max_lease_ms=60000";
        work(&place("redlock: on 3 servers", url, servers))?;
    }
    #[cfg(feature = "zookeeper")]
    {
        let server = testbed::ZooKeeper::start();
        work(&place("zookeeper:", format!("{}?session=30s", server.url()), server))?;
    }
    #[cfg(feature = "etcd")]
    {
        let server = testbed::Etcd::start();
        work(&place("etcd:", server.url(), server))?;
    }
    Ok(())
}

fn two_threads() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Compares a hand-over among many waiters with one among few.
pub(crate) fn waiting(effort: Effort) -> Result<()> {
    let many = effort.crowd * 10;
    let effort = Effort { rounds: effort.rounds.min(3), time: effort.time * 2, ..effort };
    let mut rows = Vec::new();
    each(|place| {
        let runtime = two_threads()?;
        let clients: Result<Vec<Client>, _> =
            (0..=CLIENTS).map(|_| runtime.block_on(leasehold::connect(&place.url))).collect();
        let clients = clients?;
        let turns = |n: usize| {
            let count = async || Ok(0.0);
            runtime.block_on(queued::contend(&clients, n, effort, Duration::ZERO, count))
        };
        let (ten, all) = (FEW.to_string(), many.to_string());
        let subjects = vec![Subject::new(&ten, || turns(FEW)), Subject::new(&all, || turns(many))];
        let measured = match alternate(effort, subjects) {
            Ok(measured) => measured,
            Err(why) => {
                rows.push(vec![format!("{}: {why}", place.name)]);
                return Ok(());
            }
        };
        let title = format!("{}, crowds", place.name);
        keep(Kind::HandOver, &title, &measured, |outcome: &Outcome| outcome.handover_p50);
        for m in &measured {
            rows.push(vec![
                format!("{} {} waiting", place.name, m.name),
                rate(m.median(|o| o.turns_per_second)),
                duration(m.median(|o| o.handover_p50)),
                digits(m.ratio(&measured[0], |o| o.handover_p50)),
                duration(m.median(|o| o.handover_p99)),
            ]);
        }
        Ok(())
    })?;
    let head = ["", "turns/s", "hand-over p50", "of that with 10", "p99"];
    table("A crowd waits for one lock", &head, rows);
    Ok(())
}

/// Measures the cost of holding many locks.
pub(crate) fn held(effort: Effort) -> Result<()> {
    let window = effort.time * 60;
    let mut rows = Vec::new();
    each(|place| {
        let most = matches!(place.name, "memory:" | "redis:");
        for many in [10, 100].into_iter().filter(|many| *many == 10 || most) {
            rows.push(hold(place, many * effort.crowd, window)?);
        }
        Ok(())
    })?;
    let head = ["", "still held", "of one processor", "taken a second"];
    table(&format!("Locks held by one client for {window:?}"), &head, rows);
    Ok(())
}

/// Measures one row.
fn hold(place: &Place, many: usize, window: Duration) -> Result<Vec<String>> {
    let runtime = two_threads()?;
    let locks = runtime.block_on(leasehold::connect(&place.url))?;
    let begun = Instant::now();
    let guards = runtime.block_on(take(&locks, many))?;
    let took = begun.elapsed();
    let (before, started) = (spent(), Instant::now());
    std::thread::sleep(window);
    let share = (spent() - before).as_secs_f64() / started.elapsed().as_secs_f64();
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    // These locks are released before the next row, which uses the same names.
    runtime.block_on(async {
        let mut releasing = JoinSet::new();
        for guard in guards {
            releasing.spawn(guard.release());
        }
        releasing.join_all().await;
    });
    Ok(vec![
        place.name.to_owned(),
        format!("{held} of {many}"),
        format!("{} %", digits(share * 100.0)),
        rate(many as f64 / took.as_secs_f64()),
    ])
}

async fn take(locks: &Client, many: usize) -> Result<Vec<leasehold::MutexGuard>> {
    let mut guards = Vec::with_capacity(many);
    for first in (0..many).step_by(100) {
        let mut taking = JoinSet::new();
        for n in first..many.min(first + 100) {
            let lock = locks.mutex(format!("held {n}"));
            taking.spawn(async move { lock.lock().await });
        }
        for taken in taking.join_all().await {
            guards.push(taken?);
        }
    }
    Ok(guards)
}

/// Returns the processor time that this process has used.
fn spent() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}
