//! The information in errors: whether the store answered, how long it did not, and which client
//! holds the lock.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::store::MemoryStore;

/// A busy lock and an unreachable store are two kinds of errors, however the wait ended.
#[tokio::test]
async fn busy_lock_and_unreachable_store_are_two_kinds() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let _blocker = here.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(700);

    let busy = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Timeout, "{busy}");
    assert_eq!(busy.holders().len(), 1, "{busy}");
    assert_eq!(there.mutex("a").try_lock().await.unwrap_err().kind(), ErrorKind::Contended);

    #[cfg(feature = "http")]
    assert_eq!(leasehold::fence::http::status(&busy).as_u16(), 423);

    // The store is unreachable from the beginning, and then after it has returned the queue
    // position.
    remote.all(Network::Silent);
    let away = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!(away.kind(), ErrorKind::Unreachable, "{away}");
    assert!(format!("{away:#}").contains("no answer from the store"), "{away}");
    #[cfg(feature = "http")]
    assert_eq!(leasehold::fence::http::status(&away).as_u16(), 503);
    remote.all(Network::Well);
    let lock = there.mutex("a").lease(Duration::from_secs(2));
    let waiting = tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(6)).await });
    while waiters(&here, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    remote.all(Network::Silent);
    let away = waiting.await.unwrap().unwrap_err();
    assert_eq!(away.kind(), ErrorKind::Unreachable, "{away}");
    assert_eq!(format!("{away:#}").lines().count(), 1);

    let lock = there.mutex("b").lease(Duration::from_millis(600));
    let tried = lock.try_lock().await.unwrap_err();
    assert_eq!(tried.kind(), ErrorKind::Unreachable, "{tried}");
}

// F55
/// `lock()` waits for the time that its error reports: one lease, but at least 15 s.
#[tokio::test]
async fn unreachable_error_reports_the_actual_waiting_time() {
    let remote = Arc::new(Remote::new(&Arc::new(MemoryStore::new())));
    remote.all(Network::Silent);
    let locks = client(remote);
    let started = std::time::Instant::now();
    let lock = locks.mutex("a").lease(Duration::from_secs(3));
    let error = lock.lock().await.unwrap_err();
    assert!(started.elapsed() >= Duration::from_secs(15), "{:?}", started.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(!format!("{error:#}").contains("within 1 s"), "{error}");
}

// F80
/// A task that locks twice deadlocks. The error names the cause.
#[tokio::test]
async fn error_reports_that_this_client_holds_the_lock() {
    let memory = Arc::new(MemoryStore::new());
    let (one, other) = (client(memory.clone()), client(memory));
    let guard = one.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(50);
    let own = one.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(own.held_by_this_client());
    assert!(own.to_string().contains("this client already holds it"), "{own}");
    assert!(one.mutex("a").try_lock().await.unwrap_err().held_by_this_client());
    let theirs = other.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(!theirs.held_by_this_client(), "{theirs}");
    guard.release().await.unwrap();
}
