//! A store's guarantees as data: `doctor` prints them, tests are selected by them, and callers can
//! require them.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::types::claim::Kind;
use crate::util::duration::short;

/// How the store detects that a holder is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Liveness {
    /// A lease that expires by the store's clock.
    Lease,
    /// A session of the client with the store. While the client lives, it ends its own claims that
    /// were not renewed, so leases work as in other stores. If it crashes, its claims end with the
    /// session, whatever their leases.
    Session,
    /// The kernel: the hold ends with the process and not earlier.
    Process,
}

/// How a client is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Wakeup {
    /// The store or another client notifies the client; the heartbeat is the fallback.
    Push,
    /// The client polls.
    Poll,
}

/// The clock by which leases expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ClockModel {
    /// None: the store has no leases.
    None,
    /// A clock that cannot be set.
    Monotonic,
    /// A wall clock, which can be set.
    Wall,
}

/// The worst failure that data survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Durability {
    /// None: data is lost with the process that keeps it.
    Process,
    /// A crash of the process, but not of the machine.
    Machine,
    /// A power cut: data is on disk before the store replies.
    Disk,
    /// The loss of a minority of servers: a majority has the data before the store replies.
    Majority,
}

/// The effect of a fault on mutual exclusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Survival {
    /// There is still only one holder.
    Exclusive,
    /// Two clients may believe that they hold the lock; a resource that checks tokens is safe.
    Fenced,
    /// There may be two holders, and tokens may decrease.
    Unsafe,
    /// The fault cannot happen with this store.
    NotApplicable,
}

/// The clients that are blocked while another client is paused in the middle of a call. Blocked
/// holders and waiters can lose their locks and queue positions if these expire in the meantime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Stall {
    /// No other client.
    Nobody,
    /// Clients of the same lock, until the store aborts the call after this time.
    SameLock(Duration),
    /// Clients of the same lock, until the paused client resumes.
    SameLockForLong,
    /// All clients, until the paused client resumes.
    Everybody,
}

impl Stall {
    /// Returns the longest time for which another client can be blocked.
    pub fn longest(self) -> Duration {
        match self {
            Self::Nobody => Duration::ZERO,
            Self::SameLock(limit) => limit,
            Self::SameLockForLong | Self::Everybody => Duration::MAX,
        }
    }
}

/// The guarantees of a store in its current configuration.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Guarantees {
    /// The lock kinds that the store supports.
    pub kinds: Cow<'static, [Kind]>,
    /// Whether live waiters acquire the lock in the order of their requests.
    pub fifo: bool,
    /// How a waiter is notified that it holds the lock.
    pub wakeup: Wakeup,
    /// How an evicted holder is notified: by push, or when its next renewal fails.
    pub evicted: Wakeup,
    /// How watchers ([`watch`](crate::Client::watch), [`observe`](crate::Election::observe)) are
    /// notified of changes.
    pub followed: Wakeup,
    /// How a dead holder is detected.
    pub liveness: Liveness,
    /// The clock by which leases expire.
    pub clock: ClockModel,
    /// Whether a lock can stay unavailable for a while after an unclean end (`lock_delay`).
    pub lock_delay: bool,
    /// Whether a lock can stay unavailable for a while after a release (`min_hold`).
    pub min_hold: bool,
    /// Whether a writer can become a reader while it holds the lock
    /// ([`downgrade`](crate::WriteGuard::downgrade)).
    pub downgrades: bool,
    /// Whether a reader can become a writer while it holds the lock
    /// ([`try_upgrade`](crate::ReadGuard::try_upgrade)).
    pub upgrades: bool,
    /// The worst failure that grants survive.
    pub grant: Durability,
    /// The worst failure after which tokens still increase.
    pub token: Durability,
    /// Effect of a holder that is paused for longer than its lease.
    pub on_pause: Survival,
    /// Effect of setting the store's wall clock.
    pub on_clock_step: Survival,
    /// Effect of a crash and restart of the store.
    pub on_store_crash: Survival,
    /// Effect of a fail-over to another member.
    pub on_failover: Survival,
    /// Effect of a network partition between client and store.
    pub on_partition: Survival,
    /// The clients that are blocked while another client is paused in the middle of a call.
    pub stall: Stall,
    /// The fixed part of the longest time for which a dead holder's lock stays taken. The other
    /// part is [`recovery_leases`](Self::recovery_leases).
    pub recovery: Duration,
    /// The number of leases to add to [`recovery`](field@Self::recovery).
    pub recovery_leases: u32,
    /// Limits that the other fields do not express.
    pub notes: Cow<'static, [Cow<'static, str>]>,
}

/// All lock kinds.
pub const ALL_KINDS: &[Kind] = &[Kind::Mutex, Kind::RwLock, Kind::Semaphore];

impl Guarantees {
    /// Returns the weakest guarantees: only a mutex, with a lease, polling, no order, safe only
    /// with a fence. Each store raises the fields for which it offers more.
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
            min_hold: false,
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

    /// Returns all guarantees in words, as pairs of a property and its value. All stores have the
    /// same properties in the same order.
    pub fn in_words(&self) -> Vec<(&'static str, String)> {
        let yes = |so: bool| if so { "yes" } else { "no" }.to_owned();
        let kinds: Vec<String> = self.kinds.iter().map(Kind::to_string).collect();
        let recovery = match self.recovery_leases {
            0 => short(self.recovery),
            1 => format!("its lease + {}", short(self.recovery)),
            n => format!("{n} leases + {}", short(self.recovery)),
        };
        vec![
            ("lock kinds", kinds.join(", ")),
            ("FIFO order", yes(self.fifo)),
            ("waiters are notified by", self.wakeup.to_string()),
            ("an evicted holder is notified by", self.evicted.to_string()),
            ("watchers are notified by", self.followed.to_string()),
            ("a dead holder is detected by", self.liveness.to_string()),
            ("a dead holder's lock is free after", recovery),
            ("lease clock", self.clock.to_string()),
            ("lock_delay", yes(self.lock_delay)),
            ("min_hold (once per period)", yes(self.min_hold)),
            ("downgrade (writer to reader)", yes(self.downgrades)),
            ("try_upgrade (reader to writer)", yes(self.upgrades)),
            ("grants survive", self.grant.to_string()),
            ("token order survives", self.token.to_string()),
            ("holder paused longer than its lease", self.on_pause.to_string()),
            ("store's clock set", self.on_clock_step.to_string()),
            ("store crash and restart", self.on_store_crash.to_string()),
            ("fail-over", self.on_failover.to_string()),
            ("network partition", self.on_partition.to_string()),
            ("a client paused during a call blocks", self.stall.to_string()),
        ]
    }

    /// Returns whether holds expire unless they are renewed.
    pub fn has_leases(&self) -> bool {
        self.liveness != Liveness::Process
    }

    /// Returns whether the store supports this lock kind.
    pub fn keeps(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Returns whether the store offers this guarantee.
    pub fn meets(&self, wanted: Guarantee) -> bool {
        let holds = |s: Survival| matches!(s, Survival::Exclusive | Survival::NotApplicable);
        match wanted {
            Guarantee::Kind(kind) => self.keeps(kind),
            Guarantee::Fifo => self.fifo,
            Guarantee::Push => self.wakeup == Wakeup::Push,
            Guarantee::LockDelay => self.lock_delay,
            Guarantee::MinHold => self.min_hold,
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
            Self::Lease => "its lease",
            Self::Session => "its session",
            Self::Process => "the kernel",
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
            Self::SameLock(limit) => write!(f, "clients of the same lock, up to {}", short(*limit)),
            Self::SameLockForLong => f.write_str("clients of the same lock, until it resumes"),
            Self::Everybody => f.write_str("all clients, until it resumes"),
        }
    }
}

impl fmt::Display for ClockModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none (no leases)",
            Self::Monotonic => "monotonic",
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
            Self::Majority => "the loss of a minority of servers",
        })
    }
}

impl fmt::Display for Survival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exclusive => "one holder",
            Self::Fenced => "check tokens",
            Self::Unsafe => "UNSAFE",
            Self::NotApplicable => "cannot happen",
        })
    }
}

/// A guarantee that a caller can [require](crate::Builder::require) when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Guarantee {
    /// The store supports this lock kind.
    Kind(Kind),
    /// Live waiters acquire the lock in the order of their requests.
    Fifo,
    /// Waiters are notified by push.
    Push,
    /// A lock can stay unavailable for a while after an unclean end.
    LockDelay,
    /// A lock can stay unavailable for a while after a release.
    MinHold,
    /// Grants survive at least this failure.
    GrantDurability(Durability),
    /// Tokens still increase after at least this failure.
    TokenDurability(Durability),
    /// There is only one holder even if the store's wall clock is set.
    ExclusiveOnClockStep,
    /// There is only one holder even if the store crashes.
    ExclusiveOnStoreCrash,
    /// There is only one holder even across a fail-over.
    ExclusiveOnFailover,
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "locks of kind {kind}"),
            Self::Fifo => f.write_str("FIFO order"),
            Self::Push => f.write_str("push notifications"),
            Self::LockDelay => f.write_str("lock_delay"),
            Self::MinHold => f.write_str("min_hold"),
            Self::GrantDurability(d) => write!(f, "grants that survive {d}"),
            Self::TokenDurability(d) => write!(f, "token order that survives {d}"),
            Self::ExclusiveOnClockStep => f.write_str("one holder across a clock step"),
            Self::ExclusiveOnStoreCrash => f.write_str("one holder across a crash of the store"),
            Self::ExclusiveOnFailover => f.write_str("one holder across a fail-over"),
        }
    }
}
