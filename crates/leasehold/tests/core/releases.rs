//! Releases that are too late, fail, or stay pending.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::{LostReason, Released, State};

// S07
/// A renewal that the store executes after the release finds no claim. That is not a loss.
#[tokio::test]
async fn renewal_after_a_release_is_not_a_loss() {
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    let locks = client(odd.clone());
    let guard = locks.mutex("a").lease(Duration::from_secs(6)).lock().await.unwrap();
    odd.before_renew.forget_permits(OPEN);
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > 0).await;
    let mut watch = guard.watch();
    odd.after_leave.forget_permits(OPEN);
    let release = tokio::spawn(guard.release());
    until(|| odd.leaves_done.load(Ordering::SeqCst) > 0).await;
    odd.before_renew.add_permits(OPEN);
    tokio::time::sleep(Duration::from_millis(50)).await;
    odd.after_leave.add_permits(OPEN);
    release.await.unwrap().unwrap();
    assert_eq!(watch.changed().await, State::Released);
    assert_eq!(watch.state(), State::Released);
}

/// A lease that expires while its release is under way has expired. It was not evicted.
#[tokio::test]
async fn late_release_reports_that_the_lease_expired() {
    let clock = leasehold::Clock::stepped();
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::with_clock(clock.clone()))));
    let locks = leasehold::builder().clock(clock.clone()).store(odd.clone()).unwrap();
    let lease = Duration::from_secs(60);
    let guard = locks.mutex("a").lease(lease).no_renewal().lock().await.unwrap();
    odd.before_leave.forget_permits(OPEN);
    let watch = guard.watch();
    let release = tokio::spawn(guard.release());
    until(|| watch.state() == State::Released).await;
    clock.advance(lease);
    odd.before_leave.add_permits(OPEN);
    let error = release.await.unwrap().unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Expired), "{error}");
}

/// The work is done. A release that was not answered does not change that.
#[tokio::test]
async fn run_keeps_the_result_when_the_release_fails() {
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    let locks = client(odd.clone());
    let lock = locks.mutex("a").lease(Duration::from_secs(2));
    let done = lock.run(|_guard| async {
        odd.leaves_fail.store(true, Ordering::SeqCst);
        7
    });
    assert_eq!(done.await.unwrap(), 7);
}

// F56
/// The work is done. An unreachable store is not a reason to end the caller's loop.
#[tokio::test]
async fn pending_release_is_not_an_error() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let guard = there.mutex("a").lease(Duration::from_secs(2)).lock().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Now);
    let guard = there.mutex("a").lease(Duration::from_secs(30)).lock().await.unwrap();
    let mut watch = guard.watch();
    remote.others.send_replace(Network::Silent);
    let started = std::time::Instant::now();
    assert_eq!(guard.release().await.unwrap(), Released::Pending);
    // With a long lease, the call does not wait for the whole lease.
    assert!(started.elapsed() < Duration::from_secs(27), "{:?}", started.elapsed());
    assert_eq!(watch.changed().await, leasehold::State::Released);
    assert!(here.inspect("a").await.unwrap().is_some());
    // The pending release is completed as soon as possible, not when the lease expires.
    remote.others.send_replace(Network::Well);
    let next = tokio::time::timeout(Duration::from_secs(10), here.mutex("a").lock()).await;
    drop(next.expect("the lock is still held").unwrap());
}

/// Dropping a guard does not wait for its release. Closing the client does, for up to a lease.
#[tokio::test]
async fn close_waits_for_the_releases_of_dropped_guards() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let guard = there.mutex("a").lease(Duration::from_secs(60)).lock().await.unwrap();
    remote.all(Network::Silent);
    drop(guard);
    let closing = tokio::spawn(there.close());
    // This is longer than the wait of a client that has no release pending.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!closing.is_finished(), "{:?}", closing.await);
    remote.all(Network::Well);
    closing.await.unwrap().unwrap();
    assert!(here.inspect("a").await.unwrap().is_none());
}
