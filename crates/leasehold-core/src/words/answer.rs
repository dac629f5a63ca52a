//! The arguments and results of [`Store`](crate::store::Store)'s calls.

use std::time::Duration;

use super::claim::{Claim, Kind};
use super::error::{Error, ErrorKind, HolderInfo, Result};
use super::holder::Holder;
use super::name::Name;
use super::token::Token;

/// Whether a claim that cannot be granted immediately waits in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Mode {
    /// Join only if the claim is granted immediately.
    Try,
    /// Wait in the queue.
    Wait,
}

/// The result of [`Store::join`](crate::store::Store::join).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Joined {
    /// The claim holds the lock.
    Holding {
        /// The fencing token, always the same for the same claim.
        token: Token,
        /// How long the grant lasts without a renewal, by the store's clock when it answers. `None`
        /// if the store has no leases.
        remaining: Option<Duration>,
    },
    /// The claim waits in the queue.
    Waiting(Place),
    /// The claim was to be granted immediately or not at all, and was not granted.
    Busy {
        /// The holders, as far as the store knows them. May be empty.
        holders: Vec<HolderInfo>,
    },
}

/// A queue position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Place {
    /// The number of claims ahead of it, including holders.
    pub ahead: usize,
    /// For the first claim that was not granted: when the next lease ahead of it expires. The store
    /// does not notify the claim then, so it polls at that time.
    pub head_remaining: Option<Duration>,
    /// The token that the claim has and will hold with, if the store assigns tokens when claims
    /// join (always or never; if never, pushes are only hints).
    ///
    /// A push with another token is not about this position. One claim can have two positions, one
    /// after the other, if a late duplicate of its `join` arrives after the first position expired.
    pub token: Option<Token>,
}

/// One claim to renew, for [`Store::renew`](crate::store::Store::renew).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Renew {
    /// The claim: a holder, or a waiter that sends its heartbeat.
    pub claim: Claim,
    /// For a holder, how long the grant is to last from now.
    pub lease: Duration,
}

/// The result for one claim of [`Store::renew`](crate::store::Store::renew).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Renewal {
    /// The claim holds the lock.
    Holding {
        /// The fencing token.
        token: Token,
        /// How long the grant lasts, as in [`Joined::Holding`].
        remaining: Option<Duration>,
    },
    /// The claim still waits. Its position is valid for another waiter lease.
    Waiting(Place),
    /// The store does not have the claim.
    Lost,
    /// The state of this claim is unknown. Other claims of the same call have results.
    Unknown {
        /// The kind of the error.
        kind: ErrorKind,
        /// The error in one line.
        why: String,
    },
}

impl Renewal {
    /// Creates the result for a claim whose state is unknown because of this error.
    pub fn unknown(error: &Error) -> Self {
        Self::Unknown { kind: error.kind(), why: error.reason() }
    }

    /// Returns the result, or [`Renewal::Unknown`] as an error.
    ///
    /// # Errors
    /// The error of [`Renewal::Unknown`].
    pub fn known(self) -> Result<Self> {
        match self {
            Self::Unknown { kind, why } => Err(Error::new(kind, why)),
            known => Ok(known),
        }
    }
}

/// The result of [`Store::reweigh`](crate::store::Store::reweigh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Reweighed {
    /// The claim holds the lock with the requested weight.
    Done {
        /// The fencing token, which has not changed.
        token: Token,
    },
    /// The claim holds the lock as before. Its weight was to be increased, but there are other
    /// holders or a cooldown.
    Busy,
    /// The claim does not hold the lock.
    Lost,
}

/// The result of [`Store::changed`](crate::store::Store::changed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Signal {
    /// The state of the claim may have changed: poll again.
    Ask,
    /// The store has granted the claim. The grant lasts for a waiter lease from the last heartbeat,
    /// until it is renewed. It is accepted only with the token of the position that answered that
    /// heartbeat ([`Place::token`]). Otherwise it is treated as [`Signal::Ask`].
    Granted(Token),
}

/// The claims that [`Store::evict`](crate::store::Store::evict) removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Evict {
    /// The claim with this token.
    Token(Token),
    /// All holders and cooldowns. Waiters keep their positions.
    Holders,
}

/// The state of one queue, for people.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockInfo {
    /// The lock.
    pub name: Name,
    /// The kind of the lock.
    pub kind: Kind,
    /// The number of permits (1 for a mutex).
    pub capacity: u32,
    /// All claims in the queue, in order.
    pub claims: Vec<ClaimInfo>,
    /// Why the queue could not be read, in a list of several
    /// ([`Store::list`](crate::store::Store::list)). Then only the name is known.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub unreadable: Option<String>,
}

impl LockInfo {
    /// Creates the information about a queue.
    pub fn new(name: Name, kind: Kind, capacity: u32, claims: Vec<ClaimInfo>) -> Self {
        Self { name, kind, capacity, claims, unreadable: None }
    }

    /// Creates the information about a queue that could not be read.
    pub fn unreadable(name: Name, why: impl Into<String>) -> Self {
        let unreadable = Some(why.into());
        Self { unreadable, ..Self::new(name, Kind::Mutex, 1, Vec::new()) }
    }

    /// Returns the claims that hold the lock.
    pub fn holders(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.iter().filter(|c| c.standing == Standing::Holding)
    }

    /// Returns the waiting claims, in order.
    pub fn waiters(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.iter().filter(|c| c.standing == Standing::Waiting)
    }
}

/// The status of a claim. Stores keep its `serde` form. For people, use [`as_str`](Self::as_str).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Standing {
    /// The claim holds the lock.
    Holding,
    /// The claim waits in the queue.
    Waiting,
    /// The holder is gone, but the lock is in a cooldown (`lock_delay` or `at_least`).
    Departed,
}

impl Standing {
    /// Returns the status as one word: `held`, `waiting` or `departed`.
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

/// One claim in a queue, for people: everything except its secret ID.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ClaimInfo {
    /// The status of the claim.
    pub standing: Standing,
    /// The process that made the claim.
    pub holder: Holder,
    /// The fencing token, if one was assigned.
    pub token: Option<Token>,
    /// How much of the capacity it takes.
    pub weight: u32,
    /// How long the claim has had this status.
    pub since: Duration,
    /// The time until its lease expires, or `None` if it has no lease.
    pub remaining: Option<Duration>,
}

impl ClaimInfo {
    /// Creates the information about a claim.
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

/// Returns the holders of a queue, for [`Error::held_by`](crate::Error::held_by).
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

/// Creates the error of a claim that requests another kind of lock, or another capacity, than the
/// name has.
pub fn mismatch(claim: &Claim, kind: Kind, capacity: u32) -> Error {
    let shown = |kind, capacity| match kind {
        Kind::Semaphore => format!("semaphore of {capacity}"),
        other => other.to_string(),
    };
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "{} was requested as a {}, but is in use as a {}",
            claim.name,
            shown(claim.kind, claim.capacity),
            shown(kind, capacity),
        ),
    )
    .with_hint("use another name, or the same kind and capacity everywhere")
    .on(&claim.name)
}
