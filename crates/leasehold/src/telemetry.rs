//! What operators see: metrics through the `metrics` facade, events through `tracing`. Both are
//! features; without them everything here compiles to nothing. Claim ids are never shown.
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `leasehold_acquired_total` | counter | `kind` |
//! | `leasehold_acquire_seconds` | histogram | `kind` |
//! | `leasehold_not_acquired_total` | counter | `reason` |
//! | `leasehold_released_total` | counter | `kind` |
//! | `leasehold_lost_total` | counter | `reason` |
//! | `leasehold_renewals_total` | counter | |
//! | `leasehold_renewal_failures_total` | counter | |
//! | `leasehold_fence_refused_total` | counter | |
//! | `leasehold_fence_failures_total` | counter | |

#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(unused_variables))]

use std::time::Duration;

use crate::claim::{Claim, Token};
use crate::error::{Error, LostReason};

#[cfg(feature = "metrics")]
fn kind(claim: &Claim) -> &'static str {
    match claim.kind {
        crate::Kind::Mutex => "mutex",
        crate::Kind::RwLock => "rwlock",
        crate::Kind::Semaphore => "semaphore",
    }
}

#[inline]
pub(crate) fn acquired(claim: &Claim, token: Token, waited: impl FnOnce() -> Duration) {
    #[cfg(any(feature = "metrics", feature = "tracing"))]
    let waited = waited();
    #[cfg(feature = "metrics")]
    {
        metrics::counter!("leasehold_acquired_total", "kind" => kind(claim)).increment(1);
        metrics::histogram!("leasehold_acquire_seconds", "kind" => kind(claim))
            .record(waited.as_secs_f64());
    }
    #[cfg(feature = "tracing")]
    tracing::debug!(name = %claim.name, %token, ?waited, "acquired");
}

#[inline]
pub(crate) fn not_acquired(error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_not_acquired_total", "reason" => error.kind().to_string())
        .increment(1);
    #[cfg(feature = "tracing")]
    tracing::debug!(%error, "not acquired");
}

#[inline]
pub(crate) fn released(claim: &Claim, token: Token) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_released_total", "kind" => kind(claim)).increment(1);
    #[cfg(feature = "tracing")]
    tracing::debug!(name = %claim.name, %token, "released");
}

pub(crate) fn lost(claim: &Claim, token: Token, reason: LostReason) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_lost_total", "reason" => format!("{reason:?}")).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(name = %claim.name, %token, %reason, "lock lost");
}

pub(crate) fn renewed(claims: usize) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_renewals_total").increment(claims as u64);
    #[cfg(feature = "tracing")]
    tracing::trace!(claims, "renewed");
}

pub(crate) fn renewal_failed(claims: usize, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_renewal_failures_total").increment(claims as u64);
    #[cfg(feature = "tracing")]
    tracing::warn!(claims, %error, "renewal failed; trying again until the deadline");
}

pub(crate) fn leave_failed(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(name = %claim.name, %error, "release failed; trying again");
}

#[cfg(feature = "http")]
pub(crate) fn fence_refused(resource: &crate::Name, seen: Token, offered: Token) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_refused_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(%resource, %seen, %offered, "stale token refused");
}

#[cfg(feature = "http")]
pub(crate) fn fence_failed(resource: &crate::Name, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_failures_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(%resource, %error, "the fence cannot be asked; request refused");
}

/// The store may throw away what it is to keep.
#[cfg(feature = "redis")]
pub(crate) fn evicting(policy: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(policy, "the Redis server evicts keys, locks among them: set noeviction");
}

/// The numbers that a store orders a queue by are running out.
#[cfg(feature = "zookeeper")]
pub(crate) fn sequences_run_out(lock: &str, last: i64) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        lock = %lock.escape_debug(),
        last,
        "the lock's node gives out numbers up to 2147483647 only: let it be idle for a minute, or \
         delete it when it has no children"
    );
}

/// Who waits for a lock is told to join anew, and will hear why.
#[cfg(feature = "zookeeper")]
pub(crate) fn place_given_up(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(name = %claim.name, %error, "the place in the queue is given up");
}
