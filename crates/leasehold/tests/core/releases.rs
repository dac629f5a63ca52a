//! Releases that come too late, fail, or stay owed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::{LostReason, Released, State};

/// A renewal that the store handles after our leave finds nothing: that is no loss.
#[tokio::test]
async fn s07_a_renewal_that_comes_after_the_release_makes_it_no_loss() {
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

/// A lease that runs out while its release is on its way has run out: nobody took it away.
#[tokio::test]
async fn a_release_that_comes_too_late_says_why() {
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

/// The work is done; that the release was not heard does not undo it.
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

/// The work is done. That the store is away is no reason to end the loop that it was done in.
#[tokio::test]
async fn f56_a_release_that_is_owed_is_no_error() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let guard = there.mutex("a").lease(Duration::from_secs(2)).lock().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Now);
    let guard = there.mutex("a").lease(Duration::from_secs(30)).lock().await.unwrap();
    let mut watch = guard.watch();
    remote.others.send_replace(Network::Silent);
    let started = std::time::Instant::now();
    assert_eq!(guard.release().await.unwrap(), Released::Owed);
    // A long lease is no reason to be held up for as long.
    assert!(started.elapsed() < Duration::from_secs(27), "{:?}", started.elapsed());
    assert_eq!(watch.changed().await, leasehold::State::Released);
    assert!(here.read("a").await.unwrap().is_some());
    // It is paid as soon as it can be, and not when the lease is over.
    remote.others.send_replace(Network::Well);
    let next = tokio::time::timeout(Duration::from_secs(10), here.mutex("a").lock()).await;
    drop(next.expect("still held").unwrap());
}
