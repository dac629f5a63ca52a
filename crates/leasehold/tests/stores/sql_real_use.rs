//! What real use of the SQL stores broke: each case fails without what mended it.

#![cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::{ErrorKind, database, once};
use sqlx::Connection;
use testbed::{MariaDb, Postgres, Setup};

/// Cases for servers.
macro_rules! on_servers {
    ($($case:ident),+ $(,)?) => {
        mod postgres { $(#[test] fn $case() { super::run(super::$case::<testbed::Postgres>()); })+ }
        mod mariadb { $(#[test] fn $case() { super::run(super::$case::<testbed::MariaDb>()); })+ }
    };
}

on_servers![f07_a_waiter_needs_one_connection, f40_a_release_stands_behind_no_joins];

/// Waits until it is so.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A database of MariaDB, and one of MySQL itself where that can be started.
fn mysql_urls() -> Vec<String> {
    let own = testbed::mariadb().database();
    let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
    [Some(own), mysql].into_iter().flatten().collect()
}

/// Renewals of holders in locks' rows and in claims' rows, heartbeats of waiters, and hand-overs: on
/// MySQL none of them went through (error 3569), which MariaDB does not know.
#[test]
fn f02_mysql_renews_and_waits() {
    run(async {
        for url in mysql_urls() {
            renews_and_waits(&url).await;
        }
    });
}

async fn renews_and_waits(url: &str) {
    let lease = Duration::from_secs(3);
    let locks = [connect(url).await, connect(url).await];
    let name = format!("renewed {}", std::process::id());
    let held = locks[0].mutex(&name).lease(lease).lock().await.unwrap();
    let permits = locks[0].semaphore(format!("{name} permits"), 2).lease(lease);
    let both = [permits.acquire().await.unwrap(), permits.acquire().await.unwrap()];
    let waiting: Vec<_> = (0..4)
        .map(|n| {
            let mutex = locks[n % 2].mutex(&name).lease(lease);
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                guard.release().await.unwrap();
            })
        })
        .collect();
    tokio::time::sleep(lease * 3).await;
    assert!(held.is_held() && both.iter().all(|guard| guard.is_held()), "not renewed on {url}");
    held.release().await.unwrap();
    for waiter in waiting {
        tokio::time::timeout(PATIENCE, waiter).await.expect("handed over").unwrap();
    }
    for guard in both {
        guard.release().await.unwrap();
    }
}

/// A user that may have so many connections and no more.
trait Limited {
    /// Whether who waits is told, and asks only now and then. Others ask all the time, and have a
    /// second connection for heartbeats while there is room.
    const TELLS: bool;
    fn limit(&self, url: &str, connections: usize);
}

impl Limited for Postgres {
    const TELLS: bool = true;

    fn limit(&self, url: &str, connections: usize) {
        Server::admin(self, url, &format!("ALTER ROLE lh CONNECTION LIMIT {connections}"));
    }
}

impl Limited for MariaDb {
    const TELLS: bool = false;

    fn limit(&self, url: &str, connections: usize) {
        let limit = format!("ALTER USER 'lh'@'127.0.0.1' WITH MAX_USER_CONNECTIONS {connections}");
        Server::admin(self, url, &limit);
    }
}

/// One holder and 24 clients that wait, where there is room for 30 connections: all get their turn.
/// Where they are told of it, none has more than one connection meanwhile.
async fn f07_a_waiter_needs_one_connection<S: Server + Limited>() {
    const WAITERS: usize = 24;
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let holder = connect(&url).await;
    server.limit(&url, 30);
    let lease = Duration::from_secs(60);
    let guard = holder.mutex("popular").lease(lease).lock().await.unwrap();
    let waiting = Arc::new(AtomicUsize::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..WAITERS {
        let (url, waiting) = (url.clone(), waiting.clone());
        clients.spawn(async move {
            let locks = connect_patiently(&url).await;
            let first = std::sync::Once::new();
            let mutex = locks.mutex("popular").lease(lease).on_waiting(move |_| {
                first.call_once(|| {
                    waiting.fetch_add(1, Ordering::SeqCst);
                });
            });
            release(mutex.lock().await.unwrap()).await;
            locks.close().await.unwrap();
        });
    }
    until("all wait", || waiting.load(Ordering::SeqCst) == WAITERS).await;
    let rested = || !S::TELLS || server.sessions(&url).0 <= WAITERS + 1;
    until("each has one connection", rested).await;
    release(guard).await;
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
}

/// Locks one lock's row, as another transaction in its middle does.
const BLOCK: &str = "SELECT name FROM leasehold_locks WHERE name = 'blocked' FOR UPDATE";

/// Joins that wait for a lock's row fill all of the pool that joins may have; a release of another
/// lock finds a connection all the same.
async fn f40_a_release_stands_behind_no_joins<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(60);
    release(locks.mutex("blocked").lease(lease).lock().await.unwrap()).await;
    let guard = locks.mutex("other").lease(lease).lock().await.unwrap();
    let blocker = server.hold(&url, BLOCK).await;
    let mut joins = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let mutex = locks.mutex("blocked").lease(lease);
        joins.spawn(async move { release(mutex.lock().await.unwrap()).await });
    }
    until("joins wait for the row", || server.blocked() >= 2).await;
    let began = Instant::now();
    guard.release().await.unwrap();
    // The row's waiters are given up by the server after five seconds (MariaDB: two).
    assert!(began.elapsed() < Duration::from_millis(1_900), "{:?}", began.elapsed());
    drop(blocker);
    while let Some(done) = joins.join_next().await {
        done.unwrap();
    }
}

/// A parameter that is misspelt means something that is not there: a namespace, or TLS.
#[test]
fn f34_no_store_takes_a_parameter_that_it_does_not_know() {
    run(async {
        for url in [
            "memory:?prefx=a",
            "redis://127.0.0.1:1/0?prefx=a",
            "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?prefx=a",
            "zookeeper://127.0.0.1:1/a?sesion=4s",
            "etcd://127.0.0.1:1/a?prefx=a",
            "sqlite:/nowhere/a.db?prefx=a",
            "postgres://127.0.0.1:1/d?sslmod=require",
            "mysql://127.0.0.1:1/d?prefx=a",
        ] {
            let error = leasehold::connect(url).await.expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        }
    });
}

async fn journal_mode(path: &std::path::Path) -> String {
    let path = path.display().to_string();
    let mut connection = sqlx::SqliteConnection::connect(&path).await.unwrap();
    sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut connection).await.unwrap()
}

/// The journal mode is the file's, for all who open it.
#[test]
fn f33_a_file_of_others_keeps_its_journal_mode() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let [theirs, ours] = ["theirs.db", "ours.db"].map(|name| directory.path().join(name));
        let address = format!("sqlite:{}?mode=rwc", theirs.display());
        let mut connection = sqlx::SqliteConnection::connect(&address).await.unwrap();
        let sql = "PRAGMA journal_mode = DELETE; CREATE TABLE orders (n INT)";
        sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
        for (path, mode, told) in [(&theirs, "delete", true), (&ours, "wal", false)] {
            let locks = connect(&format!("sqlite:{}", path.display())).await;
            release(locks.mutex("x").lock().await.unwrap()).await;
            assert_eq!(journal_mode(path).await, mode);
            let found = locks.diagnose().await.unwrap();
            let shared = found.iter().find(|finding| finding.id == "shared-file");
            assert_eq!(shared.is_some_and(|f| f.what.contains("orders")), told, "{found:?}");
            let notes = &locks.guarantees().notes;
            assert_eq!(notes.iter().any(|note| note.contains("orders")), told, "{notes:?}");
            // The second time its own tables are there.
            drop(connect(&format!("sqlite:{}", path.display())).await);
            assert_eq!(journal_mode(path).await, mode);
        }
    });
}

/// An old key is in the hands of somebody's transaction, and the clean-up waits for it: meanwhile
/// others begin.
#[test]
fn f43_cleaning_up_holds_up_nobody_who_begins() {
    run(async {
        let server = testbed::mariadb();
        let url = server.database();
        let pool = sqlx::MySqlPool::connect(&url).await.unwrap();
        leasehold::database::install(&pool).await.unwrap();
        for n in 1..=3 {
            let work = |_| async { Ok::<_, leasehold::Error>("done".to_owned()) };
            assert!(once(format!("old {n}")).run(&pool, work).await.unwrap().is_first());
        }
        let sql = "UPDATE leasehold_once SET done_at = RIGHT(name, 1)";
        sqlx::query(sql).execute(&pool).await.unwrap();
        let sql = "SELECT name FROM leasehold_once WHERE name = 'old 3' FOR UPDATE";
        let holder = server.hold(&url, sql).await;
        let before = server.blocked();
        let cleaning = tokio::spawn({
            let pool = pool.clone();
            async move { once::clean_up(&pool, Duration::from_secs(60)).await }
        });
        until("it waits for that key", || server.blocked() > before).await;
        let work = |_| async { Ok::<_, leasehold::Error>("new".to_owned()) };
        let began = once("new").run(&pool, work);
        let began = tokio::time::timeout(Duration::from_secs(20), began).await;
        assert!(began.expect("the clean-up is in the way").unwrap().is_first());
        assert!(!cleaning.is_finished());
        drop(holder);
        assert_eq!(cleaning.await.unwrap().unwrap(), 3);
    });
}

/// The hour that comes twice when summer ends: by the session's time it is the first, by the clock
/// the second.
#[test]
fn f43_an_attempt_lasts_its_lease_while_summer_ends() {
    run(async {
        let server = MariaDb::with(Setup::new().fast());
        let url = server.database();
        for sql in [
            "INSERT INTO mysql.time_zone (Time_zone_id, Use_leap_seconds) VALUES (77, 'N')",
            "INSERT INTO mysql.time_zone_name (Name, Time_zone_id) VALUES ('Test/Falls', 77)",
            "INSERT INTO mysql.time_zone_transition_type VALUES (77, 0, 3600, 1, 'SUM'), \
             (77, 1, 0, 0, 'WIN')",
            "INSERT INTO mysql.time_zone_transition VALUES (77, UNIX_TIMESTAMP() - 864000, 0), \
             (77, UNIX_TIMESTAMP() - 60, 1)",
        ] {
            Server::admin(&server, &url, sql);
        }
        let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(2);
        let pool = options
            .after_connect(|connection, _| {
                Box::pin(async move {
                    let sql = "SET SESSION time_zone = 'Test/Falls'";
                    sqlx::raw_sql(sql).execute(connection).await.map(drop)
                })
            })
            .connect(&url)
            .await
            .unwrap();
        leasehold::database::install(&pool).await.unwrap();
        let ran = once("key").lease(Duration::from_secs(600)).run(&pool, |_| async {
            // By a clock that knows no summer.
            let sql = "SELECT CAST(lease_end / 1000000 - UNIX_TIMESTAMP() AS SIGNED) \
                       FROM leasehold_once";
            let mut plain = sqlx::MySqlConnection::connect(&url).await.map_err(database::error)?;
            let left: i64 =
                sqlx::query_scalar(sql).fetch_one(&mut plain).await.map_err(database::error)?;
            assert!((300..=660).contains(&left), "{left} s are left of 600");
            Ok::<_, leasehold::Error>("done".to_owned())
        });
        assert!(ran.await.unwrap().is_first());
    });
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn f74_installing_again_logs_nothing() {
    let log = Log::default();
    let written = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || written.clone()).finish();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::subscriber::with_default(subscriber, || {
        runtime.block_on(async {
            let pool = sqlx::PgPool::connect(&testbed::postgres().database()).await.unwrap();
            for _ in 0..2 {
                leasehold::database::install(&pool).await.unwrap();
            }
            // That it would be seen.
            let sql = "CREATE TABLE IF NOT EXISTS leasehold_fence (n INT)";
            sqlx::raw_sql(sql).execute(&pool).await.unwrap();
        });
    });
    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(logged.matches("already exists").count(), 1, "{logged}");
}
