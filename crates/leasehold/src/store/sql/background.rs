//! What a client does by itself: asking for its waiters, and forgetting what nobody uses.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::call::Call;
use super::rows::Cells;
use super::{LIMIT, POLL, SWEEP, Shared};
use crate::claim::{ClaimId, Token};
use crate::name::Name;
use crate::store::Signal;

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
            let Ok(mut pooled) = self.pool.take().await else { continue };
            let asked = pooled.wire.rows(&self.sql.granted, vec![self.session.clone().into()]);
            let Ok(Ok(rows)) = tokio::time::timeout(LIMIT, asked).await else { continue };
            self.pool.put(pooled);
            let mut hold = BTreeSet::new();
            for row in rows {
                let mut cells = Cells::new(row);
                let (Ok(id), Ok(token)) = (cells.text(), cells.count()) else { continue };
                if let (Some(claim), Some(token)) = (ClaimId::from_hex(&id), Token::new(token)) {
                    hold.insert(id);
                    self.waiters.tell(claim, Signal::Granted(token));
                }
            }
            if !hold.is_subset(&known) {
                pause = shortest;
            }
            known = hold;
        }
    }

    /// Forgets, now and then, what nobody used for a day. Never ends by itself.
    pub(super) async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            self.sweep_once().await;
        }
    }

    async fn sweep_once(&self) {
        // Where all have died, waiters too, nobody comes who would remove them.
        for name in self.abandoned().await {
            let _ = self.call(Call::Settle(name), &|| false).await;
        }
        let Ok(mut pooled) = self.pool.take().await else { return };
        // Who may not delete leaves the rows: they do no harm.
        let swept = pooled.wire.run(&self.sql.sweep, Vec::new());
        if let Ok(Ok(_)) = tokio::time::timeout(LIMIT, swept).await {
            self.pool.put(pooled);
        }
    }

    /// Some of the locks in which a claim has been over for a day.
    async fn abandoned(&self) -> Vec<Name> {
        let Ok(mut pooled) = self.pool.take().await else { return Vec::new() };
        let asked = pooled.wire.rows(&self.sql.abandoned, Vec::new());
        let Ok(Ok(rows)) = tokio::time::timeout(LIMIT, asked).await else { return Vec::new() };
        self.pool.put(pooled);
        let name = |row| Cells::new(row).text().ok().and_then(|name| Name::new(name).ok());
        rows.into_iter().filter_map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::claim::{Claim, Kind};
    use crate::store::sql::SqlStore;
    use crate::store::sql::wire::Statement;
    use crate::store::{Joined, Mode, Store};

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
            pooled.wire.raw(&format!("UPDATE leasehold_locks {set}")).await.unwrap();
        }
        let died = format!("SET expires = expires - {ago} WHERE name = 'abandoned'");
        pooled.wire.raw(&format!("UPDATE leasehold_claims {died}")).await.unwrap();
        shared.pool.put(pooled);
        shared.sweep_once().await;
        let mut pooled = shared.pool.take().await.unwrap();
        let statement = Statement {
            sql: "SELECT count(*) FROM leasehold_locks WHERE name IN ('young', 'held', 'kept closed', \
                  'queued') UNION ALL SELECT count(*) FROM leasehold_locks"
                .into(),
            shape: "i",
        };
        let rows = pooled.wire.rows(&statement, Vec::new()).await.unwrap();
        let counts = rows.into_iter().map(|row| Cells::new(row).count::<i64>().unwrap());
        assert_eq!(counts.collect::<Vec<_>>(), [4, 4], "those are left, and no others");
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
