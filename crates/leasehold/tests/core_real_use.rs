//! What real use found in the client, whatever the store: each test failed once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::store::{
    Evict, Joined, LockInfo, MemoryStore, Mode, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold::{Builder, Claim, ErrorKind, Leasehold, Name, Released, Result};
use tokio::sync::watch;

/// What the network does to a kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Network {
    #[default]
    Well,
    /// Nothing arrives.
    Silent,
    /// What is asked is done, and the answer is lost.
    Deaf,
}

/// A memory store at the other end of a network: renewals go one way, all else another.
#[derive(Debug)]
struct Remote {
    inner: Arc<MemoryStore>,
    info: StoreInfo,
    renewals: watch::Sender<Network>,
    others: watch::Sender<Network>,
    /// How long a `leave` takes.
    leaving: Duration,
    renewals_sent: AtomicUsize,
    joins_sent: AtomicUsize,
}

impl Remote {
    fn new(inner: &Arc<MemoryStore>) -> Self {
        Self {
            inner: inner.clone(),
            info: StoreInfo::new("memory:", inner.info().guarantees.clone()),
            renewals: watch::Sender::default(),
            others: watch::Sender::default(),
            leaving: Duration::ZERO,
            renewals_sent: AtomicUsize::new(0),
            joins_sent: AtomicUsize::new(0),
        }
    }

    fn all(&self, network: Network) {
        self.renewals.send_replace(network);
        self.others.send_replace(network);
    }
}

/// Does `work` over a network that may be silent or deaf.
async fn over<T>(network: &watch::Sender<Network>, work: impl Future<Output = T>) -> T {
    let mut seen = network.subscribe();
    let _ = seen.wait_for(|n| *n != Network::Silent).await;
    let done = work.await;
    if *network.borrow() == Network::Deaf {
        std::future::pending::<()>().await;
    }
    done
}

#[async_trait]
impl Store for Remote {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.joins_sent.fetch_add(1, Ordering::SeqCst);
        over(&self.others, self.inner.join(claim, mode)).await
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.renewals_sent.fetch_add(1, Ordering::SeqCst);
        over(&self.renewals, self.inner.renew(renewals)).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        if !self.leaving.is_zero() {
            tokio::time::sleep(self.leaving).await;
        }
        over(&self.others, self.inner.leave(claim, keep)).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        over(&self.others, self.inner.changed(claim)).await
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        over(&self.others, self.inner.read(name)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        over(&self.others, self.inner.list(prefix)).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        over(&self.others, self.inner.evict(name, which)).await
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
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("it never came to pass");
}

async fn waiters(locks: &Leasehold, name: &str) -> usize {
    locks.read(name).await.unwrap().map_or(0, |info| info.waiters().count())
}

/// A grant that comes while the store's answers are lost is waited with, not given up.
#[tokio::test]
async fn f58_a_grant_that_comes_in_an_outage_is_waited_with() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let blocker = here.mutex("a").lock().await.unwrap();
    let lock = there.mutex("a").lease(Duration::from_secs(3));
    let waiting = tokio::spawn(async move { lock.lock().await });
    while waiters(&here, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    // Its heartbeats arrive, and no answer to them: a grant pushed now is nearly over.
    remote.renewals.send_replace(Network::Deaf);
    tokio::time::sleep(Duration::from_millis(2_300)).await;
    blocker.release().await.unwrap();
    let sent = remote.renewals_sent.load(Ordering::SeqCst);
    // More than three in vain.
    until(|| remote.renewals_sent.load(Ordering::SeqCst) > sent + 5 || waiting.is_finished()).await;
    remote.renewals.send_replace(Network::Well);
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.is_held());
}

/// Busy and away are told apart by the error, however the wait ended.
#[tokio::test]
async fn f55_an_error_tells_whether_the_store_answered() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let (here, there) = (client(memory), client(remote.clone()));
    let _blocker = here.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(700);

    let busy = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!((busy.kind(), busy.store_answered()), (ErrorKind::Timeout, true), "{busy}");
    assert_eq!(busy.holders().len(), 1, "{busy}");
    assert!(there.mutex("a").try_lock().await.unwrap_err().store_answered());

    // Away from the beginning, and away after it has told us our place.
    remote.all(Network::Silent);
    let away = there.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert_eq!((away.kind(), away.store_answered()), (ErrorKind::Timeout, false), "{away}");
    assert!(away.to_string().contains("has not answered"), "{away}");
    remote.all(Network::Well);
    let lock = there.mutex("a").lease(Duration::from_secs(2));
    let waiting = tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(6)).await });
    while waiters(&here, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    remote.all(Network::Silent);
    let away = waiting.await.unwrap().unwrap_err();
    assert_eq!((away.kind(), away.store_answered()), (ErrorKind::Timeout, false), "{away}");
    assert_eq!(away.to_string().lines().count(), 1);

    let lock = there.mutex("b").lease(Duration::from_millis(600));
    let tried = lock.try_lock().await.unwrap_err();
    assert_eq!((tried.kind(), tried.store_answered()), (ErrorKind::Unreachable, false), "{tried}");
}

/// `lock()` waits for as long as it says: for a lease, and for 15 s where the lease is shorter.
#[tokio::test]
async fn f55_a_silence_is_told_as_long_as_it_was() {
    let remote = Arc::new(Remote::new(&Arc::new(MemoryStore::new())));
    remote.all(Network::Silent);
    let locks = client(remote);
    let started = std::time::Instant::now();
    let lock = locks.mutex("a").lease(Duration::from_secs(3));
    let error = lock.lock().await.unwrap_err();
    assert!(started.elapsed() >= Duration::from_secs(15), "{:?}", started.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(!error.to_string().contains("within 1 s"), "{error}");
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

/// A forked child has no thread and no connection of its own: it is told so, and at once.
#[test]
fn f30_a_forked_child_is_refused_whatever_it_asks() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let locks = leasehold::blocking::Leasehold::from(client(remote.clone()));
    let guard = locks.mutex("a").lock().unwrap();
    let sequencer = guard.sequencer();
    // What would hang for ever in the child must fail before it is sent.
    remote.all(Network::Silent);
    // SAFETY: the child asks, and leaves by `_exit`; the alarm ends it if it hangs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: ends this process, and nothing else, by default.
        unsafe { libc::alarm(20) };
        fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
            result.err().map(|e| e.kind())
        }
        let told = [
            kind(locks.read("a")),
            kind(locks.list("")),
            kind(locks.evict("a", Evict::Holders)),
            kind(locks.check(&sequencer)),
            kind(locks.diagnose()),
            kind(locks.mutex("b").try_lock()),
            kind(locks.close()),
        ];
        let wrong = told.iter().position(|kind| *kind != Some(ErrorKind::Closed));
        let code = wrong.map_or(100, |i| i32::try_from(i).unwrap_or(99));
        // SAFETY: ends this process at once, without the test harness noticing.
        unsafe { libc::_exit(code) }
    }
    let mut status = -1;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child hung");
    assert_eq!(libc::WEXITSTATUS(status), 100, "the call of this number was not refused");
    remote.all(Network::Well);
    assert!(guard.is_held());
    guard.release().unwrap();
}

/// A task that locks twice waits for itself: the error says where to look.
#[tokio::test]
async fn f80_held_by_this_client_is_told() {
    let memory = Arc::new(MemoryStore::new());
    let (one, other) = (client(memory.clone()), client(memory));
    let guard = one.mutex("a").lock().await.unwrap();
    let wait = Duration::from_millis(50);
    let own = one.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(own.held_by_this_client());
    assert!(own.to_string().contains("this client holds it itself"), "{own}");
    assert!(one.mutex("a").try_lock().await.unwrap_err().held_by_this_client());
    let theirs = other.mutex("a").lock_timeout(wait).await.unwrap_err();
    assert!(!theirs.held_by_this_client(), "{theirs}");
    guard.release().await.unwrap();
}

/// Tokens of a store with an offset are as good as any: raised everywhere, and known again.
#[tokio::test]
async fn f24_a_token_offset_raises_every_token() {
    const OFFSET: u64 = 4_000_000_000_000_000_000;
    let memory = Arc::new(MemoryStore::new());
    let plain = client(memory.clone());
    let raised = Builder::default().token_offset(OFFSET).store(memory.clone()).unwrap();
    let low = plain.mutex("a").lock().await.unwrap();
    let lock = raised.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await });
    while waiters(&plain, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    let busy = raised.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(busy.holders()[0].token.get(), low.token().get() + OFFSET);
    let below = low.token().get();
    low.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token().get() > below + OFFSET);
    raised.check(&guard.sequencer()).await.unwrap();
    let error = plain.check(&guard.sequencer()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
    let shown = raised.read("a").await.unwrap().unwrap();
    assert_eq!(shown.claims[0].token, Some(guard.token()));
    assert_eq!(raised.list("").await.unwrap()[0].claims[0].token, Some(guard.token()));
    // What the store draws next is above what this client has seen, without the offset.
    assert!(plain.read("a").await.unwrap().unwrap().claims[0].token.unwrap().get() < OFFSET);
    assert_eq!(plain.evict("a", Evict::Token(guard.token())).await.unwrap(), 0);
    assert_eq!(raised.evict("a", Evict::Token(guard.token())).await.unwrap(), 1);
    let error = Builder::default().token_offset(u64::MAX).store(memory).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

/// A lock that moves to a store with small tokens: the fence has seen greater ones.
#[cfg(all(feature = "etcd", feature = "sqlite"))]
#[tokio::test]
async fn f24_a_fence_outlives_the_move_of_its_lock() {
    use leasehold::fence::sql::check_guard;
    let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    let pool = options.connect("sqlite::memory:").await.unwrap();
    leasehold::database::install(&pool).await.unwrap();
    let show = async |guard: &leasehold::Guard| {
        let mut tx = pool.begin().await.unwrap();
        let checked = check_guard(&mut tx, guard).await;
        tx.commit().await.unwrap();
        checked
    };
    let before = leasehold::connect("memory:f24-before").await.unwrap();
    let old = before.mutex("order").lock().await.unwrap();
    show(&old).await.unwrap();

    let url = testbed::etcd().url();
    let moved = leasehold::connect(&url).await.unwrap();
    let guard = moved.mutex("order").lock().await.unwrap();
    let refused = show(&guard).await.unwrap_err();
    let seen = refused.stale_token().unwrap().seen;
    guard.release().await.unwrap();

    // The step: what the fence has seen is where the new tokens begin.
    let url = format!("{url}?token_offset={seen}");
    let told = leasehold::connect(&url).await.unwrap();
    let guard = told.mutex("order").lock().await.unwrap();
    show(&guard).await.unwrap();
    // And a holder from before the move stays out, which it would not with a lowered mark.
    assert_eq!(show(&old).await.unwrap_err().kind(), ErrorKind::StaleToken);
    let next = told.mutex("order");
    let waiting = tokio::spawn(async move { next.lock().await });
    while waiters(&told, "order").await == 0 {
        tokio::task::yield_now().await;
    }
    let earlier = guard.token();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token() > earlier);
    show(&guard).await.unwrap();
}

/// A resource of two nodes has a mark on each: a holder shows its token to both before it reads.
#[cfg(feature = "sqlite")]
#[tokio::test]
async fn f82_r51_a_resource_of_several_nodes_has_a_mark_on_each() {
    use leasehold::fence::sql::check;
    let node = async || {
        let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
        let pool = options.connect("sqlite::memory:").await.unwrap();
        leasehold::database::install(&pool).await.unwrap();
        pool
    };
    let nodes = [node().await, node().await];
    let show = async |node: &sqlx::SqlitePool, token: leasehold::Token| {
        let mut tx = node.begin().await.unwrap();
        let checked = check(&mut tx, "order", token).await.map_err(|e| e.kind());
        tx.commit().await.unwrap();
        checked
    };
    let locks = client(Arc::new(MemoryStore::new()));
    let late = locks.mutex("order").lock().await.unwrap().token();
    let next = locks.mutex("order").lock().await.unwrap().token();
    // The next holder has been to one node only: the other lets the late one in.
    show(&nodes[0], next).await.unwrap();
    assert_eq!(show(&nodes[0], late).await, Err(ErrorKind::StaleToken));
    assert_eq!(show(&nodes[1], late).await, Ok(()));
    // So it shows its token to all, first thing.
    show(&nodes[1], next).await.unwrap();
    assert_eq!(show(&nodes[1], late).await, Err(ErrorKind::StaleToken));
}
