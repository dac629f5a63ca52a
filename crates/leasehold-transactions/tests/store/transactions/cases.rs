// Included once for each database, which defines `Db`, `DIALECT`, `bed`, `IMPATIENT` and
// `LOCKS_ROWS`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold::fence::sql::{TokenColumn, check};
use leasehold::once::{Ran, clean_up, sweep};
use leasehold::versioned::{Retry, Versioned, retry};
use leasehold::{Result, FencingToken, database, once};

type Tx<'a> = sqlx::Transaction<'a, Db>;

fn token(n: u64) -> FencingToken {
    FencingToken::new(n).unwrap()
}

async fn number(tx: &mut Tx<'_>, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(&mut **tx).await.unwrap()
}

async fn run(tx: &mut Tx<'_>, sql: &'static str) {
    sqlx::query(sql).execute(&mut **tx).await.unwrap();
}

fn patient() -> Retry {
    Retry::default().tries(200)
}

// R23
#[tokio::test(flavor = "multi_thread")]
async fn read_modify_write_under_the_lock_loses_no_update() {
    let bed = bed().await;
    let all: Vec<_> = (0..30)
        .map(|_| {
            let pool = bed.pool.clone();
            // Spawned, which requires that the futures are Send.
            tokio::spawn(async move {
                retry(patient(), || async {
                    let mut tx = pool.begin().await.map_err(database::error)?;
                    lock_in(&mut tx, "t:1").await?;
                    let n: i64 = number(&mut tx, "SELECT n FROM t WHERE id = 1").await;
                    tokio::task::yield_now().await;
                    // Not n = n + 1, which the database would keep correct without the lock.
                    let sql = format!("UPDATE t SET n = {} WHERE id = 1", n + 1);
                    sqlx::query(sqlx::AssertSqlSafe(sql))
                        .execute(&mut *tx)
                        .await
                        .map_err(database::error)?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(())
                })
                .await
            })
        })
        .collect();
    for one in all {
        one.await.unwrap().unwrap();
    }
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t WHERE id = 1").await, 30);
    let taken = "SELECT CAST(taken AS DECIMAL) = 30 AND (SELECT COUNT(*) FROM leasehold_row_lock) = 1 \
                 FROM leasehold_row_lock";
    let held: bool = sqlx::query_scalar(taken).fetch_one(&mut *tx).await.unwrap();
    assert!(held, "the row must count every committed hold");
}

// R23
#[tokio::test]
async fn lock_is_released_by_commit_rollback_and_drop() {
    let bed = bed().await;
    for end in ["commit", "rollback", "drop"] {
        let mut holder = bed.pool.begin().await.unwrap();
        lock_in(&mut holder, "a").await.unwrap();
        let mut other = bed.pool.begin().await.unwrap();
        let error = try_lock_in(&mut other, "a").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert_eq!(error.name().unwrap().as_str(), "a");
        one_line(&error);
        let error = lock_in_timeout(&mut other, "a", Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        // The transaction that was refused is still usable. (The query reads no table, because that
        // would take a snapshot.)
        run(&mut other, "SELECT 1").await;
        match end {
            "commit" => holder.commit().await.unwrap(),
            "rollback" => holder.rollback().await.unwrap(),
            _ => drop(holder),
        }
        lock_in_timeout(&mut other, "a", Duration::from_secs(20)).await.unwrap();
        run(&mut other, "UPDATE t SET n = n + 1").await;
        other.commit().await.unwrap();
    }
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 3);
}

// R23, S50
/// Scenario 50: the first acquisitions of a new name, some of which roll back.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_first_locks_of_a_new_name_lose_no_update() {
    let bed = bed().await;
    for round in 0..5 {
        let all: Vec<_> = (0..12)
            .map(|i| {
                let pool = bed.pool.clone();
                tokio::spawn(async move {
                    retry(patient(), || async {
                        let mut tx = pool.begin().await.map_err(database::error)?;
                        lock_in(&mut tx, format!("new:{round}")).await?;
                        if i % 2 == 0 {
                            tx.rollback().await.map_err(database::error)?;
                        } else {
                            sqlx::query("UPDATE t SET n = n + 1")
                                .execute(&mut *tx)
                                .await
                                .map_err(database::error)?;
                            tx.commit().await.map_err(database::error)?;
                        }
                        Ok(())
                    })
                    .await
                })
            })
            .collect();
        for one in all {
            one.await.unwrap().unwrap();
        }
    }
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 30);
}

// R52
#[tokio::test]
async fn different_names_can_be_held_at_once() {
    let bed = bed().await;
    // First with new names, then with names whose rows exist.
    for _ in 0..2 {
        let mut all = Vec::new();
        for name in ["Job", "job", "job ", "a/../b", "ключ", "%", "j_b"] {
            let mut tx = bed.pool.begin().await.unwrap();
            match try_lock_in(&mut tx, name).await {
                Ok(()) => all.push(tx),
                Err(e) if !LOCKS_ROWS => assert_eq!(e.kind(), ErrorKind::Contended, "{e}"),
                Err(e) => panic!("{name:?} had to wait for another name: {e}"),
            }
        }
        assert_eq!(all.len(), if LOCKS_ROWS { 7 } else { 1 });
        for tx in all {
            tx.commit().await.unwrap();
        }
    }
}

// R52
#[tokio::test]
async fn a_table_without_a_unique_index_is_refused() {
    let bed = bed().await;
    for (wrong, name) in [
        (
            "CREATE TABLE leasehold_row_lock (name VARCHAR(500) NOT NULL, taken BIGINT NOT NULL)",
            "x",
        ),
        (
            "CREATE TABLE leasehold_row_lock (id BIGINT, name VARCHAR(500) NOT NULL, \
             taken BIGINT NOT NULL, UNIQUE (name, id))",
            "y",
        ),
    ] {
        sqlx::query("DROP TABLE leasehold_row_lock").execute(&bed.pool).await.unwrap();
        sqlx::query(wrong).execute(&bed.pool).await.unwrap();
        let mut tx = bed.pool.begin().await.unwrap();
        let error = lock_in(&mut tx, name).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        one_line(&error);
    }
}

// R23
#[tokio::test]
async fn missing_table_is_reported_with_the_fix() {
    let bed = bed().await;
    sqlx::query("DROP TABLE leasehold_row_lock").execute(&bed.pool).await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    let error = lock_in(&mut tx, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    one_line(&error);
    assert!(format!("{error:#}").contains("install"), "{error}");
}

// S43
#[tokio::test]
async fn transaction_that_failed_and_is_dropped_releases_the_lock() {
    let bed = bed().await;
    let mut failed = bed.pool.begin().await.unwrap();
    lock_in(&mut failed, "a").await.unwrap();
    // PostgreSQL refuses all further statements of this transaction.
    sqlx::query("SELECT no_such_column FROM t").execute(&mut *failed).await.unwrap_err();
    drop(failed);
    let mut other = bed.pool.begin().await.unwrap();
    lock_in_timeout(&mut other, "a", Duration::from_secs(20)).await.unwrap();
}

// R23
#[tokio::test]
async fn deadlock_is_a_retryable_conflict() {
    if !LOCKS_ROWS {
        return; // A single lock cannot deadlock. The stale snapshot has a separate test.
    }
    let bed = bed().await;
    let mut one = bed.pool.begin().await.unwrap();
    let mut two = bed.pool.begin().await.unwrap();
    lock_in(&mut one, "a").await.unwrap();
    lock_in(&mut two, "b").await.unwrap();
    let crossed = async |mut tx: Tx<'static>, name: &str| {
        let result = lock_in(&mut tx, name).await;
        tx.rollback().await.unwrap();
        result
    };
    let (one, two) = tokio::join!(crossed(one, "b"), crossed(two, "a"));
    let errors: Vec<Error> = [one, two].into_iter().filter_map(Result::err).collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].kind(), ErrorKind::Conflict);
    assert!(errors[0].is_retryable());
    one_line(&errors[0]);
}

// R23
/// A limited wait applies to one call only, even if it ends in a deadlock.
#[tokio::test]
async fn lock_timeout_setting_is_restored_after_the_call() {
    let bed = bed().await;
    let pool = &bed.pool;
    let wait = async |tx: &mut Tx<'_>| -> String {
        let sql = WAIT_IS;
        sqlx::query_scalar(sql).fetch_one(&mut **tx).await.unwrap()
    };
    let mut one = pool.begin().await.unwrap();
    let mut two = pool.begin().await.unwrap();
    let before = wait(&mut two).await;
    lock_in_timeout(&mut one, "a", Duration::from_secs(7)).await.unwrap();
    assert_eq!(wait(&mut one).await, before);
    try_lock_in(&mut two, "a").await.unwrap_err();
    assert_eq!(wait(&mut two).await, before);
    if !LOCKS_ROWS {
        return; // No deadlock is possible.
    }
    lock_in(&mut two, "b").await.unwrap();
    let long = Duration::from_secs(30);
    let crossed = async |mut tx: Tx<'static>, name: &str| {
        let result = lock_in_timeout(&mut tx, name, long).await;
        if result.is_ok() || before != "0" {
            // (PostgreSQL accepts no statement after a deadlock, and resets the wait.)
            assert_eq!(wait(&mut tx).await, before);
        }
        tx.rollback().await.unwrap();
        result.err().map(|e| e.kind())
    };
    let (one, two) = tokio::join!(crossed(one, "b"), crossed(two, "a"));
    let errors: Vec<ErrorKind> = [one, two].into_iter().flatten().collect();
    assert_eq!(errors, [ErrorKind::Conflict]);
}

// R24
#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_writer_of_the_same_version_succeeds() {
    let bed = bed().await;
    let all: Vec<_> = (0..20)
        .map(|_| {
            let pool = bed.pool.clone();
            tokio::spawn(async move {
                let table = Versioned::new("t", "id", "version");
                retry(patient(), || async {
                    let mut c = pool.acquire().await.map_err(database::error)?;
                    let (n, seen): (i64, i64) =
                        sqlx::query_as("SELECT n, version FROM t WHERE id = 1")
                            .fetch_one(&mut *c)
                            .await
                            .map_err(database::error)?;
                    drop(c);
                    let mut tx = pool.begin().await.map_err(database::error)?;
                    table.update(&mut tx, 1, seen, &[("n", (n + 1).into())]).await?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(())
                })
                .await
            })
        })
        .collect();
    for one in all {
        one.await.unwrap().unwrap();
    }
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 20);
    let table = Versioned::new("t", "id", "version");
    assert_eq!(table.version(&mut *tx, 1).await.unwrap(), Some(20));
}

// R24
#[tokio::test]
async fn stale_version_reports_both_versions_and_writes_nothing() {
    let bed = bed().await;
    let table = Versioned::new("t", "id", "version");
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(table.update(&mut tx, 1, 0, &[("token", None::<i64>.into())]).await.unwrap(), 1);
    let error = table.update(&mut tx, 1, 0, &[("n", 9.into())]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleVersion);
    let stale = error.stale_version().unwrap();
    assert_eq!((stale.expected, stale.found), (0, Some(1)));
    one_line(&error);
    let gone = table.update(&mut tx, 2, 0, &[]).await.unwrap_err().stale_version().unwrap();
    assert_eq!((gone.expected, gone.found), (0, None));
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);

    // If a key selects two rows, it is not a key.
    run(&mut tx, "INSERT INTO t VALUES (2, 0, 1, NULL)").await;
    let wrong = Versioned::new("t", "n", "version");
    let error = wrong.update(&mut tx, 0, 1, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    for bad in ["t; DROP TABLE t", "t\"", "", "a.b.c", "1t", "t`", "t?"] {
        let error = Versioned::new(bad, "id", "version").version(&mut *tx, 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
}

// R26
#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_of_the_racing_transactions_is_first() {
    let bed = bed().await;
    let works = Arc::new(AtomicU32::new(0));
    let all: Vec<_> = (0..24)
        .map(|i| {
            let (pool, works) = (bed.pool.clone(), works.clone());
            tokio::spawn(async move {
                retry(patient(), || async {
                    let mut tx = pool.begin().await.map_err(database::error)?;
                    let ran = once("pay:1")
                        .run_in(&mut tx, async |tx| {
                            works.fetch_add(1, Ordering::SeqCst);
                            sqlx::query("UPDATE t SET n = n + 1")
                                .execute(&mut **tx)
                                .await
                                .map_err(database::error)?;
                            Ok::<_, Error>(format!("by {i}"))
                        })
                        .await?;
                    // The first three firsts crash in the middle. Their key and write are rolled
                    // back.
                    if ran.is_first() && works.load(Ordering::SeqCst) <= 3 {
                        drop(tx);
                        return Err(Error::new(ErrorKind::Conflict, "crashed"));
                    }
                    tx.commit().await.map_err(database::error)?;
                    Ok(ran)
                })
                .await
            })
        })
        .collect();
    let mut ran = Vec::new();
    for one in all {
        ran.push(one.await.unwrap().unwrap());
    }
    assert_eq!(ran.iter().filter(|r| r.is_first()).count(), 1, "{ran:?}");
    let first = ran.iter().find(|r| r.is_first()).unwrap().clone().into_outcome();
    assert!(ran.into_iter().all(|r| r.into_outcome() == first));
    assert!(works.load(Ordering::SeqCst) >= 4);
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 1);
}

// R26
#[tokio::test]
async fn error_of_the_write_is_never_reported_as_a_duplicate() {
    let bed = bed().await;
    // The caller's own unique index is violated. INSERT IGNORE would report success.
    let mut tx = bed.pool.begin().await.unwrap();
    let error = once("k")
        .run_in(&mut tx, async |tx| {
            sqlx::query("UPDATE t SET n = 5").execute(&mut **tx).await?;
            sqlx::query("INSERT INTO t VALUES (1, 1, 1, NULL)").execute(&mut **tx).await?;
            Ok::<_, sqlx_or_ours::E>(String::new())
        })
        .await
        .unwrap_err();
    assert!(matches!(&error, sqlx_or_ours::E::Theirs(e)
        if e.as_database_error().unwrap().is_unique_violation()));
    // Even if the caller commits nevertheless, neither the write nor the key is stored.
    run(&mut tx, "UPDATE t SET version = 1").await;
    tx.commit().await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);
    assert_eq!(number(&mut tx, "SELECT version FROM t").await, 1);
    let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("ü 'x' \"y\"".into())).await;
    assert_eq!(ran.unwrap(), Ran::First("ü 'x' \"y\"".into()));
    // A second run in one transaction is a duplicate too. A key that differs in case is another
    // key.
    let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
    assert_eq!(ran.unwrap(), Ran::Duplicate("ü 'x' \"y\"".into()));
    let ran = once("K").run_in(&mut tx, async |_| Ok::<_, Error>("yes".into())).await;
    assert_eq!(ran.unwrap(), Ran::First("yes".into()));
    tx.rollback().await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("again".into())).await;
    assert_eq!(ran.unwrap(), Ran::First("again".into()));
    let error =
        once("").run_in(&mut tx, async |_| Ok::<_, Error>(String::new())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidName);
}

/// A caller's own error type, which separates the driver's error from ours.
mod sqlx_or_ours {
    #[derive(Debug)]
    pub(super) enum E {
        Theirs(sqlx::Error),
        #[allow(dead_code)]
        Ours(super::Error),
    }
    impl From<sqlx::Error> for E {
        fn from(e: sqlx::Error) -> Self {
            Self::Theirs(e)
        }
    }
    impl From<super::Error> for E {
        fn from(e: super::Error) -> Self {
            Self::Ours(e)
        }
    }
}

// R26
#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_of_the_racing_attempts_is_first() {
    let bed = bed().await;
    let works = Arc::new(AtomicU32::new(0));
    let all: Vec<_> = (0..16)
        .map(|i| {
            let (pool, works) = (bed.pool.clone(), works.clone());
            tokio::spawn(async move {
                let work = |_| async move {
                    works.fetch_add(1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    Ok::<_, Error>(format!("by {i}"))
                };
                once("mail").run(&pool, work).await
            })
        })
        .collect();
    let mut ran = Vec::new();
    for one in all {
        ran.push(one.await.unwrap().unwrap());
    }
    assert_eq!(works.load(Ordering::SeqCst), 1);
    assert_eq!(ran.iter().filter(|r| r.is_first()).count(), 1);
    let first = ran.iter().find(|r| r.is_first()).unwrap().clone().into_outcome();
    assert!(ran.into_iter().all(|r| r.into_outcome() == first));
}

// R26
#[tokio::test]
async fn crashed_attempt_is_taken_over_and_failed_one_immediately() {
    let bed = bed().await;
    let lease = Duration::from_secs(3600);
    // The attempt crashes after it has begun, because its future is dropped.
    let (began, begun) = tokio::sync::oneshot::channel();
    let crashing = once("k").lease(lease).run(&bed.pool, |_| async {
        began.send(()).unwrap();
        std::future::pending::<Result<String>>().await
    });
    tokio::select! {
        _ = crashing => panic!("ended"),
        _ = begun => {}
    }
    // During its lease, other attempts get an error that it is running, also in a transaction.
    let at_it =
        once("k").wait(Duration::ZERO).run(&bed.pool, |_| async { Ok::<_, Error>("no".into()) });
    let error = at_it.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let mut tx = bed.pool.begin().await.unwrap();
    let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
    assert_eq!(ran.unwrap_err().kind(), ErrorKind::Contended);
    tx.rollback().await.unwrap();
    // After its lease, the next attempt knows that it is not the first.
    let over = "UPDATE leasehold_once SET lease_end = 0 WHERE state = 'started'";
    sqlx::query(over).execute(&bed.pool).await.unwrap();
    let failed = once("k").run(&bed.pool, |attempt| async move {
        assert_eq!(attempt.number(), 2);
        Err::<String, Error>(Error::new(ErrorKind::Full, "no paper"))
    });
    assert_eq!(failed.await.unwrap_err().kind(), ErrorKind::Full);
    let done = once("k").wait(Duration::ZERO).run(&bed.pool, |attempt| async move {
        assert_eq!(attempt.number(), 3);
        Ok::<_, Error>("done".into())
    });
    assert_eq!(done.await.unwrap(), Ran::First("done".into()));
    let mut tx = bed.pool.begin().await.unwrap();
    let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
    assert_eq!(ran.unwrap(), Ran::Duplicate("done".into()));
}

// R26
/// A different fingerprint is refused inside and outside of a transaction, for finished and running
/// keys. A run without a fingerprint is never refused.
#[tokio::test]
async fn key_with_a_different_request_is_refused() {
    let bed = bed().await;
    let run = async |key: &'static str, request: Option<&'static str>| {
        let key = once(key).wait(Duration::ZERO);
        let key = if let Some(request) = request { key.fingerprint(request) } else { key };
        key.run(&bed.pool, |_| async { Ok::<_, Error>("done".into()) }).await
    };
    let run_in = async |key: &'static str, request: &'static str| {
        let mut tx = bed.pool.begin().await.unwrap();
        let key = once(key).fingerprint(request);
        let ran = key.run_in(&mut tx, async |_| Ok::<_, Error>("done".into())).await;
        tx.commit().await.unwrap();
        ran
    };
    assert!(run("out", Some("a")).await.unwrap().is_first());
    assert!(run_in("in", "a").await.unwrap().is_first());
    for key in ["out", "in"] {
        assert!(!run(key, Some("a")).await.unwrap().is_first());
        assert!(!run_in(key, "a").await.unwrap().is_first());
        assert!(!run(key, None).await.unwrap().is_first());
        for refused in [run(key, Some("b")).await, run_in(key, "b").await] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(format!("{error:#}").contains("another request"), "{error}");
        }
    }
    // A running attempt, and one that has crashed.
    let (began, begun) = tokio::sync::oneshot::channel();
    let crashing = once("crashed").fingerprint("a").run(&bed.pool, |_| async {
        began.send(()).unwrap();
        std::future::pending::<Result<String>>().await
    });
    tokio::select! {
        _ = crashing => panic!("ended"),
        _ = begun => {}
    }
    assert_eq!(run("crashed", Some("b")).await.unwrap_err().kind(), ErrorKind::Mismatch);
    assert_eq!(run("crashed", Some("a")).await.unwrap_err().kind(), ErrorKind::Timeout);
    let over = "UPDATE leasehold_once SET lease_end = 0 WHERE state = 'started'";
    sqlx::query(over).execute(&bed.pool).await.unwrap();
    assert_eq!(run("crashed", Some("b")).await.unwrap_err().kind(), ErrorKind::Mismatch);
    assert!(run("crashed", Some("a")).await.unwrap().is_first());
}

// R26
#[tokio::test]
async fn renewed_attempt_outlives_its_lease_and_late_one_stores_nothing() {
    let bed = bed().await;
    // Long enough for a renewal on a busy machine.
    let lease = Duration::from_secs(6);
    let pool = &bed.pool;
    let slow = once("slow").lease(lease).run(pool, |_| async {
        tokio::time::sleep(lease * 3 / 2).await;
        Ok::<_, Error>("slow".into())
    });
    assert_eq!(slow.await.unwrap(), Ran::First("slow".into()));
    // Invalid settings are refused before anything is written.
    for (bad, kind) in [
        (once("k").lease(Duration::ZERO), ErrorKind::Config),
        (once("a\nb"), ErrorKind::InvalidName),
    ] {
        let error = bad.run(pool, |_| async { Ok::<_, Error>("no".into()) }).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        one_line(&error);
    }
    // Another attempt takes over in the middle. The late attempt is stopped, or at the latest
    // cannot store its result. (It is not renewed before that, which would undo the takeover.)
    let late = once("late").lease(Duration::from_secs(60)).run(pool, |_| async {
        let sql = "UPDATE leasehold_once SET lease_end = 0 WHERE state = 'started'";
        sqlx::query(sql).execute(pool).await.map_err(database::error)?;
        let next = once("late")
            .run(pool, |a| async move { Ok::<_, Error>(format!("next {}", a.number())) });
        assert_eq!(next.await?, Ran::First("next 2".into()));
        Ok::<_, Error>("late".into())
    });
    let error = late.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let after = once("late").run(pool, |_| async { Ok::<_, Error>("no".into()) });
    assert_eq!(after.await.unwrap(), Ran::Duplicate("next 2".into()));
}

// R26
#[tokio::test]
async fn old_keys_are_cleaned_up_and_recent_ones_kept() {
    let bed = bed().await;
    let mut tx = bed.pool.begin().await.unwrap();
    for key in ["old", "young"] {
        let ran = once(key).run_in(&mut tx, async |_| Ok::<_, Error>(key.to_owned())).await;
        assert!(ran.unwrap().is_first());
    }
    let hour = "UPDATE leasehold_once SET done_at = done_at - 3600000000 WHERE outcome = 'old'";
    run(&mut tx, hour).await;
    tx.commit().await.unwrap();
    assert_eq!(clean_up(&bed.pool, Duration::from_secs(7200)).await.unwrap(), 0);
    assert_eq!(clean_up(&bed.pool, Duration::from_secs(1800)).await.unwrap(), 1);
    let young = once("young").run(&bed.pool, |_| async { Ok::<_, Error>("no".into()) });
    assert_eq!(young.await.unwrap(), Ran::Duplicate("young".into()));
    let old = once("old").run(&bed.pool, |_| async { Ok::<_, Error>("new".into()) });
    assert_eq!(old.await.unwrap(), Ran::First("new".into()));
}

// R26
/// One call deletes no more keys of both kinds than its limit.
#[tokio::test]
async fn cleanup_deletes_no_more_keys_than_its_limit() {
    let bed = bed().await;
    let failed = || async { Err::<String, Error>(Error::new(ErrorKind::Full, "no paper")) };
    for n in 0..3 {
        let done =
            once(format!("done {n}")).run(&bed.pool, |_| async { Ok::<_, Error>("x".into()) });
        assert!(done.await.unwrap().is_first());
        once(format!("failed {n}")).run(&bed.pool, |_| failed()).await.unwrap_err();
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    let hour = Duration::from_secs(3600);
    assert_eq!(sweep(&bed.pool, hour, 100).await.unwrap(), 0);
    assert_eq!(sweep(&bed.pool, Duration::ZERO, 0).await.unwrap(), 0);
    for (at_most, swept) in [(2, 2), (2, 2), (100, 2), (100, 0)] {
        assert_eq!(sweep(&bed.pool, Duration::ZERO, at_most).await.unwrap(), swept);
    }
}

// R26
/// The retention counts from the end of the work, or from the time when it was given up. After that
/// the key is new again, and its old fingerprint is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn key_can_be_reused_after_its_retention() {
    let bed = bed().await;
    let day = Duration::from_secs(24 * 3600);
    let run = async |outcome: &'static str| {
        let key = once("k").fingerprint(outcome).retention(day).wait(Duration::ZERO);
        key.run(&bed.pool, |a| async move { Ok::<_, Error>(format!("{outcome} {a}")) }).await
    };
    let run_in = async |outcome: &'static str| {
        let mut tx = bed.pool.begin().await.unwrap();
        let key = once("k").fingerprint(outcome).retention(day);
        let ran = key.run_in(&mut tx, async |_| Ok::<_, Error>(outcome.to_owned())).await;
        tx.commit().await.unwrap();
        ran
    };
    let older = async |hours: i64| {
        let mut tx = bed.pool.begin().await.unwrap();
        let sql = format!(
            "UPDATE leasehold_once SET done_at = done_at - {0}, lease_end = lease_end - {0}",
            hours * 3_600_000_000
        );
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    };
    assert_eq!(run("a").await.unwrap(), Ran::First("a attempt 1".into()));
    older(23).await;
    assert_eq!(run("a").await.unwrap(), Ran::Duplicate("a attempt 1".into()));
    assert_eq!(run("b").await.unwrap_err().kind(), ErrorKind::Mismatch);
    older(2).await;
    assert_eq!(run("b").await.unwrap(), Ran::First("b attempt 1".into()));
    older(25).await;
    assert_eq!(run_in("c").await.unwrap(), Ran::First("c".into()));
    assert_eq!(run_in("c").await.unwrap(), Ran::Duplicate("c".into()));
    assert_eq!(run("c").await.unwrap(), Ran::Duplicate("c".into()));
    // Without a retention time, a run returns the existing result, however old it is.
    older(100).await;
    let old = once("k").run(&bed.pool, |_| async { Ok::<_, Error>("no".into()) });
    assert_eq!(old.await.unwrap(), Ran::Duplicate("c".into()));
    // An attempt that failed. If many attempts begin at once, one of them is the first.
    let failed = |_| async { Err::<String, Error>(Error::new(ErrorKind::Full, "no paper")) };
    once("k").retention(day).fingerprint("d").run(&bed.pool, failed).await.unwrap_err();
    assert_eq!(run("e").await.unwrap_err().kind(), ErrorKind::Mismatch);
    older(25).await;
    let racing: Vec<_> = (0..8)
        .map(|i| {
            let pool = bed.pool.clone();
            tokio::spawn(async move {
                let work = |a| async move { Ok::<_, Error>(format!("by {i}, {a}")) };
                once("k").retention(day).run(&pool, work).await.unwrap()
            })
        })
        .collect();
    let mut firsts = 0;
    for one in racing {
        let ran = one.await.unwrap();
        firsts += u32::from(ran.is_first());
        assert!(ran.into_outcome().ends_with("attempt 1"));
    }
    assert_eq!(firsts, 1);
}

/// A payment's own error. One kind is final, and the other is not.
#[derive(Debug)]
enum Payment {
    Declined(String),
    Failed(Error),
}

impl From<Error> for Payment {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Payment {
    fn kept(&self) -> Option<String> {
        match self {
            Self::Declined(why) => Some(why.clone()),
            Self::Failed(_) => None,
        }
    }
}

// R26
#[tokio::test]
async fn kept_error_is_stored_as_outcome_and_its_work_rolled_back() {
    let bed = bed().await;
    let key =
        |key: &str| once(key).fingerprint("100").keep_errors(Payment::kept, Payment::Declined);
    let declined = |outcome: Result<String, Payment>| match outcome {
        Err(Payment::Declined(why)) => why,
        other => panic!("{other:?}"),
    };
    for time in 0..2 {
        let ran =
            key("out").run(&bed.pool, |_| async { Err(Payment::Declined("no \0 money".into())) });
        let ran = ran.await.unwrap();
        assert_eq!(ran.is_first(), time == 0);
        assert_eq!(declined(ran.into_outcome()), "no \0 money");

        let mut tx = bed.pool.begin().await.unwrap();
        let ran = key("in").run_in(&mut tx, async |tx| {
            let mut wrong = sqlx::query("UPDATE t SET n = 7").execute(&mut **tx).await;
            if time == 0 {
                // This works even if the database itself has refused a statement.
                let sql = "INSERT INTO t VALUES (1, 1, 1, NULL)";
                wrong = sqlx::query(sql).execute(&mut **tx).await;
            }
            wrong.map_err(|_| Payment::Declined("twice".into()))?;
            Ok("no".into())
        });
        let ran = ran.await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(ran.is_first(), time == 0);
        assert_eq!(declined(ran.into_outcome()), "twice");
    }
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0, "the work was not rolled back");
    // A run that does not keep errors gets an error and does nothing. Another fingerprint is
    // refused.
    for name in ["out", "in"] {
        let ran = once(name).run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
        let error = ran.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        one_line(&error);
        let other = once(name).fingerprint("200").keep_errors(Payment::kept, Payment::Declined);
        let refused = other.run_in(&mut tx, async |_| Ok("no".into())).await.unwrap_err();
        assert!(
            matches!(&refused, Payment::Failed(e) if e.kind() == ErrorKind::Mismatch),
            "{refused:?}"
        );
    }
    tx.rollback().await.unwrap();
    // An error that is not kept leaves the key free. Work that succeeds is stored.
    for name in ["out 2", "in 2"] {
        let fails = || Payment::Failed(Error::new(ErrorKind::Full, "no paper"));
        let mut tx = bed.pool.begin().await.unwrap();
        for time in 0..3 {
            let ran = match name {
                "in 2" => {
                    let work = async |_: &mut Tx<'_>| {
                        if time == 0 { Err(fails()) } else { Ok("paid".into()) }
                    };
                    key(name).run_in(&mut tx, work).await
                }
                _ => {
                    let work =
                        |_| async { if time == 0 { Err(fails()) } else { Ok("paid".into()) } };
                    key(name).run(&bed.pool, work).await
                }
            };
            match time {
                0 => assert!(matches!(ran.unwrap_err(), Payment::Failed(_))),
                _ => assert_eq!(ran.unwrap().into_outcome().unwrap(), "paid"),
            }
        }
    }
    // Kept errors are cleaned up like other outcomes.
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(clean_up(&bed.pool, Duration::ZERO).await.unwrap(), 3);
}

// R26
#[tokio::test]
async fn keys_of_attempts_that_never_finished_are_cleaned_up() {
    let bed = bed().await;
    for key in ["failed", "failed lately", "retried"] {
        let failed = once(key).run(&bed.pool, |_| async {
            Err::<String, Error>(Error::new(ErrorKind::Full, "no paper"))
        });
        assert_eq!(failed.await.unwrap_err().kind(), ErrorKind::Full);
    }
    // The attempts crash after they have begun, because their futures are dropped.
    for key in ["crashed", "at it"] {
        let begun = std::sync::atomic::AtomicBool::new(false);
        let attempt = once(key).lease(Duration::from_secs(3600)).run(&bed.pool, |_| async {
            begun.store(true, Ordering::SeqCst);
            std::future::pending::<Result<String, Error>>().await
        });
        tokio::select! {
            _ = attempt => unreachable!("the attempt ended"),
            () = async {
                while !begun.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            } => {}
        }
    }
    assert_eq!(
        clean_up(&bed.pool, Duration::from_secs(1800)).await.unwrap(),
        0,
        "a young key was deleted"
    );
    let mut tx = bed.pool.begin().await.unwrap();
    let hours = "UPDATE leasehold_once SET lease_end = lease_end - 10800000000 \
                 WHERE attempt_id <> '' AND attempt = 1";
    run(&mut tx, hours).await;
    tx.commit().await.unwrap();
    // These were taken over since, or their lease has not expired, so they stay.
    let retried = once("retried").run(&bed.pool, |_| async { Ok::<_, Error>("done".into()) });
    assert_eq!(retried.await.unwrap(), Ran::First("done".into()));
    for (key, attempt) in [("failed lately", 2), ("at it", 2)] {
        let again = once(key).lease(Duration::from_secs(3600)).run(&bed.pool, |a| async move {
            assert_eq!(a.number(), attempt);
            Err::<String, Error>(Error::new(ErrorKind::Full, "no paper"))
        });
        assert_eq!(again.await.unwrap_err().kind(), ErrorKind::Full);
    }
    assert_eq!(clean_up(&bed.pool, Duration::from_secs(1800)).await.unwrap(), 2);
    for (key, attempt) in [("failed", 1), ("crashed", 1), ("failed lately", 3), ("at it", 3)] {
        let again = once(key).run(&bed.pool, |a| async move {
            assert_eq!(a.number(), attempt, "{key}");
            Ok::<_, Error>("done".into())
        });
        assert!(again.await.unwrap().is_first());
    }
    let done = once("retried").run(&bed.pool, |_| async { Ok::<_, Error>("no".into()) });
    assert_eq!(done.await.unwrap(), Ran::Duplicate("done".into()));
}

// R35
#[tokio::test]
async fn stale_token_is_rejected_with_both_tokens() {
    let bed = bed().await;
    let mut tx = bed.pool.begin().await.unwrap();
    for n in [33, 33, 34, FencingToken::MAX - 1] {
        check(&mut tx, "r", token(n)).await.unwrap();
    }
    check(&mut tx, "R", token(1)).await.unwrap();
    let error = check(&mut tx, "r", token(33)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken);
    assert!(!error.is_retryable());
    let stale = error.stale_token().unwrap();
    assert_eq!((stale.seen, stale.offered), (token(FencingToken::MAX - 1), token(33)));
    one_line(&error);
    // The highest token seen is rolled back together with the writes.
    tx.rollback().await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    check(&mut tx, "r", token(1)).await.unwrap();
}

// R35
/// Check and write are one step. No other token passes from the check to the commit.
#[tokio::test]
async fn no_other_token_is_accepted_between_check_and_commit() {
    let bed = bed().await;
    let mut first = bed.pool.begin().await.unwrap();
    check(&mut first, "r", token(5)).await.unwrap();
    let mut next = bed.pool.begin().await.unwrap();
    run(&mut next, IMPATIENT).await;
    let error = check(&mut next, "r", token(6)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    next.rollback().await.unwrap();
    run(&mut first, "UPDATE t SET n = 5").await;
    first.commit().await.unwrap();
    let mut next = bed.pool.begin().await.unwrap();
    check(&mut next, "r", token(6)).await.unwrap();
    assert_eq!(number(&mut next, "SELECT n FROM t").await, 5);
    next.commit().await.unwrap();
    let mut late = bed.pool.begin().await.unwrap();
    assert_eq!(check(&mut late, "r", token(5)).await.unwrap_err().kind(), ErrorKind::StaleToken);
}

// R35
#[tokio::test(flavor = "multi_thread")]
async fn racing_writers_commit_in_token_order() {
    let bed = bed().await;
    let all: Vec<_> = (0..24u64)
        .map(|i| {
            let pool = bed.pool.clone();
            let mine = token(1 + (i * 7) % 24);
            tokio::spawn(async move {
                let write = || async {
                    let mut tx = pool.begin().await.map_err(database::error)?;
                    check(&mut tx, "journal", mine).await?;
                    let sql = format!(
                        "INSERT INTO journal SELECT COALESCE(MAX(id), 0) + 1, {mine} FROM journal"
                    );
                    sqlx::query(sqlx::AssertSqlSafe(sql))
                        .execute(&mut *tx)
                        .await
                        .map_err(database::error)?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(())
                };
                match retry(patient(), write).await {
                    Ok(()) => true,
                    Err(e) => {
                        assert_eq!(e.kind(), ErrorKind::StaleToken, "{e}");
                        false
                    }
                }
            })
        })
        .collect();
    let mut wrote = 0;
    for one in all {
        wrote += usize::from(one.await.unwrap());
    }
    let tokens: Vec<i64> = sqlx::query_scalar("SELECT token FROM journal ORDER BY id")
        .fetch_all(&bed.pool)
        .await
        .unwrap();
    assert!(tokens.is_sorted(), "{tokens:?}");
    assert_eq!(tokens.len(), wrote);
    assert_eq!(tokens.last(), Some(&24));
}

// R50
/// A fence cannot detect a late write that arrives before the new holder's first write. The new
/// holder prevents this if its reads carry its token.
#[tokio::test]
async fn reads_must_present_the_token_to_exclude_late_writes() {
    let bed = bed().await;
    let write = async |n: u64, sql: &'static str| {
        let mut tx = bed.pool.begin().await.unwrap();
        check(&mut tx, "r", token(n)).await?;
        run(&mut tx, sql).await;
        tx.commit().await.unwrap();
        Ok::<_, Error>(())
    };
    // The new holder (34) reads without its token, so the late write of 33 is accepted and then
    // lost.
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);
    tx.rollback().await.unwrap();
    write(33, "UPDATE t SET n = 100").await.unwrap();
    write(34, "UPDATE t SET n = 0 + 1").await.unwrap();
    // The next holder (36) offers its token when it reads, so the late write of 35 is refused.
    let mut tx = bed.pool.begin().await.unwrap();
    check(&mut tx, "r", token(36)).await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 1);
    tx.commit().await.unwrap();
    let late = write(35, "UPDATE t SET n = 100").await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::StaleToken);
    write(36, "UPDATE t SET n = 1 + 1").await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(number(&mut tx, "SELECT n FROM t").await, 2);
}

// R35
#[tokio::test]
async fn a_token_column_guards_one_statement() {
    let bed = bed().await;
    let column = TokenColumn::new("t", "id", "token");
    let mut c = bed.pool.acquire().await.unwrap();
    for (n, value) in [(7, 1), (7, 1), (8, 2)] {
        assert!(column.write(&mut *c, 1, token(n), &[("n", value.into())]).await.unwrap());
    }
    let error = column.write(&mut *c, 1, token(7), &[("n", 9.into())]).await.unwrap_err();
    let stale = error.stale_token().unwrap();
    assert_eq!((stale.seen, stale.offered), (token(8), token(7)));
    // Without columns, it only offers the token, as a holder does before it reads.
    assert!(column.write(&mut *c, 1, token(9), &[]).await.unwrap());
    assert!(column.write(&mut *c, 1, token(8), &[("n", 9.into())]).await.is_err());
    assert!(!column.write(&mut *c, 2, token(99), &[("n", 9.into())]).await.unwrap());
    let n: i64 = sqlx::query_scalar("SELECT n FROM t").fetch_one(&mut *c).await.unwrap();
    assert_eq!(n, 2);
}

// R35
#[tokio::test]
async fn fence_accepts_guards_until_they_are_lost() {
    let bed = bed().await;
    let locks = leasehold::connect("memory:").await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    let mutex = locks.mutex("m").lock().await.unwrap();
    check(&mut tx, "m", &mutex).await.unwrap();
    let writer = locks.rwlock("w").write().await.unwrap();
    check(&mut tx, "w", &writer).await.unwrap();
    locks.clone().close().await.unwrap();
    let error = check(&mut tx, "m", &mutex).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

// R35
#[test]
fn the_printed_schema_is_what_install_runs() {
    let dialect = DIALECT;
    let sql = database::schema(dialect);
    for table in ["leasehold_row_lock", "leasehold_once", "leasehold_fence"] {
        assert!(sql.contains(&format!("CREATE TABLE IF NOT EXISTS {table} (")), "{sql}");
    }
    assert_eq!(sql.contains("InnoDB"), dialect == Dialect::Mysql);
}

// R35
/// Runs the statements that are printed for other languages, with their parameters filled in
/// exactly as documented.
#[tokio::test]
async fn printed_sql_works_as_documented() {
    use sqlx::{Connection as _, Executor as _};
    let bed = bed().await;
    let text = leasehold::fence::sql::text(DIALECT);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("--")).collect();
    let statements = lines.join("\n");
    let mut statements = statements.split(';').map(str::trim).filter(|sql| !sql.is_empty());
    let mut next = || {
        let sql = statements.next().expect("one more statement").to_owned();
        let sql = sql.replace("your_table", "t").replace("your_column", "n");
        move |resource: &str, token: u64, value: i64| {
            let quoted = format!("'{resource}'");
            let sql = sql.replace(":resource", &quoted).replace(":token", &token.to_string());
            sqlx::AssertSqlSafe(sql.replace(":value", &value.to_string()).replace(":id", "1"))
        }
    };
    let (raise, look, write) = (next(), next(), next());
    let read_back = statements.next().map(|sql| sql.replace("your_table", "t").replace(":id", "1"));
    assert!(statements.next().is_none(), "{text}");
    let mut c = bed.pool.acquire().await.unwrap();
    // The query shows the transaction of this token whether to continue or to roll back.
    for (resource, token, seen) in
        [("r", 5, 5), ("r", 5, 5), ("r", 9, 9), ("r", 7, 9), ("other", 1, 1)]
    {
        let mut tx = c.begin().await.unwrap();
        (&mut *tx).execute(sqlx::raw_sql(raise(resource, token, 0))).await.unwrap();
        let stored: i64 =
            sqlx::query_scalar(look(resource, token, 0)).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(stored, seen, "{resource} {token}");
        match stored > token as i64 {
            true => tx.rollback().await.unwrap(),
            false => tx.commit().await.unwrap(),
        }
    }
    // The printed statements and the library use the same fence.
    let mut tx = bed.pool.begin().await.unwrap();
    assert_eq!(check(&mut tx, "r", token(8)).await.unwrap_err().kind(), ErrorKind::StaleToken);
    tx.rollback().await.unwrap();
    for (token, value, left, is_written) in
        [(5, 50, 50, true), (5, 50, 50, true), (9, 90, 90, true), (7, 70, 90, false)]
    {
        let done = (&mut *c).execute(sqlx::raw_sql(write("", token, value))).await.unwrap();
        // sqlx configures MySQL to return the number of matched rows.
        assert_eq!(done.rows_affected(), u64::from(is_written), "{token}");
        if let Some(sql) = &read_back {
            let sql = sqlx::AssertSqlSafe(sql.clone());
            let seen: i64 = sqlx::query_scalar(sql).fetch_one(&mut *c).await.unwrap();
            assert_eq!(seen > token as i64, !is_written, "{token}");
        }
        let n: i64 =
            sqlx::query_scalar("SELECT n FROM t WHERE id = 1").fetch_one(&mut *c).await.unwrap();
        assert_eq!(n, left);
    }
}

// F35
/// PostgreSQL text cannot contain NUL. The work is done once, and its outcome is stored
/// nevertheless.
#[tokio::test]
async fn an_outcome_with_a_nul_is_stored() {
    let bed = bed().await;
    let paid = AtomicU32::new(0);
    for time in 0..3 {
        let work = |_| async {
            paid.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Error>("a\0b".to_owned())
        };
        let ran = once("nul").run(&bed.pool, work).await.unwrap();
        assert_eq!(ran.is_first(), time == 0);
        assert_eq!(ran.into_outcome(), "a\0b");
    }
    assert_eq!(paid.load(Ordering::SeqCst), 1);
    let mut tx = bed.pool.begin().await.unwrap();
    let work = async |_: &mut Tx<'_>| Ok::<_, Error>("c\0d".to_owned());
    let ran = once("nul in").run_in(&mut tx, work).await.unwrap();
    assert_eq!(ran, Ran::First("c\0d".into()));
    tx.commit().await.unwrap();
}

// F35
/// The work uses all connections of the pool for longer than the leases.
#[tokio::test]
async fn small_pool_does_not_starve_renewals() {
    let bed = bed().await;
    let small = bed.pool.options().clone().max_connections(2);
    let small = small.connect_with((*bed.pool.connect_options()).clone()).await.unwrap();
    let one = |key: &'static str| {
        let pool = small.clone();
        // A renewal on a busy machine can take seconds.
        let lease = Duration::from_secs(6);
        async move {
            let work = |_| async {
                let _mine = pool.acquire().await.map_err(database::error)?;
                tokio::time::sleep(lease * 5 / 2).await;
                Ok::<_, Error>("done".to_owned())
            };
            once(key).lease(lease).run(&pool, work).await
        }
    };
    let (a, b) = tokio::join!(one("a"), one("b"));
    assert_eq!((a.unwrap(), b.unwrap()), (Ran::First("done".into()), Ran::First("done".into())));
}

// F25
/// A displayed name is not the name itself. Functions that take a name accept the guard's name
/// unchanged.
#[tokio::test]
async fn fence_accepts_the_guards_own_name() {
    let bed = bed().await;
    let locks = leasehold::connect("memory:f25").await.unwrap();
    let late = locks.mutex("order:42").lock().await.unwrap().token();
    let guard = locks.mutex("order:42").lock().await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    leasehold::fence::sql::check_guard(&mut tx, &guard).await.unwrap();
    check(&mut tx, guard.name(), &guard).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = bed.pool.begin().await.unwrap();
    let error = check(&mut tx, "order:42", late).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
    assert_eq!("order:42".parse::<leasehold::Name>().unwrap(), *guard.name());
}
