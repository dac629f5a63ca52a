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
        /// The token of the grant. It is always the same for the same claim.
        token: Token,
        /// How long the grant lasts without a renewal, counted from when the store executed the
        /// call. `None` if the store has no leases.
        remaining: Option<Duration>,
    },
    /// The claim waits in the queue.
    Waiting(Place),
    /// The claim was not granted and does not wait: the mode was [`Mode::Try`], or the claim has
    /// become a cooldown.
    Busy {
        /// The holders, as far as the store knows them. May be empty.
        holders: Vec<HolderInfo>,
    },
}

/// A queue position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Place {
    /// The number of claims ahead of this position, including holders.
    pub ahead: usize,
    /// For the first waiting claim: the time until the next lease ahead of it expires. The store
    /// sends no notification when a lease expires, so the client polls at that time.
    pub head_remaining: Option<Duration>,
    /// The token that the store assigned when the claim joined. The grant will have the same token.
    /// `None` if the store never assigns tokens to waiters. Pushed grants of such a store are only
    /// hints.
    ///
    /// A pushed grant with another token does not belong to this position. One claim can have two
    /// positions, one after the other, if a late duplicate of its `join` arrives after the first
    /// position expired.
    pub token: Option<Token>,
}

/// One claim to renew, for [`Store::renew`](crate::store::Store::renew).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Renew {
    /// The claim: a holder, or a waiter that sends its heartbeat.
    pub claim: Claim,
    /// For a holder, how long the renewed grant must last.
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
    /// The store does not have the claim, or has it only as a cooldown.
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

/// The result of [`Store::convert`](crate::store::Store::convert).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Converted {
    /// The claim holds the lock with the requested weight.
    Done {
        /// The token of the grant, which has not changed.
        token: Token,
    },
    /// The claim holds the lock with its old weight. The request was to increase it, but there is
    /// another holder or a cooldown.
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
    /// The store has granted the claim. Until it is renewed, the grant lasts for one waiter lease
    /// from the last heartbeat. The client accepts the grant only if it has the token of the
    /// position that answered that heartbeat ([`Place::token`]). Otherwise the client treats it as
    /// [`Signal::Ask`].
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

/// A description of one queue: its lock and its claims.
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
    /// The reason why the queue could not be read, or `None`. Set only by
    /// [`Store::list`](crate::store::Store::list). If set, only the name is known.
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
        self.claims.iter().filter(|c| c.state == ClaimState::Holding)
    }

    /// Returns the waiting claims, in order.
    pub fn waiters(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.iter().filter(|c| c.state == ClaimState::Waiting)
    }
}

/// The status of a claim. Stores keep its `serde` form. To show it to people, use
/// [`as_str`](Self::as_str).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum ClaimState {
    /// The claim holds the lock.
    Holding,
    /// The claim waits in the queue.
    Waiting,
    /// The holder is gone, but the lock is in a cooldown (`lock_delay` or `min_hold`).
    #[cfg_attr(feature = "serde", serde(rename = "departed"))]
    Cooldown,
}

impl ClaimState {
    /// Returns the state as one word: `held`, `waiting` or `cooldown`.
    ///
    /// ```
    /// assert_eq!(leasehold::store::ClaimState::Holding.as_str(), "held");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Holding => "held",
            Self::Waiting => "waiting",
            Self::Cooldown => "cooldown",
        }
    }
}

/// A description of one claim in a queue, without its secret ID.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ClaimInfo {
    /// The state of the claim.
    #[cfg_attr(feature = "serde", serde(rename = "standing"))]
    pub state: ClaimState,
    /// The process that made the claim.
    pub holder: Holder,
    /// The token, if one was assigned.
    pub token: Option<Token>,
    /// How much of the lock's capacity the claim takes.
    pub weight: u32,
    /// How long the claim has been in this state.
    pub since: Duration,
    /// The time until its lease or cooldown expires, or `None` if it does not expire.
    pub remaining: Option<Duration>,
}

impl ClaimInfo {
    /// Creates the information about a claim.
    pub fn new(
        state: ClaimState,
        holder: Holder,
        token: Option<Token>,
        weight: u32,
        since: Duration,
        remaining: Option<Duration>,
    ) -> Self {
        Self { state, holder, token, weight, since, remaining }
    }

    /// Returns why the lock is frozen, if this claim freezes it. The reason may be empty.
    ///
    /// An operator freezes a lock to stop new holders. The claim that is left in the queue is a
    /// cooldown whose label begins with `frozen`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let label = leasehold::store::kit::frozen_label("maintenance"); // "frozen: maintenance"
    /// let all = locks.mutex("job").label(label).min_hold(Duration::from_secs(60)).lock().await?;
    /// all.release().await?;
    /// let lock = locks.inspect("job").await?.expect("in use");
    /// assert_eq!(lock.claims[0].frozen(), Some("maintenance"));
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn frozen(&self) -> Option<&str> {
        let rest = self.holder.label.strip_prefix(FROZEN)?;
        let reason = if rest.is_empty() { Some("") } else { rest.strip_prefix(": ") };
        reason.filter(|_| self.state == ClaimState::Cooldown)
    }
}

/// The beginning of the label of a claim that freezes a lock.
const FROZEN: &str = "frozen";

/// Returns the label of a claim that freezes a lock for this reason; see [`ClaimInfo::frozen`].
pub fn frozen_label(reason: &str) -> String {
    match reason {
        "" => FROZEN.to_owned(),
        reason => format!("{FROZEN}: {reason}"),
    }
}

/// Returns the holders of a queue that have a token, for [`Error::held_by`](crate::Error::held_by).
pub fn holders_of(info: &LockInfo) -> Vec<HolderInfo> {
    let shown = info.holders().filter_map(|c| {
        let token = c.token?;
        Some(HolderInfo::new(c.holder.clone(), token, c.since))
    });
    shown.collect()
}

/// Returns the host of a holder that has no token, because it does not use leasehold.
pub(crate) fn foreigner_of(info: &LockInfo) -> Option<&str> {
    let foreign = info.holders().find(|c| c.token.is_none())?;
    Some(&foreign.holder.host)
}

/// Creates the error for a claim that requests a lock in use, but with another kind or capacity.
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
    .with_lock(&claim.name)
}
