//! Renewals and heartbeats.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::fault::Failure;
use super::loaded::{self, Loaded};
use super::rows::Cells;
use super::shared::Shared;
use super::statements::Many;
use super::url::Dialect;
use super::wire::{Row, Wire};
use leasehold_core::store::{Renew, Renewal};
use leasehold_core::{ClaimId, Name, Result, Token};

/// What a heartbeat without the lock's row has found.
#[derive(Clone, Debug)]
pub(super) struct Beaten {
    pub(super) renewal: Renewal,
    /// Whether a section is to settle its lock.
    pub(super) unsettled: bool,
    /// Whether its row was locked by somebody, and was not lengthened.
    pub(super) left_out: bool,
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
