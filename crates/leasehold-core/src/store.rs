//! The contract of stores. A store keeps the queues of locks.
//!
//! A store implements only what depends on its own atomicity and clock. Everything that is the same
//! for all stores (deadlines, renewals, retries, timeouts, re-entrancy, guards) is implemented
//! once, in the client. [`Store`] states the contract of each method. The suite
//! `leasehold::conformance` checks it, and [`kit`](crate::kit) has the building blocks.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;

use crate::types::claim::Claim;
use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::limits::MAX_LEASE;
use crate::types::name::Name;
use crate::types::token::Token;

pub use crate::types::answer::{
    ClaimInfo, ClaimState, Converted, Evict, Joined, LockInfo, Mode, Place, Renew, Renewal, Signal,
    holders_of, mismatch,
};

pub(crate) mod addresses;
pub(crate) mod encryption;
pub(crate) mod features;
mod guarantees;
mod hints;
pub(crate) mod inbox;
mod info;
pub(crate) mod machine;
mod memory;
pub(crate) mod missing;
pub(crate) mod namespaced;
pub(crate) mod open;
pub(crate) mod registry;
pub(crate) mod secrets;
pub(crate) mod token_offset;
pub(crate) mod url;
pub(crate) mod waiters;

pub use guarantees::{
    ALL_KINDS, ClockModel, Durability, Guarantee, Guarantees, Liveness, Stall, Survival, Wakeup,
};
pub use hints::{EvictionListener, EvictionListeners, Follow, Followers, Notifier, Queues};
pub use info::StoreInfo;
pub use memory::MemoryStore;

/// A store of lock queues.
///
/// Every call is **atomic** at the store and **settles first**. In one step, the store removes what
/// has expired by its clock, grants what now fits, and then executes the call. Every call may be
/// dropped at any await and repeated, because its effect is determined by the claim's ID alone.
/// After an error it is *unknown* whether the call took effect.
///
/// Calls are polled inside a tokio runtime: the caller's if there is one (which may have no timer
/// and no I/O driver), otherwise the client's own. A panic in `renew` is treated as an error.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Returns the facts about the store that were collected when it was opened.
    fn info(&self) -> &StoreInfo;

    /// Adds the claim to the queue of its lock, or polls the state of a claim that is already
    /// there.
    ///
    /// Idempotent by claim ID: an existing claim keeps its position, its grant and its token. The
    /// call is also a heartbeat. It extends a waiter's position by another waiter lease, and a
    /// holder's grant by another lease. A claim that fits is granted even in [`Mode::Try`]. A claim
    /// that does not fit joins only in [`Mode::Wait`].
    ///
    /// # Errors
    /// - [`Mismatch`](crate::ErrorKind::Mismatch): the queue is in use with another kind or
    ///   capacity.
    /// - Any other error of the store.
    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined>;

    /// Renews holders and keeps the positions of waiters, many at once. Returns one result per
    /// claim, in order.
    ///
    /// It never adds a claim to a queue: for a claim that is not there, the result is
    /// [`Renewal::Lost`]. A claim that could not be checked, or that the store rejected, is
    /// [`Renewal::Unknown`]. If no claim has another result, the call may return an error instead.
    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>>;

    /// Removes the claim from the queue, and grants the next claims that fit, in the same step.
    ///
    /// Idempotent. Unknown claims are not an error. With `keep`, the lock stays unavailable for
    /// that time after a holder is removed. Returns whether the claim was in the queue. If a
    /// holder's claim was not, its lock had already been lost. A store whose driver may have sent
    /// the request more than once returns `true` when in doubt.
    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool>;

    /// Changes the weight of a granted claim to `claim.weight`, and grants the claims that now fit,
    /// atomically.
    ///
    /// Idempotent: returns [`Converted::Done`] if the claim already has this weight. The claim
    /// keeps its position, its token and its lease, and waiters keep waiting. Decreasing the weight
    /// always succeeds. Increasing it requires that the claim is the only holder and that there is
    /// no cooldown. Otherwise the result is [`Converted::Busy`], and nothing has changed.
    ///
    /// # Errors
    /// - [`Unsupported`](crate::ErrorKind::Unsupported): the store cannot do it atomically
    ///   ([`Guarantees::downgrades`], [`Guarantees::upgrades`]).
    /// - Any other error of the store.
    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        Err(cannot_convert(claim))
    }

    /// Waits until it may be worthwhile to poll again for a claim whose result was
    /// [`Joined::Waiting`].
    ///
    /// The result is a hint that may come late, early or never. It must not be lost if the change
    /// happens between that `Waiting` result and this call. The call may be dropped and repeated.
    ///
    /// A claim must be notified when a claim that blocks it leaves *or is granted*. (With a
    /// capacity above 1, watching only the departure of the predecessor loses notifications.)
    async fn changed(&self, claim: &Claim) -> Result<Signal>;

    /// Returns the queue of one lock, or `None` if it is empty.
    async fn read(&self, name: &Name) -> Result<Option<LockInfo>>;

    /// Returns the holders of a lock: the one with this token, or without a `token` at least the
    /// first [100](crate::kit::LISTED_HOLDERS). Includes cooldowns. Waiters may be left out.
    ///
    /// It is called for errors, checks and progress, by many waiting or unsuccessful clients at
    /// once. So a store with long queues should answer it without reading whole queues.
    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let _ = token;
        self.read(name).await
    }

    /// Returns all queues in use whose names begin with `prefix`, sorted by name. A queue that
    /// cannot be read is returned as [`LockInfo::unreadable`], if the others can be read.
    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>>;

    /// Removes claims on behalf of an operator, and grants the next ones. Returns how many claims
    /// were removed.
    ///
    /// Their clients are notified if they [listen](Self::on_eviction). Otherwise they find out at
    /// their next renewal.
    async fn evict(&self, name: &Name, which: Evict) -> Result<usize>;

    /// Registers a client to notify of evictions while `listener` exists.
    ///
    /// Called once per client of the store, before its first claim. Notifications are hints, and a
    /// store need not send them: see [`Guarantees::evicted`].
    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        let _ = listener;
    }

    /// Subscribes to these queues. The subscription reports that something may have changed: claims
    /// that joined, were granted or ended.
    ///
    /// Returns `None` if the store cannot do so ([`Guarantees::followed`]). In that case, the
    /// caller polls periodically. Notifications are hints: a change that is only caused by the
    /// passing of time may not be reported.
    ///
    /// # Errors
    /// Any error of the store. After an error, there is no subscription, and the call may be
    /// repeated.
    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let _ = queues;
        Ok(None)
    }

    /// Checks the configuration of the store, its clock and its file system for what weakens its
    /// guarantees.
    ///
    /// # Errors
    /// Any error of the store. After an error, it is unknown how the store is configured.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Disconnects from the servers, if their protocol has a request for that, and releases what
    /// the store keeps there for later claims, such as idle leases. A client calls this last.
    ///
    /// Implementing it is optional. Without it, the connections are dropped, and some servers log a
    /// warning. Other clients may share the store, so later calls connect again.
    async fn disconnect(&self) {}

    /// Returns the longest lease that the store can guarantee now. Claims that request a longer one
    /// get this one. If claims live in a session of the client, no lease can be longer than the
    /// session.
    fn longest_lease(&self) -> Duration {
        MAX_LEASE
    }

    /// Returns which member of the store keeps this lock, if members can fail independently. Claims
    /// of different members are renewed by different calls, so a member that does not answer does
    /// not delay the renewals of the others.
    fn shard(&self, name: &Name) -> u64 {
        let _ = name;
        0
    }

    /// Returns how many replicas had the grant of this claim when it was made, if the store waits
    /// for replicas.
    fn confirmed(&self, _claim: &Claim) -> Option<u32> {
        None
    }

    /// Returns the key that a caller's own transaction in the same store can check to see whether
    /// this claim still holds the lock, if the store has such a key. No I/O.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): the claim is known to be gone.
    fn ownership(&self, _claim: &Claim) -> Result<Option<Ownership>> {
        Ok(None)
    }

    /// Returns the file descriptor that keeps this client's holds alive while any process has it
    /// open. A child process that inherits it keeps holding the locks after this process ends.
    /// `None` if the store has no such descriptor.
    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl dyn Store + '_ {
    /// Returns what this store guarantees in its current configuration.
    pub fn guarantees(&self) -> &Guarantees {
        &self.info().guarantees
    }

    /// Returns the store's URL without credentials.
    pub fn url(&self) -> &str {
        &self.info().url
    }

    /// Returns the identity of the store; see [`StoreInfo::identity`](field@StoreInfo::identity).
    pub fn identity(&self) -> &str {
        &self.info().identity
    }
}

/// Creates the error for a store that cannot change the weight of a hold.
pub fn cannot_convert(claim: &Claim) -> Error {
    let what = "this store cannot change a held lock from writing to reading or back";
    let hint = "release the lock, and acquire it again";
    Error::new(ErrorKind::Unsupported, what).with_hint(hint).with_lock(&claim.name)
}

/// A key that exists at a store only while one claim holds the lock.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ownership {
    /// The scheme of the store's URL, which determines the kind of transaction that can check the
    /// key.
    pub scheme: &'static str,
    /// The key. Anyone who knows it may be able to end the hold.
    pub key: Vec<u8>,
}

impl Ownership {
    /// Creates the ownership of a key in a store whose URLs begin with `scheme`.
    pub fn new(scheme: &'static str, key: impl Into<Vec<u8>>) -> Self {
        Self { scheme, key: key.into() }
    }
}

impl fmt::Debug for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ownership").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}
