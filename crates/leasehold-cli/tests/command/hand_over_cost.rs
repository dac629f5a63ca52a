//! The cost of a hand-over, in calls that the server counts. It must not depend on how many clients
//! wait.
//!
//! Some clients of the library take the lock one after the other, and a crowd waits after them in
//! the queue. Heartbeats cost as many calls as there are waiters, whether or not the lock passes to
//! another client. So the calls of an equally long time without a hand-over are subtracted.
#![cfg(any(feature = "redis", feature = "etcd", feature = "postgres"))]

use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use leasehold::Token;
use leasehold::blocking::{Client, MutexGuard};
use leasehold::store::{ClaimInfo, ClaimState};

use crate::common::{LEASEHOLD, PATIENCE, Running, eventually};

/// The number of hand-overs that are counted, and the interval between them. A heartbeat comes
/// every 2.2 s. So each waiter has three in that time, and notices that its position has changed.
const HAND_OVERS: usize = 6;
const EACH: Duration = Duration::from_millis(1_100);

/// Number of measurements that must all be too high before the test fails.
const TRIES: usize = 3;

/// The kind of waiters.
#[derive(Clone, Copy, Debug)]
enum By {
    Hold,
    Run,
    Library,
}

/// The waiters. `end` ends them.
enum Crowd {
    Commands(Vec<Running>),
    Clients(Vec<Client>),
}

/// Starts a client that acquires the lock and then sends its guard.
fn next_holder(store: &str, name: &str) -> Receiver<(Client, MutexGuard)> {
    let (tell, held) = std::sync::mpsc::channel();
    let (store, name) = (store.to_owned(), name.to_owned());
    std::thread::spawn(move || {
        let locks = leasehold::blocking::connect(store).unwrap();
        let guard = locks.mutex(name).lock().unwrap();
        let _ = tell.send((locks, guard));
    });
    held
}

/// Returns how many claims hold or wait. A server that has just got many clients may be too busy to
/// answer, so the request is repeated.
fn queued(locks: &Client, name: &str) -> usize {
    let mut count = None;
    eventually("the queue can be read", || {
        count = locks.inspect(name).ok().map(|lock| lock.map_or(0, |lock| lock.claims.len()));
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
                    // This thread ends when its client is closed.
                    std::thread::spawn(move || drop(mutex.lock()));
                    locks
                };
                Self::Clients((0..waiters).map(client).collect())
            }
        }
    }

    /// Waits until all commands have printed the line that they print when they begin to wait.
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

/// Returns the highest token of all claims for which `counts` is true. A claim keeps the token that
/// it draws when it joins.
fn highest_token(locks: &Client, name: &str, counts: fn(&ClaimInfo) -> bool) -> Option<Token> {
    let claims = locks.inspect(name).ok().flatten().map_or(Vec::new(), |lock| lock.claims);
    claims.iter().filter(|claim| counts(claim)).filter_map(|claim| claim.token).max()
}

/// Waits for the next holder. Returns `None` if it has a token above `last`, or if such a claim holds
/// the lock instead. On a busy machine, a waiter may miss its heartbeats until its claim expires. It
/// then joins again, after the crowd.
fn granted(
    next: &Receiver<(Client, MutexGuard)>,
    locks: &Client,
    name: &str,
    last: Token,
) -> Option<(Client, MutexGuard)> {
    let began = Instant::now();
    loop {
        match next.recv_timeout(Duration::from_secs(1)) {
            Ok(granted) => return (granted.1.token().get() <= last.get()).then_some(granted),
            Err(RecvTimeoutError::Timeout) => assert!(began.elapsed() < PATIENCE, "no grant"),
            Err(RecvTimeoutError::Disconnected) => panic!("the next holder failed"),
        }
        let holds = |claim: &ClaimInfo| claim.state == ClaimState::Holding;
        if highest_token(locks, name, holds).is_some_and(|token| token > last) {
            return None;
        }
    }
}

/// Returns the calls per hand-over with `waiters` waiters, in addition to those of an idle queue.
/// Returns `None` if a waiter lost its position. `calls` returns the calls since the server started.
/// Each name is used only once, because the claims of killed waiters stay for a while.
fn cost(by: By, store: &str, name: &str, waiters: usize, calls: &dyn Fn() -> f64) -> Option<f64> {
    let locks = leasehold::blocking::connect(store).unwrap();
    let mut held = vec![locks.mutex(name).lock().unwrap()];
    let mut next: Vec<_> = (0..HAND_OVERS)
        .map(|n| {
            let holder = next_holder(store, name);
            eventually("the waiter is in the queue", || queued(&locks, name) == n + 2);
            holder
        })
        .collect();
    let last = highest_token(&locks, name, |_| true).unwrap();
    let mut crowd = Crowd::start(by, store, name, waiters);
    eventually("all clients are in the queue", || queued(&locks, name) == 1 + HAND_OVERS + waiters);
    crowd.is_told(by);
    // A client that has just joined subscribes, and polls once more.
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
    let mut in_order = true;
    let busy = counted(&mut |_| {
        if !in_order {
            return;
        }
        held.pop().unwrap().release().unwrap();
        match granted(&next.remove(0), &locks, name, last) {
            Some((client, guard)) => {
                held.push(guard);
                clients.push(client);
            }
            None => in_order = false,
        }
    });
    // On a busy machine, claims may expire. Their waiters then join again.
    eventually("most waiters are in the queue", || queued(&locks, name) > waiters / 2);
    crowd.end();
    drop(held);
    in_order.then(|| (busy - idle) / HAND_OVERS as f64)
}

/// A server that counts calls.
struct Server<'a> {
    store: &'a str,
    /// Returns the number of calls since the server started.
    calls: &'a dyn Fn() -> f64,
    /// The largest number of processes that the server supports on a busy machine.
    processes: usize,
}

/// Checks the cost with few, with more and with many waiters. A cost that grows with the queue, or
/// with its square, is far more than one call per waiter. Smaller differences are caused by the
/// times at which heartbeats are sent.
fn costs_the_same(by: By, Server { store, calls, processes }: Server<'_>) {
    let crowds = match by {
        By::Library => [32, 200],
        By::Hold | By::Run => [32, processes],
    };
    let most = testbed::by_extent(32, 200, 200);
    let crowds = crowds.into_iter().filter(|waiters| *waiters <= most);
    let once = |waiters, nth| cost(by, store, &format!("{by:?} {waiters} {nth}"), waiters, calls);
    let few = (0..TRIES).find_map(|nth| once(4, nth)).expect("a measurement in order");
    for waiters in crowds {
        // A herd of waiters would be visible in every measurement. A busy machine, which shifts
        // heartbeats, is not.
        let is_flat = (0..TRIES).map(|nth| once(waiters, nth)).any(|cost| {
            eprintln!("{by:?}: {few:.1} with 4, {cost:.1?} with {waiters}");
            cost.is_some_and(|cost| cost - few < waiters as f64)
        });
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

/// Counts commands, including those in scripts.
#[cfg(feature = "redis")]
fn redis(test: Test<'_>) {
    let server = testbed::Redis::start();
    let calls = || server.calls().iter().map(|(_, calls)| *calls).sum::<u64>() as f64;
    test(Server { store: &server.url(), calls: &calls, processes: 200 });
}

/// Counts calls, and messages in streams.
#[cfg(feature = "etcd")]
fn etcd(test: Test<'_>) {
    let server = testbed::Etcd::start();
    // This many processes can start at once while an etcd on the same two processors still answers
    // in time.
    test(Server { store: &server.url(), calls: &|| server.received(0), processes: 100 });
}

/// Counts statements and the rows that they return, except those of heartbeats and of reading the
/// head of the queue. The server itself notifies each session that listens.
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
    // Each process has sessions, and each session is a process of the server as well.
    test(Server { store: &server.database(), calls: &calls, processes: 64 });
}
