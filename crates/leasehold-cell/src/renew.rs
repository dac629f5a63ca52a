//! Renewal of claims: one renewal of the session for all claims, and a read of their queues. The
//! read shows which claims were evicted and which waiters now hold.
//!
//! - *Each claim has its own result.* Queues are read independently, each within a part of the time
//!   that the client waits for the reply. If the read of a queue fails or hangs, the result for the
//!   claims in it is `Unknown`, and those claims are not extended. All other claims are extended.
//! - *Claims are extended before fronts are checked.* The fronts of queues with waiting claims are
//!   checked afterwards in a separate task, which reads each session there once. So the renewal of
//!   a waiter itself costs one read of its queue, regardless of how many other locks its client
//!   waits for. At most one such task runs at a time. A renewal that finds it running leaves the
//!   check to the next renewal.
//! - *Not every waiter checks the front.* The first two waiters do so at each renewal, and the
//!   others less often the further back they are. So the number of reads of a holder's session
//!   grows only with the logarithm of the number of waiters.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::Duration;

use leasehold_core::kit::spawn_on;
use leasehold_core::queue::Queue;
use leasehold_core::store::{ClaimState, Renew, Renewal};
use leasehold_core::{Name, Result};

use crate::cells::Answer;
use crate::last_writes::CellSnapshot;
use crate::session::Session;
use crate::shared::{ClaimEffect, Proof, Shared, WriteBasis, seen};

/// Time limit for reading the sessions at the fronts of queues.
const FRONT: Duration = Duration::from_secs(3);

impl Shared {
    pub(crate) async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let Some(session) = self.sessions.current() else {
            return Ok(vec![Renewal::Lost; renewals.len()]);
        };
        let longest = |renew: &Renew| renew.lease.max(renew.claim.waiter_lease);
        let longest = renewals.iter().map(longest).max().unwrap_or(Duration::ZERO);
        if !self.sessions.vouch(&session, longest).await? {
            return Ok(vec![Renewal::Lost; renewals.len()]);
        }
        let queues = self.queues(renewals).await;
        let mut answers = Vec::with_capacity(renewals.len());
        for renew in renewals {
            answers.push(match queues.get(&renew.claim.name) {
                Some(Ok(seen)) => self.renewal(&seen.queue, renew, &session),
                Some(Err(error)) => Renewal::unknown(error),
                None => Renewal::Lost,
            });
        }
        self.extend_lifetimes(renewals, &queues);
        self.see_to_fronts(renewals, queues);
        Ok(answers)
    }

    /// Reads the queues of all claims in `renewals`. The result contains an error for each queue
    /// that could not be read.
    async fn queues(&self, renewals: &[Renew]) -> BTreeMap<Name, Result<CellSnapshot>> {
        let mut names: Vec<&Name> = renewals.iter().map(|renew| &renew.claim.name).collect();
        names.sort_unstable();
        names.dedup();
        // The client waits for a third of the shortest period, and a part of that has passed.
        let period = |renew: &Renew| match self.claims.waits(renew.claim.id) {
            Some(_) => renew.claim.waiter_lease,
            None => renew.claim.lease,
        };
        let limit = renewals.iter().map(period).min().unwrap_or_default() / 4;
        let keys = names.iter().map(|name| self.keys.lock(name)).collect();
        let looked = names.into_iter().zip(self.cells.looks(keys, limit).await);
        let looked = looked.filter_map(|(name, cell)| {
            let seen = match cell {
                Ok(cell @ Answer::Found(_)) => seen(name, cell),
                Ok(_) => return None,
                Err(error) => Err(error),
            };
            Some((name.clone(), seen))
        });
        looked.collect()
    }

    /// Extends the lifetime of queues that have not changed for a long time, if queues expire.
    fn extend_lifetimes(
        self: &Arc<Self>,
        renewals: &[Renew],
        queues: &BTreeMap<Name, Result<CellSnapshot>>,
    ) {
        let Some(idle) = self.cells.system().idle else { return };
        for renew in renewals {
            let name = &renew.claim.name;
            let Some(Ok(seen @ CellSnapshot { version: Some(version), .. })) = queues.get(name)
            else {
                continue;
            };
            if self.claims.is_old(renew.claim.id, version, self.clock.now(), idle) {
                let (shared, name, seen) = (self.clone(), name.clone(), seen.clone());
                // There are days left for this request, and it is sent again after the next `idle`
                // period.
                drop(spawn_on(&self.runtime, async move { shared.prolong(&name, &seen).await }));
            }
        }
    }

    /// Checks the fronts of the queues in which claims of this client wait.
    fn see_to_fronts(
        self: &Arc<Self>,
        renewals: &[Renew],
        mut queues: BTreeMap<Name, Result<CellSnapshot>>,
    ) {
        let mut fronts = Vec::new();
        for renew in renewals {
            let Some(Ok(seen)) = queues.get(&renew.claim.name) else { continue };
            let mut waiting = seen.queue.entries().filter(|e| e.state == ClaimState::Waiting);
            let behind = waiting.position(|e| e.id == renew.claim.id);
            drop(waiting);
            let Some(behind) = behind else { continue };
            // The number of waiters that check the front grows only with the logarithm of their
            // total number.
            let far = u32::try_from(behind).unwrap_or(u32::MAX).saturating_add(1);
            let is_read = far <= 2 || self.chance() < 2.0 / f64::from(far);
            if is_read && let Some((name, Ok(seen))) = queues.remove_entry(&renew.claim.name) {
                fronts.push((name, seen));
            }
        }
        if !fronts.is_empty() && !self.is_clearing.swap(true, AcqRel) {
            let shared = self.clone();
            spawn_on(&self.runtime, async move {
                shared.clear_fronts(fronts).await;
                shared.is_clearing.store(false, Release);
            });
        }
    }

    /// Reads all sessions at the fronts of these queues once, and removes those that are gone.
    async fn clear_fronts(&self, fronts: Vec<(Name, CellSnapshot)>) {
        let nobody = HashSet::new();
        let unsure: Vec<Vec<String>> =
            fronts.iter().map(|(_, seen)| self.unsure(&seen.queue, &nobody)).collect();
        let mut sessions: Vec<&String> = unsure.iter().flatten().collect();
        sessions.sort_unstable();
        sessions.dedup();
        let keys = sessions.iter().map(|id| self.keys.session(id)).collect();
        let looked = self.cells.looks(keys, FRONT).await;
        let mut suspects = HashSet::new();
        for (id, answer) in sessions.into_iter().zip(looked) {
            // If the read failed, the session is read again at the next renewal.
            let Ok(answer) = answer else { continue };
            if !self.note_session(id, &answer, unsure.iter().map(Vec::len).max().unwrap_or(0)) {
                suspects.insert(id.clone());
            }
        }
        for ((name, mut seen), unsure) in fronts.into_iter().zip(unsure) {
            if unsure.iter().any(|id| suspects.contains(id)) {
                // If the check fails, the next renewal repeats it.
                let _ = self.clear_front(&name, &mut seen).await;
            }
        }
    }

    /// Removes dead claims from the front of the queue, unless another client writes the queue at
    /// the same time.
    pub(crate) async fn clear_front(&self, name: &Name, seen: &mut CellSnapshot) -> Result<()> {
        let mut settled = seen.clone();
        if self.settle(&mut settled.queue, Proof::Sure).await? {
            let (effect, basis) = (ClaimEffect::None, WriteBasis::Read);
            let written = self.write(name, effect, settled.clone(), basis).await?;
            *seen = if written { settled } else { self.read_queue(name).await? };
        }
        Ok(())
    }

    fn renewal(&self, queue: &Queue, renew: &Renew, session: &Session) -> Renewal {
        let (claim, now) = (&renew.claim, self.clock.now());
        let is_ours = self.claims.session_of(claim.id, now).is_some_and(|id| id == session.id);
        let ours = queue.entries().any(|e| e.id == claim.id && e.session == session.id);
        if !is_ours || !ours {
            return Renewal::Lost;
        }
        let answer = queue.peek(claim.id, self.time().now).unwrap_or(Renewal::Lost);
        let lease = match answer {
            Renewal::Holding { .. } => renew.lease,
            _ => claim.waiter_lease,
        };
        let Some(ends) = self.claims.extend(claim.id, now, lease) else { return Renewal::Lost };
        match answer {
            Renewal::Holding { token, .. } => {
                self.claims.stands(claim.id, &session.id, ends, None);
                let remaining = Some(ends.min(session.certain()).since(now));
                Renewal::Holding { token, remaining }
            }
            Renewal::Waiting(place) => {
                self.claims.stands(claim.id, &session.id, ends, Some(place.ahead));
                Renewal::Waiting(place)
            }
            other => other,
        }
    }
}
