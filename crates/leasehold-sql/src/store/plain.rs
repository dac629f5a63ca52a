//! A *plain turn* of a contended mutex, on PostgreSQL and MySQL. Joining the queue takes one
//! message, and handing over to the next claim takes one message. Nearly all calls on a contended
//! lock are of this kind. A section takes two messages.
//!
//! A message begins a transaction, locks the lock's row, decides and writes, and commits. After a
//! hand-over it also notifies the next client. The server executes this in order, even if the
//! client pauses or crashes in between. So no client can keep the row locked, and the next waiter
//! depends only on the server.
//!
//! **What does the server decide?** Only the cases that are simple for the queue
//! ([`Queue`](leasehold_core::queue::Queue)). In all other cases the message changes nothing and
//! returns no row, and a section handles the call.
//! - A claim joins **behind others** if the lock is a mutex, the first claim of the queue holds, no
//!   claim in the front has expired, and the joining claim is not in the queue. It gets the next
//!   token and a row.
//! - A claim **hands over** if it is the first claim and holds, and the next claim waits and has
//!   not expired, or the queue has no next claim. Its place is removed. The next claim holds and
//!   keeps its expiry time.
//!
//! Neither can be done twice. A claim that is in the queue does not join again, and a claim that
//! has left is not the first.
//!
//! **On which state is the decision based?** A separate statement locks the row. So the deciding
//! statement sees what was committed before, because READ COMMITTED gives each statement its own
//! snapshot. Every change of the queue needs that row. So the queue cannot change in between,
//! except for expiry times, which renewals extend. A claim that is seen as expired may have been
//! renewed, and then a section finds that out.
//!
//! **Which client is notified?** The message cannot name the client before the server has decided.
//! So the hand-over stores the client's name in a session variable, and the statement after the
//! COMMIT notifies the client in that variable. If anything failed, that statement is not reached.
//! If that statement itself fails, the notification is lost, and the waiter's heartbeat finds the
//! grant. PostgreSQL rolls the variable back with the transaction, and it is emptied after the
//! notification (see [`notify_statement`](super::postgres::notify_statement)). MySQL's variable is
//! set by each message before any notification. So at worst a client is notified twice, and a
//! client believes a notification only if the claim is granted.
//!
//! **If the reply is lost**, the call is repeated. The second call finds that the claim is in the
//! queue or has left, and a section handles it.

use std::time::Duration;

use super::fault::Failure;
use super::plain_words::Plain;
use super::rows::{Cells, int, micros, plain};
use super::shared::Shared;
use super::wire::{Arg, Row, Step, Wire};
use leasehold_core::store::{Joined, Place, Signal};
use leasehold_core::{Claim, ClaimId, Kind, Token};

impl Shared {
    fn plain(&self, claim: &Claim) -> Option<&Plain> {
        let plain = claim.kind == Kind::Mutex && claim.capacity == 1 && claim.weight == 1;
        self.sql.plain.as_ref().filter(|_| plain)
    }

    /// Joins the queue behind other claims. Returns `None` if only a section can handle the call.
    pub(super) async fn stand(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<Option<Joined>, Failure> {
        let Some(plain) = self.plain(claim) else { return Ok(None) };
        let args = vec![
            Arg::Name(claim.name.as_str().into()),
            claim.id.to_hex().into(),
            int(claim.seen.saturating_add(1).min(Token::MAX / 2)),
            micros(claim.waiter_lease),
            micros(claim.lock_delay),
            self::plain(&claim.holder.host).into(),
            i64::from(claim.holder.pid).into(),
            self::plain(&claim.holder.label).into(),
            self.session.clone().into(),
        ];
        let answer = self.decide(wire, plain, Step::Rows(&plain.stand, args), None).await?;
        let Some(row) = answer else { return Ok(None) };
        let mut cells = Cells::new(row);
        let token = Token::new(cells.count()?);
        let (ahead, remains) = (cells.count()?, cells.count()?);
        // Only the next claim after the holder needs this time. That claim is not notified when the
        // holder's lease ends, so it polls then.
        let head_remaining = (ahead == 1).then(|| Duration::from_micros(remains));
        Ok(Some(Joined::Waiting(Place { ahead, head_remaining, token })))
    }

    /// Releases the lock and grants it to the next claim. Returns `false` if only a section can
    /// handle the call.
    pub(super) async fn hand_over(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<bool, Failure> {
        let Some(plain) = self.plain(claim) else { return Ok(false) };
        let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
        let step = Step::Rows(&plain.hand_over, args);
        let tell = vec![self.session.clone().into(), plain.notified_prefix.into()];
        let answer = self.decide(wire, plain, step, Some(Step::Rows(&plain.tell, tell))).await?;
        let Some(row) = answer else { return Ok(false) };
        let mut cells = Cells::new(row);
        let next = ClaimId::from_hex(&cells.text()?);
        if let (Some(id), Some(token)) = (next, Token::new(cells.count()?)) {
            self.waiters.notify(id, Signal::Granted(token));
        }
        Ok(true)
    }

    /// Sends one message and returns the row of `step`, if it did anything. Steps after the COMMIT
    /// may fail.
    async fn decide<'a>(
        &'a self,
        wire: &mut dyn Wire,
        plain: &'a Plain,
        step: Step<'a>,
        tell: Option<Step<'a>>,
    ) -> Result<Option<Row>, Failure> {
        let name = match &step {
            Step::Rows(_, args) => args.first().cloned(),
            Step::Raw(_) | Step::One(..) => None,
        };
        let mut steps = vec![
            Step::Raw(self.sql.begin.into()),
            Step::Rows(&plain.lock, name.into_iter().collect()),
            step,
            Step::Raw("COMMIT".into()),
        ];
        let durable = steps.len();
        steps.extend(tell);
        let mut done = Vec::new();
        match wire.script(steps, &mut done).await {
            Err(error) if done.len() < durable => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
        Ok(done.into_iter().nth(2).and_then(|rows| rows.into_iter().next()))
    }
}

#[cfg(all(test, any(feature = "postgres", feature = "mysql")))]
mod tests {
    use super::super::SqlStore;
    use super::super::queue_snapshot::QueueSnapshot;
    use super::*;
    use leasehold_core::Name;
    use leasehold_core::queue::Entry;
    use leasehold_core::store::{ClaimState, LockInfo, Mode, Store};
    use testbed::SeededRng;

    const BY_MESSAGE: &str = "by one message";
    const BY_SECTION: &str = "by a section";

    async fn open(url: &str) -> std::sync::Arc<SqlStore> {
        SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap()
    }

    fn mutex(name: &str) -> Claim {
        let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
        // These tests renew no claim.
        (claim.lease, claim.waiter_lease) = (Duration::from_secs(60), Duration::from_secs(60));
        claim
    }

    /// Returns the process ID and state of each claim.
    fn queue(info: Option<LockInfo>) -> Vec<(u32, ClaimState)> {
        let claims = info.map(|info| info.claims).unwrap_or_default();
        claims.into_iter().map(|c| (c.holder.pid, c.state)).collect()
    }

    fn describe(answer: &leasehold_core::Result<Joined>) -> String {
        match answer {
            Ok(Joined::Holding { .. }) => "holds".into(),
            Ok(Joined::Waiting(place)) => {
                format!("{} ahead, head_remaining: {}", place.ahead, place.head_remaining.is_some())
            }
            Ok(Joined::Busy { .. }) => "the claim left, and is in cooldown".into(),
            other => panic!("{other:?}"),
        }
    }

    /// Returns the token, ID, state and session of each claim in a queue.
    fn written(loaded: Option<QueueSnapshot>) -> String {
        let Some(loaded) = loaded else { return String::new() };
        let entry =
            |e: &Entry| format!("{} {} {:?} {}\n", e.token, e.id.to_hex(), e.state, e.session);
        loaded.queue.entries().map(entry).collect()
    }

    /// Runs random calls on two locks. One lock uses messages where they apply, the other only
    /// sections. The results must be the same.
    async fn does_what_a_section_would_have_done(url: &str, rounds: usize) {
        let store = open(url).await;
        let shared = &store.shared;
        let mut pooled = shared.pool.take().await.unwrap();
        // If the machine is paused, the server ends an open section. Then the section has had no
        // effect.
        macro_rules! done {
            (|$wire:ident| $call:expr) => {
                loop {
                    let $wire = &mut *pooled.wire;
                    match $call.await {
                        Ok(done) => break done,
                        Err(Failure::Conflict(_)) => pooled = shared.pool.take().await.unwrap(),
                        Err(failure) => panic!("{failure:?}"),
                    }
                }
            };
        }
        let (mut rng, mut waited, mut handed) = (SeededRng(7), 0, 0);
        for round in 0..rounds {
            let names = [BY_MESSAGE, BY_SECTION].map(|how| format!("{how} {round}"));
            let claims: Vec<[Claim; 2]> = (0..5)
                .map(|pid| {
                    let (host, label) = ("here".to_owned(), "it's a test".to_owned());
                    let holder = std::sync::Arc::new(leasehold_core::Holder { host, pid, label });
                    names.clone().map(|name| {
                        let mut claim = mutex(&name);
                        claim.holder = holder.clone();
                        claim
                    })
                })
                .collect();
            for _ in 0..30 {
                let what = rng.below(10);
                let name = &claims[0][0].name;
                let first = done!(|w| shared.snapshot(w, name));
                let first = first.and_then(|kept| Some(kept.queue.entries().next()?.holder.pid));
                // The leaving claim is usually the first.
                let n = match (what, first) {
                    (5..8, Some(first)) if rng.below(3) > 0 => first as usize,
                    _ => rng.below(5) as usize,
                };
                let [quick, slow] = &claims[n];
                match what {
                    0..5 => {
                        let by_section = done!(|w| shared.join_in_section(w, slow, Mode::Wait));
                        let before = written(done!(|w| shared.snapshot(w, &quick.name)));
                        let joined = done!(|w| shared.stand(w, quick));
                        let after = written(done!(|w| shared.snapshot(w, &quick.name)));
                        assert_eq!(joined.is_none(), before == after, "round {round}");
                        waited += usize::from(joined.is_some());
                        let answer = match joined {
                            Some(joined) => Ok(joined),
                            None => done!(|w| shared.join_in_section(w, quick, Mode::Wait)),
                        };
                        assert_eq!(describe(&answer), describe(&by_section), "round {round}");
                    }
                    5..8 => {
                        let by_section = done!(|w| shared.leave_in_section(w, slow, None));
                        let before = written(done!(|w| shared.snapshot(w, &quick.name)));
                        let handed_over = done!(|w| shared.hand_over(w, quick));
                        let after = written(done!(|w| shared.snapshot(w, &quick.name)));
                        assert_eq!(handed_over, before != after, "round {round}: {before} {after}");
                        handed += usize::from(handed_over);
                        let left =
                            handed_over || done!(|w| shared.leave_in_section(w, quick, None));
                        assert_eq!(left, by_section, "round {round}");
                        let mut firsts = Vec::new();
                        for claim in [quick, slow] {
                            let kept = done!(|w| shared.snapshot(w, &claim.name));
                            let kept = kept.map(|kept| kept.queue);
                            let first = kept.as_ref().and_then(|queue| queue.entries().next());
                            firsts.push(first.map(|e| (e.holder.pid, e.state)));
                        }
                        assert_eq!(firsts[0], firsts[1], "first claims in round {round}");
                    }
                    8 => {
                        for claim in [quick, slow] {
                            let keep = Some(Duration::from_secs(60));
                            done!(|w| shared.leave_in_section(w, claim, keep));
                        }
                    }
                    _ => {
                        // The claim expires.
                        for table in ["locks", "claims"] {
                            let set = format!(
                                "UPDATE {} SET expires = 1 WHERE claim IN ('{}', '{}')",
                                store.parsed.table(table),
                                quick.id.to_hex(),
                                slow.id.to_hex()
                            );
                            pooled.wire.raw(&set).await.unwrap();
                        }
                    }
                }
                let [quick, slow] = [quick, slow].map(|claim| store.read(&claim.name));
                assert_eq!(
                    queue(quick.await.unwrap()),
                    queue(slow.await.unwrap()),
                    "round {round}"
                );
            }
        }
        assert!(waited > 2 * rounds && handed > rounds, "{waited} claims, {handed} hand-overs");
    }

    /// If a join had to wait for the row, its decision and its times are based on the clock after
    /// the wait.
    async fn reads_the_clock_after_the_wait(url: &str) {
        let store = open(url).await;
        let shared = &store.shared;
        let (held, waits) = (mutex("dated"), mutex("dated"));
        store.join(&held, Mode::Try).await.unwrap();
        let mut section = shared.pool.take().await.unwrap();
        let mut other = shared.pool.take().await.unwrap();
        let name = vec![Arg::Name("dated".into())];
        section.wire.raw(shared.sql.begin).await.unwrap();
        section.wire.rows(&shared.sql.lock, name).await.unwrap();
        let commits = async {
            tokio::time::sleep(Duration::from_millis(400)).await;
            let seen = shared.snapshot(&mut *section.wire, &held.name).await.unwrap();
            section.wire.raw("COMMIT").await.unwrap();
            seen.unwrap().now
        };
        let (joined, committed) = tokio::join!(shared.stand(&mut *other.wire, &waits), commits);
        assert!(matches!(joined, Ok(Some(Joined::Waiting(_)))), "{joined:?}");
        let seen = shared.snapshot(&mut *other.wire, &held.name).await.unwrap().unwrap();
        let waited = seen.queue.entries().find(|e| e.id == waits.id).unwrap();
        assert!(waited.since >= committed && waited.token.get() >= committed, "{waited:?}");
    }

    /// A token is also based on the clock after the wait if one statement acquires the lock.
    /// Another client holds the lock and releases it while the statement waits for the row.
    async fn takes_by_the_clock_as_it_is_after_the_wait(url: &str) {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let shared = &store.shared;
        let mut section = shared.pool.take().await.unwrap();
        let mut other = shared.pool.take().await.unwrap();
        for round in 0..2 {
            let [held, waits] = [mutex("taken"), mutex("taken")];
            assert!(shared.take(&mut *section.wire, &held).await.unwrap().is_some());
            section.wire.raw(shared.sql.begin).await.unwrap();
            assert!(shared.release(&mut *section.wire, &held).await.unwrap());
            let commits = async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let seen = shared.snapshot(&mut *section.wire, &held.name).await.unwrap();
                section.wire.raw("COMMIT").await.unwrap();
                seen.unwrap().now
            };
            let (taken, committed) = tokio::join!(shared.take(&mut *other.wire, &waits), commits);
            // The lock was still held when the statement read it, so the statement did not try to
            // acquire it.
            let Some(token) = taken.unwrap() else { continue };
            assert!(token.get() >= committed, "round {round}: {token} before {committed}");
            assert!(shared.release(&mut *other.wire, &waits).await.unwrap());
        }
    }

    /// A client's statements are planned once. If the table was empty then and is full of dead rows
    /// later, the statements must use an index.
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn index_is_used_although_the_table_was_empty_when_planned() {
        let store = open(&testbed::postgres().database()).await;
        let shared = &store.shared;
        let mut pooled = shared.pool.take().await.unwrap();
        let wire = &mut *pooled.wire;
        wire.raw("VACUUM ANALYZE public.leasehold_claims").await.unwrap();
        let scans = async |wire: &mut dyn Wire| -> [u64; 2] {
            let statement =
                |sql: &str, shape| super::super::wire::Statement { sql: sql.into(), shape };
            wire.rows(&statement("SELECT pg_stat_force_next_flush()::text", "t"), vec![])
                .await
                .unwrap();
            let sql = "SELECT t.seq_scan, i.idx_scan FROM pg_stat_user_tables t, pg_stat_user_indexes i \
                       WHERE t.relname = 'leasehold_claims' AND i.indexrelname = 'leasehold_claims_by_claim'";
            let mut cells =
                Cells::new(wire.rows(&statement(sql, "ii"), vec![]).await.unwrap().remove(0));
            [cells.count().unwrap(), cells.count().unwrap()]
        };
        let before = scans(wire).await;
        let mut holds = mutex("popular");
        assert!(shared.take(wire, &holds).await.unwrap().is_some());
        for _ in 0..20 {
            let next = mutex("popular");
            assert!(shared.stand(wire, &next).await.unwrap().is_some());
            assert!(shared.hand_over(wire, &holds).await.unwrap());
            holds = next;
        }
        let after = scans(wire).await;
        assert_eq!(after[0], before[0], "the statements read the whole table");
        // The statements use the index by claim, so they do not read all claims that were ever in
        // this queue either.
        assert!(after[1] >= before[1] + 20, "{before:?} {after:?}");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn single_message_path_matches_the_transaction_on_postgres() {
        takes_by_the_clock_as_it_is_after_the_wait(&testbed::postgres().database()).await;
        reads_the_clock_after_the_wait(&testbed::postgres().database()).await;
        does_what_a_section_would_have_done(&testbed::postgres().database(), 40).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn single_message_path_matches_the_transaction_on_mariadb() {
        takes_by_the_clock_as_it_is_after_the_wait(&testbed::mariadb().database()).await;
        reads_the_clock_after_the_wait(&testbed::mariadb().database()).await;
        does_what_a_section_would_have_done(&testbed::mariadb().database(), 20).await;
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn single_message_path_matches_the_transaction_on_mysql() {
        if !testbed::Server::MySql.in_this_run() {
            return;
        }
        reads_the_clock_after_the_wait(&testbed::mysql().database()).await;
        does_what_a_section_would_have_done(&testbed::mysql().database(), 20).await;
    }

    /// The next client cannot be notified. The commit before the notification stays, and the
    /// hand-over succeeds.
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn hand_over_succeeds_even_if_its_notification_fails() {
        let url = testbed::postgres().database();
        let (one, other) = (open(&url).await, open(&url).await);
        let (first, next) = (mutex("unheard"), mutex("unheard"));
        one.join(&first, Mode::Wait).await.unwrap();
        other.join(&next, Mode::Wait).await.unwrap();
        let mut pooled = one.shared.pool.take().await.unwrap();
        let wire = &mut *pooled.wire;
        // PostgreSQL rejects the name of this channel, because it is too long.
        let set = "SET session = 'leasehold_hears_' || repeat('x', 200)";
        wire.raw(&format!("UPDATE public.leasehold_claims {set}")).await.unwrap();
        assert!(one.shared.hand_over(wire, &first).await.unwrap());
        one.shared.pool.put(pooled);
        let left = one.read(&first.name).await.unwrap().unwrap().claims;
        assert_eq!(left.iter().map(|claim| claim.state).collect::<Vec<_>>(), [ClaimState::Holding]);
    }

    /// Another transaction keeps the lock's row locked for too long. The hand-over is rolled back
    /// and is not reported as done.
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn rolled_back_hand_over_is_not_reported_as_done() {
        use sqlx::Connection;
        let url = testbed::postgres().database();
        let store = open(&url).await;
        let shared = &store.shared;
        let (first, next) = (mutex("locked"), mutex("locked"));
        store.join(&first, Mode::Wait).await.unwrap();
        store.join(&next, Mode::Wait).await.unwrap();
        // Not one of our own connections: the server would end its transaction before the wait for
        // the row ends.
        let mut other = sqlx::PgConnection::connect(&url).await.unwrap();
        let lock = "BEGIN; SELECT 1 FROM leasehold_locks WHERE name = 'locked' FOR UPDATE";
        sqlx::raw_sql(lock).execute(&mut other).await.unwrap();
        let mut pooled = shared.pool.take().await.unwrap();
        let handed_over = shared.hand_over(&mut *pooled.wire, &first).await;
        assert!(matches!(handed_over, Err(Failure::Conflict(_))), "{handed_over:?}");
        sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
        pooled.wire.raw("ROLLBACK").await.unwrap();
        assert!(shared.hand_over(&mut *pooled.wire, &first).await.unwrap());
    }

    /// A connection that is borrowed from the caller's pool hands over once.
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn borrowed_connection_hands_over() {
        use super::super::callers::CallersPool;
        use super::super::url::SqlUrl;
        let url = testbed::postgres().database();
        let here = tokio::runtime::Handle::current();
        let pool = sqlx::PgPool::connect(&url).await.unwrap();
        let callers = Some(CallersPool::Postgres(pool, here.clone()));
        let parsed = SqlUrl { callers, ..SqlUrl::parse(&url).unwrap() };
        let store = SqlStore::open_parsed(parsed, url, &here).await.unwrap();
        let mut taken = vec![store.shared.pool.take().await.unwrap()];
        while !taken.last().is_some_and(|pooled| pooled.wire.is_borrowed()) {
            taken.push(store.shared.pool.take().await.unwrap());
        }
        let mut borrowed = taken.pop().unwrap();
        taken.into_iter().for_each(|pooled| store.shared.pool.put(pooled));
        let (first, next) = (mutex("borrowed"), mutex("borrowed"));
        store.join(&first, Mode::Wait).await.unwrap();
        store.join(&next, Mode::Wait).await.unwrap();
        assert!(store.shared.hand_over(&mut *borrowed.wire, &first).await.unwrap());
        assert!(!store.shared.hand_over(&mut *borrowed.wire, &first).await.unwrap());
        store.shared.pool.put(borrowed);
        assert!(store.leave(&next, None).await.unwrap());
        assert!(!store.leave(&next, None).await.unwrap());
    }
}
