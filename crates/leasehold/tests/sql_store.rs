//! The SQL stores against real servers: what the conformance suite does not ask.
#![cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]

use std::time::Duration;

use leasehold::{ErrorKind, Leasehold};

async fn refused(url: &str) -> leasehold::Error {
    match Leasehold::connect(url).await {
        Ok(_) => panic!("connected to {url}"),
        Err(error) => error,
    }
}

fn one_line_without(error: &leasehold::Error, secret: &str) {
    let text = format!("{error} {error:?}");
    assert!(!error.to_string().contains('\n'), "{text}");
    assert!(!text.contains(secret), "{text}");
}

#[tokio::test]
async fn s94_bad_databases_are_told_in_one_line_without_the_password() {
    let postgres = testbed::postgres().database();
    let elsewhere = format!("{}_not", postgres);
    let error = refused(&elsewhere).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    one_line_without(&error, "sesame");

    let mariadb = testbed::mariadb().database();
    let wrong = mariadb.replacen("//", "//nobody:sesame-", 1);
    let wrong = match wrong.rsplit_once('@') {
        Some((_, host)) => format!("mysql://nobody:sesame@{host}"),
        None => wrong,
    };
    let error = refused(&wrong).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    one_line_without(&error, "sesame");

    for gone in ["postgres://u:sesame@127.0.0.1:1/d", "mysql://u:sesame@127.0.0.1:1/d"] {
        let error = refused(gone).await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.is_retryable());
        one_line_without(&error, "sesame");
    }

    let directory = tempfile::tempdir().unwrap();
    let missing = format!("sqlite:{}/no/such/dir.db", directory.path().display());
    assert_eq!(refused(&missing).await.kind(), ErrorKind::Config);
    let file = directory.path().join("text.db");
    std::fs::write(&file, "this is no database, whatever its name says ".repeat(100)).unwrap();
    assert_eq!(refused(&format!("sqlite:{}", file.display())).await.kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn a_foreign_table_of_that_name_is_corrupt() {
    let url = testbed::postgres().database();
    let database = url.rsplit('/').next().unwrap();
    testbed::postgres().admin(database, "CREATE TABLE leasehold_locks (id int)");
    let error = refused(&url).await;
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("leasehold schema"), "{error}");
    // Beside it is room.
    Leasehold::connect(format!("{url}?prefix=ours_")).await.unwrap();
}

#[tokio::test]
async fn a_user_with_few_rights_is_enough_once_the_tables_are_there() {
    let server = testbed::postgres();
    let owner = server.database();
    let database = owner.rsplit('/').next().unwrap();
    server.admin(database, "CREATE ROLE few LOGIN PASSWORD 'few'");
    let few = server.url("few", "few", database);
    let error = refused(&few).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    server.admin(database, &leasehold::store::sql::schema(&owner).unwrap());
    server.admin(
        database,
        "GRANT SELECT, INSERT, UPDATE, DELETE ON leasehold_locks, leasehold_claims TO few; \
         GRANT SELECT ON leasehold_schema TO few",
    );
    let locks = Leasehold::connect(&few).await.unwrap();
    let guard = locks.mutex("few").lock().await.unwrap();
    let waiting = {
        let lock = Leasehold::connect(&few).await.unwrap().mutex("few");
        tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(30)).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn s42_behind_a_transaction_pooler_locks_work_and_hand_over() {
    let server = testbed::Postgres::start();
    let pooler = testbed::PgBouncer::before(&server);
    let url = format!("{}?pooler=transaction", pooler.in_front_of(&server, &server.database()));
    let (locks, other) =
        (Leasehold::connect(&url).await.unwrap(), Leasehold::connect(&url).await.unwrap());
    for round in 0..20 {
        let guard = locks.mutex("pooled").lock().await.unwrap();
        let waiting = {
            let lock = other.mutex("pooled");
            tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(30)).await })
        };
        tokio::time::sleep(Duration::from_millis(round)).await;
        let token = guard.token();
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    }
}

/// Killed and started again, a server has kept what it told, and tokens go on rising.
#[tokio::test]
async fn a_killed_server_keeps_holds_and_tokens() {
    let postgres = testbed::Postgres::start();
    let url = postgres.database();
    let locks = Leasehold::connect(&url).await.unwrap();
    let guard = locks.mutex("kept").lease(Duration::from_secs(60)).lock().await.unwrap();
    postgres.kill();
    postgres.restart();
    let other = Leasehold::connect(&url).await.unwrap();
    let error = other.mutex("kept").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(other.mutex("kept").lock().await.unwrap().token() > token);
}

/// A pair on a free mutex is one statement to take and one to release.
#[tokio::test]
async fn an_uncontended_pair_is_two_statements() {
    let server = testbed::postgres();
    let url = server.database();
    let database = url.rsplit('/').next().unwrap();
    let locks = Leasehold::connect(&url).await.unwrap();
    let lock = locks.mutex("pair");
    lock.lock().await.unwrap().release().await.unwrap();
    let commits = || -> i64 {
        let sql = "SELECT pg_stat_force_next_flush(); \
                   SELECT n_tup_upd + n_tup_ins FROM pg_stat_user_tables \
                   WHERE relname IN ('leasehold_locks') UNION ALL \
                   SELECT n_tup_ins + n_tup_upd + n_tup_del + 1000 FROM pg_stat_user_tables \
                   WHERE relname = 'leasehold_claims'";
        let out = server.admin(database, sql);
        out.split_whitespace().filter_map(|w| w.parse::<i64>().ok()).sum()
    };
    // The server's counters follow within a second or so.
    let start = std::time::Instant::now();
    while commits() < 1_002 && start.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let before = commits();
    for _ in 0..50 {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let start = std::time::Instant::now();
    while commits() < before + 100 && start.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(commits() - before, 100);
}
