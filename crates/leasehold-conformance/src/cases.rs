#![allow(missing_docs, reason = "the names of the cases state what they check")]
//! The cases. Each is named after the promise or scenario that it checks.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::reference::{SeededRng, compare};
use super::{Fault, Op, PATIENCE, Subject};
use leasehold_core::store::{
    ClaimState, Evict, Joined, Liveness, LockInfo, Mode, Renew, Renewal, Signal, Wakeup,
};
use leasehold_core::testing::{downgrade, try_upgrade};
use leasehold_core::{
    Builder, Claim, Client, Clock, ErrorKind, Hold, Kind, LockEvent, LockEventKind, LockEvents,
    LostReason, MutexGuard, Name, OncePer, Owner, Result, Sequencer, State, Watch, blocking,
};

// --- helpers -----------------------------------------------------------------------------------

fn expect_ok<T, E: std::fmt::Display>(what: &str, result: std::result::Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{what}: {error}"),
    }
}

fn kind_of<T: std::fmt::Debug>(what: &str, result: Result<T>) -> ErrorKind {
    match result {
        Ok(value) => panic!("{what} worked: {value:?}"),
        Err(error) => error.kind(),
    }
}

fn named(subject: &Subject, what: &str) -> Name {
    expect_ok("name", Name::new(subject.name(what)))
}

/// Returns the shortest time after which this lease may expire. The clocks of some stores count
/// whole milliseconds (SQLite, Redis). The two milliseconds in
/// [`drift`](leasehold_core::kit::drift) cover that.
fn whole(lease: Duration) -> Duration {
    lease.saturating_sub(Duration::from_millis(2))
}

/// Waits until `check` returns true.
async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < PATIENCE, "{what}: did not happen within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns whether a wait for a held lock ended at its time limit. A store on a busy machine may
/// not answer within a short limit.
fn is_out_of_time(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Timeout | ErrorKind::Unreachable)
}

async fn waiters(locks: &Client, name: &str) -> usize {
    let info = expect_ok("read", locks.inspect(name).await);
    info.map_or(0, |info| info.waiters().count())
}

/// Waits until `count` claims wait in the queue.
async fn until_waiting(locks: &Client, name: &str, count: usize) {
    eventually("the expected number of waiters in the queue", async || {
        waiters(locks, name).await == count
    })
    .await;
}

/// Acquires the lock, with a long time limit.
async fn taken(locks: &Client, name: &str) -> MutexGuard {
    expect_ok("lock", locks.mutex(name).lock_timeout(PATIENCE).await)
}

/// The longest lease that every store accepts. Stores with sessions shorten it to 15 s.
const LONG: Duration = PATIENCE;
/// How long a case waits for a release. A lease of [`LONG`] does not expire in that time.
const RELEASE: Duration = Duration::from_secs(12);

/// Acquires the lock so that only a release frees it in time.
async fn taken_for_long(locks: &Client, name: &str) -> MutexGuard {
    expect_ok("lock", locks.mutex(name).lease(LONG).lock_timeout(PATIENCE).await)
}

/// Acquires and releases the lock, to show that nothing is left behind.
async fn is_free_soon(locks: &Client, name: &str) {
    let guard = taken(locks, name).await;
    expect_ok("release", guard.release().await);
    eventually("empty", async || expect_ok("read", locks.inspect(name).await).is_none()).await;
}

/// Like [`is_free_soon`], for a claim with a lease of [`LONG`], which must have been released.
async fn is_released(locks: &Client, name: &str) {
    let guard = expect_ok("lock", locks.mutex(name).lock_timeout(RELEASE).await);
    expect_ok("release", guard.release().await);
}

async fn poll_once<F: Future>(future: &mut std::pin::Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Polls the future `polls` times at most, each time that it is woken.
async fn poll_times<F: Future>(
    future: &mut std::pin::Pin<&mut F>,
    mut polls: usize,
) -> Poll<F::Output> {
    let step = |cx: &mut std::task::Context<'_>| {
        if polls == 0 {
            return Poll::Ready(Poll::Pending);
        }
        polls -= 1;
        match future.as_mut().poll(cx) {
            Poll::Pending if polls > 0 => Poll::Pending,
            polled => Poll::Ready(polled),
        }
    };
    poll_fn(step).await
}

/// Gives a remote store a moment to work.
async fn moment(locks: &Client) {
    match locks.store().info().is_local {
        true => tokio::task::yield_now().await,
        false => tokio::time::sleep(Duration::from_millis(3)).await,
    }
}

/// Joins the queue with a claim that is neither renewed nor released, like that of a crashed
/// client.
async fn ghost(locks: &Client, name: &Name, lease: Duration, mode: Mode) -> (Claim, Joined) {
    let mut claim = expect_ok("claim", Claim::new(name.clone(), Kind::Mutex, 1, 1));
    (claim.lease, claim.waiter_lease) = (lease, lease);
    let joined = expect_ok("join", locks.store().join(&claim, mode).await);
    (claim, joined)
}

/// Returns a client that can see how long a hold lasts. That is any client, unless the hold lives
/// in a session. Then only the session's own client knows.
fn who_knows<'a>(witness: &'a Client, owner: &'a Client) -> &'a Client {
    match owner.guarantees().liveness {
        Liveness::Session => owner,
        _ => witness,
    }
}

/// Returns the remaining time of the hold with this token at the store, if it exists.
async fn left_at_the_store(locks: &Client, guard: &MutexGuard) -> Option<Option<Duration>> {
    let info = expect_ok("read", locks.inspect(guard.name().as_str()).await)?;
    info.holders().find(|c| c.token == Some(guard.grant())).map(|c| c.remaining)
}

/// Checks that the hold lasts at least as long at the store as the guard believes.
async fn believes_no_more_than_the_store(locks: &Client, guard: &MutexGuard) {
    let asked = Instant::now();
    let ours = guard.remaining();
    let store = left_at_the_store(locks, guard).await;
    // The guard's time was read first, so the time that has passed since then is subtracted.
    let ours = ours.saturating_sub(asked.elapsed());
    if !ours.is_zero() {
        let Some(store) = store else {
            panic!("the guard has {ours:?} left, but the store has no holder")
        };
        let Some(store) = store else {
            panic!("the guard has {ours:?} left, but the store has no lease")
        };
        // Half of the allowed clock drift is for the rounding of the store.
        let certain = ours + leasehold_core::kit::drift(ours) / 2;
        assert!(store >= certain, "the guard has {ours:?} left, the store {store:?}");
    }
}

/// Creates a claim without a client that renews it, waits for it or releases it.
fn claim_of(name: &Name, (kind, weight, capacity): Shape, lease: Duration) -> Claim {
    let mut claim = expect_ok("claim", Claim::new(name.clone(), kind, weight, capacity));
    (claim.lease, claim.waiter_lease) = (lease, lease);
    claim
}

/// The kind of lock of a claim, its weight and the capacity.
type Shape = (Kind, u32, u32);

const MUTEX: Shape = (Kind::Mutex, 1, 1);

/// Returns one claim of each shape that the store supports.
fn shapes(subject: &Subject) -> Vec<Shape> {
    const READERS: u32 = leasehold_core::MAX_READERS;
    let all = [
        MUTEX,
        (Kind::RwLock, 1, READERS),
        (Kind::RwLock, READERS, READERS),
        (Kind::Semaphore, 2, 3),
        (Kind::Semaphore, 3, 3),
    ];
    all.into_iter().filter(|(kind, ..)| subject.guarantees().keeps(*kind)).collect()
}

async fn holds(locks: &Client, claim: &Claim) {
    let joined = expect_ok("join", locks.store().join(claim, Mode::Try).await);
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
}

/// Joins the queue, and checks that the claim has to wait. Returns its token, if it has one
/// already.
async fn stands(locks: &Client, claim: &Claim) -> Option<leasehold_core::Token> {
    match expect_ok("join", locks.store().join(claim, Mode::Wait).await) {
        Joined::Waiting(place) => place.token,
        other => panic!("expected to wait, got {other:?}"),
    }
}

/// Renews a claim, and again while the result is unknown. A store may return that at any time, for
/// example because another transaction has locked the claim's row.
async fn renewed(locks: &Client, claim: &Claim) -> Renewal {
    let start = Instant::now();
    loop {
        let renew = Renew { claim: claim.clone(), lease: claim.lease };
        let mut renewals = expect_ok("renew", locks.store().renew(&[renew]).await);
        match renewals.pop() {
            Some(Renewal::Unknown { why, .. }) => {
                assert!(start.elapsed() < PATIENCE, "renew: {why}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Some(renewal) => return renewal,
            None => panic!("the store did not reply"),
        }
    }
}

/// Checks that a hold leaves room for exactly the remaining weight.
async fn takes_its_weight(locks: &Client, name: &Name, shape: Shape) {
    let (kind, weight, capacity) = shape;
    let too_much = claim_of(name, (kind, capacity - weight + 1, capacity), PATIENCE);
    let joined = expect_ok("join", locks.store().join(&too_much, Mode::Try).await);
    assert!(matches!(joined, Joined::Busy { .. }), "beside {shape:?}: {joined:?}");
    stands(locks, &too_much).await;
    assert!(expect_ok("leave", locks.store().leave(&too_much, None).await));
    if weight < capacity {
        // A read-write lock has only readers with weight 1 and writers with the full weight.
        let left = if kind == Kind::RwLock { 1 } else { capacity - weight };
        let beside = claim_of(name, (kind, left, capacity), PATIENCE);
        holds(locks, &beside).await;
        assert!(expect_ok("leave", locks.store().leave(&beside, None).await));
    }
}

// --- promises ----------------------------------------------------------------------------------

/// Runs `tasks` tasks that acquire and release the lock. Returns the maximum total weight that was
/// held at once.
async fn crowd(
    subject: &Subject,
    tasks: usize,
    rounds: usize,
    take: impl AsyncFn(&Client, usize) -> (Hold, i64),
) -> i64 {
    let tasks = subject.many(tasks);
    let clients = [subject.client().await, subject.client().await];
    let (inside, most) = (AtomicI64::new(0), AtomicI64::new(0));
    let one = async |i: usize| {
        for round in 0..rounds {
            let (guard, weight) = take(&clients[i % 2], i + round).await;
            let now = inside.fetch_add(weight, Ordering::SeqCst) + weight;
            most.fetch_max(now, Ordering::SeqCst);
            assert!(guard.is_held());
            tokio::task::yield_now().await;
            if round % 3 == 0 {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            inside.fetch_sub(weight, Ordering::SeqCst);
            match (i + round) % 2 {
                0 => drop(guard),
                _ => drop(expect_ok("release", guard.release().await)),
            }
        }
    };
    join_all((0..tasks).map(one)).await;
    most.into_inner()
}

async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(|f| (Box::pin(f), None)).collect();
    poll_fn(|cx| {
        let mut all = true;
        for (future, done) in &mut futures {
            if done.is_none() {
                match future.as_mut().poll(cx) {
                    Poll::Ready(value) => *done = Some(value),
                    Poll::Pending => all = false,
                }
            }
        }
        if all { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    futures.into_iter().filter_map(|(_, done)| done).collect()
}

// P1
pub async fn one_holder_at_a_time(subject: &Subject) {
    let name = subject.name("p1");
    let last = AtomicU64::new(0);
    let most = crowd(subject, 16, 20, async |locks, i| {
        let lock = locks.mutex(&name);
        let guard = match i % 4 {
            0 => loop {
                match lock.try_lock().await {
                    Ok(guard) => break guard,
                    // The store may also fail to answer within the time limit of a try.
                    Err(e) if matches!(e.kind(), ErrorKind::Contended | ErrorKind::Unreachable) => {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    Err(e) => panic!("{e}"),
                }
            },
            _ => expect_ok("lock", lock.lock().await),
        };
        let token = guard.token().get();
        let before = last.swap(token, Ordering::SeqCst);
        assert!(token > before, "token {token} after {before}");
        (guard.into(), 1)
    });
    assert_eq!(most.await, 1);
}

// P1
pub async fn readers_share_and_writers_do_not(subject: &Subject) {
    if !subject.claims("read-write locks", subject.guarantees().keeps(Kind::RwLock)) {
        return;
    }
    let name = subject.name("p1rw");
    let clients = [subject.client().await, subject.client().await];
    // Two readers of different clients hold the lock at once.
    let first = expect_ok("read", clients[0].rwlock(&name).read().await);
    let second = expect_ok("read", clients[1].rwlock(&name).try_read().await);
    let writer = clients[0].rwlock(&name).try_write().await;
    assert_eq!(kind_of("a writer while readers hold the lock", writer), ErrorKind::Contended);
    // A writer that waits is not granted either, even with no other waiter in the queue.
    let all = (Kind::RwLock, leasehold_core::MAX_READERS, leasehold_core::MAX_READERS);
    let writer = claim_of(&named(subject, "p1rw"), all, PATIENCE);
    stands(&clients[0], &writer).await;
    assert!(expect_ok("leave", clients[0].store().leave(&writer, None).await));
    drop((first, second));
    const WRITER: i64 = 1 << 30;
    let most = crowd(subject, 12, 20, async |locks, i| {
        let lock = locks.rwlock(&name);
        match i % 3 {
            0 => (expect_ok("write", lock.write().await).into(), WRITER),
            _ => (expect_ok("read", lock.read().await).into(), 1),
        }
    });
    assert_eq!(most.await, WRITER, "a writer was not alone, or never acquired the lock");
}

// P1
pub async fn permits_never_exceed_the_capacity(subject: &Subject) {
    if !subject.claims("semaphores", subject.guarantees().keeps(Kind::Semaphore)) {
        return;
    }
    let name = subject.name("p1sem");
    let most = crowd(subject, 12, 20, async |locks, i| {
        let permits = 1 + u32::try_from(i % 3).unwrap_or(0);
        let guard = expect_ok("acquire", locks.semaphore(&name, 4).acquire_many(permits).await);
        assert_eq!(guard.permits(), permits);
        (guard.into(), i64::from(permits))
    });
    let most = most.await;
    assert!((2..=4).contains(&most), "{most} of 4 permits were held at once");
}

// P3
pub async fn each_grant_has_a_higher_token(subject: &Subject) {
    let name = subject.name("p3");
    let mut last = 0;
    for round in 0..20 {
        // Each round uses a new client, because a client's knowledge must not matter.
        let locks = subject.client().await;
        let guard = taken(&locks, &name).await;
        assert!(guard.token().get() > last, "token {} after {last}", guard.token());
        last = guard.token().get();
        match round % 3 {
            0 => drop(guard),
            1 => drop(expect_ok("release", guard.release().await)),
            _ => {
                let evicted = locks.evict(&name, Evict::Token(guard.grant())).await;
                assert_eq!(expect_ok("evict", evicted), 1);
            }
        }
    }
    if subject.claims_leases() {
        let (ghost, joined) =
            ghost(&subject.client().await, &named(subject, "p3"), subject.lease(), Mode::Try).await;
        let Joined::Holding { token, .. } = joined else { panic!("{joined:?}") };
        assert!(token.get() > last);
        // No waiter is in the queue, so the queue does not contain the token that the next grant
        // must exceed.
        let locks = subject.client().await;
        is_free_soon_as(&locks, ghost.name.as_str()).await;
        let guard = taken(&locks, ghost.name.as_str()).await;
        assert!(guard.grant() > token, "the token after an expiry is not higher");
    }
}

// P4
pub async fn first_come_first_served(subject: &Subject) {
    if !subject.claims("first come, first served", subject.guarantees().fifo) {
        return;
    }
    let name = subject.name("p4");
    let clients = [subject.client().await, subject.client().await, subject.client().await];
    let guard = taken(&clients[0], &name).await;
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..9 {
        let (lock, order) = (clients[i % 3].mutex(&name), order.clone());
        tasks.push(tokio::spawn(async move {
            let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
            if let Ok(mut order) = order.lock() {
                order.push(i);
            }
            drop(guard);
        }));
        until_waiting(&clients[0], &name, i + 1).await;
    }
    drop(guard);
    for task in tasks {
        assert!(task.await.is_ok(), "a waiter failed");
    }
    let order = order.lock().map(|o| o.clone()).unwrap_or_default();
    assert_eq!(order, (0..9).collect::<Vec<_>>());
}

// P5
pub async fn crashed_holder_is_replaced_when_its_lease_expires(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = named(subject, "p5");
    let locks = subject.client().await;
    let start = Instant::now();
    let (_, joined) = ghost(&locks, &name, subject.lease(), Mode::Try).await;
    let Joined::Holding { remaining: Some(lease_left), .. } = joined else { panic!("{joined:?}") };
    // Stores may round the time.
    let lease = subject.lease();
    assert!(
        lease_left <= lease + Duration::from_millis(1),
        "the store reports {lease_left:?} left of a lease of {lease:?}"
    );
    let guard = taken(&locks, name.as_str()).await;
    let took = start.elapsed();
    assert!(took >= whole(subject.lease()), "another client got the lock before the lease expired");
    // The limit is the time that the store states, plus extra time for a busy machine.
    let promises = subject.guarantees();
    let stated = promises.recovery + subject.lease() * promises.recovery_leases;
    assert!(took < stated + PATIENCE / 3, "took {took:?}, but the stated limit is {stated:?}");
    assert!(guard.is_held());
}

// P5
pub async fn expired_lease_frees_every_kind_of_lock(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let locks = subject.client().await;
    let one = async |(i, shape): (usize, Shape)| {
        let name = named(subject, &format!("p5-{i}"));
        let long = claim_of(&name, shape, PATIENCE);
        holds(&locks, &long).await;
        takes_its_weight(&locks, &name, shape).await;
        assert!(expect_ok("leave", locks.store().leave(&long, None).await));
        let start = Instant::now();
        holds(&locks, &claim_of(&name, shape, subject.lease())).await;
        opens(&locks, &name, shape).await;
        let took = start.elapsed();
        assert!(took >= whole(subject.lease()), "{shape:?}: free after {took:?}");
    };
    join_all(shapes(subject).into_iter().enumerate().map(one)).await;
}

/// Waits until the whole lock is available, acquires it and releases it. Repeats the join instead
/// of waiting for a notification.
async fn opens(locks: &Client, name: &Name, (kind, _, capacity): Shape) {
    let all = claim_of(name, (kind, capacity, capacity), PATIENCE);
    eventually("the whole lock is available again", async || {
        let joined = expect_ok("join", locks.store().join(&all, Mode::Wait).await);
        matches!(joined, Joined::Holding { .. })
    })
    .await;
    assert!(expect_ok("leave", locks.store().leave(&all, None).await));
}

// P6
pub async fn waiter_acquires_despite_lost_notifications(subject: &Subject) {
    let name = subject.name("p6");
    let locks = subject.client().await;
    let (deaf, faults) = subject.faulty().await;
    faults.always(Op::Changed, Fault::LoseRequest);
    let guard = taken(&locks, &name).await;
    let waiting = {
        let lock = deaf.mutex(&name).lease(subject.lease());
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await.map(|g| g.token()) })
    };
    until_waiting(&locks, &name, 1).await;
    let before = guard.token();
    expect_ok("release", guard.release().await);
    let Ok(granted) = waiting.await else { panic!("the waiter failed") };
    assert!(expect_ok("lock", granted) > before);
}

/// When the lock is released, relative to the waiter's call for the notification.
#[derive(Clone, Copy, Debug)]
enum Given {
    Before,
    During,
    /// The first call was dropped.
    Again,
}

// P6
pub async fn waiter_is_notified_without_a_heartbeat(subject: &Subject) {
    let promises = subject.guarantees();
    if !subject.claims("to notify waiters", promises.wakeup == Wakeup::Push && promises.fifo) {
        return;
    }
    let (locks, other) = (subject.client().await, subject.client().await);
    // The lease is long enough that no heartbeat is due.
    let long = PATIENCE * 6;
    let one = async |(i, (shape, given)): (usize, (Shape, Given))| {
        let name = named(subject, &format!("p6-notified-{i}"));
        let (kind, _, capacity) = shape;
        let holder = claim_of(&name, (kind, capacity, capacity), long);
        holds(&locks, &holder).await;
        let waiter = claim_of(&name, shape, long);
        let place = stands(&other, &waiter).await;
        let mut news = pin!(other.store().changed(&waiter));
        if !matches!(given, Given::Before) {
            for _ in 0..3 {
                if let Poll::Ready(signal) = poll_once(&mut news).await {
                    let signal = expect_ok("changed", signal);
                    assert_eq!(
                        signal,
                        Signal::Ask,
                        "{shape:?}: notified of a grant while another client holds the lock"
                    );
                    news.set(other.store().changed(&waiter));
                }
                moment(&other).await;
            }
        }
        if matches!(given, Given::Again) {
            news.set(other.store().changed(&waiter));
        }
        assert!(expect_ok("leave", locks.store().leave(&holder, None).await));
        let what = format!("{shape:?} released, {given:?}");
        let token = wait_for_grant(&other, &waiter, news, &what).await;
        assert!(place.is_none_or(|place| place == token), "{what}: {token} of {place:?}");
        let after = renewed(&other, &waiter).await;
        assert!(matches!(after, Renewal::Holding { token: t, .. } if t == token), "{after:?}");
        assert!(expect_ok("leave", other.store().leave(&waiter, None).await));
    };
    let cases = shapes(subject)
        .into_iter()
        .flat_map(|shape| [Given::Before, Given::During, Given::Again].map(|given| (shape, given)));
    join_all(cases.enumerate().map(one)).await;
}

/// Waits until a waiter is notified of its grant, or is notified to poll and then finds its grant.
async fn wait_for_grant<F>(
    locks: &Client,
    claim: &Claim,
    mut news: std::pin::Pin<&mut F>,
    what: &str,
) -> leasehold_core::Token
where
    F: Future<Output = Result<Signal>> + ?Sized,
{
    let first = tokio::time::timeout(PATIENCE, news.as_mut()).await;
    let Ok(mut signal) = first else { panic!("{what}: no notification arrived") };
    loop {
        if let Signal::Granted(token) = expect_ok("changed", signal) {
            return token;
        }
        if let Renewal::Holding { token, .. } = renewed(locks, claim).await {
            return token;
        }
        moment(locks).await;
        let next = tokio::time::timeout(PATIENCE, locks.store().changed(claim)).await;
        signal = match next {
            Ok(next) => next,
            Err(_) => panic!("{what}: no further notification arrived"),
        };
    }
}

// P7
pub async fn only_the_owner_releases_or_renews(subject: &Subject) {
    let name = named(subject, "p7");
    let locks = subject.client().await;
    let guard = taken(&locks, name.as_str()).await;
    let thief = expect_ok("claim", Claim::new(name.clone(), Kind::Mutex, 1, 1));
    assert!(!expect_ok("leave", locks.store().leave(&thief, None).await));
    let renew = Renew { claim: thief.clone(), lease: subject.lease() };
    let renewed = expect_ok("renew", locks.store().renew(&[renew]).await);
    assert!(matches!(renewed[..], [Renewal::Lost]), "{renewed:?}");
    let other = subject.client().await;
    assert_eq!(kind_of("try", other.mutex(name.as_str()).try_lock().await), ErrorKind::Contended);
    assert!(guard.is_held());
    // A renewal does not acquire a free lock either.
    let free = expect_ok("claim", Claim::new(named(subject, "p7-free"), Kind::Mutex, 1, 1));
    let renew = Renew { claim: free.clone(), lease: subject.lease() };
    let renewed = expect_ok("renew", locks.store().renew(&[renew]).await);
    assert!(matches!(renewed[..], [Renewal::Lost]), "{renewed:?}");
    assert!(expect_ok("read", locks.inspect(free.name.as_str()).await).is_none());
    // R41, R49: a client that failed to acquire the lock does not release the other client's hold.
    assert!(!expect_ok("leave", other.store().leave(&thief, None).await));
    assert_eq!(kind_of("try", other.mutex(name.as_str()).try_lock().await), ErrorKind::Contended);
}

// R41
pub async fn late_release_does_not_free_the_next_hold(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = named(subject, "r41");
    let (locks, other) = (subject.client().await, subject.client().await);
    let (late, joined) = ghost(&locks, &name, subject.lease(), Mode::Try).await;
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    // Its lease expires and the next client holds the lock. Then the first client releases twice
    // and tries to renew.
    let next = taken(&other, name.as_str()).await;
    for _ in 0..2 {
        expect_ok("leave", locks.store().leave(&late, None).await);
        let renew = Renew { claim: late.clone(), lease: subject.lease() };
        let renewed = expect_ok("renew", locks.store().renew(&[renew]).await);
        assert!(matches!(renewed[..], [Renewal::Lost]), "{renewed:?}");
    }
    let third = locks.mutex(name.as_str()).try_lock().await;
    assert_eq!(
        kind_of("a third client while the second holds the lock", third),
        ErrorKind::Contended
    );
    expect_ok("check", locks.check(&next.sequencer()).await);
    expect_ok("release", next.release().await);
}

// S02
pub async fn late_renewal_does_not_take_the_lock_from_a_waiter(subject: &Subject) {
    if !subject.claims("first come, first served", subject.guarantees().fifo)
        || !subject.claims_leases()
    {
        return;
    }
    let name = named(subject, "s02-waiter");
    let locks = subject.client().await;
    let late = claim_of(&name, MUTEX, subject.lease());
    holds(&locks, &late).await;
    let waits = claim_of(&name, MUTEX, PATIENCE);
    stands(&locks, &waits).await;
    // The store gets no requests while the lease expires.
    tokio::time::sleep(subject.lease() * 3 / 2).await;
    let after = renewed(&locks, &late).await;
    assert!(matches!(after, Renewal::Lost), "{after:?}");
    // A store that needs time to grant the lock to the next waiter returns when to poll again.
    let granted = async || matches!(renewed(&locks, &waits).await, Renewal::Holding { .. });
    eventually("the next waiter holds the lock", granted).await;
    assert!(expect_ok("leave", locks.store().leave(&waits, None).await));
}

// S07
pub async fn repeated_release_does_not_free_the_next_hold(subject: &Subject) {
    if !subject.claims("first come, first served", subject.guarantees().fifo) {
        return;
    }
    let locks = subject.client().await;
    let one = async |(i, (kind, _, capacity)): (usize, Shape)| {
        let name = named(subject, &format!("s07-twice-{i}"));
        // Each claim needs the whole lock.
        let all = || claim_of(&name, (kind, capacity, capacity), PATIENCE * 4);
        let line = [all(), all(), all(), all()];
        holds(&locks, &line[0]).await;
        for claim in &line[1..] {
            stands(&locks, claim).await;
        }
        for pair in line.windows(2) {
            let [gone, next] = pair else { continue };
            assert!(expect_ok("leave", locks.store().leave(gone, None).await));
            assert!(!expect_ok("leave again", locks.store().leave(gone, None).await));
            let after = renewed(&locks, next).await;
            assert!(matches!(after, Renewal::Holding { .. }), "{kind}: {after:?}");
            let info = expect_ok("read", locks.inspect(name.as_str()).await);
            let holders = info.map_or(0, |info| info.holders().count());
            assert_eq!(holders, 1, "{kind}: after a second leave");
        }
        assert!(expect_ok("leave", locks.store().leave(&line[3], None).await));
    };
    join_all(shapes(subject).into_iter().enumerate().map(one)).await;
}

// S07
pub async fn renewal_racing_a_release_does_not_restore_the_claim(subject: &Subject) {
    let name = named(subject, "s07-renewals");
    let locks = subject.client().await;
    let [holder, waiter] = [PATIENCE, PATIENCE].map(|lease| claim_of(&name, MUTEX, lease));
    holds(&locks, &holder).await;
    stands(&locks, &waiter).await;
    let renewals = join_all((0..8).map(|_| renewed(&locks, &waiter)));
    let (renewals, left) = tokio::join!(renewals, locks.store().leave(&waiter, None));
    expect_ok("leave", left);
    for renewal in renewals {
        assert!(matches!(renewal, Renewal::Waiting(_) | Renewal::Lost), "{renewal:?}");
    }
    let after = renewed(&locks, &waiter).await;
    assert!(matches!(after, Renewal::Lost), "{after:?}");
    expect_ok("leave", locks.store().leave(&holder, None).await);
}

// P8
pub async fn repeated_acquires_of_one_claim_get_one_grant(subject: &Subject) {
    let name = named(subject, "p8");
    let locks = subject.client().await;
    let mut claim = expect_ok("claim", Claim::new(name.clone(), Kind::Mutex, 1, 1));
    claim.lease = PATIENCE;
    let joins = (0..8).map(|_| locks.store().join(&claim, Mode::Wait));
    let mut tokens = BTreeSet::new();
    for joined in join_all(joins).await {
        match expect_ok("join", joined) {
            Joined::Holding { token, .. } => tokens.insert(token),
            other => panic!("{other:?}"),
        };
    }
    assert_eq!(tokens.len(), 1);
    let info = expect_ok("read", locks.inspect(name.as_str()).await);
    assert_eq!(info.map(|i| i.claims.len()), Some(1));
    assert!(expect_ok("leave", locks.store().leave(&claim, None).await));
    assert!(!expect_ok("leave", locks.store().leave(&claim, None).await));
    is_free_soon(&locks, name.as_str()).await;
}

// P9
pub async fn dropped_release_completes_in_the_background(subject: &Subject) {
    let name = subject.name("p9");
    let other = subject.client().await;
    for polls in 0..6 {
        let (locks, faults) = subject.faulty().await;
        let guard = taken_for_long(&locks, &name).await;
        faults.step();
        {
            let mut release = pin!(guard.release());
            for _ in 0..polls {
                if poll_once(&mut release).await.is_ready() {
                    break;
                }
            }
        }
        is_released(&other, &name).await;
    }
}

// --- scenarios ---------------------------------------------------------------------------------

// R3
pub async fn owner_reenters_without_contacting_the_store(subject: &Subject) {
    let name = subject.name("r3");
    let (locks, faults) = subject.faulty().await;
    let me = Owner::new();
    let lock = locks.mutex(&name).owner(&me);
    let outer = expect_ok("lock", lock.lock().await);
    let asked = faults.count(Op::Join);
    let inner = expect_ok("again", lock.try_lock().await);
    assert_eq!(inner.token(), outer.token());
    expect_ok("release of one of two", outer.release().await);
    assert!(inner.is_held());
    assert_eq!((faults.count(Op::Join), faults.count(Op::Leave)), (asked, 0));
    let another = locks.mutex(&name).owner(&Owner::new()).try_lock().await;
    assert_eq!(kind_of("another owner", another), ErrorKind::Contended);
    expect_ok("release of the last", inner.release().await);
    is_free_soon(&locks, &name).await;
}

// S01
pub async fn lease_of_a_late_grant_counts_from_before_the_request(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("s01");
    let witness = subject.client().await;
    let (locks, faults) = subject.faulty().await;
    // The reply is delayed, but arrives within the time limit. The guard's remaining time is
    // shorter by the delay.
    let (lease, held_back) = (subject.lease() * 4, subject.lease() / 2);
    faults.always(Op::Join, Fault::DelayReply(held_back));
    let guard = expect_ok("lock", locks.mutex(&name).lease(lease).no_renewal().lock().await);
    let left = guard.remaining();
    // On a busy machine a renewal may have replaced this answer, and the renewal was not delayed.
    if faults.count(Op::Renew) == 0 {
        assert!(left <= lease - held_back, "{left:?}");
    }
    let knows = who_knows(&witness, &locks);
    believes_no_more_than_the_store(knows, &guard).await;
    drop(guard);
    is_free_soon(&witness, &name).await;
    // Each reply is delayed for almost the whole lease. Any resulting guard must not last longer
    // than the store's hold.
    faults.heal();
    faults.always(Op::Join, Fault::DelayReply(subject.lease() * 9 / 10));
    match locks.mutex(&name).lease(subject.lease()).lock_timeout(subject.lease() * 3).await {
        Ok(guard) => believes_no_more_than_the_store(knows, &guard).await,
        Err(error) => {
            let late = [ErrorKind::Timeout, ErrorKind::AtRisk, ErrorKind::Unreachable];
            assert!(late.contains(&error.kind()), "{error}");
        }
    }
    faults.heal();
    is_free_soon(&witness, &name).await;
}

// S02
pub async fn late_renewal_does_not_revive_an_expired_hold(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("s02");
    let (locks, faults) = subject.faulty().await;
    let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease()).lock().await);
    faults.always(Op::Renew, Fault::DelayReply(subject.lease() * 2));
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await;
    assert_eq!(reason.ok(), Some(LostReason::Expired));
    faults.heal();
    tokio::time::sleep(subject.lease() * 3).await;
    assert!(!guard.is_held());
    assert!(matches!(guard.state(), State::Lost(LostReason::Expired)));
    // A store may also fail to answer within such a short lease.
    let outcome = kind_of("release", guard.release().await);
    assert!(matches!(outcome, ErrorKind::Lost | ErrorKind::Unreachable), "{outcome:?}");
}

// S03
pub async fn evicted_hold_is_reported_lost_and_not_reacquired(subject: &Subject) {
    let name = subject.name("s03");
    let locks = subject.client().await;
    let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease() * 10).lock().await);
    assert_eq!(expect_ok("evict", locks.evict(&name, Evict::Holders).await), 1);
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await;
    assert_eq!(reason.ok(), Some(LostReason::Gone));
    assert!(!guard.is_held());
    let next = taken(&locks, &name).await;
    assert!(next.token() > guard.token());
    // The end of the old guard does not affect the new hold.
    drop(guard);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let info = expect_ok("read", locks.inspect(&name).await);
    assert_eq!(info.and_then(|i| i.holders().next()?.token), Some(next.grant()));
}

// S03
pub async fn release_reports_an_unnoticed_loss(subject: &Subject) {
    let name = subject.name("s03b");
    let locks = subject.client().await;
    let guard = taken(&locks, &name).await;
    assert_eq!(expect_ok("evict", locks.evict(&name, Evict::Holders).await), 1);
    let error = match guard.release().await {
        Err(error) => error,
        Ok(_) => panic!("the release of a lost hold succeeded"),
    };
    assert_eq!(error.lost_reason(), Some(LostReason::Gone));
}

// S04
pub async fn acquire_dropped_at_any_await_leaves_no_claim(subject: &Subject) {
    let name = subject.name("s04");
    let other = subject.client().await;
    // The lock is free. The future is dropped after 0, 1, 2, … polls, until it completes first.
    for polls in 0..20 {
        let (locks, faults) = subject.faulty().await;
        faults.step();
        let lock = locks.mutex(&name).lease(LONG);
        let done = {
            let mut taking = pin!(lock.lock());
            match poll_times(&mut taking, polls).await {
                Poll::Ready(guard) => {
                    expect_ok("release", expect_ok("lock", guard).release().await);
                    true
                }
                Poll::Pending => false,
            }
        };
        is_released(&other, &name).await;
        if done {
            break;
        }
        assert!(polls < 19, "an uncontended lock takes more than 19 polls");
    }
    // Another client holds the lock and releases it after some polls. The future is dropped before,
    // at and after the grant.
    for polls in 1..12 {
        for released_after in [2, 5, usize::MAX] {
            let (locks, faults) = subject.faulty().await;
            faults.step();
            let mut guard = Some(taken_for_long(&other, &name).await);
            let lock = locks.mutex(&name).lease(LONG);
            {
                let mut taking = pin!(lock.lock());
                for poll in 0..polls {
                    if poll == released_after {
                        drop(guard.take());
                    }
                    if let Poll::Ready(guard) = poll_once(&mut taking).await {
                        drop(expect_ok("lock", guard));
                        break;
                    }
                    moment(&other).await;
                }
            }
            drop(guard);
            is_released(&other, &name).await;
            // The claim of a waiter expires soon, even if it is not released.
            eventually("a release", async || faults.count(Op::Leave) >= 1).await;
        }
    }
}

// S04
/// The join takes effect after the release that followed it.
pub async fn dropped_acquire_is_released_although_its_join_arrives_late(subject: &Subject) {
    let name = subject.name("s04b");
    let other = subject.client().await;
    let (locks, faults) = subject.faulty().await;
    // The client of a local store cannot have a late join, because it calls the store directly.
    if locks.store().info().is_local {
        return;
    }
    faults.next(Op::Join, 1, Fault::DelayRequest(Duration::from_millis(500)));
    let lock = locks.mutex(&name).lease(LONG);
    {
        let mut taking = pin!(lock.lock());
        assert!(poll_once(&mut taking).await.is_pending());
    }
    // The first release, and the one after 100 ms.
    eventually("two releases", async || faults.count(Op::Leave) >= 2).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    is_released(&other, &name).await;
}

// S05
pub async fn delayed_acquire_blocks_the_lock_for_at_most_a_lease(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("s05");
    let other = subject.client().await;
    let (locks, faults) = subject.faulty().await;
    faults.next(Op::Join, 1, Fault::DelayRequest(subject.lease() * 2));
    let lease = subject.lease() * 5;
    let lock = locks.mutex(&name).lease(lease);
    {
        let mut taking = pin!(lock.lock());
        assert!(poll_once(&mut taking).await.is_pending());
    }
    // The clean-up arrives before the delayed request. The request then creates a holder without a
    // client.
    eventually("the delayed request takes effect", async || {
        expect_ok("read", other.inspect(&name).await).is_some()
    })
    .await;
    let start = Instant::now();
    let guard = taken(&other, &name).await;
    // The limit is the same as in P5.
    let (took, promises) = (start.elapsed(), subject.guarantees());
    let stated = promises.recovery + lease * promises.recovery_leases;
    assert!(took < stated + PATIENCE / 3, "took {took:?}, but the stated limit is {stated:?}");
    expect_ok("release", guard.release().await);
    is_free_soon(&other, &name).await;
}

// S06
pub async fn acquire_with_a_lost_reply_is_granted_once(subject: &Subject) {
    let name = subject.name("s06");
    let other = subject.client().await;
    for fault in [Fault::LoseReply, Fault::ErrorAfter, Fault::LoseRequest, Fault::ErrorBefore] {
        let (locks, faults) = subject.faulty().await;
        faults.next(Op::Join, 1, fault);
        let lock = locks.mutex(&name).lease(subject.lease() * 3);
        let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
        assert!(faults.count(Op::Join) >= 2, "{fault:?}");
        let info = expect_ok("read", other.inspect(&name).await);
        let claims: Vec<_> = info.iter().flat_map(|i| &i.claims).collect();
        let holding = claims.iter().filter(|c| c.state == ClaimState::Holding).count();
        assert_eq!(holding, 1, "{fault:?}: {claims:?}");
        assert_eq!(claims[0].token, Some(guard.grant()), "{fault:?}");
        expect_ok("release", guard.release().await);
        is_free_soon(&other, &name).await;
    }
}

// S07
pub async fn release_with_a_lost_reply_takes_effect_once(subject: &Subject) {
    let name = subject.name("s07");
    let other = subject.client().await;
    for fault in [Fault::LoseReply, Fault::ErrorAfter, Fault::Double] {
        let (locks, faults) = subject.faulty().await;
        let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease() * 8).lock().await);
        let successor = {
            let lock = other.mutex(&name);
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        until_waiting(&other, &name, 1).await;
        faults.next(Op::Leave, 1, fault);
        expect_ok("release", guard.release().await);
        let Ok(successor) = successor.await else { panic!("the successor failed") };
        let successor = expect_ok("lock", successor);
        assert!(successor.is_held());
        let held = kind_of("try", locks.mutex(&name).try_lock().await);
        assert_eq!(held, ErrorKind::Contended, "{fault:?}");
        expect_ok("release", successor.release().await);
    }
}

// S08
pub async fn a_blocked_executor_keeps_its_locks(subject: &Subject) {
    let name = subject.name("s08");
    let (locks, other) = (subject.client().await, subject.client().await);
    let lease = subject.lease() * 5;
    let lock = locks.mutex(&name).lease(lease);
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { panic!("cannot build a runtime") };
        runtime.block_on(async {
            let guard = expect_ok("lock", lock.lock().await);
            std::thread::sleep(lease * 3);
            let (held, awake) = (guard.is_held(), Instant::now());
            (held, awake, guard.release().await.is_ok())
        })
    });
    eventually("held", async || expect_ok("read", other.inspect(&name).await).is_some()).await;
    let next = taken(&other, &name).await;
    let taken = Instant::now();
    let Ok((held, awake, released)) = worker.join() else { panic!("the holder panicked") };
    assert!(held && released, "the hold was lost while the executor was blocked");
    assert!(taken >= awake, "another client got the lock while the executor was blocked");
    drop(next);
}

// S09
pub async fn paused_holder_detects_its_loss_on_the_first_check(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    // A stepped clock has the same effect as a paused process or a suspended machine (s10).
    let name = subject.name("s09");
    let clock = Clock::stepped();
    let (locks, _) = subject.faulty_with(Builder::default().clock(clock.clone())).await;
    let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease()).lock().await);
    assert!(guard.is_held());
    clock.advance(subject.lease() * 3);
    assert!(!guard.is_held(), "is_held() is true after the lease expired");
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(kind_of("ensure", guard.ensure(Duration::ZERO)), ErrorKind::Lost);
    assert_eq!(kind_of("release", guard.release().await), ErrorKind::Lost);
}

// S11
pub async fn guards_may_be_dropped_anywhere(subject: &Subject) {
    let name = subject.name("s11");
    let (locks, other) = (subject.client().await, subject.client().await);
    // The guard is dropped on a thread without a runtime.
    let guard = taken_for_long(&locks, &name).await;
    let dropped = std::thread::spawn(move || drop(guard)).join();
    assert!(dropped.is_ok());
    is_released(&other, &name).await;
    // The guard is dropped after the runtime that acquired it.
    let lock = locks.mutex(&name).lease(LONG);
    let outlived = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { panic!("cannot build a runtime") };
        let guard = runtime.block_on(async { expect_ok("lock", lock.lock().await) });
        runtime.shutdown_background();
        drop(guard);
    });
    assert!(outlived.join().is_ok());
    is_released(&other, &name).await;
    // The guard is dropped after the client that acquired it, and inside the runtime.
    let guard = taken_for_long(&locks, &name).await;
    drop(locks);
    drop(guard);
    is_released(&other, &name).await;
}

/// A client releases its dropped guards before it acquires again, so it is never blocked by its own
/// hold.
pub async fn dropped_guard_does_not_block_its_own_client(subject: &Subject) {
    let name = subject.name("own-way");
    let locks = subject.client().await;
    let mut last = None;
    for _ in 0..10 {
        let guard =
            expect_ok("try_lock, immediately after a drop", locks.mutex(&name).try_lock().await);
        assert!(last.is_none_or(|last| last < guard.token()));
        last = Some(guard.token());
        drop(guard);
    }
    // A pending release of another lock does not delay it.
    let other = subject.name("own-way-not");
    let held = expect_ok("lock", locks.mutex(&other).try_lock().await);
    drop(expect_ok("try_lock", locks.mutex(&name).try_lock().await));
    expect_ok("release", held.release().await);
    is_free_soon(&locks, &name).await;
}

// S12
pub async fn panic_releases_the_lock(subject: &Subject) {
    let name = subject.name("s12");
    let locks = subject.client().await;
    let lock = locks.mutex(&name).lease(LONG);
    let panicked = tokio::spawn(async move {
        let _guard = expect_ok("lock", lock.lock().await);
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(panicked.await.is_err());
    is_released(&locks, &name).await;
}

// S14
pub async fn failed_renewals_are_retried(subject: &Subject) {
    let name = subject.name("s14");
    let (locks, faults) = subject.faulty().await;
    let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease() * 10).lock().await);
    for fault in [Fault::ErrorBefore, Fault::ErrorAfter, Fault::LoseReply] {
        let before = faults.count(Op::Renew);
        faults.next(Op::Renew, 1, fault);
        eventually("two more renewals", async || faults.count(Op::Renew) >= before + 2).await;
        assert!(guard.is_held(), "{fault:?}");
    }
    expect_ok("release", guard.release().await);
}

// S14
pub async fn lock_lost_in_a_long_outage_can_be_acquired_again(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("s14b");
    let (locks, faults) = subject.faulty().await;
    let lock = locks.mutex(&name).lease(subject.lease() * 7);
    let guard = expect_ok("lock", lock.lock().await);
    let mut watch = guard.watch();
    assert_eq!(watch.state(), State::Held);
    faults.always(Op::Renew, Fault::ErrorBefore);
    let first = tokio::time::timeout(PATIENCE, watch.changed()).await;
    assert!(matches!(first, Ok(State::AtRisk(_))), "{first:?}");
    let then = tokio::time::timeout(PATIENCE, watch.changed()).await;
    assert!(matches!(then, Ok(State::Lost(LostReason::Expired))), "{then:?}");
    faults.heal();
    drop(guard);
    let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
    tokio::time::sleep(subject.lease() * 9).await;
    assert!(guard.is_held(), "the next lock is not renewed");
}

// S14
pub async fn hold_expires_on_time_while_the_store_is_unreachable(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("s14-silent");
    let (locks, faults) = subject.faulty().await;
    let lease = subject.lease() * 4;
    let guard = expect_ok("lock", locks.mutex(&name).lease(lease).lock_timeout(PATIENCE).await);
    faults.freeze();
    // No renewal is acknowledged from here on. Earlier ones were sent before.
    tokio::time::sleep(lease).await;
    assert!(!guard.is_held(), "is_held() is true after the lease expired");
    assert!(matches!(guard.state(), State::Lost(LostReason::Expired)), "{:?}", guard.state());
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await;
    assert_eq!(reason.ok(), Some(LostReason::Expired));
    faults.heal();
}

// S15
pub async fn lock_delay_follows_only_an_unclean_end(subject: &Subject) {
    let name = named(subject, "s15");
    let locks = subject.client().await;
    let delay = subject.lease() * 2;
    let lock = locks.mutex(name.as_str()).lease(PATIENCE).lock_delay(delay);
    if !subject.guarantees().lock_delay {
        assert_eq!(kind_of("lock_delay", lock.try_lock().await), ErrorKind::Unsupported);
        return;
    }
    expect_ok("release", expect_ok("lock", lock.try_lock().await).release().await);
    let again = expect_ok("try_lock, immediately after a release", lock.try_lock().await);
    expect_ok("release", again.release().await);
    let mut claim = expect_ok("claim", Claim::new(name.clone(), Kind::Mutex, 1, 1));
    (claim.lease, claim.lock_delay) = (subject.lease(), delay);
    let start = Instant::now();
    let joined = expect_ok("join", locks.store().join(&claim, Mode::Try).await);
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    let next = taken(&locks, name.as_str()).await;
    assert!(start.elapsed() >= whole(subject.lease() + delay), "free after {:?}", start.elapsed());
    drop(next);
}

// S15
pub async fn lock_delay_blocks_every_kind_of_lock(subject: &Subject) {
    if !subject.claims("a lock-delay", subject.guarantees().lock_delay) {
        return;
    }
    let locks = subject.client().await;
    let one = async |(i, shape): (usize, Shape)| {
        // The cooldown is longer than this test's waits, so that the check is in time on any
        // machine.
        let name = named(subject, &format!("s15-closed-{i}"));
        let mut gone = claim_of(&name, shape, subject.lease());
        gone.lock_delay = PATIENCE * 4;
        holds(&locks, &gone).await;
        takes_its_weight(&locks, &name, shape).await;
        eventually("the lease expires", async || {
            let info = expect_ok("read", locks.inspect(name.as_str()).await);
            info.is_none_or(|info| info.holders().count() == 0)
        })
        .await;
        takes_its_weight(&locks, &name, shape).await;
        // The lock is available again once the cooldown is over.
        let name = named(subject, &format!("s15-opens-{i}"));
        let mut gone = claim_of(&name, shape, subject.lease());
        let (start, delay) = (Instant::now(), subject.lease() * 2);
        gone.lock_delay = delay;
        holds(&locks, &gone).await;
        opens(&locks, &name, shape).await;
        let took = start.elapsed();
        assert!(took >= whole(subject.lease() + delay), "{shape:?}: free after {took:?}");
    };
    join_all(shapes(subject).into_iter().enumerate().map(one)).await;
}

// S15
pub async fn late_release_does_not_shorten_the_lock_delay(subject: &Subject) {
    if !subject.claims("a lock-delay", subject.guarantees().lock_delay) {
        return;
    }
    let name = named(subject, "s15-late");
    let (locks, other) = (subject.client().await, subject.client().await);
    let delay = subject.lease() * 3;
    let mut claim = expect_ok("claim", Claim::new(name.clone(), Kind::Mutex, 1, 1));
    (claim.lease, claim.lock_delay) = (subject.lease(), delay);
    let start = Instant::now();
    let joined = expect_ok("join", locks.store().join(&claim, Mode::Try).await);
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    // The holder was paused beyond the end of its lease, and now releases a hold that it has lost.
    tokio::time::sleep(subject.lease() * 3 / 2).await;
    expect_ok("leave", locks.store().leave(&claim, None).await);
    expect_ok("leave again", locks.store().leave(&claim, Some(subject.lease() / 10)).await);
    let next = taken(&other, name.as_str()).await;
    assert!(start.elapsed() >= whole(subject.lease() + delay), "free after {:?}", start.elapsed());
    drop(next);
}

// R34
pub async fn sequencer_is_valid_as_long_as_its_hold(subject: &Subject) {
    let name = subject.name("r34 %:\"'é");
    let (locks, other) = (subject.client().await, subject.client().await);
    assert_eq!(
        locks.identity(),
        other.identity(),
        "two clients of one store have different identities"
    );
    let guard = taken(&locks, &name).await;
    let text = guard.sequencer().to_string();
    let shown = expect_ok("parse", text.parse::<Sequencer>());
    assert_eq!(shown, guard.sequencer());
    let held = expect_ok("check", other.check(&shown).await);
    assert_eq!(held.token, Some(guard.grant()));
    assert!(shown.is_exclusive() && shown.kind() == Kind::Mutex);

    // A place in the queue is not a hold, whatever its token, and does not affect the check.
    let waiting = other.mutex(&name);
    let mut next = pin!(waiting.lock());
    poll_fn(|cx| {
        let _ = next.as_mut().poll(cx);
        Poll::Ready(())
    })
    .await;
    expect_ok("check while another client waits", other.check(&shown).await);
    expect_ok("release", guard.release().await);
    let next = expect_ok(
        "the next waiter holds the lock",
        tokio::time::timeout(PATIENCE, next)
            .await
            .map_err(|_| {
                leasehold_core::Error::new(ErrorKind::Timeout, "the next waiter never got the lock")
            })
            .and_then(|next| next),
    );
    assert_eq!(kind_of("check of the old hold", other.check(&shown).await), ErrorKind::Lost);
    expect_ok("check of the next hold", locks.check(&next.sequencer()).await);

    // An eviction is visible at the store before the guard finds out.
    let evicted = next.sequencer();
    expect_ok("evict", locks.evict(&name, Evict::Holders).await);
    assert_eq!(kind_of("check of an evicted hold", locks.check(&evicted).await), ErrorKind::Lost);
    drop(next);
    is_free_soon(&locks, &name).await;
    assert_eq!(kind_of("a free lock", locks.check(&shown).await), ErrorKind::Lost);

    let text = text.replacen(&escaped(locks.identity()), "elsewhere", 1);
    let foreign = expect_ok("parse", text.parse::<Sequencer>());
    assert_eq!(
        kind_of("check of another store's hold", locks.check(&foreign).await),
        ErrorKind::Mismatch
    );

    if locks.guarantees().keeps(Kind::RwLock) {
        let name = subject.name("r34rw");
        let lock = locks.rwlock(&name);
        let (a, b) = (expect_ok("read", lock.read().await), expect_ok("read", lock.read().await));
        for reader in [&a, &b] {
            assert!(!reader.sequencer().is_exclusive());
            expect_ok("check a reader", other.check(&reader.sequencer()).await);
        }
        let forged = a.sequencer().to_string().replacen(":read:", ":write:", 1);
        let forged = expect_ok("parse", forged.parse::<Sequencer>());
        assert_eq!(kind_of("a writer's", other.check(&forged).await), ErrorKind::Lost);
        expect_ok("release", a.release().await);
        expect_ok("the other reader", other.check(&b.sequencer()).await);
        expect_ok("release", b.release().await);
        is_free_soon_as(&locks, &name).await;
    }
}

// R34
pub async fn sequencer_becomes_invalid_when_its_lease_expires(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let (locks, other) = (subject.client().await, subject.client().await);
    let run_out = async |name: &str, delay: Option<Duration>| {
        let lock = locks.mutex(name).lease(subject.lease()).no_renewal();
        let lock = delay.into_iter().fold(lock, |lock, delay| lock.lock_delay(delay));
        // The lock is free. The long limit allows for slow answers, for which a short lease leaves
        // `try_lock` too little time.
        let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
        let sequencer = guard.sequencer();
        eventually("the hold is lost at the store", async || match other.check(&sequencer).await {
            Ok(_) => false,
            Err(error) => error.kind() == ErrorKind::Lost,
        })
        .await;
        assert!(!guard.is_held(), "is_held() is true, but the store has ended the hold");
        guard
    };
    // No other client has acquired the lock since, so only its lease can have ended the hold.
    let name = subject.name("r34-lease");
    let guard = run_out(&name, None).await;
    let next = taken(&other, &name).await;
    assert_eq!(
        kind_of("check of the old hold", other.check(&guard.sequencer()).await),
        ErrorKind::Lost
    );
    expect_ok("check of the next hold", locks.check(&next.sequencer()).await);

    // A claim in cooldown is not a hold. The cooldown is longer than this test's waits.
    if subject.claims("a lock-delay", subject.guarantees().lock_delay) {
        let name = subject.name("r34-delay");
        let guard = run_out(&name, Some(PATIENCE * 2)).await;
        let early = other.mutex(&name).try_lock().await;
        assert_eq!(kind_of("within the lock-delay", early), ErrorKind::Contended);
        assert_eq!(
            kind_of("check of the old hold", other.check(&guard.sequencer()).await),
            ErrorKind::Lost
        );
    }
}

/// Escapes a text as in a sequencer.
fn escaped(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    let one = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(one).collect()
}

/// Waits until the queue is empty, for any kind of lock.
async fn is_free_soon_as(locks: &Client, name: &str) {
    eventually("empty", async || expect_ok("inspect", locks.inspect(name).await).is_none()).await;
}

// R34
pub async fn at_risk_is_reported_before_the_loss(subject: &Subject) {
    let name = subject.name("r34j");
    let (locks, faults) = subject.faulty().await;
    // The lease is longer than in other cases, so that there is time to recover in between.
    let guard = expect_ok("lock", locks.mutex(&name).lease(subject.lease() * 10).lock().await);
    expect_ok("ensure", guard.ensure(subject.lease() / 10));
    if !subject.claims_leases() {
        // Holds never expire in this store, so they are never at risk, however long the store is
        // unreachable.
        faults.always(Op::Renew, Fault::ErrorBefore);
        expect_ok("ensure", guard.ensure(subject.lease() * 1000));
        return;
    }
    assert_eq!(kind_of("more than the lease", guard.ensure(Duration::MAX)), ErrorKind::AtRisk);
    let mut work = guard.watch();
    expect_ok("wait_until_held, while held", work.wait_until_held().await);
    faults.always(Op::Renew, Fault::ErrorBefore);
    eventually("at risk", async || matches!(guard.state(), State::AtRisk(_))).await;
    assert!(guard.is_held(), "at risk is still held");
    // Paused work continues after the next renewal, if it arrives in time.
    let (asked, receiver) = tokio::sync::oneshot::channel();
    let paused = tokio::spawn(async move {
        let _ = asked.send(());
        work.wait_until_held().await
    });
    expect_ok("paused", receiver.await.map_err(|_| gone()));
    faults.heal();
    let steady = expect_ok("joined", paused.await.map_err(|_| gone()));
    expect_ok("wait_until_held, after a renewal", steady);
    assert!(guard.is_held());
    faults.always(Op::Renew, Fault::ErrorBefore);
    let mut work = guard.watch();
    eventually("at risk again", async || matches!(guard.state(), State::AtRisk(_))).await;
    assert_eq!(kind_of("steady", work.wait_until_held().await), ErrorKind::Lost);
    assert_eq!(kind_of("ensure", guard.ensure(Duration::ZERO)), ErrorKind::Lost);
    faults.heal();
}

fn gone() -> leasehold_core::Error {
    leasehold_core::Error::new(ErrorKind::Closed, "the task has ended")
}

// S16
pub async fn using_one_name_for_two_kinds_is_a_mismatch(subject: &Subject) {
    let name = subject.name("s16");
    let (locks, other) = (subject.client().await, subject.client().await);
    let promises = subject.guarantees();
    let guard = taken(&locks, &name).await;
    for kind in [Kind::RwLock, Kind::Semaphore] {
        let tried = match kind {
            Kind::RwLock => other.rwlock(&name).try_read().await.map(Hold::from),
            _ => other.semaphore(&name, 2).try_acquire().await.map(Hold::from),
        };
        let expected = match promises.keeps(kind) {
            true => ErrorKind::Mismatch,
            false => ErrorKind::Unsupported,
        };
        assert_eq!(kind_of("another kind", tried), expected);
    }
    drop(guard);
    is_free_soon(&locks, &name).await;
    if promises.keeps(Kind::Semaphore) {
        let guard = expect_ok("acquire", locks.semaphore(&name, 2).acquire().await);
        let wrong = other.semaphore(&name, 3).acquire_timeout(PATIENCE).await;
        assert_eq!(kind_of("another capacity", wrong), ErrorKind::Mismatch);
        drop(guard);
    }
}

// S17
pub async fn a_writer_is_not_starved(subject: &Subject) {
    let promises = subject.guarantees();
    if !subject.claims("fair read-write locks", promises.fifo && promises.keeps(Kind::RwLock)) {
        return;
    }
    let name = subject.name("s17");
    let (locks, other) = (subject.client().await, subject.client().await);
    let lock = locks.rwlock(&name);
    let reading = expect_ok("read", lock.read().await);
    let writer = {
        let lock = other.rwlock(&name);
        tokio::spawn(async move { lock.write_timeout(PATIENCE).await })
    };
    until_waiting(&locks, &name, 1).await;
    // More readers arrive. They must not overtake the writer.
    assert_eq!(kind_of("a later reader", lock.try_read().await), ErrorKind::Contended);
    let later = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.read_timeout(PATIENCE).await })
    };
    until_waiting(&locks, &name, 2).await;
    expect_ok("release", reading.release().await);
    let Ok(writing) = writer.await else { panic!("the writer failed") };
    let writing = expect_ok("write", writing);
    assert!(!later.is_finished(), "a reader acquired the lock while the writer holds it");
    let written = writing.grant();
    expect_ok("release", writing.release().await);
    let Ok(later) = later.await else { panic!("the reader failed") };
    assert!(expect_ok("read", later).grant() > written);
}

// S18
pub async fn crashed_waiters_cost_one_lease_in_total(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = named(subject, "s18");
    let locks = subject.client().await;
    let guard = taken(&locks, name.as_str()).await;
    let lease = subject.lease() * 2;
    // There are many waiters, so that even on a slow machine the limit is exceeded if they are
    // removed one by one.
    for _ in 0..25 {
        let (_, joined) = ghost(&locks, &name, lease, Mode::Wait).await;
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
    }
    let start = Instant::now();
    expect_ok("release", guard.release().await);
    let live = taken(&locks, name.as_str()).await;
    // The limit allows for one lease and the heartbeat after it.
    let took = start.elapsed();
    assert!(took < lease * 6, "took {took:?} with 25 crashed waiters and a lease of {lease:?}");
    drop(live);
}

// S19
pub async fn lease_of_a_late_notification_counts_from_the_last_heartbeat(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let lease = subject.lease() * 4;
    for held_back in [lease * 9 / 10, lease * 2] {
        let name = subject.name(&format!("s19-{}", held_back.as_millis()));
        let other = subject.client().await;
        let (locks, faults) = subject.faulty().await;
        let guard = taken(&other, &name).await;
        let waiting = {
            let lock = locks.mutex(&name).lease(lease);
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        until_waiting(&other, &name, 1).await;
        // The lock is granted while no message reaches the waiter's client.
        faults.freeze();
        expect_ok("release", guard.release().await);
        tokio::time::sleep(held_back).await;
        faults.heal();
        let Ok(late) = waiting.await else { panic!("the waiter failed") };
        let late = expect_ok("lock", late);
        believes_no_more_than_the_store(who_knows(&other, &locks), &late).await;
        assert!(late.is_held());
        let rival = kind_of("a rival", other.mutex(&name).try_lock().await);
        assert_eq!(rival, ErrorKind::Contended);
        expect_ok("release", late.release().await);
    }
}

// S90
pub async fn hostile_names_are_distinct_ordinary_locks(subject: &Subject) {
    let locks = subject.client().await;
    let long = "é".repeat((leasehold_core::MAX_NAME_BYTES - subject.prefix().len()) / 2);
    let odd = [
        "a/../b",
        "b",
        "a/b",
        "../../etc/passwd",
        "a\\b",
        "A",
        "a",
        "a ",
        " a",
        "a.",
        ".a",
        "a%2e",
        "a'b",
        "a\"b",
        "a;b",
        "$(id)",
        "`id`",
        "{a}",
        "a}b",
        "{}x",
        "*",
        "?",
        "[a]",
        "a\u{202e}b",
        "\u{430}",
        "e\u{301}",
        "\u{e9}",
        "~",
        "a~",
        "a+",
        "a.lock",
        "-rf",
        "CON",
        &long,
        "a\u{2028}b",
        "💥",
    ];
    let mut held = Vec::new();
    for name in odd {
        // Each name is a separate lock, so all can be held at once.
        held.push(expect_ok(name, locks.mutex(subject.name(name)).try_lock().await));
    }
    let listed = expect_ok("list", locks.list(subject.prefix()).await);
    let listed: Vec<&str> = listed.iter().map(|i| i.name.as_str()).collect();
    let expected: BTreeSet<String> = odd.iter().map(|name| subject.name(name)).collect();
    assert_eq!(listed, expected.iter().collect::<Vec<_>>());
    for guard in held {
        expect_ok("release", guard.release().await);
    }
    for bad in ["", "a\0b", "a\r\nb", &"x".repeat(10_240)] {
        assert_eq!(kind_of("bad", locks.mutex(bad).try_lock().await), ErrorKind::InvalidName);
    }
}

// S92
pub async fn many_held_locks_are_renewed_in_batches(subject: &Subject) {
    let many = subject.many(1_000);
    let (locks, faults) = subject.faulty().await;
    let lease = PATIENCE / 2;
    let (mut held, mut members) = (Vec::new(), BTreeSet::new());
    for i in 0..many {
        let lock = locks.mutex(subject.name(&format!("s92-{i}"))).lease(lease);
        let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
        members.insert(locks.store().shard(guard.name()));
        held.push(guard);
    }
    let (before, started) = (faults.count(Op::Renew), Instant::now());
    tokio::time::sleep(lease / 3 + lease / 20).await;
    eventually("renewed", async || faults.count(Op::Renew) > before).await;
    let sent = faults.count(Op::Renew) - before;
    // A busy machine may be late enough for further rounds.
    let rounds = (started.elapsed() + lease / 20).div_duration_f64(lease / 3) as usize;
    let most = 20 * members.len() * rounds;
    assert!(
        sent <= most,
        "{sent} requests to renew {many} locks {rounds} times; the limit is {most}"
    );
    assert!(held.iter().all(|guard| guard.is_held()));
    // Every hold of a batch is renewed, and not only the first ones.
    if subject.guarantees().has_leases() {
        for guard in held.iter().step_by(many / 40) {
            believes_no_more_than_the_store(&locks, guard).await;
        }
    }
    for guard in held {
        expect_ok("release", guard.release().await);
    }
}

pub async fn list_filters_by_prefix_and_is_sorted(subject: &Subject) {
    let locks = subject.client().await;
    let names = [
        "list-b",
        "list-a%b",
        "list-A",
        "list-axb",
        "list-a",
        "list-a_b",
        "list-a/b",
        "list-a*b",
        "list-aé",
        "list-[a]",
        "list-ab",
        "list-a\\b",
        "llist-a",
    ];
    let mut held = Vec::new();
    for name in names {
        held.push(expect_ok(name, locks.mutex(subject.name(name)).try_lock().await));
    }
    // Unused locks are not listed, and a lock with a holder and a waiter is listed once.
    for name in ["list-gone", "list-a-gone"] {
        expect_ok(name, taken(&locks, &subject.name(name)).await.release().await);
    }
    let waiting = claim_of(&named(subject, "list-a"), MUTEX, PATIENCE);
    let joined = expect_ok("join", locks.store().join(&waiting, Mode::Wait).await);
    assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
    let prefixes = [
        "",
        "list",
        "list-",
        "list-a",
        "list-a%",
        "list-a_",
        "list-a*",
        "list-a?",
        "list-A",
        "list-a/",
        "list-[a]",
        "list-[",
        "list-a\\",
        "list-aé",
        "list-axb",
        "list-axbc",
        "ist-a",
        "%",
    ];
    for prefix in prefixes {
        let shown = expect_ok("list", locks.list(&subject.name(prefix)).await);
        let shown: Vec<&str> = shown.iter().map(|info| info.name.as_str()).collect();
        let starts = |name: &&&str| name.starts_with(prefix);
        let expected = names.iter().filter(starts).map(|name| subject.name(name));
        let expected: BTreeSet<String> = expected.collect();
        assert_eq!(shown, expected.iter().collect::<Vec<_>>(), "list({prefix:?})");
    }
    // A prefix must match at the beginning of a name.
    let part: String = subject.name("list-a").chars().skip(1).collect();
    assert_eq!(expect_ok("list", locks.list(&part).await).len(), 0, "list({part:?})");
    expect_ok("leave", locks.store().leave(&waiting, None).await);
    for guard in held {
        expect_ok("release", guard.release().await);
    }
}

// --- options and the rest ----------------------------------------------------------------------

pub async fn min_hold_keeps_a_released_lock_unavailable(subject: &Subject) {
    let name = subject.name("at-least");
    let (locks, other) = (subject.client().await, subject.client().await);
    let least = subject.lease() * 6;
    let lock = locks.mutex(&name).min_hold(least);
    if !subject.guarantees().min_hold {
        assert_eq!(kind_of("min_hold", lock.try_lock().await), ErrorKind::Unsupported);
        return;
    }
    for by_drop in [false, true] {
        let start = Instant::now();
        let guard = expect_ok("lock", lock.lock_timeout(PATIENCE).await);
        let token = guard.token();
        match by_drop {
            true => drop(guard),
            false => drop(expect_ok("release", guard.release().await)),
        }
        let contended = kind_of("try", other.mutex(&name).try_lock().await);
        assert_eq!(contended, ErrorKind::Contended);
        let next = taken(&other, &name).await;
        // The period began at the grant, which was after `start`. Stores may round it.
        assert!(start.elapsed() + Duration::from_millis(20) >= least, "{:?}", start.elapsed());
        assert!(next.token() > token);
        drop(next);
    }
}

pub async fn once_per_runs_on_one_client_per_period(subject: &Subject) {
    let name = subject.name("once-per");
    let (locks, other) = (subject.client().await, subject.client().await);
    let period = subject.lease() * 6;
    let [ours, theirs] = [&locks, &other].map(|locks| locks.mutex(&name).label("reports"));
    if !subject.guarantees().min_hold {
        assert_eq!(kind_of("once_per", ours.once_per(period).await), ErrorKind::Unsupported);
        return;
    }
    let start = Instant::now();
    let OncePer::Ran(guard) = expect_ok("once_per", ours.once_per(period).await) else {
        panic!("expected Ran in a new period")
    };
    match expect_ok("once_per", theirs.once_per(period).await) {
        OncePer::Running(holder) => {
            assert_eq!((holder.token, &*holder.holder.label), (Some(guard.grant()), "reports"));
        }
        was => panic!("expected Running while another client works, got {was:?}"),
    }
    expect_ok("release", guard.release().await);
    let next = match expect_ok("once_per", theirs.once_per(period).await) {
        OncePer::Done { next } => next,
        // The machine was paused for a whole period.
        OncePer::Ran(_) if start.elapsed() >= whole(period) => return,
        was => panic!("expected Done after the work was done, got {was:?}"),
    };
    // Some stores round up to seconds.
    assert!(next > Duration::ZERO && next <= period * 3, "{next:?}");
    eventually("the next period begins", async || {
        expect_ok("once_per", theirs.once_per(period).await).ran().is_some()
    })
    .await;
    assert!(start.elapsed() + Duration::from_millis(20) >= period, "{:?}", start.elapsed());
}

pub async fn min_hold_keeps_every_kind_of_lock_unavailable(subject: &Subject) {
    if !subject.claims("a cooldown after a release", subject.guarantees().min_hold) {
        return;
    }
    let locks = subject.client().await;
    let one = async |(i, shape): (usize, Shape)| {
        let name = named(subject, &format!("at-least-{i}"));
        let gone = claim_of(&name, shape, PATIENCE * 4);
        holds(&locks, &gone).await;
        takes_its_weight(&locks, &name, shape).await;
        assert!(expect_ok("leave", locks.store().leave(&gone, Some(PATIENCE * 4)).await));
        takes_its_weight(&locks, &name, shape).await;
        // A release that is repeated or late does not end the cooldown.
        for keep in [None, Some(Duration::from_millis(1))] {
            expect_ok("leave again", locks.store().leave(&gone, keep).await);
            tokio::time::sleep(Duration::from_millis(5)).await;
            takes_its_weight(&locks, &name, shape).await;
        }
        // An operator ends the cooldown.
        let evicted = locks.evict(name.as_str(), Evict::Holders).await;
        assert_eq!(expect_ok("evict", evicted), 1, "{shape:?}: evictions of a lock in cooldown");
        let (kind, _, capacity) = shape;
        let all = claim_of(&name, (kind, capacity, capacity), PATIENCE);
        holds(&locks, &all).await;
        assert!(expect_ok("leave", locks.store().leave(&all, None).await));
    };
    join_all(shapes(subject).into_iter().enumerate().map(one)).await;
}

pub async fn max_hold_ends_a_hold(subject: &Subject) {
    let name = subject.name("max-hold");
    let (locks, other) = (subject.client().await, subject.client().await);
    let lease = subject.lease() * 6;
    let lock = locks.mutex(&name).lease(lease).max_hold(subject.lease() * 7);
    let start = Instant::now();
    let guard = expect_ok("lock", lock.lock().await);
    let next = taken(&other, &name).await;
    assert!(
        start.elapsed() >= whole(lease),
        "another client got the lock before the lease expired"
    );
    assert_eq!(guard.state(), State::Lost(LostReason::MaxHold));
    let again = kind_of("release", guard.release().await);
    assert_eq!(again, ErrorKind::Lost);
    assert!(next.is_held());
}

// R48
pub async fn acquire_meets_min_validity_or_fails(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("min-validity");
    let (locks, faults) = subject.faulty().await;
    // The delay is much shorter than the third of the lease within which an answer must arrive.
    let (lease, late) = (subject.lease() * 4, subject.lease() / 2);
    let lock = locks.mutex(&name).lease(lease).min_validity(lease * 9 / 10);
    // The first reply is too late for the required validity. A renewal makes up for it.
    faults.next(Op::Join, 1, Fault::DelayReply(late));
    let guard = expect_ok("lock", lock.lock().await);
    // If the reply was so late that the claim was sent again, the second reply has made up for it.
    let asked = faults.count(Op::Join) + faults.count(Op::Renew);
    assert!(asked > 1, "the lock was not renewed, although too little of the lease was left");
    expect_ok("release", guard.release().await);
    // All replies are too late, so the lock is refused and released.
    faults.always(Op::Join, Fault::DelayReply(late));
    faults.always(Op::Renew, Fault::DelayReply(late));
    assert_eq!(kind_of("a grant that arrives too late", lock.try_lock().await), ErrorKind::AtRisk);
    faults.heal();
    is_free_soon(&locks, &name).await;
}

pub async fn no_renewal_lets_the_lease_expire(subject: &Subject) {
    if !subject.claims_leases() {
        return;
    }
    let name = subject.name("no-renewal");
    let (locks, other) = (subject.client().await, subject.client().await);
    let start = Instant::now();
    let guard =
        expect_ok("lock", locks.mutex(&name).lease(subject.lease()).no_renewal().lock().await);
    let next = taken(&other, &name).await;
    assert!(
        start.elapsed() >= whole(subject.lease()),
        "another client got the lock before the lease expired"
    );
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    drop(next);
}

/// A manual renewal extends the hold at the client and at the store. It does not restore an evicted
/// hold.
pub async fn manual_renewal_extends_a_hold_but_does_not_revive_it(subject: &Subject) {
    let name = subject.name("by-hand");
    let locks = subject.client().await;
    let lock = locks.mutex(&name).lease(subject.lease() * 10).no_renewal();
    let guard = expect_ok("lock", lock.lock().await);
    let at_store = async || {
        let info = expect_ok("read", locks.inspect(&name).await);
        info.and_then(|info| info.holders().next().and_then(|holder| holder.remaining))
    };
    if subject.claims_leases() {
        tokio::time::sleep(subject.lease()).await;
        let (here, there) = (guard.remaining(), at_store().await);
        let left = expect_ok("renew", guard.renew().await);
        assert!(left > here, "{left:?} left after a renewal, {here:?} before");
        assert!(guard.remaining() <= left);
        if let (Some(before), Some(after)) = (there, at_store().await) {
            // Some stores report whole seconds.
            assert!(
                after >= before,
                "{after:?} left at the store after a renewal, {before:?} before"
            );
        }
    } else {
        assert_eq!(expect_ok("renew", guard.renew().await), Duration::MAX);
    }
    expect_ok("evict", locks.evict(&name, Evict::Holders).await);
    assert_eq!(kind_of("renew", guard.renew().await), ErrorKind::Lost);
    assert!(matches!(guard.state(), State::Lost(_)));
    assert_eq!(kind_of("renew", guard.renew().await), ErrorKind::Lost);
    is_free_soon(&locks, &name).await;
}

/// Watches on one queue and on a prefix report new holders, new waiters and ended claims.
pub async fn queue_changes_are_reported_to_watchers(subject: &Subject) {
    let (name, other) = (subject.name("followed:a"), subject.name("followed:b"));
    let (locks, others) = (subject.client().await, subject.client().await);
    let often = Duration::from_millis(20);
    let mut of_one = others.watch(&name).every(often);
    let mut of_all = others.watch_all(subject.name("followed:")).every(often);
    /// Waits for the next event of this kind, from any claim.
    async fn next(changes: &mut LockEvents, wanted: LockEventKind) -> LockEvent {
        loop {
            let change = expect_ok("next", changes.next().await);
            if change.became == wanted {
                return change;
            }
        }
    }
    let first = expect_ok("lock", locks.mutex(&name).label("first").lock().await);
    for changes in [&mut of_one, &mut of_all] {
        let change = next(changes, LockEventKind::Holds).await;
        assert_eq!((change.name.as_str(), change.claim.token), (&*name, Some(first.grant())));
        assert_eq!(change.claim.holder.label, "first");
    }
    let second = locks.mutex(&name).label("second");
    let second = tokio::spawn(async move { second.lock().await });
    let change = next(&mut of_one, LockEventKind::Waits).await;
    assert_eq!(change.claim.holder.label, "second");
    // The other lock appears only in the watch of the prefix.
    let third = expect_ok("lock", locks.mutex(&other).lock().await);
    let change = next(&mut of_all, LockEventKind::Holds).await;
    assert_eq!((change.name.as_str(), change.claim.token), (&*other, Some(third.grant())));
    let token = first.grant();
    expect_ok("release", first.release().await);
    let second = expect_ok("wait", expect_ok("join", second.await));
    let change = next(&mut of_one, LockEventKind::Ended).await;
    assert_eq!(change.claim.token, Some(token));
    let change = next(&mut of_one, LockEventKind::Holds).await;
    assert_eq!((change.name.as_str(), change.claim.token), (&*name, Some(second.grant())));
}

/// If the store notifies evicted holders, they find out long before their next renewal. That
/// applies to any kind of hold, renewed or not.
pub async fn evicted_holder_is_notified_immediately(subject: &Subject) {
    if !subject.claims("to notify evicted holders", subject.guarantees().evicted == Wakeup::Push) {
        return;
    }
    let (locks, other) = (subject.client().await, subject.client().await);
    let long = Duration::from_secs(90).min(locks.store().longest_lease());
    let mutex = |what: &str| locks.mutex(subject.name(what)).lease(long);
    let mut held: Vec<Hold> = vec![
        expect_ok("lock", mutex("evicted:mutex").lock().await).into(),
        expect_ok("lock", mutex("evicted:unrenewed").no_renewal().lock().await).into(),
    ];
    if subject.guarantees().keeps(Kind::RwLock) {
        let lock = locks.rwlock(subject.name("evicted:read")).lease(long);
        held.push(expect_ok("read", lock.read().await).into());
        let lock = locks.semaphore(subject.name("evicted:permit"), 3).lease(long);
        held.push(expect_ok("acquire", lock.acquire_many(2).await).into());
    }
    for guard in held {
        let began = Instant::now();
        expect_ok("evict", other.evict(guard.name().as_str(), Evict::Holders).await);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await;
        assert_eq!(reason.ok(), Some(LostReason::Gone), "{guard:?}");
        // A renewal would find out later, at a third of the lease.
        assert!(began.elapsed() < long / 4, "{guard:?}: notified after {:?}", began.elapsed());
    }
    // A notification for one hold does not affect another hold of the same client.
    let kept = expect_ok("lock", mutex("evicted:not").lock().await);
    let gone = expect_ok("lock", mutex("evicted:beside").lock().await);
    assert_eq!(expect_ok("evict", other.evict(gone.name().as_str(), Evict::Holders).await), 1);
    let reason = tokio::time::timeout(PATIENCE, gone.lost()).await;
    assert_eq!(reason.ok(), Some(LostReason::Gone), "{gone:?}");
    assert!(kept.is_held(), "{kept:?}");
    expect_ok("release", kept.release().await);
}

/// If the store notifies watchers, they are notified long before they would poll.
pub async fn watcher_is_notified_without_polling(subject: &Subject) {
    if !subject.claims("to notify watchers", subject.guarantees().followed == Wakeup::Push) {
        return;
    }
    async fn next(changes: &mut LockEvents, wanted: LockEventKind) -> LockEvent {
        let notified = tokio::time::timeout(PATIENCE, async {
            loop {
                let change = expect_ok("next", changes.next().await);
                if change.became == wanted {
                    return change;
                }
            }
        });
        let Ok(notified) = notified.await else { panic!("no watcher was notified of {wanted:?}") };
        notified
    }
    let name = subject.name("notified:a");
    let (locks, others) = (subject.client().await, subject.client().await);
    // This waits until the watch is running and has reported everything that exists.
    let before = expect_ok("lock", locks.mutex(subject.name("notified:before")).lock().await);
    let mut of_all = others.watch_all(subject.name("notified:")).every(PATIENCE * 20);
    next(&mut of_all, LockEventKind::Holds).await;
    let first = expect_ok("lock", locks.mutex(&name).lock().await);
    assert_eq!(next(&mut of_all, LockEventKind::Holds).await.claim.token, Some(first.grant()));
    let mut of_one = others.watch(&name).every(PATIENCE * 20);
    next(&mut of_one, LockEventKind::Holds).await;
    let waiting = {
        let lock = locks.mutex(&name);
        tokio::spawn(async move { lock.lock().await })
    };
    next(&mut of_one, LockEventKind::Waits).await;
    let token = first.grant();
    expect_ok("release", first.release().await);
    let second = expect_ok("wait", expect_ok("join", waiting.await));
    assert_eq!(next(&mut of_one, LockEventKind::Ended).await.claim.token, Some(token));
    assert_eq!(next(&mut of_one, LockEventKind::Holds).await.claim.token, Some(second.grant()));
    expect_ok("release", second.release().await);
    assert_eq!(next(&mut of_one, LockEventKind::Ended).await.name.as_str(), name);
    expect_ok("release", before.release().await);
    let all =
        async { while next(&mut of_all, LockEventKind::Ended).await.name.as_str() == name {} };
    all.await;
}

/// In threads without a runtime, each term has a greater token, and a candidate that resigns
/// campaigns again.
pub async fn blocking_candidate_leads_until_it_resigns(subject: &Subject) {
    let name = subject.name("blocking-election");
    let candidates = [subject.client().await, subject.client().await];
    let mut observer = blocking::Client::from(candidates[0].clone()).election(&name).observe();
    let threads = candidates.map(|locks| {
        let election = blocking::Client::from(locks).election(&name);
        tokio::task::spawn_blocking(move || {
            let mut terms = Vec::new();
            election.lead(|guard| {
                assert!(guard.is_held());
                terms.push(guard.token());
                match terms.len() {
                    1 => ControlFlow::Continue(()),
                    _ => ControlFlow::Break(std::mem::take(&mut terms)),
                }
            })
        })
    });
    let mut all = Vec::new();
    for thread in threads {
        let terms = expect_ok("lead", expect_ok("join", thread.await));
        assert!(terms[0] < terms[1], "{terms:?}");
        all.extend(terms);
    }
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4, "two terms have the same token");
    // The lock has no leader now.
    let last = tokio::task::spawn_blocking(move || observer.changed());
    assert!(expect_ok("changed", expect_ok("join", last.await)).is_none());
}

pub async fn operator_sees_holders_and_waiters_and_evicts(subject: &Subject) {
    let name = subject.name("people");
    let (locks, other) = (subject.client().await, subject.client().await);
    let guard = expect_ok("lock", locks.mutex(&name).label("the nightly job").lock().await);
    let waiting = {
        let lock = other.mutex(&name).label("another");
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    until_waiting(&locks, &name, 1).await;
    let Some(info) = expect_ok("read", other.inspect(&name).await) else {
        panic!("the lock is not listed")
    };
    let Some(holder) = info.holders().next() else { panic!("no holder is listed") };
    assert_eq!(holder.token, Some(guard.grant()));
    assert_eq!(holder.holder.label, "the nightly job");
    assert_eq!(holder.holder.pid, std::process::id());
    assert_eq!(info.waiters().next().map(|w| w.holder.label.as_str()), Some("another"));
    let error = match other.mutex(&name).try_lock().await {
        Err(error) => error,
        Ok(guard) => panic!("{guard:?} was granted while another client holds the lock"),
    };
    assert!(error.holders().iter().any(|h| h.token == guard.grant()), "{error}");
    // Evicting a token that does not exist removes nothing. Evicting the right one hands the lock
    // over.
    let Some(no_such) = leasehold_core::Token::new(1) else { panic!("1 is not a token") };
    assert_eq!(expect_ok("evict", other.evict(&name, Evict::Token(no_such)).await), 0);
    assert_eq!(expect_ok("evict", other.evict(&name, Evict::Token(guard.grant())).await), 1);
    let Ok(next) = waiting.await else { panic!("the waiter failed") };
    let next = expect_ok("lock", next);
    assert!(next.token() > guard.token());
    let unused = subject.name("unused");
    assert!(expect_ok("inspect", locks.inspect(&unused).await).is_none());
    assert_eq!(expect_ok("evict", locks.evict(&unused, Evict::Holders).await), 0);
}

/// `holders` returns the holders that the whole queue shows, including their tokens.
pub async fn holders_query_matches_the_full_queue(subject: &Subject) {
    let locks = subject.client().await;
    let store = locks.store();
    for (i, shape @ (kind, _, capacity)) in shapes(subject).into_iter().enumerate() {
        let name = named(subject, &format!("holders-{i}"));
        let mut claims: Vec<Claim> =
            (0..subject.many(20)).map(|_| claim_of(&name, shape, PATIENCE)).collect();
        // One claim waits, possibly after readers.
        claims.push(claim_of(&name, (kind, capacity, capacity), PATIENCE));
        for claim in &claims {
            expect_ok("join", store.join(claim, Mode::Wait).await);
        }
        let Some(whole) = expect_ok("read", store.read(&name).await) else {
            panic!("the lock is not listed")
        };
        let shown = |info: &LockInfo| -> Vec<_> {
            info.holders().map(|c| (c.token, c.weight, c.holder.clone())).collect()
        };
        let Some(info) = expect_ok("holders", store.holders(&name, None).await) else {
            panic!("no holder is listed")
        };
        assert_eq!((info.kind, info.capacity), (whole.kind, whole.capacity));
        assert_eq!(shown(&info), shown(&whole), "{shape:?}");
        for (token, ..) in shown(&whole) {
            let info = expect_ok("holders", store.holders(&name, token).await);
            let is_shown = info.is_some_and(|info| info.holders().any(|c| c.token == token));
            assert!(is_shown, "{shape:?}: the holder with token {token:?} is not listed");
        }
        for claim in claims.iter().rev() {
            expect_ok("leave", store.leave(claim, None).await);
        }
        let info = expect_ok("holders", store.holders(&name, None).await);
        assert_eq!(
            info.map_or(0, |info| info.claims.len()),
            0,
            "{shape:?}: claims remain after all have left"
        );
    }
}

/// Work runs under its lock, whether it succeeds, fails or never ends.
pub async fn work_runs_under_its_lock(subject: &Subject) {
    let name = subject.name("work");
    let (locks, other) = (subject.client().await, subject.client().await);
    expect_ok("ping", locks.ping(PATIENCE).await);
    let mut options = leasehold_core::LockOptions::default();
    options.lease = subject.lease() * 10;
    options.label = "as it was set".into();
    let mutex = locks.mutex(&name).options(&options);
    let work = mutex.run(async |guard| {
        let info = expect_ok("read", other.inspect(&name).await);
        let label = info.and_then(|info| Some(info.holders().next()?.holder.label.clone()));
        assert_eq!(label.as_deref(), Some("as it was set"));
        assert!(guard.remaining() <= subject.lease() * 10 || !subject.guarantees().has_leases());
        kind_of("a second", other.mutex(&name).try_lock().await)
    });
    assert_eq!(expect_ok("run", work.await), ErrorKind::Contended);
    type Failed = Box<dyn std::error::Error + Send + Sync>;
    let failed = mutex.try_run(async |_| Err::<(), Failed>("no paper".into())).await;
    assert_eq!(failed.err().map(|why| why.to_string()).as_deref(), Some("no paper"));
    drop(taken(&other, &name).await);
    let work = mutex.run(async |_| {
        expect_ok("evict", other.evict(&name, Evict::Holders).await);
        std::future::pending::<()>().await;
    });
    let Ok(lost) = tokio::time::timeout(PATIENCE, work).await else {
        panic!("the work continues after the eviction")
    };
    assert_eq!(kind_of("work under an evicted hold", lost), ErrorKind::Lost);
}

/// The same lock works for code without a runtime.
pub async fn blocking_client_locks_like_the_async_client(subject: &Subject) {
    let name = subject.name("threads");
    let (locks, other) = (subject.client().await, subject.client().await);
    let thread = tokio::task::spawn_blocking(move || {
        let [locks, other] = [locks, other].map(blocking::Client::from);
        expect_ok("ping", locks.ping(PATIENCE));
        let guard = expect_ok("lock", locks.mutex(&name).lock());
        let second = other.mutex(&name);
        assert_eq!(kind_of("a second", second.try_lock()), ErrorKind::Contended);
        let short = Duration::from_millis(20);
        assert!(is_out_of_time(kind_of("a third", second.lock_timeout(short))));
        let first = guard.token();
        expect_ok("release", guard.release());
        let next = expect_ok("run", second.run(|guard| guard.token()));
        assert!(next > first);
        let failed = second.try_run(|_| Err::<(), _>(gone()));
        assert_eq!(kind_of("the work's own error", failed), ErrorKind::Closed);
        let both = expect_ok("all", locks.lock_all([format!("{name}:b"), format!("{name}:a")]));
        assert_eq!(expect_ok("list", other.list(&format!("{name}:"))).len(), 2);
        expect_ok("release", both.release());
        let seen = expect_ok("watch", {
            let guard = expect_ok("lock", second.lock());
            let change = locks.watch(&name).next();
            expect_ok("release", guard.release());
            change
        });
        assert_eq!((seen.name.as_str(), seen.became), (&*name, LockEventKind::Holds));
    });
    expect_ok("joined", thread.await);
}

/// Clients outside a namespace cannot reach its locks by accident, and notifications reach the
/// clients inside it.
pub async fn namespace_isolates_its_locks_and_delivers_notifications(subject: &Subject) {
    let locks = subject.client().await;
    let store = subject.client().await;
    let namespace = subject.name("acme/");
    let within = Builder::default().namespace(&namespace).store(store.store().clone());
    let within = expect_ok("a namespace", within);
    let guard = expect_ok("lock", within.mutex("job").lock().await);
    assert_eq!(guard.name().as_str(), "job");
    assert_eq!(expect_ok("list", within.list("").await).len(), 1);
    assert_eq!(expect_ok("watch", within.watch_all("").next().await).name.as_str(), "job");
    drop(expect_ok("another", locks.mutex(subject.name("job")).try_lock().await));
    let whole = format!("{namespace}job");
    let error = kind_of("the same", locks.mutex(&whole).try_lock().await);
    assert_eq!(error, ErrorKind::Contended);
    let is_told = subject.guarantees().evicted == Wakeup::Push;
    let long = Duration::from_secs(90).min(locks.store().longest_lease());
    let waits = {
        let mutex = within.mutex("job");
        let mutex = if is_told { mutex.lease(long) } else { mutex };
        tokio::spawn(async move { mutex.lock_timeout(PATIENCE).await })
    };
    until_waiting(&locks, &whole, 1).await;
    expect_ok("release", guard.release().await);
    let Ok(next) = waits.await else { panic!("the waiter failed") };
    let next = expect_ok("lock", next);
    let began = Instant::now();
    assert_eq!(expect_ok("evict", locks.evict(&whole, Evict::Holders).await), 1);
    let reason = tokio::time::timeout(PATIENCE, next.lost()).await;
    assert_eq!(reason.ok(), Some(LostReason::Gone));
    // The holder did not find out by its own renewal, which is due after a third of the lease.
    assert!(!is_told || began.elapsed() < long / 4, "notified after {:?}", began.elapsed());
}

pub async fn operator_evicts_a_waiter_by_its_token(subject: &Subject) {
    if !subject.claims("first come, first served", subject.guarantees().fifo) {
        return;
    }
    let name = named(subject, "evict-waiter");
    let (locks, other) = (subject.client().await, subject.client().await);
    let all = || claim_of(&name, MUTEX, PATIENCE * 4);
    let [holder, first, second] = [all(), all(), all()];
    holds(&locks, &holder).await;
    stands(&locks, &first).await;
    stands(&locks, &second).await;
    let Some(info) = expect_ok("read", other.inspect(name.as_str()).await) else {
        panic!("the lock is not listed")
    };
    let tokens: Vec<_> = info.waiters().map(|waiter| waiter.token).collect();
    let [first_token, _] = tokens[..] else { panic!("two clients should wait: {info:?}") };
    if !subject.claims("tokens of waiters", first_token.is_some()) {
        return;
    }
    let Some(token) = first_token else { return };
    assert_eq!(expect_ok("evict", other.evict(name.as_str(), Evict::Token(token)).await), 1);
    assert_eq!(expect_ok("evict", other.evict(name.as_str(), Evict::Token(token)).await), 0);
    let after = renewed(&locks, &first).await;
    assert!(matches!(after, Renewal::Lost), "the evicted waiter: {after:?}");
    let after = renewed(&locks, &holder).await;
    assert!(matches!(after, Renewal::Holding { .. }), "the holder: {after:?}");
    let after = renewed(&locks, &second).await;
    assert!(matches!(after, Renewal::Waiting(_)), "the next waiter, during the hold: {after:?}");
    assert!(expect_ok("leave", locks.store().leave(&holder, None).await));
    let after = renewed(&locks, &second).await;
    assert!(
        matches!(after, Renewal::Holding { .. }),
        "the next waiter, after the release: {after:?}"
    );
    assert!(expect_ok("leave", locks.store().leave(&second, None).await));
}

pub async fn released_permits_wake_all_waiters_that_fit(subject: &Subject) {
    if !subject.claims("semaphores", subject.guarantees().keeps(Kind::Semaphore)) {
        return;
    }
    let name = subject.name("permits");
    let (locks, other) = (subject.client().await, subject.client().await);
    let all = expect_ok("acquire", locks.semaphore(&name, 3).acquire_many(3).await);
    let mut waiting = Vec::new();
    for i in 0..4 {
        let client = if i % 2 == 0 { &locks } else { &other };
        let lock = client.semaphore(&name, 3);
        waiting.push(tokio::spawn(async move { lock.acquire_timeout(PATIENCE).await }));
        until_waiting(&locks, &name, i + 1).await;
    }
    expect_ok("release", all.release().await);
    let mut held = Vec::new();
    for task in waiting.drain(..3) {
        let Ok(permit) = task.await else { panic!("a waiter failed") };
        held.push(expect_ok("acquire", permit));
    }
    until_waiting(&locks, &name, 1).await;
    // Whichever of the three is released first makes room for the fourth.
    drop(held.swap_remove(1));
    let Some(last) = waiting.pop() else { panic!("no waiter is left") };
    let Ok(last) = last.await else { panic!("the last waiter failed") };
    assert!(expect_ok("acquire", last).is_held());
}

pub async fn delayed_and_duplicated_messages_do_not_break_exclusion(subject: &Subject) {
    let name = subject.name("wire");
    let clients = [subject.faulty().await, subject.faulty().await];
    let (inside, last) = (AtomicI64::new(0), AtomicU64::new(0));
    let short = Duration::from_millis(20);
    let one = async |i: usize| {
        let mut rng = SeededRng::new(7 + i as u64);
        let (locks, faults) = &clients[i % 2];
        for _ in 0..10 {
            let op = [Op::Join, Op::Leave, Op::Changed, Op::Renew][rng.below(4)];
            let fault = [
                Fault::DelayRequest(short),
                Fault::DelayReply(short),
                Fault::Double,
                Fault::ErrorAfter,
                Fault::ErrorBefore,
            ][rng.below(5)];
            faults.next(op, 1, fault);
            let lock = locks.mutex(&name).lease(PATIENCE);
            let guard = expect_ok("lock", lock.lock_timeout(PATIENCE * 3).await);
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two clients hold the lock");
            let token = guard.token().get();
            assert!(token > last.swap(token, Ordering::SeqCst), "tokens out of order");
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(guard.is_held());
            inside.fetch_sub(1, Ordering::SeqCst);
            expect_ok("release", guard.release().await);
        }
    };
    join_all((0..6).map(one)).await;
}

pub async fn waiting_ends_at_its_timeout(subject: &Subject) {
    let name = subject.name("timeout");
    let (locks, other) = (subject.client().await, subject.client().await);
    let guard = taken(&locks, &name).await;
    // The error names the holders if the store answers in time.
    eventually("the error names the holder", async || {
        let limit = Duration::from_millis(120);
        let start = Instant::now();
        let error = match other.mutex(&name).lock_timeout(limit).await {
            Err(error) => error,
            Ok(guard) => panic!("{guard:?} was granted while another client holds the lock"),
        };
        assert!(is_out_of_time(error.kind()), "{error}");
        assert!(start.elapsed() >= limit);
        error.holders().iter().any(|h| h.token == guard.grant())
    })
    .await;
    eventually("the waiter has left the queue", async || waiters(&locks, &name).await == 0).await;
    // A store that does not answer is distinguished from a held lock.
    let (deaf, faults) = subject.faulty().await;
    faults.always(Op::Join, Fault::LoseRequest);
    let start = Instant::now();
    let lost = deaf.mutex(&name).lease(subject.lease()).try_lock().await;
    assert_eq!(kind_of("the store did not reply", lost), ErrorKind::Unreachable);
    let lost = deaf.mutex(&name).lease(subject.lease()).lock().await;
    assert_eq!(kind_of("the store did not reply", lost), ErrorKind::Unreachable);
    // The limit is longer for stores whose answers wait for replicas. The try needs one such
    // answer, and the wait needs two: its own time limit and its last try.
    let confirming = locks.store().info().replication_timeout * 3;
    assert!(start.elapsed() < PATIENCE + confirming, "{:?}", start.elapsed());
    expect_ok("release", guard.release().await);
}

pub async fn store_behaves_like_the_reference_queue(subject: &Subject) {
    if !subject.claims("first come, first served", subject.guarantees().fifo) {
        return;
    }
    let locks = subject.client().await;
    for kind in subject.guarantees().kinds.clone().iter() {
        for seed in 1..=subject.many(5) as u64 {
            let name = named(subject, &format!("reference-{kind}-{seed}"));
            compare(&**locks.store(), &name, *kind, seed * 7919, 300).await;
        }
    }
}

// --- election ----------------------------------------------------------------------------------

/// If a term is ended from outside, its work is dropped. Another term follows, of this candidate or
/// the other. A candidate that resigns campaigns again. Each term has a greater token than all
/// before.
pub async fn election_continues_after_lost_terms(subject: &Subject) {
    let name = subject.name("election");
    let clients = [subject.client().await, subject.client().await];
    let (terms, leading) = (std::sync::Mutex::new(Vec::new()), AtomicI64::new(0));
    let last: std::sync::Mutex<Option<Watch>> = std::sync::Mutex::new(None);
    let mut observer = clients[0].election(&name).observe();
    assert!(
        expect_ok("observe", observer.changed().await).is_none(),
        "a leader is reported before the first term"
    );
    let first = taken(&clients[1], &name).await;
    let leader = expect_ok("observe", observer.changed().await);
    assert_eq!(leader.and_then(|leader| leader.token), Some(first.grant()));
    let before = first.token();
    expect_ok("release", first.release().await);
    let pauses = Arc::new(AtomicU64::new(0));
    let one = async |i: usize| {
        let observed_pauses = pauses.clone();
        let election = clients[i].election(&name).max_hold(Duration::from_millis(300));
        let election = election.on_pause(move |error, _| {
            assert_eq!(error.lost_reason(), Some(LostReason::MaxHold), "{error}");
            observed_pauses.fetch_add(1, Ordering::SeqCst);
        });
        let work = async |guard: MutexGuard| {
            leading.fetch_add(1, Ordering::SeqCst);
            let before = last.lock().map(|mut last| last.replace(guard.watch()));
            let before = before.ok().flatten().map(|before| before.state());
            let still = matches!(before, Some(State::Held | State::AtRisk(_)));
            assert!(guard.is_held() && !still, "two clients lead: {before:?} and {guard:?}");
            let term = {
                let mut terms = terms.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                terms.push(guard.token());
                terms.len()
            };
            // The work is dropped, however the term ends.
            let _ended = Ended(&leading);
            match term {
                1 | 3 => std::future::pending().await,
                2 | 4 => std::ops::ControlFlow::Continue(()),
                _ => std::ops::ControlFlow::Break(()),
            }
        };
        expect_ok("lead", election.lead(work).await);
    };
    join_all((0..2).map(one)).await;
    let terms = terms.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    assert!(terms.len() >= 6 && terms.is_sorted_by(|a, b| a < b), "{terms:?}");
    assert!(terms.iter().all(|term| *term > before), "{terms:?}");
    assert_eq!(leading.into_inner(), 0, "work continues after its term");
    assert_eq!(pauses.load(Ordering::SeqCst), 2, "number of pauses after lost terms");
    assert!(
        expect_ok("observe", observer.changed().await).is_none(),
        "a leader is reported after the last term"
    );
    is_free_soon(&clients[0], &name).await;
}

struct Ended<'a>(&'a AtomicI64);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

// --- several locks at once ---------------------------------------------------------------------

fn several(subject: &Subject, what: &str) -> [String; 3] {
    // The names are not in the order in which they are locked.
    ["b", "a", "c"].map(|which| subject.name(&format!("several-{what}-{which}")))
}

/// Waits until all locks have no holder and no waiter.
async fn all_are_free(locks: &Client, names: &[String]) {
    for name in names {
        eventually(name, async || expect_ok("read", locks.inspect(name).await).is_none()).await;
    }
}

pub async fn lock_all_acquires_all_locks_or_none(subject: &Subject) {
    let names = several(subject, "together");
    let [b, _, c] = &names;
    let (locks, other) = (subject.client().await, subject.client().await);
    let all = expect_ok("lock_all", locks.lock_all(names.iter().chain([b])).await);
    assert_eq!(all.iter().count(), 3, "a lock that is named twice must be acquired once");
    assert!(all.is_held() && all.remaining() > Duration::ZERO);
    for name in &names {
        let Some(guard) = all.get(name) else { panic!("{all:?} does not contain {name}") };
        assert!(guard.is_held());
        assert_eq!(
            kind_of("a second holder", other.mutex(name).try_lock().await),
            ErrorKind::Contended
        );
    }
    assert!(all.get("another").is_none());
    expect_ok("release", all.release().await);
    all_are_free(&other, &names).await;
    // The last lock in the order is held. A failed attempt keeps none of the others.
    let held = taken(&other, c).await;
    for (what, limit) in [("now", None), ("soon", Some(Duration::from_millis(500)))] {
        let asked = match limit {
            None => locks.try_lock_all(&names).await,
            Some(limit) => locks.lock_all_timeout(&names, limit).await,
        };
        let error = match asked {
            Err(error) => error,
            Ok(all) => panic!("{all:?} was granted while another client holds one of the locks"),
        };
        let is_expected = match limit {
            None => error.kind() == ErrorKind::Contended,
            Some(_) => is_out_of_time(error.kind()),
        };
        assert!(is_expected, "{what}: {error}");
        assert_eq!(error.name().map(Name::as_str), Some(c.as_str()), "{what}: {error}");
        all_are_free(&other, &names[..2]).await;
    }
    // A client that stops waiting keeps none of the locks either.
    until_waiting(&other, c, 0).await;
    {
        let mut waiting = pin!(locks.lock_all(&names));
        eventually("the client waits for the last lock", async || {
            assert!(poll_once(&mut waiting).await.is_pending());
            waiters(&other, c).await == 1
        })
        .await;
        assert_eq!(
            kind_of("a lock that is held during the wait", other.mutex(b).try_lock().await),
            ErrorKind::Contended
        );
    }
    all_are_free(&other, &names[..2]).await;
    expect_ok("release", held.release().await);
    let both_ways = [locks.mutex(b).into(), locks.rwlock(b).read_request()];
    assert_eq!(
        kind_of("one lock with two kinds", locks.lock_all(both_ways).await),
        ErrorKind::Config
    );
    let none: [&str; 0] = [];
    assert!(expect_ok("no locks at all", locks.lock_all(none).await).is_held());
    all_are_free(&other, &names).await;
}

pub async fn multi_guard_is_lost_with_any_of_its_locks(subject: &Subject) {
    let names = several(subject, "kinds");
    let [a, b, c] = &names;
    let locks = subject.client().await;
    let keeps = |kind| subject.guarantees().keeps(kind);
    let ends_soon = locks.mutex(b).max_hold(Duration::from_millis(400));
    let mut wanted = vec![ends_soon.into()];
    if keeps(Kind::RwLock) {
        wanted.push(locks.rwlock(a).read_request());
    }
    if keeps(Kind::Semaphore) {
        wanted.push(locks.semaphore(c, 3).permit_request(2));
    }
    let all = expect_ok("lock_all", locks.lock_all(wanted).await);
    if keeps(Kind::RwLock) {
        drop(expect_ok("another reader", locks.rwlock(a).try_read().await));
        assert_eq!(kind_of("a writer", locks.rwlock(a).try_write().await), ErrorKind::Contended);
    }
    if keeps(Kind::Semaphore) {
        assert_eq!(all.get(c).map(|guard| guard.permits()), Some(2));
    }
    let (lost, reason) = all.lost().await;
    assert_eq!((lost.as_str(), reason), (b.as_str(), LostReason::MaxHold));
    assert!(!all.is_held());
    assert_eq!(kind_of("ensure after a loss", all.ensure(Duration::ZERO)), ErrorKind::Lost);
    let error = match all.release().await {
        Err(error) => error,
        Ok(released) => panic!("the release of lost locks succeeded: {released:?}"),
    };
    assert_eq!(error.name().map(Name::as_str), Some(b.as_str()), "{error}");
    all_are_free(&locks, &names).await;
}

/// Clients name the locks in different orders. They never deadlock, and each lock has one holder at
/// a time.
pub async fn lock_all_in_different_orders_never_deadlocks(subject: &Subject) {
    let names = several(subject, "order");
    let clients = [subject.client().await, subject.client().await];
    let inside = [(); 3].map(|()| AtomicI64::new(0));
    let one = async |i: usize| {
        for round in 0..4 {
            let (first, second) = ((i + round) % 3, (i * 2 + round + 1) % 3);
            let two = [&names[first], &names[second]];
            let all = expect_ok("lock_all", clients[i % 2].lock_all_timeout(two, PATIENCE).await);
            for which in BTreeSet::from([first, second]) {
                assert_eq!(
                    inside[which].fetch_add(1, Ordering::SeqCst),
                    0,
                    "another client holds the lock"
                );
            }
            tokio::task::yield_now().await;
            for which in BTreeSet::from([first, second]) {
                inside[which].fetch_sub(1, Ordering::SeqCst);
            }
            expect_ok("release", all.release().await);
        }
    };
    join_all((0..6).map(one)).await;
    all_are_free(&clients[0], &names).await;
}

/// A writer becomes a reader. The readers that are next in the queue are granted the lock too, up
/// to the next writer. That writer is granted when they have released.
pub async fn downgrade_grants_waiting_readers_up_to_the_next_writer(subject: &Subject) {
    if !subject.claims("downgrade", subject.guarantees().downgrades) {
        return;
    }
    let (a, b) = (subject.client().await, subject.client().await);
    let name = subject.name("downgrade");
    let lock = a.rwlock(&name);
    let guard = expect_ok("write", lock.write().await);
    let (token, shown) = (guard.grant(), guard.sequencer());
    let mut waiting = Vec::new();
    for (place, writes) in [false, false, true, false].into_iter().enumerate() {
        let lock = b.rwlock(&name);
        waiting.push(tokio::spawn(async move {
            let guard = match writes {
                true => lock.write_timeout(PATIENCE).await.map(Hold::from),
                false => lock.read_timeout(PATIENCE).await.map(Hold::from),
            };
            expect_ok("wait", guard)
        }));
        until_waiting(&a, &name, place + 1).await;
    }
    expect_ok("check", b.check(&shown).await);
    expect_ok("downgrade", downgrade(&guard).await);
    assert_eq!((guard.grant(), guard.permits()), (token, 1));
    assert!(guard.is_held());
    let mut readers = Vec::new();
    for reader in waiting.drain(..2) {
        readers.push(expect_ok("reader", reader.await));
    }
    // The writer waits, and so does the reader after it.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "a waiter was granted too early");
    assert_eq!(waiters(&a, &name).await, 2);
    assert_eq!(kind_of("a writer's sequencer", b.check(&shown).await), ErrorKind::Lost);
    expect_ok("check", b.check(&guard.sequencer()).await);
    let fenced = leasehold_core::fence::Fence::fence(&guard);
    assert_eq!(kind_of("a fence", fenced), ErrorKind::Unsupported);
    expect_ok("the same request again", downgrade(&guard).await);
    for guard in readers.into_iter().chain([guard.into()]) {
        expect_ok("release", guard.release().await);
    }
    for waiting in waiting {
        expect_ok("release", expect_ok("next", waiting.await).release().await);
    }
    eventually("empty", async || expect_ok("read", a.inspect(&name).await).is_none()).await;
}

/// A reader becomes a writer immediately or not at all. That is impossible for a writer that was
/// downgraded to a reader.
pub async fn upgrade_succeeds_only_without_other_holders(subject: &Subject) {
    if !subject.claims("try_upgrade", subject.guarantees().upgrades) {
        return;
    }
    let (a, b) = (subject.client().await, subject.client().await);
    let name = subject.name("upgrade");
    let (first, second) = (a.rwlock(&name), b.rwlock(&name));
    let mine = expect_ok("read", first.read().await);
    let other = expect_ok("read", second.read().await);
    assert_eq!(
        kind_of("an upgrade while a later reader holds the lock", try_upgrade(&mine).await),
        ErrorKind::Contended
    );
    assert_eq!(
        kind_of("an upgrade while an earlier reader holds the lock", try_upgrade(&other).await),
        ErrorKind::Contended
    );
    assert_eq!(mine.permits(), 1);
    expect_ok("release", mine.release().await);
    // A waiting writer continues to wait.
    let waiting = {
        let lock = first.clone();
        tokio::spawn(async move { expect_ok("write", lock.write_timeout(PATIENCE).await) })
    };
    until_waiting(&b, &name, 1).await;
    let token = other.grant();
    expect_ok("an upgrade by the only reader", try_upgrade(&other).await);
    expect_ok("the same request again", try_upgrade(&other).await);
    assert_eq!((other.grant(), other.permits()), (token, leasehold_core::MAX_READERS));
    expect_ok("check", a.check(&other.sequencer()).await);
    assert_eq!(other.fencing_token().map(leasehold_core::Token::from), Some(token));
    assert!(!waiting.is_finished());
    expect_ok("downgrade", downgrade(&other).await);
    assert_eq!(kind_of("again", try_upgrade(&other).await), ErrorKind::Unsupported);
    expect_ok("release", other.release().await);
    let next = expect_ok("next", waiting.await);
    assert!(next.grant() > token);
    expect_ok("release", next.release().await);
    let free = expect_ok("read", first.read().await);
    expect_ok("an upgrade by the only reader", try_upgrade(&free).await);
    assert_eq!(
        kind_of("a reader while a writer holds the lock", second.try_read().await),
        ErrorKind::Contended
    );
    expect_ok("release", free.release().await);
    drop(expect_ok("free", second.try_write().await));
}

/// If a downgrade's reply is lost, the client finds out that it was executed. The hold continues.
pub async fn downgrade_with_a_lost_reply_takes_effect_once(subject: &Subject) {
    if !subject.claims("downgrade", subject.guarantees().downgrades) {
        return;
    }
    let ((locks, faults), witness) = (subject.faulty().await, subject.client().await);
    // No hold expires here. A longer lease leaves a busy machine more time.
    let lease = subject.lease() * 2;
    for (n, fault) in [Fault::ErrorAfter, Fault::ErrorBefore, Fault::Double].into_iter().enumerate()
    {
        let name = subject.name(&format!("downgrade-{n}"));
        let guard = expect_ok("write", locks.rwlock(&name).lease(lease).write().await);
        faults.next(Op::Convert, 1, fault);
        expect_ok("downgrade", downgrade(&guard).await);
        let other = expect_ok(
            "a reader while another reader holds the lock",
            witness.rwlock(&name).try_read().await,
        );
        expect_ok("release", other.release().await);
        // The hold is renewed as before.
        tokio::time::sleep(lease * 3 / 2).await;
        assert!(guard.is_held(), "{fault:?}: {guard:?}");
        assert_eq!(
            kind_of(
                "a writer while a reader holds the lock",
                witness.rwlock(&name).try_write().await
            ),
            ErrorKind::Contended
        );
        expect_ok("release", guard.release().await);
        drop(expect_ok("free", witness.rwlock(&name).try_write().await));
    }
}

/// A dropped downgrade leaves a reader, whether or not the store executed it. A release ends the
/// hold completely.
pub async fn a_dropped_downgrade_leaves_a_reader(subject: &Subject) {
    if !subject.claims("downgrade", subject.guarantees().downgrades) {
        return;
    }
    let ((locks, faults), witness) = (subject.faulty().await, subject.client().await);
    for fault in [Fault::LoseRequest, Fault::LoseReply] {
        let name = subject.name("dropped-downgrade");
        let guard = expect_ok("write", locks.rwlock(&name).write().await);
        faults.next(Op::Convert, 1, fault);
        let dropped = tokio::time::timeout(Duration::from_millis(30), downgrade(&guard)).await;
        assert!(dropped.is_err(), "the downgrade was answered");
        assert_eq!(guard.permits(), 1);
        assert_eq!(
            kind_of("an upgrade after a downgrade", try_upgrade(&guard).await),
            ErrorKind::Unsupported
        );
        expect_ok("downgrade", downgrade(&guard).await);
        drop(expect_ok(
            "a reader while another reader holds the lock",
            witness.rwlock(&name).try_read().await,
        ));
        expect_ok("release", guard.release().await);
        eventually("free", async || witness.rwlock(&name).try_write().await.is_ok()).await;
    }
}

/// An evicted hold cannot be converted. A store without conversions returns an error and changes
/// nothing.
pub async fn unsupported_or_lost_conversion_returns_an_error(subject: &Subject) {
    let (a, b) = (subject.client().await, subject.client().await);
    let name = subject.name("convert");
    if !subject.claims("read-write locks", subject.guarantees().keeps(Kind::RwLock)) {
        return;
    }
    if !subject.guarantees().upgrades {
        let reader = expect_ok("read", a.rwlock(&name).read().await);
        assert_eq!(kind_of("try_upgrade", try_upgrade(&reader).await), ErrorKind::Unsupported);
        assert_eq!(reader.permits(), 1);
        expect_ok("release", reader.release().await);
    }
    let guard = expect_ok("write", a.rwlock(&name).write().await);
    if !subject.guarantees().downgrades {
        assert_eq!(kind_of("downgrade", downgrade(&guard).await), ErrorKind::Unsupported);
        assert_eq!(guard.permits(), leasehold_core::MAX_READERS);
        assert_eq!(
            kind_of(
                "a reader while another reader holds the lock",
                b.rwlock(&name).try_read().await
            ),
            ErrorKind::Contended
        );
        expect_ok("release", guard.release().await);
        return;
    }
    assert_eq!(expect_ok("evict", b.evict(&name, Evict::Holders).await), 1);
    let next = expect_ok("write", b.rwlock(&name).write().await);
    assert_eq!(kind_of("evicted", downgrade(&guard).await), ErrorKind::Lost);
    expect_ok("release", next.release().await);
    assert!(!guard.is_held());
}
