//! The number of statements, counted by the server itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::sql_common::*;
use leasehold::Client;
use testbed::Setup;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// A server that counts the statements of `lh`.
trait Counts: Server {
    /// The minimum and maximum cost of a hand-over. It is in statements, or in messages where the
    /// server counts messages.
    const HAND_OVER: [f64; 2];
    fn counting() -> Self;
    /// Restarts the count.
    fn count_from_now(&self, url: &str);
    /// Returns the number of statements, and the number of rows that they read or changed, if
    /// known. Statements that are sent regularly are not counted, such as heartbeats and the
    /// poller's.
    fn counted(&self, url: &str) -> (f64, Option<f64>);
    /// Returns the number of all statements.
    fn counted_with_renewals(&self, url: &str) -> f64;
}

#[cfg(feature = "postgres")]
impl Counts for testbed::Postgres {
    // Lock the row, hand over and notify. Waiters near the front also poll their positions.
    const HAND_OVER: [f64; 2] = [2.5, 7.0];

    fn counting() -> Self {
        let setup = Setup::new().fast().arg("-c").arg("pg_stat_statements.track_utility=off");
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
        let count = Server::admin(self, url, sql);
        let (calls, rows) = count.split_once('|').expect("expected two numbers");
        (calls.parse().expect("a number"), Some(rows.parse().expect("a number")))
    }

    fn counted_with_renewals(&self, url: &str) -> f64 {
        let sql = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements s \
                   JOIN pg_roles r ON r.oid = s.userid WHERE rolname = 'lh'";
        Server::admin(self, url, sql).parse().expect("a number")
    }
}

/// Selects all received statements in MariaDB's log.
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
        // Neither heartbeats nor the first statements of a new connection.
        let others = "argument NOT LIKE '%WHERE session = %' AND argument NOT LIKE '%JSON_TABLE%' \
                      AND argument NOT LIKE '%ON c.name = l.name%' AND argument NOT LIKE 'SET %'";
        // Shown if the test fails.
        let frequent = format!(
            "{} AND {others} GROUP BY 1 ORDER BY count(*) DESC LIMIT 5",
            SENT.replace("SELECT count(*)", "SELECT left(argument, 120), count(*)",)
        );
        println!("{}", testbed::MariaDb::admin(self, &frequent));
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
    a_hand_over_costs_the_same_however_many_wait,
    renewals_grow_with_batches_and_not_with_locks,
];

const HAND_OVERS: usize = 20;

/// Long enough for a busy machine.
const LEASE: Duration = Duration::from_secs(120);

/// Returns the cost of one hand-over with this many waiters, in statements, and in rows if they are
/// known.
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
                // Keeps the lock, so that no further hand-over follows.
                std::future::pending::<()>().await;
            }
            guard.release().await.unwrap();
        });
    }
    while queued.load(Ordering::SeqCst) < waiters {
        assert!(running.try_join_next().is_none(), "a waiter gave up");
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

/// The additional cost of a hand-over that is allowed for each further waiter. If every waiter
/// polled, the cost would be at least one statement. A busy machine adds a few statements in total,
/// because late grants are renewed first.
const PER_WAITER: f64 = 0.1;

// R10
async fn a_hand_over_costs_the_same_however_many_wait<S: Counts>() {
    const MANY: usize = 200;
    let server = S::counting();
    let few = hand_over_cost(&server, HAND_OVERS).await;
    let many = hand_over_cost(&server, MANY).await;
    let growth = PER_WAITER * (MANY - HAND_OVERS) as f64;
    let [least, most] = S::HAND_OVER;
    assert!(few.0 >= least, "too few statements were counted: {few:?}");
    assert!(few.0 <= most + growth && many.0 <= few.0 + growth, "{few:?} and {many:?} statements");
    if let (Some(few), Some(many)) = (few.1, many.1) {
        // A section reads the front of the queue, which is at most 16 rows.
        assert!(few >= 2.0, "too few rows were counted: {few}");
        assert!(many <= 30.0 + growth, "{few} and {many} rows");
    }
}

async fn renewals_grow_with_batches_and_not_with_locks<S: Counts>() {
    const LOCKS: usize = 1_000;
    // Long, because the machine may be busy. The test waits for a whole lease, so that each claim
    // was renewed.
    let lease = Duration::from_secs(30);
    let server = S::counting();
    let url = server.database();
    let locks: Client = connect(&url).await;
    let mut guards = Vec::new();
    // Not all at once, because there are few connections and each call has a time limit.
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
    // Each claim was renewed, or it would be lost. A batch has the claims that were acquired within
    // a second.
    let end = std::time::Instant::now() + PATIENCE;
    let mut sent = server.counted_with_renewals(&url);
    while sent < 3.0 {
        assert!(std::time::Instant::now() < end, "only {sent} statements were counted");
        tokio::time::sleep(Duration::from_secs(1)).await;
        sent = server.counted_with_renewals(&url);
    }
    assert!(guards.iter().all(|guard| guard.is_held()), "a lock was lost");
    assert!(sent <= LOCKS as f64 / 2.0, "{sent} statements to renew {LOCKS} locks");
}
