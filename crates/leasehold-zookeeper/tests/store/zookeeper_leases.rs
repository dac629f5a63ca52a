//! Leases and sessions: the limits that a session sets, connections that break or become silent,
//! and lost replies.

use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::store::{Joined, Mode};
use leasehold::{ErrorKind, LostReason, State};
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, zookeeper};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn session_length_is_the_one_the_server_allows_and_is_reported() {
    run(async {
        let setup = ZooKeeperSetup::new().sessions(Duration::from_secs(8), Duration::from_secs(20));
        let server = ZooKeeper::with(&setup);
        for (asked, given) in [("2s", 8), ("60s", 20), ("15s", 15)] {
            let locks = connect(&format!("{}?session={asked}", server.url())).await;
            let given = Duration::from_secs(given);
            let promises = locks.guarantees();
            assert_eq!(promises.recovery, given + Duration::from_secs(3));
            let is_reported =
                promises.notes.iter().any(|note| note.contains(&format!("{given:?}")));
            assert_eq!(is_reported, asked != "15s", "{:?}", promises.notes);
            // No lease counts as valid for longer than the session is certain to live.
            let guard = locks.mutex("session").lease(PATIENCE * 2).lock().await.unwrap();
            assert!(
                guard.remaining() < given,
                "the guard has {:?} left of a session of {given:?}",
                guard.remaining()
            );
            assert!(
                guard.remaining() > given / 4,
                "the guard has {:?} left of a session of {given:?}",
                guard.remaining()
            );
            release(guard).await;
        }
    });
}

// F26
/// A lease that the session shortens is reported as it is.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn lease_shortened_by_the_session_is_reported_correctly() {
    run(async {
        for (session, asked) in [("15s", 90), ("4s", 15), ("60s", 3_600)] {
            let locks = connect(&format!("{}?session={session}", zookeeper().url())).await;
            let longest = locks.store().longest_lease();
            let name = format!("cut-{session}");
            let lock = locks.mutex(&name).lease(Duration::from_secs(asked));
            let guard = lock.lock().await.unwrap();
            assert!(longest < Duration::from_secs(asked));
            assert!(
                guard.remaining() <= longest,
                "the guard has {:?} left, the longest lease is {longest:?}",
                guard.remaining()
            );
            // It is renewed at intervals of the shortened lease, not of the requested one.
            let longer = longest * 3 / 2;
            if longer < Duration::from_secs(20) {
                tokio::time::sleep(longer).await;
                assert!(guard.is_held(), "{guard:?}");
            }
            release(guard).await;
        }
    });
}

// F48
/// With ticks of 8 s, a member reports its active sessions to the leader only every 4 s.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn long_ticks_make_leases_short() {
    run(async {
        let second = Duration::from_secs(1);
        let setup = ZooKeeperSetup::new().tick(second * 8).sessions(second * 16, second * 160);
        let server = ZooKeeper::with(&setup);
        // The server grants a longer session than requested, which shows its shortest session.
        let locks = connect(&server.url()).await;
        let certain = second * 16 - second * 10;
        assert!(locks.store().longest_lease() <= certain, "{:?}", locks.store().longest_lease());
        // The session is as long as requested, so the client queries the shortest one.
        let locks = connect(&format!("{}?session=20s", server.url())).await;
        let certain = second * 20 - second * 10;
        until("the client knows the tick", async || locks.store().longest_lease() <= certain).await;
        // With ticks of the usual length, the lease is not shortened.
        let server = ZooKeeper::with(&setup.tick(second * 2).sessions(second * 4, second * 40));
        let (port, recorded) = listening_in(server.port()).await;
        let locks = connect(&format!("zookeeper://127.0.0.1:{port}?session=20s")).await;
        // There are two connections: that of the session, and that of the query.
        until("the client knows the tick", async || recorded.first.lock().unwrap().len() == 2)
            .await;
        assert_eq!(locks.store().longest_lease(), second * 15);
    });
}

#[test]
fn broken_connection_costs_neither_lock_nor_queue_position() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let (locks, other) = (connect(&through(&proxy, "")).await, connect(&url("")).await);
        let guard = locks.mutex("broken").lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = locks.mutex("broken");
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until_waiting(&other, "broken", 1).await;
        for _ in 0..3 {
            proxy.cut();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(guard.is_held());
        // The watch of the waiter was set again.
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

// S70
#[test]
fn child_is_found_again_after_a_lost_reply() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let raw = raw(zookeeper().port()).await;
        for naming in ["curator", "kazoo"] {
            let locks = connect(&through(&proxy, &format!("?naming={naming}"))).await;
            let (name, path) = (format!("s70-{naming}"), format!("/leasehold/s70-{naming}"));
            make(&raw, &path).await;
            proxy.hold_replies();
            let taking = tokio::spawn({
                let lock = locks.mutex(name);
                async move { lock.lock_timeout(PATIENCE).await }
            });
            until("the child exists", async || children(&raw, &path).await.len() == 1).await;
            proxy.cut();
            proxy.thaw();
            let guard = taking.await.unwrap().unwrap();
            assert!(guard.is_held());
            let (all, stat) = raw.get_children(&path).await.unwrap();
            assert_eq!(all.len(), 1);
            assert_eq!(stat.cversion, 1, "{naming}: the child was created more than once");
            release(guard).await;
        }
    });
}

// S71
#[test]
fn a_new_session_inherits_nothing() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        let locks = connect(&through(&proxy, "?session=4s")).await;
        let raw = raw(server.port()).await;
        let guard = loop {
            match locks.mutex("s71").lock().await {
                Ok(guard) => break guard,
                // A grant that came too late is reported as lost.
                Err(e) => assert!(e.is_retryable(), "{e}"),
            }
        };
        let lost = patient("s71b");
        proxy.refuse(true);
        // This is sent in a session that will not come back. The child may or may not exist.
        let store = locks.store().clone();
        let asked = tokio::spawn({
            let lost = lost.clone();
            async move { store.join(&lost, Mode::Wait).await }
        });
        until("the session ends", async || children(&raw, "/leasehold/s71").await.is_empty()).await;
        assert!(!guard.is_held(), "is_held() is true after the end of the session");
        // This child looks like that of the old session until a member learns of the session's end.
        let hex = lost.id.to_hex();
        let guid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        make(&raw, "/leasehold/s71b").await;
        make_child(&raw, &format!("/leasehold/s71b/_c_{guid}-lock-")).await;
        proxy.refuse(false);
        assert_eq!(asked.await.unwrap().unwrap_err().kind(), ErrorKind::Unreachable);
        // The first attempt may find the end of the old session.
        let mut again = locks.store().join(&lost, Mode::Wait).await;
        while again.as_ref().is_err_and(|e| e.kind() == ErrorKind::Unreachable) {
            again = locks.store().join(&lost, Mode::Wait).await;
        }
        let again = again.unwrap();
        assert!(matches!(again, Joined::Busy { .. }), "{again:?}");
        assert_eq!(guard.state(), State::Lost(LostReason::Expired));
        let next = locks.mutex("s71").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > guard.token());
    });
}

// S72
#[test]
#[ignore = "runs with ./test.sh --all"]
fn partitioned_holder_loses_before_the_next_grant() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        for session in ["4s", "8s"] {
            let cut = connect(&through(&proxy, &format!("?session={session}"))).await;
            let other = connect(&server.url()).await;
            let guard = cut.mutex("s72").lock().await.unwrap();
            let mut watch = guard.watch();
            let next = tokio::spawn({
                let lock = other.mutex("s72");
                async move { lock.lock_timeout(PATIENCE).await }
            });
            // If the machine paused, the other client may already be the holder.
            until("the other client is in the queue", async || {
                let info = other.inspect("s72").await.unwrap();
                next.is_finished() || info.is_some_and(|info| info.waiters().count() == 1)
            })
            .await;
            proxy.freeze();
            loop {
                match guard.state() {
                    State::Held => {
                        watch.changed().await;
                    }
                    // If the machine paused, the lease may already be over.
                    State::AtRisk(_) | State::Lost(LostReason::Expired) => break,
                    state => panic!("{state:?} before AtRisk"),
                }
            }
            let next = next.await.unwrap().unwrap();
            assert!(!guard.is_held(), "two clients hold the lock");
            assert_eq!(guard.state(), State::Lost(LostReason::Expired));
            assert!(next.token() > guard.token());
            proxy.thaw();
            proxy.cut();
            release(next).await;
        }
    });
}

// S72
#[test]
#[ignore = "runs with ./test.sh --all"]
fn holder_loses_during_one_way_silence_before_the_next_grant() {
    run(async {
        let server = ZooKeeper::start();
        let other = connect_to(&server, "?session=30s").await;
        let ways: [fn(&Proxy); 2] = [Proxy::hold_requests, Proxy::hold_replies];
        for (name, silence) in ["requests", "replies"].into_iter().zip(ways) {
            let proxy = Proxy::before(server.port());
            let url = format!("zookeeper://127.0.0.1:{}?session=4s", proxy.port());
            let held = connect(&url).await;
            lost_before_the_next_holds(&held, &other, name, || silence(&proxy)).await;
            proxy.thaw();
            release(held.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
        }
    });
}

// S75
#[test]
fn waiter_that_gives_up_while_partitioned_leaves_nothing_behind() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&url("")).await;
        let cut = connect(&through(&proxy, "?session=60s")).await;
        let raw = raw(zookeeper().port()).await;
        let guard = locks.mutex("s75").lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = cut.mutex("s75");
            async move { lock.lock_timeout(Duration::from_secs(8)).await }
        });
        until_waiting(&locks, "s75", 1).await;
        let start = Instant::now();
        proxy.refuse(true);
        let refused = waiting.await.unwrap().unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Timeout | ErrorKind::Unreachable), "{refused}");
        assert_eq!(
            children(&raw, "/leasehold/s75").await.len(),
            2,
            "the server received the deletion, although it was unreachable"
        );
        proxy.refuse(false);
        until("the waiter's node is deleted", async || {
            children(&raw, "/leasehold/s75").await.len() == 1
        })
        .await;
        assert!(
            start.elapsed() < Duration::from_secs(50),
            "the node was deleted only by the end of the session"
        );
        assert!(guard.is_held());
    });
}
