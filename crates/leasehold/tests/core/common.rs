//! Two stores in memory that tests can inspect: one with unusual answers, and one behind a
//! simulated network.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::store::{
    Claim, Evict, Joined, LockInfo, MemoryStore, Mode, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold::{Builder, Client, Error, ErrorKind, MutexGuard, Name, Result};
use tokio::sync::{Semaphore, watch};

/// A memory store whose answers can be delayed, falsified or replaced by errors.
#[derive(Debug)]
pub(crate) struct Odd {
    pub(crate) inner: Arc<MemoryStore>,
    /// Renewals wait here before they reach the store.
    pub(crate) before_renew: Semaphore,
    pub(crate) renewals_sent: AtomicUsize,
    /// Leaves wait here before they reach the store.
    pub(crate) before_leave: Semaphore,
    /// Leaves wait here after they have reached the store.
    pub(crate) after_leave: Semaphore,
    pub(crate) leaves_done: AtomicUsize,
    pub(crate) changed_fails: AtomicBool,
    pub(crate) joins_fail: AtomicBool,
    pub(crate) joins_failed: AtomicUsize,
    pub(crate) leaves_fail: AtomicBool,
    pub(crate) remaining: std::sync::Mutex<Option<Duration>>,
    /// Every renewal of this name fails, and so does its batch.
    pub(crate) poisoned: Option<&'static str>,
    /// Waiters are notified to poll, and their grant is withdrawn and refused once.
    pub(crate) unconfirmed: AtomicBool,
    /// Every join sleeps, on the timer of the caller's runtime.
    pub(crate) joins_sleep: bool,
    pub(crate) info: StoreInfo,
}

pub(crate) const OPEN: usize = 1 << 20;

impl Odd {
    pub(crate) fn new(inner: &Arc<MemoryStore>) -> Self {
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

    fn odd_remaining(&self, remaining: Option<Duration>) -> Option<Duration> {
        (*self.remaining.lock().unwrap()).or(remaining)
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

/// The effect of the network on a kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Network {
    #[default]
    Well,
    /// Nothing arrives.
    Silent,
    /// The request is executed, and the answer is lost.
    Deaf,
}

/// A memory store behind a simulated network, which treats renewals separately from all other
/// calls.
#[derive(Debug)]
pub(crate) struct Remote {
    inner: Arc<MemoryStore>,
    info: StoreInfo,
    pub(crate) renewals: watch::Sender<Network>,
    pub(crate) others: watch::Sender<Network>,
    /// The duration of a `leave`.
    pub(crate) leaving: Duration,
    pub(crate) renewals_sent: AtomicUsize,
    joins_sent: AtomicUsize,
}

impl Remote {
    pub(crate) fn new(inner: &Arc<MemoryStore>) -> Self {
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

    pub(crate) fn all(&self, network: Network) {
        self.renewals.send_replace(network);
        self.others.send_replace(network);
    }
}

/// Runs `work` over a network that may be silent or deaf.
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

pub(crate) fn client(store: Arc<dyn Store>) -> Client {
    Builder::default().store(store).unwrap()
}

pub(crate) async fn until(mut what: impl FnMut() -> bool) {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait)
        .await
        .expect("the condition never became true");
}

pub(crate) async fn waiters(locks: &Client, name: &str) -> usize {
    locks.inspect(name).await.unwrap().map_or(0, |info| info.waiters().count())
}

pub(crate) fn waiting_lock(
    locks: &Client,
    name: &'static str,
    lease: u64,
) -> tokio::task::JoinHandle<Result<MutexGuard>> {
    let lock = locks.mutex(name).lease(Duration::from_millis(lease));
    tokio::spawn(async move { lock.lock().await })
}
