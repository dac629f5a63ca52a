//! Heartbeats: one touch of the session for all claims, and a look at the queues that they stand in, which
//! tells who was evicted, and whose turn has come.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::queue::Queue;
use leasehold_core::store::{Renew, Renewal, Standing};
use leasehold_core::{Name, Result};

use crate::cells::{Answer, Request};
use crate::known::Seen;
use crate::session::Session;
use crate::shared::{About, Because, Proof, Shared, seen};

/// How many queues are asked for at once.
const AT_ONCE: usize = 256;

impl Shared {
    pub(crate) async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let Some(session) = self.sessions.current() else {
            return Ok(vec![Renewal::Lost; renewals.len()]);
        };
        let longest = |renew: &Renew| renew.lease.max(renew.claim.waiter_lease);
        let longest = renewals.iter().map(longest).max().unwrap_or(Duration::ZERO);
        if !self.sessions.vouch(&session, longest).await? {
            return Ok(vec![Renewal::Lost; renewals.len()]);
        }
        let mut answers = Vec::with_capacity(renewals.len());
        for some in renewals.chunks(AT_ONCE) {
            let queues = self.queues(some).await?;
            for renew in some {
                answers.push(match queues.get(&renew.claim.name) {
                    Some(Ok(seen)) => self.renewal(&seen.queue, renew, &session),
                    Some(Err(error)) => Renewal::unknown(error),
                    None => Renewal::Lost,
                });
            }
        }
        Ok(answers)
    }

    /// The queues of these claims. Where one waits, those in front that are dead are removed.
    async fn queues(&self, some: &[Renew]) -> Result<BTreeMap<Name, Result<Seen>>> {
        let mut names: Vec<&Name> = some.iter().map(|renew| &renew.claim.name).collect();
        names.sort_unstable();
        names.dedup();
        let gets = names.iter().map(|name| Request::Get { key: self.keys.lock(name) }).collect();
        let found = self.cells.run(gets).await?;
        let looked = names.into_iter().zip(found).map(|(name, cell)| {
            let cell = if let Answer::Found(_) = cell { seen(name, cell) } else { return None };
            Some((name.clone(), cell))
        });
        let mut queues: BTreeMap<Name, Result<Seen>> = looked.flatten().collect();
        for (name, looked) in &mut queues {
            let Ok(seen) = looked else { continue };
            let waits = some.iter().any(|renew| {
                let id = renew.claim.id;
                let mut all = seen.queue.entries();
                renew.claim.name == *name
                    && all.any(|e| e.id == id && e.standing == Standing::Waiting)
            });
            if waits {
                // Not now, then at the next look: neighbours must not pay for it.
                let _ = self.clear_front(name, seen).await;
            }
        }
        Ok(queues)
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
