//! Combinations of options: `max_hold`, `min_hold`, `lock_delay`, `min_validity` and owners.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::{ErrorKind, LostReason, Owner, State};

/// A cron job with a limit: `max_hold` ends the hold, but `min_hold` keeps the lock unavailable.
#[tokio::test]
async fn min_hold_outlasts_max_hold() {
    let locks = client(Arc::new(MemoryStore::new()));
    let lock = locks.mutex("a").max_hold(Duration::from_millis(60));
    let guard = lock.clone().min_hold(Duration::from_secs(60)).lock().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    drop(guard);
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

/// The guard is dropped before the renewal thread has noticed that `max_hold` is over.
#[tokio::test]
async fn min_hold_outlasts_max_hold_when_the_guard_is_dropped_at_once() {
    let clock = leasehold::Clock::stepped();
    let locks = leasehold::builder().clock(clock.clone()).store(Arc::new(MemoryStore::new()));
    let locks = locks.unwrap();
    let lock = locks.mutex("a").max_hold(Duration::from_secs(5));
    let guard = lock.clone().min_hold(Duration::from_secs(60)).lock().await.unwrap();
    clock.advance(Duration::from_secs(6));
    drop(guard);
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

// S15
#[tokio::test]
async fn a_hold_ended_by_max_hold_is_an_unclean_end() {
    let locks = client(Arc::new(MemoryStore::new()));
    let lock = locks.mutex("a").max_hold(Duration::from_millis(60));
    let guard = lock.clone().lock_delay(Duration::from_secs(60)).lock().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

#[tokio::test]
async fn short_max_hold_is_not_at_risk_from_the_start() {
    let locks = client(Arc::new(MemoryStore::new()));
    // This is less than a third of the lease.
    let lock = locks.mutex("a").lease(Duration::from_secs(60)).max_hold(Duration::from_secs(16));
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.state(), State::Held);
}

#[tokio::test]
async fn reentry_respects_the_requested_min_validity() {
    let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    let clock = leasehold::Clock::stepped();
    let locks = leasehold::builder().clock(clock.clone()).store(odd).unwrap();
    let me = Owner::new();
    let lease = Duration::from_secs(60);
    let lock = locks.mutex("a").owner(&me).lease(lease).no_renewal();
    let outer = lock.lock().await.unwrap();
    clock.advance(lease / 2);
    let error = lock.clone().min_validity(lease * 9 / 10).lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AtRisk);
    assert!(outer.is_held());
}
