//! A server that goes wrong: killed, restarted, stopped, cut off, or ending our sessions.

use std::sync::Arc;
use std::time::Duration;

use crate::sql_common::*;
use leasehold::{ErrorKind, LostReason, State};
use testbed::{Proxy, Setup};

on_all![
    s53_tokens_rise_over_kill_9_and_restart,
    exact_while_the_server_is_killed_and_restarted,
    s52_exact_while_our_sessions_are_ended,
    s52_a_stopped_server_loses_the_lock_by_the_deadline,
    the_server_is_gone_in_mid_wait,
    nobody_listens,
];

async fn s53_tokens_rise_over_kill_9_and_restart<S: Server>() {
    let server = S::with(Setup::new());
    let url = server.database();
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    // Long enough for three restarts on a machine that does much else.
    let kept = holder.mutex("kept").lease(Duration::from_secs(120));
    let guard = kept.lock().await.unwrap();
    let first = guard.token();
    let mut last = first;
    for round in 0..3 {
        server.kill();
        server.restart();
        let free = holder.mutex(format!("round {round}")).lock().await.unwrap();
        assert!(free.token() > first);
        let again = holder.mutex("counted").lock().await.unwrap();
        assert!(again.token() > last, "{} after {last}", again.token());
        last = again.token();
        release(again).await;
    }
    assert!(guard.is_held(), "the grant was acknowledged");
    let tried = waiter.mutex("kept").try_lock().await.unwrap_err();
    assert_eq!(tried.kind(), ErrorKind::Contended, "{tried}");
    release(guard).await;
    assert!(waiter.mutex("kept").lock().await.unwrap().token() > first);
}

async fn exact_while_the_server_is_killed_and_restarted<S: Server>() {
    let server = Arc::new(S::with(Setup::new()));
    let url = server.database();
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    let breaking = {
        let server = server.clone();
        move || {
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(300));
                server.kill();
                server.restart();
            }
        }
    };
    hammer_while(&clients, "counted", 4, 20, breaking).await;
}

async fn s52_exact_while_our_sessions_are_ended<S: Server>() {
    let server = Arc::new(S::with(Setup::new().fast()));
    let url = server.database();
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    let breaking = {
        let server = server.clone();
        move || {
            for _ in 0..10 {
                std::thread::sleep(Duration::from_millis(100));
                server.end_sessions();
            }
        }
    };
    let held = clients[0].mutex("held").lock().await.unwrap();
    hammer_while(&clients, "counted", 4, 20, breaking).await;
    assert!(held.is_held(), "a lease is not bound to a session");
    release(held).await;
}

async fn s52_a_stopped_server_loses_the_lock_by_the_deadline<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(2);
    let guard = locks.mutex("frozen").lease(lease).lock().await.unwrap();
    let token = guard.token();
    server.stop();
    tokio::time::sleep(lease).await;
    assert!(!guard.is_held(), "nobody has renewed it");
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    assert_eq!(reason, LostReason::Expired);
    server.cont();
    let next = connect(&url).await.mutex("frozen").lock().await.unwrap();
    assert!(next.token() > token);
    assert_eq!(guard.state(), State::Lost(LostReason::Expired), "late answers revive nothing");
}

async fn the_server_is_gone_in_mid_wait<S: Server>() {
    let server = S::with(Setup::new());
    let url = server.database();
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    let guard = holder.mutex("wait").lease(Duration::from_secs(60)).lock().await.unwrap();
    let (queued, in_queue) = tokio::sync::oneshot::channel();
    let queued = std::sync::Mutex::new(Some(queued));
    let mutex = waiter.mutex("wait").lease(Duration::from_secs(60)).on_waiting(move |_| {
        // Only the first time.
        if let Some(queued) = queued.lock().unwrap().take() {
            queued.send(()).unwrap();
        }
    });
    let patient = tokio::spawn(async move { mutex.lock().await });
    in_queue.await.unwrap();
    let impatient = waiter.mutex("wait");
    let impatient =
        tokio::spawn(async move { impatient.lock_timeout(Duration::from_secs(2)).await });
    server.kill();
    let error = impatient.await.unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable), "{error}");
    let tried = waiter.mutex("other").lease(Duration::from_secs(1)).try_lock().await.unwrap_err();
    assert_told(&tried, ErrorKind::Unreachable, "lh:lh");
    server.restart();
    let token = guard.token();
    release(guard).await;
    let guard = tokio::time::timeout(PATIENCE, patient).await.unwrap().unwrap().unwrap();
    assert!(guard.token() > token);
}

async fn nobody_listens<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let url = proxy.in_front_of(server.port(), &url);
    let locks = connect(&url).await;
    release(locks.mutex("first").lock().await.unwrap()).await;
    proxy.refuse(true);
    let connecting = tokio::time::timeout(PATIENCE, leasehold::connect(&url)).await.unwrap();
    assert_told(&connecting.unwrap_err(), ErrorKind::Unreachable, "lh:lh");
    let next = locks.mutex("next").lease(Duration::from_secs(1));
    let tried = tokio::time::timeout(PATIENCE, next.try_lock()).await.unwrap();
    assert_told(&tried.unwrap_err(), ErrorKind::Unreachable, "lh:lh");
    proxy.refuse(false);
    let again = tokio::time::timeout(PATIENCE, locks.mutex("next").lock()).await;
    release(again.unwrap().unwrap()).await;
}
