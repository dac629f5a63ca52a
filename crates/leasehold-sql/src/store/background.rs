//! What a client does by itself: asking for its waiters, and forgetting what nobody uses.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::limits::LIMIT;
use super::pool::Pool;
use super::rows::Cells;
use super::shared::Shared;
use super::statements::PAGE;
use super::wire::{Arg, Done, Row, Statement};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Name, Token};

impl Shared {
    /// Asks for all our waiters which of them hold by now. Never ends by itself.
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
            // All may have been granted, or have left, meanwhile.
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

    /// Tells those of our waiters that hold by now, and who they are; `None` if it is not known.
    pub(super) async fn ask_who_holds(&self) -> Option<BTreeSet<String>> {
        let mut hold = BTreeSet::new();
        for (id, token) in self.who_holds().await? {
            hold.insert(id.to_hex());
            self.waiters.tell(id, Signal::Granted(token));
        }
        Some(hold)
    }

    /// Who of those that waited holds by now; `None` if it is not known.
    pub(super) async fn who_holds(&self) -> Option<Vec<(ClaimId, Token)>> {
        self.who_holds_by(&self.pool).await
    }

    /// The same on a connection of this pool.
    pub(super) async fn who_holds_by(&self, pool: &Pool) -> Option<Vec<(ClaimId, Token)>> {
        let session = vec![self.session.clone().into()];
        let rows = self.ask_by(pool, &self.sql.granted, session).await?;
        let holds = |row| {
            let mut cells = Cells::new(row);
            let (id, token) = (cells.text().ok()?, cells.count().ok()?);
            Some((ClaimId::from_hex(&id)?, Token::new(token)?))
        };
        Some(rows.into_iter().filter_map(holds).collect())
    }

    /// One statement for a task that can do without the answer.
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

    /// Closes, now and then, connections that nobody uses: other clients may need the room. Never
    /// ends by itself.
    pub(super) async fn trim(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TRIM).await;
            self.pool.trim().await;
        }
    }

    /// Forgets, now and then, what nobody used for a day; at once, if nobody has done it for long.
    /// Never ends by itself.
    pub(super) async fn sweep(self: Arc<Self>, due: bool) {
        let mut pause = if due { Duration::ZERO } else { SWEEP };
        loop {
            tokio::time::sleep(pause).await;
            pause = SWEEP;
            // One client does it for all.
            if self.is_our_turn_to_sweep().await {
                self.sweep_once().await;
            }
        }
    }

    /// Whether nobody has swept for so long; then it counts as done by us.
    async fn is_our_turn_to_sweep(&self) -> bool {
        let done = self.run_apart(&self.sql.sweeper, vec![SWEPT.into()]).await;
        match done {
            Some(done) if done.affected == 0 => {}
            done => return done.is_some(),
        }
        // Either somebody else has, or nobody ever did: then the row is made for the next time.
        let nobody = vec![Arg::Name(String::new()), 0.into(), 1.into()];
        self.run_apart(&self.sql.create, nobody).await;
        let done = self.run_apart(&self.sql.sweeper, vec![SWEPT.into()]).await;
        done.is_some_and(|done| done.affected == 1)
    }

    async fn run_apart(&self, statement: &Statement, args: Vec<Arg>) -> Option<Done> {
        let mut pooled = self.pool.take().await.ok()?;
        let done = tokio::time::timeout(LIMIT, pooled.wire.run(statement, args)).await.ok()?;
        // What was refused was answered: somebody else has made the row.
        let answered = matches!(&done, Ok(_) | Err(sqlx::Error::Database(_)));
        if answered {
            self.pool.put(pooled);
        }
        done.ok()
    }

    /// Page by page, so that no statement takes long, however many names there are.
    async fn sweep_once(&self) {
        let name = |row| Cells::new(row).text().ok();
        let mut from = String::new();
        loop {
            let page = self.ask(&self.sql.page, vec![Arg::Name(from.clone())]).await;
            let Some(page) = page else { return };
            let is_last = page.len() < PAGE;
            let Some(to) = page.into_iter().filter_map(name).next_back() else { return };
            let range = || vec![Arg::Name(from.clone()), Arg::Name(to.clone())];
            // Where all have died, waiters too, nobody comes who would remove them.
            for row in self.ask(&self.sql.abandoned, range()).await.unwrap_or_default() {
                if let Some(name) = name(row).and_then(|name| Name::new(name).ok()) {
                    let _ = self.call(Call::Settle(name), &|| false).await;
                }
            }
            // Who may not delete leaves the rows: they do no harm.
            self.run_apart(&self.sql.sweep, range()).await;
            if is_last {
                return;
            }
            from = to;
            tokio::time::sleep(BETWEEN_PAGES).await;
        }
    }
}

/// The poller's pauses, from just after something happened to long after.
pub(super) const POLL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(40)];
/// How often it is looked whether it is time to look for what nobody uses any more.
const SWEEP: Duration = Duration::from_secs(600);
/// How often connections are looked for that nobody uses.
const TRIM: Duration = Duration::from_secs(1);
/// How long after somebody has swept the next one does.
pub(super) const SWEPT: i64 = 600_000_000;
/// The pause after each page, so that sweeping is nobody's burden.
const BETWEEN_PAGES: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqlStore;
    use leasehold_core::store::{Joined, Mode, Store};
    use leasehold_core::{Claim, Kind};

    const DAY: i64 = 86_400_000_000;

    /// What a day-old row is, and what only looks like one.
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
        // As if all this had been more than a day ago, but what is held was renewed.
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
        assert_eq!(counts.collect::<Vec<_>>(), [4, 4], "those are left, and no others");
    }

    /// One client sweeps for all, and tables that were just made have nothing to sweep.
    async fn is_swept_by_one(url: &str) {
        let here = tokio::runtime::Handle::current();
        let open = async || SqlStore::open(url, &here).await.unwrap();
        let [one, other] = [open().await, open().await];
        assert!(!one.shared.is_our_turn_to_sweep().await, "it was just made");
        let mut pooled = one.shared.pool.take().await.unwrap();
        let set = format!("SET last_token = last_token - {DAY} WHERE name = ''");
        pooled.wire.raw(&format!("UPDATE {} {set}", one.parsed.table("locks"))).await.unwrap();
        one.shared.pool.put(pooled);
        assert!(one.shared.is_our_turn_to_sweep().await);
        assert!(!other.shared.is_our_turn_to_sweep().await, "it was just swept");
        assert!(one.list("").await.unwrap().is_empty());
        // Tables of an older leasehold: nobody has ever said that he sweeps.
        let mut pooled = one.shared.pool.take().await.unwrap();
        pooled.wire.raw(&format!("DELETE FROM {}", one.parsed.table("locks"))).await.unwrap();
        one.shared.pool.put(pooled);
        assert!(other.shared.is_our_turn_to_sweep().await);
        assert!(!one.shared.is_our_turn_to_sweep().await);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn f42_sqlite_is_swept_by_one() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        run(async { is_swept_by_one(&url).await });
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn f42_postgres_is_swept_by_one() {
        run(async { is_swept_by_one(&testbed::postgres().database()).await });
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn f42_mariadb_is_swept_by_one() {
        run(async { is_swept_by_one(&testbed::mariadb().database()).await });
    }

    fn run(case: impl Future<Output = ()>) {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap().block_on(case);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn sqlite_forgets_what_nobody_used_for_a_day() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        run(async { forgets_what_nobody_used_for_a_day(&url).await });
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn postgres_forgets_what_nobody_used_for_a_day() {
        run(async { forgets_what_nobody_used_for_a_day(&testbed::postgres().database()).await });
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn mariadb_forgets_what_nobody_used_for_a_day() {
        run(async { forgets_what_nobody_used_for_a_day(&testbed::mariadb().database()).await });
    }
}
