//! Releases a claim when no caller waits for the result.

use std::sync::Arc;
use std::time::Duration;

use super::{spans, telemetry};
use crate::store::Store;
use crate::types::claim::Claim;
use crate::types::error::Error;
use crate::types::limits::request_timeout;
use crate::util::clock::{Clock, Moment};
use crate::util::world;

/// The longest pause between two attempts to release a claim.
const LEAVE_AGAIN: Duration = Duration::from_secs(1);

/// Releases a claim. Retries until the store answers, an error is permanent, or two leases have
/// passed and the claim has certainly expired.
///
/// In a store without leases, a claim lives as long as its client. There, the retries continue in
/// another task. The client does not wait for that task, and the task ends with the client, as the
/// claim does.
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

/// Tries to release the claim until `give_up`, and returns whether the store has released it. A
/// permanent error ends the attempts.
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
