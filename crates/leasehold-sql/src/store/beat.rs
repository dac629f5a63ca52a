//! Renewals and heartbeats.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::fault::Failure;
use super::loaded::{self, Loaded};
use super::rows::Cells;
use super::shared::Shared;
use super::url::Dialect;
#[cfg(feature = "mysql")]
use super::wire::Step;
use super::wire::{Arg, Row, Statement, Wire};
use leasehold_core::store::{Place, Renew, Renewal};
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
        let unclear: Vec<&Renew> = renewals.iter().filter(|r| !holds(r)).collect();
        let mut seen = match self.line(wire, &unclear, &lengthened).await? {
            Some((name, seen)) => BTreeMap::from([(name, seen)]),
            None => self.seen(wire, unclear.iter().map(|r| &r.claim.name).collect()).await?,
        };
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
                Some(seen) => seen.look(renew, done.copied()),
                None => Beaten { renewal: Renewal::Lost, unsettled: false, left_out: false },
            });
        }
        Ok(answers)
    }

    /// How the lock stands for which all of these wait, without reading all of a long queue: the front of it
    /// and the tokens. `None` where that does not tell: they are of several locks, the row of one was not
    /// lengthened, or the front is not enough.
    async fn line(
        &self,
        wire: &mut dyn Wire,
        waiting: &[&Renew],
        lengthened: &AllLengthened,
    ) -> Result<Option<(Name, Seen)>, Failure> {
        let Some(Renew { claim, .. }) = waiting.first() else { return Ok(None) };
        let of_one = waiting.iter().all(|r| r.claim.name == claim.name);
        if !of_one || !waiting.iter().all(|r| lengthened.contains_key(&r.claim.id)) {
            return Ok(None);
        }
        let looked = loaded::look(wire, &self.sql, &claim.name, claim.id).await?;
        let Some(looked) = looked.filter(Loaded::is_enough) else { return Ok(None) };
        let mut seen = Seen { settled: looked.is_settled(), loaded: looked, tokens: None };
        if seen.loaded.is_cut() {
            let rows = wire.rows(&self.sql.tokens, vec![Arg::Name(claim.name.as_str().into())]);
            let Some(tokens) = tokens(rows.await?)? else { return Ok(None) };
            seen.tokens = Some(tokens);
        }
        Ok(Some((claim.name.clone(), seen)))
    }

    /// How these locks stand, by one statement however many they are.
    async fn seen(
        &self,
        wire: &mut dyn Wire,
        names: BTreeSet<&Name>,
    ) -> Result<BTreeMap<Name, Seen>, Failure> {
        let seen = |(name, l): (Name, Loaded)| (name, Seen::all(l));
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
        statement: &Statement,
        renewals: &[&Renew],
    ) -> Result<AllLengthened, Failure> {
        let mut lengthened = AllLengthened::new();
        if renewals.is_empty() {
            return Ok(lengthened);
        }
        let all = vec![json(renewals, self.dialect).into()];
        let mut done = Vec::new();
        match self.dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => wire.script(vec![Step::Rows(statement, all)], &mut done).await?,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            _ => done.push(wire.rows(statement, all).await?),
        }
        for row in done.into_iter().flatten() {
            note(row, &mut lengthened)?;
        }
        Ok(lengthened)
    }
}

/// One lock's snapshot.
struct Seen {
    loaded: Loaded,
    /// Nothing in it has expired or could be granted.
    settled: bool,
    /// Those of all who have rows of their own, in order, where not all were read.
    tokens: Option<Vec<u64>>,
}

impl Seen {
    fn all(loaded: Loaded) -> Self {
        Self { settled: loaded.is_settled(), loaded, tokens: None }
    }

    /// How a claim stands; `done` if its row was lengthened just before.
    fn look(&mut self, Renew { claim, lease }: &Renew, done: Option<Lengthened>) -> Beaten {
        let now = self.loaded.now;
        let renewal = match (&self.tokens, done) {
            (Some(tokens), Some(done)) if !self.loaded.is_in_front(done.token) => {
                self.further_back(tokens, done.token)
            }
            _ => self.loaded.standing_of(claim, *lease, now).unwrap_or(Renewal::Lost),
        };
        let left_out = done.is_none() && !matches!(renewal, Renewal::Lost);
        Beaten { unsettled: left_out || !self.settled, left_out, renewal }
    }

    /// Behind the front, where everybody waits.
    fn further_back(&self, tokens: &[u64], token: Token) -> Renewal {
        let Ok(before) = tokens.binary_search(&token.get()) else { return Renewal::Lost };
        let ahead = before + usize::from(self.loaded.has_head());
        Renewal::Waiting(Place { ahead, head_remaining: None, token: Some(token) })
    }
}

/// Reads them; `None` where the list was cut off.
fn tokens(rows: Vec<Row>) -> Result<Option<Vec<u64>>, Failure> {
    let Some(row) = rows.into_iter().next() else { return Ok(None) };
    let listed: Option<Vec<u64>> = serde_json::from_str(&Cells::new(row).text()?).ok();
    Ok(listed.map(|mut tokens| {
        tokens.sort_unstable();
        tokens
    }))
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

#[cfg(test)]
mod tests {
    use super::super::SqlStore;
    use super::*;
    use leasehold_core::store::{Joined, Mode, Store};
    use leasehold_core::{Claim, Kind};

    /// How many are before each of these, as a heartbeat without a snapshot of the queue finds them.
    async fn ahead(store: &SqlStore, waiting: &[Claim]) -> Vec<Option<usize>> {
        let shared = &store.shared;
        let renew = |claim: &Claim| Renew { lease: claim.lease, claim: claim.clone() };
        let renewals: Vec<Renew> = waiting.iter().map(renew).collect();
        let mut beats = shared.beats.take().await.unwrap();
        let all: Vec<&Renew> = renewals.iter().collect();
        let lengthened =
            shared.lengthen(&mut *beats.wire, &shared.sql.renew_claims, &all).await.unwrap();
        let line = shared.line(&mut *beats.wire, &all, &lengthened).await.unwrap();
        assert!(line.is_some_and(|(_, seen)| seen.settled && seen.tokens.is_some()));
        let beaten = shared.beat(&mut *beats.wire, &renewals).await.unwrap();
        assert!(beaten.iter().all(|beaten| !beaten.unsettled && !beaten.left_out));
        let ahead = beaten.into_iter().map(|beaten| match beaten.renewal {
            Renewal::Waiting(place) => Some(place.ahead),
            _ => None,
        });
        ahead.collect()
    }

    async fn a_crowd_is_counted_and_not_read(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("crowd").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let holder = claim();
        store.join(&holder, Mode::Wait).await.unwrap();
        let mut waiting: Vec<Claim> = (0..60).map(|_| claim()).collect();
        for claim in &waiting {
            let joined = store.join(claim, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        }
        let counted = |n: usize| (1..=n).map(Some).collect::<Vec<_>>();
        assert_eq!(ahead(&store, &waiting).await, counted(60));
        // From further back: those in front are not among them.
        assert_eq!(ahead(&store, &waiting[40..]).await, counted(60)[40..]);
        let gone = waiting.remove(30);
        assert!(store.leave(&gone, None).await.unwrap());
        assert_eq!(ahead(&store, &waiting).await, counted(59));
        // Who is first next lives in a row of its own, and nobody in the lock's.
        assert!(store.leave(&holder, None).await.unwrap());
        waiting.remove(0);
        assert_eq!(ahead(&store, &waiting).await, counted(58));
        // One that is not there is not counted, and the others are all the same.
        let renewals = [&gone, &waiting[57]].map(|c| Renew { lease: c.lease, claim: c.clone() });
        let mut beats = store.shared.beats.take().await.unwrap();
        let beaten = store.shared.beat(&mut *beats.wire, &renewals).await.unwrap();
        assert!(matches!(beaten[0].renewal, Renewal::Lost), "{beaten:?}");
        assert!(matches!(beaten[1].renewal, Renewal::Waiting(Place { ahead: 58, .. })));
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn a_crowd_is_counted_and_not_read_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        a_crowd_is_counted_and_not_read(&format!("sqlite:{}", file.display())).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn a_crowd_is_counted_and_not_read_on_postgres() {
        a_crowd_is_counted_and_not_read(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn a_crowd_is_counted_and_not_read_on_mariadb() {
        a_crowd_is_counted_and_not_read(&testbed::mariadb().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn a_crowd_is_counted_and_not_read_on_mysql() {
        if testbed::Server::MySql.in_this_run() {
            a_crowd_is_counted_and_not_read(&testbed::mysql().database()).await;
        }
    }

    /// Somebody has the rows of one lock in hand, and lets them go only when all others have been renewed.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    async fn leaves_out_what_somebody_has_locked(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let shared = &store.shared;
        let mut renewals = Vec::new();
        for name in ["one", "other"] {
            for stands in ["holds", "waits"] {
                let claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
                let joined = store.join(&claim, Mode::Wait).await.unwrap();
                assert_eq!(stands == "waits", matches!(joined, Joined::Waiting(_)));
                renewals.push(Renew { lease: claim.lease, claim });
            }
        }
        let mut pooled = shared.pool.take().await.unwrap();
        let mut beats = shared.beats.take().await.unwrap();
        pooled.wire.raw(shared.sql.begin).await.unwrap();
        for table in ["locks", "claims"] {
            let lock = format!(
                "SELECT 1 FROM {} WHERE name = 'one' FOR UPDATE",
                store.parsed.table(table)
            );
            pooled.wire.raw(&lock).await.unwrap();
        }
        let beaten = shared.beat(&mut *beats.wire, &renewals).await.unwrap();
        let left_out: Vec<bool> = beaten.iter().map(|beaten| beaten.left_out).collect();
        assert_eq!(left_out, [true, true, false, false]);
        pooled.wire.raw("COMMIT").await.unwrap();
        let beaten = shared.beat(&mut *beats.wire, &renewals).await.unwrap();
        assert!(beaten.iter().all(|beaten| !beaten.left_out), "{beaten:?}");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn postgres_waits_for_no_row_that_it_renews() {
        leaves_out_what_somebody_has_locked(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mariadb_waits_for_no_row_that_it_renews() {
        leaves_out_what_somebody_has_locked(&testbed::mariadb().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mysql_waits_for_no_row_that_it_renews() {
        if testbed::Server::MySql.in_this_run() {
            leaves_out_what_somebody_has_locked(&testbed::mysql().database()).await;
        }
    }
}
