//! Heartbeats: one touch of the session for all claims, and a look at the queues that they stand in, which
//! shows who was evicted, and whose turn has come.
//!
//! - *Each claim has an outcome of its own.* Queues are looked at independently, each for a part of the time that
//!   the client waits for the answer. One that fails or hangs is `Unknown` for its own claims, and moves
//!   nothing; all others are extended.
//! - *Claims are extended before anything else is done.* The fronts of the queues in which claims of ours wait are
//!   looked at afterwards, by a task of their own: all their sessions at once, each once. What a waiter's
//!   heartbeat needs is one look at its queue, whatever the number of its other waits. At most one such task
//!   runs at a time. A heartbeat that comes while it runs leaves it to the next one.
//! - *Who looks at a front*: the next waiter, and the one after it, at each heartbeat; those further back less often the
//!   further back they are. So the session of a holder costs about the same number of looks, however many wait.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::Duration;

use leasehold_core::kit::spawn_on;
use leasehold_core::queue::Queue;
use leasehold_core::store::{Renew, Renewal, Standing};
use leasehold_core::{Name, Result};

use crate::cells::Answer;
use crate::known::Seen;
use crate::session::Session;
use crate::shared::{About, Because, Proof, Shared, seen};

/// How long a look at a session may take that is in a waiter's way.
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
        self.see_to_lives(renewals, &queues);
        self.see_to_fronts(renewals, queues);
        Ok(answers)
    }

    /// The queues of these claims, or why they are not known.
    async fn queues(&self, renewals: &[Renew]) -> BTreeMap<Name, Result<Seen>> {
        let mut names: Vec<&Name> = renewals.iter().map(|renew| &renew.claim.name).collect();
        names.sort_unstable();
        names.dedup();
        // The client waits for a third of the shortest period, and some of that is gone.
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

    /// Has those queues live on that have not changed for long, where queues end.
    fn see_to_lives(self: &Arc<Self>, renewals: &[Renew], queues: &BTreeMap<Name, Result<Seen>>) {
        let Some(idle) = self.cells.system().idle else { return };
        for renew in renewals {
            let name = &renew.claim.name;
            let Some(Ok(seen @ Seen { version: Some(version), .. })) = queues.get(name) else {
                continue;
            };
            if self.claims.is_old(renew.claim.id, version, self.clock.now(), idle) {
                let (shared, name, seen) = (self.clone(), name.clone(), seen.clone());
                // It has days for that, and is asked for again after the next of them.
                drop(spawn_on(&self.runtime, async move { shared.prolong(&name, &seen).await }));
            }
        }
    }

    /// Has the fronts of those queues looked at in which claims of ours wait.
    fn see_to_fronts(
        self: &Arc<Self>,
        renewals: &[Renew],
        mut queues: BTreeMap<Name, Result<Seen>>,
    ) {
        let mut fronts = Vec::new();
        for renew in renewals {
            let Some(Ok(seen)) = queues.get(&renew.claim.name) else { continue };
            let mut waiting = seen.queue.entries().filter(|e| e.standing == Standing::Waiting);
            let behind = waiting.position(|e| e.id == renew.claim.id);
            drop(waiting);
            let Some(behind) = behind else { continue };
            // Two of those that live look at each heartbeat.
            let far = u32::try_from(behind).unwrap_or(u32::MAX).saturating_add(1);
            let is_ours = far <= 2 || self.chance() < 2.0 / f64::from(far);
            if is_ours && let Some((name, Ok(seen))) = queues.remove_entry(&renew.claim.name) {
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

    /// Looks at all sessions in front of these queues, each once, and removes those that are gone.
    async fn clear_fronts(&self, fronts: Vec<(Name, Seen)>) {
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
            // What is not known now is known at the next heartbeat.
            let Ok(answer) = answer else { continue };
            if !self.note_session(id, &answer, unsure.iter().map(Vec::len).max().unwrap_or(0)) {
                suspects.insert(id.clone());
            }
        }
        for ((name, mut seen), unsure) in fronts.into_iter().zip(unsure) {
            if unsure.iter().any(|id| suspects.contains(id)) {
                // Not now, then at the next heartbeat.
                let _ = self.clear_front(&name, &mut seen).await;
            }
        }
    }

    /// Removes the dead in front, if there are any, and nobody else does at this moment.
    pub(crate) async fn clear_front(&self, name: &Name, seen: &mut Seen) -> Result<()> {
        let mut settled = seen.clone();
        if self.settle(&mut settled.queue, Proof::Sure).await? {
            let written = self.write(name, About::Nobody, settled.clone(), Because::Looked).await?;
            *seen = if written { settled } else { self.look(name).await? };
        }
        Ok(())
    }

    fn renewal(&self, queue: &Queue, renew: &Renew, session: &Session) -> Renewal {
        let (claim, now) = (&renew.claim, self.clock.now());
        let stands = self.claims.standing(claim.id, now).is_some_and(|id| id == session.id);
        let ours = queue.entries().any(|e| e.id == claim.id && e.session == session.id);
        if !stands || !ours {
            return Renewal::Lost;
        }
        let told = queue.peek(claim.id, self.time().now).unwrap_or(Renewal::Lost);
        let lease = match told {
            Renewal::Holding { .. } => renew.lease,
            _ => claim.waiter_lease,
        };
        let Some(ends) = self.claims.extend(claim.id, now, lease) else { return Renewal::Lost };
        match told {
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
