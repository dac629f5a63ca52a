//! Renewals and leases: what a hold survives, and whom its loss concerns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold::store::MemoryStore;
use leasehold::{Guard, LostReason};

/// A heartbeat of the waiter is under way when the grant is pushed; its answer, which is about the
/// claim and not about the wait, must not end the renewals of the hold.
#[tokio::test]
async fn s14_an_answer_to_a_waiters_heartbeat_does_not_stop_the_holders_renewals() {
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

/// One damaged lock must not take the client's other locks down with it.
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
    assert!(good.iter().all(Guard::is_held));
}

#[tokio::test]
async fn a_store_that_answers_absurd_times_panics_nobody() {
    for absurd in [Duration::MAX, Duration::MAX / 2 + Duration::from_nanos(1), Duration::ZERO] {
        let odd = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
        *odd.remaining.lock().unwrap() = Some(absurd);
        let locks = client(odd);
        let guard = locks.mutex("a").lock().await.unwrap();
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
}

/// Who is woken by the loss of a lock may use the client from within its waker.
#[test]
fn the_keeper_tells_a_loss_without_holding_its_lock() {
    struct UsesLocks(leasehold::blocking::Leasehold, AtomicBool);
    impl std::task::Wake for UsesLocks {
        fn wake(self: Arc<Self>) {
            self.0.mutex("b").try_lock().unwrap().release().unwrap();
            self.1.store(true, Ordering::SeqCst);
        }
    }
    let locks = client(Arc::new(MemoryStore::new()));
    let waker = Arc::new(UsesLocks(locks.clone().into(), AtomicBool::new(false)));
    let lock = leasehold::blocking::Leasehold::from(locks).mutex("a");
    let guard = lock.with(|m| m.max_hold(Duration::from_secs(2))).lock().unwrap();
    let mut lost = std::pin::pin!(leasehold::Guard::lost(&guard));
    let task = std::task::Waker::from(waker.clone());
    let polled = lost.as_mut().poll(&mut std::task::Context::from_waker(&task));
    assert!(polled.is_pending());
    let started = std::time::Instant::now();
    while !waker.1.load(Ordering::SeqCst) {
        assert!(started.elapsed() < Duration::from_secs(10), "the keeper waits for itself");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing can stop a thread, so it is told when its work is done; and before an error of the work, which may
/// come of it. Under a lock that is lost already no work begins.
#[test]
fn blocking_work_is_told_of_the_loss_of_its_lock() {
    type Failed = Box<dyn std::error::Error + Send + Sync>;
    let locks = leasehold::blocking::Leasehold::from(client(Arc::new(MemoryStore::new())));
    let lose =
        |name: &str| assert_eq!(locks.evict(name, leasehold::store::Evict::Holders).unwrap(), 1);
    let ran = locks.mutex("a").run(|guard| lose(guard.name().as_str()));
    assert_eq!(ran.unwrap_err().lost_reason(), Some(LostReason::Gone));
    let ran: Result<(), Failed> = locks.rwlock("a").try_run_write(|guard| {
        lose(guard.name().as_str());
        Err("what the work says of it".into())
    });
    let told = ran.unwrap_err().downcast::<leasehold::Error>().unwrap();
    assert_eq!(told.lost_reason(), Some(LostReason::Gone));
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
    let ran = guard.run(|_| panic!("it has begun"));
    assert_eq!(ran.unwrap_err().lost_reason(), Some(LostReason::MaxHold));
    assert!(locks.list("").unwrap().is_empty());
}

#[tokio::test]
async fn work_that_fails_gives_its_locks_back_and_keeps_its_error() {
    type Failed = Box<dyn std::error::Error + Send + Sync>;
    let locks = client(Arc::new(MemoryStore::new()));
    let fails = |_| async { Err::<(), Failed>("its own".into()) };
    let guard = locks.mutex("a").lock().await.unwrap();
    assert_eq!(guard.try_run(fails).await.unwrap_err().to_string(), "its own");
    let lock = locks.rwlock("a");
    assert_eq!(lock.try_run_read(fails).await.unwrap_err().to_string(), "its own");
    let writes = lock.try_run_write(async |guard: Guard| {
        locks.evict("a", leasehold::store::Evict::Token(guard.token())).await?;
        Err::<(), Failed>("what the work says of it".into())
    });
    let told = writes.await.unwrap_err().downcast::<leasehold::Error>().unwrap();
    assert_eq!(told.lost_reason(), Some(LostReason::Gone));
    let both = locks.lock_all(["a", "b"]).await.unwrap();
    let failed = both.try_run(async { Err::<(), Failed>("its own".into()) }).await;
    assert_eq!(failed.unwrap_err().to_string(), "its own");
    assert!(locks.list("").await.unwrap().is_empty());
}
