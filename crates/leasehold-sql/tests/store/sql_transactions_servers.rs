//! `lock_in`, `once`, `versioned` and `fence::sql` on servers as in production: limited
//! permissions, TLS, a pooler in front, sessions that are ended, and a server that is killed and
//! restarted.

use std::time::Duration;

use crate::sql_common::*;
use leasehold::fence::sql::{TokenColumn, check};
use leasehold::once::Ran;
use leasehold::versioned::{Retry, Versioned, retry};
use leasehold::{Error, ErrorKind, FencingToken, database, lock_in, once};
use sqlx::Connection;
use testbed::{MariaDb, Setup};

const CALLERS_TABLE: &str = "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, \
                             version BIGINT NOT NULL, token BIGINT)";

/// Uses the four together in one transaction, on each database with its own types.
macro_rules! cases {
    ($module:ident, $server:ty, $db:ty) => {
        mod $module {
            use super::*;

            type Pool = sqlx::Pool<$db>;

            pub(super) async fn pool(url: &str) -> Pool {
                sqlx::pool::PoolOptions::new().max_connections(8).connect(url).await.unwrap()
            }

            pub(super) async fn prepare(url: &str) -> Pool {
                let pool = pool(url).await;
                database::install(&pool).await.unwrap();
                for sql in [CALLERS_TABLE, "INSERT INTO t VALUES (1, 0, 0, NULL)"] {
                    sqlx::query(sql).execute(&pool).await.unwrap();
                }
                pool
            }

            /// Adds one under all protections, once for each key.
            async fn add(pool: &Pool, key: &str, offered: u64) -> Result<Ran, Error> {
                let mut tx = pool.begin().await.map_err(database::error)?;
                let ran = add_in(&mut tx, key, offered).await?;
                tx.commit().await.map_err(database::error)?;
                Ok(ran)
            }

            async fn add_in(
                tx: &mut sqlx::Transaction<'_, $db>,
                key: &str,
                offered: u64,
            ) -> Result<Ran, Error> {
                let offered = FencingToken::new(offered).unwrap();
                lock_in(tx, "t:1").await?;
                check(tx, "t", offered).await?;
                once(key)
                    .run_in(tx, async |tx| {
                        let (n, seen): (i64, i64) =
                            sqlx::query_as("SELECT n, version FROM t WHERE id = 1")
                                .fetch_one(&mut **tx)
                                .await
                                .map_err(database::error)?;
                        let table = Versioned::new("t", "id", "version");
                        table.update(tx, 1, seen, &[("n", (n + 1).into())]).await?;
                        let column = TokenColumn::new("t", "id", "token");
                        assert!(column.write(&mut **tx, 1, offered, &[]).await?);
                        Ok::<_, Error>(format!("{}", n + 1))
                    })
                    .await
            }

            /// Like [`add`], and retries until it succeeds. The key shows whether it was done
            /// before.
            async fn add_again(pool: &Pool, key: &str, offered: u64) -> Result<Ran, Error> {
                loop {
                    match add(pool, key, offered).await {
                        Err(error) if error.is_retryable() => {
                            let pause = std::time::Duration::from_millis(5);
                            tokio::time::sleep(pause).await;
                        }
                        done => return done,
                    }
                }
            }

            async fn number(pool: &Pool) -> i64 {
                sqlx::query_scalar("SELECT n FROM t").fetch_one(pool).await.unwrap()
            }

            /// Runs many additions at once, and loses none.
            async fn all_of_it(pool: &Pool) {
                let mut running = tokio::task::JoinSet::new();
                for i in 0..20 {
                    let pool = pool.clone();
                    running.spawn(async move {
                        // Two tasks for each key.
                        let key = format!("key {}", i / 2);
                        let patient = Retry::default().tries(200);
                        retry(patient, async || add(&pool, &key, 7).await).await.unwrap()
                    });
                }
                let ran = running.join_all().await;
                assert_eq!(ran.iter().filter(|ran| ran.is_first()).count(), 10, "{ran:?}");
                assert_eq!(number(pool).await, 10);
                let stale = add(pool, "late", 6).await.unwrap_err();
                assert_eq!(stale.kind(), ErrorKind::StaleToken, "{stale}");
                assert_eq!(number(pool).await, 10);
                // Outside of a transaction, too.
                let work = |_| async { Ok::<_, Error>("sent".to_owned()) };
                assert_eq!(once("mail").run(pool, work).await.unwrap(), Ran::First("sent".into()));
            }

            #[test]
            fn few_permissions_suffice() {
                if !<$server as Server>::is_here() {
                    return;
                }
                run(async {
                    let server = <$server>::with(Setup::new().fast());
                    let url = Server::database(&server);
                    prepare(&url).await;
                    server.user(&url, "few", "SELECT, INSERT, UPDATE");
                    let few = url.replace("lh:lh@", "few:few@");
                    all_of_it(&pool(&few).await).await;
                    server.user(&url, "reader", "SELECT");
                    let reader = pool(&url.replace("lh:lh@", "reader:reader@")).await;
                    let error = add(&reader, "k", 8).await.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                    assert_eq!(format!("{error:#}").lines().count(), 1);
                });
            }

            #[test]
            fn everything_works_over_tls() {
                if !<$server as Server>::is_here() {
                    return;
                }
                run(async {
                    let server = <$server>::with(Setup::new().fast().tls());
                    let url = Server::database(&server);
                    prepare(&url).await;
                    let verified = server.verified(&server.authority());
                    all_of_it(&pool(&format!("{url}?{verified}")).await).await;
                });
            }

            // S53
            /// A transaction that is not committed when the server crashes has no effect, and a
            /// committed one persists. Running all of them again shows which is which.
            #[test]
            fn committed_work_survives_a_server_crash() {
                if !<$server as Server>::is_here() {
                    return;
                }
                run(async {
                    let server = <$server>::with(Setup::new());
                    let pool = prepare(&Server::database(&server)).await;
                    assert!(add(&pool, "kept", 7).await.unwrap().is_first());
                    let mut tx = pool.begin().await.unwrap();
                    assert!(add_in(&mut tx, "undone", 8).await.unwrap().is_first());
                    Server::kill(&server);
                    let error = database::error(tx.commit().await.unwrap_err());
                    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                    assert!(error.is_retryable());
                    Server::restart(&server);
                    let again = async |key: &str, offered| add_again(&pool, key, offered).await;
                    // The highest token seen, 8, was rolled back with the rest.
                    assert_eq!(again("kept", 7).await.unwrap(), Ran::Duplicate("1".into()));
                    assert_eq!(again("undone", 8).await.unwrap(), Ran::First("2".into()));
                    assert_eq!(number(&pool).await, 2);
                    Server::kill(&server);
                    Server::restart(&server);
                    let late = again("late", 7).await.unwrap_err();
                    assert_eq!(late.kind(), ErrorKind::StaleToken, "{late}");
                });
            }

            // S52
            /// All sessions are ended repeatedly, wherever they are.
            #[test]
            fn counts_stay_exact_while_sessions_are_killed() {
                if !<$server as Server>::is_here() {
                    return;
                }
                run(async {
                    let server = std::sync::Arc::new(<$server>::with(Setup::new().fast()));
                    let pool = prepare(&Server::database(&*server)).await;
                    let breaking = tokio::task::spawn_blocking({
                        let server = server.clone();
                        move || {
                            for _ in 0..8 {
                                std::thread::sleep(std::time::Duration::from_millis(150));
                                server.end_sessions();
                            }
                        }
                    });
                    let mut done = 0;
                    while !breaking.is_finished() {
                        let mut running = tokio::task::JoinSet::new();
                        for i in done..done + 10 {
                            let pool = pool.clone();
                            running.spawn(async move {
                                add_again(&pool, &format!("key {i}"), 7).await.unwrap()
                            });
                        }
                        running.join_all().await;
                        done += 10;
                    }
                    breaking.await.unwrap();
                    // This also shows that ended connections are not used any more.
                    assert!(add_again(&pool, "the last", 7).await.unwrap().is_first());
                    assert_eq!(number(&pool).await, done + 1);
                });
            }
        }
    };
}

cases!(postgres, testbed::Postgres, sqlx::Postgres);
cases!(mariadb, testbed::MariaDb, sqlx::MySql);
cases!(mysql, testbed::MySql, sqlx::MySql);

// S42
/// If each transaction may use another of the pooler's sessions, nothing prepared can be kept. The
/// caller configures its driver accordingly, as it must for its own statements.
#[test]
fn everything_works_behind_a_pooler_in_transaction_mode() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let direct = postgres::prepare(&url).await;
        let pooler = testbed::PgBouncer::that_ignores(server, "extra_float_digits");
        let pooled = pooler.in_front_of(server, &url) + "?statement-cache-capacity=0";
        let pool = postgres::pool(&pooled).await;
        let mut running = tokio::task::JoinSet::new();
        for i in 0..20 {
            let pool = pool.clone();
            running.spawn(async move {
                let add = async || {
                    let mut tx = pool.begin().await.map_err(database::error)?;
                    lock_in(&mut tx, "t:1").await?;
                    check(&mut tx, "t", FencingToken::new(7).unwrap()).await?;
                    let key = format!("key {}", i / 2);
                    let ran = once(key)
                        .run_in(&mut tx, async |tx| {
                            let table = Versioned::new("t", "id", "version");
                            let seen = table.version(&mut **tx, 1).await?.unwrap();
                            table.update(tx, 1, seen, &[("n", (seen + 1).into())]).await?;
                            Ok::<_, Error>(String::new())
                        })
                        .await?;
                    tx.commit().await.map_err(database::error)?;
                    Ok::<_, Error>(ran)
                };
                retry(Retry::default().tries(200), add).await.unwrap()
            });
        }
        let ran: Vec<Ran> = running.join_all().await;
        assert_eq!(ran.iter().filter(|ran| ran.is_first()).count(), 10, "{ran:?}");
        let counted = sqlx::query_scalar::<_, i64>("SELECT n FROM t").fetch_one(&direct);
        assert_eq!(counted.await.unwrap(), 10);
    });
}

// F43
/// Another transaction has an old key locked, and the clean-up waits for it. New keys can be used
/// in that time.
#[test]
fn cleanup_does_not_block_new_keys() {
    run(async {
        let server = MariaDb::with(Setup::new().fast());
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
        until("the clean-up waits for the key", async || server.blocked() > before).await;
        let work = |_| async { Ok::<_, leasehold::Error>("new".to_owned()) };
        let began = once("new").run(&pool, work);
        let began = tokio::time::timeout(Duration::from_secs(20), began).await;
        assert!(began.expect("another key had to wait for the clean-up").unwrap().is_first());
        assert!(!cleaning.is_finished());
        drop(holder);
        assert_eq!(cleaning.await.unwrap().unwrap(), 3);
    });
}

// F43
/// The hour that occurs twice when daylight saving time ends. By the session's time zone it is the
/// first of the two, and by the clock the second.
#[test]
fn attempt_keeps_its_lease_when_daylight_saving_time_ends() {
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
            // Uses a clock without daylight saving time.
            let sql = "SELECT CAST(lease_end / 1000000 - UNIX_TIMESTAMP() AS SIGNED) \
                       FROM leasehold_once";
            let mut plain = sqlx::MySqlConnection::connect(&url).await.map_err(database::error)?;
            let left: i64 =
                sqlx::query_scalar(sql).fetch_one(&mut plain).await.map_err(database::error)?;
            assert!((300..=660).contains(&left), "{left} s of 600 s are left");
            Ok::<_, leasehold::Error>("done".to_owned())
        });
        assert!(ran.await.unwrap().is_first());
    });
}
