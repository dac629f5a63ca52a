//! Limits the number of concurrent joins of one client per lock.
//!
//! etcd applies the transactions of all clients one after the other, and a joining transaction
//! scans all keys of the lock. In a queue of thousands this takes milliseconds. A hundred such
//! joins at once would block etcd for a second or two. It would then fail keep-alives, because etcd
//! 3.5 and later renew no lease while they lag that far. A few joins at a time keep etcd equally
//! busy, and no request has to wait for them for long. Joins on other locks do not wait, except on
//! locks that hash to the same slot.

use std::hash::{BuildHasher, RandomState};

use tokio::sync::{Semaphore, SemaphorePermit};

use leasehold_core::Name;

/// Maximum number of concurrent joins per lock.
const AT_ONCE: usize = 8;
/// Number of slots to which the names are hashed.
const SPREAD: usize = 64;

#[derive(Debug)]
pub(super) struct JoinLimiter {
    limits: Vec<Semaphore>,
    spread: RandomState,
}

impl Default for JoinLimiter {
    fn default() -> Self {
        let limits = (0..SPREAD).map(|_| Semaphore::new(AT_ONCE)).collect();
        Self { limits, spread: RandomState::new() }
    }
}

impl JoinLimiter {
    /// Waits for a permit, in order. Dropping the permit lets the next join begin.
    pub(super) async fn acquire(&self, name: &Name) -> Option<SemaphorePermit<'_>> {
        let at = self.spread.hash_one(name) % SPREAD as u64;
        let limit = usize::try_from(at).ok().and_then(|at| self.limits.get(at))?;
        limit.acquire().await.ok()
    }
}
