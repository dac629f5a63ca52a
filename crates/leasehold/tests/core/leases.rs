//! Renewals and leases: which faults a hold survives, and which tasks its loss affects.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::{LostReason, WriteGuard};

// S14
/// The waiter's heartbeat is under way when the grant is pushed. Its answer is about the claim and
/// not about the wait, so it must not end the renewals of the hold.
#[tokio::test]
async fn late_waiter_heartbeat_reply_does_not_stop_renewals() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    let (first, second) = (client(memory), client(odd.clone()));
    let blocker = first.mutex("a").lock().await.unwrap();
    let waiting = waiting_lock(&second, "a", 6_000);
    while waiters(&first, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    odd.before_renew.forget_permits(OPEN);
    let before = odd.renewals_sent.load(Ordering::SeqCst);
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > before).await;
    blocker.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    odd.before_renew.add_permits(OPEN);
    tokio::time::sleep(Duration::from_millis(9_000)).await;
    assert!(guard.is_held(), "{guard:?}");
}

/// One damaged lock must not affect the client's other locks.
#[tokio::test]
async fn one_lock_that_cannot_be_renewed_does_not_lose_the_others() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd { poisoned: Some("bad"), ..Odd::new(&memory) });
    let locks = client(odd);
    let lease = Duration::from_secs(6);
    let bad = locks.mutex("bad").lease(lease).lock().await.unwrap();
    let mut good = Vec::new();
    for i in 0..20 {
        good.push(locks.mutex(format!("good {i}")).lease(lease).lock().await.unwrap());
    }
    assert_eq!(bad.lost().await, LostReason::Expired);
    tokio::time::sleep(lease).await;
    assert!(good.iter().all(|guard| guard.is_held()));
}

#[tokio::test]
async fn absurd_lease_times_of_a_store_cause_no_panic() {
    for absurd in [Duration::MAX, Duration::MAX / 2 + Duration::from_nanos(1), Duration::ZERO] {
        let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
        *odd.remaining.lock().unwrap() = Some(absurd);
        let locks = client(odd);
        let guard = locks.mutex("a").lock().await.unwrap();
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
}

/// A task that is woken by the loss of a lock may use the client from within its waker.
#[test]
fn loss_is_reported_without_holding_the_keepers_mutex() {
    struct UsesLocks(leasehold::blocking::Client, AtomicBool);
    impl std::task::Wake for UsesLocks {
        fn wake(self: Arc<Self>) {
            self.0.mutex("b").try_lock().unwrap().release().unwrap();
            self.1.store(true, Ordering::SeqCst);
        }
    }
    let locks = client(Arc::new(MemoryStore::new()));
    let waker = Arc::new(UsesLocks(locks.clone().into(), AtomicBool::new(false)));
    let lock = locks.mutex("a").max_hold(Duration::from_secs(2));
    let guard = tokio::runtime::Runtime::new().unwrap().block_on(lock.lock()).unwrap();
    let mut lost = std::pin::pin!(guard.lost());
    let task = std::task::Waker::from(waker.clone());
    let polled = lost.as_mut().poll(&mut std::task::Context::from_waker(&task));
    assert!(polled.is_pending());
    let started = std::time::Instant::now();
    while !waker.1.load(Ordering::SeqCst) {
        assert!(started.elapsed() < Duration::from_secs(10), "the renewer has a deadlock");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A thread cannot be stopped, so the loss is reported when its work is done. The loss takes
/// precedence over an error of the work, which may be its consequence. No work begins if the lock
/// is already lost.
#[test]
fn blocking_run_returns_the_loss_of_its_lock() {
    type Failed = Box<dyn std::error::Error + Send + Sync>;
    let locks = leasehold::blocking::Client::from(client(Arc::new(MemoryStore::new())));
    let lose =
        |name: &str| assert_eq!(locks.evict(name, leasehold::store::Evict::Holders).unwrap(), 1);
    let ran = locks.mutex("a").run(|guard| lose(guard.name().as_str()));
    assert_eq!(ran.unwrap_err().lost_reason(), Some(LostReason::Gone));
    let ran: Result<(), Failed> = locks.rwlock("a").try_run_write(|guard| {
        lose(guard.name().as_str());
        Err("what the work says of it".into())
    });
    let failure = ran.unwrap_err().downcast::<leasehold::Error>().unwrap();
    assert_eq!(failure.lost_reason(), Some(LostReason::Gone));
    let ran: Result<(), Failed> = locks.semaphore("a", 3).try_run(|_| Err("its own".into()));
    assert_eq!(ran.unwrap_err().to_string(), "its own");
    let two = locks.lock_all(["a", "b"]).unwrap();
    let ran: Result<(), Failed> = two.try_run(|two| {
        lose(two.get("b").unwrap().name().as_str());
        Ok(())
    });
    assert!(ran.unwrap_err().to_string().contains("\"b\""));
    let guard = locks.mutex("a").with(|m| m.max_hold(Duration::from_millis(20))).lock().unwrap();
    assert_eq!(guard.lost(), LostReason::MaxHold);
    let ran = guard.run(|_| panic!("the work began after the loss"));
    assert_eq!(ran.unwrap_err().lost_reason(), Some(LostReason::MaxHold));
    assert!(locks.list("").unwrap().is_empty());
}

#[tokio::test]
async fn failed_work_releases_its_locks_and_returns_its_error() {
    type Failed = Box<dyn std::error::Error + Send + Sync>;
    let locks = client(Arc::new(MemoryStore::new()));
    let fails = || async { Err::<(), Failed>("its own".into()) };
    let guard = locks.mutex("a").lock().await.unwrap();
    assert_eq!(guard.try_run(|_| fails()).await.unwrap_err().to_string(), "its own");
    let lock = locks.rwlock("a");
    assert_eq!(lock.try_run_read(|_| fails()).await.unwrap_err().to_string(), "its own");
    let writes = lock.try_run_write(async |guard: WriteGuard| {
        locks.evict("a", leasehold::store::Evict::Token(guard.grant())).await?;
        Err::<(), Failed>("what the work says of it".into())
    });
    let failure = writes.await.unwrap_err().downcast::<leasehold::Error>().unwrap();
    assert_eq!(failure.lost_reason(), Some(LostReason::Gone));
    let both = locks.lock_all(["a", "b"]).await.unwrap();
    let failed = both.try_run(async { Err::<(), Failed>("its own".into()) }).await;
    assert_eq!(failed.unwrap_err().to_string(), "its own");
    assert!(locks.list("").await.unwrap().is_empty());
}
