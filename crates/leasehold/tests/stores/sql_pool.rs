//! Clients beside a pool that a service has already.

#![cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite"))]

use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::PoolExt;
use leasehold::{ErrorKind, Leasehold};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::Postgres;

const SIZE: u32 = 3;

fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(SIZE).connect_lazy(url).unwrap()
}

async fn beside(pool: &PgPool) -> Leasehold {
    leasehold::builder().postgres(pool, "").await.unwrap()
}

/// What a session would show if somebody had left something on it.
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

/// All connections of the pool, as they are now.
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

/// Many at once, on names of their own and on one that all want.
async fn crowd(locks: &Leasehold, tasks: usize, turns: usize) {
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
fn calls_borrow_and_give_back_what_they_found() {
    run(async {
        let server = <Postgres as Server>::shared();
        let url = Server::database(server);
        let pool = pool(&url);
        let before = states(&pool).await;
        pool.close().await;
        let pool = self::pool(&url);
        let locks = beside(&pool).await;
        release(locks.mutex("alone").lock().await.unwrap()).await;
        assert_eq!(pool.size(), 0, "whoever is alone needs no second connection");
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
        assert!(pool.size() > 0, "none was borrowed");
        // Ours at its busiest: one for calls, two for renewals and one that hears; and the server knows for a
        // while of one that was closed.
        assert!(most <= SIZE as usize + 5, "{most} sessions");
        until("ours is one again", async || server.sessions(&url).0 <= pool.size() as usize + 1)
            .await;
        until("all are back", async || pool.num_idle() == pool.size() as usize).await;
        assert_eq!(states(&pool).await, before);
    });
}

#[test]
fn a_pool_of_which_all_is_in_use_costs_no_lease_and_no_call() {
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
fn a_pool_that_was_closed_is_done_without() {
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
fn a_call_that_is_dropped_leaves_nothing_open_on_what_it_borrowed() {
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
            // All that are under way are dropped.
            crowd.shutdown().await;
        }
        for n in 0..4 {
            release(locks.mutex(format!("{n}")).lock().await.unwrap()).await;
        }
        until("nobody is in a transaction", async || server.sessions(&url).1 == 0).await;
        until("all are back", async || pool.num_idle() == pool.size() as usize).await;
        assert_eq!(states(&pool).await, before);
    });
}

#[test]
fn a_client_that_ends_leaves_the_pool_usable() {
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
fn mysql_is_connected_to_as_the_pool_is() {
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
fn sqlite_is_the_pools_file() {
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
fn mistakes_are_told_and_passwords_are_not() {
    run(async {
        let url = Server::database(<Postgres as Server>::shared());
        let pool = pool(&url);
        for (parameters, told) in [
            ("sslmode=require", "said by the pool"),
            ("prefix=%", "prefix"),
            ("colour=red", "colour"),
        ] {
            let error = leasehold::builder().postgres(&pool, parameters).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains(told), "{error}");
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
fn outside_of_a_runtime_it_is_told_where_to_call_it() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let url = Server::database(<Postgres as Server>::shared());
    let pool = runtime.block_on(async { pool(&url) });
    let alone = std::pin::pin!(leasehold::builder().postgres(&pool, ""));
    let Poll::Ready(refused) = alone.poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("it waits")
    };
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
