//! Leases of one member: what is granted counts, what has ended or falls silent is lost in time, and a
//! lock-delay is kept.

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::{Evict, Joined, Mode, Renew, Renewal, Standing, Store};
use leasehold::{ErrorKind, LostReason};
use testbed::{Etcd, Proxy, Setup};

#[test]
fn s82_a_lease_that_etcd_ended_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82").lock().await.unwrap();
        server.etcdctl(&["lease", "revoke", &lease_of(server, "s82/")]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
        // The next lease is another one.
        let next = locks.mutex("s82").lock().await.unwrap();
        assert!(next.token() > guard.token());
        release(next).await;
    });
}

#[test]
fn s82_a_key_that_a_person_deleted_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82-del").lock().await.unwrap();
        server.etcdctl(&["del", "--prefix", "s82-del/"]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
    });
}

#[test]
fn s82_silence_is_lost_by_our_own_clock() {
    run(async {
        let server = Etcd::start();
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(2);
        let guard = locks.mutex("silent").lease(lease).lock().await.unwrap();
        server.stop(0);
        // Nothing is acknowledged from here on: what was, was sent before.
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held(), "believed beyond the end of its lease");
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Expired);
        server.cont(0);
        let next = connect(&server.url()).await.mutex("silent").lock().await.unwrap();
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s82_one_way_silence_is_lost_by_our_own_clock() {
    run(async {
        let server = Etcd::start();
        let other = connect(&server.url()).await;
        let ways: [fn(&Proxy); 2] = [Proxy::hold_requests, Proxy::hold_replies];
        for (name, silence) in ["requests", "replies"].into_iter().zip(ways) {
            let proxy = Proxy::before(server.port(0));
            let locks = connect(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
            let held = (&locks, Duration::from_secs(4));
            let next = lost_before_the_next_holds(held, &other, name, || silence(&proxy)).await;
            proxy.thaw();
            release(next).await;
            release(locks.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
        }
    });
}

/// The network has forgotten the only connection to the only member, and says nothing of it.
#[test]
#[ignore = "runs with ./test.sh --all"]
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

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s83_what_is_granted_counts_and_never_more_than_was_asked_for() {
    run(async {
        // Grants no less than 9 s.
        let setup = Setup::new().arg("--election-timeout=6000").arg("--heartbeat-interval=600");
        let server = Etcd::with(setup, 1);
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(1);
        let guard = locks.mutex("short").lease(lease).no_renewal().lock().await.unwrap();
        assert!(guard.remaining() < lease);
        let info = locks.read("short").await.unwrap().unwrap();
        let told = info.holders().next().unwrap().remaining.unwrap();
        assert!(told > lease * 3, "the negotiated lease is told: {told:?}");
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held());
        let rival = connect(&server.url()).await;
        let error = rival.mutex("short").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "etcd keeps it for longer: {error}");
        release(rival.mutex("short").lock().await.unwrap()).await;
    });
}

#[test]
fn at_least_outlives_a_doubled_release_and_another_client_may_leave() {
    run(async {
        let url = testbed::etcd().url();
        let (_, store) = with_store(&url).await;
        let (_, other) = with_store(&url).await;
        let kept = patient("kept");
        assert!(matches!(store.join(&kept, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let keep = Some(Duration::from_secs(30));
        assert!(store.leave(&kept, keep).await.unwrap());
        assert!(store.leave(&kept, keep).await.unwrap(), "its place is still there");
        assert!(store.leave(&kept, None).await.unwrap());
        let rival = claim("kept");
        assert!(matches!(other.join(&rival, Mode::Try).await.unwrap(), Joined::Busy { .. }));
        // Who departed and comes again stands behind what it left.
        let again = other.join(&kept, Mode::Wait).await.unwrap();
        assert!(matches!(again, Joined::Waiting(p) if p.ahead == 1), "{again:?}");
        let info = other.read(&kept.name).await.unwrap().unwrap();
        assert_eq!(info.claims[0].standing, Standing::Departed);
        assert!(other.leave(&kept, None).await.unwrap());
        // Where nobody but the departed stands, it is a lock in use all the same.
        let listed = other.list("kept").await.unwrap();
        assert!(matches!(&listed[..], [one] if one.claims.len() == 1), "{listed:?}");
        assert_eq!(other.evict(&kept.name, Evict::Holders).await.unwrap(), 1);
        // What one client took, another that knows the claim may renew and give back.
        let shared = patient("shared");
        assert!(matches!(store.join(&shared, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let renew = Renew { lease: shared.lease, claim: shared.clone() };
        let told = other.renew(&[renew]).await.unwrap();
        assert!(matches!(told[..], [Renewal::Holding { .. }]), "{told:?}");
        assert!(other.leave(&shared, None).await.unwrap());
        assert!(!other.leave(&shared, None).await.unwrap());
    });
}

/// The delay is the last part of the lease: neither its late holder nor anybody else can cut it short, and
/// other clients of etcd wait for its end as well.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn f82_a_lock_delay_is_kept_whatever_comes_late() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let (lease, delay) = (Duration::from_secs(2), Duration::from_secs(7));
        let lock = locks.mutex("f82").lease(lease).lock_delay(delay);
        // Of a clean end nothing remains, and a renewed hold is no delay.
        let guard = lock.lock().await.unwrap();
        tokio::time::sleep(lease * 2).await;
        assert!(guard.is_held(), "{guard:?}");
        other.check(&guard.sequencer()).await.unwrap();
        release(guard).await;
        release(other.mutex("f82").try_lock().await.unwrap()).await;

        let begun = Instant::now();
        let guard = lock.no_renewal().lock().await.unwrap();
        let mut theirs = etcdctl_lock(server, "f82", &["true"]);
        until_queued(&other, "f82", 2).await;
        guard.lost().await;
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        until("the delay to be seen", async || {
            let info = other.read("f82").await.unwrap().unwrap();
            info.claims[0].standing == Standing::Departed
        })
        .await;
        let error = other.mutex("f82").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        release(other.mutex("f82").lock_timeout(PATIENCE).await.unwrap()).await;
        assert!(begun.elapsed() >= lease + delay, "open after {:?}", begun.elapsed());
        assert!(theirs.wait().unwrap().success());
    });
}
