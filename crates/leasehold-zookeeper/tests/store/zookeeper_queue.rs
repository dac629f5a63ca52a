//! Who waits in ZooKeeper's queue, who is told of a turn, and what becomes of the order when its numbers run
//! out or begin anew.

use std::pin::pin;
use std::sync::mpsc;
use std::time::Duration;

use crate::zookeeper_common::*;
use leasehold::store::zookeeper::ZooKeeperStore;
use leasehold::store::{Evict, Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{Claim, ErrorKind};
use leasehold_test_support::pushes_agree;
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, zookeeper};

/// Random calls of two clients: nobody is told of a grant too early, and everybody unasked.
#[test]
fn p1_p6_what_waiters_are_told_agrees_with_the_queue() {
    run(async {
        let url = url("?session=60s");
        pushes_agree(&[connect(&url).await, connect(&url).await]).await;
    });
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
        let (holds, leaves, waits) = (patient("p1"), patient("p1"), patient("p1"));
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

#[test]
fn p8_calls_about_one_claim_wait_for_each_other_though_it_expires_meanwhile() {
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
            until("the child", made).await;
            // Long enough for it to be given up while all three calls are under way.
            tokio::time::sleep(short * 2).await;
            proxy.thaw();
            let mut most = 0;
            for join in joins {
                // Whatever each is told: there is never a second child of the claim.
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
            let told = tokio::time::timeout(PATIENCE, store.changed(&all[turn + 1])).await;
            let Ok(Ok(Signal::Granted(token))) = told else { panic!("{told:?}") };
            let renew = Renew { claim: all[turn + 1].clone(), lease: PATIENCE };
            let renewed = store.renew(&[renew]).await.unwrap();
            assert!(matches!(renewed[..], [Renewal::Holding { token: t, .. }] if t == token));
            let sent = sent() - before;
            assert!(sent <= 100, "{sent} packets for one hand-over");
            least = least.min(sent);
        }
        // The answers to both calls, one event, and perhaps a pulse and the mntr before: more of the pulses
        // where a turn took long.
        assert!(least <= 8, "{least} packets for one hand-over");
        let mut next = pin!(store.changed(&all[6]));
        assert!(is_pending(&mut next).await, "woken too early");
        assert!(server.metric("zk_watch_count") <= 2 * 1_001);
    });
}

#[test]
fn permits_wake_who_fits_and_nobody_else() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        // Three hold; of the waiting the first wants two, the others one.
        let all = [1, 2, 1, 2, 1, 1].map(|weight| permits("permits", weight, 4));
        for claim in &all {
            store.join(claim, Mode::Wait).await.unwrap();
        }
        // The one that waits for two has room only when two have left.
        assert!(store.leave(&all[0], None).await.unwrap());
        {
            let mut others: Vec<_> = all[3..].iter().map(|c| Box::pin(store.changed(c))).collect();
            tokio::time::sleep(Duration::from_millis(200)).await;
            for other in &mut others {
                assert!(is_pending(&mut other.as_mut()).await, "woken though nothing fits");
            }
        }
        assert!(store.leave(&all[2], None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&all[3])).await;
        assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
        assert!(store.leave(&all[1], None).await.unwrap());
        for claim in &all[4..] {
            let told = tokio::time::timeout(PATIENCE, store.changed(claim)).await;
            assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
        }
    });
}

#[test]
fn who_is_evicted_while_waiting_does_not_take_a_departure_for_its_turn() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        let [holder, evicted, behind] = [(); 3].map(|()| patient("evicted"));
        store.join(&holder, Mode::Wait).await.unwrap();
        let Joined::Waiting(place) = store.join(&evicted, Mode::Wait).await.unwrap() else {
            panic!("beside a holder")
        };
        store.join(&behind, Mode::Wait).await.unwrap();
        let token = place.token.unwrap();
        assert_eq!(locks.evict("evicted", Evict::Token(token)).await.unwrap(), 1);
        assert!(store.leave(&holder, None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&evicted)).await;
        assert!(matches!(told, Ok(Ok(Signal::Ask))), "{told:?}");
        let renew = Renew { claim: evicted.clone(), lease: PATIENCE };
        assert!(matches!(store.renew(&[renew]).await.unwrap()[..], [Renewal::Lost]));
        let told = tokio::time::timeout(PATIENCE, store.changed(&behind)).await;
        assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
    });
}

/// Each of the waiters copied, read and sorted the listing of all of them at every heartbeat, and the
/// renewals of what the same client held came too late. (As many as a debug build and a small server
/// can take in: to join, each lists who is there.)
#[test]
#[ignore = "runs with ./test.sh --all"]
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

#[test]
fn s73_numbers_that_run_out_are_told_and_begin_anew_when_the_lock_is_free() {
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
        assert_eq!(raw.check_stat("/late").await.unwrap(), None, "nobody stood there");
        let guard = locks.mutex("late").lock().await.unwrap();
        assert!(children(&raw, "/late").await[0].ends_with("-lock-0000000000"));
        assert!(guard.token() > before);
        for name in ["last", "over"] {
            // As long as somebody stands there, nobody joins.
            let foreign = make_child(&raw, &format!("/{name}/_c_x-lock-")).await;
            let refused = locks.store().join(&patient(name), Mode::Try).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
            let alone = async || children(&raw, &format!("/{name}")).await.len() == 1;
            until("nothing of ours", alone).await;
            raw.delete(&foreign, None).await.unwrap();
            let guard = locks.mutex(name).lock_timeout(PATIENCE).await.unwrap();
            assert!(children(&raw, &format!("/{name}")).await[0].ends_with("-lock-0000000000"));
            release(guard).await;
        }
    });
}

/// A lock whose numbers have run out took the renewals of all other locks of the same client along.
#[test]
#[ignore = "runs with ./test.sh --all"]
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

#[test]
fn s74_a_reaped_container_costs_no_order() {
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
