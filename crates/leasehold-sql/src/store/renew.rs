//! Renewing many claims: a heartbeat for all, and what it cannot settle settled apart.
//!
//! Rows are lengthened, many by one statement, without waiting for any: a row that somebody has locked just
//! now is left out (SQLite has one lock for all). Then one snapshot of their locks, one statement however
//! many, tells how those stand that wait or were left out; of one lock, for which many wait, its front and
//! the list of tokens do, so that a crowd's heartbeats do not read the crowd each time. Batches in which
//! everybody waits take turns, so that they leave a connection to those that hold. What is committed is true,
//! so it can be answered: a holder that could not be renewed has what its row says, and is renewed next time;
//! what is not there is lost. That a waiter's row is there does not make its place last longer: one that was
//! left out, and that no section has lengthened since, is told that nothing is known.
//!
//! A lock where something has expired or become free, or somebody was left out, is settled by a
//! section besides, one at a time for each lock. If that takes long (the row is in the hands of a
//! client that was stopped), the answers are what was seen: one lock never holds up the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::call::{Answer, Call, out_of_step};
use super::shared::Shared;
use leasehold_core::kit::locked;
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{Error, ErrorKind, Name, Result};

/// How long it is tried to settle a lock; then the next heartbeat does.
const SETTLING: Duration = Duration::from_secs(2);
/// How long a heartbeat waits for what it settles, before it answers what it saw.
const SETTLED_IN: Duration = Duration::from_millis(60);

impl Shared {
    /// Renews many: what needs a lock's row is settled apart, each lock for itself.
    ///
    /// In batches that are short enough for the server's limit of a message (`max_allowed_packet`). One that fails
    /// is sent again by halves, since a message that is too long may just end the connection; what fails then
    /// is not known, and the others' answers count.
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
                    // What had failed before was too long.
                    self.most_bytes.store(limit, Ordering::Relaxed);
                }
                Err(error) if !error.is_transient() => return Err(error),
                Err(_) if batch.len() > 1 && limit > LEAST_BYTES && bytes(batch) > LEAST_BYTES => {
                    limit = (bytes(batch) / 2).max(LEAST_BYTES);
                }
                Err(error) => {
                    answers.extend(batch.iter().map(|_| Renewal::unknown(&error)));
                    failed = Some(error);
                    // No answer is to be had: the rest is asked for again by the next heartbeat.
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
        let beating = self.call(Call::Beat(renewals.to_vec()), &|| false).await?;
        let Answer::Beaten(beaten) = beating else { return out_of_step() };
        let mut unsettled: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
        for (i, _) in beaten.iter().enumerate().filter(|(_, beaten)| beaten.unsettled) {
            unsettled.entry(&renewals[i].claim.name).or_default().push(i);
        }
        let left_out: Vec<bool> = beaten.iter().map(|b| b.left_out).collect();
        let mut answers: Vec<Renewal> = beaten.into_iter().map(|b| b.renewal).collect();
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
                Some(Ok(Answer::Renewed(renewed))) => {
                    for (i, renewal) in indices.into_iter().zip(renewed) {
                        answers[i] = renewal;
                    }
                }
                _ => indices.into_iter().for_each(|i| in_a_moment(&mut answers[i], left_out[i])),
            }
        }
        Ok(answers)
    }

    /// Settles a lock and renews these in a section; `None` if somebody is at it already.
    fn settle(
        self: &Arc<Self>,
        name: &Name,
        these: Vec<Renew>,
    ) -> Option<JoinHandle<Result<Answer>>> {
        if !locked(&self.settling).insert(name.clone()) {
            return None;
        }
        let (shared, name) = (self.clone(), name.clone());
        let until = Instant::now() + SETTLING;
        Some(tokio::spawn(async move {
            let done = shared.call(Call::Renew(these), &|| Instant::now() > until).await;
            locked(&shared.settling).remove(&name);
            done
        }))
    }
}

/// How long a message with renewals is at most: less than the smallest limit that servers are set to.
pub(super) const MOST_BYTES: usize = 256 * 1024;
/// What is not divided because of its length.
const LEAST_BYTES: usize = 4 * 1024;

/// How long a renewal is in a message, at most: a name is written in hexadecimal in JSON, which is so again.
fn bytes_of(renewal: &Renew) -> usize {
    4 * renewal.claim.name.as_str().len() + 320
}

fn bytes(renewals: &[Renew]) -> usize {
    renewals.iter().map(bytes_of).sum()
}

/// How many of these fit in a message: one at least.
fn fits(renewals: &[Renew], limit: usize) -> usize {
    let mut left = limit;
    let fitting = renewals.iter().take_while(|renewal| {
        let fits = bytes_of(renewal) <= left;
        left = left.saturating_sub(bytes_of(renewal));
        fits
    });
    fitting.count().max(1)
}

/// For one whose lock is being settled: it asks again soon, but not at once.
fn in_a_moment(renewal: &mut Renewal, left_out: bool) {
    match renewal {
        // A grant that is pushed now would be believed to last from here.
        Renewal::Waiting(_) if left_out => {
            let what = "the claim's row is locked by another transaction";
            *renewal = Renewal::unknown(&Error::new(ErrorKind::Unreachable, what));
        }
        Renewal::Waiting(Place { head_remaining: Some(left), .. }) => {
            *left = (*left).max(SETTLED_IN / 3);
        }
        _ => {}
    }
}
