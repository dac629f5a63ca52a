//! Leases: when they begin and end, whatever the server's clock does, and renewals that are delayed
//! without losing other locks.

use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Claim, Joined, Mode, Renewal, Store};
use leasehold::{ErrorKind, Hold, Kind, Name};
use testbed::Setup;
use tokio::runtime::Handle;

on_all![
    tokens_rise_when_the_server_clock_steps,
    lease_is_counted_from_after_the_row_lock,
    error_or_panic_in_the_section_releases_the_lock,
];

without_mysql![
    reported_lease_never_exceeds_the_request_after_a_clock_step,
    heartbeat_that_extended_nothing_is_not_reported_as_waiting,
    locked_row_delays_no_other_lock,
];

// S21
async fn tokens_rise_when_the_server_clock_steps<S: Server>() {
    let server = S::with(Setup::new().fast().movable_clock());
    let url = server.database();
    let (first, second) = (connect(&url).await, connect(&url).await);
    let long = Duration::from_secs(600);
    let old = first.mutex("stepped").lease(long).no_renewal().lock().await.unwrap();
    // The clock is set forward. The lease ends early, and the next token is still greater.
    server.shift_clock(86_400);
    let lease = Duration::from_secs(1);
    let next = second.mutex("stepped").lease(lease).no_renewal();
    let next = next
        .lock_timeout(PATIENCE)
        .await
        .expect("the lock is not free, although the clock was set forward");
    assert!(next.token() > old.token());
    // The clock is set back, and tokens still increase. The lease that was written in the future
    // lasts too long, as the guarantees state. An administrator can end it.
    server.shift_clock(-3_600);
    tokio::time::sleep(lease * 2).await;
    let early = first.mutex("stepped").try_lock().await.unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Contended, "the kind of the error: {early}");
    let evicted = first.evict("stepped", leasehold::store::Evict::Holders).await.unwrap();
    assert_eq!(evicted, 1);
    let last = first.mutex("stepped").lock().await.unwrap();
    assert!(last.token() > next.token());
    let stranger = leasehold::builder().connect(&url).await.unwrap();
    release(last).await;
    assert!(stranger.mutex("stepped").lock().await.unwrap().token() > next.token());
}

// S44, S54
async fn lease_is_counted_from_after_the_row_lock<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let mutex = locks.mutex("blocked").lease(Duration::from_secs(30));
    release(mutex.lock().await.unwrap()).await;
    let blocker = server.hold(&url, BLOCK).await;
    let taking = tokio::spawn(async move { mutex.lock().await });
    // Long enough to see whether the lease was counted from the start of the statement, and shorter
    // than the client waits for an answer.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!taking.is_finished(), "the row is locked");
    let before = Instant::now();
    drop(blocker);
    let guard = tokio::time::timeout(PATIENCE, taking).await.unwrap().unwrap().unwrap();
    let info = locks.inspect("blocked").await.unwrap().expect("the lock has no holder");
    let left = info.claims[0].remaining.expect("a lease");
    let whole = left + before.elapsed();
    assert!(whole > Duration::from_millis(29_900), "{whole:?} of 30 s");
    release(guard).await;
}

// S43
async fn error_or_panic_in_the_section_releases_the_lock<S: Server>() {
    let locks = connect(&S::shared().database()).await;
    // The lease is so long that only a release frees the lock.
    let mutex = locks.mutex("section").lease(PATIENCE * 2);
    let failed: Result<Result<(), &str>, _> =
        mutex.run(|_guard| async { Err("the section failed") }).await;
    assert_eq!(failed.unwrap(), Err("the section failed"));
    let panicking = tokio::spawn(async move {
        let _guard = mutex.lock().await.unwrap();
        panic!("on purpose");
    });
    assert!(panicking.await.unwrap_err().is_panic());
    let again = tokio::time::timeout(PATIENCE, locks.mutex("section").lock()).await;
    release(again.unwrap().unwrap()).await;
}

// S21
/// A lock is granted, and then the clock is set back by an hour. By the clock, an hour more remains
/// than was requested. The store must not report that, because the clock will be corrected.
async fn reported_lease_never_exceeds_the_request_after_a_clock_step<S: Server>() {
    let server = S::with(Setup::new().fast().movable_clock());
    let store = SqlStore::open(&server.database(), &Handle::current()).await.unwrap();
    let mut permits = Vec::new();
    for _ in 0..2 {
        let mut permit = Claim::new(Name::new("p").unwrap(), Kind::Semaphore, 1, 3).unwrap();
        (permit.lease, permit.waiter_lease) = (LONG, SHORT);
        holding(&store.join(&permit, Mode::Wait).await.unwrap());
        permits.push(permit);
    }
    server.shift_clock(-3_600);
    for permit in &permits {
        let Joined::Holding { remaining, .. } = store.join(permit, Mode::Wait).await.unwrap()
        else {
            panic!("the hold was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
        let Renewal::Holding { remaining, .. } = renewed(&store, permit).await else {
            panic!("the hold was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
    }
}

// P6
/// Another transaction, such as one that grants it, has locked a waiter's row. If the store
/// answered that the claim waits, the client would count the lease of a later grant from now. It
/// must count from the last heartbeat that succeeded.
async fn heartbeat_that_extended_nothing_is_not_reported_as_waiting<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let [store, _] = two(&url).await;
    let (held, waits) = (claim("row", LONG, LONG), claim("row", LONG, LONG));
    holding(&store.join(&held, Mode::Wait).await.unwrap());
    waiting(&store.join(&waits, Mode::Wait).await.unwrap());
    let row = "SELECT * FROM leasehold_claims WHERE name = 'row' FOR UPDATE";
    let blocker = server.hold(&url, row).await;
    let blind = renewed(&store, &waits).await;
    assert_eq!(blind.known().unwrap_err().kind(), ErrorKind::Unreachable);
    drop(blocker);
    until("the waiter's lease is extended", async || {
        matches!(renewed(&store, &waits).await, Renewal::Waiting(_))
    })
    .await;
}

// S92
/// One batch renews many locks, and one of their rows is locked for longer than a lease. That lock
/// may be lost. The client's other locks must not be lost, and their calls must not be delayed.
async fn locked_row_delays_no_other_lock<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(9);
    let mut held = Vec::new();
    for name in ["a", "blocked", "z"] {
        held.push(Hold::from(locks.mutex(name).lease(lease).lock().await.unwrap()));
    }
    // Claims that are stored in the other table.
    let semaphore = locks.semaphore("permits", 3).lease(lease);
    held.push(semaphore.acquire().await.unwrap().into());
    held.push(semaphore.acquire().await.unwrap().into());
    let blocker = server.hold(&url, BLOCK).await;
    let end = Instant::now() + lease * 2;
    let mut slow = Vec::new();
    while Instant::now() < end {
        let began = Instant::now();
        release(locks.mutex("elsewhere").lock().await.unwrap()).await;
        let took = began.elapsed();
        if took >= Duration::from_secs(2) {
            slow.push(took);
        }
        for guard in held.iter().filter(|guard| guard.name().as_str() != "blocked") {
            assert!(guard.is_held(), "{} was lost: {:?}", guard.name(), guard.state());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // A single slow call may be the machine's. If renewals waited for the row, every renewal would
    // be slow.
    assert!(slow.len() <= 1, "renewals of another lock were slow: {slow:?}");
    drop(blocker);
}

/// Returns a database of MariaDB, and one of MySQL where it can be started.
fn mysql_urls() -> Vec<String> {
    let own = testbed::mariadb().database();
    let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
    [Some(own), mysql].into_iter().flatten().collect()
}

// F02
/// Renews holders in locks' rows and in claims' rows, sends heartbeats of waiters, and hands over.
/// On MySQL all of them failed with error 3569, which MariaDB does not have.
#[test]
fn locks_are_renewed_and_handed_over_on_mysql() {
    run(async {
        for url in mysql_urls() {
            renews_and_waits(&url).await;
        }
    });
}

async fn renews_and_waits(url: &str) {
    let lease = Duration::from_secs(3);
    let locks = [connect(url).await, connect(url).await];
    let name = format!("renewed {}", std::process::id());
    let held = locks[0].mutex(&name).lease(lease).lock().await.unwrap();
    let permits = locks[0].semaphore(format!("{name} permits"), 2).lease(lease);
    let both = [permits.acquire().await.unwrap(), permits.acquire().await.unwrap()];
    let waiting: Vec<_> = (0..4)
        .map(|n| {
            let mutex = locks[n % 2].mutex(&name).lease(lease);
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                guard.release().await.unwrap();
            })
        })
        .collect();
    tokio::time::sleep(lease * 3).await;
    assert!(
        held.is_held() && both.iter().all(|guard| guard.is_held()),
        "a lock was not renewed on {url}"
    );
    held.release().await.unwrap();
    for waiter in waiting {
        tokio::time::timeout(PATIENCE, waiter)
            .await
            .expect("the lock was not handed over")
            .unwrap();
    }
    for guard in both {
        guard.release().await.unwrap();
    }
}
