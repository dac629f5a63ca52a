//! Renewals and heartbeats: rows are lengthened without locking any lock's row but a head's; what
//! needs a lock's row is settled apart, each lock for itself.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::call::{Answer, Call};
use super::fault::Failure;
use super::rows::{Cells, micros};
use super::wire::{Arg, Wire};
use super::{RENEWED_TOGETHER, SETTLED_IN, Shared, SqlStore, closed, lock, returns_rows};
use crate::claim::Token;
use crate::error::Result;
use crate::name::Name;
use crate::store::{Place, Renew, Renewal};

/// What a heartbeat without the lock's row has found.
#[derive(Clone, Debug)]
pub(super) enum Beaten {
    Renewed(Renewal),
    /// It waits, and so much is sure; but something is to be settled.
    Unsettled(Renewal),
    /// Only the queue itself knows.
    Unknown,
}

impl Shared {
    /// Renewals and heartbeats, as far as no lock's row is needed for them.
    pub(super) async fn beat(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
    ) -> Result<Vec<Beaten>, Failure> {
        let mut answers = vec![Beaten::Unknown; renewals.len()];
        let heads = self.renew_heads(wire, renewals).await?;
        let mut open: BTreeSet<usize> = (0..renewals.len()).collect();
        for (i, token) in heads {
            // As for the fast path: no longer than the row says.
            let remaining = Some(renewals[i].lease);
            answers[i] = Beaten::Renewed(Renewal::Holding { token, remaining });
            open.remove(&i);
        }
        let open: Vec<usize> = open.into_iter().collect();
        let mut by_name: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
        for i in self.renew_claims(wire, renewals, &open).await? {
            by_name.entry(&renewals[i].claim.name).or_default().push(i);
        }
        for (name, indices) in by_name {
            let Some(mut seen) = self.snapshot(wire, name).await? else { continue };
            let (settled, now) = (seen.is_settled(), seen.now);
            for i in indices {
                let Renew { claim, lease } = &renewals[i];
                let Some(renewal) = seen.standing_of(claim, *lease, now) else { continue };
                answers[i] = match (settled, &renewal) {
                    (false, Renewal::Waiting(_)) => Beaten::Unsettled(renewal),
                    _ => Beaten::Renewed(renewal),
                };
            }
        }
        Ok(answers)
    }

    /// Renews many: what needs a lock's row is settled apart, each lock for itself.
    pub(super) async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let Answer::Beaten(beaten) = self.call(Call::Beat(renewals.to_vec())).await? else {
            return SqlStore::out_of_step();
        };
        let mut answers = vec![Renewal::Lost; renewals.len()];
        let mut open: BTreeMap<&Name, Vec<(usize, Option<Renewal>)>> = BTreeMap::new();
        for (i, beaten) in beaten.into_iter().enumerate() {
            let seen = match beaten {
                Beaten::Renewed(renewal) => {
                    answers[i] = renewal;
                    continue;
                }
                Beaten::Unsettled(renewal) => Some(renewal),
                Beaten::Unknown => None,
            };
            open.entry(&renewals[i].claim.name).or_default().push((i, seen));
        }
        let mut settling = Vec::new();
        for (name, some) in open {
            let all_seen = some.iter().all(|(_, seen)| seen.is_some());
            // One of us is enough; the others were seen to wait, and ask again soon.
            let mine = lock(&self.settling).insert(name.clone());
            if !mine && all_seen {
                for (i, seen) in some {
                    answers[i] = seen.map_or(Renewal::Lost, in_a_moment);
                }
                continue;
            }
            let these: Vec<Renew> = some.iter().map(|(i, _)| renewals[*i].clone()).collect();
            let (shared, name) = (self.clone(), name.clone());
            let task = tokio::spawn(async move {
                let done = shared.call(Call::Renew(these)).await;
                if mine {
                    lock(&shared.settling).remove(&name);
                }
                done
            });
            settling.push((task, some, all_seen));
        }
        let until = tokio::time::Instant::now() + SETTLED_IN;
        for (task, some, all_seen) in settling {
            let done = match all_seen {
                true => tokio::time::timeout_at(until, task).await.ok(),
                false => Some(task.await),
            };
            match done {
                Some(Ok(Ok(Answer::Renewed(renewed)))) => {
                    for ((i, _), renewal) in some.into_iter().zip(renewed) {
                        answers[i] = renewal;
                    }
                }
                Some(Ok(Err(error))) if !all_seen => return Err(error),
                Some(Ok(Ok(_)) | Err(_)) if !all_seen => return Err(closed()),
                _ => {
                    for (i, seen) in some {
                        answers[i] = seen.map_or(Renewal::Lost, in_a_moment);
                    }
                }
            }
        }
        Ok(answers)
    }

    /// Renews those that are heads; tells which, and their tokens.
    async fn renew_heads(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
    ) -> Result<Vec<(usize, Token)>, Failure> {
        // Who waits is no head.
        let maybe = |i: &usize| !self.waiters.has(renewals[*i].claim.id);
        let mut indices: Vec<usize> = (0..renewals.len()).filter(maybe).collect();
        // In one order, so that two who renew many do not wait for each other.
        indices.sort_by(|a, b| renewals[*a].claim.name.cmp(&renewals[*b].claim.name));
        let mut renewed = Vec::new();
        if let Some(many) = &self.sql.renew_locks {
            if indices.is_empty() {
                return Ok(renewed);
            }
            let rows = wire.rows(many, vec![json(renewals, &indices).into()]).await?;
            let mut tokens = BTreeMap::new();
            for row in rows {
                let mut cells = Cells::new(row);
                tokens.insert(cells.text()?, cells.count::<u64>()?);
            }
            for i in indices {
                let token = tokens.get(&renewals[i].claim.id.to_hex()).copied();
                renewed.extend(token.and_then(Token::new).map(|token| (i, token)));
            }
            return Ok(renewed);
        }
        for some in indices.chunks(RENEWED_TOGETHER) {
            wire.raw(self.sql.begin).await?;
            for &i in some {
                let Renew { claim, lease } = &renewals[i];
                let args = vec![
                    micros(*lease),
                    Arg::Name(claim.name.as_str().into()),
                    claim.id.to_hex().into(),
                ];
                let token = match returns_rows(self.dialect) {
                    true => {
                        let row = wire.rows(&self.sql.renew_lock, args).await?.into_iter().next();
                        row.map(|row| Cells::new(row).count()).transpose()?
                    }
                    false => {
                        let done = wire.run(&self.sql.renew_lock, args).await?;
                        (done.affected == 1).then_some(done.last_id)
                    }
                };
                renewed.extend(token.and_then(Token::new).map(|token| (i, token)));
            }
            wire.raw("COMMIT").await?;
        }
        Ok(renewed)
    }

    /// Lengthens the places of those of `indices` that stand among the claims; tells which.
    async fn renew_claims(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
        indices: &[usize],
    ) -> Result<Vec<usize>, Failure> {
        let mut renewed = Vec::new();
        if indices.is_empty() {
            return Ok(renewed);
        }
        if let Some(many) = &self.sql.renew_claims {
            let rows = wire.rows(many, vec![json(renewals, indices).into()]).await?;
            let mut claims = HashSet::new();
            for row in rows {
                claims.insert(Cells::new(row).text()?);
            }
            let done = |i: &usize| claims.contains(&renewals[*i].claim.id.to_hex());
            return Ok(indices.iter().copied().filter(done).collect());
        }
        for some in indices.chunks(RENEWED_TOGETHER) {
            wire.raw(self.sql.begin).await?;
            for &i in some {
                let Renew { claim, lease } = &renewals[i];
                let args = vec![
                    micros(*lease),
                    micros(claim.waiter_lease),
                    claim.id.to_hex().into(),
                    Arg::Name(claim.name.as_str().into()),
                ];
                if wire.run(&self.sql.renew_claim, args).await?.affected > 0 {
                    renewed.push(i);
                }
            }
            wire.raw("COMMIT").await?;
        }
        Ok(renewed)
    }
}

/// For one whose lock is being settled: it asks again soon, but not at once.
fn in_a_moment(renewal: Renewal) -> Renewal {
    match renewal {
        Renewal::Waiting(place) => Renewal::Waiting(Place {
            head_remaining: place.head_remaining.map(|left| left.max(SETTLED_IN / 3)),
            ..place
        }),
        other => other,
    }
}

/// What many renewals are, for a database that takes them at once.
fn json(renewals: &[Renew], indices: &[usize]) -> String {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4);
    let all = indices.iter().map(|&i| {
        let Renew { claim, lease } = &renewals[i];
        serde_json::json!({
            "name": claim.name.as_str(),
            "claim": claim.id.to_hex(),
            "lease": micros(*lease),
            "wait": micros(claim.waiter_lease),
        })
    });
    serde_json::Value::Array(all.collect()).to_string()
}
