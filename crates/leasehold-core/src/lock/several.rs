//! Several locks, acquired and released together.
//!
//! # The argument
//! - *No two callers deadlock.* All callers acquire the locks in one order, by store and name, and
//!   hold what they have while they wait for the next. In a circle of callers, one would have to
//!   wait for a name smaller than one that it holds. (A lock that a caller holds from another call
//!   is not in that order.)
//! - *Taking free locks costs the time of one round trip*, however many there are. All are tried
//!   concurrently, or as many as a store's connections carry. The locks before the first one that
//!   was not free are kept, as for any caller that waits while it holds smaller names. Those after
//!   it are released immediately, and from there on the locks are acquired one after another. (This
//!   is not done if it would gain nothing, on this machine, or if released locks stay unavailable,
//!   `at_least`.)
//! - *Nothing is left behind.* The future owns the list of acquired locks. A failure releases them
//!   before it is reported, and a dropped future releases them in the background.
//! - *The first locks are held, and renewed, while the call waits for the last.* A lock that was
//!   lost in the meantime is detected when the last one is acquired. The caller never gets a part
//!   of the locks: everything starts over.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::client::core::Core;
use crate::client::lease::State;
use crate::lock::guard::{Guard, Released};
use crate::lock::wait::Wait;
use crate::lock::wanted::{Wanted, in_order};
use crate::words::error::{Error, ErrorKind, LostReason, Result};
use crate::words::name::Name;

/// Takes all of them, or none.
pub(crate) async fn acquire_all(
    core: &Core,
    operation: &'static str,
    wanted: impl IntoIterator<Item = Wanted>,
    wait: Wait,
) -> Result<Guards> {
    let wanted = in_order(wanted);
    let wanted = wanted.map_err(|e| e.during(operation).at(core.store.url()))?;
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
        let mut all = Guards { guards };
        // Whoever tries has its answer, but where that may have been given on account of one who tried as well.
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
                    // What cannot be told now is told in the background.
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
                    return Err(error.during(operation));
                }
            }
        }
    }
}

/// Those that are free, up to the first that is not; and why that is not.
async fn free_in_front(operation: &'static str, wanted: &[Wanted]) -> (Vec<Guard>, Option<Error>) {
    let is_local = |one: &Wanted| one.handle.core.store.info().is_local;
    let stays = |one: &Wanted| !one.handle.options.at_least.is_zero();
    if wanted.len() < 2 || wanted.iter().all(is_local) || wanted.iter().any(stays) {
        return (Vec::with_capacity(wanted.len()), None);
    }
    let tried = wanted.iter().map(|one| one.handle.take_if_free(operation, one.weight));
    let mut free = Vec::with_capacity(wanted.len());
    for one in together(tried).await {
        match one {
            Ok(guard) => free.push(guard),
            // Those behind it are dropped, which gives them back in the background.
            Err(why) => return (free, Some(why)),
        }
    }
    (free, None)
}

/// Several held locks, acquired by [`lock_all`](crate::Leasehold::lock_all).
///
/// Dropping the value releases all of them in the background. [`release`](Self::release) also
/// reports whether that succeeded.
///
/// The value counts as held while *all* locks are held. If one is lost, [`lost`](Self::lost)
/// returns which one. Each lock has its own token, for the resource that it protects.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let both = locks.lock_all(["account:1", "account:2"]).await?;
/// for guard in &both {
///     println!("{} is held, token {}", guard.name(), guard.token());
/// }
/// assert_eq!(both.get("account:2").unwrap().name().as_str(), "account:2");
/// both.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
#[must_use = "the locks are released when the guards are dropped"]
pub struct Guards {
    /// In the order in which they were taken.
    guards: Vec<Guard>,
}

impl Guards {
    /// Returns the hold of the lock with this name.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["a", "b"]).await?;
    /// assert!(both.get("a").is_some() && both.get("c").is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn get(&self, name: impl AsRef<str>) -> Option<&Guard> {
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
    pub fn iter(&self) -> std::slice::Iter<'_, Guard> {
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
        self.guards.iter().all(Guard::is_held)
    }

    /// Returns how long all locks are certainly held even if no further renewal succeeds: the
    /// shortest of their times. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert!(locks.lock_all(["a", "b"]).await?.remaining() <= leasehold::DEFAULT_LEASE);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(Guard::remaining).min().unwrap_or(Duration::MAX)
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
    /// The same as [`Guard::ensure`], for the first lock that fails the check.
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
        let lost = async |guard: &Guard| (guard.name().clone(), guard.lost().await);
        let mut all: Vec<_> = self.guards.iter().map(|guard| Box::pin(lost(guard))).collect();
        std::future::poll_fn(|cx| {
            let told = all.iter_mut().map(|one| one.as_mut().poll(cx)).find(Poll::is_ready);
            told.unwrap_or(Poll::Pending)
        })
        .await
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
                // The clock is looked at before each step of the work: who was stopped takes none.
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
                // An unheard release undoes nothing: the background thread goes on with it.
                Ok(_) | Err(_) => Ok(done),
            },
            Err((name, reason)) => Err(Error::lost(reason).during("run").on(&name)),
        }
    }

    /// Runs `work`, which returns a `Result`, while all locks are held, then releases them in
    /// either case.
    ///
    /// Like [`run`](Self::run), but with one error type for both: leasehold's errors are converted
    /// into the error of `work`.
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
    /// release is still pending, the result is [`Owed`](Released::Owed); see [`Guard::release`].
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
    /// The same as [`Guard::release`], for the first lock that was lost. All locks are released in
    /// any case.
    pub async fn release(self) -> Result<Released> {
        let mut released = Ok(Released::Now);
        for one in together(self.guards.into_iter().map(Guard::release)).await {
            released = match (released, one) {
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                (Ok(Released::Owed), Ok(_)) | (Ok(_), Ok(Released::Owed)) => Ok(Released::Owed),
                (Ok(Released::Shared), Ok(_)) => Ok(Released::Shared),
                (Ok(Released::Now), Ok(one)) => Ok(one),
            };
        }
        released
    }

    pub(crate) fn core(&self) -> Option<Arc<Core>> {
        self.guards.first().map(Guard::core)
    }
}

impl<'a> IntoIterator for &'a Guards {
    type Item = &'a Guard;
    type IntoIter = std::slice::Iter<'a, Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Iterates over the guards, each of which holds and releases its lock independently.
impl IntoIterator for Guards {
    type Item = Guard;
    type IntoIter = std::vec::IntoIter<Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.guards.into_iter()
    }
}

/// What all of them came to, done side by side.
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
