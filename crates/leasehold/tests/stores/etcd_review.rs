//! What a reviewer tried on the etcd store.

#![cfg(feature = "etcd")]

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::etcd::EtcdStore;
use leasehold::store::{Joined, Mode, Signal, Store};
use leasehold::{Claim, Kind, Name};
use testbed::{Etcd, Proxy};
use tokio::runtime::Handle;

fn claim(name: &str) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    // Nothing has to be renewed in a test's time, so that what is sent is sent for another reason.
    (claim.lease, claim.waiter_lease) = (Duration::from_secs(55), Duration::from_secs(50));
    claim
}

/// Sets a password, even the same one: etcd forgets the tokens of that user.
fn set_password(server: &Etcd, user: &str, password: &str) {
    let mut command = server.etcdctl_command();
    command.args(["--user", "root:root", "user", "passwd", user, "--interactive=false"]);
    let mut running = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut to = running.stdin.take().unwrap();
    writeln!(to, "{password}").unwrap();
    drop(to);
    assert!(running.wait().unwrap().success());
}

/// The stream of watches was opened with a token of our user that has ended since. Requests get a new
/// token; the stream refused every new watch, and whoever waited asked twice a second for ever.
#[test]
fn s84_a_stream_whose_token_has_ended_is_opened_anew() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("");
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let store = EtcdStore::open(&url, &Handle::current()).await.unwrap();
        let (first, second, third) = (claim("a"), claim("a"), claim("b"));
        let (fourth, other) =
            (claim("b"), EtcdStore::open(&url, &Handle::current()).await.unwrap());
        for held in [&first, &third] {
            let joined = other.join(held, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        }
        assert!(matches!(store.join(&second, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        quiet(&store).await;
        set_password(&server, "lh", "lh");
        assert!(matches!(store.join(&fourth, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        // It watches, and does not ask again and again.
        quiet(&store).await;
        for (held, waits) in [(&third, &fourth), (&first, &second)] {
            assert!(other.leave(held, None).await.unwrap());
            let told = tokio::time::timeout(PATIENCE, store.changed(waits)).await.unwrap().unwrap();
            assert!(matches!(told, Signal::Granted(_)), "{told:?}");
        }
    });
}

/// Waits until nothing is sent for more than a second.
async fn quiet(store: &EtcdStore) {
    let end = Instant::now() + PATIENCE / 3;
    loop {
        let before = store.requests();
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        if store.requests() == before {
            return;
        }
        assert!(Instant::now() < end, "it never stops asking");
    }
}

/// Random calls of two clients: nobody is told of a grant too early, and everybody unasked.
#[test]
fn p1_p6_what_waiters_are_told_agrees_with_the_queue() {
    run(async {
        let url = testbed::etcd().url();
        let clients = [connect(&url).await, connect(&url).await];
        let stores = [0, 1].map(|i| clients[i].store().clone());
        let kinds = [(Kind::Mutex, 1), (Kind::Semaphore, 3), (Kind::RwLock, 1 << 20)];
        let all = (1..).zip(kinds.into_iter().cycle().take(12));
        let mut running = tokio::task::JoinSet::new();
        for (seed, lock) in all {
            let stores = stores.clone();
            running.spawn(async move {
                crate::review_common::pushes_agree(&stores, lock, seed, 60).await;
            });
        }
        while let Some(done) = running.join_next().await {
            done.unwrap();
        }
    });
}

/// The first that does not fit was told to watch the others, and before it did one of them left: it
/// found itself granted, and left the telling of those behind it to whoever had told it.
#[test]
fn p6_who_is_told_to_watch_and_holds_already_tells_the_others() {
    run(async {
        let server = testbed::etcd();
        let proxy = Proxy::before(server.port(0));
        let url = format!("etcd://127.0.0.1:{}", proxy.port());
        let open = async |url: &str| EtcdStore::open(url, &Handle::current()).await.unwrap();
        let (fast, slow) = (open(&server.url()).await, open(&url).await);
        let permits = |weight| {
            let mut permits = claim("p6");
            (permits.kind, permits.weight, permits.capacity) = (Kind::Semaphore, weight, 3);
            permits
        };
        let [two, one, first, told, behind] = [2, 1, 1, 1, 1].map(permits);
        for (store, claim, waits) in [
            (&fast, &two, false),
            (&fast, &one, false),
            (&fast, &first, true),
            (&slow, &told, true),
            (&fast, &behind, true),
        ] {
            let joined = store.join(claim, Mode::Wait).await.unwrap();
            assert_eq!(matches!(joined, Joined::Waiting(_)), waits, "{joined:?}");
        }
        quiet(&slow).await;
        proxy.freeze();
        assert!(fast.leave(&one, None).await.unwrap());
        granted(&fast, &first).await;
        // Told to watch; it has not heard of it yet.
        until("telling", async || {
            let key = String::from_utf8(slow.ownership(&told).unwrap().unwrap().key).unwrap();
            server.etcdctl(&["get", &key, "-w", "json"]).contains("\"version\":2")
        })
        .await;
        assert!(fast.leave(&two, None).await.unwrap());
        proxy.thaw();
        granted(&slow, &told).await;
        granted(&fast, &behind).await;
    });
}

async fn granted(store: &EtcdStore, claim: &Claim) {
    let told = tokio::time::timeout(PATIENCE / 2, store.changed(claim)).await;
    let told = told.expect("told of its grant").unwrap();
    assert!(matches!(told, Signal::Granted(_)), "{told:?}");
}

/// Each of a crowd has a lease and a heartbeat of its own, all on one client with two holders.
#[test]
fn s92_thousands_of_waiters_cost_no_renewal() {
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
                until("all to wait", async || keys().split_whitespace().count() == n + 1).await;
            }
        }
        let beside = locks.mutex("beside").lease(Duration::from_secs(12)).lock().await.unwrap();
        // Some heartbeats of all of them.
        let all_kept = async || {
            let before = keys();
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(beside.is_held() && crowd.is_held(), "{beside:?} {crowd:?}");
            before.split_whitespace().count() == many + 1 && keys() == before
        };
        // A machine that stood still costs a place or two, once.
        let kept = all_kept().await || all_kept().await || all_kept().await;
        assert!(kept, "places were lost");
        assert!(waiting.try_join_next().is_none());
        waiting.shutdown().await;
        // Giving them back would wait for all that leave.
        drop((beside, crowd));
    });
}

/// The network has forgotten the only connection to the only member, and says nothing of it.
#[test]
fn s14_the_only_connection_that_fell_silent_is_replaced() {
    run(async {
        let server = testbed::etcd();
        let proxy = Proxy::before(server.port(0));
        let locks = connect(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
        // Its renewals are given up before a member that may be slow would be.
        let lease = Duration::from_secs(12);
        let guard = locks.mutex("silent: held").lease(lease).lock().await.unwrap();
        let blocker = connect(&server.url()).await;
        let blocker = blocker.mutex("silent: wanted").lease(PATIENCE).lock().await.unwrap();
        let waiting = tokio::spawn({
            let mutex = locks.mutex("silent: wanted").lease(lease);
            async move { mutex.lock().await }
        });
        while locks.read("silent: wanted").await.unwrap().unwrap().waiters().count() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.silence();
        tokio::time::sleep(lease * 3 / 2).await;
        assert!(guard.is_held(), "{guard:?}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        release(blocker).await;
        release(waiting.await.unwrap().unwrap()).await;
        release(guard).await;
    });
}
