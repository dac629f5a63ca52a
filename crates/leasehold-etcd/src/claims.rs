//! What this client knows of its own claims: the lease of each, its place, and whether it holds.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::leases::Lease;
use leasehold_core::kit::drift;
use leasehold_core::{Claim, ClaimId, Moment, Token};

/// Claims that never left are looked for when there are so many.
const SWEEP_FROM: usize = 1_024;
/// How long after its lease has ended a claim is forgotten that never left.
const FORGET_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Claims {
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    known: HashMap<ClaimId, Known>,
    sweep_at: usize,
}

/// One claim.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) lease: Lease,
    /// How many requests that would attach a key to the lease were sent and not answered.
    unanswered: u32,
    /// With which revision the place was created that it was told of.
    pub(super) token: Option<Token>,
    /// It was told that it holds.
    pub(super) holds: bool,
    /// Until when it may believe that, where the lease goes on after it for a lock-delay.
    pub(super) until: Option<Moment>,
    /// Far back in a long queue: who is just before it, and how many are before it altogether.
    pub(super) behind: Option<(Vec<u8>, usize)>,
    pub(super) ahead: usize,
}

/// A request with a claim's lease that is not answered yet. Dropped, it never was.
#[derive(Debug)]
pub(super) struct Unanswered<'a> {
    claims: &'a Claims,
    id: ClaimId,
}

/// What is left of a claim that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remains {
    pub(super) lease: Lease,
    /// Nothing that was sent with the lease can still be under way.
    pub(super) clean: bool,
}

impl Claims {
    fn all(&self) -> MutexGuard<'_, All> {
        // No code that can panic runs between two consistent states.
        locked(&self.all)
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<Known> {
        self.all().known.get(&id).cloned()
    }

    /// Notes the lease of a claim, unless it has one already; tells which it has.
    pub(super) fn enter(&self, id: ClaimId, lease: Lease, now: Moment) -> Lease {
        let mut all = self.all();
        if all.known.len() >= all.sweep_at.max(SWEEP_FROM) {
            all.known.retain(|_, known| known.lease.ends.plus(FORGET_AFTER) > now);
            all.sweep_at = all.known.len() * 2;
        }
        let new = Known {
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

    /// Changes what is known of a claim, if anything is.
    pub(super) fn note(&self, id: ClaimId, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.all().known.get_mut(&id) {
            change(known);
        }
    }

    /// A claim was told that it holds.
    pub(super) fn holds(&self, id: ClaimId, token: Token) {
        self.note(id, |known| (known.token, known.holds) = (Some(token), true));
    }

    /// With a lock-delay: for how long it was told in a call that began then that it holds, or will hold if
    /// it is pushed a grant. Its caller allows for drift, and may have begun a little earlier; a release in
    /// the last moments is refused rather than one that comes too late is taken for a clean one.
    pub(super) fn holds_for(&self, claim: &Claim, begun: Moment, left: Duration) {
        if !claim.lock_delay.is_zero() {
            let until = begun.plus(left.saturating_sub(drift(left) * 2));
            self.note(claim.id, |known| known.until = Some(until));
        }
    }

    /// A claim was granted that had its last heartbeat so long ago that nobody believes in the grant before
    /// it is renewed: then it may be.
    pub(super) fn pushed(&self, claim: &Claim, now: Moment) {
        if self.is_in_delay(claim, now) {
            self.note(claim.id, |known| known.until = None);
        }
    }

    /// Whether the claim held and the lock-delay has begun, by this client's own clock. Then nobody may
    /// renew or end its place any more: that goes with its lease.
    pub(super) fn is_in_delay(&self, claim: &Claim, now: Moment) -> bool {
        !claim.lock_delay.is_zero()
            && self
                .get(claim.id)
                .is_some_and(|known| known.holds && known.until.is_some_and(|until| until <= now))
    }

    /// A renewal of this lease was answered.
    pub(super) fn renewed(&self, id: ClaimId, lease: i64, ends: Moment) {
        self.note(id, |known| {
            if known.lease.id == lease {
                known.lease.ends = known.lease.ends.max(ends);
            }
        });
    }

    /// A request with the claim's lease is being sent.
    pub(super) fn ask(&self, id: ClaimId) -> Unanswered<'_> {
        self.note(id, |known| known.unanswered += 1);
        Unanswered { claims: self, id }
    }

    /// Forgets a claim that is over.
    pub(super) fn forget(&self, id: ClaimId) -> Option<Remains> {
        let known = self.all().known.remove(&id)?;
        Some(Remains { lease: known.lease, clean: known.unanswered == 0 })
    }
}

impl Unanswered<'_> {
    /// It was answered, and was sent only once.
    pub(super) fn answered(self) {
        self.claims.note(self.id, |known| known.unanswered = known.unanswered.saturating_sub(1));
    }
}
