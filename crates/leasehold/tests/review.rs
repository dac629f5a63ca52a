//! What a hostile reading of the core found: each test failed once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::store::{
    Evict, Joined, LockInfo, MemoryStore, Mode, Place, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold::{
    Builder, Claim, Error, ErrorKind, Guard, Leasehold, LostReason, Name, Owner, Result, State,
};
use tokio::sync::Semaphore;

/// A memory store whose answers can be held back, falsified or refused.
#[derive(Debug)]
struct Odd {
    inner: Arc<MemoryStore>,
    /// Renewals wait here before they reach the store.
    before_renew: Semaphore,
    renewals_sent: AtomicUsize,
    /// Leaves wait here before they reach the store.
    before_leave: Semaphore,
    /// And here after.
    after_leave: Semaphore,
    leaves_done: AtomicUsize,
    changed_fails: AtomicBool,
    joins_fail: AtomicBool,
    joins_failed: AtomicUsize,
    leaves_fail: AtomicBool,
    remaining: std::sync::Mutex<Option<Duration>>,
    /// Renewing this name fails for good, and so does the batch that it is in.
    poisoned: Option<&'static str>,
    /// Waiters are called to ask, and whatever they are granted is taken back and refused, once.
    unconfirmed: AtomicBool,
    /// Every join sleeps on whatever timer the caller has.
    joins_sleep: bool,
    info: StoreInfo,
}

const OPEN: usize = 1 << 20;

impl Odd {
    fn new(inner: &Arc<MemoryStore>) -> Self {
        Self {
            inner: inner.clone(),
            before_renew: Semaphore::new(OPEN),
            renewals_sent: AtomicUsize::new(0),
            before_leave: Semaphore::new(OPEN),
            after_leave: Semaphore::new(OPEN),
            leaves_done: AtomicUsize::new(0),
            changed_fails: AtomicBool::new(false),
            joins_fail: AtomicBool::new(false),
            joins_failed: AtomicUsize::new(0),
            leaves_fail: AtomicBool::new(false),
            remaining: std::sync::Mutex::default(),
            poisoned: None,
            unconfirmed: AtomicBool::new(false),
            joins_sleep: false,
            info: inner.info().clone(),
        }
    }

    fn odd_remaining(&self, told: Option<Duration>) -> Option<Duration> {
        (*self.remaining.lock().unwrap()).or(told)
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Unreachable, "the store is away")
}

#[async_trait]
impl Store for Odd {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        if self.joins_sleep {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if self.joins_fail.load(Ordering::SeqCst) {
            self.joins_failed.fetch_add(1, Ordering::SeqCst);
            return Err(gone());
        }
        Ok(match self.inner.join(claim, mode).await? {
            Joined::Holding { token, remaining } => {
                Joined::Holding { token, remaining: self.odd_remaining(remaining) }
            }
            other => other,
        })
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.renewals_sent.fetch_add(1, Ordering::SeqCst);
        self.before_renew.acquire().await.unwrap().forget();
        if renewals.iter().any(|r| Some(r.claim.name.as_str()) == self.poisoned) {
            return Err(Error::new(ErrorKind::Corrupt, "that lock is damaged"));
        }
        let renewed = self.inner.renew(renewals).await?;
        if let ([asked], [Renewal::Holding { .. }]) = (renewals, renewed.as_slice())
            && self.unconfirmed.swap(false, Ordering::SeqCst)
        {
            self.inner.leave(&asked.claim, None).await?;
            return Err(Error::new(ErrorKind::Unconfirmed, "no replica has it: given back"));
        }
        Ok(renewed)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        if self.leaves_fail.load(Ordering::SeqCst) {
            return Err(gone());
        }
        self.before_leave.acquire().await.unwrap().forget();
        let was_there = self.inner.leave(claim, keep).await?;
        self.leaves_done.fetch_add(1, Ordering::SeqCst);
        self.after_leave.acquire().await.unwrap().forget();
        Ok(was_there)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        if self.changed_fails.swap(false, Ordering::SeqCst) {
            return Err(gone());
        }
        let signal = self.inner.changed(claim).await?;
        Ok(if self.unconfirmed.load(Ordering::SeqCst) { Signal::Ask } else { signal })
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.inner.read(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.inner.list(prefix).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.inner.evict(name, which).await
    }
}

fn client(store: Arc<dyn Store>) -> Leasehold {
    Builder::default().store(store).unwrap()
}

async fn until(mut what: impl FnMut() -> bool) {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it never came to pass");
}

async fn waiters(locks: &Leasehold, name: &str) -> usize {
    locks.read(name).await.unwrap().map_or(0, |info| info.waiters().count())
}

fn waiting_lock(
    locks: &Leasehold,
    name: &'static str,
    lease: u64,
) -> tokio::task::JoinHandle<Result<Guard>> {
    let lock = locks.mutex(name).lease(Duration::from_millis(lease));
    tokio::spawn(async move { lock.lock().await })
}

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

/// Listening that failed once begins anew, so the next hand-over is pushed again.
#[tokio::test]
async fn p06_listening_begins_anew_after_it_failed() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.changed_fails.store(true, Ordering::SeqCst);
    let (first, second) = (client(memory), client(odd.clone()));
    let blocker = first.mutex("a").lock().await.unwrap();
    let waiting = waiting_lock(&second, "a", 12_000);
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > 1).await;
    assert!(!odd.changed_fails.load(Ordering::SeqCst));
    // From here on no heartbeat is answered: only a push can bring the grant, until the lease is over.
    odd.before_renew.forget_permits(OPEN);
    blocker.release().await.unwrap();
    let pushed = tokio::time::timeout(Duration::from_secs(4), waiting).await;
    let _guard = pushed.expect("the push was not heard").unwrap().unwrap();
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

/// A cron job with a limit: `max_hold` ends the hold, `at_least` keeps the lock closed all the same.
#[tokio::test]
async fn at_least_outlasts_max_hold() {
    let locks = client(Arc::new(MemoryStore::new()));
    let lock = locks.mutex("a").max_hold(Duration::from_millis(60));
    let guard = lock.clone().at_least(Duration::from_secs(60)).lock().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    drop(guard);
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

/// Dropped before the keeper has noticed that `max_hold` is over.
#[tokio::test]
async fn at_least_outlasts_max_hold_when_the_guard_is_dropped_at_once() {
    let clock = leasehold::Clock::stepped();
    let locks = leasehold::builder().clock(clock.clone()).store(Arc::new(MemoryStore::new()));
    let locks = locks.unwrap();
    let lock = locks.mutex("a").max_hold(Duration::from_secs(5));
    let guard = lock.clone().at_least(Duration::from_secs(60)).lock().await.unwrap();
    clock.advance(Duration::from_secs(6));
    drop(guard);
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

#[tokio::test]
async fn s15_a_hold_ended_by_max_hold_is_an_unclean_end() {
    let locks = client(Arc::new(MemoryStore::new()));
    let lock = locks.mutex("a").max_hold(Duration::from_millis(60));
    let guard = lock.clone().lock_delay(Duration::from_secs(60)).lock().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
}

#[tokio::test]
async fn a_short_max_hold_is_not_at_risk_from_its_first_moment() {
    let locks = client(Arc::new(MemoryStore::new()));
    // Shorter than a third of the lease.
    let lock = locks.mutex("a").lease(Duration::from_secs(60)).max_hold(Duration::from_secs(16));
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.state(), State::Held);
}

/// A waiter that loses its place after a long wait has a full patience for joining again.
#[tokio::test]
async fn a_long_wait_does_not_use_up_the_patience_for_joining_again() {
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
    let info = first.read("a").await.unwrap().unwrap();
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

#[tokio::test]
async fn an_owner_who_reenters_gets_the_validity_it_asks_for() {
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

/// The blocking face must not depend on the runtime whose thread it blocks.
#[tokio::test]
async fn s08_the_blocking_face_works_on_a_runtime_that_it_blocks() {
    let odd = Odd { joins_sleep: true, ..Odd::new(&Arc::new(MemoryStore::new())) };
    let locks: leasehold::blocking::Leasehold = client(Arc::new(odd)).into();
    locks.mutex("a").lock().unwrap().release().unwrap();
}

/// A guard that lives in a thread-local is dropped after tokio's own thread-locals.
#[test]
fn s11_a_guard_may_be_dropped_by_a_dying_thread() {
    use std::cell::RefCell;
    thread_local!(static KEPT: RefCell<Option<leasehold::blocking::Guard>> = const { RefCell::new(None) });
    let locks = leasehold::blocking::Leasehold::from(client(Arc::new(MemoryStore::new())));
    let in_thread = locks.clone();
    let thread = std::thread::spawn(move || {
        // Registers ours before tokio's, which therefore goes first.
        KEPT.with(|kept| drop(kept.borrow_mut().take()));
        let guard = in_thread.mutex("a").lock().unwrap();
        KEPT.with(|kept| *kept.borrow_mut() = Some(guard));
    });
    thread.join().unwrap();
    locks.mutex("a").lock_timeout(Duration::from_secs(5)).unwrap().release().unwrap();
}

#[tokio::test]
async fn a_place_is_told_once_and_again_only_when_it_changes() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.changed_fails.store(true, Ordering::SeqCst);
    let (first, second) = (client(memory), client(odd.clone()));
    let blocker = first.mutex("a").lock().await.unwrap();
    let told = Arc::new(std::sync::Mutex::new(Vec::<Place>::new()));
    let tell = told.clone();
    let lock = second.mutex("a").lease(Duration::from_secs(6));
    let lock = lock.on_waiting(move |place| tell.lock().unwrap().push(place));
    let waiting = tokio::spawn(async move { lock.lock().await });
    until(|| odd.renewals_sent.load(Ordering::SeqCst) > 2).await;
    drop(blocker);
    let _guard = waiting.await.unwrap().unwrap();
    assert_eq!(told.lock().unwrap().len(), 1);
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

/// A fork has no background thread: nothing that it took would be renewed or given back.
#[test]
fn s13_a_forked_child_is_refused() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    let locks = leasehold::blocking::Leasehold::from(client(Arc::new(MemoryStore::new())));
    let guard = locks.mutex("a").lock().unwrap();
    let lock = locks.mutex("b");
    // SAFETY: the child leaves by `_exit` and meets no lock that another thread may hold.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = lock.try_lock().is_err_and(|e| e.kind() == ErrorKind::Closed);
        let inert = !guard.is_held();
        drop(guard);
        // SAFETY: ends this process and nothing else.
        unsafe { _exit(if refused && inert { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(guard.is_held());
    assert_eq!(locks.mutex("a").try_lock().unwrap_err().kind(), ErrorKind::Contended);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r13_a_hand_over_costs_no_renewal() {
    let store = Arc::new(Odd::new(&Arc::new(MemoryStore::new())));
    let locks = Builder::default().store(store.clone()).unwrap();
    let contend = async |locks: Leasehold| {
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
    // Of a thousand turns, nearly all were pushed. A machine that stops for a while may well see
    // a hold or two that lasted until it was renewed.
    let renewals = store.renewals_sent.load(Ordering::SeqCst);
    assert!(renewals < 100, "{renewals} renewals");
}

#[tokio::test]
async fn a_task_that_locks_in_a_loop_lets_others_have_their_turn() {
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

/// Nobody would hear of it again: the store has given the grant back, and knows the claim no more.
#[tokio::test]
async fn what_the_store_refuses_to_one_who_asks_is_told() {
    let memory = Arc::new(MemoryStore::new());
    let odd = Arc::new(Odd::new(&memory));
    odd.unconfirmed.store(true, Ordering::SeqCst);
    let (holding, waiting) = (client(memory), client(odd));
    let guard = holding.mutex("m").lock().await.unwrap();
    let waiter = tokio::spawn(async move { waiting.mutex("m").lock().await });
    while holding.read("m").await.unwrap().is_none_or(|info| info.waiters().count() == 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    guard.release().await.unwrap();
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Unconfirmed);
}
