//! How MySQL wakes who waits: the server has no messages from one session to another, but a statement
//! can be ended by another session.
//!
//! A client that waits has a connection on which it sleeps at the server. That session holds a lock
//! of the server's own (`GET_LOCK`) whose name is the client's, by which everybody finds the session
//! (`IS_USED_LOCK`). Who grants sends, behind its COMMIT, `KILL QUERY` for the session that has the
//! name of the granted claim's client: that ends the sleep and nothing else. The sleeper then reads what
//! it was granted. No right is needed for it: a user may end its own statements. Of another user's
//! session, or of a name that nobody has, the server says so, after the COMMIT, and that is harmless.
//!
//! *What if the KILL comes while nobody sleeps?* The message that sleeps looks first whether there is a
//! grant that was not read before, and then does not sleep: a grant that was committed before the look
//! is seen by it, and the KILL behind one that is committed later finds the message under way, and ends
//! it, also between two of its statements. (The look is a statement of its own, so that no transaction
//! is open in the sleep.) A grant may become visible out of the order of its time, so the look goes
//! back a while ([`SLACK`]) and leaves out what was told.
//!
//! *How does a session sleep?* By SLEEP() at MySQL. MariaDB keeps all who sleep so under one mutex, and
//! its KILL takes that while it holds one of the session's own, which the session takes in the other order
//! as it wakes: it knows, and gives up after two seconds (`THD::abort_current_cond_wait`), in which nobody else
//! wakes up, or connects. Two wakes at the same moment are enough for that. So there, a client waits by
//! `GET_LOCK` for a lock that a second connection of it holds all the time: each such wait has a mutex of its own.
//! Who gets that lock has lost the second connection.
//!
//! *What if nobody can wake us?* (Another server of a cluster, another user, an older leasehold.) A sleep
//! is short, and what is found after one that nobody has ended makes the next ones shorter: that is the
//! polling of those who have no such connection. So nothing here is needed for a lock to be handed
//! over; and a client has such a connection only where the server has plenty ([`ROOM`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fault;
use super::limits::SLOW;
use super::rows::Cells;
use super::session::SLEEPS;
use super::shared::Shared;
use super::statements::Statements;
use super::version;
use super::wire::{Arg, Cell, Connect, Row, Statement, Step, Wire};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Token};

/// How long nobody is woken, in microseconds: where others wake us, and where they do not.
const SLEEP: [i64; 2] = [500_000, 20_000];
/// How many sleeps are short after one that should have been ended.
const UNWOKEN: u32 = 200;
/// How far a look goes back, in microseconds: longer than a section may take.
const SLACK: i64 = 3_000_000;
/// How much of the server's room is in use where nobody has a connection to sleep on, in percent.
const ROOM: i64 = 60;
/// How long the connection is kept when nobody waits any more.
const REST: Duration = Duration::from_secs(3);
/// How long it is done without the connection where it cannot be had.
const AGAIN: Duration = Duration::from_secs(10);

/// The name of a session that can be woken, as it stands in SQL: of letters, digits and `_`.
pub(super) fn waking(session: &str) -> Option<String> {
    let is_plain = session.len() <= 64
        && session.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && session.starts_with(SLEEPS);
    is_plain.then(|| format!("KILL QUERY IS_USED_LOCK('{session}')"))
}

/// Sleeps for all waiters of this client. Never ends by itself.
pub(super) async fn sleep(connect: Arc<dyn Connect>, shared: Arc<Shared>) {
    loop {
        while shared.waiters.count() == 0 {
            shared.waiters.more().await;
        }
        // What is lost, or refused, is done without for a while.
        let begun = tokio::time::timeout(SLOW, Sleeper::begin(&*connect, &shared)).await;
        if let Ok(Ok(Some(mut sleeper))) = begun {
            if sleeper.run().await.is_ok() {
                let _ = tokio::time::timeout(SLOW, sleeper.end()).await;
                continue;
            }
            shared.waiters.ask_all();
        }
        if shared.waiters.count() > 0 {
            let _ = tokio::time::timeout(AGAIN, shared.clone().poll()).await;
        }
    }
}

struct Sleeper<'a> {
    shared: &'a Shared,
    wire: Box<dyn Wire>,
    /// MariaDB: who holds the lock that is waited for.
    keeper: Option<Box<dyn Wire>>,
    /// What was told of grants since `after`.
    told: Vec<ClaimId>,
    after: i64,
    /// How many of the next sleeps are short.
    short: u32,
}

impl<'a> Sleeper<'a> {
    /// `None`: the server has no room for it.
    async fn begin(connect: &dyn Connect, shared: &'a Shared) -> sqlx::Result<Option<Self>> {
        let mut wire = connect.connect().await?;
        let say = |shape, sql: &str| Statement { sql: sql.into(), shape };
        let used = say("tt", "SHOW GLOBAL STATUS LIKE 'Threads_connected'");
        let most = say(
            "tt",
            "SELECT CAST(@@max_connections AS CHAR), CAST(@@max_user_connections AS CHAR)",
        );
        let version = say("t", "SELECT VERSION()");
        let be_named = &shared.sql.be_named;
        let steps = vec![
            Step::Rows(&version, Vec::new()),
            Step::Rows(&used, Vec::new()),
            Step::Rows(&most, Vec::new()),
            Step::Rows(be_named, vec![shared.session.as_str().into()]),
        ];
        let mut read = Vec::new();
        wire.script(steps, &mut read).await?;
        let mut read = read.into_iter().flatten();
        let version = read.next().and_then(|row| Cells::new(row).text().ok()).unwrap_or_default();
        let answers: Vec<i64> = read.flat_map(numbers).collect();
        if !has_room(&answers) {
            wire.close().await?;
            return Ok(None);
        }
        let keeper = match version::is_mariadb(&version) {
            true => Some(keep(connect, shared).await?),
            false => None,
        };
        Ok(Some(Self { shared, wire, keeper, told: Vec::new(), after: 0, short: 0 }))
    }

    async fn end(self) -> sqlx::Result<()> {
        self.wire.close().await?;
        match self.keeper {
            Some(keeper) => keeper.close().await,
            None => Ok(()),
        }
    }

    /// Until nobody has waited for a while.
    async fn run(&mut self) -> sqlx::Result<()> {
        let mut waited = Instant::now();
        while waited.elapsed() < REST {
            let began = Instant::now();
            let pause = SLEEP[usize::from(self.short > 0)];
            self.short = self.short.saturating_sub(1);
            let is_new = self.look(pause).await?;
            let is_late = began.elapsed() >= Duration::from_micros(pause.unsigned_abs());
            if is_new && is_late {
                self.short = UNWOKEN;
            }
            if self.shared.waiters.count() > 0 {
                waited = Instant::now();
            }
        }
        Ok(())
    }

    /// Sleeps for so long at most, and then tells who was granted. Whether anybody was.
    async fn look(&mut self, pause: i64) -> sqlx::Result<bool> {
        let Statements { is_new, sleep, wait, granted_since, .. } = &self.shared.sql;
        let session = || Arg::from(self.shared.session.as_str());
        let told = self.told.iter().map(|id| id.to_hex()).collect::<Vec<_>>().join(",");
        let rest = match self.keeper {
            Some(_) => Step::Rows(wait, vec![kept(self.shared).into(), pause.into()]),
            None => Step::Rows(sleep, vec![pause.into()]),
        };
        let steps = vec![
            Step::Rows(is_new, vec![session(), self.after.into(), told.into()]),
            rest,
            Step::Rows(granted_since, vec![session(), self.after.into()]),
        ];
        let mut read = Vec::new();
        let limit = SLOW + Duration::from_micros(pause.unsigned_abs());
        let slept = tokio::time::timeout(limit, self.wire.script(steps, &mut read)).await;
        match slept.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            Ok(()) => {
                let granted = self.tell(read.pop().unwrap_or_default());
                let rested = read.pop().unwrap_or_default().into_iter().flat_map(numbers).next();
                match self.keeper.is_some() && rested == Some(1) {
                    true => Err(sqlx::Error::WorkerCrashed),
                    false => Ok(granted),
                }
            }
            // Woken, and the server calls that an error.
            Err(error) if fault::is_interrupted(&error) => {
                let args = vec![session(), self.after.into()];
                let asked = tokio::time::timeout(SLOW, self.wire.rows(granted_since, args)).await;
                Ok(self.tell(asked.unwrap_or(Err(sqlx::Error::PoolTimedOut))?))
            }
            Err(error) => Err(error),
        }
    }

    fn tell(&mut self, rows: Vec<Row>) -> bool {
        let (before, mut newest) = (std::mem::take(&mut self.told), self.after + SLACK);
        for row in rows {
            let mut cells = Cells::new(row);
            let (Ok(id), Ok(token), Ok(since)) = (cells.text(), cells.count(), cells.count())
            else {
                continue;
            };
            let (Some(id), Some(token)) = (ClaimId::from_hex(&id), Token::new(token)) else {
                continue;
            };
            newest = newest.max(since);
            self.told.push(id);
            self.shared.waiters.tell(id, Signal::Granted(token));
        }
        self.after = newest - SLACK;
        self.told.iter().any(|id| !before.contains(id))
    }
}

/// The lock that nobody gets while its keeper is there.
fn kept(shared: &Shared) -> String {
    format!("{}_kept", shared.session)
}

/// A connection that holds that lock, and does nothing else for as long as it is there.
async fn keep(connect: &dyn Connect, shared: &Shared) -> sqlx::Result<Box<dyn Wire>> {
    let mut wire = connect.connect().await?;
    wire.raw("SET SESSION wait_timeout = 86400").await?;
    let held = wire.rows(&shared.sql.be_named, vec![kept(shared).into()]).await?;
    match held.into_iter().flat_map(numbers).next() {
        Some(1) => Ok(wire),
        _ => Err(sqlx::Error::WorkerCrashed),
    }
}

/// The numbers in a row.
fn numbers(row: Row) -> Vec<i64> {
    let number = |cell| match cell {
        Cell::Int(n) => n,
        Cell::Text(text) => text.and_then(|text| text.parse().ok()),
    };
    row.into_iter().filter_map(number).collect()
}

/// Told of the connections that there are, the most that there may be, the most of one user (0: no
/// limit), and whether we have our name.
fn has_room(answers: &[i64]) -> bool {
    let [used, most, of_user, 1] = answers else { return false };
    let most = if *of_user > 0 { most.min(of_user) } else { most };
    used.saturating_mul(100) <= most.saturating_mul(ROOM)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::SqlStore;
    use super::super::url::SqlUrl;
    use super::*;
    use leasehold_core::store::{Mode, Store};
    use leasehold_core::{Claim, Kind, Name};

    #[test]
    fn f07_nobody_sleeps_on_a_connection_that_others_need() {
        assert!(has_room(&[60, 100, 0, 1]) && !has_room(&[61, 100, 0, 1]));
        assert!(has_room(&[6, 100, 10, 1]) && !has_room(&[7, 100, 10, 1]), "the user's own limit");
        assert!(!has_room(&[1, 100, 0, 0]), "somebody has our name");
        assert!(!has_room(&[1, 100]) && !has_room(&[]), "nobody knows");
    }

    /// Sleeps for longer than the test has time: it ends because it is ended, or since there is
    /// something to tell before it begins.
    async fn is_woken_by_who_grants(url: &str) {
        let here = tokio::runtime::Handle::current();
        let [holds, waits] = [SqlStore::open(url, &here).await, SqlStore::open(url, &here).await];
        let (holds, waits) = (holds.unwrap(), waits.unwrap());
        // Here it is ours to sleep.
        waits.tasks.iter().for_each(|task| task.abort());
        let connect = super::super::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
        let mut sleeper = Sleeper::begin(&connect, &waits.shared).await.unwrap().expect("room");
        let claim = || Claim::new(Name::new("popular").unwrap(), Kind::Mutex, 1, 1).unwrap();
        for is_early in [false, true, false] {
            let (first, second) = (claim(), claim());
            holds.join(&first, Mode::Try).await.unwrap();
            waits.join(&second, Mode::Wait).await.unwrap();
            let grant = async {
                let asleep = if is_early { Duration::ZERO } else { Duration::from_millis(300) };
                tokio::time::sleep(asleep).await;
                assert!(holds.leave(&first, None).await.unwrap());
            };
            let is_new = match is_early {
                true => {
                    grant.await;
                    sleeper.look(600_000_000).await
                }
                false => tokio::join!(sleeper.look(600_000_000), grant).0,
            };
            assert!(is_new.unwrap(), "told of something else");
            let news = waits.shared.waiters.news(second.id).await;
            assert!(matches!(news, Signal::Granted(_)), "{news:?}");
            // Told once, it is no reason to wake up again.
            assert!(!sleeper.look(1_000).await.unwrap());
            assert!(waits.leave(&second, None).await.unwrap());
        }
    }

    #[tokio::test]
    async fn who_waits_is_woken_by_who_grants() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            let woken = tokio::time::timeout(Duration::from_secs(60), is_woken_by_who_grants(&url));
            woken.await.expect("nobody was woken");
        }
    }

    /// Many sleep, and many end their sleeps. (MariaDB's SLEEP() would hold up all of them for two seconds
    /// each time that two wakes meet.)
    async fn nobody_is_held_up_by_who_is_woken(url: &str) {
        let here = tokio::runtime::Handle::current();
        let connect = super::super::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
        let (mut sleeping, mut sessions) = (tokio::task::JoinSet::new(), Vec::new());
        let lost = Arc::new(AtomicUsize::new(0));
        for _ in 0..16 {
            let store = SqlStore::open(url, &here).await.unwrap();
            store.tasks.iter().for_each(|task| task.abort());
            sessions.push(waking(&store.shared.session).expect("a name of ours"));
            let connect = super::super::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
            let lost = lost.clone();
            sleeping.spawn(async move {
                loop {
                    let begun = Sleeper::begin(&connect, &store.shared).await;
                    if let Ok(Some(mut sleeper)) = begun {
                        while sleeper.look(500_000).await.is_ok() {}
                    }
                    lost.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut waking = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (mut wire, sessions) = (connect.connect().await.unwrap(), sessions.clone());
            waking.spawn(async move {
                for session in sessions.iter().cycle().take(500) {
                    // Who does not sleep yet has no name.
                    let _ = wire.raw(session).await;
                }
            });
        }
        let woken = tokio::time::timeout(Duration::from_secs(60), waking.join_all());
        woken.await.expect("the server stands still");
        // Of 2,000 wakes one may meet the question that follows another. On a server that stands still for
        // two seconds, whoever sleeps gives up its connection, and with each of some dozen times all do.
        let lost = lost.load(Ordering::SeqCst);
        assert!(lost < 32, "{lost} connections were given up");
    }

    #[tokio::test]
    async fn many_are_woken_at_once() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            nobody_is_held_up_by_who_is_woken(&url).await;
        }
    }

    #[test]
    fn who_is_woken_is_never_sql() {
        let woken = waking("leasehold_sleeps_1f").unwrap();
        assert_eq!(woken, "KILL QUERY IS_USED_LOCK('leasehold_sleeps_1f')");
        for other in
            ["leasehold_hears_1f", "leasehold_asks_1f", "leasehold_sleeps_1'); KILL 7; --", ""]
        {
            assert_eq!(waking(other), None, "{other}");
        }
    }
}
