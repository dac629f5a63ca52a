//! Few joins of one client at a time on one lock.
//!
//! etcd applies one transaction after the other, for everybody, and one that joins looks at all the
//! lock's keys: in a queue of thousands that is milliseconds. A hundred such joins at once would hold
//! up all that etcd does for a second or two, after which it fails keep-alives (etcd 3.5 and later
//! renew no lease while they are so far behind). A few at a time keep etcd as busy, and nothing waits
//! behind them for long. Joins on other locks do not wait, but for those that share a turn by chance.

use std::hash::{BuildHasher, RandomState};

use tokio::sync::{Semaphore, SemaphorePermit};

use leasehold_core::Name;

/// How many joins may be under way on one lock.
const AT_ONCE: usize = 8;
/// Among how many turns the locks are spread.
const SPREAD: usize = 64;

#[derive(Debug)]
pub(super) struct Turns {
    turns: Vec<Semaphore>,
    spread: RandomState,
}

impl Default for Turns {
    fn default() -> Self {
        let turns = (0..SPREAD).map(|_| Semaphore::new(AT_ONCE)).collect();
        Self { turns, spread: RandomState::new() }
    }
}

impl Turns {
    /// Waits for a turn, in order; it ends with what is returned.
    pub(super) async fn turn(&self, name: &Name) -> Option<SemaphorePermit<'_>> {
        let at = self.spread.hash_one(name) % SPREAD as u64;
        let turns = usize::try_from(at).ok().and_then(|at| self.turns.get(at))?;
        turns.acquire().await.ok()
    }
}
