//! Getting in and out: by one statement on the lock's row where that decides it; by one message where a
//! mutex changes hands, on servers (`plain.rs`); else by a section.

use std::time::Duration;

use super::call::{Answer, Told};
use super::fault::{self, Failure};
use super::loaded::{self, Reach};
use super::plain_words::HandedOver;
use super::rows::{Cells, int, kind_number, micros, plain};
use super::shared::Shared;
use super::url::Dialect;
use super::wire::{Arg, Wire};
use leasehold_core::queue::StoreTime;
use leasehold_core::store::{Joined, Mode, Renew, Renewal, mismatch};
use leasehold_core::{Claim, Token};

impl Shared {
    pub(super) async fn join(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Answer, Failure> {
        let contended = self.contended.lately(&claim.name);
        if !contended && let Some(token) = self.take(wire, claim).await? {
            let remaining = Some(claim.lease);
            return Ok(Answer::Joined(Joined::Holding { token, remaining }));
        }
        match mode {
            Mode::Wait => {
                self.waiters.enlist(claim.id, || ());
                if let Some(stands) = self.stand(wire, claim).await? {
                    self.contended.learn(&claim.name, &stands);
                    return Ok(Answer::Joined(stands));
                }
            }
            Mode::Try => {
                if let Some(answer) = self.glance(wire, claim).await? {
                    return Ok(answer);
                }
            }
        }
        self.join_in_section(wire, claim, mode).await
    }

    pub(super) async fn join_in_section(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Answer, Failure> {
        let reach = Reach::FrontAnd(claim.id);
        let joined = self.section(wire, &claim.name, reach, Some(claim), |loaded| {
            let at = StoreTime { now: loaded.now, stamp: loaded.now };
            let joined = loaded.queue.join(claim, mode, at, &self.session);
            joined.map(|joined| loaded.with_hidden(joined))
        });
        let joined = joined.await?.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
        if let Ok(joined) = &joined {
            self.contended.learn(&claim.name, joined);
        }
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
    pub(super) async fn take(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<Option<Token>, Failure> {
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
            // The one that can do without a row costs three times as much.
            _ if self.known.has(&claim.name) => {
                args.extend(what());
                args.push(lease());
                args.push(floor());
                args.extend(who());
                args.push(delay());
                args.extend(people());
                args.push(name());
                let Some(row) = wire.rows(&self.sql.take, args).await?.pop() else {
                    return Ok(None);
                };
                let mut cells = Cells::new(row);
                let (token, ago) = (Token::new(cells.count()?), cells.count()?);
                match Duration::from_micros(ago) > SOON {
                    true => self.begin_now(wire, claim, token).await,
                    false => Ok(token),
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
                let taken = wire.rows(&self.sql.take_new, args).await?.pop();
                self.known.note(&claim.name);
                let Some(row) = taken else { return Ok(None) };
                Ok(Token::new(Cells::new(row).count()?))
            }
        }
    }

    /// A lock that was just taken, after a wait: its lease begins when it was let in, not before.
    async fn begin_now(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        token: Option<Token>,
    ) -> Result<Option<Token>, Failure> {
        let renewal = Renew { claim: claim.clone(), lease: claim.lease };
        let begun = self.beat(wire, &[renewal]).await?;
        let holds = begun.iter().any(|b| matches!(b.renewal, Renewal::Holding { .. }));
        Ok(token.filter(|_| holds))
    }

    pub(super) async fn leave(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
        told: Told,
    ) -> Result<bool, Failure> {
        // Mostly nothing came of it yet, and to see that, nobody has to be waited for. (What a connection that
        // was given up still does at the server ends with its lease, as whatever comes late.)
        if told == Told::Nothing && !self.is_there(wire, claim).await? {
            return Ok(false);
        }
        let mut perhaps = false;
        if keep.is_none_or(|keep| keep.is_zero()) {
            if !self.is_contended(claim, told) && self.release(wire, claim).await? {
                return Ok(true);
            }
            match self.hand_over(wire, claim).await? {
                HandedOver::Done => return Ok(true),
                HandedOver::Not => {}
                HandedOver::Perhaps => perhaps = true,
            }
        }
        Ok(self.leave_in_section(wire, claim, keep).await? || perhaps)
    }

    /// Whether somebody waits for what leaves, as far as is known: then it is not tried first whether
    /// nobody does, which would be a statement in vain.
    pub(super) fn is_contended(&self, claim: &Claim, told: Told) -> bool {
        told == Told::Waits || self.sql.plain.is_some() && self.contended.lately(&claim.name)
    }

    /// As it was committed last.
    async fn is_there(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<bool, Failure> {
        let seen = loaded::look(wire, &self.sql, &claim.name, claim.id).await?;
        Ok(seen.is_some_and(|seen| seen.queue.entries().any(|entry| entry.id == claim.id)))
    }

    pub(super) async fn leave_in_section(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<bool, Failure> {
        let left = self.section(wire, &claim.name, Reach::FrontAnd(claim.id), None, |loaded| {
            loaded.queue.leave(claim.id, keep, loaded.now)
        });
        Ok(left.await?.unwrap_or(false))
    }

    /// Releases a lock that nobody waits for.
    pub(super) async fn release(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<bool, Failure> {
        let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
        Ok(wire.run(&self.sql.release, args).await?.affected == 1)
    }
}

/// A lease that begins less than this before its lock was taken begins with it.
const SOON: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;

    use super::super::SqlStore;
    use super::super::wire::{Done, Row, Statement, Step};
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

        async fn script(
            &mut self,
            steps: Vec<Step<'_>>,
            done: &mut Vec<Vec<Row>>,
        ) -> sqlx::Result<()> {
            self.sent += 1;
            self.wire.script(steps, done).await
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
                assert!(store.shared.leave(&mut wire, &claim, keep, Told::Whatever).await.unwrap());
                assert_eq!(std::mem::take(&mut wire.sent), 1, "to release {name}");
            }
        }
    }

    /// Once waited for, found free: from then on it costs what a free lock costs.
    async fn is_free_again(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("free again").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let (held, waits) = (claim(), claim());
        store.shared.join(&mut wire, &held, Mode::Wait).await.unwrap();
        let joined = store.shared.join(&mut wire, &waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Answer::Joined(Joined::Waiting(_))), "{joined:?}");
        for (left, told) in [(&held, Told::Whatever), (&waits, Told::Waits)] {
            assert!(store.shared.leave(&mut wire, left, None, told).await.unwrap());
        }
        for turn in ["first", "second", "third"] {
            let next = claim();
            wire.sent = 0;
            let joined = store.shared.join(&mut wire, &next, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Answer::Joined(Joined::Holding { .. })), "{joined:?}");
            assert!(store.shared.leave(&mut wire, &next, None, Told::Whatever).await.unwrap());
            assert!(turn == "first" || wire.sent == 2, "{turn}: {} messages", wire.sent);
        }
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn sqlite_forgets_that_a_lock_was_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        is_free_again(&url).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn postgres_forgets_that_a_lock_was_waited_for() {
        is_free_again(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mariadb_forgets_that_a_lock_was_waited_for() {
        is_free_again(&testbed::mariadb().database()).await;
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

    /// A lock that changes hands again and again: one message for who leaves and one for who joins.
    async fn a_turn_is_one_message_each(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("popular").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let mut holder = claim();
        store.shared.join(&mut wire, &holder, Mode::Wait).await.unwrap();
        let mut waiter = claim();
        store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap();
        for _ in 0..5 {
            wire.sent = 0;
            assert!(store.shared.leave(&mut wire, &holder, None, Told::Waits).await.unwrap());
            assert_eq!(wire.sent, 1, "to hand over");
            let news = store.shared.waiters.news(waiter.id).await;
            assert!(matches!(news, leasehold_core::store::Signal::Granted(_)), "{news:?}");
            holder = std::mem::replace(&mut waiter, claim());
            wire.sent = 0;
            let joined = store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Answer::Joined(Joined::Waiting(_))), "{joined:?}");
            assert_eq!(wire.sent, 1, "to stand in the queue");
        }
    }

    /// What a script changes, somebody has changed since it was read: nothing of it is done, nothing
    /// after it either, and the call is to begin anew.
    async fn a_write_in_vain_is_a_conflict_and_commits_nothing(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let sql = &store.shared.sql;
        let name = || Arg::Name("nobody's".into());
        let mut pooled = store.shared.pool.take().await.unwrap();
        for _ in 0..2 {
            let steps = vec![
                Step::Raw(sql.begin.into()),
                Step::Rows(&sql.create, vec![name(), 0.into(), 1.into()]),
                Step::One(&sql.delete_claim, vec![name(), 1.into(), 2.into()]),
                Step::Raw("COMMIT".into()),
            ];
            let mut done = Vec::new();
            let failed = pooled.wire.script(steps, &mut done).await.unwrap_err();
            assert_eq!(done.len(), 2, "what came before was done, and no more");
            assert!(matches!(fault::Failure::from(failed), Failure::Conflict(_)));
            pooled.wire.raw("ROLLBACK").await.unwrap();
        }
        let name = Name::new("nobody's").unwrap();
        assert!(store.shared.snapshot(&mut *pooled.wire, &name).await.unwrap().is_none());
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn sqlite_commits_all_of_a_section_or_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn r10_postgres_hands_over_by_one_message() {
        let url = testbed::postgres().database();
        a_turn_is_one_message_each(&url).await;
        a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn r10_mariadb_and_mysql_hand_over_by_one_message() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            a_turn_is_one_message_each(&url).await;
            a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
        }
    }

    /// Each call is two switches between threads. (A BEGIN goes with what follows it.)
    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn a_turn_on_sqlite_is_few_calls_of_the_driver() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        let store = SqlStore::open(&url, &tokio::runtime::Handle::current()).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let claim = || Claim::new(Name::new("turns").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut queue: Vec<Claim> = (0..4).map(|_| claim()).collect();
        for (waiter, most) in queue.iter().zip([1, 4, 3, 3]) {
            wire.sent = 0;
            store.shared.join(&mut wire, waiter, Mode::Wait).await.unwrap();
            assert!(wire.sent <= most, "{} calls to stand in the queue", wire.sent);
        }
        for _ in 0..5 {
            wire.sent = 0;
            assert!(
                store.shared.leave(&mut wire, &queue.remove(0), None, Told::Waits).await.unwrap()
            );
            assert!(wire.sent <= 3, "{} calls to hand over", wire.sent);
            queue.push(claim());
            wire.sent = 0;
            let last = &queue[queue.len() - 1];
            let joined = store.shared.join(&mut wire, last, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Answer::Joined(Joined::Waiting(_))), "{joined:?}");
            assert!(wire.sent <= 3, "{} calls to stand in the queue again", wire.sent);
        }
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
        let sql = "SELECT xmax::text FROM public.leasehold_locks WHERE name = 'once'";
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
        tells_how_many_locks_stand_at_once(&testbed::mariadb().database(), 2).await;
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
