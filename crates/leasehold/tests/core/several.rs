//! Several locks at once: how many requests are sent before any is answered, and which locks are
//! released.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::testing::{Faults, Faulty, Op};
use leasehold::{Client, ErrorKind};

/// Returns one client behind a simulated network, and one that calls the store directly.
fn far_and_near() -> (Client, Arc<Faults>, Client) {
    let memory = Arc::new(MemoryStore::new());
    let store = Faulty::around(client(memory.clone()));
    let faults = store.faults();
    (client(Arc::new(store)), faults, client(memory))
}

// R13
#[tokio::test]
async fn lock_all_requests_free_locks_concurrently() {
    let (far, faults, near) = far_and_near();
    faults.freeze();
    let taking = tokio::spawn({
        let far = far.clone();
        async move { far.lock_all(["a", "b", "c", "d"]).await }
    });
    until(|| faults.count(Op::Join) == 4).await;
    assert!(!taking.is_finished());
    faults.heal();
    let all = taking.await.unwrap().unwrap();
    assert_eq!(all.iter().filter(|guard| guard.is_held()).count(), 4);
    assert_eq!(faults.count(Op::Join), 4, "expected one request for each lock");
    all.release().await.unwrap();
    assert!(near.list("").await.unwrap().is_empty());
}

/// A try sends each request once, and a wait with a limit ends in time, even if the store does not
/// answer.
#[tokio::test]
async fn lock_all_on_an_unreachable_store_fails_in_time() {
    let (far, faults, _) = far_and_near();
    faults.freeze();
    let started = std::time::Instant::now();
    let limit = Duration::from_millis(50);
    let error = far.lock_all_timeout(["a", "b"], limit).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let asked = faults.count(Op::Join);
    let error = far.try_lock_all(["c", "d"]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert_eq!(error.name().unwrap().as_str(), "c");
    assert_eq!(faults.count(Op::Join) - asked, 2, "expected one request for each lock");
    faults.heal();
}

/// A client may wait for a later lock while it holds an earlier one. In the opposite order, two
/// clients could wait for each other.
#[tokio::test]
async fn lock_all_releases_later_locks_before_it_waits() {
    let (far, _, near) = far_and_near();
    let held = near.mutex("b").lock().await.unwrap();
    let taking = tokio::spawn({
        let far = far.clone();
        async move { far.lock_all(["a", "b", "c"]).await }
    });
    while waiters(&near, "b").await == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(near.mutex("a").try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    let behind = near.mutex("c").lock_timeout(Duration::from_secs(10)).await.unwrap();
    held.release().await.unwrap();
    while waiters(&near, "c").await == 0 {
        tokio::task::yield_now().await;
    }
    behind.release().await.unwrap();
    taking.await.unwrap().unwrap().release().await.unwrap();
    let refused = {
        let _held = near.mutex("b").lock().await.unwrap();
        far.try_lock_all(["a", "b", "c"]).await.unwrap_err()
    };
    assert_eq!((refused.kind(), refused.name().unwrap().as_str()), (ErrorKind::Contended, "b"));
    let all = near.lock_all_timeout(["a", "b", "c"], Duration::from_secs(10)).await.unwrap();
    all.release().await.unwrap();
}

/// A lock that is released with `min_hold` stays in a cooldown, so it is only acquired in its
/// order.
#[tokio::test]
async fn lock_all_acquires_min_hold_locks_only_in_order() {
    let (far, _, near) = far_and_near();
    let _held = near.mutex("b").lock().await.unwrap();
    let c = far.mutex("c").min_hold(Duration::from_secs(60));
    assert!(far.try_lock_all([far.mutex("b"), c]).await.is_err());
    drop(near.mutex("c").try_lock().await.unwrap());
}
