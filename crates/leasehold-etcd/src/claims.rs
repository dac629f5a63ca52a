//! The client's own claims: the lease of each, its queue position, and whether it is a holder.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::leases::Lease;
use leasehold_core::kit::drift;
use leasehold_core::{Claim, ClaimId, Moment, Token};

/// Number of claims from which the client looks for claims that were never released.
const SWEEP_FROM: usize = 1_024;
/// How long after the end of its lease a claim that was never released is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Claims {
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    known: HashMap<ClaimId, ClaimRecord>,
    sweep_at: usize,
}

/// The state of one claim.
#[derive(Clone, Debug)]
pub(super) struct ClaimRecord {
    pub(super) lease: Lease,
    /// Number of requests that attach a key to the lease and were sent, but not answered.
    unanswered: u32,
    /// The revision that created the claim's key, as a reply reported it.
    pub(super) token: Option<Token>,
    /// Whether a reply reported that the claim is a holder.
    pub(super) holds: bool,
    /// Until when the claim may be considered a holder. Set if the lease is longer than that by a
    /// lock delay.
    pub(super) until: Option<Moment>,
    /// For a waiter far back in a long queue: the key just ahead of it, and how many claims are
    /// ahead.
    pub(super) behind: Option<(Vec<u8>, usize)>,
    pub(super) ahead: usize,
}

/// A request with a claim's lease that is not answered yet. If this value is dropped, the request
/// stays counted as unanswered.
#[derive(Debug)]
pub(super) struct Unanswered<'a> {
    claims: &'a Claims,
    id: ClaimId,
}

/// The state of a claim that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndedClaim {
    pub(super) lease: Lease,
    /// Whether no request that was sent with the lease can still be under way.
    pub(super) clean: bool,
}

impl Claims {
    fn all(&self) -> MutexGuard<'_, All> {
        // No code that can panic runs between two consistent states.
        locked(&self.all)
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<ClaimRecord> {
        self.all().known.get(&id).cloned()
    }

    /// Records the lease of a claim, unless the claim has one already. Returns the lease that it
    /// has.
    pub(super) fn enter(&self, id: ClaimId, lease: Lease, now: Moment) -> Lease {
        let mut all = self.all();
        if all.known.len() >= all.sweep_at.max(SWEEP_FROM) {
            all.known.retain(|_, known| known.lease.ends.plus(FORGET_AFTER) > now);
            all.sweep_at = all.known.len() * 2;
        }
        let new = ClaimRecord {
            lease,
            unanswered: 0,
            token: None,
            holds: false,
            until: None,
            behind: None,
            ahead: 0,
        };
        all.known.entry(id).or_insert(new).lease
    }

    /// Changes the state of a claim, if the claim is known.
    pub(super) fn note(&self, id: ClaimId, change: impl FnOnce(&mut ClaimRecord)) {
        if let Some(known) = self.all().known.get_mut(&id) {
            change(known);
        }
    }

    /// Records that a reply reported the claim as a holder.
    pub(super) fn holds(&self, id: ClaimId, token: Token) {
        self.note(id, |known| (known.token, known.holds) = (Some(token), true));
    }

    /// Records for how long the claim may be considered a holder, if it has a lock delay.
    ///
    /// The time is counted from `begun`, the start of the call whose reply reports the claim as a
    /// holder, or as a waiter that may get a pushed grant. The caller allows for clock drift, and
    /// may have begun a little earlier. A release in the last moments is therefore refused, because
    /// a late release must not count as a clean one.
    pub(super) fn holds_for(&self, claim: &Claim, begun: Moment, left: Duration) {
        if !claim.lock_delay.is_zero() {
            let until = begun.plus(left.saturating_sub(drift(left) * 2));
            self.note(claim.id, |known| known.until = Some(until));
        }
    }

    /// Removes the limit of a pushed grant whose claim had its last heartbeat too long ago. The
    /// client does not rely on such a grant until it has renewed the claim, so the renewal must be
    /// allowed.
    pub(super) fn pushed(&self, claim: &Claim, now: Moment) {
        if self.is_in_delay(claim, now) {
            self.note(claim.id, |known| known.until = None);
        }
    }

    /// Returns whether the claim was a holder and its lock delay has begun, according to this
    /// client's own clock. From then on the claim may not be renewed or removed. Its key is deleted
    /// when its lease expires.
    pub(super) fn is_in_delay(&self, claim: &Claim, now: Moment) -> bool {
        !claim.lock_delay.is_zero()
            && self
                .get(claim.id)
                .is_some_and(|known| known.holds && known.until.is_some_and(|until| until <= now))
    }

    /// Records the reply to a renewal of this lease.
    pub(super) fn renewed(&self, id: ClaimId, lease: i64, ends: Moment) {
        self.note(id, |known| {
            if known.lease.id == lease {
                known.lease.ends = known.lease.ends.max(ends);
            }
        });
    }

    /// Records that a request with the claim's lease is being sent.
    pub(super) fn ask(&self, id: ClaimId) -> Unanswered<'_> {
        self.note(id, |known| known.unanswered += 1);
        Unanswered { claims: self, id }
    }

    /// Forgets a claim that has ended.
    pub(super) fn forget(&self, id: ClaimId) -> Option<EndedClaim> {
        let known = self.all().known.remove(&id)?;
        Some(EndedClaim { lease: known.lease, clean: known.unanswered == 0 })
    }
}

impl Unanswered<'_> {
    /// Records the reply. Call it only for a request that was sent once.
    pub(super) fn answered(self) {
        self.claims.note(self.id, |known| known.unanswered = known.unanswered.saturating_sub(1));
    }
}
