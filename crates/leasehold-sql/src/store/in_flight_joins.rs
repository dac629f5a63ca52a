//! Tracks this client's joins in progress, so that no grant outlives its claim.
//!
//! Dropping the caller's future does not stop a call, and two calls use two connections. So a
//! `leave` can overtake the join that it is meant to undo, because that join is still connecting or
//! is retried. The `leave` finds nothing, and the join is then granted although no caller wants it.
//! Therefore a join that ends after its claim was given up sends a `leave` of its own, and the
//! first `leave` returns only after that one. If it fails, the first one fails too, and its caller
//! sends another.

use std::collections::HashMap;
use std::sync::Mutex;

use leasehold_core::kit::locked;
use leasehold_core::{ClaimId, Error, ErrorKind, Result};
use tokio::sync::watch;

use super::fault::closed;

/// The joins in progress, by claim.
#[derive(Debug, Default)]
pub(super) struct InFlightJoins(Mutex<HashMap<ClaimId, ClaimJoins>>);

#[derive(Debug, Default)]
struct ClaimJoins {
    under_way: usize,
    /// Whether the reply to one of the claim's joins was that the claim waits.
    waits: bool,
    /// Whether one of the joins was sent.
    sent: bool,
    /// If the claim was given up: receives whether the claim has been removed.
    given_up: Option<watch::Sender<Option<bool>>>,
}

/// The state of a claim after one of its joins has ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Whether the claim was given up while the join was in progress.
    pub(super) given_up: bool,
    /// Whether no other join of the claim is in progress, and no reply to a join was that the claim
    /// waits.
    pub(super) idle: bool,
    /// Set if this was the last join of a claim that was given up.
    pub(super) last: Option<LastJoin>,
}

/// The end of the last join of a claim that was given up. The caller removes the claim.
#[derive(Debug)]
pub(super) struct LastJoin {
    /// Whether a join was sent, so that the claim may exist.
    pub(super) may_exist: bool,
    given_up: watch::Sender<Option<bool>>,
}

impl LastJoin {
    /// Reports whether the claim has been removed, or never existed.
    pub(super) fn removed(self, is_removed: bool) {
        self.given_up.send_replace(Some(is_removed));
    }
}

/// Joins in progress of a claim that was given up.
#[derive(Debug)]
pub(super) struct GivenUpJoins(watch::Receiver<Option<bool>>);

impl GivenUpJoins {
    /// Waits until all joins have ended, and the claim has left.
    ///
    /// # Errors
    /// The claim may still exist.
    pub(super) async fn removed(mut self) -> Result<()> {
        match self.0.wait_for(Option::is_some).await.map(|removed| *removed) {
            Ok(Some(true)) => Ok(()),
            Ok(_) => {
                let what = "the claim of a canceled acquisition could not be removed";
                Err(Error::new(ErrorKind::Unreachable, what))
            }
            Err(_) => Err(closed()),
        }
    }
}

impl InFlightJoins {
    /// Records the start of a join. A new join means that the claim is wanted, even if it was given
    /// up before.
    pub(super) fn begin(&self, id: ClaimId) {
        let mut all = locked(&self.0);
        let joining = all.entry(id).or_default();
        joining.under_way += 1;
        joining.given_up = None;
    }

    /// Records a `leave`. Returns the joins in progress, if there are any. The last one sends a
    /// `leave` of its own. The second of the two requests finds nothing.
    pub(super) fn give_up(&self, id: ClaimId) -> Option<GivenUpJoins> {
        let mut all = locked(&self.0);
        let joining = all.get_mut(&id)?;
        let given_up = joining.given_up.get_or_insert_with(|| watch::Sender::new(None));
        Some(GivenUpJoins(given_up.subscribe()))
    }

    /// Records the end of a join. `waits` is whether its reply was that the claim waits, and `sent`
    /// is whether it was sent.
    pub(super) fn end(&self, id: ClaimId, waits: bool, sent: bool) -> Ended {
        let mut all = locked(&self.0);
        let joining = all.entry(id).or_default();
        joining.under_way = joining.under_way.saturating_sub(1);
        joining.waits |= waits;
        joining.sent |= sent;
        let (given_up, is_last) = (joining.given_up.is_some(), joining.under_way == 0);
        let idle = is_last && !joining.waits;
        let ended = is_last.then(|| all.remove(&id)).flatten();
        let last = ended
            .and_then(|joins| Some(LastJoin { may_exist: joins.sent, given_up: joins.given_up? }));
        Ended { given_up, idle, last }
    }
}
