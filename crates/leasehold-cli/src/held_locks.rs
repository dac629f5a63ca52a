//! The locks that `run` holds, and the numbers of semaphore permits.
//!
//! `run` holds one lock, or several that are lost together.
//!
//! # Which permit
//! All permits of a semaphore are equal, but what they represent may differ, for example the third
//! of four graphics cards. A client with K of N permits therefore acquires K of N further locks,
//! `NAME/slot/1` to `NAME/slot/N`. The numbers of these locks are the numbers of its permits.
//! - *No number is used twice at once*, because each number is a lock of its own.
//! - *There is a number for each permit.* A holder has one number per permit, and releases the
//!   numbers first. So the other holders have at most N - 1 numbers. Only after a crash may the
//!   permit expire before the number does. Then the next holder waits for the number, as for any
//!   lock.
//! - *Losing a number* has the same consequences as losing the permit.

use std::task::Poll;
use std::time::Duration;

use leasehold::{Hold, MultiGuard, Released, State, Token, Watch};

use crate::args::TakeArgs;
use crate::exit::Failure;
use crate::slots;
use crate::take::Taking;

/// The locks that `run` holds: the requested ones, and the numbers of their permits.
pub(crate) struct HeldLocks {
    locks: MultiGuard,
    slots: Vec<Slot>,
}

/// The number of a permit, and the lock that reserves it.
struct Slot {
    number: u32,
    lock: MultiGuard,
}

impl HeldLocks {
    /// Wraps acquired locks. If they are permits of one semaphore, this also acquires their
    /// numbers.
    pub(crate) async fn of(locks: MultiGuard, taking: &Taking<'_>) -> Result<Self, Failure> {
        let mut held = Self { locks, slots: Vec::new() };
        if let (Some(capacity), [one]) = (taking.args.max, &held.guards()[..]) {
            let numbers = PermitNumbers::new(one.name().as_str(), capacity, one.grant());
            for _ in 0..one.permits() {
                held.slots.push(numbers.take(taking).await?);
            }
        }
        Ok(held)
    }

    fn guards(&self) -> Vec<&Hold> {
        self.locks.iter().collect()
    }

    /// Returns the locks' names with their tokens.
    pub(crate) fn tokens(&self) -> Vec<(String, Token)> {
        self.locks.iter().map(|guard| (guard.name().as_str().to_owned(), guard.grant())).collect()
    }

    pub(crate) fn watch(&self) -> LocksWatch {
        let slots = self.slots.iter().flat_map(|slot| slot.lock.iter());
        LocksWatch(self.locks.iter().chain(slots).map(Hold::watch).collect())
    }

    /// Returns the environment variables for programs that run under these locks. `names` are the
    /// names in the caller's order.
    pub(crate) fn environment(&self, names: &[String]) -> Vec<(&'static str, String)> {
        let guards: Vec<&Hold> = names.iter().filter_map(|name| self.locks.get(name)).collect();
        let lines = |each: fn(&Hold) -> String| -> Vec<String> {
            guards.iter().map(|guard| each(guard)).collect()
        };
        let all = [
            ("LEASEHOLD_NAME", "LEASEHOLD_NAMES", lines(|g| g.name().as_str().to_owned())),
            ("LEASEHOLD_TOKEN", "LEASEHOLD_TOKENS", lines(|g| g.grant().to_string())),
            ("LEASEHOLD_SEQUENCER", "LEASEHOLD_SEQUENCERS", lines(|g| g.sequencer().to_string())),
        ];
        let mut environment = Vec::new();
        for (first, every, lines) in all {
            environment.push((first, lines.first().cloned().unwrap_or_default()));
            environment.push((every, lines.join("\n")));
        }
        if !self.slots.is_empty() {
            let numbers: Vec<String> = self.slots.iter().map(|s| s.number.to_string()).collect();
            environment.push(("LEASEHOLD_SLOT", numbers.join(" ")));
        }
        environment
    }

    /// Returns the sequencers as text, separated by spaces, for nested runs.
    pub(crate) fn sequencers(&self) -> String {
        let all: Vec<String> = self.locks.iter().map(|g| g.sequencer().to_string()).collect();
        all.join(" ")
    }

    /// Releases the numbers, and then the locks.
    pub(crate) async fn release(self) -> leasehold::Result<Released> {
        let mut first = Ok(Released::Now);
        for slot in self.slots {
            let released = slot.lock.release().await;
            first = first.and(released);
        }
        let released = self.locks.release().await;
        first.and(released)
    }
}

/// The numbers of one semaphore's permits.
struct PermitNumbers {
    prefix: String,
    /// The names of the numbers' locks, in the order in which they are tried.
    names: Vec<String>,
}

impl PermitNumbers {
    /// Prepares the list of numbers. Each holder starts with a different number, so that it rarely
    /// tries one that is taken.
    fn new(name: &str, capacity: u32, token: Token) -> Self {
        let prefix = slots::prefix(name);
        let first = u32::try_from(token.get() % u64::from(capacity)).unwrap_or_default();
        let numbers = (first..capacity).chain(0..first);
        let names = numbers.map(|number| format!("{prefix}{}", number + 1)).collect();
        Self { prefix, names }
    }

    /// Acquires the lock of a free number.
    async fn take(&self, taking: &Taking<'_>) -> Result<Slot, Failure> {
        let args = TakeArgs {
            max: None,
            permits: None,
            min_hold: None,
            try_only: false,
            ..taking.args.clone()
        };
        let taking = Taking { args: &args, ..taking.clone() };
        let lock = taking.any(&self.names).await?;
        let taken = lock.iter().next().map(|guard| guard.name().as_str().to_owned());
        let number = taken.and_then(|name| name.strip_prefix(&self.prefix)?.parse().ok());
        Ok(Slot { number: number.unwrap_or_default(), lock })
    }
}

/// Watches locks that must all be held.
#[derive(Clone)]
pub(crate) struct LocksWatch(Vec<Watch>);

impl LocksWatch {
    /// Returns the state and the name of the lock that is in the worst state.
    pub(crate) fn worst(&self) -> (State, &str) {
        let rank = |state: &State| match state {
            State::Held => 2,
            State::AtRisk(_) => 1,
            _ => 0,
        };
        let states = self.0.iter().map(|watch| (watch.state(), watch));
        let worst = states.min_by_key(|(state, watch)| (rank(state), watch.remaining()));
        worst.map_or((State::Released, ""), |(state, watch)| (state, watch.name().as_str()))
    }

    /// Returns how long all locks are certain to be held.
    pub(crate) fn remaining(&self) -> Duration {
        self.0.iter().map(Watch::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Waits until the state of one of the locks changes.
    pub(crate) async fn changed(&mut self) {
        let mut changes: Vec<_> = self.0.iter_mut().map(|w| Box::pin(w.changed())).collect();
        std::future::poll_fn(|cx| {
            let changed = changes.iter_mut().any(|change| change.as_mut().poll(cx).is_ready());
            if changed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
