//! What an error tells: whether the store answered, for how long it was silent, and who holds.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::store::MemoryStore;

/// Busy and away are told apart by the error, however the wait ended.
#[tokio::test]
async fn f55_an_error_tells_whether_the_store_answered() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let _blocker = here.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(700);

    let busy = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!((busy.kind(), busy.store_answered()), (ErrorKind::Timeout, true), "{busy}");
    assert_eq!(busy.holders().len(), 1, "{busy}");
    assert!(there.mutex("a").try_lock().await.unwrap_err().store_answered());

    #[cfg(feature = "http")]
    assert_eq!(leasehold::fence::http::status(&busy).as_u16(), 423);

    // Away from the beginning, and away after it has told us our place.
    remote.all(Network::Silent);
    let away = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!((away.kind(), away.store_answered()), (ErrorKind::Timeout, false), "{away}");
    assert!(format!("{away:#}").contains("has not answered"), "{away}");
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
    assert_eq!((away.kind(), away.store_answered()), (ErrorKind::Timeout, false), "{away}");
    assert_eq!(format!("{away:#}").lines().count(), 1);

    let lock = there.mutex("b").lease(Duration::from_millis(600));
    let tried = lock.try_lock().await.unwrap_err();
    assert_eq!((tried.kind(), tried.store_answered()), (ErrorKind::Unreachable, false), "{tried}");
}

/// `lock()` waits for as long as it says: for a lease, and for 15 s where the lease is shorter.
#[tokio::test]
async fn f55_a_silence_is_told_as_long_as_it_was() {
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

/// A task that locks twice waits for itself: the error says where to look.
#[tokio::test]
async fn f80_held_by_this_client_is_told() {
    let memory = Arc::new(MemoryStore::new());
    let (one, other) = (client(memory.clone()), client(memory));
    let guard = one.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(50);
    let own = one.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(own.held_by_this_client());
    assert!(own.to_string().contains("this client holds it itself"), "{own}");
    assert!(one.mutex("a").try_lock().await.unwrap_err().held_by_this_client());
    let theirs = other.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(!theirs.held_by_this_client(), "{theirs}");
    guard.release().await.unwrap();
}
