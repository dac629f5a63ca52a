//! The end of a client: what closing ends, how long it may take, and what is still paid.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::store::MemoryStore;

/// What waits has left the queue as well when `close` returns.
#[tokio::test]
async fn close_takes_the_waiting_out_of_the_queue_itself() {
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

/// Who tries in vain to join is told of the close as well, and does not join afterwards.
#[tokio::test]
async fn close_ends_the_attempts_to_join() {
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    odd.joins_fail.store(true, Ordering::SeqCst);
    let locks = client(odd);
    let waiting = waiting_lock(&locks, "a", 15_000);
    tokio::time::sleep(Duration::from_millis(30)).await;
    locks.close().await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert_eq!(ended.expect("still trying").unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

/// A shutdown has only so much time.
#[tokio::test]
async fn f57_close_ends_when_the_caller_says() {
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

/// What a guard owes is paid before the last of its client is gone, if the store answers soon.
#[test]
fn f32_the_last_client_waits_briefly_for_what_is_owed() {
    let memory = Arc::new(MemoryStore::new());
    let mut remote = Remote::new(&memory);
    remote.leaving = Duration::from_millis(100);
    let here = leasehold::blocking::Leasehold::from(client(memory));
    {
        let there = leasehold::blocking::Leasehold::from(client(Arc::new(remote)));
        let _guard = there.mutex("a").lock().unwrap();
    }
    assert!(here.read("a").unwrap().is_none(), "main would have returned with the lock held");
}
