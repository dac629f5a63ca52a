//! Several locks, acquired and released together.
//!
//! # The argument
//! - *No two callers deadlock.* All callers acquire the locks in one order, by store and name, and
//!   hold what they have while they wait for the next. In a circle of callers that wait for each
//!   other, one would have to wait for a lock that comes before one that it holds. (This does not
//!   cover locks that a caller already holds from another call.)
//! - *Taking free locks costs the time of one round trip*, however many there are. All are tried
//!   concurrently, or as many as a store's connections allow. The locks before the first one that
//!   was not free are kept, as in any call that waits while it holds earlier locks. Those after it
//!   are released immediately, and from there on the locks are acquired one after another. (The
//!   locks are not tried concurrently if that gains nothing, as in a local store, or if a released
//!   lock stays unavailable because of `min_hold`.)
//! - *Nothing is left behind.* The future owns the list of acquired locks. A failure releases them
//!   before it is reported, and a dropped future releases them in the background.
//! - *The first locks are held, and renewed, while the call waits for the last.* A lock that was
//!   lost in the meantime is detected when the last one is acquired. The caller never gets only
//!   some of the locks: the call starts over, or fails if it does not wait.

use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use crate::client::core::Core;
use crate::client::lease::State;
use crate::lock::hold::{Hold, Released};
use crate::lock::request::{LockRequest, in_order};
use crate::lock::wait::Wait;
use crate::types::error::{Error, ErrorKind, LostReason, Result};
use crate::types::name::Name;

/// Acquires all of the locks, or none.
pub(crate) async fn acquire_all(
    core: &Core,
    operation: &'static str,
    wanted: impl IntoIterator<Item = LockRequest>,
    wait: Wait,
) -> Result<MultiGuard> {
    let wanted = in_order(wanted);
    let wanted = wanted.map_err(|e| e.with_operation(operation).with_store(core.store.url()))?;
    let clock = &core.clock;
    let started = clock.now();
    loop {
        let left = |limit: Duration| limit.saturating_sub(clock.now().since(started));
        let free = free_in_front(operation, &wanted);
        let (guards, why) = match (wait, wanted.first()) {
            (Wait::For(limit), Some(first)) => {
                match core.background.within(|| left(limit), free).await {
                    Some(free) => free,
                    None => return Err(first.handle.not_answered(operation, limit).await),
                }
            }
            _ => free.await,
        };
        let mut all = MultiGuard::new(guards);
        // A `try_` call returns this error. The exception is `Contended`, whose cause may be
        // another caller that also tries all locks at once. So the locks are then tried again in
        // order.
        if let Some(why) = why.filter(|why| wait == Wait::Try && why.kind() != ErrorKind::Contended)
        {
            let _ = all.release().await;
            return Err(why);
        }
        for one in wanted.iter().skip(all.guards.len()) {
            let wait = match wait {
                Wait::For(limit) => Wait::For(left(limit)),
                wait => wait,
            };
            match one.handle.acquire(operation, one.weight, wait).await {
                Ok(guard) => all.guards.push(guard),
                Err(error) => {
                    // If the store does not reply now, the release continues in the background.
                    let _ = all.release().await;
                    return Err(error);
                }
            }
        }
        match all.iter().try_for_each(|guard| guard.ensure(Duration::ZERO)) {
            Ok(()) => return Ok(all),
            Err(error) => {
                let _ = all.release().await;
                if wait == Wait::Try {
                    return Err(error.with_operation(operation));
                }
            }
        }
    }
}

/// Acquires the locks that are free, up to the first one that is not. Also returns the error of
/// that lock.
async fn free_in_front(
    operation: &'static str,
    wanted: &[LockRequest],
) -> (Vec<Hold>, Option<Error>) {
    let is_local = |one: &LockRequest| one.handle.core.store.info().is_local;
    let stays = |one: &LockRequest| !one.handle.options.min_hold.is_zero();
    if wanted.len() < 2 || wanted.iter().all(is_local) || wanted.iter().any(stays) {
        return (Vec::with_capacity(wanted.len()), None);
    }
    let tried = wanted.iter().map(|one| one.handle.take_if_free(operation, one.weight));
    let mut free = Vec::with_capacity(wanted.len());
    for one in together(tried).await {
        match one {
            Ok(guard) => free.push(guard),
            // The guards after the failed one are dropped, which releases their locks in the
            // background.
            Err(why) => return (free, Some(why)),
        }
    }
    (free, None)
}

/// Several held locks, acquired by [`lock_all`](crate::Client::lock_all).
///
/// Dropping the value releases all of them in the background. [`release`](Self::release) also
/// reports whether the release succeeded.
///
/// The value counts as held while *all* locks are held. If one is lost, [`lost`](Self::lost)
/// returns which one. Each lock has its own token, for the resource that it protects.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let both = locks.lock_all(["account:1", "account:2"]).await?;
/// for hold in &both {
///     println!("{} is held, token {}", hold.name(), hold.fencing_token().expect("a mutex"));
/// }
/// assert_eq!(both.get("account:2").unwrap().name().as_str(), "account:2");
/// both.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
#[must_use = "the locks are released when the guards are dropped"]
pub struct MultiGuard {
    /// The holds, in the order in which their locks were acquired.
    guards: Vec<Hold>,
}

impl MultiGuard {
    pub(crate) fn new(guards: Vec<Hold>) -> Self {
        Self { guards }
    }

    /// Returns the hold of the lock with this name.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["a", "b"]).await?;
    /// assert!(both.get("a").is_some() && both.get("c").is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn get(&self, name: impl AsRef<str>) -> Option<&Hold> {
        self.guards.iter().find(|guard| guard.name().as_str() == name.as_ref())
    }

    /// Returns an iterator over the holds, in the order in which they were acquired.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["b", "a"]).await?;
    /// let names: Vec<&str> = both.iter().map(|guard| guard.name().as_str()).collect();
    /// assert_eq!(names, ["a", "b"]); // in the order of acquisition
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn iter(&self) -> std::slice::Iter<'_, Hold> {
        self.guards.iter()
    }

    /// Returns whether all locks are certainly held now. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert!(locks.lock_all(["a", "b"]).await?.is_held());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(Hold::is_held)
    }

    /// Returns how much longer all locks are certainly held even if no further renewal succeeds:
    /// the shortest of their times. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert!(locks.lock_all(["a", "b"]).await?.remaining() <= leasehold::DEFAULT_LEASE);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(Hold::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Checks that each lock is certainly held for at least `min`. Call it before a step that
    /// cannot be undone. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["a", "b"]).await?;
    /// both.ensure(std::time::Duration::from_secs(2))?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The same as [`Hold::ensure`], for the first lock that fails the check.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        self.guards.iter().try_for_each(|guard| guard.ensure(min))
    }

    /// Waits until one of the locks is lost, and returns its name and the reason. Works in any
    /// executor. If there are no locks, it never resolves.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::store::Evict;
    /// let both = locks.lock_all(["stock:a", "stock:b"]).await?;
    /// locks.evict("stock:b", Evict::Holders).await?; // as an operator might
    /// let (name, _reason) = both.lost().await;
    /// assert_eq!(name.as_str(), "stock:b");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) -> (Name, LostReason) {
        first_lost(&self.guards).await
    }

    /// Runs `work` while all locks are held, then releases them.
    ///
    /// If a lock is lost while `work` runs, `work` is dropped at its next await, and the call
    /// returns [`Lost`](crate::ErrorKind::Lost).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let moved = locks.lock_all(["account:1", "account:2"]).await?.run(async { 42 }).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. `work` is dropped at
    /// its current await, and all locks are released.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): a lock was lost before `work` was done.
    pub async fn run<T>(self, work: impl Future<Output = T>) -> Result<T> {
        let done = {
            let (mut work, mut lost) = (pin!(work), pin!(self.lost()));
            std::future::poll_fn(|cx| {
                // The clock is checked before each poll of the work. So a process that was paused
                // for longer than its lease takes no further step.
                let over = self.guards.iter().find_map(|guard| match guard.state() {
                    State::Lost(reason) => Some((guard.name().clone(), reason)),
                    _ => None,
                });
                if let Some(over) = over {
                    return Poll::Ready(Err(over));
                }
                if let Poll::Ready(over) = lost.as_mut().poll(cx) {
                    return Poll::Ready(Err(over));
                }
                work.as_mut().poll(cx).map(Ok)
            })
            .await
        };
        match done {
            Ok(done) => match self.release().await {
                Err(error) if error.lost_reason().is_some() => Err(error),
                // If the release got no reply, the work is done anyway. The background thread
                // retries the release.
                Ok(_) | Err(_) => Ok(done),
            },
            Err((name, reason)) => Err(Error::lost(reason).with_operation("run").with_lock(&name)),
        }
    }

    /// Runs `work`, which returns a `Result`, while all locks are held, then releases them in
    /// either case.
    ///
    /// Like [`run`](Self::run), but with a single error type: leasehold's errors are converted into
    /// the error type of `work`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// type Error = Box<dyn std::error::Error + Send + Sync>;
    /// let both = locks.lock_all(["account:1", "account:2"]).await?;
    /// let moved: Result<u64, Error> = both.try_run(async { Ok("42".parse()?) }).await;
    /// assert_eq!(moved.unwrap(), 42);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. `work` is dropped at
    /// its current await, and all locks are released.
    ///
    /// # Errors
    /// - The errors of `work`.
    /// - All others as for [`run`](Self::run).
    pub async fn try_run<T, E: From<Error>>(
        self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.run(work).await?
    }

    /// Releases all locks concurrently, in the time of one round trip.
    ///
    /// In SQL stores, as many locks are released at once as the client has connections. If a
    /// release is still pending, the result is [`Pending`](Released::Pending); see
    /// [`Hold::release`].
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["a", "b"]).await?;
    /// both.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// The same as [`Hold::release`], for the first lock whose release failed. All locks are
    /// released in any case.
    pub async fn release(self) -> Result<Released> {
        let mut released = Ok(Released::Now);
        for one in together(self.guards.into_iter().map(Hold::release)).await {
            released = match (released, one) {
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                (Ok(Released::Pending), Ok(_)) | (Ok(_), Ok(Released::Pending)) => {
                    Ok(Released::Pending)
                }
                (Ok(Released::Shared), Ok(_)) => Ok(Released::Shared),
                (Ok(Released::Now), Ok(one)) => Ok(one),
            };
        }
        released
    }
}

impl<'a> IntoIterator for &'a MultiGuard {
    type Item = &'a Hold;
    type IntoIter = std::slice::Iter<'a, Hold>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Iterates over the guards, each of which holds and releases its lock independently.
impl IntoIterator for MultiGuard {
    type Item = Hold;
    type IntoIter = std::vec::IntoIter<Hold>;

    fn into_iter(self) -> Self::IntoIter {
        self.guards.into_iter()
    }
}

/// Waits until one of the holds is lost, and returns its name and the reason.
pub(crate) async fn first_lost(holds: impl IntoIterator<Item = &Hold>) -> (Name, LostReason) {
    let lost = async |hold: &Hold| (hold.name().clone(), hold.lost().await);
    let mut all: Vec<_> = holds.into_iter().map(|hold| Box::pin(lost(hold))).collect();
    std::future::poll_fn(|cx| {
        let lost = all.iter_mut().map(|one| one.as_mut().poll(cx)).find(Poll::is_ready);
        lost.unwrap_or(Poll::Pending)
    })
    .await
}

/// Runs all futures concurrently, and returns their results in order.
async fn together<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut pending: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in pending.iter_mut().zip(&mut done) {
            if done.is_none()
                && let Poll::Ready(output) = future.as_mut().poll(cx)
            {
                *done = Some(output);
            }
        }
        if done.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}
