//! Leases and sessions: what a session vouches for, connections that break or fall silent, replies that are
//! lost.

use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::store::{Joined, Mode};
use leasehold::{ErrorKind, LostReason, State};
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, zookeeper};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn the_session_is_what_the_server_allows_and_is_told() {
    run(async {
        let setup = ZooKeeperSetup::new().sessions(Duration::from_secs(8), Duration::from_secs(20));
        let server = ZooKeeper::with(&setup);
        for (asked, given) in [("2s", 8), ("60s", 20), ("15s", 15)] {
            let locks = connect(&format!("{}?session={asked}", server.url())).await;
            let given = Duration::from_secs(given);
            let promises = locks.guarantees();
            assert_eq!(promises.recovery, given + Duration::from_secs(3));
            let told = promises.notes.iter().any(|note| note.contains(&format!("{given:?}")));
            assert_eq!(told, asked != "15s", "{:?}", promises.notes);
            // No lease is believed in for longer than the session can vouch for.
            let guard = locks.mutex("session").lease(PATIENCE * 2).lock().await.unwrap();
            assert!(guard.remaining() < given, "{:?} of {given:?}", guard.remaining());
            assert!(guard.remaining() > given / 4, "{:?} of {given:?}", guard.remaining());
            release(guard).await;
        }
    });
}

/// What the session cuts is what the lease is, for all who ask.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn f26_a_lease_that_the_session_cuts_is_told_as_it_is() {
    run(async {
        for (session, asked) in [("15s", 90), ("4s", 15), ("60s", 3_600)] {
            let locks = connect(&format!("{}?session={session}", zookeeper().url())).await;
            let longest = locks.store().longest_lease();
            let name = format!("cut-{session}");
            let lock = locks.mutex(&name).lease(Duration::from_secs(asked));
            let guard = lock.lock().await.unwrap();
            assert!(longest < Duration::from_secs(asked));
            assert!(guard.remaining() <= longest, "{:?} of {longest:?}", guard.remaining());
            // And it is renewed in the rhythm of that, and not of what was asked for.
            let longer = longest * 3 / 2;
            if longer < Duration::from_secs(20) {
                tokio::time::sleep(longer).await;
                assert!(guard.is_held(), "{guard:?}");
            }
            release(guard).await;
        }
    });
}

/// With ticks of 8 s, a member tells the leader only every 4 s whom it has heard.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn f48_long_ticks_make_leases_short() {
    run(async {
        let second = Duration::from_secs(1);
        let setup = ZooKeeperSetup::new().tick(second * 8).sessions(second * 16, second * 160);
        let server = ZooKeeper::with(&setup);
        // What the server gives is longer than what was asked for: that tells it.
        let locks = connect(&server.url()).await;
        let certain = second * 16 - second * 10;
        assert!(locks.store().longest_lease() <= certain, "{:?}", locks.store().longest_lease());
        // It is as long as was asked for: the server is asked.
        let locks = connect(&format!("{}?session=20s", server.url())).await;
        let certain = second * 20 - second * 10;
        until("the ticks to be known", async || locks.store().longest_lease() <= certain).await;
        // With ticks as they usually are, nothing is taken off.
        let server = ZooKeeper::with(&setup.tick(second * 2).sessions(second * 4, second * 40));
        let (port, heard) = listening_in(server.port()).await;
        let locks = connect(&format!("zookeeper://127.0.0.1:{port}?session=20s")).await;
        // Two connections: its own, and the one that asks.
        until("the ticks to be known", async || heard.first.lock().unwrap().len() == 2).await;
        assert_eq!(locks.store().longest_lease(), second * 15);
    });
}

#[test]
fn a_connection_that_breaks_costs_nothing() {
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

#[test]
fn s70_a_creation_whose_reply_is_lost_is_found_again() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        // A node of kazoo's naming is not reaped.
        let locks = connect(&through(&proxy, "?naming=kazoo")).await;
        let raw = raw(zookeeper().port()).await;
        release(locks.mutex("s70").lock().await.unwrap()).await;
        let made = raw.check_stat("/leasehold/s70").await.unwrap().unwrap().cversion;
        proxy.hold_replies();
        let taking = tokio::spawn({
            let lock = locks.mutex("s70");
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until("the child", async || children(&raw, "/leasehold/s70").await.len() == 1).await;
        proxy.cut();
        proxy.thaw();
        let guard = taking.await.unwrap().unwrap();
        assert!(guard.is_held());
        let (all, stat) = raw.get_children("/leasehold/s70").await.unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(stat.cversion, made + 1, "made more than once");
        release(guard).await;
    });
}

#[test]
fn s71_a_new_session_inherits_nothing() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        let locks = connect(&through(&proxy, "?session=4s")).await;
        let raw = raw(server.port()).await;
        let guard = loop {
            match locks.mutex("s71").lock().await {
                Ok(guard) => break guard,
                // A grant that came too late is said to have been lost.
                Err(e) => assert!(e.is_retryable(), "{e}"),
            }
        };
        let lost = patient("s71b");
        proxy.refuse(true);
        // Sent into a session that will not come back: it may or may not be there.
        let store = locks.store().clone();
        let asked = tokio::spawn({
            let lost = lost.clone();
            async move { store.join(&lost, Mode::Wait).await }
        });
        until("the session ends", async || children(&raw, "/leasehold/s71").await.is_empty()).await;
        assert!(!guard.is_held(), "believed for longer than the session");
        // What the old session's child looks like as long as a member has not heard of its end.
        let hex = lost.id.to_hex();
        let guid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        make(&raw, "/leasehold/s71b").await;
        make_child(&raw, &format!("/leasehold/s71b/_c_{guid}-lock-")).await;
        proxy.refuse(false);
        assert_eq!(asked.await.unwrap().unwrap_err().kind(), ErrorKind::Unreachable);
        // The first may meet the end of the old session.
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

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s72_who_is_cut_off_has_lost_before_anybody_else_holds() {
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
            // On a machine that stood still, the other holds by now.
            until("the other to wait", async || {
                let info = other.read("s72").await.unwrap();
                next.is_finished() || info.is_some_and(|info| info.waiters().count() == 1)
            })
            .await;
            proxy.freeze();
            loop {
                match guard.state() {
                    State::Held => {
                        watch.changed().await;
                    }
                    // Or over already, on such a machine.
                    State::AtRisk(_) | State::Lost(LostReason::Expired) => break,
                    state => panic!("{state:?} before it was at risk"),
                }
            }
            let next = next.await.unwrap().unwrap();
            assert!(!guard.is_held(), "two holders");
            assert_eq!(guard.state(), State::Lost(LostReason::Expired));
            assert!(next.token() > guard.token());
            proxy.thaw();
            proxy.cut();
            release(next).await;
        }
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s72_one_way_silence_is_lost_before_another_holds() {
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

#[test]
fn s75_who_gives_up_while_cut_off_leaves_nothing_behind() {
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
        assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(children(&raw, "/leasehold/s75").await.len(), 2, "it could not be told");
        proxy.refuse(false);
        until("deleted", async || children(&raw, "/leasehold/s75").await.len() == 1).await;
        assert!(start.elapsed() < Duration::from_secs(50), "that was the session's end");
        assert!(guard.is_held());
    });
}
