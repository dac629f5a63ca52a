//! Renews many claims with one heartbeat, and settles the remaining locks separately.
//!
//! A heartbeat extends many rows with one statement, and waits for none of them. A row that another
//! transaction has locked is left out. (SQLite has one lock for everything.) Then one snapshot of
//! the locks shows the state of the claims that wait or were left out. It is one statement for any
//! number of locks. If many claims wait for one lock, the front of its queue and the list of tokens
//! are enough. So the heartbeats of many waiters do not read the whole queue each time. Batches
//! that contain only waiters take turns, so that a connection remains for holders.
//!
//! Committed state is true, so it can be reported. A holder that could not be renewed has the time
//! left in its row, and is renewed the next time. A claim that has no row is lost. The reply that a
//! claim waits confirms that its row was extended. So if the row was left out, and no section has
//! extended it since, the result for a waiter is unknown.
//!
//! A lock is also settled by a section if something in it has expired or become free, or a claim
//! was left out. There is one such section at a time for each lock. It can take long if a paused
//! client has the row locked. The results are then based on the snapshot. So one lock never blocks
//! the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::shared::Shared;
use leasehold_core::kit::locked;
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{Error, ErrorKind, Name, Result};

/// The time limit for settling a lock. After that, the next heartbeat tries again.
const SETTLING: Duration = Duration::from_secs(2);
/// The maximum time that a heartbeat waits for sections before it returns what it has seen.
const SETTLED_IN: Duration = Duration::from_millis(60);

impl Shared {
    /// Renews many claims. Locks whose row must be locked are settled separately.
    ///
    /// Batches are short enough for the server's message limit (`max_allowed_packet`). A batch that
    /// fails is divided in half and sent again, because a message that is too long may just end the
    /// connection. If a batch fails and cannot be divided, its results are unknown, and those of
    /// the other batches are returned.
    pub(super) async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut answers = Vec::with_capacity(renewals.len());
        let mut limit = self.most_bytes.load(Ordering::Relaxed);
        let (mut failed, mut is_known) = (None, false);
        while let Some(rest) = renewals.get(answers.len()..).filter(|rest| !rest.is_empty()) {
            let batch = &rest[..fits(rest, limit)];
            match self.renew_batch(batch).await {
                Ok(answered) => {
                    answers.extend(answered);
                    is_known = true;
                    // The batch that failed before was too long.
                    self.most_bytes.store(limit, Ordering::Relaxed);
                }
                Err(error) if !error.is_transient() => return Err(error),
                Err(_) if batch.len() > 1 && limit > LEAST_BYTES && bytes(batch) > LEAST_BYTES => {
                    limit = (bytes(batch) / 2).max(LEAST_BYTES);
                }
                Err(error) => {
                    answers.extend(batch.iter().map(|_| Renewal::unknown(&error)));
                    failed = Some(error);
                    // The server does not answer. The next heartbeat renews the rest.
                    if !is_known {
                        break;
                    }
                }
            }
        }
        match failed {
            Some(error) if !is_known => Err(error),
            _ => Ok(answers),
        }
    }

    async fn renew_batch(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renewed = self.renew_rows(renewals).await?;
        let mut unsettled: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
        for (i, _) in renewed.iter().enumerate().filter(|(_, one)| one.unsettled) {
            unsettled.entry(&renewals[i].claim.name).or_default().push(i);
        }
        let left_out: Vec<bool> = renewed.iter().map(|b| b.left_out).collect();
        let mut answers: Vec<Renewal> = renewed.into_iter().map(|b| b.renewal).collect();
        let until = Instant::now() + SETTLED_IN;
        let mut settling = Vec::new();
        for (name, indices) in unsettled {
            let these = indices.iter().map(|&i| renewals[i].clone()).collect();
            settling.push((self.settle(name, these), indices));
        }
        for (task, indices) in settling {
            let settled = match task {
                Some(task) => timeout_at(until, task).await.ok().and_then(Result::ok),
                None => None,
            };
            match settled {
                Some(Ok(renewed)) => {
                    for (i, renewal) in indices.into_iter().zip(renewed) {
                        answers[i] = renewal;
                    }
                }
                _ => indices.into_iter().for_each(|i| in_a_moment(&mut answers[i], left_out[i])),
            }
        }
        #[cfg(feature = "postgres")]
        for (renewal, answer) in renewals.iter().zip(&answers) {
            if let Renewal::Waiting(place) = answer {
                self.positions.note(renewal.claim.id, place.ahead);
            }
        }
        Ok(answers)
    }

    /// Settles a lock and renews these claims in a section. Returns `None` if another section is
    /// already settling the lock.
    fn settle(
        self: &Arc<Self>,
        name: &Name,
        these: Vec<Renew>,
    ) -> Option<JoinHandle<Result<Vec<Renewal>>>> {
        if !locked(&self.settling).insert(name.clone()) {
            return None;
        }
        let (shared, name) = (self.clone(), name.clone());
        let until = Instant::now() + SETTLING;
        Some(tokio::spawn(async move {
            let is_late = || Instant::now() > until;
            let done = shared.renew_in_section(&name, &these, &is_late).await;
            locked(&shared.settling).remove(&name);
            done
        }))
    }
}

/// The maximum size of a message with renewals. It is below the smallest limit that servers usually
/// have.
pub(super) const MOST_BYTES: usize = 256 * 1024;
/// Messages up to this size are not divided.
const LEAST_BYTES: usize = 4 * 1024;

/// Returns the maximum size of a renewal in a message, in bytes. The name is hex-encoded in the
/// JSON text, and that text is hex-encoded again.
fn bytes_of(renewal: &Renew) -> usize {
    4 * renewal.claim.name.as_str().len() + 320
}

fn bytes(renewals: &[Renew]) -> usize {
    renewals.iter().map(bytes_of).sum()
}

/// Returns how many of the renewals fit into a message, at least one.
fn fits(renewals: &[Renew], limit: usize) -> usize {
    let mut left = limit;
    let fitting = renewals.iter().take_while(|renewal| {
        let fits = bytes_of(renewal) <= left;
        left = left.saturating_sub(bytes_of(renewal));
        fits
    });
    fitting.count().max(1)
}

/// Adjusts the answer for a claim whose lock is being settled. The client polls again soon, but not
/// immediately.
fn in_a_moment(renewal: &mut Renewal, left_out: bool) {
    match renewal {
        // A client counts the lease of a notified grant from the last reply that the claim waits.
        // So that reply must not be sent for a row that was not extended. A holder must retry soon,
        // not after another third of a lease.
        Renewal::Waiting(_) | Renewal::Holding { .. } if left_out => {
            let what = "the claim's row is locked by another transaction";
            *renewal = Renewal::unknown(&Error::new(ErrorKind::Unreachable, what));
        }
        Renewal::Waiting(Place { head_remaining: Some(left), .. }) => {
            *left = (*left).max(SETTLED_IN / 3);
        }
        _ => {}
    }
}
