//! A store that injects faults: it delays, loses and duplicates requests and replies.
//!
//! Each request runs in its own task, as on a network: dropping the caller's future does not stop a
//! request that was sent. In *stepping* mode it runs inside the caller's future instead, and yields
//! before and after the call of the store, so that a test can drop it at each point.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::lock::client::Client;
use crate::store::{
    Converted, Evict, EvictionListener, Follow, Joined, LockInfo, Mode, Ownership, Queues, Renew,
    Renewal, Signal, Store, StoreInfo,
};
use crate::types::claim::Claim;
use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::Name;
use crate::types::token::Token;
use crate::util::locked::locked;

/// The calls into which faults can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// [`Store::join`].
    Join,
    /// [`Store::renew`].
    Renew,
    /// [`Store::leave`].
    Leave,
    /// [`Store::convert`].
    Convert,
    /// [`Store::changed`].
    Changed,
    /// Calls that do not change a claim of the client: [`Store::read`], [`Store::holders`],
    /// [`Store::list`], [`Store::evict`].
    Ask,
}

/// A fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The request reaches the store later.
    DelayRequest(Duration),
    /// The request is executed, and the reply arrives later.
    DelayReply(Duration),
    /// The request never reaches the store, and there is no reply.
    LoseRequest,
    /// The request is executed, and there is no reply.
    LoseReply,
    /// The request is executed, and the reply is an error.
    ErrorAfter,
    /// The request is not executed, and the reply is an error.
    ErrorBefore,
    /// The request is executed twice, as by a driver that repeats a request when in doubt.
    Double,
}

#[derive(Debug)]
struct Rule {
    fault: Fault,
    times: usize,
}

/// The faults to inject, and the numbers of calls so far.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// use leasehold::testing::{Fault, Op, TestStore};
/// let store = TestStore::new()?;
/// let (locks, faults) = (store.client()?, store.faults());
/// let limit = Duration::from_millis(50);
///
/// faults.next(Op::Join, 1, Fault::ErrorAfter); // executed, but the reply is an error
/// locks.mutex("a").lock().await?.release().await?;
/// assert!(faults.count(Op::Join) >= 2); // so it retried
/// faults.always(Op::Ask, Fault::ErrorBefore);
/// assert!(locks.ping(limit).await.is_err());
/// faults.freeze(); // no replies at all
/// assert!(locks.ping(limit).await.is_err());
/// faults.heal();
/// locks.ping(Duration::from_secs(5)).await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
pub struct Faults {
    rules: Mutex<HashMap<Op, Vec<Rule>>>,
    counts: Mutex<HashMap<Op, usize>>,
    stepping: AtomicBool,
    frozen: watch::Sender<bool>,
}

impl Faults {
    fn new() -> Self {
        Self {
            rules: Mutex::default(),
            counts: Mutex::default(),
            stepping: AtomicBool::new(false),
            frozen: watch::Sender::new(false),
        }
    }

    /// Injects this fault into the next `times` calls of `op`, after the faults that are already
    /// planned.
    pub fn next(&self, op: Op, times: usize, fault: Fault) {
        locked(&self.rules).entry(op).or_default().push(Rule { fault, times });
    }

    /// Injects this fault into all calls of `op`, until [`heal`](Self::heal).
    pub fn always(&self, op: Op, fault: Fault) {
        self.next(op, usize::MAX, fault);
    }

    /// Removes all faults, and resumes frozen requests and replies.
    pub fn heal(&self) {
        locked(&self.rules).clear();
        self.frozen.send_replace(false);
    }

    /// Delays all requests and replies until [`heal`](Self::heal).
    pub fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    /// Runs calls inside the caller's future, with a yield before and after.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::testing::TestStore;
    /// let store = TestStore::new()?;
    /// let locks = store.client()?;
    /// store.faults().step(); // the caller can be dropped before and after each call
    /// let asked = locks.mutex("a");
    /// let mut asking = Box::pin(asked.try_lock());
    /// let waker = std::task::Waker::noop();
    /// assert!(asking.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
    /// drop(asking); // the process ends here
    /// store.faults().heal();
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn step(&self) {
        self.stepping.store(true, Ordering::SeqCst);
    }

    /// Returns how often `op` was called.
    pub fn count(&self, op: Op) -> usize {
        locked(&self.counts).get(&op).copied().unwrap_or(0)
    }

    fn take(&self, op: Op) -> Option<Fault> {
        *locked(&self.counts).entry(op).or_default() += 1;
        let mut rules = locked(&self.rules);
        let rule = rules.get_mut(&op)?.iter_mut().find(|r| r.times > 0)?;
        rule.times -= 1;
        Some(rule.fault)
    }

    async fn thawed(&self) {
        let mut frozen = self.frozen.subscribe();
        // Cannot fail, because `self` owns the sender.
        let _ = frozen.wait_for(|frozen| !frozen).await;
    }
}

/// A store that injects faults.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::testing::Faulty;
/// let faulty = Faulty::around(leasehold::connect("memory:").await?); // or a real store
/// let faults = faulty.faults();
/// let locks = leasehold::Client::with_store(Arc::new(faulty))?;
/// faults.freeze();
/// assert!(locks.ping(Duration::from_millis(50)).await.is_err());
/// faults.heal();
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
pub struct Faulty {
    inner: Client,
    /// The store's own information, except that it is not local, because calls cross a simulated
    /// network.
    info: StoreInfo,
    faults: Arc<Faults>,
}

impl Faulty {
    /// Puts faults in front of the store of `locks`, and keeps that client alive.
    pub fn around(locks: Client) -> Self {
        let mut info = locks.store().info().clone();
        info.is_local = false;
        Self { inner: locks, info, faults: Arc::new(Faults::new()) }
    }

    /// Returns the faults to inject.
    pub fn faults(&self) -> Arc<Faults> {
        self.faults.clone()
    }

    async fn call<T, F>(&self, op: Op, call: impl Fn(Arc<dyn Store>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.call_merging(op, call, |_, second| second).await
    }

    /// Like [`call`](Self::call). `merge` combines the two answers to a doubled call into one.
    async fn call_merging<T, F>(
        &self,
        op: Op,
        call: impl Fn(Arc<dyn Store>) -> F,
        merge: fn(T, T) -> T,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let fault = self.faults.take(op);
        if self.faults.stepping.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
            let done = call(self.inner.store().clone()).await;
            tokio::task::yield_now().await;
            return done;
        }
        let store = self.inner.store().clone();
        let second = (fault == Some(Fault::Double)).then(|| call(store.clone()));
        let first = call(store);
        let faults = self.faults.clone();
        let on_the_wire = tokio::spawn(async move {
            faults.thawed().await;
            match fault {
                Some(Fault::ErrorBefore) => return Err(broken()),
                Some(Fault::LoseRequest) => std::future::pending().await,
                Some(Fault::DelayRequest(d)) => tokio::time::sleep(d).await,
                _ => {}
            }
            let mut done = first.await;
            if let Some(second) = second {
                done = match (done, second.await) {
                    (Ok(first), Ok(second)) => Ok(merge(first, second)),
                    (_, second) => second,
                };
            }
            faults.thawed().await;
            match fault {
                Some(Fault::ErrorAfter) => return Err(broken()),
                Some(Fault::LoseReply) => std::future::pending().await,
                Some(Fault::DelayReply(d)) => tokio::time::sleep(d).await,
                _ => {}
            }
            done
        });
        on_the_wire.await.unwrap_or_else(|_| Err(broken()))
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Unreachable, "the test broke the connection")
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Faulty {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let join = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.join(&claim, mode).await }
        };
        self.call(Op::Join, join).await
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renew = |store: Arc<dyn Store>| {
            let renewals = renewals.to_vec();
            async move { store.renew(&renewals).await }
        };
        self.call(Op::Renew, renew).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let leave = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.leave(&claim, keep).await }
        };
        self.call_merging(Op::Leave, leave, |first, second| first || second).await
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let convert = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.convert(&claim).await }
        };
        self.call(Op::Convert, convert).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let changed = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.changed(&claim).await }
        };
        self.call(Op::Changed, changed).await
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let read = |store: Arc<dyn Store>| {
            let name = name.clone();
            async move { store.read(&name).await }
        };
        self.call(Op::Ask, read).await
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let holders = |store: Arc<dyn Store>| {
            let name = name.clone();
            async move { store.holders(&name, token).await }
        };
        self.call(Op::Ask, holders).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let list = |store: Arc<dyn Store>| {
            let prefix = prefix.to_owned();
            async move { store.list(&prefix).await }
        };
        self.call(Op::Ask, list).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let evict = |store: Arc<dyn Store>| {
            let name = name.clone();
            async move { store.evict(&name, which).await }
        };
        self.call_merging(Op::Ask, evict, |first, second| first + second).await
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inner.store().on_eviction(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.inner.store().follow(queues).await
    }

    fn shard(&self, name: &Name) -> u64 {
        self.inner.store().shard(name)
    }

    fn longest_lease(&self) -> Duration {
        self.inner.store().longest_lease()
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.inner.store().confirmed(claim)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        self.inner.store().ownership(claim)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.store().diagnose().await
    }

    async fn disconnect(&self) {
        self.inner.store().disconnect().await;
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.inner.store().lifeline()
    }
}
