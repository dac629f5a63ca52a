//! Getting in and out: by one statement on the lock's row where that decides it, else by a section.

use std::time::Duration;

use super::call::Answer;
use super::fault::{self, Failure};
use super::loaded::{self, Reach};
use super::rows::{Cells, int, kind_number, micros, plain};
use super::shared::Shared;
use super::url::Dialect;
use super::wire::{Arg, Wire};
use leasehold_core::queue::StoreTime;
use leasehold_core::store::{Joined, Mode, mismatch};
use leasehold_core::{Claim, Token};

impl Shared {
    pub(super) async fn join(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Answer, Failure> {
        if let Some(token) = self.take(wire, claim).await? {
            let remaining = Some(claim.lease);
            return Ok(Answer::Joined(Joined::Holding { token, remaining }));
        }
        match mode {
            Mode::Wait => self.waiters.enlist(claim.id, || ()),
            Mode::Try => {
                if let Some(answer) = self.glance(wire, claim).await? {
                    return Ok(answer);
                }
            }
        }
        let reach = Reach::FrontAnd(claim.id);
        let joined = self.section(wire, &claim.name, reach, Some(claim), |loaded| {
            let at = StoreTime { now: loaded.now, stamp: loaded.now };
            let joined = loaded.queue.join(claim, mode, at, &self.session);
            joined.map(|joined| loaded.with_hidden(joined))
        });
        let joined = joined.await?.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
        Ok(match joined {
            // No longer than was asked for: by a clock that was set back, more may be left.
            Ok(Joined::Holding { token, remaining }) => {
                let remaining = remaining.map(|left| left.min(claim.lease));
                Answer::Joined(Joined::Holding { token, remaining })
            }
            Ok(joined) => Answer::Joined(joined),
            Err(m) => Answer::Refused(mismatch(claim, m.kind, m.capacity)),
        })
    }

    /// The answer to a claim that cannot be let in, found without locking or writing anything. It is
    /// true as of the moment at which it was looked, as any answer is; whoever may be let in, or has a
    /// place already, is not answered here.
    async fn glance(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<Option<Answer>, Failure> {
        let seen = loaded::look(wire, &self.sql, &claim.name, claim.id).await?;
        let Some(mut seen) = seen else { return Ok(None) };
        if seen.queue.entries().any(|e| e.id == claim.id) {
            return Ok(None);
        }
        let at = StoreTime { now: seen.now, stamp: seen.now };
        let tried = seen.queue.join(claim, Mode::Try, at, &self.session);
        Ok(match tried {
            _ if !seen.is_enough() => None,
            Ok(Joined::Busy { holders }) => Some(Answer::Joined(Joined::Busy { holders })),
            Ok(_) => None,
            Err(m) => Some(Answer::Refused(mismatch(claim, m.kind, m.capacity))),
        })
    }

    /// The fast path. The lease it answers is counted from before the call was sent, so it is no
    /// longer than the row says.
    async fn take(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<Option<Token>, Failure> {
        if claim.weight == 0 || claim.weight > claim.capacity {
            return Ok(None);
        }
        let floor = || int(claim.seen.saturating_add(1).min(Token::MAX / 2));
        let name = || Arg::Name(claim.name.as_str().to_owned());
        let what = || [kind_number(claim.kind).into(), i64::from(claim.capacity).into()];
        let who = || [claim.id.to_hex().into(), i64::from(claim.weight).into()];
        let people = || {
            [
                plain(&claim.holder.host).into(),
                i64::from(claim.holder.pid).into(),
                plain(&claim.holder.label).into(),
            ]
        };
        let (lease, delay) = (|| micros(claim.lease), || micros(claim.lock_delay));
        let mut args = Vec::with_capacity(12);
        match self.dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                args.push(floor());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.extend(people());
                args.push(delay());
                args.push(name());
                let done = wire.run(&self.sql.take, args).await?;
                if done.affected == 1 {
                    return Ok(Token::new(done.last_id));
                }
                // Who waits has seen the row.
                if self.waiters.has(claim.id) {
                    return Ok(None);
                }
                let mut args = vec![name()];
                args.extend(what());
                args.push(floor());
                args.extend(who());
                args.push(lease());
                args.push(delay());
                args.extend(people());
                match wire.run(&self.sql.take_new, args).await {
                    Ok(done) => Ok(Token::new(done.last_id)),
                    Err(error) if fault::is_duplicate(&error) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
            _ => {
                args.push(name());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.push(delay());
                args.extend(people());
                args.push(floor());
                args.push(floor());
                let rows = wire.rows(&self.sql.take, args).await?;
                let Some(row) = rows.into_iter().next() else { return Ok(None) };
                Ok(Token::new(Cells::new(row).count()?))
            }
        }
    }

    pub(super) async fn leave(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
        waited: bool,
    ) -> Result<bool, Failure> {
        if keep.is_none_or(|keep| keep.is_zero()) && !waited {
            let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
            if wire.run(&self.sql.release, args).await?.affected == 1 {
                return Ok(true);
            }
        }
        let left = self.section(wire, &claim.name, Reach::FrontAnd(claim.id), None, |loaded| {
            loaded.queue.leave(claim.id, keep, loaded.now)
        });
        Ok(left.await?.unwrap_or(false))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;

    use super::super::SqlStore;
    use super::super::wire::{Done, Row, Statement};
    use super::*;
    use leasehold_core::Kind;
    use leasehold_core::Name;
    use leasehold_core::store::Store;

    /// Counts what is sent.
    struct Counted<'a> {
        wire: &'a mut dyn Wire,
        sent: usize,
    }

    #[async_trait]
    impl Wire for Counted<'_> {
        async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Row>> {
            self.sent += 1;
            self.wire.rows(statement, args).await
        }

        async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
            self.sent += 1;
            self.wire.run(statement, args).await
        }

        async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
            self.sent += 1;
            self.wire.raw(sql).await
        }

        async fn close(self: Box<Self>) -> sqlx::Result<()> {
            Ok(())
        }
    }

    /// How many statements a name costs that was never used (`first`), and one that was.
    async fn takes_and_releases_by(url: &str, first: usize) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        for name in ["one", "two", "one", "one", "two"] {
            let is_new = store.shared.snapshot(&mut *wire.wire, &Name::new(name).unwrap()).await;
            let most = if is_new.unwrap().is_none() { first } else { 1 };
            let claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
            for keep in [None, Some(Duration::ZERO)] {
                let expected = if keep.is_none() { most } else { 1 };
                let joined = store.shared.join(&mut wire, &claim, Mode::Try).await.unwrap();
                let held = matches!(joined, Answer::Joined(Joined::Holding { .. }));
                assert!(held, "{name}: {joined:?}");
                assert_eq!(std::mem::take(&mut wire.sent), expected, "to take {name}");
                assert!(store.shared.leave(&mut wire, &claim, keep, false).await.unwrap());
                assert_eq!(std::mem::take(&mut wire.sent), 1, "to release {name}");
            }
        }
    }

    /// A try that fails costs few statements, and writes nothing.
    async fn fails_without_writing(url: &str, most: usize) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("held").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let held = claim();
        let joined = store.shared.join(&mut wire, &held, Mode::Try).await.unwrap();
        assert!(matches!(joined, Answer::Joined(Joined::Holding { .. })), "{joined:?}");
        for waits in [false, true] {
            if waits {
                let waiter = claim();
                store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap();
            }
            wire.sent = 0;
            let tried = store.shared.join(&mut wire, &claim(), Mode::Try).await.unwrap();
            let Answer::Joined(Joined::Busy { holders }) = tried else { panic!("{tried:?}") };
            assert_eq!(holders.len(), 1);
            assert!(wire.sent <= most, "{} statements", wire.sent);
        }
        // Asked again, who holds is told so.
        let again = store.shared.join(&mut wire, &held, Mode::Try).await.unwrap();
        assert!(matches!(again, Answer::Joined(Joined::Holding { .. })), "{again:?}");
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn f41_sqlite_looks_before_it_draws() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        fails_without_writing(&url, 2).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn f41_postgres_looks_before_it_draws() {
        let url = testbed::postgres().database();
        fails_without_writing(&url, 2).await;
        // A row that was locked, even in vain, says by whom.
        let store = SqlStore::open(&url, &tokio::runtime::Handle::current()).await.unwrap();
        let held = Claim::new(Name::new("once").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let other = Claim::new(Name::new("once").unwrap(), Kind::Mutex, 1, 1).unwrap();
        store.join(&held, Mode::Try).await.unwrap();
        store.join(&other, Mode::Try).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let sql = "SELECT xmax::text FROM leasehold_locks WHERE name = 'once'";
        let statement = Statement { sql: sql.into(), shape: "t" };
        let row = pooled.wire.rows(&statement, Vec::new()).await.unwrap().remove(0);
        assert_eq!(Cells::new(row).text().unwrap(), "0", "somebody has locked the row");
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn f41_mariadb_looks_before_it_draws() {
        fails_without_writing(&testbed::mariadb().database(), 3).await;
    }

    /// One client's waiters stand in many locks: a heartbeat of all of them is a few statements.
    async fn tells_how_many_locks_stand_at_once(url: &str, most: usize) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let mut renewals = Vec::new();
        for n in 0..40 {
            let name = || Name::new(format!("lock {n}")).unwrap();
            let held = Claim::new(name(), Kind::Mutex, 1, 1).unwrap();
            store.join(&held, Mode::Try).await.unwrap();
            let waits = Claim::new(name(), Kind::Mutex, 1, 1).unwrap();
            assert!(matches!(store.join(&waits, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
            renewals.push(leasehold_core::store::Renew { lease: waits.lease, claim: waits });
        }
        let mut pooled = store.shared.beats.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let beaten = store.shared.beat(&mut wire, &renewals).await.unwrap();
        assert_eq!(beaten.len(), 40);
        assert!(wire.sent <= most, "{} statements", wire.sent);
        store.shared.beats.put(pooled);
        for renewal in store.renew(&renewals).await.unwrap() {
            assert!(matches!(renewal, leasehold_core::store::Renewal::Waiting(_)), "{renewal:?}");
        }
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn f40_sqlite_tells_how_many_locks_stand_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        tells_how_many_locks_stand_at_once(&url, 2).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn f40_postgres_tells_how_many_locks_stand_at_once() {
        tells_how_many_locks_stand_at_once(&testbed::postgres().database(), 2).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn f40_mariadb_tells_how_many_locks_stand_at_once() {
        tells_how_many_locks_stand_at_once(&testbed::mariadb().database(), 5).await;
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn sqlite_takes_and_releases_by_one_statement_each() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        takes_and_releases_by(&url, 1).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn postgres_takes_and_releases_by_one_statement_each() {
        takes_and_releases_by(&testbed::postgres().database(), 1).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mariadb_takes_by_two_statements_at_most() {
        takes_and_releases_by(&testbed::mariadb().database(), 2).await;
    }
}
