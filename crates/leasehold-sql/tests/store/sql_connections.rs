//! Connections: how few are enough, that tasks do not block each other on them, and connections
//! that do not answer or cannot be opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::ErrorKind;
use testbed::{MariaDb, Postgres, Proxy, Setup};

on_all![waiters_hold_no_connection_and_no_transaction, tasks_of_one_connection_exclude_each_other,];

without_mysql![
    a_waiter_needs_one_connection,
    other_locks_never_wait_behind_blocked_joins,
    no_room_for_a_connection_is_passing,
    silent_connections_cost_no_lease,
    connection_attempts_that_never_complete_are_abandoned,
];

async fn waiters_hold_no_connection_and_no_transaction<S: Server>() {
    const WAITERS: usize = 200;
    const POOL: usize = 3;
    let server = S::shared();
    let url = server.database();
    let locks = connect(&format!("{url}?pool={POOL}")).await;
    let guard = locks.mutex("popular").lock().await.unwrap();
    let mut held = Vec::new();
    for n in 0..50 {
        held.push(locks.mutex(format!("held {n}")).lock().await.unwrap());
    }
    let waiting = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..WAITERS {
        let (counted, first) = (waiting.clone(), std::sync::Once::new());
        let mutex = locks.mutex("popular").on_waiting(move |_| {
            first.call_once(|| {
                counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            });
        });
        waiters.spawn(async move { release(mutex.lock().await.unwrap()).await });
    }
    until("all clients are in the queue", async || {
        waiting.load(std::sync::atomic::Ordering::SeqCst) == WAITERS
    })
    .await;
    // Statements such as heartbeats run all the time. A transaction that stays open would be there
    // at each check.
    let (mut always_open, mut fewest) = (true, usize::MAX);
    for _ in 0..10 {
        let (sessions, open) = server.sessions(&url);
        // The server may still list some sessions that were closed.
        fewest = fewest.min(sessions);
        always_open &= open > 0;
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    // One more session is the listener's, and two are for heartbeats.
    assert!(fewest <= POOL + 3, "{fewest} sessions for a pool of {POOL}");
    assert!(!always_open, "a transaction stays open while waiters wait");
    release(guard).await;
    while let Some(done) = waiters.join_next().await {
        done.unwrap();
    }
}

// S40
async fn tasks_of_one_connection_exclude_each_other<S: Server>() {
    let url = S::shared().database();
    let locks = connect(&format!("{url}?pool=1")).await;
    let guard = locks.mutex("one").lock().await.unwrap();
    let error = locks.mutex("one").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    assert_eq!(error.holders()[0].token, guard.grant());
    guard.release().await.unwrap();
    hammer(&[locks], "one", 16, 5).await;
}

/// A server that can limit the number of a user's connections.
trait Limited {
    /// Whether waiters are notified and poll rarely. Others poll all the time, and use a second
    /// connection for heartbeats while there is room.
    const TELLS: bool;
    fn limit(&self, url: &str, connections: usize);
}

impl Limited for Postgres {
    const TELLS: bool = true;

    fn limit(&self, url: &str, connections: usize) {
        Server::admin(self, url, &format!("ALTER ROLE lh CONNECTION LIMIT {connections}"));
    }
}

impl Limited for MariaDb {
    const TELLS: bool = false;

    fn limit(&self, url: &str, connections: usize) {
        let limit = format!("ALTER USER 'lh'@'127.0.0.1' WITH MAX_USER_CONNECTIONS {connections}");
        Server::admin(self, url, &limit);
    }
}

// F07
/// One holder and 24 clients that wait, where there is room for 30 connections. All clients get the
/// lock. If waiters are notified, none of them has more than one connection while it waits.
async fn a_waiter_needs_one_connection<S: Server + Limited>() {
    const WAITERS: usize = 24;
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let holder = connect(&url).await;
    server.limit(&url, 30);
    let lease = Duration::from_secs(60);
    let guard = holder.mutex("popular").lease(lease).lock().await.unwrap();
    let waiting = Arc::new(AtomicUsize::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..WAITERS {
        let (url, waiting) = (url.clone(), waiting.clone());
        clients.spawn(async move {
            let locks = connect(&url).await;
            let first = std::sync::Once::new();
            let mutex = locks.mutex("popular").lease(lease).on_waiting(move |_| {
                first.call_once(|| {
                    waiting.fetch_add(1, Ordering::SeqCst);
                });
            });
            release(mutex.lock().await.unwrap()).await;
            locks.close().await.unwrap();
        });
    }
    until("all clients are in the queue", async || waiting.load(Ordering::SeqCst) == WAITERS).await;
    let rested = async || !S::TELLS || server.sessions(&url).0 <= WAITERS + 1;
    until("each has one connection", rested).await;
    release(guard).await;
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
}

// F40
/// The joins of one lock that wait for its row leave connections for the release of another lock and
/// for a free lock.
async fn other_locks_never_wait_behind_blocked_joins<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(60);
    release(locks.mutex("blocked").lease(lease).lock().await.unwrap()).await;
    let guard = locks.mutex("other").lease(lease).lock().await.unwrap();
    let blocker = server.hold(&url, BLOCK).await;
    let mut joins = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let mutex = locks.mutex("blocked").lease(lease);
        joins.spawn(async move { release(mutex.lock().await.unwrap()).await });
    }
    until("two joins wait for the row", async || server.blocked() >= 2).await;
    let began = Instant::now();
    guard.release().await.unwrap();
    // Neither does a free lock.
    release(locks.mutex("free").lease(lease).lock().await.unwrap()).await;
    // The server aborts statements that wait for the row after five seconds (MariaDB after two).
    assert!(began.elapsed() < Duration::from_millis(1_900), "{:?}", began.elapsed());
    drop(blocker);
    while let Some(done) = joins.join_next().await {
        done.unwrap();
    }
}

async fn no_room_for_a_connection_is_passing<S: Server + Hasty>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    release(connect(&url).await.mutex("first").lock().await.unwrap()).await;
    server.user(&url, "few", "SELECT, INSERT, UPDATE, DELETE");
    server.few_connections(&url);
    let url = url.replace("lh:lh@", "few:few@");
    let first = connect(&url).await;
    let error = leasehold::connect(&url).await.unwrap_err();
    assert_told(&error, leasehold::ErrorKind::Unreachable, "few:few");
    assert!(error.is_retryable(), "{error}");
    assert!(format!("{error:#}").contains("connection"), "{error}");
    first.close().await.unwrap();
}

// S14
/// A firewall drops the connections' state. Nothing is answered, and no error is reported. A client
/// that uses one of them must not wait longer than the lease lasts, and must not try them one after
/// the other.
async fn silent_connections_cost_no_lease<S: Server>() {
    let server = S::shared();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &server.database())).await;
    let mut held = Vec::new();
    // Leases of different lengths are renewed separately, so all connections are in use.
    for n in 0..6 {
        let lease = Duration::from_millis(12_000 + n * 20);
        held.push(locks.mutex(format!("held {n}")).lease(lease).lock().await.unwrap());
    }
    proxy.delay(Duration::from_millis(10));
    // Waits until all were renewed once.
    tokio::time::sleep(Duration::from_secs(6)).await;
    proxy.delay(Duration::ZERO);
    proxy.silence();
    let began = Instant::now();
    let fresh = locks.mutex("fresh").lease(Duration::from_secs(12)).lock().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    while began.elapsed() < Duration::from_secs(24) {
        for guard in &held {
            assert!(guard.is_held(), "{} was lost: {:?}", guard.name(), guard.state());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    release(fresh).await;
}

/// A load balancer whose server is gone accepts connections and never answers. When the server is
/// back, the client recovers.
async fn connection_attempts_that_never_complete_are_abandoned<S: Server>() {
    let server = S::shared();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &server.database())).await;
    proxy.freeze_new();
    proxy.cut();
    // More than the number of connections.
    let mut trying = tokio::task::JoinSet::new();
    for n in 0..8 {
        let mutex = locks.mutex(format!("lost {n}")).lease(Duration::from_millis(500));
        trying.spawn(async move { mutex.try_lock().await.map(drop) });
    }
    while let Some(tried) = trying.join_next().await {
        tried.unwrap().unwrap_err();
    }
    // Connections that were accepted in the meantime still do not answer.
    proxy.silence();
    proxy.thaw();
    let mutex = locks.mutex("back");
    let back = tokio::time::timeout(Duration::from_secs(25), mutex.lock()).await;
    release(back.expect("the client never notices its dead connections").unwrap()).await;
}
