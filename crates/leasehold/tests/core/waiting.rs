//! Waiters are notified of their position and their grant, whatever the store does in the meantime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold::store::{Evict, MemoryStore, Place};
use leasehold::{Builder, Client, ErrorKind};

// P06
/// A waiter listens again after a failure, so the next hand-over is pushed again.
#[tokio::test]
async fn waiter_listens_again_after_a_failure() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.changed_fails.store(true, Ordering::SeqCst);
    let (first, second) = (client(memory), client(odd.clone()));
    let blocker = first.mutex("a").lock().await.unwrap();
    let waiting = waiting_lock(&second, "a", 12_000);
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > 1).await;
    assert!(!odd.changed_fails.load(Ordering::SeqCst));
    // From here on, no heartbeat is answered. Until the lease expires, only a push can bring the
    // grant.
    odd.before_renew.forget_permits(OPEN);
    blocker.release().await.unwrap();
    let pushed = tokio::time::timeout(Duration::from_secs(4), waiting).await;
    let _guard = pushed.expect("the push did not wake the waiter").unwrap().unwrap();
}

#[tokio::test]
async fn queue_position_is_reported_only_when_it_changes() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.changed_fails.store(true, Ordering::SeqCst);
    let (first, second) = (client(memory), client(odd.clone()));
    let blocker = first.mutex("a").lock().await.unwrap();
    let places = Arc::new(std::sync::Mutex::new(Vec::<Place>::new()));
    let tell = places.clone();
    let lock = second.mutex("a").lease(Duration::from_secs(6));
    let lock = lock.on_waiting(move |place| tell.lock().unwrap().push(place));
    let waiting = tokio::spawn(async move { lock.lock().await });
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > 2).await;
    drop(blocker);
    let _guard = waiting.await.unwrap().unwrap();
    assert_eq!(places.lock().unwrap().len(), 1);
}

/// A waiter that loses its position after a long wait has the full time limit for joining again.
#[tokio::test]
async fn long_wait_does_not_shorten_the_time_limit_for_rejoining() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    let clock = leasehold::Clock::stepped();
    let second = leasehold::builder().clock(clock.clone()).store(odd.clone()).unwrap();
    let first = client(memory);
    let blocker = first.mutex("a").lock().await.unwrap();
    let waiting = waiting_lock(&second, "a", 6_000);
    while waiters(&first, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    clock.advance(Duration::from_secs(3_600));
    odd.joins_fail.store(true, Ordering::SeqCst);
    let info = first.inspect("a").await.unwrap().unwrap();
    let token = info.waiters().next().unwrap().token.unwrap();
    assert_eq!(first.evict("a", Evict::Token(token)).await.unwrap(), 1);
    until(|| odd.joins_failed.load(Ordering::SeqCst) > 0).await;
    odd.joins_fail.store(false, Ordering::SeqCst);
    while waiters(&first, "a").await == 0 {
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        tokio::task::yield_now().await;
    }
    drop(blocker);
    let _guard = waiting.await.unwrap().unwrap();
}

// F58
/// A grant that arrives while the store's answers are lost is waited for, not given up.
#[tokio::test]
async fn grant_during_an_outage_is_not_given_up() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let blocker = here.mutex("a").lock().await.unwrap();
    let lock = there.mutex("a").lease(Duration::from_secs(3));
    let waiting = tokio::spawn(async move { lock.lock().await });
    while waiters(&here, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    // The heartbeats arrive, but their answers are lost. A grant that is pushed now has nearly
    // expired.
    remote.renewals.send_replace(Network::Deaf);
    tokio::time::sleep(Duration::from_millis(2_300)).await;
    blocker.release().await.unwrap();
    let sent = remote.renewals_sent.load(Ordering::SeqCst);
    // More than three heartbeats without an answer.
    until(|| remote.renewals_sent.load(Ordering::SeqCst) > sent + 5 || waiting.is_finished()).await;
    remote.renewals.send_replace(Network::Well);
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.is_held());
}

/// The error must be returned, because no later answer would report it. The store has withdrawn the
/// grant and does not know the claim any more.
#[tokio::test]
async fn waiter_gets_the_error_of_an_unconfirmed_grant() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.unconfirmed.store(true, Ordering::SeqCst);
    let (holding, waiting) = (client(memory), client(odd));
    let guard = holding.mutex("m").lock().await.unwrap();
    let waiter = tokio::spawn(async move { waiting.mutex("m").lock().await });
    while holding.inspect("m").await.unwrap().is_none_or(|info| info.waiters().count() == 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    guard.release().await.unwrap();
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Unconfirmed);
}

// R13
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_costs_no_renewal() {
    let store = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    let locks = Builder::default().store(store.clone()).unwrap();
    let contend = async |locks: Client| {
        for _ in 0..250 {
            let guard = locks.mutex("m").lock().await.unwrap();
            tokio::task::yield_now().await;
            guard.release().await.unwrap();
        }
    };
    let tasks: Vec<_> = (0..4).map(|_| tokio::spawn(contend(locks.clone()))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    // Of a thousand hand-overs, nearly all were pushed. On a machine that pauses for a while, a
    // hold or two may last until its renewal.
    let renewals = store.renewals_sent.load(Ordering::SeqCst);
    assert!(renewals < 100, "{renewals} renewals");
}

#[tokio::test]
async fn task_locking_in_a_loop_yields_to_other_tasks() {
    let locks = Builder::default().store(Arc::new(MemoryStore::new())).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let other = tokio::spawn({
        let stop = stop.clone();
        async move { stop.store(true, Ordering::SeqCst) }
    });
    let mut turns = 0;
    while !stop.load(Ordering::SeqCst) {
        locks.mutex("m").lock().await.unwrap().release().await.unwrap();
        turns += 1;
        assert!(turns < 100_000, "the other task has never run");
    }
    other.await.unwrap();
}
