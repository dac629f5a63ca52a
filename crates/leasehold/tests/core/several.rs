//! Several locks at once: how many messages go out before any is answered, and what goes back.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::testing::{Faults, Faulty, Op};
use leasehold::{ErrorKind, Leasehold};

/// One client behind a network, and one beside the store.
fn far_and_near() -> (Leasehold, Arc<Faults>, Leasehold) {
    let memory = Arc::new(MemoryStore::new());
    let store = Faulty::around(client(memory.clone()));
    let faults = store.faults();
    (client(Arc::new(store)), faults, client(memory))
}

#[tokio::test]
async fn r13_locks_that_are_free_are_asked_for_before_any_is_answered() {
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
    assert_eq!(faults.count(Op::Join), 4, "one request each");
    all.release().await.unwrap();
    assert!(near.list("").await.unwrap().is_empty());
}

/// One that tries is answered once, and one that waits for so long no later than that, whatever is silent.
#[tokio::test]
async fn a_silent_store_is_asked_once_by_who_tries_and_no_longer_than_was_said() {
    let (far, faults, _) = far_and_near();
    faults.freeze();
    let started = std::time::Instant::now();
    let limit = Duration::from_millis(50);
    let error = far.lock_all_timeout(["a", "b"], limit).await.unwrap_err();
    assert_eq!((error.kind(), error.store_answered()), (ErrorKind::Timeout, false));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let asked = faults.count(Op::Join);
    let error = far.try_lock_all(["c", "d"]).await.unwrap_err();
    assert!(!error.store_answered());
    assert_eq!(error.name().unwrap().as_str(), "c");
    assert_eq!(faults.count(Op::Join) - asked, 2, "one request each");
    faults.heal();
}

/// With an earlier one in hand anybody may wait for a later one; the other way round two would wait for each
/// other.
#[tokio::test]
async fn what_is_behind_one_that_is_taken_goes_back_before_that_is_waited_for() {
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

/// What is given back with `at_least` stays closed, so it is taken in its turn only.
#[tokio::test]
async fn what_would_stay_closed_is_not_taken_before_its_turn() {
    let (far, _, near) = far_and_near();
    let _held = near.mutex("b").lock().await.unwrap();
    let c = far.mutex("c").at_least(Duration::from_secs(60));
    assert!(far.try_lock_all([far.mutex("b"), c]).await.is_err());
    drop(near.mutex("c").try_lock().await.unwrap());
}
