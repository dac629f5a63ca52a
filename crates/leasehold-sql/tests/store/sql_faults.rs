//! Faults of the server: killed, restarted, paused, unreachable, or ending our sessions.

use std::sync::Arc;
use std::time::Duration;

use crate::sql_common::*;
use leasehold::{ErrorKind, LostReason, State};
use testbed::{Proxy, Setup};

on_all![
    tokens_rise_after_kill_9_and_restart,
    locks_stay_exclusive_while_the_server_restarts,
    locks_stay_exclusive_while_sessions_are_killed,
    lock_on_a_paused_server_is_lost_by_its_deadline,
    waiter_survives_an_outage_of_the_server,
    unreachable_server_is_reported,
];

// S53
async fn tokens_rise_after_kill_9_and_restart<S: Server>() {
    let server = S::with(Setup::new());
    let url = server.database();
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    // Long enough for three restarts on a busy machine.
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
        assert!(again.token() > last, "token {} after {last}", again.token());
        last = again.token();
        release(again).await;
    }
    assert!(guard.is_held(), "an acknowledged grant was lost");
    let tried = waiter.mutex("kept").try_lock().await.unwrap_err();
    assert_eq!(tried.kind(), ErrorKind::Contended, "{tried}");
    release(guard).await;
    assert!(waiter.mutex("kept").lock().await.unwrap().token() > first);
}

async fn locks_stay_exclusive_while_the_server_restarts<S: Server>() {
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

// S52
async fn locks_stay_exclusive_while_sessions_are_killed<S: Server>() {
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
    assert!(held.is_held(), "the hold was lost with a session");
    release(held).await;
}

// S52
async fn lock_on_a_paused_server_is_lost_by_its_deadline<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(2);
    let guard = locks.mutex("frozen").lease(lease).lock().await.unwrap();
    let token = guard.token();
    server.stop();
    tokio::time::sleep(lease).await;
    assert!(!guard.is_held(), "is_held() is true after the lease expired");
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    assert_eq!(reason, LostReason::Expired);
    server.cont();
    let next = connect(&url).await.mutex("frozen").lock().await.unwrap();
    assert!(next.token() > token);
    assert_eq!(guard.state(), State::Lost(LostReason::Expired), "a late reply revived the hold");
}

async fn waiter_survives_an_outage_of_the_server<S: Server>() {
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

async fn unreachable_server_is_reported<S: Server>() {
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
