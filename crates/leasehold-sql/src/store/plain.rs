//! A plain turn of a contended mutex, on PostgreSQL and MySQL: to stand behind others is one message, and to
//! hand over to the next is one. That is what nearly all calls on a contended lock are; a section is two.
//!
//! A message is *begin, lock the lock's row, decide and write, commit*, and after a hand-over *tell*.
//! The server does one after the other, whatever becomes of the client meanwhile. So nobody who stops or
//! dies keeps the row, and the next in line waits for the server alone and not for us.
//!
//! *What is decided there?* Only what the queue would decide without a second thought
//! ([`Queue`](leasehold_core::queue::Queue)); everything else changes nothing, answers no row, and is done in full by
//! a section. A claim **stands** behind the others if it is a mutex's, the first in the queue holds, nobody
//! in the front is over, and it has no place there yet: it gets the next token, and a row. A claim
//! **hands over** if it is the first and holds, and whoever is next waits and is not over, or nobody is
//! next: its place goes, the next one holds, and keeps its end. Neither can be done twice: who has a place
//! does not stand again, and who has left is not the first.
//!
//! *What is it decided on?* The row is locked by a statement of its own, so the one that decides sees what
//! was committed before: READ COMMITTED gives each statement its own snapshot. Whoever changes the queue
//! has that row, so nothing of the queue changes meanwhile but the ends of places, which others lengthen:
//! one that is seen as over may be not, and then a section finds out.
//!
//! *Who is told?* The message cannot say whom before the server has decided. So what hands over leaves it in
//! a variable of the session, and the statement behind the COMMIT tells whom it finds there; where anything
//! failed, that one is not reached. If it fails itself, the news is lost, which the waiter's heartbeat makes
//! good. PostgreSQL undoes the variable with the transaction, and empties it when it has told (see
//! [`telling`](super::postgres::telling)); MySQL's is set anew by each message before anybody is told. So at worst
//! somebody is told twice, and news is believed only of a place that is granted.
//!
//! Where the server keeps procedures of ours, each message is a call of one (`procedures.rs`), which decides the same
//! on the same.
//!
//! *If the reply is lost*, the call is repeated, finds its place or that it is gone, and is done in full.

use std::time::Duration;

use super::fault::Failure;
use super::plain_words::{HandedOver, Plain};
use super::procedures::Called;
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

    /// Stands behind others. `None`: it is not as simple as that.
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
        let answer = match self.call_procedure(wire, |all| &all.stand, args.clone()).await? {
            Called::Done(row) => Some(row),
            Called::Nothing | Called::Unsure => None,
            Called::No => self.decide(wire, plain, Step::Rows(&plain.stand, args), None).await?,
        };
        let Some(row) = answer else { return Ok(None) };
        let mut cells = Cells::new(row);
        let token = Token::new(cells.count()?);
        let (ahead, remains) = (cells.count()?, cells.count()?);
        // The second is the one whom nobody tells when the first one's lease ends.
        let head_remaining = (ahead == 1).then(|| Duration::from_micros(remains));
        Ok(Some(Joined::Waiting(Place { ahead, head_remaining, token })))
    }

    /// Leaves, and lets the next one in.
    pub(super) async fn hand_over(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
    ) -> Result<HandedOver, Failure> {
        let Some(plain) = self.plain(claim) else { return Ok(HandedOver::Not) };
        let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
        let told = || vec![self.session.clone().into(), plain.told.into()];
        let both = args.iter().cloned().chain(told()).collect();
        let answer = match self.call_procedure(wire, |all| &all.hand_over, both).await? {
            Called::Done(row) => Some(row),
            Called::Nothing => None,
            Called::Unsure => return Ok(self.has_handed_over(wire, claim).await),
            Called::No => {
                let step = Step::Rows(&plain.hand_over, args);
                self.decide(wire, plain, step, Some(Step::Rows(&plain.tell, told()))).await?
            }
        };
        let Some(row) = answer else { return Ok(HandedOver::Not) };
        let mut cells = Cells::new(row);
        let next = ClaimId::from_hex(&cells.text()?);
        if let (Some(id), Some(token)) = (next, Token::new(cells.count()?)) {
            self.waiters.tell(id, Signal::Granted(token));
        }
        Ok(HandedOver::Done)
    }

    /// One message; what `step` answers, if it does anything. What comes after the COMMIT may fail.
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
    use super::super::call::Answer;
    use super::super::loaded::Loaded;
    use super::*;
    use leasehold_core::Name;
    use leasehold_core::queue::Entry;
    use leasehold_core::store::{LockInfo, Mode, Standing, Store};
    use testbed::Dice;

    const BY_MESSAGE: &str = "by one message";
    const BY_SECTION: &str = "by a section";

    /// How a plain turn is taken.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum By {
        Message,
        Procedure,
    }

    async fn open(url: &str, by: By) -> std::sync::Arc<SqlStore> {
        let store = SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
        let procedures = store.shared.sql.plain.as_ref().unwrap().procedures.as_ref();
        if let Some(procedures) = procedures {
            assert!(procedures.are_ready(), "it may make them");
            procedures.set_ready(by == By::Procedure);
        }
        store
    }

    fn mutex(name: &str) -> Claim {
        Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
    }

    /// Who stands how.
    fn queue(info: Option<LockInfo>) -> Vec<(u32, Standing)> {
        let claims = info.map(|info| info.claims).unwrap_or_default();
        claims.into_iter().map(|c| (c.holder.pid, c.standing)).collect()
    }

    fn told(answer: &Answer) -> String {
        match answer {
            Answer::Joined(Joined::Holding { .. }) => "holds".into(),
            Answer::Joined(Joined::Waiting(place)) => {
                format!("{} before it, asks: {}", place.ahead, place.head_remaining.is_some())
            }
            Answer::Joined(Joined::Busy { .. }) => "is gone, and its place kept".into(),
            other => panic!("{other:?}"),
        }
    }

    /// All that is written of a queue, but the ends of places.
    fn written(loaded: Option<Loaded>) -> String {
        let Some(loaded) = loaded else { return String::new() };
        let entry =
            |e: &Entry| format!("{} {} {:?} {}\n", e.token, e.id.to_hex(), e.standing, e.session);
        loaded.queue.entries().map(entry).collect()
    }

    /// Whatever comes after whatever: one of two locks goes by messages where these do it, the other by
    /// sections, and nobody can tell the difference.
    async fn does_what_a_section_would_have_done(url: &str, by: By, rounds: usize) {
        let store = open(url, by).await;
        let shared = &store.shared;
        let mut pooled = shared.pool.take().await.unwrap();
        // On a machine that stands still, the server ends an open section: nothing of it was done.
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
        let (mut dice, mut stood, mut handed) = (Dice(7), 0, 0);
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
                let what = dice.below(10);
                let name = &claims[0][0].name;
                let first = done!(|w| shared.snapshot(w, name));
                let first = first.and_then(|kept| Some(kept.queue.entries().next()?.holder.pid));
                // Who leaves is mostly the first.
                let n = match (what, first) {
                    (5..8, Some(first)) if dice.below(3) > 0 => first as usize,
                    _ => dice.below(5) as usize,
                };
                let [quick, slow] = &claims[n];
                match what {
                    0..5 => {
                        let by_section = done!(|w| shared.join_in_section(w, slow, Mode::Wait));
                        let before = written(done!(|w| shared.snapshot(w, &quick.name)));
                        let stands = done!(|w| shared.stand(w, quick));
                        let after = written(done!(|w| shared.snapshot(w, &quick.name)));
                        assert_eq!(stands.is_none(), before == after, "round {round}");
                        stood += usize::from(stands.is_some());
                        let answer = match stands {
                            Some(stands) => Answer::Joined(stands),
                            None => done!(|w| shared.join_in_section(w, quick, Mode::Wait)),
                        };
                        assert_eq!(told(&answer), told(&by_section), "round {round}");
                    }
                    5..8 => {
                        let by_section = done!(|w| shared.leave_in_section(w, slow, None));
                        let before = written(done!(|w| shared.snapshot(w, &quick.name)));
                        let handed_over = done!(|w| shared.hand_over(w, quick));
                        let after = written(done!(|w| shared.snapshot(w, &quick.name)));
                        let is_done = handed_over == HandedOver::Done;
                        assert_eq!(!is_done, before == after, "round {round}: {before} {after}");
                        let left = match handed_over {
                            HandedOver::Done => {
                                handed += 1;
                                true
                            }
                            HandedOver::Not => {
                                done!(|w| shared.leave_in_section(w, quick, None))
                            }
                            HandedOver::Perhaps => panic!("round {round}"),
                        };
                        assert_eq!(left, by_section, "round {round}");
                        let mut firsts = Vec::new();
                        for claim in [quick, slow] {
                            let kept = done!(|w| shared.snapshot(w, &claim.name));
                            let kept = kept.map(|kept| kept.queue);
                            let first = kept.as_ref().and_then(|queue| queue.entries().next());
                            firsts.push(first.map(|e| (e.holder.pid, e.standing)));
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
                        // Its time is over.
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
        assert!(stood > 2 * rounds && handed > rounds, "{stood} claims, {handed} hand-overs");
    }

    /// Who had to wait for the row judges, and is dated, by the clock as it is then.
    async fn reads_the_clock_after_the_wait(url: &str, by: By) {
        let store = open(url, by).await;
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
        let (stands, committed) = tokio::join!(shared.stand(&mut *other.wire, &waits), commits);
        assert!(matches!(stands, Ok(Some(Joined::Waiting(_)))), "{stands:?}");
        let seen = shared.snapshot(&mut *other.wire, &held.name).await.unwrap().unwrap();
        let stood = seen.queue.entries().find(|e| e.id == waits.id).unwrap();
        assert!(stood.since >= committed && stood.token.get() >= committed, "{stood:?}");
    }

    /// Likewise who takes a lock by one statement: somebody else has it, and lets it go, while the statement
    /// waits for the row.
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
            // It was taken when it was looked at: then it need not be tried.
            let Some(token) = taken.unwrap() else { continue };
            assert!(token.get() >= committed, "round {round}: {token} before {committed}");
            assert!(shared.release(&mut *other.wire, &waits).await.unwrap());
        }
    }

    /// A client's statements are planned once. When the table was empty then, and is full of dead rows
    /// by now, they find theirs through an index.
    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn an_index_is_read_though_the_table_was_empty() {
        for by in [By::Message, By::Procedure] {
            let store = open(&testbed::postgres().database(), by).await;
            reads_an_index(&store).await;
        }
    }

    #[cfg(feature = "postgres")]
    async fn reads_an_index(store: &SqlStore) {
        let shared = &store.shared;
        let mut pooled = shared.pool.take().await.unwrap();
        let wire = &mut *pooled.wire;
        wire.raw("VACUUM ANALYZE public.leasehold_claims").await.unwrap();
        let scans = async |wire: &mut dyn Wire| -> [u64; 2] {
            let said = |sql: &str, shape| super::super::wire::Statement { sql: sql.into(), shape };
            wire.rows(&said("SELECT pg_stat_force_next_flush()::text", "t"), vec![]).await.unwrap();
            let sql = "SELECT t.seq_scan, i.idx_scan FROM pg_stat_user_tables t, pg_stat_user_indexes i \
                       WHERE t.relname = 'leasehold_claims' AND i.indexrelname = 'leasehold_claims_by_claim'";
            let mut cells =
                Cells::new(wire.rows(&said(sql, "ii"), vec![]).await.unwrap().remove(0));
            [cells.count().unwrap(), cells.count().unwrap()]
        };
        let before = scans(wire).await;
        let mut holds = mutex("popular");
        assert!(shared.take(wire, &holds).await.unwrap().is_some());
        for _ in 0..20 {
            let next = mutex("popular");
            assert!(shared.stand(wire, &next).await.unwrap().is_some());
            assert_eq!(shared.hand_over(wire, &holds).await.unwrap(), HandedOver::Done);
            holds = next;
        }
        let after = scans(wire).await;
        assert_eq!(after[0], before[0], "all of the table was read");
        // Not all that ever stood in this queue, either.
        assert!(after[1] >= before[1] + 20, "{before:?} {after:?}");
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn what_one_message_does_on_postgres_a_section_would_have_done() {
        takes_by_the_clock_as_it_is_after_the_wait(&testbed::postgres().database()).await;
        for by in [By::Message, By::Procedure] {
            reads_the_clock_after_the_wait(&testbed::postgres().database(), by).await;
            does_what_a_section_would_have_done(&testbed::postgres().database(), by, 40).await;
        }
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn what_one_message_does_on_mariadb_a_section_would_have_done() {
        takes_by_the_clock_as_it_is_after_the_wait(&testbed::mariadb().database()).await;
        for by in [By::Message, By::Procedure] {
            reads_the_clock_after_the_wait(&testbed::mariadb().database(), by).await;
            does_what_a_section_would_have_done(&testbed::mariadb().database(), by, 20).await;
        }
    }

    #[cfg(feature = "mysql")]
    #[tokio::test]
    async fn what_one_message_does_on_mysql_a_section_would_have_done() {
        if !testbed::Server::MySql.in_this_run() {
            return;
        }
        for by in [By::Message, By::Procedure] {
            reads_the_clock_after_the_wait(&testbed::mysql().database(), by).await;
            does_what_a_section_would_have_done(&testbed::mysql().database(), by, 20).await;
        }
    }
}
