//! Tracks this client's joins in progress, so that no grant outlives its claim.
//!
//! Dropping the caller's future does not stop a call, and two calls use two connections. So a
//! `leave` can overtake the join that it is meant to undo, because that join is still connecting or
//! is retried. The `leave` finds nothing, and the join is then granted although no caller wants it.
//! Therefore a join that ends after its claim was given up sends a `leave` of its own.

use std::collections::HashMap;
use std::sync::Mutex;

use leasehold_core::ClaimId;
use leasehold_core::kit::locked;

/// The joins in progress, by claim.
#[derive(Debug, Default)]
pub(super) struct InFlightJoins(Mutex<HashMap<ClaimId, ClaimJoins>>);

#[derive(Debug, Default)]
struct ClaimJoins {
    under_way: usize,
    given_up: bool,
    /// Whether the reply to one of the claim's joins was that the claim waits.
    waits: bool,
}

/// The state of a claim after one of its joins has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// Whether the claim was given up while the join was in progress.
    pub(super) given_up: bool,
    /// Whether no other join of the claim is in progress, and no reply to a join was that the claim
    /// waits.
    pub(super) idle: bool,
}

impl InFlightJoins {
    /// Records the start of a join. A new join means that the claim is wanted, even if it was given
    /// up before.
    pub(super) fn begin(&self, id: ClaimId) {
        let mut all = locked(&self.0);
        let joining = all.entry(id).or_default();
        joining.under_way += 1;
        joining.given_up = false;
    }

    /// Records a `leave`. Returns whether a join is in progress, which then sends a `leave` of its
    /// own. The second of the two requests finds nothing.
    pub(super) fn give_up(&self, id: ClaimId) -> bool {
        let mut all = locked(&self.0);
        let joining = all.get_mut(&id).map(|joining| joining.given_up = true);
        joining.is_some()
    }

    /// Records the end of a join.
    pub(super) fn end(&self, id: ClaimId, waits: bool) -> Ended {
        let mut all = locked(&self.0);
        let joining = all.entry(id).or_default();
        joining.under_way = joining.under_way.saturating_sub(1);
        joining.waits |= waits;
        let last = joining.under_way == 0;
        let ended = Ended { given_up: joining.given_up, idle: last && !joining.waits };
        if last {
            all.remove(&id);
        }
        ended
    }
}
