//! The cost of an acquire and release, a hand-over and a failed try: requests, and keys that stay.

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::{Joined, Mode, Renew, Renewal, Signal, Store};
use testbed::Etcd;

fn keys(server: &Etcd, prefix: &str) -> usize {
    server.etcdctl(&["get", "--prefix", prefix, "--keys-only"]).split_whitespace().count()
}

// R13
#[test]
fn acquire_and_release_take_two_requests_and_failed_try_leaves_nothing() {
    const PAIRS: u64 = 100;
    run(async {
        let server = testbed::etcd();
        let (locks, store) = with_store(&server.url()).await;
        let lock = locks.mutex("r13");
        for _ in 0..3 {
            release(lock.lock().await.unwrap()).await;
        }
        let before = store.requests();
        for _ in 0..PAIRS {
            release(lock.lock().await.unwrap()).await;
        }
        let pairs = store.requests() - before;
        // A few keep-alives of idle leases may come in between.
        assert!(
            (2 * PAIRS..2 * PAIRS + PAIRS / 2).contains(&pairs),
            "{pairs} requests for {PAIRS} pairs"
        );
        let guard = lock.lock().await.unwrap();
        let keys_before = keys(server, "r13/");
        for _ in 0..3 {
            lock.try_lock().await.unwrap_err();
        }
        assert_eq!(keys(server, "r13/"), keys_before);
        release(guard).await;
        assert_eq!(keys(server, "r13/"), 0);
    });
}

// R13
/// A failed try takes one round trip and writes nothing, neither a key nor a lease.
#[test]
fn failed_try_takes_one_request_and_writes_nothing() {
    run(async {
        let server = Etcd::start();
        let (locks, _) = with_store(&server.url()).await;
        let (others, store) = with_store(&server.url()).await;
        let guard = locks.mutex("tried").lock().await.unwrap();
        let writer = locks.rwlock("tried too").write().await.unwrap();
        let leases = || server.etcdctl(&["lease", "list"]);
        let revision = || {
            let json = server.etcdctl(&["get", "x", "-w", "json"]);
            serde_json::from_str::<serde_json::Value>(&json).unwrap()["header"]["revision"].clone()
        };
        let (written, leased) = (revision(), leases());
        for n in 1..=4 {
            let before = store.requests();
            others.mutex("tried").try_lock().await.unwrap_err();
            others.rwlock("tried too").try_read().await.unwrap_err();
            assert_eq!(store.requests() - before, 2, "requests in round {n}");
        }
        assert_eq!((revision(), leases()), (written.clone(), leased));
        // Here the client has an idle lease, and the lock was free the last time.
        release(others.mutex("tried before").lock().await.unwrap()).await;
        let other = locks.mutex("tried before").lock().await.unwrap();
        let (written, before) = (revision(), store.requests());
        others.mutex("tried before").try_lock().await.unwrap_err();
        assert_eq!((store.requests() - before, revision()), (1, written));
        release(guard).await;
        release(writer).await;
        release(other).await;
        release(others.mutex("tried").try_lock().await.unwrap()).await;
    });
}

/// Returns how many requests this many turns cost, with this many tasks on each of three clients.
async fn cost_of_turns(name: &'static str, tasks: u64, turns: u64) -> u64 {
    let url = testbed::etcd().url();
    let (mut stores, mut running) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..3 {
        let (locks, store) = with_store(&url).await;
        stores.push(store);
        for _ in 0..tasks {
            let locks = locks.clone();
            running.spawn(async move {
                for _ in 0..turns {
                    release(locks.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
                }
            });
        }
    }
    let sent = || stores.iter().map(|store| store.requests()).sum::<u64>();
    let (before, started) = (sent(), Instant::now());
    running.join_all().await;
    // Each claim's lease is granted and kept.
    let beats = 3 * tasks * 4 * (2 + started.elapsed().as_secs());
    (sent() - before).saturating_sub(beats)
}

// R10
/// A turn is a join and a leave. No new watch is created, and no client reads what its watch
/// already reports.
#[test]
fn hand_over_among_few_clients_takes_two_requests() {
    const TURNS: u64 = 300;
    run(async {
        let (sent, turns) = (cost_of_turns("few", 1, TURNS).await, 3 * TURNS);
        // Each first turn creates a watch and reads. Some turns find the lock free, and the next
        // one finds it taken.
        assert!(sent <= 2 * turns + turns / 4, "{sent} requests for {turns} turns");
    });
}

// R10
/// A waiter that joins far back reads once, when it comes near the front.
#[test]
fn hand_over_among_many_clients_takes_three_requests() {
    const TURNS: u64 = 60;
    run(async {
        let (sent, turns) = (cost_of_turns("many", 10, TURNS).await, 30 * TURNS);
        assert!(sent <= 3 * turns + turns / 4, "{sent} requests for {turns} turns");
    });
}

/// Otherwise etcd would scan as many keys as there ever were, whenever it reads those of the lock.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn reused_lock_keeps_its_key_and_late_requests_are_harmless() {
    run(async {
        let server = testbed::etcd();
        let (_, store) = with_store(&server.url()).await;
        let mut keys = std::collections::BTreeSet::new();
        for _ in 0..20 {
            let one = patient("again");
            assert!(matches!(store.join(&one, Mode::Try).await.unwrap(), Joined::Holding { .. }));
            keys.insert(store.ownership(&one).unwrap().map(|owned| owned.key));
            assert!(store.leave(&one, None).await.unwrap());
        }
        // One lease is granted ahead, for a claim that joins besides the first.
        assert!(keys.len() <= 2, "{} keys for 20 uses", keys.len());
        let (first, second) = (patient("again"), patient("again"));
        assert!(matches!(store.join(&first, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let key = store.ownership(&first).unwrap().map(|owned| owned.key);
        assert!(store.leave(&first, None).await.unwrap());
        assert!(matches!(store.join(&second, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        assert_eq!(store.ownership(&second).unwrap().map(|owned| owned.key), key);
        assert_ne!(
            store.ownership(&first).unwrap().map(|owned| owned.key),
            key,
            "the old claim has the new claim's key"
        );
        // This is a second release, as after a lost reply.
        assert!(!store.leave(&first, None).await.unwrap());
        let renewals = [first, second.clone()].map(|claim| Renew { lease: claim.lease, claim });
        let renewed = store.renew(&renewals).await.unwrap();
        assert!(matches!(renewed[..], [Renewal::Lost, Renewal::Holding { .. }]), "{renewed:?}");
        // A key that stays for a cooldown belongs to no other claim.
        assert!(store.leave(&second, Some(Duration::from_secs(10))).await.unwrap());
        let third = patient("again");
        let joined = store.join(&third, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 1), "{joined:?}");
        assert_ne!(store.ownership(&third).unwrap().map(|owned| owned.key), key);
        assert!(matches!(next_signal(&*store, &third).await, Signal::Granted(_)));
        assert!(store.leave(&third, None).await.unwrap());
    });
}

/// It takes one read and one lease query, however long the queue is. Names below this one do not
/// count.
#[test]
fn reading_the_holders_costs_the_same_however_many_wait() {
    run(async {
        let server = testbed::etcd();
        let (locks, store) = with_store(&server.url()).await;
        let _below = locks.mutex("asked/below").lock().await.unwrap();
        let _guard = locks.mutex("asked").lock().await.unwrap();
        for wanted in [0, 130] {
            let (others, other) = with_store(&server.url()).await;
            let waiting: Vec<_> = (0..wanted).map(|_| patient("asked")).collect();
            for claim in &waiting {
                other.join(claim, Mode::Wait).await.unwrap();
            }
            quiet(&store).await;
            // A heartbeat may come in between, so the smallest of several results counts.
            let mut least = u64::MAX;
            for _ in 0..10 {
                let before = store.requests();
                let lock = locks.holders("asked").await.unwrap().unwrap();
                least = least.min(store.requests() - before);
                assert_eq!(lock.holders().count(), 1);
            }
            // If the names below fill the first page, all claims are read.
            assert!(least <= 3, "{least} requests with {wanted} waiters");
            for claim in &waiting {
                other.leave(claim, None).await.unwrap();
            }
            drop(others);
        }
    });
}
