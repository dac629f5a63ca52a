//! What `run` holds: one lock, or several that stand and fall together; and the number of a permit.
//!
//! # Which permit
//! Permits of a semaphore are all alike, but what they stand for may not be: the third of four cards. So who
//! has K of N permits takes K of N further locks, `NAME/slot/1` to `NAME/slot/N`, and their numbers are the permits'.
//! - *No number twice at once*: each is a lock of its own.
//! - *There is one for each*: who has a permit has one number for it, and gives the number back first. So the
//!   others have N - 1 at most. Only of a holder that died may the permit end before the number does: that is
//!   waited for, as for any lock.
//! - *What is lost*: a number that is lost is a loss like the permit's.

use std::task::Poll;
use std::time::Duration;

use leasehold::{Guard, Guards, Released, State, Token, Watch};

use crate::args::TakeArgs;
use crate::exit::Failure;
use crate::slots;
use crate::take::Taking;

/// Locks that are held, the caller's first.
pub(crate) struct Held {
    locks: Guards,
    slots: Vec<Slot>,
}

/// The number of a permit.
struct Slot {
    number: u32,
    lock: Guards,
}

impl Held {
    /// These locks; and the numbers of the permits, where they are permits of one semaphore.
    pub(crate) async fn of(locks: Guards, taking: &Taking<'_>) -> Result<Self, Failure> {
        let mut held = Self { locks, slots: Vec::new() };
        if let (Some(capacity), [one]) = (taking.args.max, &held.guards()[..]) {
            let numbers = Numbers::new(one.name().as_str(), capacity, one.token());
            for _ in 0..one.permits() {
                held.slots.push(numbers.take(taking).await?);
            }
        }
        Ok(held)
    }

    fn guards(&self) -> Vec<&Guard> {
        self.locks.iter().collect()
    }

    /// The locks by name, with their tokens.
    pub(crate) fn tokens(&self) -> Vec<(String, Token)> {
        self.locks.iter().map(|guard| (guard.name().as_str().to_owned(), guard.token())).collect()
    }

    pub(crate) fn watch(&self) -> Watched {
        let slots = self.slots.iter().flat_map(|slot| slot.lock.iter());
        Watched(self.locks.iter().chain(slots).map(Guard::watch).collect())
    }

    /// What whoever works under these locks finds in its environment. `names`: in the caller's order.
    pub(crate) fn environment(&self, names: &[String]) -> Vec<(&'static str, String)> {
        let guards: Vec<&Guard> = names.iter().filter_map(|name| self.locks.get(name)).collect();
        let lines = |each: fn(&Guard) -> String| -> Vec<String> {
            guards.iter().map(|guard| each(guard)).collect()
        };
        let all = [
            ("LEASEHOLD_NAME", "LEASEHOLD_NAMES", lines(|g| g.name().as_str().to_owned())),
            ("LEASEHOLD_TOKEN", "LEASEHOLD_TOKENS", lines(|g| g.token().to_string())),
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

    /// As text, with blanks between them, for those below us.
    pub(crate) fn sequencers(&self) -> String {
        let all: Vec<String> = self.locks.iter().map(|g| g.sequencer().to_string()).collect();
        all.join(" ")
    }

    /// Gives the numbers back, and then the locks.
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
struct Numbers {
    prefix: String,
    /// The names of their locks, in the order in which they are tried.
    names: Vec<String>,
}

impl Numbers {
    /// Each holder begins at another one, so that it seldom meets one that is taken.
    fn new(name: &str, capacity: u32, token: Token) -> Self {
        let prefix = slots::prefix(name);
        let first = u32::try_from(token.get() % u64::from(capacity)).unwrap_or_default();
        let numbers = (first..capacity).chain(0..first);
        let names = numbers.map(|number| format!("{prefix}{}", number + 1)).collect();
        Self { prefix, names }
    }

    /// One that nobody has.
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

/// Follows locks of which all must be held.
#[derive(Clone)]
pub(crate) struct Watched(Vec<Watch>);

impl Watched {
    /// How it stands with the one that stands worst, and its name.
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

    /// For how long all are certain.
    pub(crate) fn remaining(&self) -> Duration {
        self.0.iter().map(Watch::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Waits until one of them changes.
    pub(crate) async fn changed(&mut self) {
        let mut changes: Vec<_> = self.0.iter_mut().map(|w| Box::pin(w.changed())).collect();
        std::future::poll_fn(|cx| {
            let changed = changes.iter_mut().any(|change| change.as_mut().poll(cx).is_ready());
            if changed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
