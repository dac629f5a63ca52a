//! NATS: sessions that end by the server's clock, servers that are killed and stopped.

use std::time::{Duration, Instant};

use crate::nats_common::*;
use leasehold::ErrorKind;
use leasehold_test_support::*;
use testbed::{Nats, Proxy};

/// Sessions of a second: their messages live for three.
const SHORT: &str = "/?session_ms=1000";

/// A client that is cut off: its lock is free when its session is over, and it knows that before.
#[test]
fn r46_a_client_that_is_cut_off_from_nats_is_replaced_and_knows_it_first() {
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
        assert!(!guard.is_held(), "two hold");
        assert!(next.token() > guard.token());
        assert!(took >= Duration::from_secs(1), "{took:?}");
        assert!(took < recovery + PATIENCE / 6, "{took:?}, where {recovery:?} is stated");
        println!("free {took:?} after its holder was cut off, {recovery:?} is stated");
        // It comes back, with a new session.
        proxy.refuse(false);
        next.release().await.unwrap();
        let again = cut_off.mutex("cut").lock_timeout(PATIENCE).await.unwrap();
        assert!(again.is_held());
    });
}

/// Touches whose answers are lost: the session goes on.
#[test]
fn s14_a_session_outlives_answers_that_are_lost() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = server.url() + "/?session_ms=5000";
        let ours = connect(&proxy.in_front_of(server.port(), &url)).await;
        let guard = ours.mutex("s14").lock().await.unwrap();
        for _ in 0..4 {
            proxy.drop_replies_after(0);
            // At least one touch.
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
fn a_server_that_is_killed_comes_back_with_what_it_kept() {
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
            until("it stands in the queue", async || {
                let shown = ours.read("kept").await.ok().flatten();
                shown.is_some_and(|shown| shown.claims.len() == 2)
            })
            .await;
            server.kill();
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.restart();
            until("it answers", async || ours.read("kept").await.is_ok()).await;
            assert!(guard.is_held() && !waiting.is_finished());
            let shown = ours.read("kept").await.unwrap().unwrap();
            assert_eq!(shown.holders().next().unwrap().token.unwrap().get(), last);
            release(guard).await;
            let next = waiting.await.unwrap().unwrap();
            assert!(next.token().get() > last);
            last = next.token().get();
            release(next).await;
        }
    });
}

/// The server stands still for longer than any session, and goes on: nobody believes meanwhile, and one
/// holds afterwards.
#[test]
fn s14_a_nats_server_that_was_stopped_goes_on() {
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

/// A client that goes leaves nothing behind: its lock is free at once.
#[test]
fn who_closes_is_gone_at_once() {
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
