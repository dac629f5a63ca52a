//! Acquires and releases locks. One statement on the lock's row is tried first. On servers, a
//! contended mutex is handed over in one message (`plain.rs`). Everything else needs a section.

use std::time::Duration;

use super::call::ReleaseHint;
#[cfg(feature = "mysql")]
use super::fault;
use super::fault::Failure;
use super::queue_snapshot::{self, ReadScope};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use super::rows::Cells;
use super::rows::{int, kind_number, micros, plain};
use super::shared::Shared;
#[cfg(feature = "mysql")]
use super::url::Dialect;
use super::wire::{Arg, Wire};
use leasehold_core::queue::StoreTime;
use leasehold_core::store::{Joined, Mode, mismatch};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use leasehold_core::store::{Renew, Renewal};
use leasehold_core::{Claim, Result, Token};

impl Shared {
    pub(super) async fn join(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Result<Joined>, Failure> {
        let contended = self.contention_hints.lately(&claim.name);
        if !contended && let Some(token) = self.take(wire, claim).await? {
            let remaining = Some(claim.lease);
            return Ok(Ok(Joined::Holding { token, remaining }));
        }
        match mode {
            Mode::Wait => {
                self.enlist(claim);
                if let Some(stands) = self.stand(wire, claim).await? {
                    self.learn(claim, &stands);
                    return Ok(Ok(stands));
                }
            }
            Mode::Try => {
                if let Some(answer) = self.glance(wire, claim).await? {
                    if let Ok(joined) = &answer {
                        self.learn(claim, joined);
                    }
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
    ) -> Result<Result<Joined>, Failure> {
        let scope = ReadScope::FrontAnd(claim.id);
        let joined = self.section(wire, &claim.name, scope, Some(claim), |loaded| {
            let at = StoreTime { now: loaded.now, stamp: loaded.now };
            let joined = loaded.queue.join(claim, mode, at, &self.session);
            joined.map(|joined| loaded.with_hidden(joined))
        });
        let joined = joined.await?.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
        if let Ok(joined) = &joined {
            self.learn(claim, joined);
        }
        Ok(match joined {
            // Never report more than the requested lease. If the clock was set back, the row shows
            // more.
            Ok(Joined::Holding { token, remaining }) => {
                let remaining = remaining.map(|left| left.min(claim.lease));
                Ok(Joined::Holding { token, remaining })
            }
            Ok(joined) => Ok(joined),
            Err(m) => Err(mismatch(claim, m.kind, m.capacity)),
        })
    }

    /// Returns the answer to a claim that cannot be granted, without locking or writing anything.
    /// Like any answer, it is true as of the moment of the read. Returns `None` if the claim might
    /// be granted or is in the queue already.
    async fn glance(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<Option<Result<Joined>>, Failure> {
        let seen = queue_snapshot::read_front(wire, &self.sql, &claim.name, claim.id).await?;
        let Some(mut seen) = seen else { return Ok(None) };
        if seen.queue.entries().any(|e| e.id == claim.id) {
            return Ok(None);
        }
        let at = StoreTime { now: seen.now, stamp: seen.now };
        let tried = seen.queue.join(claim, Mode::Try, at, &self.session);
        Ok(match tried {
            _ if !seen.is_enough() => None,
            Ok(Joined::Busy { holders }) => Some(Ok(Joined::Busy { holders })),
            Ok(_) => None,
            Err(m) => Some(Err(mismatch(claim, m.kind, m.capacity))),
        })
    }

    /// Acquires a free lock by the fast path. The reported lease is counted from before the call
    /// was sent, so it never ends later than the lease in the row.
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
                // A client whose claim waits has seen the row, so the row exists.
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
            // The statement that also works without a row costs three times as much.
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            _ if self.seen_names.has(&claim.name) => {
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
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
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
                self.seen_names.note(&claim.name);
                let Some(row) = taken else { return Ok(None) };
                Ok(Token::new(Cells::new(row).count()?))
            }
        }
    }

    /// Restarts the lease of a lock whose acquisition had to wait for the row. The lease must begin
    /// when the lock was granted, not before.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    async fn begin_now(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        token: Option<Token>,
    ) -> Result<Option<Token>, Failure> {
        let renewal = Renew { claim: claim.clone(), lease: claim.lease };
        let begun = self.renew_unlocked(wire, &[renewal]).await?;
        let holds = begun.iter().any(|b| matches!(b.renewal, Renewal::Holding { .. }));
        Ok(token.filter(|_| holds))
    }

    pub(super) async fn leave(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
        hint: ReleaseHint,
    ) -> Result<bool, Failure> {
        // Usually the join has had no effect yet, and a read without locks shows that. (If the join
        // still takes effect later, on a connection that was given up, its claim ends when the
        // lease expires.)
        if hint == ReleaseHint::JoinInProgress && !self.is_there(wire, claim).await? {
            return Ok(false);
        }
        if keep.is_none_or(|keep| keep.is_zero()) {
            if !self.is_contended(claim, hint) && self.release(wire, claim).await? {
                return Ok(true);
            }
            if self.hand_over(wire, claim).await? {
                return Ok(true);
            }
        }
        self.leave_in_section(wire, claim, keep).await
    }

    /// Returns whether another claim waits for this lock, as far as this client knows. If so, the
    /// statement for a lock without waiters is not tried first, because it would fail.
    fn is_contended(&self, claim: &Claim, hint: ReleaseHint) -> bool {
        hint == ReleaseHint::Waiting
            || self.sql.plain.is_some() && self.contention_hints.lately(&claim.name)
    }

    /// Returns whether the claim is in the queue, according to the last committed state.
    async fn is_there(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<bool, Failure> {
        let seen = queue_snapshot::read_front(wire, &self.sql, &claim.name, claim.id).await?;
        Ok(seen.is_some_and(|seen| seen.queue.entries().any(|entry| entry.id == claim.id)))
    }

    pub(super) async fn leave_in_section(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<bool, Failure> {
        let left = self.section(wire, &claim.name, ReadScope::FrontAnd(claim.id), None, |loaded| {
            loaded.queue.leave(claim.id, keep, loaded.now)
        });
        Ok(left.await?.unwrap_or(false))
    }

    /// Releases a lock that no other claim waits for.
    pub(super) async fn release(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<bool, Failure> {
        let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
        Ok(wire.run(&self.sql.release, args).await?.affected == 1)
    }
}

/// If the lease began less than this before the lock was acquired, it is not restarted.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
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

    /// Counts the messages that are sent.
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

    /// Acquires and releases locks. A name that was never used costs `first` statements, and a
    /// known name one.
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
                let held = matches!(joined, Ok(Joined::Holding { .. }));
                assert!(held, "{name}: {joined:?}");
                assert_eq!(std::mem::take(&mut wire.sent), expected, "calls to acquire {name}");
                let hint = ReleaseHint::OtherReply;
                assert!(store.shared.leave(&mut wire, &claim, keep, hint).await.unwrap());
                assert_eq!(std::mem::take(&mut wire.sent), 1, "calls to release {name}");
            }
        }
    }

    /// A contended lock is found free. From then on it costs what any free lock costs.
    async fn is_free_again(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("free again").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let (held, waits) = (claim(), claim());
        store.shared.join(&mut wire, &held, Mode::Wait).await.unwrap().unwrap();
        let joined = store.shared.join(&mut wire, &waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Ok(Joined::Waiting(_))), "{joined:?}");
        for (left, hint) in [(&held, ReleaseHint::OtherReply), (&waits, ReleaseHint::Waiting)] {
            assert!(store.shared.leave(&mut wire, left, None, hint).await.unwrap());
        }
        for turn in ["first", "second", "third"] {
            let next = claim();
            wire.sent = 0;
            let joined = store.shared.join(&mut wire, &next, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Ok(Joined::Holding { .. })), "{joined:?}");
            let left = store.shared.leave(&mut wire, &next, None, ReleaseHint::OtherReply).await;
            assert!(left.unwrap());
            assert!(turn == "first" || wire.sent == 2, "{turn}: {} messages", wire.sent);
        }
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn formerly_contended_lock_is_cheap_again_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        is_free_again(&url).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn formerly_contended_lock_is_cheap_again_on_postgres() {
        is_free_again(&testbed::postgres().database()).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn formerly_contended_lock_is_cheap_again_on_mariadb() {
        is_free_again(&testbed::mariadb().database()).await;
    }

    /// A try that fails costs few statements and writes nothing. Further tries cost one statement,
    /// as long as the client remembers that the lock was not free.
    async fn fails_without_writing(url: &str, most: usize) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("held").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let held = claim();
        let joined = store.shared.join(&mut wire, &held, Mode::Try).await.unwrap();
        assert!(matches!(joined, Ok(Joined::Holding { .. })), "{joined:?}");
        for waits in [false, true] {
            if waits {
                let waiter = claim();
                store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap().unwrap();
            }
            wire.sent = 0;
            let tried = store.shared.join(&mut wire, &claim(), Mode::Try).await.unwrap();
            let Ok(Joined::Busy { holders }) = tried else { panic!("{tried:?}") };
            assert_eq!(holders.len(), 1);
            assert!(wire.sent <= most, "{} statements", wire.sent);
        }
        // The client forgets after a second, which may pass on a busy machine.
        let mut further = Vec::new();
        for _ in 0..10 {
            wire.sent = 0;
            let tried = store.shared.join(&mut wire, &claim(), Mode::Try).await.unwrap();
            assert!(matches!(tried, Ok(Joined::Busy { .. })), "{tried:?}");
            further.push(wire.sent);
        }
        assert!(further.contains(&1), "{further:?} statements");
        // If the holder joins again, the answer is that it holds.
        let again = store.shared.join(&mut wire, &held, Mode::Try).await.unwrap();
        assert!(matches!(again, Ok(Joined::Holding { .. })), "{again:?}");
    }

    /// During repeated hand-overs of a lock, each release takes one message, and so does each join.
    async fn a_turn_is_one_message_each(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let claim = || Claim::new(Name::new("popular").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let mut holder = claim();
        store.shared.join(&mut wire, &holder, Mode::Wait).await.unwrap().unwrap();
        let mut waiter = claim();
        store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap().unwrap();
        for _ in 0..5 {
            wire.sent = 0;
            let left = store.shared.leave(&mut wire, &holder, None, ReleaseHint::Waiting).await;
            assert!(left.unwrap());
            assert_eq!(wire.sent, 1, "calls to hand over");
            let news = store.shared.waiters.news(waiter.id).await;
            assert!(matches!(news, leasehold_core::store::Signal::Granted(_)), "{news:?}");
            holder = std::mem::replace(&mut waiter, claim());
            wire.sent = 0;
            let joined = store.shared.join(&mut wire, &waiter, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Ok(Joined::Waiting(_))), "{joined:?}");
            assert_eq!(wire.sent, 1, "calls to join the queue");
        }
    }

    /// A script fails at a write whose row another transaction has changed since it was read.
    /// Nothing is committed, later steps are not executed, and the call must be repeated.
    async fn a_write_in_vain_is_a_conflict_and_commits_nothing(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let sql = &store.shared.sql;
        let name = || Arg::Name("unused".into());
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
            assert_eq!(done.len(), 2, "only the steps before the error were executed");
            assert!(matches!(fault::Failure::from(failed), Failure::Conflict(_)));
            pooled.wire.raw("ROLLBACK").await.unwrap();
        }
        let name = Name::new("unused").unwrap();
        assert!(store.shared.snapshot(&mut *pooled.wire, &name).await.unwrap().is_none());
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn sqlite_commits_a_transaction_fully_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
    }

    // R10
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn postgres_hands_over_with_one_message() {
        let url = testbed::postgres().database();
        a_turn_is_one_message_each(&url).await;
        a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
    }

    // R10
    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mariadb_and_mysql_hand_over_with_one_message() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            a_turn_is_one_message_each(&url).await;
            a_write_in_vain_is_a_conflict_and_commits_nothing(&url).await;
        }
    }

    /// Each call costs two thread switches. (BEGIN is sent together with the next statement.)
    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn hand_over_on_sqlite_takes_few_driver_calls() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        let store = SqlStore::open(&url, &tokio::runtime::Handle::current()).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let claim = || Claim::new(Name::new("turns").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let mut queue: Vec<Claim> = (0..4).map(|_| claim()).collect();
        for (waiter, most) in queue.iter().zip([1, 4, 3, 3]) {
            wire.sent = 0;
            store.shared.join(&mut wire, waiter, Mode::Wait).await.unwrap().unwrap();
            assert!(wire.sent <= most, "{} calls to join the queue", wire.sent);
        }
        for _ in 0..5 {
            wire.sent = 0;
            let (first, hint) = (queue.remove(0), ReleaseHint::Waiting);
            assert!(store.shared.leave(&mut wire, &first, None, hint).await.unwrap());
            assert!(wire.sent <= 3, "{} calls to hand over", wire.sent);
            queue.push(claim());
            wire.sent = 0;
            let last = &queue[queue.len() - 1];
            let joined = store.shared.join(&mut wire, last, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Ok(Joined::Waiting(_))), "{joined:?}");
            assert!(wire.sent <= 3, "{} calls to join the queue again", wire.sent);
        }
    }

    // F41
    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn failed_try_writes_nothing_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        fails_without_writing(&url, 2).await;
    }

    // F41
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn failed_try_writes_nothing_on_postgres() {
        let url = testbed::postgres().database();
        fails_without_writing(&url, 2).await;
        // PostgreSQL records in `xmax` which transaction locked a row, even if the lock had no
        // effect.
        let store = SqlStore::open(&url, &tokio::runtime::Handle::current()).await.unwrap();
        let held = Claim::new(Name::new("once").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let other = Claim::new(Name::new("once").unwrap(), Kind::Mutex, 1, 1).unwrap();
        store.join(&held, Mode::Try).await.unwrap();
        store.join(&other, Mode::Try).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let sql = "SELECT xmax::text FROM public.leasehold_locks WHERE name = 'once'";
        let statement = Statement { sql: sql.into(), shape: "t" };
        let row = pooled.wire.rows(&statement, Vec::new()).await.unwrap().remove(0);
        assert_eq!(Cells::new(row).text().unwrap(), "0", "a transaction has locked the row");
    }

    // F41
    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn failed_try_writes_nothing_on_mariadb() {
        fails_without_writing(&testbed::mariadb().database(), 3).await;
    }

    /// One client waits for many locks. A heartbeat for all of them takes few statements.
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
        let mut pooled = store.shared.renewal_pool.take().await.unwrap();
        let mut wire = Counted { wire: &mut *pooled.wire, sent: 0 };
        let renewed = store.shared.renew_unlocked(&mut wire, &renewals).await.unwrap();
        assert_eq!(renewed.len(), 40);
        assert!(wire.sent <= most, "{} statements", wire.sent);
        store.shared.renewal_pool.put(pooled);
        for renewal in store.renew(&renewals).await.unwrap() {
            assert!(matches!(renewal, leasehold_core::store::Renewal::Waiting(_)), "{renewal:?}");
        }
    }

    // F40
    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn heartbeat_of_many_waiters_takes_few_statements_on_sqlite() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        tells_how_many_locks_stand_at_once(&url, 2).await;
    }

    // F40
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn heartbeat_of_many_waiters_takes_few_statements_on_postgres() {
        tells_how_many_locks_stand_at_once(&testbed::postgres().database(), 2).await;
    }

    // F40
    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn heartbeat_of_many_waiters_takes_few_statements_on_mariadb() {
        tells_how_many_locks_stand_at_once(&testbed::mariadb().database(), 2).await;
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn sqlite_acquires_and_releases_with_one_statement_each() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("locks.db").display());
        takes_and_releases_by(&url, 1).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn postgres_acquires_and_releases_with_one_statement_each() {
        takes_and_releases_by(&testbed::postgres().database(), 1).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn mariadb_acquires_with_at_most_two_statements() {
        takes_and_releases_by(&testbed::mariadb().database(), 2).await;
    }
}
