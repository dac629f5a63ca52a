//! Getting in and out: by one statement on the lock's row where that decides it, else by a section.

use std::time::Duration;

use super::Shared;
use super::call::Answer;
use super::fault::{self, Failure};
use super::loaded::Reach;
use super::rows::{Cells, int, kind_number, micros, plain};
use super::url::Dialect;
use super::wire::{Arg, Wire};
use crate::claim::{Claim, Token};
use crate::queue::At;
use crate::store::{Joined, Mode, mismatch};

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
        if mode == Mode::Wait {
            self.waiters.enlist(claim.id, || ());
        }
        let reach = Reach::FrontAnd(claim.id);
        let joined = self.section(wire, &claim.name, reach, Some(claim), |loaded| {
            let at = At { now: loaded.now, stamp: loaded.now };
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
    use crate::claim::Kind;
    use crate::name::Name;

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
