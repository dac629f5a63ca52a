//! Statements for renewals and heartbeats of many claims.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::fault::Failure;
use super::queue_snapshot::{self, QueueSnapshot};
use super::rows::Cells;
use super::shared::Shared;
use super::url::Dialect;
#[cfg(feature = "mysql")]
use super::wire::Step;
use super::wire::{Arg, Row, Statement, Wire};
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{ClaimId, Name, Result, Token};

/// The result of a heartbeat that did not lock the lock's row.
#[derive(Clone, Debug)]
pub(super) struct UnlockedRenewal {
    pub(super) renewal: Renewal,
    /// Whether the slow path has to settle the queue of this claim's lock.
    pub(super) unsettled: bool,
    /// Whether another session had locked the claim's row, so that the row was not extended.
    pub(super) left_out: bool,
}

/// A claim whose row was extended.
#[derive(Clone, Copy, Debug)]
struct Extended {
    token: Token,
    holds: bool,
}

type AllExtended = HashMap<ClaimId, Extended>;

impl Shared {
    /// Renews claims and sends heartbeats, as far as this is possible without locking a lock's row.
    pub(super) async fn renew_unlocked(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
    ) -> Result<Vec<UnlockedRenewal>, Failure> {
        // A waiter is never the head of a queue.
        let heads: Vec<&Renew> =
            renewals.iter().filter(|r| !self.waiters.has(r.claim.id)).collect();
        let mut extended = self.extend_rows(wire, &self.sql.renew_locks, &heads).await?;
        let others: Vec<&Renew> =
            renewals.iter().filter(|r| !extended.contains_key(&r.claim.id)).collect();
        extended.extend(self.extend_rows(wire, &self.sql.renew_claims, &others).await?);

        let holds = |r: &Renew| extended.get(&r.claim.id).is_some_and(|l| l.holds);
        let unclear: Vec<&Renew> = renewals.iter().filter(|r| !holds(r)).collect();
        let mut seen = match self.queue_of_all(wire, &unclear, &extended).await? {
            Some((name, seen)) => BTreeMap::from([(name, seen)]),
            None => self.seen(wire, unclear.iter().map(|r| &r.claim.name).collect()).await?,
        };
        let mut answers = Vec::with_capacity(renewals.len());
        for renew in renewals {
            let done = extended.get(&renew.claim.id);
            if let Some(Extended { token, holds: true }) = done {
                // As on the fast path, the lease ends no later than the row says.
                let renewal = Renewal::Holding { token: *token, remaining: Some(renew.lease) };
                answers.push(UnlockedRenewal { renewal, unsettled: false, left_out: false });
                continue;
            }
            answers.push(match seen.get_mut(&renew.claim.name) {
                Some(seen) => seen.state_of(renew, done.copied()),
                None => {
                    UnlockedRenewal { renewal: Renewal::Lost, unsettled: false, left_out: false }
                }
            });
        }
        Ok(answers)
    }

    /// Returns the state of the lock for which all these claims wait, without reading all of a long
    /// queue.
    ///
    /// Reads the front of the queue and the list of tokens. Returns `None` if that is not enough:
    /// the claims belong to several locks, the row of a claim was not extended, the front is too
    /// short, or the list of tokens was truncated.
    async fn queue_of_all(
        &self,
        wire: &mut dyn Wire,
        waiting: &[&Renew],
        extended: &AllExtended,
    ) -> Result<Option<(Name, LockSnapshot)>, Failure> {
        let Some(Renew { claim, .. }) = waiting.first() else { return Ok(None) };
        let of_one = waiting.iter().all(|r| r.claim.name == claim.name);
        if !of_one || !waiting.iter().all(|r| extended.contains_key(&r.claim.id)) {
            return Ok(None);
        }
        let looked = queue_snapshot::read_front(wire, &self.sql, &claim.name, claim.id).await?;
        let Some(looked) = looked.filter(QueueSnapshot::is_enough) else { return Ok(None) };
        let mut seen = LockSnapshot { settled: looked.is_settled(), loaded: looked, tokens: None };
        if seen.loaded.is_cut() {
            let rows = wire.rows(&self.sql.tokens, vec![Arg::Name(claim.name.as_str().into())]);
            let Some(tokens) = tokens(rows.await?)? else { return Ok(None) };
            seen.tokens = Some(tokens);
        }
        Ok(Some((claim.name.clone(), seen)))
    }

    /// Returns the state of these locks, with one statement for any number of them.
    async fn seen(
        &self,
        wire: &mut dyn Wire,
        names: BTreeSet<&Name>,
    ) -> Result<BTreeMap<Name, LockSnapshot>, Failure> {
        let seen = |(name, l): (Name, QueueSnapshot)| (name, LockSnapshot::all(l));
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
        Ok(queue_snapshot::snapshots(rows)?.into_iter().map(seen).collect())
    }

    /// Extends the rows of these claims, except those that are missing, expired, or locked by
    /// another session. A thousand claims need as many statements as one.
    async fn extend_rows(
        &self,
        wire: &mut dyn Wire,
        statement: &Statement,
        renewals: &[&Renew],
    ) -> Result<AllExtended, Failure> {
        let mut extended = AllExtended::new();
        if renewals.is_empty() {
            return Ok(extended);
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
            read_extended(row, &mut extended)?;
        }
        Ok(extended)
    }
}

/// The snapshot of one lock.
struct LockSnapshot {
    loaded: QueueSnapshot,
    /// Whether nothing in the snapshot has expired or could be granted.
    settled: bool,
    /// The sorted tokens of all claims in `claims`, if not all claims were read.
    tokens: Option<Vec<u64>>,
}

impl LockSnapshot {
    fn all(loaded: QueueSnapshot) -> Self {
        Self { settled: loaded.is_settled(), loaded, tokens: None }
    }

    /// Returns the state of a claim. `done` is set if its row was extended just before.
    fn state_of(
        &mut self,
        Renew { claim, lease }: &Renew,
        done: Option<Extended>,
    ) -> UnlockedRenewal {
        let now = self.loaded.now;
        let renewal = match (&self.tokens, done) {
            (Some(tokens), Some(done)) if !self.loaded.is_in_front(done.token) => {
                self.further_back(tokens, done.token)
            }
            _ => self.loaded.state_of(claim, *lease, now).unwrap_or(Renewal::Lost),
        };
        let left_out = done.is_none() && !matches!(renewal, Renewal::Lost);
        UnlockedRenewal { unsettled: left_out || !self.settled, left_out, renewal }
    }

    /// Returns the state of a claim behind the front of the queue, where all claims wait.
    fn further_back(&self, tokens: &[u64], token: Token) -> Renewal {
        let Ok(before) = tokens.binary_search(&token.get()) else { return Renewal::Lost };
        let ahead = before + usize::from(self.loaded.has_head());
        Renewal::Waiting(Place { ahead, head_remaining: None, token: Some(token) })
    }
}

/// Reads the tokens. Returns `None` if the list was truncated.
fn tokens(rows: Vec<Row>) -> Result<Option<Vec<u64>>, Failure> {
    let Some(row) = rows.into_iter().next() else { return Ok(None) };
    let listed: Option<Vec<u64>> = serde_json::from_str(&Cells::new(row).text()?).ok();
    Ok(listed.map(|mut tokens| {
        tokens.sort_unstable();
        tokens
    }))
}

/// Reads a claim's ID, token and state from a row.
fn read_extended(row: Row, done: &mut AllExtended) -> Result<(), Failure> {
    let mut cells = Cells::new(row);
    let (claim, token, state) = (cells.text()?, cells.count()?, cells.count::<i64>()?);
    if let (Some(id), Some(token)) = (ClaimId::from_hex(&claim), Token::new(token)) {
        done.insert(id, Extended { token, holds: state == 1 });
    }
    Ok(())
}

/// Returns many renewals as the JSON argument of a statement.
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

/// Returns a name in the form that the statements expect in JSON.
fn in_json(name: &Name, dialect: Dialect) -> String {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => hex(name.as_str()),
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
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

    /// Returns how many claims are ahead of each of these, as found by a heartbeat that does not
    /// read the whole queue.
    async fn ahead(store: &SqlStore, waiting: &[Claim]) -> Vec<Option<usize>> {
        let shared = &store.shared;
        let renew = |claim: &Claim| Renew { lease: claim.lease, claim: claim.clone() };
        let renewals: Vec<Renew> = waiting.iter().map(renew).collect();
        let mut pooled = shared.renewal_pool.take().await.unwrap();
        let all: Vec<&Renew> = renewals.iter().collect();
        let extended =
            shared.extend_rows(&mut *pooled.wire, &shared.sql.renew_claims, &all).await.unwrap();
        let line = shared.queue_of_all(&mut *pooled.wire, &all, &extended).await.unwrap();
        assert!(line.is_some_and(|(_, seen)| seen.settled && seen.tokens.is_some()));
        let renewed = shared.renew_unlocked(&mut *pooled.wire, &renewals).await.unwrap();
        assert!(renewed.iter().all(|one| !one.unsettled && !one.left_out));
        let ahead = renewed.into_iter().map(|one| match one.renewal {
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
        // Only claims from the back of the queue, without those at the front.
        assert_eq!(ahead(&store, &waiting[40..]).await, counted(60)[40..]);
        let gone = waiting.remove(30);
        assert!(store.leave(&gone, None).await.unwrap());
        assert_eq!(ahead(&store, &waiting).await, counted(59));
        // The first claim now has a row in `claims`, and the lock's row contains no claim.
        assert!(store.leave(&holder, None).await.unwrap());
        waiting.remove(0);
        assert_eq!(ahead(&store, &waiting).await, counted(58));
        // A missing claim is not counted, and the others are counted correctly.
        let renewals = [&gone, &waiting[57]].map(|c| Renew { lease: c.lease, claim: c.clone() });
        let mut pooled = store.shared.renewal_pool.take().await.unwrap();
        let renewed = store.shared.renew_unlocked(&mut *pooled.wire, &renewals).await.unwrap();
        assert!(matches!(renewed[0].renewal, Renewal::Lost), "{renewed:?}");
        assert!(matches!(renewed[1].renewal, Renewal::Waiting(Place { ahead: 58, .. })));
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn renewal_counts_a_crowd_without_reading_it_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        a_crowd_is_counted_and_not_read(&format!("sqlite:{}", file.display())).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn renewal_counts_a_crowd_without_reading_it_on_postgres() {
        a_crowd_is_counted_and_not_read(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn renewal_counts_a_crowd_without_reading_it_on_mariadb() {
        a_crowd_is_counted_and_not_read(&testbed::mariadb().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn renewal_counts_a_crowd_without_reading_it_on_mysql() {
        if testbed::Server::MySql.in_this_run() {
            a_crowd_is_counted_and_not_read(&testbed::mysql().database()).await;
        }
    }

    /// One session has locked the rows of one lock, and unlocks them only after all others were
    /// renewed.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    async fn leaves_out_what_somebody_has_locked(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let shared = &store.shared;
        let mut renewals = Vec::new();
        for name in ["one", "other"] {
            for state in ["holds", "waits"] {
                let claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
                let joined = store.join(&claim, Mode::Wait).await.unwrap();
                assert_eq!(state == "waits", matches!(joined, Joined::Waiting(_)));
                renewals.push(Renew { lease: claim.lease, claim });
            }
        }
        let mut pooled = shared.pool.take().await.unwrap();
        let mut renewing = shared.renewal_pool.take().await.unwrap();
        pooled.wire.raw(shared.sql.begin).await.unwrap();
        for table in ["locks", "claims"] {
            let lock = format!(
                "SELECT 1 FROM {} WHERE name = 'one' FOR UPDATE",
                store.parsed.table(table)
            );
            pooled.wire.raw(&lock).await.unwrap();
        }
        let renewed = shared.renew_unlocked(&mut *renewing.wire, &renewals).await.unwrap();
        let left_out: Vec<bool> = renewed.iter().map(|one| one.left_out).collect();
        assert_eq!(left_out, [true, true, false, false]);
        pooled.wire.raw("COMMIT").await.unwrap();
        let renewed = shared.renew_unlocked(&mut *renewing.wire, &renewals).await.unwrap();
        assert!(renewed.iter().all(|one| !one.left_out), "{renewed:?}");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn renewal_skips_locked_rows_on_postgres() {
        leaves_out_what_somebody_has_locked(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn renewal_skips_locked_rows_on_mariadb() {
        leaves_out_what_somebody_has_locked(&testbed::mariadb().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn renewal_skips_locked_rows_on_mysql() {
        if testbed::Server::MySql.in_this_run() {
            leaves_out_what_somebody_has_locked(&testbed::mysql().database()).await;
        }
    }
}
