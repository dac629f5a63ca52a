//! The cost of a hand-over on PostgreSQL in transactions, for any number of waiting clients.
//!
//! Counting statements is not enough. A NOTIFY wakes every listening session of the database, and
//! the server itself runs a transaction in each of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::sql_common::*;
use testbed::Setup;
use tokio::task::JoinSet;

/// The number of hand-overs that are counted, and the minimum time for counting. A session reports
/// its transactions once per second.
const HAND_OVERS: usize = 100;
const COUNTED: Duration = Duration::from_secs(10);

/// The number of measurements of a cost before it counts as too high. Heartbeats and polls are
/// triggered by time, so on a busy machine there are more of them for each hand-over.
const TRIES: usize = 3;

/// Returns the number of transactions of a hand-over, with `clients` clients that take the lock one
/// after the other. The cost of the same clients at rest, which is heartbeats, is subtracted.
async fn cost(server: &testbed::Postgres, clients: usize) -> f64 {
    let url = server.database();
    let database = url.rsplit('/').next().unwrap().to_owned();
    let pooled = format!("{url}?pool=1");
    let transactions = || -> f64 {
        let counted = "SELECT xact_commit FROM pg_stat_database WHERE datname = ";
        server.admin("postgres", &format!("{counted}'{database}'")).parse().unwrap()
    };
    let (turns, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let name = format!("handed over by {clients}");
    let mut running = JoinSet::new();
    let first = connect(&pooled).await;
    let held = first.mutex(&name).lock().await.unwrap();
    for _ in 0..clients {
        let (locks, name) = (connect(&pooled).await, name.clone());
        let (turns, ends) = (turns.clone(), ends.clone());
        running.spawn(async move {
            let mutex = locks.mutex(&name);
            while !ends.load(Ordering::SeqCst) {
                // The server may be too busy to answer one of these clients.
                let Ok(guard) = mutex.lock().await else { continue };
                turns.fetch_add(1, Ordering::SeqCst);
                let _ = guard.release().await;
            }
            let _ = locks.close().await;
        });
    }
    let queued =
        async || first.inspect(&name).await.ok().flatten().map_or(0, |lock| lock.claims.len());
    let end = Instant::now() + PATIENCE;
    while queued().await <= clients {
        assert!(Instant::now() < end, "not all of {clients} clients are in the queue");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Claims that have just joined poll more often.
    tokio::time::sleep(COUNTED / 2).await;
    let (began, before) = (Instant::now(), transactions());
    tokio::time::sleep(COUNTED).await;
    let at_rest = (transactions() - before) / began.elapsed().as_secs_f64();
    held.release().await.unwrap();
    let since = async |turn: usize, began: Instant, least: Duration| {
        while turns.load(Ordering::SeqCst) < turn || began.elapsed() < least {
            assert!(began.elapsed() < PATIENCE, "{clients} clients do not hand over the lock");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    since(clients / 2, Instant::now(), COUNTED / 4).await;
    let (began, before) = (Instant::now(), transactions());
    let turn = turns.load(Ordering::SeqCst);
    since(turn + HAND_OVERS, began, COUNTED).await;
    let counted = transactions() - before - at_rest * began.elapsed().as_secs_f64();
    let cost = counted / (turns.load(Ordering::SeqCst) - turn) as f64;
    ends.store(true, Ordering::SeqCst);
    while running.join_next().await.is_some() {}
    cost
}

/// The additional cost of a hand-over that is allowed with many clients. The front of the queue
/// listens, and claims further back poll as they come nearer. If all waiting clients listened, the
/// cost would be the number of clients.
const MORE: f64 = 20.0;

#[test]
#[ignore = "runs with ./test.sh --all"]
fn a_hand_over_costs_the_same_for_4_and_32_and_200_clients() {
    run(async {
        let server =
            testbed::Postgres::with(Setup::new().fast().arg("-c").arg("max_connections=1000"));
        let few = cost(&server, 4).await;
        assert!(few >= 2.0, "too few transactions were counted: {few:.1}");
        for clients in [32, 200] {
            let mut is_flat = false;
            for _ in 0..TRIES {
                let many = cost(&server, clients).await;
                eprintln!("{few:.1} transactions with 4 clients, {many:.1} with {clients}");
                is_flat = many <= few + MORE;
                if is_flat {
                    break;
                }
            }
            assert!(is_flat, "a hand-over costs more with {clients} clients");
        }
    });
}
