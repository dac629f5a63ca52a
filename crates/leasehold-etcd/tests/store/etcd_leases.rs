//! Leases on one member: the granted time counts, a lock is lost in time if its lease has ended or
//! the member is unreachable, and a lock delay is kept.

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::{ClaimState, Evict, Joined, Mode, Renew, Renewal, Store};
use leasehold::{ErrorKind, LostReason};
use testbed::{Etcd, Proxy, Setup};

// S82
#[test]
fn lock_with_a_revoked_lease_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82").lock().await.unwrap();
        server.etcdctl(&["lease", "revoke", &lease_of(server, "s82/")]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
        // The next claim gets another lease.
        let next = locks.mutex("s82").lock().await.unwrap();
        assert!(next.token() > guard.token());
        release(next).await;
    });
}

// S82
#[test]
fn lock_with_a_deleted_key_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82-del").lock().await.unwrap();
        server.etcdctl(&["del", "--prefix", "s82-del/"]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
    });
}

// S82
#[test]
fn lease_expires_by_the_clients_clock_while_etcd_does_not_respond() {
    run(async {
        let server = Etcd::start();
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(2);
        let guard = locks.mutex("silent").lease(lease).lock().await.unwrap();
        server.stop(0);
        // From here on no request is acknowledged. The acknowledged ones were sent before.
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held(), "is_held() is true after the lease expired");
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Expired);
        server.cont(0);
        let next = connect(&server.url()).await.mutex("silent").lock().await.unwrap();
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    });
}

// S82
#[test]
#[ignore = "runs with ./test.sh --all"]
fn lease_expires_by_own_clock_during_one_way_silence() {
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

// S14
/// The network has dropped the only connection to the only member without an error.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn only_connection_is_replaced_when_it_falls_silent() {
    run(async {
        let server = testbed::etcd();
        let proxy = Proxy::before(server.port(0));
        let locks = connect(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
        // The renewals time out before a member that may be slow would be given up.
        let lease = Duration::from_secs(12);
        let guard = locks.mutex("silent: held").lease(lease).lock().await.unwrap();
        let blocker = connect(&server.url()).await;
        let blocker = blocker.mutex("silent: wanted").lease(PATIENCE).lock().await.unwrap();
        let waiting = tokio::spawn({
            let mutex = locks.mutex("silent: wanted").lease(lease);
            async move { mutex.lock().await }
        });
        while locks.inspect("silent: wanted").await.unwrap().unwrap().waiters().count() == 0 {
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

// S83
#[test]
#[ignore = "runs with ./test.sh --all"]
fn hold_lasts_no_longer_than_requested_if_etcd_grants_more() {
    run(async {
        // This server grants no lease below 9 s.
        let setup = Setup::new().arg("--election-timeout=6000").arg("--heartbeat-interval=600");
        let server = Etcd::with(setup, 1);
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(1);
        let guard = locks.mutex("short").lease(lease).no_renewal().lock().await.unwrap();
        assert!(guard.remaining() < lease);
        let info = locks.inspect("short").await.unwrap().unwrap();
        let shown_remaining = info.holders().next().unwrap().remaining.unwrap();
        assert!(
            shown_remaining > lease * 3,
            "the negotiated lease is not shown: {shown_remaining:?}"
        );
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held());
        let rival = connect(&server.url()).await;
        let error = rival.mutex("short").try_lock().await.unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::Contended,
            "the lease in etcd is longer, so the lock is still held: {error}"
        );
        release(rival.mutex("short").lock().await.unwrap()).await;
    });
}

#[test]
fn min_hold_survives_a_repeated_release() {
    run(async {
        let url = testbed::etcd().url();
        let (_, store) = with_store(&url).await;
        let (_, other) = with_store(&url).await;
        let kept = patient("kept");
        assert!(matches!(store.join(&kept, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let keep = Some(Duration::from_secs(30));
        assert!(store.leave(&kept, keep).await.unwrap());
        assert!(store.leave(&kept, keep).await.unwrap(), "the claim in cooldown was not found");
        assert!(store.leave(&kept, None).await.unwrap());
        let rival = claim("kept");
        assert!(matches!(other.join(&rival, Mode::Try).await.unwrap(), Joined::Busy { .. }));
        // A claim that released the lock with a cooldown and joins again is queued after that
        // cooldown.
        let again = other.join(&kept, Mode::Wait).await.unwrap();
        assert!(matches!(again, Joined::Waiting(p) if p.ahead == 1), "{again:?}");
        let info = other.read(&kept.name).await.unwrap().unwrap();
        assert_eq!(info.claims[0].state, ClaimState::Cooldown);
        assert!(other.leave(&kept, None).await.unwrap());
        // A lock with nothing but a cooldown is listed as in use.
        let listed = other.list("kept").await.unwrap();
        assert!(matches!(&listed[..], [one] if one.claims.len() == 1), "{listed:?}");
        assert_eq!(other.evict(&kept.name, Evict::Holders).await.unwrap(), 1);
        // Another client that knows a claim may renew and release it.
        let shared = patient("shared");
        assert!(matches!(store.join(&shared, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let renew = Renew { lease: shared.lease, claim: shared.clone() };
        let renewed = other.renew(&[renew]).await.unwrap();
        assert!(matches!(renewed[..], [Renewal::Holding { .. }]), "{renewed:?}");
        assert!(other.leave(&shared, None).await.unwrap());
        assert!(!other.leave(&shared, None).await.unwrap());
    });
}

// F82
/// The delay is the last part of the lease. Neither its former holder nor another client can
/// shorten it, and other clients of etcd wait for its end as well.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn lock_delay_cannot_be_shortened_by_late_requests() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let (lease, delay) = (Duration::from_secs(2), Duration::from_secs(7));
        let lock = locks.mutex("f82").lease(lease).lock_delay(delay);
        // A clean release causes no delay, and a renewed claim is not in its delay.
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
        until("the lock is in its lock_delay", async || {
            let info = other.inspect("f82").await.unwrap().unwrap();
            info.claims[0].state == ClaimState::Cooldown
        })
        .await;
        let error = other.mutex("f82").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        release(other.mutex("f82").lock_timeout(PATIENCE).await.unwrap()).await;
        assert!(begun.elapsed() >= lease + delay, "free after {:?}", begun.elapsed());
        assert!(theirs.wait().unwrap().success());
    });
}
