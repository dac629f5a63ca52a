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

/// How often a cost is counted before it is too high.
const TRIES: usize = 3;

/// How the crowd waits.
#[derive(Clone, Copy, Debug)]
enum By {
    Hold,
    Run,
    Library,
}

/// The waiters. Dropping the value ends them.
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

/// How many hold or wait. A server that a crowd has just reached may be too busy to say; it is
/// asked again.
fn queued(locks: &Leasehold, name: &str) -> usize {
    let mut count = None;
    eventually("the queue is read", || {
        count = locks.read(name).ok().map(|lock| lock.map_or(0, |lock| lock.claims.len()));
        count.is_some()
    });
    count.unwrap()
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

/// How many calls one hand-over costs with `waiters` waiters, beyond those of an idle queue. `calls`
/// counts all since the server started. Each name is used once: a crowd that was killed waits for a
/// while.
fn cost(by: By, store: &str, name: &str, waiters: usize, calls: &dyn Fn() -> f64) -> f64 {
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
    // A client that has just joined subscribes, and asks once more.
    std::thread::sleep(EACH * 2);
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
    assert!(queued(&locks, name) > waiters / 2, "the crowd waits still");
    crowd.end();
    drop(held);
    (busy - idle) / HAND_OVERS as f64
}

/// A server that counts.
struct Server<'a> {
    store: &'a str,
    /// How many calls there have been.
    calls: &'a dyn Fn() -> f64,
    /// The largest crowd of processes that it takes on a busy machine.
    processes: usize,
}

/// The cost with few, with more and with many waiters. A cost that grows with the queue, or with
/// its square, is far more than a call for each waiter. A smaller difference comes from the times
/// at which heartbeats are sent.
fn costs_the_same(by: By, Server { store, calls, processes }: Server<'_>) {
    let crowds = match by {
        By::Library => [32, 200],
        By::Hold | By::Run => [32, processes],
    };
    let most = testbed::by_extent(32, 200, 200);
    let crowds = crowds.into_iter().filter(|waiters| *waiters <= most);
    let once = |waiters, nth| cost(by, store, &format!("{by:?} {waiters} {nth}"), waiters, calls);
    let few = once(4, 0);
    for waiters in crowds {
        // A herd is there each time. A busy machine, which shifts heartbeats, is not.
        let costs = (0..TRIES).map(|nth| once(waiters, nth));
        let flat =
            costs.inspect(|cost| eprintln!("{by:?}: {few:.1} with 4, {cost:.1} with {waiters}"));
        let is_flat = flat.map(|cost| cost - few).any(|more| more < waiters as f64);
        assert!(is_flat, "{by:?}: a hand-over costs more with {waiters} waiters");
    }
}

macro_rules! costs_the_same_whoever_waits {
    ($($feature:literal: $store:ident;)*) => {$(
        #[cfg(feature = $feature)]
        mod $store {
            use super::{By, costs_the_same};

            #[test]
            fn hand_over_costs_the_same_however_many_hold_processes_wait() {
                super::$store(&|server| costs_the_same(By::Hold, server));
            }

            #[test]
            #[ignore = "runs with ./test.sh --all"]
            fn hand_over_costs_the_same_however_many_run_processes_wait() {
                super::$store(&|server| costs_the_same(By::Run, server));
            }

            #[test]
            #[ignore = "runs with ./test.sh --all"]
            fn hand_over_costs_the_same_however_many_clients_of_the_library_wait() {
                super::$store(&|server| costs_the_same(By::Library, server));
            }
        }
    )*};
}

costs_the_same_whoever_waits! {
    "redis": redis;
    "etcd": etcd;
    "postgres": postgres;
}

type Test<'a> = &'a dyn Fn(Server<'_>);

/// Commands, those of scripts included.
#[cfg(feature = "redis")]
fn redis(test: Test<'_>) {
    let server = testbed::Redis::start();
    let calls = || server.calls().iter().map(|(_, calls)| *calls).sum::<u64>() as f64;
    test(Server { store: &server.url(), calls: &calls, processes: 200 });
}

/// Calls, and messages in streams.
#[cfg(feature = "etcd")]
fn etcd(test: Test<'_>) {
    let server = testbed::Etcd::start();
    // As many processes as start at once while an etcd on the same two processors still answers in time.
    test(Server { store: &server.url(), calls: &|| server.received(0), processes: 100 });
}

/// Statements, and rows that they return, without those of heartbeats and of reading the front. The
/// server itself wakes each session that listens.
#[cfg(feature = "postgres")]
fn postgres(test: Test<'_>) {
    let setup = testbed::Setup::new().fast().arg("-c").arg("max_connections=1000");
    let counting = setup.arg("-c").arg("shared_preload_libraries=pg_stat_statements");
    let server = testbed::Postgres::with(counting);
    server.admin("postgres", "CREATE EXTENSION pg_stat_statements");
    let counted = "SELECT coalesce(sum(calls + rows), 0) FROM pg_stat_statements s \
                   JOIN pg_roles r ON r.oid = s.userid WHERE rolname = 'lh' \
                   AND query NOT LIKE '%json_to_recordset%' AND query NOT LIKE '%json_agg(token)%' \
                   AND query NOT LIKE '%UNION ALL%' AND query NOT LIKE '%WHERE session = %'";
    let calls = || server.admin("postgres", counted).parse().unwrap();
    // Each has sessions there, and each session is a process as well.
    test(Server { store: &server.database(), calls: &calls, processes: 64 });
}
