//! What a pair, a turn and a failed try cost: requests, and keys that stay.

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::{Joined, Mode, Renew, Renewal, Signal, Store};
use testbed::Etcd;

fn keys(server: &Etcd, prefix: &str) -> usize {
    server.etcdctl(&["get", "--prefix", prefix, "--keys-only"]).split_whitespace().count()
}

#[test]
fn r13_a_pair_is_two_requests_and_a_failed_try_leaves_nothing() {
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
        // A few keep-alives, of leases that lie idle, come between.
        assert!((2 * PAIRS..2 * PAIRS + PAIRS / 2).contains(&pairs), "{pairs} for {PAIRS} pairs");
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

/// One round trip, and nothing is written: no key, no lease.
#[test]
fn r13_a_failed_try_is_one_request_and_writes_nothing() {
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
            assert_eq!(store.requests() - before, 2, "the {n}th time");
        }
        assert_eq!((revision(), leases()), (written.clone(), leased));
        // With a lease at hand, and of a lock that was free the last time.
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

/// How many requests so many turns cost, with so many tasks on each of three clients.
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

/// To join and to leave: nothing is watched anew, and nobody looks who is told everything.
#[test]
fn r10_a_turn_among_the_same_few_is_two_requests() {
    const TURNS: u64 = 300;
    run(async {
        let (sent, turns) = (cost_of_turns("few", 1, TURNS).await, 3 * TURNS);
        // The first of each watches and looks; some find the lock free, and the next time taken.
        assert!(sent <= 2 * turns + turns / 4, "{sent} for {turns}");
    });
}

/// Who joins far back looks once, as it comes near.
#[test]
fn r10_a_turn_among_many_is_three_requests() {
    const TURNS: u64 = 60;
    run(async {
        let (sent, turns) = (cost_of_turns("many", 10, TURNS).await, 30 * TURNS);
        assert!(sent <= 3 * turns + turns / 4, "{sent} for {turns}");
    });
}

/// Else etcd steps over as many keys as there ever were, whenever it looks at the lock's.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn a_lock_that_is_used_again_is_the_same_key_and_what_comes_late_harms_nobody() {
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
        // One lease is got ahead, for whoever comes beside the first.
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
            "nobody compares with another's place"
        );
        // As after an answer that was lost.
        assert!(!store.leave(&first, None).await.unwrap());
        let renewals = [first, second.clone()].map(|claim| Renew { lease: claim.lease, claim });
        let told = store.renew(&renewals).await.unwrap();
        assert!(matches!(told[..], [Renewal::Lost, Renewal::Holding { .. }]), "{told:?}");
        // A key that stays when its holder departs is nobody else's.
        assert!(store.leave(&second, Some(Duration::from_secs(10))).await.unwrap());
        let third = patient("again");
        let joined = store.join(&third, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 1), "{joined:?}");
        assert_ne!(store.ownership(&third).unwrap().map(|owned| owned.key), key);
        assert!(matches!(next_signal(&*store, &third).await, Signal::Granted(_)));
        assert!(store.leave(&third, None).await.unwrap());
    });
}

/// One read and one lease, however many wait. Names below this one do not count.
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
            let before = store.requests();
            let lock = locks.holders("asked").await.unwrap().unwrap();
            let sent = store.requests() - before;
            assert_eq!(lock.holders().count(), 1);
            // Where the names below fill the reading, all is read.
            assert!(sent <= 3, "{sent} requests with {wanted} waiters");
            for claim in &waiting {
                other.leave(claim, None).await.unwrap();
            }
            drop(others);
        }
    });
}
