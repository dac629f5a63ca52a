//! The public API with the memory store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::store::MemoryStore;
use leasehold::{Builder, Client, ErrorKind, LostReason, Owner, State};

fn locks() -> Client {
    Builder::default().store(Arc::new(MemoryStore::new())).unwrap()
}

#[tokio::test]
async fn lock_works_in_three_lines() {
    let locks = leasehold::connect("memory:three_lines").await.unwrap();
    let guard = locks.mutex("order:42").lock().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
    assert!(locks.inspect("order:42").await.unwrap().is_none());
}

#[tokio::test]
async fn contended_try_lock_names_the_holder() {
    let locks = locks();
    let guard = locks.mutex("a").label("first").lock().await.unwrap();
    let error = locks.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended);
    assert_eq!(error.holders()[0].token, guard.grant());
    assert_eq!(error.holders()[0].holder.label, "first");
    let error = locks.mutex("a").lock_timeout(Duration::from_millis(30)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(error.holders()[0].token, guard.grant());
    drop(guard);
    let _held = locks.mutex("a").try_lock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_exclude_each_other() {
    let locks = locks();
    let inside = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for _ in 0..32 {
        let (locks, inside) = (locks.clone(), inside.clone());
        tasks.push(tokio::spawn(async move {
            let mut last = 0;
            for _ in 0..50 {
                let guard = locks.mutex("m").lock().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                assert!(guard.token().get() > last);
                last = guard.token().get();
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

#[test]
fn works_without_a_runtime() {
    let locks: leasehold::blocking::Client = locks().into();
    let guard = locks.mutex("b").lock().unwrap();
    assert_eq!(locks.mutex("b").try_lock().unwrap_err().kind(), ErrorKind::Contended);
    let waiter = {
        let locks = locks.clone();
        std::thread::spawn(move || locks.mutex("b").lock().unwrap().token())
    };
    while locks.inspect("b").unwrap().unwrap().waiters().count() == 0 {
        std::thread::yield_now();
    }
    let first = guard.token();
    guard.release().unwrap();
    assert!(waiter.join().unwrap() > first);
}

// R06
/// Work without a runtime also waits while its lock is at risk.
#[test]
fn blocking_work_waits_while_its_lock_is_at_risk() {
    let locks: leasehold::blocking::Client = locks().into();
    let lease = Duration::from_millis(600);
    let taken = std::time::Instant::now();
    let guard = locks.mutex("steady").with(|m| m.lease(lease).no_renewal()).lock().unwrap();
    let mut work = guard.watch();
    // The lock is held, at risk after two thirds of the lease, and then lost, because it is not
    // renewed.
    let error = loop {
        match work.wait_until_held() {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(
        taken.elapsed() >= lease / 2,
        "the loss was reported {:?} after the grant",
        taken.elapsed()
    );
    assert!(matches!(work.state(), State::Lost(_)));
    let guard_of_another = locks.mutex("released").lock().unwrap();
    let mut work = guard_of_another.watch();
    work.wait_until_held().unwrap();
    guard_of_another.release().unwrap();
    assert_eq!(work.wait_until_held().unwrap_err().kind(), ErrorKind::Closed);
}

// R03
#[tokio::test]
async fn owner_reenters_without_contacting_the_store() {
    let locks = locks();
    let me = Owner::new();
    let outer = locks.mutex("r").owner(&me).lock().await.unwrap();
    let inner = locks.mutex("r").owner(&me).try_lock().await.unwrap();
    assert_eq!(inner.token(), outer.token());
    assert_eq!(locks.mutex("r").try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    outer.release().await.unwrap();
    assert!(inner.is_held());
    assert_eq!(
        locks.mutex("r").owner(&Owner::new()).try_lock().await.unwrap_err().kind(),
        ErrorKind::Contended
    );
    inner.release().await.unwrap();
    let _held = locks.mutex("r").try_lock().await.unwrap();
}

#[tokio::test]
async fn hold_is_lost_after_max_hold() {
    let locks = locks();
    let guard = locks.mutex("h").max_hold(Duration::from_millis(60)).lock().await.unwrap();
    let next = locks.mutex("h").lock().await.unwrap();
    assert_eq!(guard.state(), State::Lost(LostReason::MaxHold));
    assert!(next.token() > guard.token());
    assert_eq!(guard.release().await.unwrap_err().lost_reason(), Some(LostReason::MaxHold));
    assert!(next.is_held());
}

#[tokio::test]
async fn run_stops_when_the_lock_is_lost() {
    let locks = locks();
    let lock = locks.mutex("x").max_hold(Duration::from_millis(60));
    let error = lock.run(|_guard| std::future::pending::<()>()).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::MaxHold));
    assert_eq!(locks.mutex("x").run(|_| async { 7 }).await.unwrap(), 7);
}

#[tokio::test]
async fn close_releases_all_locks_and_fails_all_waiters() {
    let store = Arc::new(MemoryStore::new());
    let connect = || Builder::default().store(store.clone()).unwrap();
    let (closing, other) = (connect(), connect());
    let guard = closing.mutex("held").lock().await.unwrap();
    let blocker = other.mutex("wanted").lock().await.unwrap();
    let waiting = {
        let closing = closing.clone();
        tokio::spawn(async move { closing.mutex("wanted").lock().await.map(drop) })
    };
    while other.inspect("wanted").await.unwrap().unwrap().waiters().count() == 0 {
        tokio::task::yield_now().await;
    }
    closing.clone().close().await.unwrap();
    assert_eq!(guard.state(), State::Lost(LostReason::Closed));
    let _held = other.mutex("held").try_lock().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(closing.mutex("more").lock().await.unwrap_err().kind(), ErrorKind::Closed);
    drop(blocker);
}

#[tokio::test]
async fn invalid_input_is_reported_in_one_line() {
    let locks = locks();
    let kinds = [
        locks.mutex("").lock().await.unwrap_err(),
        locks.semaphore("s", 0).acquire().await.unwrap_err(),
        locks.semaphore("s", 2).acquire_many(3).await.unwrap_err(),
        locks.semaphore("s", 2).acquire_many(0).await.unwrap_err(),
        locks.mutex("m").lease(Duration::ZERO).lock().await.unwrap_err(),
        leasehold::connect("nonsense").await.unwrap_err(),
        leasehold::connect("gopher://x").await.unwrap_err(),
    ];
    for error in kinds {
        assert!(matches!(error.kind(), ErrorKind::InvalidName | ErrorKind::Config), "{error}");
        assert_eq!(format!("{error:#}").lines().count(), 1);
    }
}

// S92
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_waiters_do_not_starve_the_holder() {
    const WAITERS: usize = 10_000;
    let store = Arc::new(MemoryStore::new());
    let connect = || Builder::default().store(store.clone()).unwrap();
    // Holder and waiters share one client: one thread renews for all of them.
    let (locks, other) = (connect(), connect());
    let lease = Duration::from_secs(6);
    let guard = locks.mutex("crowd").lease(lease).lock().await.unwrap();
    let waiting: Vec<_> = (0..WAITERS)
        .map(|_| {
            let lock = locks.mutex("crowd");
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    let queued = async || other.inspect("crowd").await.unwrap().unwrap().waiters().count();
    while queued().await < WAITERS {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(lease * 2).await;
    assert!(guard.is_held(), "the holder missed its renewals");
    assert_eq!(queued().await, WAITERS, "live waiters lost their queue positions");
    drop(guard);
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert!(other.inspect("crowd").await.unwrap().is_none());
}

#[tokio::test]
async fn doctor_reports_that_memory_is_for_one_process() {
    assert_eq!(
        leasehold_test_support::doctor::findings("memory:").await.first().unwrap().id,
        "one-process"
    );
}
