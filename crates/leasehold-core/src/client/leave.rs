//! Giving a claim back without a caller to wait for it.

use std::sync::Arc;
use std::time::Duration;

use super::{spans, telemetry};
use crate::base::clock::{Clock, Moment};
use crate::base::world;
use crate::store::Store;
use crate::words::claim::Claim;
use crate::words::error::Error;
use crate::words::limits::request_timeout;

/// The longest pause between two tries to give a claim back.
const LEAVE_AGAIN: Duration = Duration::from_secs(1);

/// Gives a claim back, again and again until the store answers or the claim can no longer live there.
/// Claims without leases live as long as their client: then this goes on in a task that is owed to nobody,
/// and ends with the client as they do.
pub(crate) async fn leave_with_retry(
    store: Arc<dyn Store>,
    clock: Clock,
    claim: Claim,
    keep_until: Moment,
) {
    let give_up = clock.now().plus(claim.lease * 2);
    let left = leave_until(give_up, &*store, &clock, &claim, keep_until).await;
    if left || store.guarantees().has_leases() {
        return;
    }
    world::spawn(async move {
        while !leave_until(Moment::NEVER, &*store, &clock, &claim, keep_until).await {
            tokio::time::sleep(LEAVE_AGAIN).await;
        }
    });
}

/// Tells whether the store has answered before it was given up.
async fn leave_until(
    give_up: Moment,
    store: &dyn Store,
    clock: &Clock,
    claim: &Claim,
    keep_until: Moment,
) -> bool {
    let limit = request_timeout(claim.lease);
    let mut pause = Duration::from_millis(20);
    loop {
        let left = keep_until.since(clock.now());
        let leave = store.leave(claim, (!left.is_zero()).then_some(left));
        let leave = spans::call("leave", leave);
        let error = match store.info().is_local {
            true => leave.await.err(),
            false => match tokio::time::timeout(limit, leave).await {
                Ok(answer) => answer.err(),
                Err(_) => Some(Error::no_reply(limit)),
            },
        };
        let Some(error) = error else { return true };
        telemetry::leave_failed(claim, &error);
        if !error.is_transient() || clock.now() > give_up {
            return false;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LEAVE_AGAIN);
    }
}
