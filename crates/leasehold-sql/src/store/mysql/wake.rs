//! Wakes waiting clients on MySQL. The server cannot send messages from one session to another, but
//! one session can end another session's statement.
//!
//! A waiting client has a connection on which it sleeps at the server. That session holds a lock of
//! the server's own (`GET_LOCK`) that has the client's name. Other clients find the session by that
//! name (`IS_USED_LOCK`). After its COMMIT, a granting client sends `KILL QUERY` for the session
//! with the name of the granted claim's client. This ends the sleep and nothing else. The sleeping
//! client then reads its grants. No permission is needed, because a user may end its own
//! statements. If the session belongs to another user, or no session has the name, the server
//! reports an error after the COMMIT, which is harmless.
//!
//! **What if the KILL arrives while the client does not sleep?** The message that sleeps first
//! checks for a grant that was not read before. If there is one, it does not sleep. The check sees
//! a grant that was committed before the check. The KILL of a later grant arrives while the message
//! is executed, and ends it, even between two of its statements. (The check is a separate
//! statement, so that no transaction is open during the sleep.) Grants may become visible out of
//! the order of their times. So the check goes back a while ([`SLACK`]) and leaves out the grants
//! that were already reported.
//!
//! **How does a session sleep?** On MySQL by SLEEP(). MariaDB keeps all sleeping sessions under one
//! mutex. Its KILL acquires that mutex while it holds a mutex of the session, and a session that
//! wakes up acquires them in the other order. MariaDB detects this and gives up after two seconds
//! (`THD::abort_current_cond_wait`). During those two seconds no other session can wake up or
//! connect. Two wake-ups at the same moment are enough for this. So on MariaDB a client waits by
//! `GET_LOCK` for a lock that its second connection holds all the time. Each such wait has a mutex
//! of its own. If the lock is acquired, the second connection is lost.
//!
//! **What if no client can wake us?** The granting client may use another server of a cluster,
//! another user or an old leasehold. Each sleep is short. If a sleep that was not ended finds a
//! grant, the next ones are even shorter, which is how clients without such a connection poll. So
//! hand-overs do not depend on this mechanism. A client opens such a connection only if the server
//! has plenty of free connections ([`ROOM`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::fault;
use crate::store::limits::SLOW;
use crate::store::rows::Cells;
use crate::store::session::SLEEPS;
use crate::store::shared::Shared;
use crate::store::statements::Statements;
use crate::store::version;
use crate::store::wire::{Arg, Cell, Connect, Row, Statement, Step, Wire};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Token};

/// The length of a sleep in microseconds, if other clients wake us and if they do not.
const SLEEP: [i64; 2] = [500_000, 20_000];
/// The number of short sleeps after a sleep that should have been ended but was not.
const UNWOKEN: u32 = 200;
/// The time by which a check goes back, in microseconds. It is longer than a section may take.
const SLACK: i64 = 3_000_000;
/// The percentage of the server's connections in use above which no client opens a connection to
/// sleep on.
const ROOM: i64 = 60;
/// The time that the connection is kept after the last claim has stopped waiting.
const REST: Duration = Duration::from_secs(3);
/// The time for which the client continues without the connection after failing to open it.
const AGAIN: Duration = Duration::from_secs(10);

/// Returns the statement that wakes a session, if its name consists only of letters, digits and `_`
/// and has the prefix [`SLEEPS`].
pub(in crate::store) fn waking(session: &str) -> Option<String> {
    let is_plain = session.len() <= 64
        && session.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && session.starts_with(SLEEPS);
    is_plain.then(|| format!("KILL QUERY IS_USED_LOCK('{session}')"))
}

/// Runs the connection that sleeps at the server while claims of this client wait. Never returns.
pub(in crate::store) async fn sleep(connect: Arc<dyn Connect>, shared: Arc<Shared>) {
    loop {
        while shared.waiters.count() == 0 {
            shared.waiters.more().await;
        }
        // If the connection is lost or refused, the client continues without it for a while.
        let begun = tokio::time::timeout(SLOW, BlockedQuery::begin(&*connect, &shared)).await;
        if let Ok(Ok(Some(mut query))) = begun {
            if query.run().await.is_ok() {
                let _ = tokio::time::timeout(SLOW, query.end()).await;
                continue;
            }
            shared.waiters.ask_all();
        }
        if shared.waiters.count() > 0 {
            let _ = tokio::time::timeout(AGAIN, shared.clone().poll()).await;
        }
    }
}

/// A connection that sleeps at the server.
struct BlockedQuery<'a> {
    shared: &'a Shared,
    wire: Box<dyn Wire>,
    /// MariaDB: the connection that holds the lock that is waited for.
    lock_connection: Option<Box<dyn Wire>>,
    /// The claims whose grants since `after` were reported.
    reported: Vec<ClaimId>,
    after: i64,
    /// The number of next sleeps that are short.
    short: u32,
}

impl<'a> BlockedQuery<'a> {
    /// Opens the connections. Returns `None` if the server has no room for them.
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
        let lock_connection = match version::is_mariadb(&version) {
            true => Some(keep(connect, shared).await?),
            false => None,
        };
        Ok(Some(Self { shared, wire, lock_connection, reported: Vec::new(), after: 0, short: 0 }))
    }

    async fn end(self) -> sqlx::Result<()> {
        self.wire.close().await?;
        match self.lock_connection {
            Some(lock_connection) => lock_connection.close().await,
            None => Ok(()),
        }
    }

    /// Sleeps until no claim has waited for a while.
    async fn run(&mut self) -> sqlx::Result<()> {
        let mut waited = Instant::now();
        while waited.elapsed() < REST {
            let began = Instant::now();
            let pause = SLEEP[usize::from(self.short > 0)];
            self.short = self.short.saturating_sub(1);
            let is_new = self.wait(pause).await?;
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

    /// Sleeps for up to `pause`, and then notifies the granted waiters. Returns whether any grant
    /// is new.
    async fn wait(&mut self, pause: i64) -> sqlx::Result<bool> {
        let Statements { is_new, sleep, wait, granted_since, .. } = &self.shared.sql;
        let session = || Arg::from(self.shared.session.as_str());
        let reported = self.reported.iter().map(|id| id.to_hex()).collect::<Vec<_>>().join(",");
        let rest = match self.lock_connection {
            Some(_) => Step::Rows(wait, vec![kept(self.shared).into(), pause.into()]),
            None => Step::Rows(sleep, vec![pause.into()]),
        };
        let steps = vec![
            Step::Rows(is_new, vec![session(), self.after.into(), reported.into()]),
            rest,
            Step::Rows(granted_since, vec![session(), self.after.into()]),
        ];
        let mut read = Vec::new();
        let limit = SLOW + Duration::from_micros(pause.unsigned_abs());
        let slept = tokio::time::timeout(limit, self.wire.script(steps, &mut read)).await;
        match slept.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            Ok(()) => {
                let granted = self.notify_granted(read.pop().unwrap_or_default());
                let rested = read.pop().unwrap_or_default().into_iter().flat_map(numbers).next();
                match self.lock_connection.is_some() && rested == Some(1) {
                    true => Err(sqlx::Error::WorkerCrashed),
                    false => Ok(granted),
                }
            }
            // The sleep was ended, which the server reports as an error.
            Err(error) if fault::is_interrupted(&error) => {
                let args = vec![session(), self.after.into()];
                let asked = tokio::time::timeout(SLOW, self.wire.rows(granted_since, args)).await;
                Ok(self.notify_granted(asked.unwrap_or(Err(sqlx::Error::PoolTimedOut))?))
            }
            Err(error) => Err(error),
        }
    }

    fn notify_granted(&mut self, rows: Vec<Row>) -> bool {
        let (before, mut newest) = (std::mem::take(&mut self.reported), self.after + SLACK);
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
            self.reported.push(id);
            self.shared.waiters.notify(id, Signal::Granted(token));
        }
        self.after = newest - SLACK;
        self.reported.iter().any(|id| !before.contains(id))
    }
}

/// Returns the name of the server-side lock (`GET_LOCK`) that this client's `lock_connection` holds
/// while it is connected. On MariaDB, the client sleeps by waiting for it.
fn kept(shared: &Shared) -> String {
    format!("{}_kept", shared.session)
}

/// Opens a connection that holds the lock named by [`kept`] and does nothing else.
async fn keep(connect: &dyn Connect, shared: &Shared) -> sqlx::Result<Box<dyn Wire>> {
    let mut wire = connect.connect().await?;
    wire.raw("SET SESSION wait_timeout = 86400").await?;
    let held = wire.rows(&shared.sql.be_named, vec![kept(shared).into()]).await?;
    match held.into_iter().flat_map(numbers).next() {
        Some(1) => Ok(wire),
        _ => Err(sqlx::Error::WorkerCrashed),
    }
}

/// Returns the numbers in a row.
fn numbers(row: Row) -> Vec<i64> {
    let number = |cell| match cell {
        Cell::Int(n) => n,
        Cell::Text(text) => text.and_then(|text| text.parse().ok()),
    };
    row.into_iter().filter_map(number).collect()
}

/// Returns whether there is room, from these numbers: the open connections, the maximum, the
/// maximum of one user (0 means no limit), and whether our session has its name (1).
fn has_room(answers: &[i64]) -> bool {
    let [used, most, of_user, 1] = answers else { return false };
    let most = if *of_user > 0 { most.min(of_user) } else { most };
    used.saturating_mul(100) <= most.saturating_mul(ROOM)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::store::SqlStore;
    use crate::store::url::SqlUrl;
    use leasehold_core::store::{Mode, Store};
    use leasehold_core::{Claim, Kind, Name};

    // F07
    #[test]
    fn waiter_does_not_occupy_a_connection_that_others_need() {
        assert!(has_room(&[60, 100, 0, 1]) && !has_room(&[61, 100, 0, 1]));
        assert!(
            has_room(&[6, 100, 10, 1]) && !has_room(&[7, 100, 10, 1]),
            "the user's own limit must be respected"
        );
        assert!(!has_room(&[1, 100, 0, 0]), "another session has this name");
        assert!(!has_room(&[1, 100]) && !has_room(&[]), "the limits are unknown");
    }

    /// Sleeps for longer than the test runs. The sleep ends early because another client ends it,
    /// or because there is a grant to report before it begins.
    async fn is_woken_by_who_grants(url: &str) {
        let here = tokio::runtime::Handle::current();
        let [holds, waits] = [SqlStore::open(url, &here).await, SqlStore::open(url, &here).await];
        let (holds, waits) = (holds.unwrap(), waits.unwrap());
        // The test sleeps instead of the client's task.
        waits.tasks.iter().for_each(|task| task.abort());
        let connect = crate::store::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
        let mut query = BlockedQuery::begin(&connect, &waits.shared).await.unwrap().expect("room");
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
                    query.wait(600_000_000).await
                }
                false => tokio::join!(query.wait(600_000_000), grant).0,
            };
            assert!(is_new.unwrap(), "the waiter was notified of another event");
            let news = waits.shared.waiters.news(second.id).await;
            assert!(matches!(news, Signal::Granted(_)), "{news:?}");
            // A grant that was reported once does not end the next sleep.
            assert!(!query.wait(1_000).await.unwrap());
            assert!(waits.leave(&second, None).await.unwrap());
        }
    }

    #[tokio::test]
    async fn waiter_is_woken_by_the_granting_client() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            let woken = tokio::time::timeout(Duration::from_secs(60), is_woken_by_who_grants(&url));
            woken.await.expect("no waiter was woken");
        }
    }

    /// Many clients sleep, and many end their sleeps. (MariaDB's SLEEP() would block all of them
    /// for two seconds each time that two wake-ups collide.)
    async fn nobody_is_held_up_by_who_is_woken(url: &str) {
        let here = tokio::runtime::Handle::current();
        let connect = crate::store::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
        let (mut sleeping, mut sessions) = (tokio::task::JoinSet::new(), Vec::new());
        let lost = Arc::new(AtomicUsize::new(0));
        for _ in 0..16 {
            let store = SqlStore::open(url, &here).await.unwrap();
            store.tasks.iter().for_each(|task| task.abort());
            sessions.push(waking(&store.shared.session).expect("the session has no name"));
            let connect = crate::store::mysql::MySql::new(&SqlUrl::parse(url).unwrap()).unwrap();
            let lost = lost.clone();
            sleeping.spawn(async move {
                loop {
                    let begun = BlockedQuery::begin(&connect, &store.shared).await;
                    if let Ok(Some(mut query)) = begun {
                        while query.wait(500_000).await.is_ok() {}
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
                    // A session that does not sleep yet has no name.
                    let _ = wire.raw(session).await;
                }
            });
        }
        let woken = tokio::time::timeout(Duration::from_secs(60), waking.join_all());
        woken.await.expect("the server is blocked");
        // A few of 2,000 wake-ups may hit the query that follows another wake-up. If the server was
        // blocked for two seconds, all sleeping clients would give up their connections, and this
        // would happen dozens of times.
        let lost = lost.load(Ordering::SeqCst);
        assert!(lost < 32, "{lost} connections were given up");
    }

    #[tokio::test]
    async fn many_waiters_can_be_woken_at_once() {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(testbed::mariadb().database()), mysql].into_iter().flatten() {
            nobody_is_held_up_by_who_is_woken(&url).await;
        }
    }

    #[test]
    fn session_name_to_wake_is_never_sql() {
        let woken = waking("leasehold_sleeps_1f").unwrap();
        assert_eq!(woken, "KILL QUERY IS_USED_LOCK('leasehold_sleeps_1f')");
        for other in
            ["leasehold_hears_1f", "leasehold_asks_1f", "leasehold_sleeps_1'); KILL 7; --", ""]
        {
            assert_eq!(waking(other), None, "{other}");
        }
    }
}
