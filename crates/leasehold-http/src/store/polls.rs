//! Long polls: one request for each claim of this client that waits.
//!
//! A poll is answered with the state of the claim: immediately if it no longer waits, and otherwise
//! once the server's store reports a change. So no grant is missed between the answer "waiting" and
//! the poll, or between two polls. A poll never joins.
//!
//! A poll is a task, because a caller drops and repeats [`changed`](super::Store::changed) often.
//! The task ends with its waiter. If the replica is replaced, the task polls the next one.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Method;
use leasehold_core::kit::{Ends, Waiters};
use leasehold_core::store::{Renewal, Signal};
use leasehold_core::{Claim, Result};
use tokio::time::sleep;

use super::replicas::{Replicas, Request, parsed, query};
use crate::wire::{ClaimBody, ClaimResponse, WaitQuery, claim_path};

/// How long one poll lasts at most: less than most proxies allow.
const WAIT: Duration = Duration::from_secs(25);
/// The pause after a poll that failed or was short: the first and the longest one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// The task that polls for one waiter. It exists once the waiter listens.
pub(super) type Poll = Arc<OnceLock<Ends>>;

/// Starts the task that polls for this claim, unless it has one.
pub(super) fn start(poll: &Poll, claim: &Claim, all: &Arc<Waiters<Poll>>, to: &Arc<Replicas>) {
    poll.get_or_init(|| {
        let waiters = Arc::downgrade(all);
        Ends::new(&to.runtime().spawn(run(claim.clone(), waiters, to.clone())))
    });
}

async fn run(claim: Claim, waiters: Weak<Waiters<Poll>>, replicas: Arc<Replicas>) {
    let wait = WaitQuery { wait: Some(format!("{}s", WAIT.as_secs())) };
    let (path, body) = (claim_path(claim.id), ClaimBody::from(&claim));
    let path = format!("{path}?{}&{}", query(&body), query(&wait));
    let request = Request { method: Method::GET, path, body: Bytes::new(), repeatable: true };
    let mut pause = PAUSE.0;
    loop {
        let begun = Instant::now();
        let state = replicas.wait(&request, WAIT).await;
        let state: Result<ClaimResponse> = state.and_then(|reply| parsed(&reply));
        let signal = match state.map(|state| state.status.renewal()) {
            Ok(Renewal::Holding { token, .. }) => Some(Signal::Granted(token)),
            Ok(Renewal::Waiting(_) | Renewal::Unknown { .. }) => None,
            Err(error) if error.is_transient() => None,
            // The caller polls, and gets the same answer.
            Ok(Renewal::Lost) | Err(_) => Some(Signal::Ask),
        };
        if let Some(signal) = signal {
            let Some(waiters) = waiters.upgrade() else { return };
            waiters.notify(claim.id, signal);
            if matches!(signal, Signal::Granted(_)) {
                return;
            }
        }
        // A server that answers immediately must not be polled in a tight loop.
        if begun.elapsed() < PAUSE.1 {
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE.1);
        } else {
            pause = PAUSE.0;
        }
    }
}
