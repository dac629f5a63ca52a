//! Releases a claim when no caller waits for the result.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Pauses before the repetitions of a release whose claim may join late.
const LATE_JOINS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(5)];

/// Repeats the release of a claim that may have joined after its release. Each repetition is one
/// attempt. They end when the client is closed.
///
/// A request to join may arrive after the release: the two may use different connections, and a
/// proxy may delay the request or send it twice. No client then renews or releases the claim.
/// Without the repetitions, the lock would be unavailable until the claim's lease expires.
pub(crate) async fn leave_late_joins(
    store: Arc<dyn Store>,
    clock: Clock,
    claim: Claim,
    closed: Arc<AtomicBool>,
) {
    for pause in LATE_JOINS {
        tokio::time::sleep(pause).await;
        if closed.load(Ordering::SeqCst) {
            return;
        }
        let only_once = Moment::from_nanos(0);
        leave_until(only_once, &*store, &clock, &claim, Moment::from_nanos(0)).await;
    }
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
        if !error.is_transient() || clock.now() >= give_up {
            return false;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LEAVE_AGAIN);
    }
}
