//! Helpers that the tests of the stores share: time limits, clients, a witness of mutual exclusion,
//! and checks that every store must pass.

pub mod doctor;
pub mod power;
mod pushes;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::store::{Claim, Evict, Joined, Mode, Signal};
use leasehold::{Builder, Client, Error, ErrorKind, Hold, Kind, MutexGuard, Name};
use tokio::task::JoinHandle;

pub use pushes::pushes_agree;

/// Time limit for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// URL parameter for a session so long that a test which counts requests sees no renewal of it.
pub const LONG_SESSION: &str = "session_ms=3600000";

/// Runs a case, including the start of its servers. A case that hangs fails.
pub fn run(case: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(3).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE * 5, case).await.expect("the case hangs");
    });
}

/// Connects to this store. Retries while the store is unreachable, because servers may answer too
/// late on a busy machine.
pub async fn connect(url: &str) -> Client {
    connect_with(leasehold::builder, url).await
}

/// Connects like [`connect`], with a builder's options.
pub async fn connect_with(builder: impl Fn() -> Builder, url: &str) -> Client {
    let end = Instant::now() + PATIENCE;
    loop {
        match builder().connect(url).await {
            Ok(locks) => return locks,
            Err(e) if e.kind() == ErrorKind::Unreachable && Instant::now() < end => {}
            Err(e) => panic!("{e}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the condition is true.
///
/// # Panics
/// If that takes longer than [`PATIENCE`]. The message contains `what`.
pub async fn until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true().await {
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until this many clients wait for the lock.
pub async fn until_waiting(locks: &Client, name: &str, count: usize) {
    let is_so = async || {
        let info = locks.inspect(name).await.unwrap();
        info.is_some_and(|info| info.waiters().count() == count)
    };
    until(&format!("{count} waiters"), is_so).await;
}

/// Returns how many claims are in the queue, including holders. Returns `None` while the store is
/// unreachable, as during the election of a leader.
pub async fn queued(locks: &Client, name: &str) -> Option<usize> {
    match locks.inspect(name).await {
        Ok(info) => Some(info.map_or(0, |info| info.claims.len())),
        Err(error) if error.kind() == ErrorKind::Unreachable => None,
        Err(error) => panic!("{error}"),
    }
}

/// Waits until this many claims are in the queue, including holders.
pub async fn until_queued(locks: &Client, name: &str, count: usize) {
    let is_so = async || queued(locks, name).await == Some(count);
    until(&format!("{count} claims in the queue"), is_so).await;
}

/// Waits for a lock in a task. Returns the guard, and whether `released` was set by then.
pub fn lock_in_task(
    locks: &Client,
    name: &str,
    released: &Arc<AtomicBool>,
) -> JoinHandle<(MutexGuard, bool)> {
    let (lock, released) = (locks.mutex(name), released.clone());
    tokio::spawn(async move {
        let guard = lock.lock().await.expect("cannot acquire the lock");
        (guard, released.load(Ordering::SeqCst))
    })
}

/// Checks that holders follow one another, with increasing tokens.
#[derive(Debug, Default)]
pub struct Witness {
    inside: AtomicBool,
    last: AtomicU64,
    count: AtomicU64,
}

impl Witness {
    /// Records that this guard has acquired the lock.
    pub fn enter(&self, guard: &MutexGuard) {
        assert!(!self.inside.swap(true, Ordering::SeqCst), "two clients hold the lock");
        let token = guard.token().get();
        let before = self.last.swap(token, Ordering::SeqCst);
        assert!(before < token, "token {token} after {before}");
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that the holder is about to release the lock.
    pub fn leave(&self) {
        assert!(self.inside.swap(false, Ordering::SeqCst), "another client has already released");
    }

    /// Returns how many holds there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// Releases the lock. If the server is unreachable, the client continues with the release in the
/// background.
pub async fn release(hold: impl Into<Hold>) {
    match hold.into().release().await {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
    }
}

/// Runs `tasks` tasks on each client, each of which acquires the mutex `rounds` times. Checks that
/// the number of holds is exact.
pub async fn hammer(clients: &[Client], name: &str, tasks: usize, rounds: u64) -> Arc<Witness> {
    let witness = Arc::<Witness>::default();
    let mut running = tokio::task::JoinSet::new();
    for client in clients {
        for _ in 0..tasks {
            // The lease outlasts an outage of the store.
            let mutex = client.mutex(name).lease(Duration::from_secs(60));
            let witness = witness.clone();
            running.spawn(async move {
                for _ in 0..rounds {
                    let guard = mutex.lock().await.unwrap_or_else(|error| panic!("{error}"));
                    witness.enter(&guard);
                    tokio::task::yield_now().await;
                    witness.leave();
                    release(guard).await;
                }
            });
        }
    }
    while let Some(done) = running.join_next().await {
        done.expect("a task panicked");
    }
    assert_eq!(witness.count(), (clients.len() * tasks) as u64 * rounds);
    witness
}

/// Runs [`hammer`] repeatedly until `breaking` has returned, so that some runs certainly overlap
/// with it.
pub async fn hammer_while(
    clients: &[Client],
    name: &str,
    tasks: usize,
    rounds: u64,
    breaking: impl FnOnce() + Send + 'static,
) {
    let breaking = tokio::task::spawn_blocking(breaking);
    loop {
        hammer(clients, name, tasks, rounds).await;
        if breaking.is_finished() {
            break;
        }
    }
    breaking.await.unwrap();
}

/// Checks that the error has this kind and one line, and that it does not contain the secret in any
/// form.
#[track_caller]
pub fn assert_told(error: &Error, kind: ErrorKind, secret: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(
        format!("{error:#}").lines().count(),
        1,
        "the error has more than one line: {error}"
    );
    let mut all = format!("{error:#}\n{error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        all += &format!("{cause}\n{cause:?}");
        source = cause.source();
    }
    assert!(!all.contains(secret), "the password is shown: {all}");
}

/// S06: `ours` acquires and releases the lock through the proxy, which drops all replies: first
/// from the first one on, then from the second one on, and so on. Each operation must still be
/// executed exactly once. `witness` connects without the proxy, and acquires the lock afterwards.
pub async fn lost_replies_are_recognized(
    proxy: &testbed::Proxy,
    ours: &Client,
    witness: &Client,
    most: usize,
) {
    let name = "s06-replies";
    let mut last = 0;
    for replies in 0..most {
        proxy.drop_replies_after(replies);
        let taking = {
            let lock = ours.mutex(name);
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        tokio::time::sleep(Duration::from_millis(60)).await;
        proxy.pass_replies();
        proxy.cut();
        let guard = taking.await.unwrap().unwrap();
        assert!(guard.token().get() > last);
        last = guard.token().get();
        let shown = witness.inspect(name).await.unwrap().unwrap();
        assert_eq!(shown.claims.len(), 1, "{shown:?}");
        proxy.drop_replies_after(0);
        let releasing = tokio::spawn(guard.release());
        tokio::time::sleep(Duration::from_millis(20)).await;
        proxy.pass_replies();
        proxy.cut();
        let _ = releasing.await.unwrap();
        let next = witness.mutex(name).lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token().get() > last);
        last = next.token().get();
        next.release().await.unwrap();
    }
}

/// Evicts a waiter of `ours`, which uses the proxy, while the proxy refuses connections. Then the
/// holder releases the lock, and the next waiter acquires it. The evicted waiter must not be
/// granted the lock as well.
pub async fn evicted_waiter_is_never_granted(
    proxy: &testbed::Proxy,
    ours: &Client,
    others: &Client,
) {
    for round in 0..8 {
        let name = Name::new(format!("evicted-while-cut-{round}")).unwrap();
        let [holder, evicted, next] = [(); 3].map(|()| {
            let mut claim = Claim::new(name.clone(), Kind::Mutex, 1, 1).unwrap();
            (claim.lease, claim.waiter_lease) = (Duration::from_secs(55), Duration::from_secs(50));
            claim
        });
        let joined = others.store().join(&holder, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let joined = ours.store().join(&evicted, Mode::Wait).await.unwrap();
        let Joined::Waiting(place) = joined else { panic!("{joined:?}") };
        let token = place.token.expect("the store does not assign tokens when claims join");
        let joined = others.store().join(&next, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        proxy.refuse(true);
        assert_eq!(others.store().evict(&name, Evict::Token(token)).await.unwrap(), 1);
        assert!(others.store().leave(&holder, None).await.unwrap());
        let joined = others.store().join(&next, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        proxy.refuse(false);
        let signal = tokio::time::timeout(PATIENCE, ours.store().changed(&evicted)).await;
        assert!(
            matches!(signal, Ok(Ok(Signal::Ask))),
            "notified with {signal:?} while another client holds the lock"
        );
        assert!(others.store().leave(&next, None).await.unwrap());
    }
}

/// Lets 32 clients acquire the same lock repeatedly, and checks that each gets about the same
/// share. Holds during `warm` do not count, because all clients arrive at once. Then the test runs
/// for at least `time`, and for a fixed number of holds, so that each hold is a small part even on
/// a busy machine. A server on such a machine may not reply in time. The client then tries again.
pub async fn thirty_two_get_on(url: &str, warm: Duration, time: Duration) {
    const CLIENTS: usize = 32;
    const TURNS: u64 = 12 * CLIENTS as u64;
    let ready = Arc::new(tokio::sync::Barrier::new(CLIENTS));
    let (inside, all) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..CLIENTS {
        let locks = connect(url).await;
        let (ready, inside, all) = (ready.clone(), inside.clone(), all.clone());
        tasks.push(tokio::spawn(async move {
            ready.wait().await;
            let mut turns = 0_u32;
            let begin = Instant::now() + warm;
            while begin.elapsed() < time || all.load(Ordering::SeqCst) < TURNS {
                let guard = match locks.mutex("r10").lock_timeout(PATIENCE).await {
                    Ok(guard) => guard,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                        assert!(begin.elapsed() < PATIENCE * 2, "the server remains unreachable");
                        continue;
                    }
                };
                assert!(!inside.swap(true, Ordering::SeqCst), "two clients hold the lock");
                if Instant::now() > begin {
                    turns += 1;
                    all.fetch_add(1, Ordering::SeqCst);
                }
                inside.store(false, Ordering::SeqCst);
                if let Err(error) = guard.release().await {
                    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                }
            }
            f64::from(turns)
        }));
    }
    let mut turns = Vec::new();
    for task in tasks {
        turns.push(task.await.unwrap());
    }
    let (sum, squares) = (turns.iter().sum::<f64>(), turns.iter().map(|n| n * n).sum::<f64>());
    let jain = sum * sum / (CLIENTS as f64 * squares);
    println!("{sum} turns among {CLIENTS}, Jain {jain:.3}");
    let all_had_some = turns.iter().all(|n| *n >= 2.0) && sum >= 3.0 * CLIENTS as f64;
    assert!(all_had_some && jain >= 0.95, "{sum}, Jain {jain:.3}: {turns:?}");
}

/// Acquires the locks with these names, and checks that they are listed together with the `foreign`
/// ones. Returns the guards.
pub async fn names_are_listed_beside(
    locks: &Client,
    names: &[&str],
    foreign: &[&str],
) -> Vec<MutexGuard> {
    let mut guards = Vec::new();
    for name in names {
        guards.push(locks.mutex(*name).try_lock().await.unwrap());
    }
    let listed = locks.list("").await.unwrap();
    let mut shown: Vec<&str> = listed.iter().map(|lock| lock.name.as_str()).collect();
    let mut wanted = [names, foreign].concat();
    shown.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(shown, wanted);
    guards
}
