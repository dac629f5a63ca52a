//! NATS: sessions that expire by the server's clock, and servers that are killed or paused.

use std::time::{Duration, Instant};

use leasehold::ErrorKind;
use leasehold_test_support::*;
use testbed::{Nats, Proxy};

/// Sessions of one second, whose messages live three seconds.
const SHORT: &str = "/?session_ms=1000";

// R46
/// A client is partitioned. Its lock is free when its session has expired, and the client knows
/// earlier.
#[test]
fn partitioned_nats_client_notices_its_loss_before_the_next_grant() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = server.url() + SHORT;
        let cut_off = connect(&proxy.in_front_of(server.port(), &url)).await;
        let other = connect(&url).await;
        let guard = cut_off.mutex("cut").lock().await.unwrap();
        proxy.refuse(true);
        proxy.cut();
        let began = Instant::now();
        let next = other.mutex("cut").lock_timeout(PATIENCE).await.unwrap();
        let (took, recovery) = (began.elapsed(), other.guarantees().recovery);
        assert!(!guard.is_held(), "two clients hold the lock");
        assert!(next.token() > guard.token());
        assert!(took >= Duration::from_secs(1), "{took:?}");
        assert!(
            took < recovery + PATIENCE / 6,
            "took {took:?}, but the stated recovery time is {recovery:?}"
        );
        println!("free {took:?} after the partition of its holder, stated: {recovery:?}");
        // The client comes back with a new session.
        proxy.refuse(false);
        next.release().await.unwrap();
        let again = cut_off.mutex("cut").lock_timeout(PATIENCE).await.unwrap();
        assert!(again.is_held());
    });
}

// S14
/// The session continues although replies to its renewals are lost.
#[test]
fn session_survives_lost_replies() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = server.url() + "/?session_ms=5000";
        let ours = connect(&proxy.in_front_of(server.port(), &url)).await;
        let guard = ours.mutex("s14").lock().await.unwrap();
        for _ in 0..4 {
            proxy.drop_replies_after(0);
            // Long enough for at least one renewal.
            tokio::time::sleep(Duration::from_millis(1_300)).await;
            proxy.pass_replies();
            proxy.cut();
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            assert!(guard.is_held(), "{guard:?}");
        }
        let other = connect(&url).await;
        let error = other.mutex("s14").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    });
}

#[test]
fn killed_server_restarts_with_its_locks_and_queue() {
    run(async {
        let server = Nats::start();
        let url = server.url();
        let (ours, other) = (connect(&url).await, connect(&url).await);
        let mut last = 0;
        for _ in 0..3 {
            let guard = ours.mutex("kept").lock_timeout(PATIENCE).await.unwrap();
            assert!(guard.token().get() > last);
            last = guard.token().get();
            let lock = other.mutex("kept");
            let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
            until("the waiter is in the queue", async || {
                let shown = ours.inspect("kept").await.ok().flatten();
                shown.is_some_and(|shown| shown.claims.len() == 2)
            })
            .await;
            server.kill();
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.restart();
            until("the server replies", async || ours.inspect("kept").await.is_ok()).await;
            assert!(guard.is_held() && !waiting.is_finished());
            let shown = ours.inspect("kept").await.unwrap().unwrap();
            assert_eq!(shown.holders().next().unwrap().token.unwrap().get(), last);
            release(guard).await;
            let next = waiting.await.unwrap().unwrap();
            assert!(next.token().get() > last);
            last = next.token().get();
            release(next).await;
        }
    });
}

// S14
/// The server is paused for longer than any session. No client holds the lock in the meantime, and
/// one does afterwards.
#[test]
fn paused_nats_server_grants_again_after_resuming() {
    run(async {
        let server = Nats::start();
        let url = server.url() + SHORT;
        let (ours, other) = (connect(&url).await, connect(&url).await);
        let guard = ours.mutex("a").lock().await.unwrap();
        server.stop();
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert!(!guard.is_held());
        server.cont();
        let next = other.mutex("a").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > guard.token() && !guard.is_held());
    });
}

/// A client that closes leaves nothing behind, so its lock is free immediately.
#[test]
fn closing_client_frees_its_locks_immediately() {
    run(async {
        let server = testbed::nats();
        let (ours, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = ours.mutex("closed").lock().await.unwrap();
        std::mem::forget(guard);
        ours.close().await.unwrap();
        let began = Instant::now();
        let next = other.mutex("closed").lock_timeout(PATIENCE).await.unwrap();
        assert!(
            next.is_held() && began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
    });
}
