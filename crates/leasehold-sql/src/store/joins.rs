//! The joins of this client that are under way, so that none of them outlives its claim.
//!
//! A call is not stopped by its caller's drop, and two calls travel on two connections: a leave can
//! overtake the join that it is to undo (that one still connects, or is tried again), find nothing,
//! and be followed by a grant that nobody holds. So a join that ends after its claim was given up
//! leaves again by itself.

use std::collections::HashMap;
use std::sync::Mutex;

use leasehold_core::ClaimId;
use leasehold_core::kit::locked;

#[derive(Debug, Default)]
pub(super) struct Joins(Mutex<HashMap<ClaimId, Joining>>);

#[derive(Debug, Default)]
struct Joining {
    under_way: usize,
    given_up: bool,
    /// One of them was told that it waits.
    waits: bool,
}

/// What becomes of a claim one of whose joins has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// It was given up meanwhile.
    pub(super) given_up: bool,
    /// No other join of it is under way, and none was told that it waits.
    pub(super) idle: bool,
}

impl Joins {
    /// A join is asked for: whoever asks wants the claim, whatever was before.
    pub(super) fn begin(&self, id: ClaimId) {
        let mut all = locked(&self.0);
        let joining = all.entry(id).or_default();
        joining.under_way += 1;
        joining.given_up = false;
    }

    /// A leave is asked for. Tells whether a join is under way, which will leave too: whichever of the
    /// two comes second finds nothing.
    pub(super) fn give_up(&self, id: ClaimId) -> bool {
        let mut all = locked(&self.0);
        let joining = all.get_mut(&id).map(|joining| joining.given_up = true);
        joining.is_some()
    }

    /// A join has come to its end.
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
