//! Renewals and heartbeats: rows are lengthened without locking any lock's row but a head's; what
//! needs a lock's row is settled apart, each lock for itself.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::call::{Answer, Call};
use super::fault::Failure;
use super::rows::Cells;
use super::statements::Many;
use super::url::Dialect;
use super::wire::{Row, Wire};
use super::{SETTLED_IN, Shared, SqlStore, closed, lock};
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
        let mut tokens = BTreeMap::new();
        for row in self.renew_many(wire, &self.sql.renew_locks, renewals, &indices).await? {
            let mut cells = Cells::new(row);
            tokens.insert(cells.text()?, cells.count::<u64>()?);
        }
        let token = |i: usize| tokens.get(&renewals[i].claim.id.to_hex()).copied();
        let found = |i: usize| token(i).and_then(Token::new).map(|token| (i, token));
        Ok(indices.into_iter().filter_map(found).collect())
    }

    /// Lengthens the places of those of `indices` that stand among the claims; tells which.
    async fn renew_claims(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
        indices: &[usize],
    ) -> Result<Vec<usize>, Failure> {
        let mut claims = HashSet::new();
        for row in self.renew_many(wire, &self.sql.renew_claims, renewals, indices).await? {
            claims.insert(Cells::new(row).text()?);
        }
        let done = |i: &usize| claims.contains(&renewals[*i].claim.id.to_hex());
        Ok(indices.iter().copied().filter(done).collect())
    }

    /// The rows of those that it renewed. As many statements for a thousand as for one.
    async fn renew_many(
        &self,
        wire: &mut dyn Wire,
        many: &Many,
        renewals: &[Renew],
        indices: &[usize],
    ) -> Result<Vec<Row>, Failure> {
        if indices.is_empty() {
            return Ok(Vec::new());
        }
        let all = json(renewals, indices, self.dialect);
        let Some(find) = &many.find else {
            return Ok(wire.rows(&many.renew, vec![all.into()]).await?);
        };
        wire.raw(self.sql.begin).await?;
        let rows = wire.rows(find, vec![all.into()]).await?;
        let mut found = HashSet::new();
        for row in &rows {
            found.insert(Cells::new(row.clone()).text()?);
        }
        let is_found = |i: &usize| found.contains(&renewals[*i].claim.id.to_hex());
        let those: Vec<usize> = indices.iter().copied().filter(is_found).collect();
        if !those.is_empty() {
            wire.run(&many.renew, vec![json(renewals, &those, self.dialect).into()]).await?;
        }
        wire.raw("COMMIT").await?;
        Ok(rows)
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

/// What many renewals are to a statement.
fn json(renewals: &[Renew], indices: &[usize], dialect: Dialect) -> String {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4);
    let all = indices.iter().map(|&i| {
        let Renew { claim, lease } = &renewals[i];
        let name = match dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => hex(claim.name.as_str()),
            _ => claim.name.as_str().to_owned(),
        };
        serde_json::json!({
            "name": name,
            "claim": claim.id.to_hex(),
            "lease": micros(*lease),
            "wait": micros(claim.waiter_lease),
        })
    });
    serde_json::Value::Array(all.collect()).to_string()
}

#[cfg(feature = "mysql")]
fn hex(name: &str) -> String {
    name.bytes().map(|byte| format!("{byte:02x}")).collect()
}
