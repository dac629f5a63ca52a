//! What a reviewer tried on the ZooKeeper store.

#![cfg(feature = "zookeeper")]

use std::sync::mpsc;
use std::time::Duration;

use crate::zookeeper_common::*;
use leasehold::store::zookeeper::ZooKeeperStore;
use leasehold::store::{Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{Claim, ErrorKind, Kind, Name};
use testbed::{Proxy, Version, ZooKeeper, ZooKeeperSetup, zookeeper};
use zookeeper_client::{Acl, Acls, AuthId, CreateMode, Permission};

fn claim(name: &str) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    let long = Duration::from_secs(40);
    (claim.lease, claim.waiter_lease) = (long, long);
    claim
}

/// A waiter counted who has left in two places: a heartbeat saw a listing without the one before it,
/// and then the news of that one's departure was taken off once more. So it held beside the holder.
/// The two come in this order to tasks of one thread when the client's runtime runs what was woken
/// last first.
#[test]
fn p1_a_departure_is_counted_once() {
    let ours = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let ours = ours.unwrap();
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&server.url()).await;
        let url = format!("zookeeper://127.0.0.1:{}?session=60s", proxy.port());
        let store = ZooKeeperStore::open(&url, ours.handle()).await.unwrap();
        let (holds, leaves, waits) = (claim("p1"), claim("p1"), claim("p1"));
        let joined = others.store().join(&holds, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let joined = others.store().join(&leaves, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        let joined = store.join(&waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");

        // A heartbeat: the check of the child is answered, and the listing is on its way when the one
        // in the middle leaves.
        proxy.delay(Duration::from_millis(300));
        let before = proxy.requests();
        let beating = tokio::spawn({
            let (store, waits) = (store.clone(), waits.clone());
            async move { store.renew(&[Renew { lease: waits.lease, claim: waits }]).await }
        });
        until("the listing", async || proxy.requests() >= before + 2).await;
        proxy.hold_replies();
        assert!(others.store().leave(&leaves, None).await.unwrap());
        // The listing has been answered by then; should it not, nothing is shown, and nothing fails.
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.delay(Duration::ZERO);
        // Both pieces of news come while the client's thread is busy with something else.
        let (busy, free) = mpsc::channel::<()>();
        let (began, begins) = mpsc::channel();
        ours.spawn(async move {
            let _ = began.send(());
            let _ = free.recv();
        });
        begins.recv().unwrap();
        proxy.thaw();
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(busy);

        let beaten = beating.await.unwrap().unwrap();
        assert!(matches!(beaten[..], [Renewal::Waiting(_)]), "{beaten:?}");
        // Asked again, it waits as before: whoever was told of a grant holds by then.
        let again = [Renew { claim: waits.clone(), lease: waits.lease }];
        let again = store.renew(&again).await.unwrap();
        assert!(matches!(again[..], [Renewal::Waiting(_)]), "two hold: {again:?}");
        assert!(others.store().leave(&holds, None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&waits)).await.unwrap().unwrap();
        assert!(matches!(told, Signal::Granted(_)), "{told:?}");
    });
    ours.shutdown_background();
}

/// Random calls of two clients: nobody is told of a grant too early, and everybody unasked.
#[test]
fn p1_p6_what_waiters_are_told_agrees_with_the_queue() {
    run(async {
        let url = format!("{}?session=60s", zookeeper().url());
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

/// Each of the waiters copied, read and sorted the listing of all of them at every heartbeat, and the
/// renewals of what the same client held came too late. (As many as a debug build and a small server
/// can take in: to join, each lists who is there.)
#[test]
fn s92_thousands_of_waiters_cost_no_renewal() {
    let many = testbed::sized(3_000, 600);
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let crowd = locks.mutex("crowded").lock().await.unwrap();
        let raw = raw(server.port()).await;
        let standing =
            async || raw.check_stat("/leasehold/crowded").await.unwrap().unwrap().num_children - 1;
        let mut waiting = tokio::task::JoinSet::new();
        for n in 1..=many {
            let lock = locks.mutex("crowded");
            waiting.spawn(async move { lock.lock().await.map(drop) });
            if n % 100 == 0 {
                until("all to wait", async || standing().await == n).await;
            }
        }
        let beside = locks.mutex("beside").lease(Duration::from_secs(12)).lock().await.unwrap();
        // Some heartbeats of all of them.
        let all_kept = async || {
            let before = children(&raw, "/leasehold/crowded").await;
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(beside.is_held() && crowd.is_held(), "{beside:?} {crowd:?}");
            standing().await == many && children(&raw, "/leasehold/crowded").await == before
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

/// A lock whose numbers have run out took the renewals of all other locks of the same client along.
#[test]
fn s73_a_lock_without_numbers_spoils_no_other() {
    run(async {
        // The next two get the last numbers that are good.
        let last = i32::MAX - 1_000_000;
        let server = ZooKeeper::with(&ZooKeeperSetup::new().sequences_at("/spent", last - 2));
        let url = format!("{}/?session=60s", server.url());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(8);
        let held = other.mutex("spent").lock().await.unwrap();
        let good = locks.mutex("good").lease(lease).lock().await.unwrap();
        let free = other.mutex("waited").lock().await.unwrap();
        let spawn = |name: &str| {
            let lock = locks.mutex(name);
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        let (spent, waits) = (spawn("spent"), spawn("waited"));
        until_waiting(&other, "spent", 1).await;
        until_waiting(&other, "waited", 1).await;
        let raw = raw(server.port()).await;
        let places = children(&raw, "/waited").await;
        assert_eq!(places.len(), 2);
        make_child(&raw, "/spent/_c_01234567-89ab-cdef-0123-456789abcdef-lock-").await;
        let error = spent.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        tokio::time::sleep(lease + Duration::from_secs(1)).await;
        assert!(good.is_held() && held.is_held(), "{good:?} {held:?}");
        assert_eq!(children(&raw, "/waited").await, places, "its place was lost");
        release(free).await;
        release(waits.await.unwrap().unwrap()).await;
        // It left its place, though nobody can order the queue.
        until("nothing of ours", async || children(&raw, "/spent").await.len() == 2).await;
        release(good).await;
    });
}

/// Who may create but not list had a child all the same, which stood in everybody's way.
#[test]
fn a_refused_claim_leaves_no_child() {
    run(async {
        let server = zookeeper();
        let raw = raw(server.port()).await;
        make(&raw, "/unlisted/x").await;
        let rights = Permission::CREATE | Permission::DELETE | Permission::ADMIN;
        let some = [Acl::new(rights, AuthId::anyone())];
        raw.set_acl("/unlisted/x", &some, None).await.unwrap();
        let locks = connect(&format!("{}/unlisted", server.url())).await;
        for error in [
            locks.mutex("x").lock().await.unwrap_err(),
            locks.mutex("x").try_lock().await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(error.to_string().contains("/unlisted/x"), "{error}");
        }
        // At once, and not when the session is over.
        let all = [Acl::new(Permission::ALL, AuthId::anyone())];
        raw.set_acl("/unlisted/x", &all, None).await.unwrap();
        let stat = raw.check_stat("/unlisted/x").await.unwrap().unwrap();
        assert_eq!(stat.num_children, 0);
    });
}

/// A child of another client's that we may not read is waited for like any other.
#[test]
fn a_child_that_is_closed_to_us_holds() {
    run(async {
        let server = zookeeper();
        let url = format!("{}/closed?create=yes", server.url());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let theirs = raw(server.port()).await;
        // A lock's own node would be gone again: the server deletes what is empty.
        make(&theirs, "/closed/x").await;
        theirs.auth("digest", b"they:secret").await.unwrap();
        let options = CreateMode::EphemeralSequential.with_acls(Acls::creator_all());
        let path = "/closed/x/_c_01234567-89ab-cdef-0123-456789abcdef-lock-";
        let (_, number) = theirs.create(path, b"secret", &options).await.unwrap();
        let error = locks.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // Since 3.9 the server tells nothing of it, but that it is there.
        let known = usize::from(Version::of_this_run() == Version::Oldest);
        assert_eq!(error.holders().len(), known, "{error}");
        let lock = other.mutex("x");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_waiting(&locks, "x", 1).await;
        theirs.delete(&format!("{path}{number}"), None).await.unwrap();
        release(waiting.await.unwrap().unwrap()).await;
    });
}
