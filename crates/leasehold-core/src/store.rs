//! What a store is: the keeper of the queues, behind one small trait.
//!
//! A store does what needs the store's own atomicity and clock, and nothing else. All that is the
//! same everywhere (deadlines, renewal, retries, giving up, re-entrancy, guards) is written once,
//! above. The contract, method by method, is on [`Store`]; the public suite `leasehold::conformance`
//! checks it, and what a store is built with is in [`kit`](crate::kit).

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use async_trait::async_trait;

use crate::claim::{Claim, Holder, Kind, Token};
use crate::doctor::Finding;
use crate::error::{Error, ErrorKind, HolderInfo, Result};
use crate::name::Name;

pub(crate) mod above;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod waiters;
pub use memory::MemoryStore;

mod guarantees;
pub use guarantees::{
    ALL_KINDS, ClockModel, Durability, Guarantee, Guarantees, Liveness, Stall, Survival, Wakeup,
};

/// Whether a claim that does not fit at once stands in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Mode {
    /// Join only if it would hold at once.
    Try,
    /// Stand in the queue.
    Wait,
}

/// The answer to [`Store::join`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Joined {
    /// The claim holds the lock.
    Holding {
        /// Its fencing token: always the same for the same claim.
        token: Token,
        /// How long the grant lasts unrenewed, by the store's clock as it answers; `None` where
        /// the store has no leases.
        remaining: Option<Duration>,
    },
    /// The claim stands in the queue.
    Waiting(Place),
    /// The claim was to hold at once or not at all, and does not.
    Busy {
        /// Who holds the lock, as far as the store knows; may be empty.
        holders: Vec<HolderInfo>,
    },
}

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Place {
    /// How many claims are before it, holders included.
    pub ahead: usize,
    /// Told to the first claim that does not fit: when the next lease before it ends. Nothing at
    /// the store wakes it then, so it asks again at that time.
    pub head_remaining: Option<Duration>,
    /// The token under which it stands and will hold, where the store draws it as a claim joins
    /// (always, or never: then pushes are only hints).
    /// A push of another token is not about this place: one claim can have two, one after the
    /// other, when a late duplicate of its `join` arrives after the first place expired.
    pub token: Option<Token>,
}

/// One claim of [`Store::renew`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Renew {
    /// The claim: a holder, or a waiter, whose heartbeat this is.
    pub claim: Claim,
    /// For a holder, how long the grant shall last from now.
    pub lease: Duration,
}

/// The answer to one claim of [`Store::renew`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Renewal {
    /// It holds, for this much longer by the store's clock (`None`: no leases).
    Holding {
        /// Its fencing token.
        token: Token,
        /// As in [`Joined::Holding`].
        remaining: Option<Duration>,
    },
    /// It still waits, and its place is good for another waiter's lease.
    Waiting(Place),
    /// The store does not know it (any more).
    Lost,
    /// As after an error, for this claim alone: others of the same call were answered, and must not
    /// pay for it.
    Unknown {
        /// The error's kind.
        kind: ErrorKind,
        /// The error in one line.
        why: String,
    },
}

impl Renewal {
    /// What is answered for a claim about which nothing was learnt.
    pub fn unknown(error: &Error) -> Self {
        Self::Unknown { kind: error.kind(), why: error.to_string() }
    }

    /// The answer, or the error that stands in its place.
    ///
    /// # Errors
    /// What [`Renewal::Unknown`] tells.
    pub fn known(self) -> Result<Self> {
        match self {
            Self::Unknown { kind, why } => Err(Error::new(kind, why)),
            known => Ok(known),
        }
    }
}

/// The answer to [`Store::changed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Signal {
    /// It may be worth asking again.
    Ask,
    /// The claim was granted, and the store said so. Such a grant lasts a waiter's lease from the
    /// last heartbeat, until it is renewed. It is believed only under the token of the place that
    /// answered that heartbeat ([`Place::token`]), and otherwise taken as [`Signal::Ask`].
    Granted(Token),
}

/// Which claims [`Store::evict`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Evict {
    /// The one with this token.
    Token(Token),
    /// Every holder, and what is kept closed after one; waiters keep their places.
    Holders,
}

/// What stands in a queue, for people.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockInfo {
    /// The lock.
    pub name: Name,
    /// What it is.
    pub kind: Kind,
    /// How many permits it has (mutex: 1).
    pub capacity: u32,
    /// Everybody in the queue, in order.
    pub claims: Vec<ClaimInfo>,
    /// Why the queue could not be read, in a list of many ([`Store::list`]): then nothing is known
    /// of this lock but its name.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub unreadable: Option<String>,
}

impl LockInfo {
    /// What a store tells of a lock.
    pub fn new(name: Name, kind: Kind, capacity: u32, claims: Vec<ClaimInfo>) -> Self {
        Self { name, kind, capacity, claims, unreadable: None }
    }

    /// A lock of which only that it is there can be told.
    pub fn unreadable(name: Name, why: impl Into<String>) -> Self {
        let unreadable = Some(why.into());
        Self { unreadable, ..Self::new(name, Kind::Mutex, 1, Vec::new()) }
    }

    /// Those that hold it.
    pub fn holders(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.iter().filter(|c| c.standing == Standing::Holding)
    }

    /// Those that wait, in order.
    pub fn waiters(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.iter().filter(|c| c.standing == Standing::Waiting)
    }
}

/// How a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Standing {
    /// It holds.
    Holding,
    /// It waits.
    Waiting,
    /// Its holder is gone, and the lock is kept closed in its place (lock-delay, or `at_least`).
    Departed,
}

/// One claim in a queue, for people: all but its secret id.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ClaimInfo {
    /// How it stands.
    pub standing: Standing,
    /// Who.
    pub holder: Holder,
    /// Its fencing token, where one was drawn already.
    pub token: Option<Token>,
    /// How much of the capacity it takes.
    pub weight: u32,
    /// For how long it has stood so.
    pub since: Duration,
    /// What is left of its lease; `None` where there is none.
    pub remaining: Option<Duration>,
}

impl ClaimInfo {
    /// What a store tells of a claim.
    pub fn new(
        standing: Standing,
        holder: Holder,
        token: Option<Token>,
        weight: u32,
        since: Duration,
        remaining: Option<Duration>,
    ) -> Self {
        Self { standing, holder, token, weight, since, remaining }
    }
}

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
    /// What this store promises, in the configuration that it actually found.
    fn guarantees(&self) -> &Guarantees;

    /// The store's URL, without credentials.
    fn url(&self) -> &str;

    /// Which store this is: the same text for all who share its queues, and another for all who
    /// do not, as far as that can be known. Sequencers carry it, so it tells no secrets. A store
    /// that has a better name for itself than its URL says so here.
    fn identity(&self) -> String {
        self.url().replacen("***@", "", 1)
    }

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
    /// clients find out at their next renewal.
    async fn evict(&self, name: &Name, which: Evict) -> Result<usize>;

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
        crate::options::MAX_LEASE
    }

    /// Which of the store's members keeps this lock, where they fail apart from each other. Claims of
    /// different members are renewed by different calls, so that a member which does not answer
    /// costs no lease of another.
    fn member(&self, name: &Name) -> u64 {
        let _ = name;
        0
    }

    /// Whether calls are answered without I/O to another machine. Then a dropped guard is released
    /// on the spot, and not by the background thread.
    fn is_local(&self) -> bool {
        false
    }

    /// How many of the store's replicas had this claim's grant when it was made, where they are asked.
    fn confirmed(&self, _claim: &Claim) -> Option<u32> {
        None
    }

    /// How much longer than a server's answer a grant may take in [`Store::join`] by what the store was
    /// told to wait for, such as replicas. Asking again meanwhile would help nobody.
    fn confirms_within(&self) -> Duration {
        Duration::ZERO
    }

    /// The key under which the store keeps this claim's place, where that is one key that a caller's
    /// own transaction in the same store can compare. It may hold the claim's secret.
    fn place_key(&self, _claim: &Claim) -> Option<Vec<u8>> {
        None
    }

    /// The path of the node that is this claim's place, where places are nodes of a tree and a caller's
    /// own transaction can check that one is there. An error if it is known to be gone.
    fn place_path(&self, _claim: &Claim) -> Option<Result<String>> {
        None
    }

    /// The descriptor that keeps this client's holds alive for as long as any process has it open:
    /// a child that inherits it holds on when we die. `None` where there is no such thing.
    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The queue as a contention error shows it.
pub fn holders_of(info: &LockInfo) -> Vec<HolderInfo> {
    let shown = info.holders().filter_map(|c| {
        let token = c.token?;
        Some(HolderInfo::new(c.holder.clone(), token, c.since))
    });
    shown.collect()
}

/// Who holds the lock that has no place in the queue, because it is no client of ours.
pub(crate) fn foreigner_of(info: &LockInfo) -> Option<&str> {
    let foreign = info.holders().find(|c| c.token.is_none())?;
    Some(&foreign.holder.host)
}

/// The error of a claim that asks for another kind of lock than the name has.
pub fn mismatch(claim: &Claim, kind: Kind, capacity: u32) -> Error {
    let shown = |kind, capacity| match kind {
        Kind::Semaphore => format!("semaphore of {capacity}"),
        other => other.to_string(),
    };
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "asked for a {}, but the name is in use as a {}: use another name, or the same kind \
             and capacity everywhere",
            shown(claim.kind, claim.capacity),
            shown(kind, capacity),
        ),
    )
    .on(&claim.name)
}
