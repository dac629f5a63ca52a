//! Clients that use a pool which a service already has.

use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::PoolExt;
use leasehold::{Client, ErrorKind};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::Postgres;

const SIZE: u32 = 3;

fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(SIZE).connect_lazy(url).unwrap()
}

async fn beside(pool: &PgPool) -> Client {
    leasehold::builder().postgres(pool, "").await.unwrap()
}

/// Returns a description of a session, which shows whether a client has left anything on it.
async fn state(connection: &mut sqlx::PgConnection) -> String {
    sqlx::query_scalar(
        "SELECT concat_ws(' ', now() = statement_timestamp(), current_setting('enable_seqscan'), \
         current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'), \
         current_setting('default_transaction_isolation'), current_setting('transaction_isolation'), \
         (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%leasehold%'))",
    )
    .persistent(false)
    .fetch_one(connection)
    .await
    .unwrap()
}

/// Returns the current states of all connections of the pool.
async fn states(pool: &PgPool) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..SIZE {
        all.push(pool.acquire().await.unwrap());
    }
    let mut states = Vec::new();
    for connection in &mut all {
        states.push(state(connection).await);
    }
    states
}

/// Runs many tasks at once, on names of their own and on one common name.
async fn crowd(locks: &Client, tasks: usize, turns: usize) {
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..tasks {
        let locks = locks.clone();
        crowd.spawn(async move {
            for _ in 0..turns {
                release(locks.mutex(format!("own {n}")).lock().await.unwrap()).await;
                release(locks.mutex("all").lock().await.unwrap()).await;
            }
        });
    }
    while let Some(done) = crowd.join_next().await {
        done.unwrap();
    }
}

#[test]
fn borrowed_connections_are_returned_unchanged() {
    run(async {
        let server = <Postgres as Server>::shared();
        let url = Server::database(server);
        let pool = pool(&url);
        let before = states(&pool).await;
        pool.close().await;
        let pool = self::pool(&url);
        let locks = beside(&pool).await;
        release(locks.mutex("alone").lock().await.unwrap()).await;
        assert_eq!(pool.size(), 0, "a single client opened a second connection");
        let working = crowd(&locks, 24, 10);
        let mut most = 0;
        let watching = async {
            loop {
                most = most.max(server.sessions(&url).0);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::select! {
            () = working => {}
            () = watching => {}
        }
        assert!(pool.size() > 0, "the pool's connections were not used");
        // At most, our sessions are one for calls, two for renewals and one that listens. The
        // server may still list one that was closed.
        assert!(most <= SIZE as usize + 5, "{most} sessions");
        until("leasehold has one session again", async || {
            server.sessions(&url).0 <= pool.size() as usize + 1
        })
        .await;
        until("all connections are in the pool again", async || {
            pool.num_idle() == pool.size() as usize
        })
        .await;
        assert_eq!(states(&pool).await, before);
    });
}

#[test]
fn exhausted_pool_costs_no_lease_and_no_call() {
    run(async {
        let pool = pool(&Server::database(<Postgres as Server>::shared()));
        let mut used = Vec::new();
        for _ in 0..SIZE {
            used.push(pool.acquire().await.unwrap());
        }
        let locks = beside(&pool).await;
        let guard = locks.mutex("held").lease(Duration::from_secs(3)).lock().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), crowd(&locks, 8, 3)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(guard.is_held());
        guard.release().await.unwrap();
    });
}

#[test]
fn closed_pool_is_not_required() {
    run(async {
        let pool = pool(&Server::database(<Postgres as Server>::shared()));
        let locks = beside(&pool).await;
        crowd(&locks, 8, 2).await;
        pool.close().await;
        crowd(&locks, 8, 2).await;
    });
}

#[test]
fn a_blocked_runtime_costs_no_lease() {
    let url = Server::database(<Postgres as Server>::shared());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let pool = pool(&url);
        let locks = beside(&pool).await;
        crowd(&locks, 8, 2).await;
        let guards = locks.lock_all(["a", "b", "c"]).await.unwrap();
        let short = locks.mutex("short").lease(Duration::from_secs(3)).lock().await.unwrap();
        std::thread::sleep(Duration::from_secs(5));
        assert!(short.is_held());
        short.release().await.unwrap();
        guards.release().await.unwrap();
        crowd(&locks, 8, 2).await;
    });
}

#[test]
fn dropped_call_leaves_no_transaction_on_a_borrowed_connection() {
    run(async {
        let server = <Postgres as Server>::shared();
        let url = Server::database(server);
        let pool = pool(&url);
        let before = states(&pool).await;
        let locks = beside(&pool).await;
        for round in 0..60u64 {
            let mut crowd = tokio::task::JoinSet::new();
            for n in 0..12 {
                let mutex = locks.mutex(format!("{}", n % 4));
                crowd.spawn(async move { drop(mutex.lock().await) });
            }
            tokio::time::sleep(Duration::from_micros(round * 100)).await;
            // Drops all calls that are in progress.
            crowd.shutdown().await;
        }
        for n in 0..4 {
            release(locks.mutex(format!("{n}")).lock().await.unwrap()).await;
        }
        until("no transaction is open", async || server.sessions(&url).1 == 0).await;
        until("all connections are in the pool again", async || {
            pool.num_idle() == pool.size() as usize
        })
        .await;
        assert_eq!(states(&pool).await, before);
    });
}

#[test]
fn closed_client_leaves_the_pool_usable() {
    run(async {
        let pool = pool(&Server::database(<Postgres as Server>::shared()));
        let locks = beside(&pool).await;
        crowd(&locks, 12, 3).await;
        locks.close().await.unwrap();
        let began = Instant::now();
        assert_eq!(states(&pool).await.len(), SIZE as usize);
        assert!(began.elapsed() < Duration::from_secs(20));
    });
}

#[test]
fn mysql_connections_use_the_settings_of_the_pool() {
    run(async {
        let server = <testbed::MariaDb as Server>::shared();
        let url = Server::database(server);
        let pool = sqlx::MySqlPool::connect_lazy(&url).unwrap();
        let locks = leasehold::builder().mysql(&pool, "").await.unwrap();
        crowd(&locks, 12, 3).await;
        let (sessions, open) = server.sessions(&url);
        assert!(sessions <= 4 && open == 0, "{sessions} sessions, {open} in transactions");
        assert_eq!(pool.size(), 0);
    });
}

#[test]
fn sqlite_client_uses_the_file_of_the_pool() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("of the service.db");
        let options =
            sqlx::sqlite::SqliteConnectOptions::new().filename(&file).create_if_missing(true);
        let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
        let locks = leasehold::builder().sqlite(&pool, "prefix=jobs_").await.unwrap();
        release(locks.mutex("a").lock().await.unwrap()).await;
        let names: Vec<String> = sqlx::query_scalar("SELECT name FROM jobs_locks WHERE name <> ''")
            .fetch_all(&pool)
            .await
            .unwrap();
        assert_eq!(names, ["a"]);
        let memory = sqlx::SqlitePool::connect("sqlite::memory:").await.unwrap();
        let error = leasehold::builder().sqlite(&memory, "").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    });
}

#[test]
fn errors_name_the_mistake_and_never_the_password() {
    run(async {
        let url = Server::database(<Postgres as Server>::shared());
        let pool = pool(&url);
        for (parameters, expected) in [
            ("sslmode=require", "belongs to the database driver"),
            ("prefix=%", "prefix"),
            ("colour=red", "colour"),
        ] {
            let error = leasehold::builder().postgres(&pool, parameters).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains(expected), "{error}");
            assert!(format!("{error:#}").contains("postgres://127.0.0.1:"), "{error}");
        }
        let port = url.split_once("127.0.0.1:").unwrap().1.split('/').next().unwrap().to_owned();
        let nobody = url.replace(&port, "1").replace("lh:lh@", "lh:s3cret@");
        let error = leasehold::builder().postgres(&self::pool(&nobody), "").await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        assert!(!format!("{error:#}").contains("s3cret"), "{error}");
        assert!(!beside(&pool).await.url().contains("lh:lh"));
    });
}

#[test]
fn connecting_outside_of_a_runtime_is_an_error() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let url = Server::database(<Postgres as Server>::shared());
    let pool = runtime.block_on(async { pool(&url) });
    let alone = std::pin::pin!(leasehold::builder().postgres(&pool, ""));
    let Poll::Ready(refused) = alone.poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("`connect` waits outside of a runtime")
    };
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
