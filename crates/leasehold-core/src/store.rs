//! What a store is: the keeper of the queues, behind one small trait.
//!
//! A store does what needs the store's own atomicity and clock, and nothing else. All that is the
//! same everywhere (deadlines, renewal, retries, giving up, re-entrancy, guards) is written once,
//! above. The contract, method by method, is on [`Store`]; the public suite `leasehold::conformance`
//! checks it, and what a store is built with is in [`kit`](crate::kit).

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;

use crate::words::claim::Claim;
use crate::words::doctor::Finding;
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::limits::MAX_LEASE;
use crate::words::name::Name;
use crate::words::token::Token;

pub use crate::words::answer::{
    ClaimInfo, Evict, Joined, LockInfo, Mode, Place, Renew, Renewal, Reweighed, Signal, Standing,
    holders_of, mismatch,
};

pub(crate) mod above;
mod guarantees;
mod hints;
pub(crate) mod inbox;
mod info;
pub(crate) mod machine;
mod memory;
pub(crate) mod namespaced;
pub(crate) mod open;
pub(crate) mod registry;
pub(crate) mod url;
pub(crate) mod waiters;

pub use guarantees::{
    ALL_KINDS, ClockModel, Durability, Guarantee, Guarantees, Liveness, Stall, Survival, Wakeup,
};
pub use hints::{Ear, Ears, Follow, Followers, Queues, Stirrer};
pub use info::StoreInfo;
pub use memory::MemoryStore;

/// A keeper of queues.
///
/// Every call is **atomic** at the store and **settles first**: in one step it removes what has
/// expired by the store's clock, grants what now fits, and then does what it was asked. Every
/// call may be dropped at any await and repeated: what it does is decided by the claim's id alone.
/// An error means that it is *unknown* whether the call took effect.
///
/// Calls are polled inside a tokio runtime: the caller's where there is one (which may have no timer
/// and no I/O driver), else the client's own. A panic in `renew` is taken for a failure.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// What this store is, as it was found when it was opened.
    fn info(&self) -> &StoreInfo;

    /// Puts the claim into its lock's queue, or asks "and now?".
    ///
    /// Idempotent by claim id: a claim that is there already keeps its place, its grant and its
    /// token. Asking is also a heartbeat: a waiter's place is good for another waiter's lease, a
    /// holder's grant for another lease. A claim that fits is granted even in [`Mode::Try`];
    /// one that does not joins only in [`Mode::Wait`].
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if the queue is in use with another kind or
    /// capacity; otherwise as the store fails.
    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined>;

    /// Renews holders and keeps waiters' places, many at once; one answer for each, in order.
    /// Never joins: what is not there is [`Renewal::Lost`]. What could not be asked, or was refused,
    /// is [`Renewal::Unknown`]; where nothing was learnt of any, the call may be an error instead.
    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>>;

    /// Takes the claim out of the queue and hands over to the next that fits, in the same step.
    /// Idempotent; unknown claims are not an error. With `keep`, a holder's place stays taken for
    /// that long though nobody holds it. Tells whether the claim was in the queue: a holder that
    /// was not has lost its lock before. A store whose driver may have sent this more than once
    /// says `true` when in doubt.
    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool>;

    /// Has a holder weigh `claim.weight` from now on, and lets in who then fits, in the same step. Idempotent: one
    /// that weighs so much already is [`Reweighed::Done`]. It keeps its place, its token and its lease.
    ///
    /// Lighter, it takes nothing from anybody. Heavier, it must be the only one that holds, with nothing kept closed:
    /// else it is [`Reweighed::Busy`], and nothing has changed. Who waits goes on waiting.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) where the store cannot do it in one step
    /// ([`Guarantees::downgrades`], [`Guarantees::upgrades`]); otherwise as the store fails.
    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        Err(cannot_reweigh(claim))
    }

    /// Resolves when it may be worth to ask again for a claim that was told
    /// [`Joined::Waiting`]. A hint: it may come late, early or never, and must not be lost when
    /// the change comes between that answer and this call. May be dropped and called again.
    ///
    /// A claim is to be woken when what blocks it leaves *or is granted* (with a capacity above
    /// 1, watching only the predecessor's departure loses wake-ups).
    async fn changed(&self, claim: &Claim) -> Result<Signal>;

    /// The queue of one lock; `None` if nothing stands in it.
    async fn read(&self, name: &Name) -> Result<Option<LockInfo>>;

    /// Those that hold a lock, for an error or a check: the one with this token, or those that come
    /// first, as many as people read. Waiters may be left out. What many ask at once who wait in vain,
    /// so a store whose queues are long answers it without reading them.
    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let _ = token;
        self.read(name).await
    }

    /// All queues in use whose name starts with `prefix`, by name. One that cannot be read is told
    /// as [`LockInfo::unreadable`], where the others can be.
    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>>;

    /// Removes claims by a person's order, and hands over. Tells how many were removed. Their
    /// clients are told, where [somebody hears](Self::hear), and else find out at their next renewal.
    async fn evict(&self, name: &Name, which: Evict) -> Result<usize>;

    /// Tells `ear` from now on, for as long as it is there, of claims of its client that had better be asked
    /// about at once: they were evicted. Called once for each client of the store, before its first claim. A
    /// hint, which a store need not give: [`Guarantees::evicted`] says whether it does.
    fn hear(&self, ear: Weak<dyn Ear>) {
        let _ = ear;
    }

    /// Follows these queues from now on: tells whenever something may have changed there, claims that came, were
    /// granted or ended. `None` where the store cannot tell ([`Guarantees::followed`]); who follows then looks
    /// now and then. A hint: what only time has ended, nobody may tell.
    ///
    /// # Errors
    /// As the store fails: nothing is told, and it may be called again later.
    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let _ = queues;
        Ok(None)
    }

    /// What is wrong with the set-up, as far as the store can tell: what its configuration, its
    /// clock and what it stands on do to its promises.
    ///
    /// # Errors
    /// As the store fails; then nothing is known.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Says goodbye to the servers, where their protocol has a word for it, and gives back what was
    /// kept there for the next claim: what a client does last. A courtesy that may fail: without it
    /// connections just break off, of which some servers' logs warn. Others may use the store too, so
    /// whatever is asked later connects again.
    async fn disconnect(&self) {}

    /// The longest lease that this store can vouch for now. A claim that asks for more gets this: where
    /// the claims live in a session of the client, none can be certain for longer than the session.
    fn longest_lease(&self) -> Duration {
        MAX_LEASE
    }

    /// Which of the store's members keeps this lock, where they fail apart from each other. Claims of
    /// different members are renewed by different calls, so that a member which does not answer
    /// costs no lease of another.
    fn shard(&self, name: &Name) -> u64 {
        let _ = name;
        0
    }

    /// How many of the store's replicas had this claim's grant when it was made, where they are asked.
    fn confirmed(&self, _claim: &Claim) -> Option<u32> {
        None
    }

    /// What a caller's own transaction in the same store can check to see that this claim still holds,
    /// where there is such a thing. No I/O.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if it is known to be gone.
    fn ownership(&self, _claim: &Claim) -> Result<Option<Ownership>> {
        Ok(None)
    }

    /// The descriptor that keeps this client's holds alive for as long as any process has it open:
    /// a child that inherits it holds on when we die. `None` where there is no such thing.
    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl dyn Store + '_ {
    /// What this store promises, in the configuration that it found.
    pub fn guarantees(&self) -> &Guarantees {
        &self.info().guarantees
    }

    /// The store's URL, without credentials.
    pub fn url(&self) -> &str {
        &self.info().url
    }

    /// Which store this is: see [`StoreInfo::identity`](field@StoreInfo::identity).
    pub fn identity(&self) -> &str {
        &self.info().identity
    }
}

/// The error of a store that cannot change what a hold weighs, or not so.
pub fn cannot_reweigh(claim: &Claim) -> Error {
    let what = "this store cannot make a writer a reader, or a reader a writer, while it holds: release it, and \
                take it anew";
    Error::new(ErrorKind::Unsupported, what).on(&claim.name)
}

/// What is at a store only as long as one claim holds, as one key there.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ownership {
    /// The scheme of the store's URL: which kind of transaction can check it.
    pub scheme: &'static str,
    /// The key. Whoever knows it may be able to end the hold.
    pub key: Vec<u8>,
}

impl Ownership {
    /// This key of a store whose URLs begin so.
    pub fn new(scheme: &'static str, key: impl Into<Vec<u8>>) -> Self {
        Self { scheme, key: key.into() }
    }
}

impl fmt::Debug for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ownership").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}
