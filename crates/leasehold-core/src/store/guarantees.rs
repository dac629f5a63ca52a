//! What a store guarantees, as data. `doctor` prints it, tests are selected by it, and callers can
//! require it.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::base::duration::short;
use crate::words::claim::Kind;

/// What ends the hold of a crashed holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Liveness {
    /// A lease that expires by the store's clock.
    Lease,
    /// A session of the client with the store. A client ends its own claims that are not renewed,
    /// so leases work as elsewhere while the client lives. If it crashes, its claims end with the
    /// session, whatever their leases.
    Session,
    /// The kernel: the hold ends with the process, and never before.
    Process,
}

/// How a client is notified of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Wakeup {
    /// The store sends a notification. The heartbeat is the fallback.
    Push,
    /// The client polls.
    Poll,
}

/// Which clock measures leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ClockModel {
    /// None: the store has no leases.
    None,
    /// A clock that cannot be set and that measures real time.
    Monotonic,
    /// A wall clock, which can be stepped.
    Wall,
}

/// Which faults of the store data survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Durability {
    /// None: it is lost with the process that keeps it.
    Process,
    /// A crash of the process, but not of the machine.
    Machine,
    /// A power failure: it is on disk before the store answers.
    Disk,
    /// The loss of a minority of machines: it is on a majority before the store answers.
    Majority,
}

/// What a fault does to mutual exclusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Survival {
    /// There is still only one holder.
    Exclusive,
    /// Two clients may believe that they hold the lock. A resource that checks tokens is safe.
    Fenced,
    /// There may be two holders, and tokens may decrease.
    Unsafe,
    /// The fault cannot happen here.
    NotApplicable,
}

/// Which other clients a client blocks while it is paused in the middle of a call. They may lose
/// queue positions or locks if the pause is longer than their leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Stall {
    /// No other client.
    Nobody,
    /// Clients that want the same lock, until the store ends the call after this time.
    SameLock(Duration),
    /// Clients that want the same lock, until the paused client resumes.
    SameLockForLong,
    /// All clients, until the paused client resumes.
    Everybody,
}

impl Stall {
    /// Returns the longest time that another client can be blocked.
    pub fn longest(self) -> Duration {
        match self {
            Self::Nobody => Duration::ZERO,
            Self::SameLock(limit) => limit,
            Self::SameLockForLong | Self::Everybody => Duration::MAX,
        }
    }
}

/// Everything that a store guarantees.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Guarantees {
    /// The supported kinds of lock.
    pub kinds: Cow<'static, [Kind]>,
    /// Whether locks are granted first come, first served among live waiters.
    pub fifo: bool,
    /// How waiters are notified that they hold the lock.
    pub wakeup: Wakeup,
    /// How a holder is notified of its eviction: by a push, or by polling with its next renewal.
    pub evicted: Wakeup,
    /// How watchers of queues ([`watch`](crate::Leasehold::watch),
    /// [`observe`](crate::Election::observe)) are notified of changes.
    pub followed: Wakeup,
    /// What ends the hold of a crashed holder.
    pub liveness: Liveness,
    /// Which clock measures leases.
    pub clock: ClockModel,
    /// Whether the lock can have a cooldown after an unclean end (`lock_delay`).
    pub lock_delay: bool,
    /// Whether the lock can have a cooldown after a release (`at_least`).
    pub at_least: bool,
    /// Whether a write hold can become a read hold ([`downgrade`](crate::Guard::downgrade)).
    pub downgrades: bool,
    /// Whether a read hold can become a write hold ([`try_upgrade`](crate::Guard::try_upgrade)).
    pub upgrades: bool,
    /// What grants survive.
    pub grant: Durability,
    /// What the order of tokens survives.
    pub token: Durability,
    /// Mutual exclusion if a holder is paused for longer than its lease.
    pub on_pause: Survival,
    /// Mutual exclusion if the store's wall clock is stepped.
    pub on_clock_step: Survival,
    /// Mutual exclusion if the store crashes and restarts.
    pub on_store_crash: Survival,
    /// Mutual exclusion if the store fails over to another member.
    pub on_failover: Survival,
    /// Mutual exclusion if the network between client and store is partitioned.
    pub on_partition: Survival,
    /// Which other clients a client blocks while it is paused in the middle of a call.
    pub stall: Stall,
    /// The longest time that a crashed holder's lock stays unavailable, in addition to
    /// [`recovery_leases`](Self::recovery_leases) leases.
    pub recovery: Duration,
    /// The number of leases; see [`recovery`](Self::recovery).
    pub recovery_leases: u32,
    /// What else people must know, one sentence each.
    pub notes: Cow<'static, [Cow<'static, str>]>,
}

/// The kinds of lock of a store that supports all of them.
pub const ALL_KINDS: &[Kind] = &[Kind::Mutex, Kind::RwLock, Kind::Semaphore];

impl Guarantees {
    /// Returns the weakest guarantees: only a mutex, with leases, polling, no order, and safe only
    /// with tokens. A store sets the fields in which it is better.
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

    /// Returns all guarantees as text for people: a label and a value each, with the same labels in
    /// the same order for every store.
    pub fn in_words(&self) -> Vec<(&'static str, String)> {
        let yes = |so: bool| if so { "yes" } else { "no" }.to_owned();
        let kinds: Vec<String> = self.kinds.iter().map(Kind::to_string).collect();
        let recovery = match self.recovery_leases {
            0 => short(self.recovery),
            1 => format!("its lease plus {}", short(self.recovery)),
            n => format!("{n} leases plus {}", short(self.recovery)),
        };
        vec![
            ("kinds of lock", kinds.join(", ")),
            ("fair: first come, first served", yes(self.fifo)),
            ("waiters are notified by", self.wakeup.to_string()),
            ("evicted holders are notified by", self.evicted.to_string()),
            ("watchers are notified by", self.followed.to_string()),
            ("a crashed holder loses its lock when", self.liveness.to_string()),
            ("a crashed holder's lock is free within", recovery),
            ("lease clock", self.clock.to_string()),
            ("lock_delay (cooldown after a crash)", yes(self.lock_delay)),
            ("at_least (cooldown after a release)", yes(self.at_least)),
            ("downgrade (writer to reader)", yes(self.downgrades)),
            ("try_upgrade (reader to writer)", yes(self.upgrades)),
            ("grants survive", self.grant.to_string()),
            ("token order survives", self.token.to_string()),
            ("a holder is paused for longer than its lease", self.on_pause.to_string()),
            ("the store's clock is stepped", self.on_clock_step.to_string()),
            ("the store crashes and restarts", self.on_store_crash.to_string()),
            ("the store fails over", self.on_failover.to_string()),
            ("the network between client and store is partitioned", self.on_partition.to_string()),
            ("a client paused in a call blocks", self.stall.to_string()),
        ]
    }

    /// Returns whether holds are leases, which expire unless they are renewed.
    pub fn has_leases(&self) -> bool {
        self.liveness != Liveness::Process
    }

    /// Returns whether the store supports this kind of lock.
    pub fn keeps(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Returns whether the store has this guarantee.
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
            Self::Lease => "its lease expires",
            Self::Session => "its session expires",
            Self::Process => "its process exits",
        })
    }
}

impl fmt::Display for Wakeup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Push => "push",
            Self::Poll => "polling",
        })
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("no other client"),
            Self::SameLock(limit) => {
                write!(f, "clients that want the same lock, for up to {}", short(*limit))
            }
            Self::SameLockForLong => {
                f.write_str("clients that want the same lock, until it resumes")
            }
            Self::Everybody => f.write_str("all clients, until it resumes"),
        }
    }
}

impl fmt::Display for ClockModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none (no leases)",
            Self::Monotonic => "monotonic",
            Self::Wall => "wall clock of the store",
        })
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "nothing",
            Self::Machine => "a crash of the store's process",
            Self::Disk => "a power failure",
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

/// A guarantee that a caller can [require](crate::Builder::require) when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Guarantee {
    /// The store supports this kind of lock.
    Kind(Kind),
    /// Locks are granted first come, first served.
    Fifo,
    /// Waiters are notified by push, not by polling.
    Push,
    /// The lock can have a cooldown after an unclean end (`lock_delay`).
    LockDelay,
    /// The lock can have a cooldown after a release (`at_least`).
    AtLeast,
    /// Grants survive at least this.
    GrantDurability(Durability),
    /// The order of tokens survives at least this.
    TokenDurability(Durability),
    /// There is one holder even if the store's wall clock is stepped.
    ExclusiveOnClockStep,
    /// There is one holder even if the store's process crashes.
    ExclusiveOnStoreCrash,
    /// There is one holder even if the store fails over.
    ExclusiveOnFailover,
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "locks of the kind {kind}"),
            Self::Fifo => f.write_str("first come, first served"),
            Self::Push => f.write_str("push notifications to waiters"),
            Self::LockDelay => f.write_str("lock_delay (a cooldown after a crash)"),
            Self::AtLeast => f.write_str("at_least (a cooldown after a release)"),
            Self::GrantDurability(d) => write!(f, "grants that survive {d}"),
            Self::TokenDurability(d) => write!(f, "a token order that survives {d}"),
            Self::ExclusiveOnClockStep => f.write_str("one holder when the clock is stepped"),
            Self::ExclusiveOnStoreCrash => f.write_str("one holder when the store crashes"),
            Self::ExclusiveOnFailover => f.write_str("one holder when the store fails over"),
        }
    }
}
