//! What a hand-over costs the server: calls, counted there. It must not depend on how many clients
//! wait.
//!
//! Some clients of the library take the lock one after the other, and a crowd waits behind them.
//! Heartbeats cost as many calls as there are waiters, whether or not the lock passes to another
//! client. So the calls of an equally long time without a hand-over are subtracted.
#![cfg(any(feature = "redis", feature = "etcd", feature = "postgres"))]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::blocking::{Guard, Leasehold};

use crate::common::{LEASEHOLD, PATIENCE, Running, eventually};

/// How many hand-overs are counted, and how often. A heartbeat comes every 2.2 s: each waiter has
/// three in that time, and finds out that its place has changed.
const HAND_OVERS: usize = 6;
const EACH: Duration = Duration::from_millis(1_100);

/// How the crowd waits.
#[derive(Clone, Copy, Debug)]
enum By {
    Hold,
    Run,
    Library,
}

/// Those who wait; dropped, they are gone.
enum Crowd {
    Commands(Vec<Running>),
    Clients(Vec<Leasehold>),
}

/// A client that gets the lock, and says so.
fn next_holder(store: &str, name: &str) -> std::sync::mpsc::Receiver<(Leasehold, Guard)> {
    let (tell, held) = std::sync::mpsc::channel();
    let (store, name) = (store.to_owned(), name.to_owned());
    std::thread::spawn(move || {
        let locks = leasehold::blocking::connect(store).unwrap();
        let guard = locks.mutex(name).lock().unwrap();
        let _ = tell.send((locks, guard));
    });
    held
}

fn queued(locks: &Leasehold, name: &str) -> usize {
    locks.read(name).unwrap().map_or(0, |lock| lock.claims.len())
}

impl Crowd {
    fn start(by: By, store: &str, name: &str, waiters: usize) -> Self {
        let command = |words: &[&str]| {
            let mut command = Command::new(LEASEHOLD);
            command.args(words).env("LEASEHOLD_STORE", store).stdin(Stdio::piped());
            Running::start(command)
        };
        match by {
            By::Hold => {
                let all: Vec<_> =
                    (0..waiters).map(|_| command(&["hold", "--json", name])).collect();
                Self::Commands(all)
            }
            By::Run => {
                let words = ["run", name, "--", "true"];
                Self::Commands((0..waiters).map(|_| command(&words)).collect())
            }
            By::Library => {
                let client = |_| {
                    let locks = leasehold::blocking::connect(store).unwrap();
                    let mutex = locks.mutex(name);
                    // It ends as its client is closed.
                    std::thread::spawn(move || drop(mutex.lock()));
                    locks
                };
                Self::Clients((0..waiters).map(client).collect())
            }
        }
    }

    /// Returns when all have printed what they print as they begin to wait.
    fn is_told(&mut self, by: By) {
        if let (Self::Commands(all), By::Hold) = (self, by) {
            for running in all {
                let line = running.line();
                assert!(line.contains("\"waiting\""), "{line}");
            }
        }
    }

    fn end(self) {
        match self {
            Self::Commands(all) => drop(all),
            Self::Clients(all) => all.into_iter().for_each(|locks| _ = locks.close()),
        }
    }
}

/// How many calls one hand-over costs, with so many waiters, beyond those of an idle queue. `calls`
/// counts all since the server started.
fn cost(by: By, store: &str, waiters: usize, calls: &dyn Fn() -> f64) -> f64 {
    // Those of a crowd who were killed wait for a while.
    let name = &format!("{by:?} {waiters}");
    let locks = leasehold::blocking::connect(store).unwrap();
    let mut held = vec![locks.mutex(name).lock().unwrap()];
    let mut next: Vec<_> = (0..HAND_OVERS)
        .map(|n| {
            let holder = next_holder(store, name);
            eventually("it waits", || queued(&locks, name) == n + 2);
            holder
        })
        .collect();
    let mut crowd = Crowd::start(by, store, name, waiters);
    eventually("all wait", || queued(&locks, name) == 1 + HAND_OVERS + waiters);
    crowd.is_told(by);
    let counted = |each: &mut dyn FnMut(usize)| {
        let (began, before) = (Instant::now(), calls());
        for n in 0..HAND_OVERS {
            let due = EACH * u32::try_from(n).unwrap();
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            each(n);
        }
        let whole = EACH * u32::try_from(HAND_OVERS).unwrap();
        std::thread::sleep(whole.saturating_sub(began.elapsed()));
        calls() - before
    };
    let idle = counted(&mut |_| {});
    let mut clients = Vec::new();
    let busy = counted(&mut |_| {
        held.pop().unwrap().release().unwrap();
        let (client, guard) = next.remove(0).recv_timeout(PATIENCE).unwrap();
        held.push(guard);
        clients.push(client);
    });
    assert_eq!(queued(&locks, name), 1 + waiters, "the crowd waits still");
    crowd.end();
    drop(held);
    (busy - idle) / HAND_OVERS as f64
}

/// The cost with few, with more and with many waiters. A cost that grows with the queue, or with
/// its square, is far more than a call for each waiter. A smaller difference comes from the times
/// at which heartbeats are sent.
fn costs_the_same(by: By, store: &str, calls: &dyn Fn() -> f64) {
    let crowds = testbed::by_extent(vec![4, 32], vec![4, 32, 200], vec![4, 32, 200]);
    let costs: Vec<(usize, f64)> =
        crowds.into_iter().map(|waiters| (waiters, cost(by, store, waiters, calls))).collect();
    eprintln!("{by:?}: calls for each hand-over, by waiters: {costs:.1?}");
    for (waiters, cost) in &costs[1..] {
        let more = cost - costs[0].1;
        assert!(more < *waiters as f64, "{by:?}: {more:.1} more with {waiters}: {costs:?}");
    }
}

macro_rules! costs_the_same_whoever_waits {
    ($($feature:literal: $store:ident;)*) => {$(
        #[cfg(feature = $feature)]
        mod $store {
            use super::{By, costs_the_same};

            #[test]
            fn hand_over_costs_the_same_however_many_hold_processes_wait() {
                super::$store(&|store, calls| costs_the_same(By::Hold, store, calls));
            }

            #[test]
            #[ignore = "runs with ./test.sh --all"]
            fn hand_over_costs_the_same_however_many_run_processes_wait() {
                super::$store(&|store, calls| costs_the_same(By::Run, store, calls));
            }

            #[test]
            #[ignore = "runs with ./test.sh --all"]
            fn hand_over_costs_the_same_however_many_clients_of_the_library_wait() {
                super::$store(&|store, calls| costs_the_same(By::Library, store, calls));
            }
        }
    )*};
}

costs_the_same_whoever_waits! {
    "redis": redis;
    "etcd": etcd;
    "postgres": postgres;
}

type Test<'a> = &'a dyn Fn(&str, &dyn Fn() -> f64);

/// Commands, those of scripts included.
#[cfg(feature = "redis")]
fn redis(test: Test<'_>) {
    let server = testbed::Redis::start();
    let calls = || server.calls().iter().map(|(_, calls)| *calls).sum::<u64>() as f64;
    test(&server.url(), &calls);
}

/// Calls, and messages in streams.
#[cfg(feature = "etcd")]
fn etcd(test: Test<'_>) {
    let server = testbed::Etcd::start();
    test(&server.url(), &|| server.received(0));
}

/// Statements, and rows that they return. The server itself wakes each session that listens.
#[cfg(feature = "postgres")]
fn postgres(test: Test<'_>) {
    let setup = testbed::Setup::new().fast().arg("-c").arg("max_connections=1000");
    let counting = setup.arg("-c").arg("shared_preload_libraries=pg_stat_statements");
    let server = testbed::Postgres::with(counting);
    server.admin("postgres", "CREATE EXTENSION pg_stat_statements");
    let counted = "SELECT coalesce(sum(calls + rows), 0) FROM pg_stat_statements s \
                   JOIN pg_roles r ON r.oid = s.userid WHERE rolname = 'lh'";
    test(&server.database(), &|| server.admin("postgres", counted).parse().unwrap());
}
