//! How much is asked of a server: counted by the server itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::sql_common::*;
use leasehold::Leasehold;
use testbed::Setup;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// A server that counts the statements of `lh`.
trait Counts: Server {
    /// What a hand-over costs at least and at most: statements, or messages of several where the
    /// server counts these.
    const HAND_OVER: [f64; 2];
    fn counting() -> Self;
    /// From now on.
    fn count_from_now(&self, url: &str);
    /// How many statements there were, and how many rows they read or changed if that is known.
    /// Without those that are sent whether anything happens or not: heartbeats and the poller's.
    fn counted(&self, url: &str) -> (f64, Option<f64>);
    /// All statements.
    fn counted_with_renewals(&self, url: &str) -> f64;
}

#[cfg(feature = "postgres")]
impl Counts for testbed::Postgres {
    // The row, whose place goes, who is next, the row again, the news.
    const HAND_OVER: [f64; 2] = [3.5, 7.0];

    fn counting() -> Self {
        // Those that a procedure runs, too.
        let setup = Setup::new().fast().arg("-c").arg("pg_stat_statements.track=all");
        let setup = setup.arg("-c").arg("pg_stat_statements.track_utility=off");
        Self::with(setup.arg("-c").arg("shared_preload_libraries=pg_stat_statements"))
    }

    fn count_from_now(&self, url: &str) {
        Server::admin(self, url, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements");
        Server::admin(self, url, "SELECT pg_stat_statements_reset()");
    }

    fn counted(&self, url: &str) -> (f64, Option<f64>) {
        let sql = "SELECT coalesce(sum(calls), 0), coalesce(sum(rows), 0) FROM pg_stat_statements s \
                   JOIN pg_roles r ON r.oid = s.userid WHERE rolname = 'lh' \
                   AND query NOT LIKE '%json_to_recordset%' AND query NOT LIKE '%ON c.name = l.name%'";
        let told = Server::admin(self, url, sql);
        let (calls, rows) = told.split_once('|').expect("two numbers");
        (calls.parse().expect("a number"), Some(rows.parse().expect("a number")))
    }

    fn counted_with_renewals(&self, url: &str) -> f64 {
        let sql = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements s \
                   JOIN pg_roles r ON r.oid = s.userid WHERE rolname = 'lh'";
        Server::admin(self, url, sql).parse().expect("a number")
    }
}

/// What all that were sent are called in MariaDB's log.
#[cfg(feature = "mysql")]
const SENT: &str = "SELECT count(*) FROM mysql.general_log WHERE user_host LIKE 'lh[%' \
                    AND command_type IN ('Query', 'Execute')";

#[cfg(feature = "mysql")]
impl Counts for testbed::MariaDb {
    // One message.
    const HAND_OVER: [f64; 2] = [0.5, 2.5];

    fn counting() -> Self {
        let setup = Setup::new().fast().arg("--log-output=TABLE");
        Self::with(setup.arg("--general-log=0"))
    }

    fn count_from_now(&self, _url: &str) {
        testbed::MariaDb::admin(self, "TRUNCATE mysql.general_log; SET GLOBAL general_log = 1");
    }

    fn counted(&self, _url: &str) -> (f64, Option<f64>) {
        testbed::MariaDb::admin(self, "SET GLOBAL general_log = 0");
        let count = |which: &str| -> f64 {
            let sql = format!("{SENT} AND {which}");
            testbed::MariaDb::admin(self, &sql).parse().expect("a number")
        };
        // Neither heartbeats nor what a new connection begins with.
        let others = "argument NOT LIKE '%WHERE session = %' AND argument NOT LIKE '%JSON_TABLE%' \
                      AND argument NOT LIKE '%ON c.name = l.name%' AND argument NOT LIKE 'SET %'";
        (count(others), None)
    }

    fn counted_with_renewals(&self, _url: &str) -> f64 {
        testbed::MariaDb::admin(self, SENT).parse().expect("a number")
    }
}

macro_rules! on_both {
    ($($case:ident),+ $(,)?) => {
        #[cfg(feature = "postgres")]
        mod postgres {
            $(#[test] fn $case() { super::run(super::$case::<testbed::Postgres>()); })+
        }
        #[cfg(feature = "mysql")]
        mod mariadb {
            $(#[test] fn $case() { super::run(super::$case::<testbed::MariaDb>()); })+
        }
    };
}

on_both![
    r10_a_hand_over_costs_the_same_however_many_wait,
    renewals_grow_with_batches_and_not_with_locks,
];

const HAND_OVERS: usize = 20;

/// As patient as a machine that does much else needs it.
const LEASE: Duration = Duration::from_secs(120);

/// What one hand-over costs with so many waiters: statements, and rows if they are known.
async fn hand_over_cost<S: Counts>(server: &S, waiters: usize) -> (f64, Option<f64>) {
    let url = server.database();
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    let held = clients[2].mutex("popular").lease(LEASE).lock().await.unwrap();
    let (queued, turns) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let done = Arc::new(Notify::new());
    let mut running = JoinSet::new();
    for i in 0..waiters {
        let (queued, first) = (queued.clone(), std::sync::Once::new());
        let mutex = clients[i % 2].mutex("popular").lease(LEASE).on_waiting(move |_| {
            first.call_once(|| {
                queued.fetch_add(1, Ordering::SeqCst);
            });
        });
        let (turns, done) = (turns.clone(), done.clone());
        running.spawn(async move {
            let guard = mutex.lock().await.unwrap();
            if turns.fetch_add(1, Ordering::SeqCst) + 1 == HAND_OVERS {
                done.notify_one();
                // Nothing is handed over any more.
                std::future::pending::<()>().await;
            }
            guard.release().await.unwrap();
        });
    }
    while queued.load(Ordering::SeqCst) < waiters {
        assert!(running.try_join_next().is_none(), "one gave up");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.count_from_now(&url);
    held.release().await.unwrap();
    done.notified().await;
    let (statements, rows) = server.counted(&url);
    running.shutdown().await;
    let each = |n: f64| n / HAND_OVERS as f64;
    (each(statements), rows.map(each))
}

/// How much a hand-over may cost more for each further waiter. A herd, in which every waiter asks, costs one
/// statement or more. A busy machine costs a few statements in all, since grants come late and are renewed first.
const PER_WAITER: f64 = 0.1;

async fn r10_a_hand_over_costs_the_same_however_many_wait<S: Counts>() {
    const MANY: usize = 200;
    let server = S::counting();
    let few = hand_over_cost(&server, HAND_OVERS).await;
    let many = hand_over_cost(&server, MANY).await;
    let growth = PER_WAITER * (MANY - HAND_OVERS) as f64;
    let [least, most] = S::HAND_OVER;
    assert!(few.0 >= least, "counted nothing: {few:?}");
    assert!(few.0 <= most + growth && many.0 <= few.0 + growth, "{few:?} and {many:?} statements");
    if let (Some(few), Some(many)) = (few.1, many.1) {
        // A section reads the front of the queue, which is at most 16 rows.
        assert!(few >= 2.0, "counted no rows: {few}");
        assert!(many <= 30.0 + growth, "{few} and {many} rows");
    }
}

async fn renewals_grow_with_batches_and_not_with_locks<S: Counts>() {
    const LOCKS: usize = 1_000;
    // Long, since the machine may do much else; and waited out, so that each was renewed.
    let lease = Duration::from_secs(30);
    let server = S::counting();
    let url = server.database();
    let locks: Leasehold = connect(&url).await;
    let mut guards = Vec::new();
    // Not all at once: they have few connections, and each only so long.
    for some in (0..LOCKS).step_by(50) {
        let mut taking = JoinSet::new();
        for n in some..some + 50 {
            let mutex = locks.mutex(format!("held {n}")).lease(lease);
            taking.spawn(async move { mutex.try_lock().await.unwrap() });
        }
        guards.extend(taking.join_all().await);
    }
    server.count_from_now(&url);
    tokio::time::sleep(lease + Duration::from_secs(2)).await;
    // Each was renewed, or it were lost: in batches of those that were taken within a second.
    let end = std::time::Instant::now() + PATIENCE;
    let mut sent = server.counted_with_renewals(&url);
    while sent < 3.0 {
        assert!(std::time::Instant::now() < end, "counted {sent} statements");
        tokio::time::sleep(Duration::from_secs(1)).await;
        sent = server.counted_with_renewals(&url);
    }
    assert!(guards.iter().all(|guard| guard.is_held()), "some were lost");
    assert!(sent <= LOCKS as f64 / 2.0, "{sent} statements to renew {LOCKS} locks");
}
