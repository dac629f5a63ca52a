//! Renewals and heartbeats.
//!
//! Rows are lengthened, many by one statement, without waiting for any: a row that somebody has
//! locked just now is left out (SQLite has one lock for all). Then one snapshot of their locks, one
//! statement however many, tells how those stand that wait or were left out. Batches in which
//! everybody waits take turns, so that they leave a connection to those that hold. What is committed is true, so it can be answered: a
//! holder that could not be renewed has what its row says, and is renewed next time; what is not
//! there is lost. That a waiter's row is there does not make its place last longer: one that was left
//! out, and that no section has lengthened since, is told that nothing is known.
//!
//! A lock where something has expired or become free, or somebody was left out, is settled by a
//! section besides, one at a time for each lock. If that takes long (the row is in the hands of a
//! client that was stopped), the answers are what was seen: one lock never holds up the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::call::{Answer, Call};
use super::fault::Failure;
use super::loaded::{self, Loaded};
use super::rows::Cells;
use super::statements::Many;
use super::url::Dialect;
use super::wire::{Row, Wire};
use super::{SETTLED_IN, Shared, SqlStore};
use leasehold_core::kit::locked;
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{ClaimId, Error, ErrorKind, Name, Result, Token};

/// What a heartbeat without the lock's row has found.
#[derive(Clone, Debug)]
pub(super) struct Beaten {
    renewal: Renewal,
    /// Whether a section is to settle its lock.
    unsettled: bool,
    /// Whether its row was locked by somebody, and was not lengthened.
    left_out: bool,
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
        let mut lengthened = self.lengthen(wire, &self.sql.renew_locks, &heads).await?;
        let others: Vec<&Renew> =
            renewals.iter().filter(|r| !lengthened.contains_key(&r.claim.id)).collect();
        lengthened.extend(self.lengthen(wire, &self.sql.renew_claims, &others).await?);

        let holds = |r: &Renew| lengthened.get(&r.claim.id).is_some_and(|l| l.holds);
        let unclear = renewals.iter().filter(|r| !holds(r)).map(|r| &r.claim.name);
        let mut seen = self.seen(wire, unclear.collect()).await?;
        let mut answers = Vec::with_capacity(renewals.len());
        for renew in renewals {
            let done = lengthened.get(&renew.claim.id);
            if let Some(Lengthened { token, holds: true }) = done {
                // As for the fast path: no longer than the row says.
                let renewal = Renewal::Holding { token: *token, remaining: Some(renew.lease) };
                answers.push(Beaten { renewal, unsettled: false, left_out: false });
                continue;
            }
            answers.push(match seen.get_mut(&renew.claim.name) {
                Some(seen) => seen.look(renew, done.is_some()),
                None => Beaten { renewal: Renewal::Lost, unsettled: false, left_out: false },
            });
        }
        Ok(answers)
    }

    /// How these locks stand, by one statement however many they are.
    async fn seen(
        &self,
        wire: &mut dyn Wire,
        names: BTreeSet<&Name>,
    ) -> Result<BTreeMap<Name, Seen>, Failure> {
        let seen = |(name, l): (Name, Loaded)| (name, Seen { settled: l.is_settled(), loaded: l });
        if let (Some(&name), 0..=1) = (names.first(), names.len()) {
            let loaded = self.snapshot(wire, name).await?;
            return Ok(loaded.map(|l| (name.clone(), l)).into_iter().map(seen).collect());
        }
        if names.is_empty() {
            return Ok(BTreeMap::new());
        }
        let names = names.into_iter().map(|name| in_json(name, self.dialect).into());
        let all = serde_json::Value::Array(names.collect()).to_string();
        let rows = wire.rows(&self.sql.read_many, vec![all.into()]).await?;
        Ok(loaded::snapshots(rows)?.into_iter().map(seen).collect())
    }

    /// Renews many: what needs a lock's row is settled apart, each lock for itself.
    pub(super) async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let beating = self.call(Call::Beat(renewals.to_vec()), &|| false).await?;
        let Answer::Beaten(beaten) = beating else { return SqlStore::out_of_step() };
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

    /// Lengthens the rows of those of these that are there, not over, and not locked by anybody. As
    /// many statements for a thousand as for one.
    async fn lengthen(
        &self,
        wire: &mut dyn Wire,
        many: &Many,
        renewals: &[&Renew],
    ) -> Result<AllLengthened, Failure> {
        let mut done = AllLengthened::new();
        if renewals.is_empty() {
            return Ok(done);
        }
        let all = json(renewals, self.dialect);
        let Some(find) = &many.find else {
            for row in wire.rows(&many.renew, vec![all.into()]).await? {
                note(row, &mut done)?;
            }
            return Ok(done);
        };
        // What was seen under the lock is not over before it is let go.
        wire.raw(self.sql.begin).await?;
        for row in wire.rows(find, vec![all.into()]).await? {
            note(row, &mut done)?;
        }
        let those: Vec<&Renew> =
            renewals.iter().copied().filter(|r| done.contains_key(&r.claim.id)).collect();
        if !those.is_empty() {
            wire.run(&many.renew, vec![json(&those, self.dialect).into()]).await?;
        }
        wire.raw("COMMIT").await?;
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
        Beaten { unsettled: left_out || !self.settled, left_out, renewal }
    }
}

/// Reads claim, token and standing.
fn note(row: Row, done: &mut AllLengthened) -> Result<(), Failure> {
    let mut cells = Cells::new(row);
    let (claim, token, standing) = (cells.text()?, cells.count()?, cells.count::<i64>()?);
    if let (Some(id), Some(token)) = (ClaimId::from_hex(&claim), Token::new(token)) {
        done.insert(id, Lengthened { token, holds: standing == 1 });
    }
    Ok(())
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

/// What many renewals are to a statement.
fn json(renewals: &[&Renew], dialect: Dialect) -> String {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4);
    let all = renewals.iter().map(|Renew { claim, lease }| {
        serde_json::json!({
            "name": in_json(&claim.name, dialect),
            "claim": claim.id.to_hex(),
            "lease": micros(*lease),
            "wait": micros(claim.waiter_lease),
        })
    });
    serde_json::Value::Array(all.collect()).to_string()
}

/// A name as the statements find it in JSON.
fn in_json(name: &Name, dialect: Dialect) -> String {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => hex(name.as_str()),
        _ => name.as_str().to_owned(),
    }
}

#[cfg(feature = "mysql")]
fn hex(name: &str) -> String {
    name.bytes().map(|byte| format!("{byte:02x}")).collect()
}
