//! Background tasks of a client: polling for its waiters, and deleting unused rows.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::limits::LIMIT;
use super::pool::Pool;
#[cfg(feature = "postgres")]
use super::postgres::positions::Need;
use super::rows::Cells;
use super::shared::Shared;
use super::statements::PAGE;
use super::wire::{Arg, Done, Row, Statement};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Name, Token};

impl Shared {
    /// Polls which of this client's waiters have become holders. Never returns.
    pub(super) async fn poll(self: Arc<Self>) {
        let [shortest, longest] = POLL;
        let mut pause = shortest;
        let mut known: BTreeSet<String> = BTreeSet::new();
        loop {
            if self.waiters.count() == 0 {
                known.clear();
                self.waiters.more().await;
                pause = shortest;
            }
            tokio::time::sleep(pause).await;
            // All waiters may have been granted or have left in the meantime.
            if self.waiters.count() == 0 {
                continue;
            }
            pause = (pause * 3 / 2).min(longest);
            let Some(hold) = self.ask_who_holds().await else { continue };
            if !hold.is_subset(&known) {
                pause = shortest;
            }
            known = hold;
        }
    }

    /// Notifies the waiters that have become holders, and returns their claim IDs. Returns `None`
    /// if the query failed.
    pub(super) async fn ask_who_holds(&self) -> Option<BTreeSet<String>> {
        let mut hold = BTreeSet::new();
        for (id, token) in self.who_holds().await? {
            hold.insert(id.to_hex());
            self.waiters.notify(id, Signal::Granted(token));
        }
        Some(hold)
    }

    /// Returns which of this client's claims have become holders, or `None` if the query failed.
    pub(super) async fn who_holds(&self) -> Option<Vec<(ClaimId, Token)>> {
        let session = vec![self.session.clone().into()];
        let rows = self.ask(&self.sql.granted, session).await?;
        let holds = |row| {
            let mut cells = Cells::new(row);
            let (id, token) = (cells.text().ok()?, cells.count().ok()?);
            Some((ClaimId::from_hex(&id)?, Token::new(token)?))
        };
        Some(rows.into_iter().filter_map(holds).collect())
    }

    /// Returns which of this client's claims are holders, and stores the queue positions of those
    /// that wait. Returns `None` if the query failed.
    #[cfg(feature = "postgres")]
    pub(super) async fn poll_places(&self) -> Option<Vec<(ClaimId, Token)>> {
        let session = || self.session.clone().into();
        let args = vec![session(), session()];
        let rows = self.ask_by(&self.renewal_pool, &self.sql.places, args).await;
        let (mut hold, mut wait) = (Vec::new(), Vec::new());
        let place = |row| {
            let mut cells = Cells::new(row);
            let (id, token) = (cells.text().ok()?, cells.count().ok()?);
            let ahead = cells.count::<i64>().ok()?;
            Some((ClaimId::from_hex(&id)?, Token::new(token)?, ahead))
        };
        let is_known = rows.is_some();
        for (id, token, ahead) in rows.into_iter().flatten().filter_map(place) {
            match usize::try_from(ahead) {
                Ok(ahead) => wait.push((id, ahead)),
                Err(_) => hold.push((id, token)),
            }
        }
        self.positions.polled(&wait);
        is_known.then_some(hold)
    }

    /// Returns what this client's waiters need.
    #[cfg(feature = "postgres")]
    pub(super) fn need(&self, listens: bool) -> Need {
        self.positions.need(listens, |id| self.waiters.waiting(id).is_some())
    }

    /// Runs one statement for a task that can continue without the reply.
    async fn ask(&self, statement: &Statement, args: Vec<Arg>) -> Option<Vec<Row>> {
        self.ask_by(&self.pool, statement, args).await
    }

    async fn ask_by(&self, pool: &Pool, statement: &Statement, args: Vec<Arg>) -> Option<Vec<Row>> {
        let mut pooled = pool.take().await.ok()?;
        let asked = pooled.wire.rows(statement, args);
        let rows = tokio::time::timeout(LIMIT, asked).await.ok()?.ok()?;
        pool.put(pooled);
        Some(rows)
    }

    /// Closes unused connections periodically, because the server's connections are limited and
    /// other clients may need them. Never returns.
    pub(super) async fn trim(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TRIM).await;
            self.pool.trim().await;
        }
    }

    /// Periodically deletes rows that were unused for a day. Begins immediately if `due`, because
    /// no client has done so for a long time. Never returns.
    pub(super) async fn sweep(self: Arc<Self>, due: bool) {
        let mut pause = if due { Duration::ZERO } else { SWEEP };
        loop {
            tokio::time::sleep(pause).await;
            pause = SWEEP;
            // One client sweeps for all clients.
            if self.is_our_turn_to_sweep().await {
                self.sweep_once().await;
            }
        }
    }

    /// Returns whether the last sweep was long enough ago. If so, records that this client sweeps
    /// now.
    async fn is_our_turn_to_sweep(&self) -> bool {
        let done = self.run_apart(&self.sql.sweeper, vec![SWEPT.into()]).await;
        match done {
            Some(done) if done.affected == 0 => {}
            done => return done.is_some(),
        }
        // Either another client has swept, or the row that records sweeps does not exist and is
        // created now.
        let nobody = vec![Arg::Name(String::new()), 0.into(), 1.into()];
        self.run_apart(&self.sql.create, nobody).await;
        let done = self.run_apart(&self.sql.sweeper, vec![SWEPT.into()]).await;
        done.is_some_and(|done| done.affected == 1)
    }

    async fn run_apart(&self, statement: &Statement, args: Vec<Arg>) -> Option<Done> {
        let mut pooled = self.pool.take().await.ok()?;
        let done = tokio::time::timeout(LIMIT, pooled.wire.run(statement, args)).await.ok()?;
        // A rejected statement did get a reply, for example if another client has created the row.
        let answered = matches!(&done, Ok(_) | Err(sqlx::Error::Database(_)));
        if answered {
            self.pool.put(pooled);
        }
        done.ok()
    }

    /// Sweeps page by page, so that no statement takes long even if there are many names.
    async fn sweep_once(&self) {
        let name = |row| Cells::new(row).text().ok();
        let mut from = String::new();
        loop {
            let page = self.ask(&self.sql.page, vec![Arg::Name(from.clone())]).await;
            let Some(page) = page else { return };
            let is_last = page.len() < PAGE;
            let Some(to) = page.into_iter().filter_map(name).next_back() else { return };
            let range = || vec![Arg::Name(from.clone()), Arg::Name(to.clone())];
            // If the holder and all waiters have crashed, no other call would remove their claims.
            for row in self.ask(&self.sql.abandoned, range()).await.unwrap_or_default() {
                if let Some(name) = name(row).and_then(|name| Name::new(name).ok()) {
                    let _ = self.renew_in_section(&name, &[], &|| false).await;
                }
            }
            // If this user may not delete rows, the rows stay, which is harmless.
            self.run_apart(&self.sql.sweep, range()).await;
            if is_last {
                return;
            }
            from = to;
            tokio::time::sleep(BETWEEN_PAGES).await;
        }
    }
}

/// The shortest and the longest pause between polls: shortly after a change, and long after it.
pub(super) const POLL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(40)];
/// The interval between checks whether a sweep is due.
const SWEEP: Duration = Duration::from_secs(600);
/// The interval between checks for unused connections.
const TRIM: Duration = Duration::from_secs(1);
/// The minimum time between two sweeps, by any clients, in microseconds.
pub(super) const SWEPT: i64 = 600_000_000;
/// The pause after each page, so that sweeping does not slow down other calls.
const BETWEEN_PAGES: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqlStore;
    use leasehold_core::store::{Joined, Mode, Store};
    use leasehold_core::{Claim, Kind};

    const DAY: i64 = 86_400_000_000;

    /// Rows that are a day old are deleted, and rows that only look old are kept.
    async fn forgets_what_nobody_used_for_a_day(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = |name: &str, lock_delay| {
            let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
            claim.lock_delay = lock_delay;
            claim
        };
        let taken = async |name: &str, lock_delay| {
            let claim = claim(name, lock_delay);
            let joined = store.join(&claim, Mode::Try).await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
            claim
        };
        let released = async |claim: Claim| assert!(store.leave(&claim, None).await.unwrap());
        let two_days = Duration::from_secs(2 * 86_400);
        for name in ["old", "young"] {
            released(taken(name, Duration::ZERO).await).await;
        }
        let _held = taken("held", Duration::ZERO).await;
        let _dead = taken("dead", Duration::ZERO).await;
        let _delayed = taken("kept closed", two_days).await;
        for name in ["queued", "abandoned"] {
            let _holds = taken(name, Duration::ZERO).await;
            let waiter = claim(name, Duration::ZERO);
            assert!(matches!(store.join(&waiter, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        }
        // Simulates that all this was more than a day ago, except that the held lock was renewed.
        let shared = &store.shared;
        let mut pooled = shared.pool.take().await.unwrap();
        let ago = DAY + 60_000_000;
        for (column, but) in [("last_token", "young"), ("expires", "held")] {
            let set = format!("SET {column} = {column} - {ago} WHERE name <> '{but}'");
            pooled
                .wire
                .raw(&format!("UPDATE {} {set}", store.parsed.table("locks")))
                .await
                .unwrap();
        }
        let died = format!("SET expires = expires - {ago} WHERE name = 'abandoned'");
        pooled.wire.raw(&format!("UPDATE {} {died}", store.parsed.table("claims"))).await.unwrap();
        shared.pool.put(pooled);
        shared.sweep_once().await;
        let mut pooled = shared.pool.take().await.unwrap();
        let statement = Statement {
            sql: format!(
                "SELECT count(*) FROM {0} WHERE name IN ('young', 'held', 'kept closed', 'queued') \
                 UNION ALL SELECT count(*) FROM {0} WHERE name <> ''",
                store.parsed.table("locks")
            )
            .into(),
            shape: "i",
        };
        let rows = pooled.wire.rows(&statement, Vec::new()).await.unwrap();
        let counts = rows.into_iter().map(|row| Cells::new(row).count::<i64>().unwrap());
        assert_eq!(counts.collect::<Vec<_>>(), [4, 4], "other rows are left than expected");
    }

    /// One client sweeps for all, and tables that were just created need no sweep.
    async fn is_swept_by_one(url: &str) {
        let here = tokio::runtime::Handle::current();
        let open = async || SqlStore::open(url, &here).await.unwrap();
        let [one, other] = [open().await, open().await];
        assert!(!one.shared.is_our_turn_to_sweep().await, "new tables need no sweep");
        let mut pooled = one.shared.pool.take().await.unwrap();
        let set = format!("SET last_token = last_token - {DAY} WHERE name = ''");
        pooled.wire.raw(&format!("UPDATE {} {set}", one.parsed.table("locks"))).await.unwrap();
        one.shared.pool.put(pooled);
        assert!(one.shared.is_our_turn_to_sweep().await);
        assert!(!other.shared.is_our_turn_to_sweep().await, "another client has just swept");
        assert!(one.list("").await.unwrap().is_empty());
        // In tables of an older leasehold, no client has recorded a sweep yet.
        let mut pooled = one.shared.pool.take().await.unwrap();
        pooled.wire.raw(&format!("DELETE FROM {}", one.parsed.table("locks"))).await.unwrap();
        one.shared.pool.put(pooled);
        assert!(other.shared.is_our_turn_to_sweep().await);
        assert!(!one.shared.is_our_turn_to_sweep().await);
    }

    // F42
    #[cfg(feature = "sqlite")]
    #[test]
    fn only_one_client_cleans_up_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        run(async { is_swept_by_one(&url).await });
    }

    // F42
    #[cfg(feature = "postgres")]
    #[test]
    fn only_one_client_cleans_up_on_postgres() {
        run(async { is_swept_by_one(&testbed::postgres().database()).await });
    }

    // F42
    #[cfg(feature = "mysql")]
    #[test]
    fn only_one_client_cleans_up_on_mariadb() {
        run(async { is_swept_by_one(&testbed::mariadb().database()).await });
    }

    fn run(case: impl Future<Output = ()>) {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap().block_on(case);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn sqlite_deletes_locks_unused_for_a_day() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        run(async { forgets_what_nobody_used_for_a_day(&url).await });
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn postgres_deletes_locks_unused_for_a_day() {
        run(async { forgets_what_nobody_used_for_a_day(&testbed::postgres().database()).await });
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn mariadb_deletes_locks_unused_for_a_day() {
        run(async { forgets_what_nobody_used_for_a_day(&testbed::mariadb().database()).await });
    }
}
