//! Waiting in ZooKeeper's queue: which waiters are notified, and the order when the sequence
//! numbers run out or restart.

use std::pin::pin;
use std::sync::mpsc;
use std::time::Duration;

use crate::zookeeper_common::*;
use leasehold::ErrorKind;
use leasehold::store::zookeeper::ZooKeeperStore;
use leasehold::store::{Claim, Evict, Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold_test_support::pushes_agree;
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, zookeeper};

// P1, P6
/// Two clients make random calls. No claim may be reported as granted too early, and each grant
/// must be pushed.
#[test]
fn notifications_agree_with_the_queue() {
    run(async {
        let url = url("?session=60s");
        pushes_agree(&[connect(&url).await, connect(&url).await]).await;
    });
}

// P1
/// A waiter used to count departures in two places. A heartbeat read a listing without the claim
/// ahead, and then the event of that departure was subtracted once more. So there were two holders.
/// The two happen in this order for tasks of one thread, because the client's runtime runs the last
/// task that was woken first.
#[test]
fn a_departure_is_counted_once() {
    let ours = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let ours = ours.unwrap();
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&server.url()).await;
        let url = format!("zookeeper://127.0.0.1:{}?session=60s", proxy.port());
        let store = ZooKeeperStore::open(&url, ours.handle()).await.unwrap();
        let (holds, leaves, waits) = (patient("p1"), patient("p1"), patient("p1"));
        let joined = others.store().join(&holds, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let joined = others.store().join(&leaves, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        let joined = store.join(&waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");

        // During a heartbeat, the check of the child is answered. The listing is on its way when
        // the claim in the middle leaves.
        proxy.delay(Duration::from_millis(300));
        let before = proxy.requests();
        let beating = tokio::spawn({
            let (store, waits) = (store.clone(), waits.clone());
            async move { store.renew(&[Renew { lease: waits.lease, claim: waits }]).await }
        });
        until("the listing is requested", async || proxy.requests() >= before + 2).await;
        proxy.hold_replies();
        assert!(others.store().leave(&leaves, None).await.unwrap());
        // The listing has usually been answered by then. Otherwise the test shows nothing, but does
        // not fail.
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.delay(Duration::ZERO);
        // Both the listing and the event arrive while the client's thread is busy with something
        // else.
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
        // The second renewal shows that it still waits. A claim that was notified of a grant would
        // be a holder by then.
        let again = [Renew { claim: waits.clone(), lease: waits.lease }];
        let again = store.renew(&again).await.unwrap();
        assert!(matches!(again[..], [Renewal::Waiting(_)]), "two clients hold the lock: {again:?}");
        assert!(others.store().leave(&holds, None).await.unwrap());
        let signal = tokio::time::timeout(PATIENCE, store.changed(&waits)).await.unwrap().unwrap();
        assert!(matches!(signal, Signal::Granted(_)), "{signal:?}");
    });
    ours.shutdown_background();
}

// P8
#[test]
fn calls_for_one_claim_are_serialized_even_if_it_expires() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&through(&proxy, "?naming=kazoo&session=20s")).await;
        let raw = raw(zookeeper().port()).await;
        release(locks.mutex("expired").lock().await.unwrap()).await;
        for _ in 0..5 {
            let mut claim = claim("expired");
            let short = Duration::from_millis(200);
            (claim.lease, claim.waiter_lease) = (short, short);
            proxy.hold_replies();
            let joins: Vec<_> = (0..3)
                .map(|_| {
                    let (store, claim) = (locks.store().clone(), claim.clone());
                    tokio::spawn(async move { store.join(&claim, Mode::Wait).await })
                })
                .collect();
            let made = async || !children(&raw, "/leasehold/expired").await.is_empty();
            until("the child exists", made).await;
            // This is long enough for it to be given up while all three calls are under way.
            tokio::time::sleep(short * 2).await;
            proxy.thaw();
            let mut most = 0;
            for join in joins {
                // Whatever each call returns, the claim never has a second child.
                let _ = join.await.unwrap();
                most = most.max(children(&raw, "/leasehold/expired").await.len());
            }
            assert!(most <= 1, "{most} children of one claim");
            let gone = async || children(&raw, "/leasehold/expired").await.is_empty();
            until("expired", gone).await;
        }
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn a_release_wakes_one_of_a_thousand() {
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let store = locks.store();
        let all: Vec<Claim> = (0..1_001).map(|_| patient("herd")).collect();
        for claim in &all {
            store.join(claim, Mode::Wait).await.unwrap();
        }
        let sent = || server.metric("zk_packets_sent");
        let mut least = i64::MAX;
        for turn in 0..5 {
            let before = sent();
            assert!(store.leave(&all[turn], None).await.unwrap());
            let signal = tokio::time::timeout(PATIENCE, store.changed(&all[turn + 1])).await;
            let Ok(Ok(Signal::Granted(token))) = signal else { panic!("{signal:?}") };
            let renew = Renew { claim: all[turn + 1].clone(), lease: PATIENCE };
            let renewed = store.renew(&[renew]).await.unwrap();
            assert!(matches!(renewed[..], [Renewal::Holding { token: t, .. }] if t == token));
            let sent = sent() - before;
            assert!(sent <= 100, "{sent} packets for one hand-over");
            least = least.min(sent);
        }
        // These are the replies to both calls, one event, and perhaps a pulse and the first `mntr`.
        // If a turn takes long, there are more pulses.
        assert!(least <= 8, "{least} packets for one hand-over");
        let mut next = pin!(store.changed(&all[6]));
        assert!(is_pending(&mut next).await, "the waiter was woken too early");
        assert!(server.metric("zk_watch_count") <= 2 * 1_001);
    });
}

#[test]
fn released_permits_wake_only_waiters_that_fit() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        // Three claims are holders. The first waiter wants two permits, the others one.
        let all = [1, 2, 1, 2, 1, 1].map(|weight| permits("permits", weight, 4));
        for claim in &all {
            store.join(claim, Mode::Wait).await.unwrap();
        }
        // The waiter that wants two permits has room only when two have been released.
        assert!(store.leave(&all[0], None).await.unwrap());
        {
            let mut others: Vec<_> = all[3..].iter().map(|c| Box::pin(store.changed(c))).collect();
            tokio::time::sleep(Duration::from_millis(200)).await;
            for other in &mut others {
                assert!(
                    is_pending(&mut other.as_mut()).await,
                    "a waiter was woken, although no claim fits"
                );
            }
        }
        assert!(store.leave(&all[2], None).await.unwrap());
        let signal = tokio::time::timeout(PATIENCE, store.changed(&all[3])).await;
        assert!(matches!(signal, Ok(Ok(Signal::Granted(_)))), "{signal:?}");
        assert!(store.leave(&all[1], None).await.unwrap());
        for claim in &all[4..] {
            let signal = tokio::time::timeout(PATIENCE, store.changed(claim)).await;
            assert!(matches!(signal, Ok(Ok(Signal::Granted(_)))), "{signal:?}");
        }
    });
}

#[test]
fn evicted_waiter_does_not_mistake_a_departure_for_its_grant() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        let [holder, evicted, behind] = [(); 3].map(|()| patient("evicted"));
        store.join(&holder, Mode::Wait).await.unwrap();
        let Joined::Waiting(place) = store.join(&evicted, Mode::Wait).await.unwrap() else {
            panic!("granted while another client holds the lock")
        };
        store.join(&behind, Mode::Wait).await.unwrap();
        let token = place.token.unwrap();
        assert_eq!(locks.evict("evicted", Evict::Token(token)).await.unwrap(), 1);
        assert!(store.leave(&holder, None).await.unwrap());
        let signal = tokio::time::timeout(PATIENCE, store.changed(&evicted)).await;
        assert!(matches!(signal, Ok(Ok(Signal::Ask))), "{signal:?}");
        let renew = Renew { claim: evicted.clone(), lease: PATIENCE };
        assert!(matches!(store.renew(&[renew]).await.unwrap()[..], [Renewal::Lost]));
        let signal = tokio::time::timeout(PATIENCE, store.changed(&behind)).await;
        assert!(matches!(signal, Ok(Ok(Signal::Granted(_)))), "{signal:?}");
    });
}

// S92
/// Each waiter used to copy, read and sort the listing of all of them at every heartbeat, so the
/// renewals of the same client's holders came too late. (The number is limited by what a debug
/// build and a small server can handle, because each join lists all claims.)
#[test]
#[ignore = "runs with ./test.sh --all"]
fn thousands_of_waiters_cost_no_renewal() {
    let many = testbed::sized(3_000, 600);
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let crowd = locks.mutex("crowded").lock().await.unwrap();
        let raw = raw(server.port()).await;
        let in_queue =
            async || raw.check_stat("/leasehold/crowded").await.unwrap().unwrap().num_children - 1;
        let mut waiting = tokio::task::JoinSet::new();
        for n in 1..=many {
            let lock = locks.mutex("crowded");
            waiting.spawn(async move { lock.lock().await.map(drop) });
            if n % 100 == 0 {
                until("all clients are in the queue", async || in_queue().await == n).await;
            }
        }
        let beside = locks.mutex("beside").lease(Duration::from_secs(12)).lock().await.unwrap();
        // Each claim sends several heartbeats.
        let all_kept = async || {
            let before = children(&raw, "/leasehold/crowded").await;
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(beside.is_held() && crowd.is_held(), "{beside:?} {crowd:?}");
            in_queue().await == many && children(&raw, "/leasehold/crowded").await == before
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

// S73
#[test]
fn exhausted_numbers_are_reported_and_restart_once_the_lock_is_free() {
    run(async {
        let setup = ZooKeeperSetup::new()
            .sequences_at("/late", 1 << 30)
            .sequences_at("/last", i32::MAX - 500_000)
            .sequences_at("/over", i32::MIN + 7);
        let server = ZooKeeper::with(&setup);
        let locks = connect(&format!("{}/?session=60s", server.url())).await;
        let raw = raw(server.port()).await;
        let guard = locks.mutex("late").lock().await.unwrap();
        assert!(children(&raw, "/late").await[0].ends_with("-lock-1073741824"));
        let before = guard.token();
        release(guard).await;
        assert_eq!(raw.check_stat("/late").await.unwrap(), None, "the empty queue was not deleted");
        let guard = locks.mutex("late").lock().await.unwrap();
        assert!(children(&raw, "/late").await[0].ends_with("-lock-0000000000"));
        assert!(guard.token() > before);
        for name in ["last", "over"] {
            // As long as the queue has another claim, no claim can join.
            let foreign = make_child(&raw, &format!("/{name}/_c_x-lock-")).await;
            let refused = locks.store().join(&patient(name), Mode::Try).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
            let alone = async || children(&raw, &format!("/{name}")).await.len() == 1;
            until("all nodes of leasehold are gone", alone).await;
            raw.delete(&foreign, None).await.unwrap();
            let guard = locks.mutex(name).lock_timeout(PATIENCE).await.unwrap();
            assert!(children(&raw, &format!("/{name}")).await[0].ends_with("-lock-0000000000"));
            release(guard).await;
        }
    });
}

// S73
/// A lock whose numbers had run out used to fail the renewals of all other locks of the same
/// client.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn lock_without_sequence_numbers_affects_no_other_lock() {
    run(async {
        // The next two claims get the last valid numbers.
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
        assert_eq!(children(&raw, "/waited").await, places, "the waiter lost its queue position");
        release(free).await;
        release(waits.await.unwrap().unwrap()).await;
        // It has deleted its child, although the queue cannot be ordered.
        until("all nodes of leasehold are gone", async || {
            children(&raw, "/spent").await.len() == 2
        })
        .await;
        release(good).await;
    });
}

// S74
#[test]
fn tokens_rise_after_the_container_was_reaped() {
    run(async {
        let locks = connect(&url("")).await;
        let raw = raw(zookeeper().port()).await;
        let mut last = 0;
        for _ in 0..2 {
            let guard = locks.mutex("s74").lock().await.unwrap();
            assert!(children(&raw, "/leasehold/s74").await[0].ends_with("-0000000000"));
            assert!(guard.token().get() > last);
            last = guard.token().get();
            release(guard).await;
            let gone = async || raw.check_stat("/leasehold/s74").await.unwrap().is_none();
            until("the server deletes the empty container", gone).await;
        }
    });
}
