//! Waiting in etcd's queue: each waiter is notified in its turn and none too early, whatever
//! happens to leases, watches and claims ahead, and however long the queue is.

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::etcd::EtcdStore;
use leasehold::store::{Claim, Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{Kind, Name};
use leasehold_test_support::{evicted_waiter_is_never_granted, pushes_agree};
use testbed::SeededRng;
use testbed::{Etcd, Proxy};
use tokio::runtime::Handle;

/// Maximum number of claims ahead of a waiter that counts as near the front (`etcd/front.rs`).
const NEAR: u64 = 16;

// S81
#[test]
fn tasks_of_one_client_exclude_each_other() {
    run(async {
        let locks = connect(&testbed::etcd().url()).await;
        hammer(&[locks], "s81", 8, 15).await;
    });
}

// P1, P6
/// Two clients make random calls. No claim may be reported as granted too early, and each grant
/// must be pushed.
#[test]
fn notifications_agree_with_the_queue() {
    run(async {
        let url = testbed::etcd().url();
        pushes_agree(&[connect(&url).await, connect(&url).await]).await;
    });
}

// S80
#[test]
fn waiter_with_an_expired_lease_is_not_granted() {
    run(async {
        let server = testbed::etcd();
        let (locks, store) = with_store(&server.url()).await;
        let guard = locks.mutex("s80").lock().await.unwrap();
        let (first, second) = (patient("s80"), patient("s80"));
        let joined = store.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 1), "{joined:?}");
        let joined = store.join(&second, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 2), "{joined:?}");
        let lease = lease_of(
            server,
            std::str::from_utf8(&store.ownership(&first).unwrap().unwrap().key).unwrap(),
        );
        server.etcdctl(&["lease", "revoke", &lease]);
        // It is notified although no claim ahead has left.
        assert_eq!(next_signal(&*store, &first).await, Signal::Ask);
        release(guard).await;
        let renew = Renew { lease: first.lease, claim: first };
        let renewed = store.renew(&[renew]).await.unwrap();
        assert!(matches!(renewed[..], [Renewal::Lost]), "{renewed:?}");
        assert!(matches!(next_signal(&*store, &second).await, Signal::Granted(_)));
        assert!(store.leave(&second, None).await.unwrap());
    });
}

// P6
/// The first waiter that does not fit was notified to watch the others, and before it did so, one
/// of them left. It found itself granted, but did not notify the claims after it, because it relied
/// on the claim that had notified it.
#[test]
fn waiter_asked_to_watch_but_already_granted_notifies_others() {
    run(async {
        let server = testbed::etcd();
        let proxy = Proxy::before(server.port(0));
        let url = format!("etcd://127.0.0.1:{}", proxy.port());
        let open = async |url: &str| EtcdStore::open(url, &Handle::current()).await.unwrap();
        let (fast, slow) = (open(&server.url()).await, open(&url).await);
        let permits = |weight| {
            let mut permits = patient("p6");
            (permits.kind, permits.weight, permits.capacity) = (Kind::Semaphore, weight, 3);
            permits
        };
        let [two, one, first, watched, behind] = [2, 1, 1, 1, 1].map(permits);
        for (store, claim, waits) in [
            (&fast, &two, false),
            (&fast, &one, false),
            (&fast, &first, true),
            (&slow, &watched, true),
            (&fast, &behind, true),
        ] {
            let joined = store.join(claim, Mode::Wait).await.unwrap();
            assert_eq!(matches!(joined, Joined::Waiting(_)), waits, "{joined:?}");
        }
        quiet(&slow).await;
        proxy.freeze();
        assert!(fast.leave(&one, None).await.unwrap());
        granted(&fast, &first).await;
        // The claim was notified to watch, but its client has not received the notification yet.
        until("the notification is being sent", async || {
            let key = String::from_utf8(slow.ownership(&watched).unwrap().unwrap().key).unwrap();
            server.etcdctl(&["get", &key, "-w", "json"]).contains("\"version\":2")
        })
        .await;
        assert!(fast.leave(&two, None).await.unwrap());
        proxy.thaw();
        granted(&slow, &watched).await;
        granted(&fast, &behind).await;
    });
}

async fn granted(store: &EtcdStore, claim: &Claim) {
    let signal = tokio::time::timeout(PATIENCE / 2, store.changed(claim)).await;
    let signal = signal.expect("the waiter was not notified of its grant").unwrap();
    assert!(matches!(signal, Signal::Granted(_)), "{signal:?}");
}

// P6
/// Only watches notify. Some waiters far back and near the front give up, in any order.
#[test]
fn distant_waiter_is_notified_whichever_others_give_up() {
    const WAITERS: usize = 3 * NEAR as usize;
    run(async {
        let server = testbed::etcd();
        let (locks, first) = with_store(&server.url()).await;
        let (_other, second) = with_store(&server.url()).await;
        let guard = locks.mutex("far").lock().await.unwrap();
        let mut rng = SeededRng(7);
        let mut waiting = std::collections::VecDeque::new();
        for n in 0..WAITERS {
            let (store, waits) = (if n % 2 == 0 { &first } else { &second }, patient("far"));
            let joined = store.join(&waits, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(p) if p.ahead == n + 1), "{joined:?}");
            waiting.push_back((store, waits));
        }
        release(guard).await;
        while let Some((store, next)) = waiting.pop_front() {
            assert!(matches!(next_signal(&**store, &next).await, Signal::Granted(_)));
            for (store, waits) in &waiting {
                let signal = tokio::time::timeout(Duration::ZERO, store.changed(waits)).await;
                assert!(!matches!(signal, Ok(Ok(Signal::Granted(_)))), "two clients hold the lock");
            }
            // Some waiters give up before the holder leaves, and some just after.
            for step in 0..3 {
                if step == 1 {
                    assert!(store.leave(&next, None).await.unwrap());
                } else if !waiting.is_empty() && rng.below(4) == 0 {
                    let (store, gone) = waiting.remove(rng.index(waiting.len())).unwrap();
                    assert!(store.leave(&gone, None).await.unwrap());
                }
            }
        }
    });
}

// R10
#[test]
fn all_readers_that_fit_are_woken_by_push() {
    run(async {
        let url = testbed::etcd().url();
        let writer = connect(&url).await;
        let (_, first) = with_store(&url).await;
        let (_, second) = with_store(&url).await;
        let guard = writer.rwlock("readers").write().await.unwrap();
        // The test uses the stores alone, so that no heartbeat hides a missing notification.
        let mut waiting = Vec::new();
        for n in 0..9 {
            let store = if n % 2 == 0 { &first } else { &second };
            let name = Name::new("readers").unwrap();
            let mut reader = Claim::new(name, Kind::RwLock, 1, leasehold::MAX_READERS).unwrap();
            (reader.lease, reader.waiter_lease) = (PATIENCE, PATIENCE);
            let joined = store.join(&reader, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            waiting.push((store, reader));
        }
        release(guard).await;
        for (store, reader) in &waiting {
            while next_signal(&***store, reader).await == Signal::Ask {}
        }
        for (store, reader) in &waiting {
            assert!(store.leave(reader, None).await.unwrap());
        }
    });
}

// R10
#[test]
fn a_release_wakes_one_of_many() {
    const WAITERS: u64 = 200;
    run(async {
        let server = Etcd::start();
        let (locks, store) = with_store(&server.url()).await;
        let guard = locks.mutex("herd").lock().await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..WAITERS {
            let lock = locks.mutex("herd").lease(Duration::from_secs(60));
            // The lock has no timeout here, because 200 hand-overs take a while on a busy machine.
            waiting.spawn(async move { release(lock.lock().await.unwrap()).await });
        }
        until_queued(&locks, "herd", WAITERS as usize + 1).await;
        until("watching", async || {
            let watches = server.metric(0, "etcd_debugging_mvcc_watcher_total");
            // The waiters near the front share one watch.
            watches.is_some_and(|n| n > (WAITERS - NEAR) as f64)
        })
        .await;
        let (before, started) = (store.requests(), Instant::now());
        release(guard).await;
        waiting.join_all().await;
        let sent = store.requests() - before;
        // Each waiter reads once when its watch begins, which may happen only now, and once when it
        // comes near the front. It cancels the watch and leaves with one transaction. Heartbeats
        // are sent every two seconds, and the first may be sent immediately.
        let beats = 4 * WAITERS * (1 + started.elapsed().as_secs() / 2);
        assert!(sent <= 4 * WAITERS + beats, "{sent} requests for {WAITERS} hand-overs");
    });
}

// S92
/// Each claim of a crowd has its own lease and heartbeat, all on one client with two holders.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn thousands_of_waiters_cost_no_renewal() {
    let many = testbed::sized(3_000, 600);
    run(async {
        let server = testbed::Etcd::start();
        let locks = connect(&server.url()).await;
        let crowd = locks.mutex("crowded").lock().await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        let keys = || server.etcdctl(&["get", "crowded/", "--prefix", "--keys-only"]);
        for n in 1..=many {
            let lock = locks.mutex("crowded");
            waiting.spawn(async move { lock.lock().await.map(drop) });
            if n % 100 == 0 {
                until("all clients are in the queue", async || {
                    keys().split_whitespace().count() == n + 1
                })
                .await;
            }
        }
        let beside = locks.mutex("beside").lease(Duration::from_secs(12)).lock().await.unwrap();
        // Each claim sends several heartbeats.
        let all_kept = async || {
            let before = keys();
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(beside.is_held() && crowd.is_held(), "{beside:?} {crowd:?}");
            before.split_whitespace().count() == many + 1 && keys() == before
        };
        // If the machine paused, a queue position or two may be lost, once.
        let kept = all_kept().await || all_kept().await || all_kept().await;
        assert!(kept, "waiters lost their queue positions");
        assert!(waiting.try_join_next().is_none());
        waiting.shutdown().await;
        // Releasing them would wait for all claims that leave.
        drop((beside, crowd));
    });
}

// S84
/// While a waiter is disconnected, the lock is released, and the event is compacted away.
#[test]
fn compaction_does_not_lose_a_waiters_notification() {
    run(async {
        let server = Etcd::start();
        let proxy = Proxy::before(server.port(0));
        let locks = connect(&server.url()).await;
        let (_client, store) = with_store(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
        let guard = locks.mutex("s84").lock().await.unwrap();
        // No heartbeat polls, so only the watch notifies the waiter.
        let waits = patient("s84");
        let joined = store.join(&waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        until("watching", async || {
            server.metric(0, "etcd_debugging_mvcc_watcher_total").is_some_and(|n| n >= 1.0)
        })
        .await;
        proxy.freeze();
        release(guard).await;
        server.etcdctl(&["put", "s84-noise", "x"]);
        let json = server.etcdctl(&["get", "s84-noise", "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let revision = json["header"]["revision"].as_i64().unwrap();
        server.etcdctl(&["compact", &revision.to_string()]);
        proxy.cut();
        proxy.thaw();
        assert!(matches!(next_signal(&*store, &waits).await, Signal::Granted(_)));
        assert!(store.leave(&waits, None).await.unwrap());
    });
}

// S84
#[test]
fn broken_watches_are_restarted() {
    run(async {
        let server = Etcd::start();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        for _ in 0..2 {
            let guard = locks.mutex("broken").lock().await.unwrap();
            let lock = other.mutex("broken");
            let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
            until_queued(&locks, "broken", 2).await;
            server.kill(0);
            server.restart(0);
            assert!(guard.is_held(), "the restart took longer than the lease");
            release(guard).await;
            release(waiting.await.unwrap().unwrap()).await;
        }
    });
}

#[test]
fn a_waiter_evicted_while_the_connection_is_broken_is_never_granted() {
    run(async {
        let server = testbed::etcd();
        let proxy = Proxy::before(server.port(0));
        let ours = connect(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
        evicted_waiter_is_never_granted(&proxy, &ours, &connect(&server.url()).await).await;
    });
}
