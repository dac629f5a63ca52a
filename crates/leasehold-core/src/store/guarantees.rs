//! What a store promises, as data: `doctor` prints it, tests are selected by it, and callers may
//! demand it.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::base::duration::short;
use crate::words::claim::Kind;

/// What ends the hold of a holder that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Liveness {
    /// A lease that runs out by the store's clock.
    Lease,
    /// A session of the client with the store, kept alive on its own. A client ends its own claims
    /// that are not renewed, so leases hold as elsewhere while it lives; if it dies, its claims end
    /// with the session, however short or long their leases.
    Session,
    /// The kernel: the hold ends with the process, and never before.
    Process,
}

/// How a waiter learns that its turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Wakeup {
    /// It is told, with the heartbeat as fallback.
    Push,
    /// It asks.
    Poll,
}

/// Whose clock judges leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ClockModel {
    /// Nobody's: there are no leases.
    None,
    /// A clock that cannot be set, counting in real time.
    Monotonic,
    /// A wall clock, which can be stepped.
    Wall,
}

/// What is kept over which end of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Durability {
    /// Gone with the process that keeps it.
    Process,
    /// Kept until the machine goes down.
    Machine,
    /// On disk before it is answered.
    Disk,
    /// On a majority of machines before it is answered.
    Majority,
}

/// What a fault does to mutual exclusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Survival {
    /// Still one holder.
    Exclusive,
    /// Perhaps two that believe they hold; a resource that checks tokens is safe.
    Fenced,
    /// Perhaps two holders, and tokens may regress.
    Unsafe,
    /// The fault cannot happen here.
    NotApplicable,
}

/// Whom a client keeps waiting that is stopped in the middle of a call. Those who wait or hold may lose
/// their places by it, where places run out in less time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Stall {
    /// Nobody.
    Nobody,
    /// Those of the same lock, until the store ends the call after this time.
    SameLock(Duration),
    /// Those of the same lock, until the client goes on.
    SameLockForLong,
    /// Everybody, until the client goes on.
    Everybody,
}

impl Stall {
    /// How long somebody else may be kept waiting, at most.
    pub fn longest(self) -> Duration {
        match self {
            Self::Nobody => Duration::ZERO,
            Self::SameLock(limit) => limit,
            Self::SameLockForLong | Self::Everybody => Duration::MAX,
        }
    }
}

/// Everything a store states about itself.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Guarantees {
    /// The kinds of lock that it keeps.
    pub kinds: Cow<'static, [Kind]>,
    /// First come, first served among live waiters.
    pub fifo: bool,
    /// How waiters learn of their turn.
    pub wakeup: Wakeup,
    /// How a holder learns that it was evicted: it is told, or asks with its next renewal.
    pub evicted: Wakeup,
    /// How whoever follows queues ([`watch`](crate::Leasehold::watch), [`observe`](crate::Election::observe))
    /// learns of what changes there.
    pub followed: Wakeup,
    /// What ends the hold of a dead holder.
    pub liveness: Liveness,
    /// Whose clock judges leases.
    pub clock: ClockModel,
    /// Whether the lock can stay closed after an unclean end.
    pub lock_delay: bool,
    /// Whether the lock can stay closed after a release (`at_least`).
    pub at_least: bool,
    /// Whether a writer can become a reader while it holds ([`downgrade`](crate::Guard::downgrade)).
    pub downgrades: bool,
    /// Whether a reader can become a writer while it holds ([`try_upgrade`](crate::Guard::try_upgrade)).
    pub upgrades: bool,
    /// What grants outlive.
    pub grant: Durability,
    /// What the order of tokens outlives.
    pub token: Durability,
    /// A holder that was paused longer than its lease.
    pub on_pause: Survival,
    /// The store's wall clock stepped.
    pub on_clock_step: Survival,
    /// The store's process killed and started again.
    pub on_store_crash: Survival,
    /// Fail-over to another member.
    pub on_failover: Survival,
    /// Client and store cut off from each other.
    pub on_partition: Survival,
    /// Whom a client keeps waiting that is stopped in the middle of a call.
    pub stall: Stall,
    /// The longest that a dead holder's lock stays taken when the lease is `lease`: this, plus as
    /// many leases as [`recovery_leases`](Self::recovery_leases).
    pub recovery: Duration,
    /// See [`recovery`](Self::recovery).
    pub recovery_leases: u32,
    /// What else people must know, one sentence each.
    pub notes: Cow<'static, [Cow<'static, str>]>,
}

/// The kinds of lock of a store that keeps them all.
pub const ALL_KINDS: &[Kind] = &[Kind::Mutex, Kind::RwLock, Kind::Semaphore];

impl Guarantees {
    /// The least a store can promise: a mutex by lease, polled, unordered, safe only when fenced.
    /// A store raises the fields that it keeps.
    pub const fn least() -> Self {
        Self {
            kinds: Cow::Borrowed(&[Kind::Mutex]),
            fifo: false,
            wakeup: Wakeup::Poll,
            evicted: Wakeup::Poll,
            followed: Wakeup::Poll,
            liveness: Liveness::Lease,
            clock: ClockModel::Wall,
            lock_delay: false,
            at_least: false,
            downgrades: false,
            upgrades: false,
            grant: Durability::Process,
            token: Durability::Process,
            on_pause: Survival::Fenced,
            on_clock_step: Survival::Fenced,
            on_store_crash: Survival::Unsafe,
            on_failover: Survival::Unsafe,
            on_partition: Survival::Fenced,
            stall: Stall::Nobody,
            recovery: Duration::from_secs(2),
            recovery_leases: 1,
            notes: Cow::Borrowed(&[]),
        }
    }

    /// All of it in plain words, for people: what is asked, and the answer. The same questions in the
    /// same order for every store.
    pub fn in_words(&self) -> Vec<(&'static str, String)> {
        let yes = |so: bool| if so { "yes" } else { "no" }.to_owned();
        let kinds: Vec<String> = self.kinds.iter().map(Kind::to_string).collect();
        let recovery = match self.recovery_leases {
            0 => short(self.recovery),
            1 => format!("its lease and {}", short(self.recovery)),
            n => format!("{n} leases and {}", short(self.recovery)),
        };
        vec![
            ("kinds of lock", kinds.join(", ")),
            ("first come, first served", yes(self.fifo)),
            ("a waiter learns of its turn", self.wakeup.to_string()),
            ("a holder learns that it was evicted", self.evicted.to_string()),
            ("who follows a queue learns of changes", self.followed.to_string()),
            ("what ends a dead holder's hold", self.liveness.to_string()),
            ("a dead holder's lock is free within", recovery),
            ("leases are judged by", self.clock.to_string()),
            ("lock-delay", yes(self.lock_delay)),
            ("at_least (once per period)", yes(self.at_least)),
            ("a writer becomes a reader (downgrade)", yes(self.downgrades)),
            ("a reader becomes a writer (try_upgrade)", yes(self.upgrades)),
            ("grants outlive", self.grant.to_string()),
            ("the order of tokens outlives", self.token.to_string()),
            ("a holder is paused for longer than its lease", self.on_pause.to_string()),
            ("the store's clock is stepped", self.on_clock_step.to_string()),
            ("the store is killed and started again", self.on_store_crash.to_string()),
            ("fail-over to another member", self.on_failover.to_string()),
            ("client and store are cut off from each other", self.on_partition.to_string()),
            ("a client stopped in a call keeps waiting", self.stall.to_string()),
        ]
    }

    /// Whether holds are leases: they run out unless renewed.
    pub fn has_leases(&self) -> bool {
        self.liveness != Liveness::Process
    }

    /// Whether the store keeps this kind of lock.
    pub fn keeps(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether the store keeps this promise.
    pub fn meets(&self, wanted: Guarantee) -> bool {
        let holds = |s: Survival| matches!(s, Survival::Exclusive | Survival::NotApplicable);
        match wanted {
            Guarantee::Kind(kind) => self.keeps(kind),
            Guarantee::Fifo => self.fifo,
            Guarantee::Push => self.wakeup == Wakeup::Push,
            Guarantee::LockDelay => self.lock_delay,
            Guarantee::AtLeast => self.at_least,
            Guarantee::GrantDurability(least) => self.grant >= least,
            Guarantee::TokenDurability(least) => self.token >= least,
            Guarantee::ExclusiveOnClockStep => holds(self.on_clock_step),
            Guarantee::ExclusiveOnStoreCrash => holds(self.on_store_crash),
            Guarantee::ExclusiveOnFailover => holds(self.on_failover),
        }
    }
}

impl fmt::Display for Liveness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lease => "its lease runs out",
            Self::Session => "its session runs out",
            Self::Process => "the kernel, with its process",
        })
    }
}

impl fmt::Display for Wakeup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Push => "it is told",
            Self::Poll => "it asks",
        })
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("nobody"),
            Self::SameLock(limit) => write!(f, "who wants the same lock, for {}", short(*limit)),
            Self::SameLockForLong => f.write_str("who wants the same lock, until it goes on"),
            Self::Everybody => f.write_str("everybody, until it goes on"),
        }
    }
}

impl fmt::Display for ClockModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no clock: there are none",
            Self::Monotonic => "a clock that nobody can set",
            Self::Wall => "the store's wall clock",
        })
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "nothing",
            Self::Machine => "a crash of the store's process",
            Self::Disk => "a power cut",
            Self::Majority => "the loss of a minority of machines",
        })
    }
}

impl fmt::Display for Survival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exclusive => "one holder",
            Self::Fenced => "tokens needed",
            Self::Unsafe => "UNSAFE",
            Self::NotApplicable => "cannot happen",
        })
    }
}

/// A promise that a caller may [demand](crate::Builder::require) when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Guarantee {
    /// The store keeps this kind of lock.
    Kind(Kind),
    /// First come, first served.
    Fifo,
    /// Waiters are told, not polling.
    Push,
    /// The lock can stay closed after an unclean end.
    LockDelay,
    /// The lock can stay closed after a release.
    AtLeast,
    /// Grants outlive at least this.
    GrantDurability(Durability),
    /// The order of tokens outlives at least this.
    TokenDurability(Durability),
    /// One holder even when the store's wall clock is stepped.
    ExclusiveOnClockStep,
    /// One holder even when the store's process is killed.
    ExclusiveOnStoreCrash,
    /// One holder even over a fail-over.
    ExclusiveOnFailover,
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "locks of the kind {kind}"),
            Self::Fifo => f.write_str("first come, first served"),
            Self::Push => f.write_str("pushed wake-ups"),
            Self::LockDelay => f.write_str("a lock-delay"),
            Self::AtLeast => f.write_str("locks that stay taken after their release"),
            Self::GrantDurability(d) => write!(f, "grants durable over {d:?}"),
            Self::TokenDurability(d) => write!(f, "tokens durable over {d:?}"),
            Self::ExclusiveOnClockStep => f.write_str("one holder over a clock step"),
            Self::ExclusiveOnStoreCrash => f.write_str("one holder over a crash of the store"),
            Self::ExclusiveOnFailover => f.write_str("one holder over a fail-over"),
        }
    }
}
