//! Renewals and heartbeats.
//!
//! Rows are lengthened, many by one statement, without waiting for any: a row that somebody has
//! locked just now is left out (SQLite has one lock for all). Then one snapshot of each lock tells
//! how those stand that wait or were left out. What is committed is true, so it can be answered: a
//! holder that could not be renewed has what its row says, and is renewed next time; what is not
//! there is lost.
//!
//! A lock where something has expired or become free, or somebody was left out, is settled by a
//! section besides, one at a time for each lock. If that takes long (the row is in the hands of a
//! client that was stopped), the answers are what was seen: one lock never holds up the others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::call::{Answer, Call};
use super::fault::Failure;
use super::loaded::Loaded;
use super::rows::Cells;
use super::wire::{Row, Wire};
use super::{SETTLED_IN, Shared, SqlStore, lock};
use crate::claim::{ClaimId, Token};
use crate::error::Result;
use crate::name::Name;
use crate::store::{Place, Renew, Renewal};

/// What a heartbeat without the lock's row has found.
#[derive(Clone, Debug)]
pub(super) struct Beaten {
    renewal: Renewal,
    /// Whether a section is to settle its lock.
    unsettled: bool,
}

/// A claim whose row was lengthened.
#[derive(Clone, Copy, Debug)]
struct Lengthened {
    token: Token,
    holds: bool,
}

type AllLengthened = HashMap<ClaimId, Lengthened>;

impl Shared {
    /// Renewals and heartbeats, as far as no lock's row is needed for them.
    pub(super) async fn beat(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
    ) -> Result<Vec<Beaten>, Failure> {
        // Who waits is no head.
        let heads: Vec<&Renew> =
            renewals.iter().filter(|r| !self.waiters.has(r.claim.id)).collect();
        let mut lengthened = self.renew_heads(wire, &heads).await?;
        let others: Vec<&Renew> =
            renewals.iter().filter(|r| !lengthened.contains_key(&r.claim.id)).collect();
        lengthened.extend(self.renew_claims(wire, &others).await?);

        let mut seen: BTreeMap<&Name, Option<Seen>> = BTreeMap::new();
        let mut answers = Vec::with_capacity(renewals.len());
        for renew in renewals {
            let done = lengthened.get(&renew.claim.id);
            if let Some(Lengthened { token, holds: true }) = done {
                // As for the fast path: no longer than the row says.
                let renewal = Renewal::Holding { token: *token, remaining: Some(renew.lease) };
                answers.push(Beaten { renewal, unsettled: false });
                continue;
            }
            let name = &renew.claim.name;
            if !seen.contains_key(name) {
                let loaded = self.snapshot(wire, name).await?;
                seen.insert(name, loaded.map(|l| Seen { settled: l.is_settled(), loaded: l }));
            }
            answers.push(match seen.get_mut(name) {
                Some(Some(seen)) => seen.look(renew, done.is_some()),
                _ => Beaten { renewal: Renewal::Lost, unsettled: false },
            });
        }
        Ok(answers)
    }

    /// Renews many: what needs a lock's row is settled apart, each lock for itself.
    pub(super) async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let beating = self.call(Call::Beat(renewals.to_vec()), &|| false).await?;
        let Answer::Beaten(beaten) = beating else { return SqlStore::out_of_step() };
        let mut unsettled: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
        for (i, _) in beaten.iter().enumerate().filter(|(_, beaten)| beaten.unsettled) {
            unsettled.entry(&renewals[i].claim.name).or_default().push(i);
        }
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
                _ => indices.into_iter().for_each(|i| in_a_moment(&mut answers[i])),
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
        if !lock(&self.settling).insert(name.clone()) {
            return None;
        }
        let (shared, name) = (self.clone(), name.clone());
        let until = Instant::now() + SETTLING;
        Some(tokio::spawn(async move {
            let done = shared.call(Call::Renew(these), &|| Instant::now() > until).await;
            lock(&shared.settling).remove(&name);
            done
        }))
    }

    /// Renews those that are heads.
    async fn renew_heads(
        &self,
        wire: &mut dyn Wire,
        renewals: &[&Renew],
    ) -> Result<AllLengthened, Failure> {
        let mut done = AllLengthened::new();
        if renewals.is_empty() {
            return Ok(done);
        }
        let Some(many) = &self.sql.renew_heads else {
            #[cfg(feature = "mysql")]
            return self.renew_heads_in_steps(wire, renewals).await;
            #[cfg(not(feature = "mysql"))]
            return Ok(done);
        };
        for row in wire.rows(many, vec![json(renewals).into()]).await? {
            lengthen(row, &mut done)?;
        }
        Ok(done)
    }

    /// Lengthens the places of those that stand among the claims.
    async fn renew_claims(
        &self,
        wire: &mut dyn Wire,
        renewals: &[&Renew],
    ) -> Result<AllLengthened, Failure> {
        let mut done = AllLengthened::new();
        if renewals.is_empty() {
            return Ok(done);
        }
        let Some(many) = &self.sql.renew_claims else {
            #[cfg(feature = "mysql")]
            return self.renew_claims_in_steps(wire, renewals).await;
            #[cfg(not(feature = "mysql"))]
            return Ok(done);
        };
        for row in wire.rows(many, vec![json(renewals).into()]).await? {
            lengthen(row, &mut done)?;
        }
        Ok(done)
    }
}

/// How long it is tried to settle a lock; then the next heartbeat does.
const SETTLING: Duration = Duration::from_secs(2);

/// One lock's snapshot.
struct Seen {
    loaded: Loaded,
    /// Nothing in it has expired or could be granted.
    settled: bool,
}

impl Seen {
    /// How a claim stands; `done` is whether its row was lengthened just before.
    fn look(&mut self, Renew { claim, lease }: &Renew, done: bool) -> Beaten {
        let now = self.loaded.now;
        let renewal = self.loaded.standing_of(claim, *lease, now).unwrap_or(Renewal::Lost);
        let left_out = !done && !matches!(renewal, Renewal::Lost);
        Beaten { unsettled: left_out || !self.settled, renewal }
    }
}

/// Reads claim, token and standing.
fn lengthen(row: Row, done: &mut AllLengthened) -> Result<(), Failure> {
    let mut cells = Cells::new(row);
    let (claim, token, standing) = (cells.text()?, cells.count()?, cells.count::<i64>()?);
    if let (Some(id), Some(token)) = (ClaimId::from_hex(&claim), Token::new(token)) {
        done.insert(id, Lengthened { token, holds: standing == 1 });
    }
    Ok(())
}

/// For one whose lock is being settled: it asks again soon, but not at once.
fn in_a_moment(renewal: &mut Renewal) {
    if let Renewal::Waiting(Place { head_remaining: Some(left), .. }) = renewal {
        *left = (*left).max(SETTLED_IN / 3);
    }
}

/// What many renewals are, for a database that takes them at once.
fn json(renewals: &[&Renew]) -> String {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4);
    let all = renewals.iter().map(|Renew { claim, lease }| {
        serde_json::json!({
            "name": claim.name.as_str(),
            "claim": claim.id.to_hex(),
            "lease": micros(*lease),
            "wait": micros(claim.waiter_lease),
        })
    });
    serde_json::Value::Array(all.collect()).to_string()
}

#[cfg(feature = "mysql")]
mod in_steps {
    //! MySQL's UPDATE can neither leave out what is locked nor tell what it changed, so: lock what
    //! can be had, see who is there, lengthen those. What was seen under the lock is not over before
    //! it is let go.

    use super::*;
    use crate::store::sql::rows::micros;
    use crate::store::sql::statements::Several;
    use crate::store::sql::wire::Arg;

    /// How many share a transaction.
    const TOGETHER: usize = 256;

    impl Shared {
        pub(super) async fn renew_heads_in_steps(
            &self,
            wire: &mut dyn Wire,
            renewals: &[&Renew],
        ) -> Result<AllLengthened, Failure> {
            let name = |r: &&Renew| Arg::Name(r.claim.name.as_str().into());
            let lease = |r: &&Renew, _: bool| r.lease;
            let steps = [&self.sql.see_heads, &self.sql.lengthen_heads];
            self.renew_in_steps(wire, renewals, steps, name, lease).await
        }

        pub(super) async fn renew_claims_in_steps(
            &self,
            wire: &mut dyn Wire,
            renewals: &[&Renew],
        ) -> Result<AllLengthened, Failure> {
            let claim = |r: &&Renew| Arg::Text(r.claim.id.to_hex());
            let lease = |r: &&Renew, holds| if holds { r.lease } else { r.claim.waiter_lease };
            let steps = [&self.sql.see_claims, &self.sql.lengthen_claims];
            self.renew_in_steps(wire, renewals, steps, claim, lease).await
        }

        async fn renew_in_steps(
            &self,
            wire: &mut dyn Wire,
            renewals: &[&Renew],
            [see, lengthen]: [&Several; 2],
            key: impl Fn(&&Renew) -> Arg + Send + Sync,
            lease: impl Fn(&&Renew, bool) -> Duration + Send + Sync,
        ) -> Result<AllLengthened, Failure> {
            let mut done = AllLengthened::new();
            for some in renewals.chunks(TOGETHER) {
                wire.raw(self.sql.begin).await?;
                let keys: Vec<Arg> = some.iter().map(&key).collect();
                let (statement, args) = see.of(Vec::new(), keys);
                let mut there = AllLengthened::new();
                for row in wire.rows(&statement, args).await? {
                    super::lengthen(row, &mut there)?;
                }
                // Leases are mostly of one length.
                let mut by_lease: BTreeMap<Duration, Vec<Arg>> = BTreeMap::new();
                for renew in some {
                    let Some(found) = there.get(&renew.claim.id) else { continue };
                    by_lease.entry(lease(renew, found.holds)).or_default().push(key(renew));
                    done.insert(renew.claim.id, *found);
                }
                for (lease, keys) in by_lease {
                    let (statement, args) = lengthen.of(vec![micros(lease)], keys);
                    wire.run(&statement, args).await?;
                }
                wire.raw("COMMIT").await?;
            }
            Ok(done)
        }
    }
}
