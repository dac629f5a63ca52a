//! Leases: when one begins and ends, whatever the server's clock does; renewals that are held up, and locks
//! that must not be lost with them.

use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Joined, Mode, Renewal, Store};
use leasehold::{Claim, ErrorKind, Kind, Name};
use testbed::Setup;
use tokio::runtime::Handle;

on_all![
    s21_the_server_clock_steps,
    s44_s54_a_lease_begins_after_the_row_lock,
    s43_an_error_in_the_section_releases,
];

without_mysql![
    s21_a_clock_set_back_promises_no_more_than_the_lease,
    p6_a_heartbeat_that_lengthened_nothing_says_so,
    s92_a_row_that_is_locked_holds_up_no_other_lock,
];

async fn s21_the_server_clock_steps<S: Server>() {
    let server = S::with(Setup::new().fast().movable_clock());
    let url = server.database();
    let (first, second) = (connect(&url).await, connect(&url).await);
    let long = Duration::from_secs(600);
    let old = first.mutex("stepped").lease(long).no_renewal().lock().await.unwrap();
    // Ahead: the lease ends early, and the next token is greater all the same.
    server.shift_clock(86_400);
    let lease = Duration::from_secs(1);
    let next = second.mutex("stepped").lease(lease).no_renewal();
    let next = next.lock_timeout(PATIENCE).await.expect("the clock stands where it stood");
    assert!(next.token() > old.token());
    // Back again: tokens still rise. The lease that was written in the future is what the
    // guarantees tell of; a person can end it.
    server.shift_clock(-3_600);
    tokio::time::sleep(lease * 2).await;
    let early = first.mutex("stepped").try_lock().await.unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Contended, "its lease is over by this clock? {early}");
    let evicted = first.evict("stepped", leasehold::store::Evict::Holders).await.unwrap();
    assert_eq!(evicted, 1);
    let last = first.mutex("stepped").lock().await.unwrap();
    assert!(last.token() > next.token());
    let stranger = leasehold::builder().connect(&url).await.unwrap();
    release(last).await;
    assert!(stranger.mutex("stepped").lock().await.unwrap().token() > next.token());
}

async fn s44_s54_a_lease_begins_after_the_row_lock<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let mutex = locks.mutex("blocked").lease(Duration::from_secs(30));
    release(mutex.lock().await.unwrap()).await;
    let blocker = server.hold(&url, BLOCK).await;
    let taking = tokio::spawn(async move { mutex.lock().await });
    // Long enough to see whether the lease was counted from the statement's start, and shorter
    // than the client waits for an answer.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!taking.is_finished(), "the row is locked");
    let before = Instant::now();
    drop(blocker);
    let guard = tokio::time::timeout(PATIENCE, taking).await.unwrap().unwrap().unwrap();
    let info = locks.read("blocked").await.unwrap().expect("it is held");
    let left = info.claims[0].remaining.expect("a lease");
    let whole = left + before.elapsed();
    assert!(whole > Duration::from_millis(29_900), "{whole:?} of 30 s");
    release(guard).await;
}

async fn s43_an_error_in_the_section_releases<S: Server>() {
    let locks = connect(&S::shared().database()).await;
    let failed: Result<Result<(), &str>, _> =
        locks.mutex("section").run(|_guard| async { Err("the section failed") }).await;
    assert_eq!(failed.unwrap(), Err("the section failed"));
    let mutex = locks.mutex("section");
    let panicking = tokio::spawn(async move {
        let _guard = mutex.lock().await.unwrap();
        panic!("on purpose");
    });
    assert!(panicking.await.unwrap_err().is_panic());
    let again = tokio::time::timeout(PATIENCE, locks.mutex("section").lock()).await;
    release(again.unwrap().unwrap()).await;
}

/// A grant is written; the clock is set back by an hour. What remains by the clock is an hour more
/// than anybody asked for, and not to be relied on: the clock will be set right.
async fn s21_a_clock_set_back_promises_no_more_than_the_lease<S: Server>() {
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
            panic!("it was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
        let Renewal::Holding { remaining, .. } = renewed(&store, permit).await else {
            panic!("it was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
    }
}

/// A transaction that grants it, say, has locked a waiter's row. Told that it waits, it would believe of a
/// grant that is pushed later that it lasts from now, and not from the last heartbeat that counted.
async fn p6_a_heartbeat_that_lengthened_nothing_says_so<S: Server>() {
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
    until("it is lengthened", async || {
        matches!(renewed(&store, &waits).await, Renewal::Waiting(_))
    })
    .await;
}

/// One batch renews many locks, and one of their rows is locked for longer than a lease. That lock
/// may be lost; the others of the client must neither be lost with it, nor their calls be held up.
async fn s92_a_row_that_is_locked_holds_up_no_other_lock<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(9);
    let mut held = Vec::new();
    for name in ["a", "blocked", "z"] {
        held.push(locks.mutex(name).lease(lease).lock().await.unwrap());
    }
    // And one that stands in the other table.
    let semaphore = locks.semaphore("permits", 3).lease(lease);
    held.push(semaphore.acquire().await.unwrap());
    held.push(semaphore.acquire().await.unwrap());
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
    // Once may be the machine; if the row is waited for, it is at every renewal.
    assert!(slow.len() <= 1, "another lock was held up: {slow:?}");
    drop(blocker);
}

/// A database of MariaDB, and one of MySQL itself where that can be started.
fn mysql_urls() -> Vec<String> {
    let own = testbed::mariadb().database();
    let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
    [Some(own), mysql].into_iter().flatten().collect()
}

/// Renewals of holders in locks' rows and in claims' rows, heartbeats of waiters, and hand-overs: on
/// MySQL none of them went through (error 3569), which MariaDB does not know.
#[test]
fn f02_mysql_renews_and_waits() {
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
    assert!(held.is_held() && both.iter().all(|guard| guard.is_held()), "not renewed on {url}");
    held.release().await.unwrap();
    for waiter in waiting {
        tokio::time::timeout(PATIENCE, waiter).await.expect("handed over").unwrap();
    }
    for guard in both {
        guard.release().await.unwrap();
    }
}
