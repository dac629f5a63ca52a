//! The end of a client: what closing ends, how long it may take, and which releases are still sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::store::MemoryStore;

/// When `close` returns, waiting claims have left the queue too.
#[tokio::test]
async fn close_removes_waiting_claims_from_the_queue() {
    let memory = Arc::new(MemoryStore::new());
    let (first, second) = (client(memory.clone()), client(memory));
    let _blocker = first.mutex("a").lock().await.unwrap();
    let waiting = second.mutex("a");
    let mut waiting = std::pin::pin!(waiting.lock());
    let polled = tokio::time::timeout(Duration::from_millis(10), &mut waiting).await;
    assert!(polled.is_err());
    assert_eq!(waiters(&first, "a").await, 1);
    second.close().await.unwrap();
    assert_eq!(waiters(&first, "a").await, 0);
    assert_eq!(waiting.await.unwrap_err().kind(), ErrorKind::Closed);
}

/// A task whose joins fail is also ended by `close`, and does not join afterwards.
#[tokio::test]
async fn close_cancels_pending_acquire_attempts() {
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    odd.joins_fail.store(true, Ordering::SeqCst);
    let locks = client(odd);
    let waiting = waiting_lock(&locks, "a", 15_000);
    tokio::time::sleep(Duration::from_millis(30)).await;
    locks.close().await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert_eq!(
        ended
            .expect("the client tries to acquire the lock after close")
            .unwrap()
            .unwrap_err()
            .kind(),
        ErrorKind::Closed
    );
}

// F57
/// A shutdown has limited time.
#[tokio::test]
async fn close_timeout_is_respected_when_the_store_is_unreachable() {
    let remote = Arc::new(Remote::new(&Arc::new(MemoryStore::new())));
    let locks = client(remote.clone());
    let guard = locks.mutex("a").lease(Duration::from_secs(60)).lock().await.unwrap();
    remote.all(Network::Silent);
    let started = std::time::Instant::now();
    let error = locks.close_timeout(Duration::from_millis(300)).await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(!guard.is_held());
}

// F32
/// The release of a dropped guard is sent before the last handle of its client is gone, if the
/// store answers soon.
#[test]
fn dropping_the_last_client_waits_briefly_for_pending_releases() {
    let memory = Arc::new(MemoryStore::new());
    let mut remote = Remote::new(&memory);
    remote.leaving = Duration::from_millis(100);
    let here = leasehold::blocking::Client::from(client(memory));
    {
        let there = leasehold::blocking::Client::from(client(Arc::new(remote)));
        let _guard = there.mutex("a").lock().unwrap();
    }
    assert!(here.inspect("a").unwrap().is_none(), "the lock is still held when main would return");
}
