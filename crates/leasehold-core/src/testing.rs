//! A store for tests of *your* program, in which time passes and faults happen on request.
//!
//! It is easy to test what a program does while it holds a lock. What it does when the lock is
//! lost, when the store is unreachable or when an answer is lost usually shows only in production,
//! and no real server fails on request. With [`TestStore`], all of this happens in the test's own
//! process, in milliseconds:
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use std::time::Duration;
//!
//! use leasehold::testing::TestStore;
//!
//! let store = TestStore::new()?;
//! let (ours, theirs) = (store.client()?, store.client()?); // like those of two processes
//! let guard = ours.mutex("report").lock().await?;
//! assert!(theirs.mutex("report").try_lock().await.is_err());
//!
//! store.advance(Duration::from_secs(60)); // as if the machine had been suspended: no renewals
//! assert!(!guard.is_held());
//! let next = theirs.mutex("report").try_lock().await?;
//! assert!(next.token() > guard.token());
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! The clients are the real ones, with their threads, deadlines and retries. Only the store is
//! different. It keeps queues like `memory:`, with all kinds of locks, tokens, `min_hold`,
//! `lock_delay` and eviction.
//!
//! To test a store of your own, use the suite that all stores pass (feature `conformance`).

mod faulty;

use std::sync::Arc;
use std::time::Duration;

pub use faulty::{Fault, Faults, Faulty, Op};

use crate::lock::builder::Builder;
use crate::lock::client::Client;
use crate::lock::convert;
use crate::lock::hold::Hold;
use crate::store::{MemoryStore, Store};
use crate::types::error::Result;
use crate::util::clock::Clock;

/// Does the same as `WriteGuard::downgrade`, for the suites of stores. The caller keeps the hold.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. The hold counts as a read hold.
///
/// # Errors
/// The same as `WriteGuard::downgrade`.
#[doc(hidden)]
pub async fn downgrade(hold: &Hold) -> Result<()> {
    convert::downgrade(hold).await
}

/// Does the same as `ReadGuard::try_upgrade`, for the suites of stores. The caller keeps the hold.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. The hold counts as a read hold.
///
/// # Errors
/// The same as `ReadGuard::try_upgrade`.
#[doc(hidden)]
pub async fn try_upgrade(hold: &Hold) -> Result<()> {
    convert::try_upgrade(hold).await
}

/// A store for tests, and the clock of all its clients. Clones represent the same store.
#[derive(Clone, Debug)]
pub struct TestStore {
    clock: Clock,
    store: Arc<Faulty>,
}

impl TestStore {
    /// Creates a store without locks and without faults.
    ///
    /// # Errors
    /// - [`Config`](crate::ErrorKind::Config): the system has no more threads.
    pub fn new() -> Result<Self> {
        let clock = Clock::stepped();
        let memory: Arc<dyn Store> = Arc::new(MemoryStore::with_clock(clock.clone()));
        let inner = Builder::default().clock(clock.clone()).store(memory)?;
        Ok(Self { clock, store: Arc::new(Faulty::around(inner)) })
    }

    /// Creates a client of this store, as a separate process would have.
    ///
    /// # Errors
    /// The same as [`new`](Self::new).
    pub fn client(&self) -> Result<Client> {
        self.client_with(Builder::default())
    }

    /// Creates a client with options, such as a [namespace](Builder::namespace) or
    /// [`LockOptions`](crate::LockOptions) for all of its locks.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::testing::TestStore;
    /// let store = TestStore::new()?;
    /// let acme = store.client_with(leasehold::builder().namespace("acme/"))?;
    /// let _guard = acme.mutex("order:42").lock().await?;
    /// assert!(store.client()?.inspect("acme/order:42").await?.is_some());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The same as [`Builder::store`].
    pub fn client_with(&self, builder: Builder) -> Result<Client> {
        builder.clock(self.clock.clone()).store(self.store.clone())
    }

    /// Advances the clock of the store and all its clients, as if the machine had been suspended.
    /// Leases, `max_hold`, `min_hold` and `lock_delay` expire. Otherwise time passes normally.
    ///
    /// Calls such as [`is_held`](crate::Hold::is_held) and [`remaining`](crate::Hold::remaining)
    /// see the new time immediately. Waiting calls ([`lost`](crate::Hold::lost),
    /// [`run`](crate::Mutex::run), waiting for a lock) are notified within about a second.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// use leasehold::testing::TestStore;
    /// let store = TestStore::new()?;
    /// let locks = store.client()?;
    /// let hourly = locks.mutex("hourly").min_hold(Duration::from_secs(3600));
    /// hourly.lock().await?.release().await?;
    /// assert!(hourly.try_lock().await.is_err()); // in a cooldown
    /// store.advance(Duration::from_secs(3601));
    /// hourly.try_lock().await?.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// Returns the [`Faults`] of this store, with which a test injects faults and counts calls.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// use leasehold::testing::{Fault, Op, TestStore};
    /// use leasehold::ErrorKind;
    ///
    /// let store = TestStore::new()?;
    /// let locks = store.client()?;
    /// // The lock is granted, but the reply is lost. The retry finds the same hold.
    /// store.faults().next(Op::Join, 1, Fault::ErrorAfter);
    /// let guard = locks.mutex("a").lock().await?;
    /// assert_eq!(locks.inspect("a").await?.unwrap().claims.len(), 1);
    ///
    /// // The store is unreachable until it is healed.
    /// store.faults().freeze();
    /// let error = locks.ping(Duration::from_millis(50)).await.unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Unreachable);
    /// assert!(guard.is_held()); // until its lease expires
    /// store.faults().heal();
    /// locks.ping(Duration::from_secs(5)).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn faults(&self) -> Arc<Faults> {
        self.store.faults()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::lease::State;
    use crate::types::error::{ErrorKind, LostReason};

    #[tokio::test]
    async fn advancing_time_expires_leases_and_cooldowns() {
        let store = TestStore::new().unwrap();
        let (ours, theirs) = (store.client().unwrap(), store.client().unwrap());
        let guard = ours.mutex("a").lock().await.unwrap();
        let waiting = tokio::spawn(async move { theirs.mutex("a").lock().await });
        store.advance(crate::DEFAULT_LEASE);
        assert!(!guard.is_held());
        assert_eq!(guard.lost().await, LostReason::Expired);
        let next = waiting.await.unwrap().unwrap();
        assert!(next.token() > guard.token());

        let hour = Duration::from_secs(3600);
        let hourly = ours.mutex("hourly").min_hold(hour);
        hourly.try_lock().await.unwrap().release().await.unwrap();
        store.advance(hour / 2);
        assert_eq!(hourly.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
        store.advance(hour / 2);
        assert_eq!(hourly.try_lock().await.unwrap().state(), State::Held);
    }

    #[tokio::test]
    async fn frozen_test_store_answers_no_requests() {
        let store = TestStore::new().unwrap();
        let locks = store.client().unwrap();
        store.faults().freeze();
        let short = Duration::from_millis(50);
        let asked = tokio::time::timeout(short, locks.inspect("a")).await;
        assert!(asked.is_err(), "{asked:?}");
        assert!(tokio::time::timeout(short, locks.list("")).await.is_err());
        assert_eq!(
            locks.mutex("a").lock_timeout(short).await.unwrap_err().kind(),
            ErrorKind::Unreachable
        );
        store.faults().heal();
        assert!(locks.mutex("a").lock().await.unwrap().is_held());
        store.faults().next(Op::Ask, 1, Fault::ErrorBefore);
        assert_eq!(locks.inspect("a").await.unwrap_err().kind(), ErrorKind::Unreachable);
        assert!(locks.inspect("a").await.is_ok());
    }
}
