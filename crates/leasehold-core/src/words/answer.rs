//! What is asked of a store, and what it answers: the words of [`Store`](crate::store::Store)'s calls.

use std::time::Duration;

use super::claim::{Claim, Kind};
use super::error::{Error, ErrorKind, HolderInfo, Result};
use super::holder::Holder;
use super::name::Name;
use super::token::Token;

/// Whether a claim that does not fit at once stands in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Mode {
    /// Join only if it would hold at once.
    Try,
    /// Stand in the queue.
    Wait,
}

/// The answer to [`Store::join`](crate::store::Store::join).
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

/// One claim of [`Store::renew`](crate::store::Store::renew).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Renew {
    /// The claim: a holder, or a waiter, whose heartbeat this is.
    pub claim: Claim,
    /// For a holder, how long the grant shall last from now.
    pub lease: Duration,
}

/// The answer to one claim of [`Store::renew`](crate::store::Store::renew).
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
        Self::Unknown { kind: error.kind(), why: error.reason() }
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

/// The answer to [`Store::reweigh`](crate::store::Store::reweigh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Reweighed {
    /// It holds, and weighs as much as was asked for.
    Done {
        /// Its fencing token, which is as it was.
        token: Token,
    },
    /// It holds as before: it was to become heavier, and is not the only one that holds.
    Busy,
    /// It does not hold (any more).
    Lost,
}

/// The answer to [`Store::changed`](crate::store::Store::changed).
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

/// Which claims [`Store::evict`](crate::store::Store::evict) removes.
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
    /// Why the queue could not be read, in a list of many ([`Store::list`](crate::store::Store::list)): then
    /// nothing is known of this lock but its name.
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

/// How a claim stands. As serde writes it, it is in what stores keep: people are told by
/// [`as_str`](Self::as_str).
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

impl Standing {
    /// One word, the same wherever one is told how a claim stands: `held`, `waiting` or `departed`.
    ///
    /// ```
    /// assert_eq!(leasehold::store::Standing::Holding.as_str(), "held");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Holding => "held",
            Self::Waiting => "waiting",
            Self::Departed => "departed",
        }
    }
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
