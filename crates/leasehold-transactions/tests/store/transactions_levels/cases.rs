// Included once for each server, which defines `Db`, `pool` and `at_level`.

type Tx<'a> = sqlx::Transaction<'a, Db>;

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn run_sql(tx: &mut Tx<'_>, sql: &'static str) {
    sqlx::query(sql).execute(&mut **tx).await.unwrap();
}

async fn number(pool: &sqlx::Pool<Db>, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

/// Asserts that the error tells the transaction either that it is stale or that it must be
/// repeated.
fn assert_refused(error: &Error, stale: ErrorKind, level: &str) {
    assert!([stale, ErrorKind::Conflict].contains(&error.kind()), "{level}: {error}");
}

// R35
/// The late writer's snapshot is older than the new holder, in every form. There is a row without a
/// token, a row with a token, and a token column.
#[tokio::test]
async fn stale_token_is_refused_at_every_isolation_level() {
    let pool = pool().await;
    let column = TokenColumn::new("t", "id", "token");
    for (n, level) in LEVELS.into_iter().enumerate() {
        for seen_before in [false, true] {
            let resource = format!("resource {n} {seen_before}");
            let tokens = [1, 5, 10].map(|t| FencingToken::new(n as u64 * 100 + t).unwrap());
            let [first, late, new] = tokens;
            if seen_before {
                let mut tx = pool.begin().await.unwrap();
                check(&mut tx, &resource, first).await.unwrap();
                tx.commit().await.unwrap();
            }
            for by_column in [false, true] {
                let mut connection = pool.acquire().await.unwrap();
                at_level(&mut connection, level).await;
                let mut stale = connection.begin().await.unwrap();
                run_sql(&mut stale, "SELECT count(*) FROM journal").await;

                let mut tx = pool.begin().await.unwrap();
                check(&mut tx, &resource, new).await.unwrap();
                assert!(column.write(&mut *tx, 1, new, &[("n", 1.into())]).await.unwrap());
                tx.commit().await.unwrap();

                let error = match by_column {
                    true => column.write(&mut *stale, 1, late, &[("n", 7.into())]).await.map(drop),
                    false => check(&mut stale, &resource, late).await,
                };
                assert_refused(&error.unwrap_err(), ErrorKind::StaleToken, level);
                stale.rollback().await.unwrap();
                assert_eq!(number(&pool, "SELECT n FROM t WHERE id = 1").await, 1, "{level}");
                sqlx::query("UPDATE t SET token = NULL").execute(&pool).await.unwrap();
            }
        }
    }
}

// R35
/// No other token passes from check to commit, whichever snapshot its transaction has.
#[tokio::test]
async fn no_other_token_is_accepted_before_the_commit_at_any_level() {
    let pool = pool().await;
    for (n, level) in LEVELS.into_iter().enumerate() {
        let resource = format!("resource {n}");
        let [old, new] = [5, 10].map(|t| FencingToken::new(n as u64 * 100 + t).unwrap());
        let mut connection = pool.acquire().await.unwrap();
        at_level(&mut connection, level).await;
        let mut holding = connection.begin().await.unwrap();
        check(&mut holding, &resource, old).await.unwrap();
        let next = tokio::spawn({
            let (pool, resource) = (pool.clone(), resource.clone());
            async move {
                retry(Retry::default(), || async {
                    let mut connection = pool.acquire().await.map_err(database::error)?;
                    at_level(&mut connection, level).await;
                    let mut tx = connection.begin().await.map_err(database::error)?;
                    check(&mut tx, &resource, new).await?;
                    // The check comes first and the read after it, so the old holder's write is
                    // seen.
                    let seen: i64 = sqlx::query_scalar("SELECT n FROM t WHERE id = 1")
                        .fetch_one(&mut *tx)
                        .await
                        .map_err(database::error)?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(seen)
                })
                .await
            }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(
            !next.is_finished(),
            "{level}: another holder passed the fence between check and commit"
        );
        run_sql(&mut holding, "UPDATE t SET n = 7").await;
        holding.commit().await.unwrap();
        assert_eq!(next.await.unwrap().unwrap(), 7, "{level}");
        sqlx::query("UPDATE t SET n = 0").execute(&pool).await.unwrap();
    }
}

// R24
/// The write was computed from a version that is now stale but still in the writer's snapshot.
#[tokio::test]
async fn stale_version_is_refused_at_every_isolation_level() {
    let pool = pool().await;
    let rows = Versioned::new("t", "id", "version");
    for (n, level) in (0..).zip(LEVELS) {
        let mut connection = pool.acquire().await.unwrap();
        at_level(&mut connection, level).await;
        let mut stale = connection.begin().await.unwrap();
        run_sql(&mut stale, "SELECT count(*) FROM journal").await;
        let mut tx = pool.begin().await.unwrap();
        assert_eq!(rows.update(&mut tx, 1, n, &[("n", 1.into())]).await.unwrap(), n + 1);
        tx.commit().await.unwrap();
        let error = rows.update(&mut stale, 1, n, &[("n", 7.into())]).await.unwrap_err();
        assert_refused(&error, ErrorKind::StaleVersion, level);
        stale.rollback().await.unwrap();
        assert_eq!(number(&pool, "SELECT n FROM t WHERE id = 1").await, 1, "{level}");
    }
}

// R26
/// Exactly one racing attempt is first, and the failure of another one is not taken for a
/// duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_attempt_is_first_at_every_isolation_level() {
    let pool = pool().await;
    for (n, level) in (1..).zip(LEVELS) {
        let mut racing = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let pool = pool.clone();
            racing.spawn(async move {
                retry(Retry::default().tries(200), || async {
                    let mut connection = pool.acquire().await.map_err(database::error)?;
                    at_level(&mut connection, level).await;
                    let mut tx = connection.begin().await.map_err(database::error)?;
                    sqlx::query("SELECT count(*) FROM journal")
                        .execute(&mut *tx)
                        .await
                        .map_err(database::error)?;
                    let ran = once(format!("key {n}")).run_in(&mut tx, async |tx| {
                        let sql = "UPDATE t SET n = n + 1 WHERE id = 1";
                        sqlx::query(sql).execute(&mut **tx).await.map_err(database::error)?;
                        Ok::<_, Error>(level.to_owned())
                    });
                    let ran = ran.await?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(ran)
                })
                .await
            });
        }
        let mut firsts = 0;
        while let Some(ran) = racing.join_next().await {
            let ran = ran.unwrap().unwrap_or_else(|e| panic!("{level}: {e}"));
            firsts += usize::from(ran.is_first());
            assert_eq!(ran.into_outcome(), level);
        }
        assert_eq!(firsts, 1, "{level}");
        assert_eq!(number(&pool, "SELECT n FROM t WHERE id = 1").await, n, "{level}");
    }
}

// R26
/// The same outside of the caller's transactions, where only `run` can retry.
#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_racing_attempt_is_first_if_all_is_serializable() {
    let pool = pool().await;
    let mut connections = Vec::new();
    for _ in 0..pool.options().get_max_connections() {
        let mut connection = pool.acquire().await.unwrap();
        at_level(&mut connection, "SERIALIZABLE").await;
        connections.push(connection);
    }
    drop(connections);
    for round in 0..5 {
        let mut racing = tokio::task::JoinSet::new();
        for _ in 0..12 {
            let pool = pool.clone();
            racing.spawn(async move {
                let work = |_| async { Ok::<_, Error>("done".to_owned()) };
                once(format!("racing {round}")).run(&pool, work).await
            });
        }
        let mut firsts = 0;
        while let Some(ran) = racing.join_next().await {
            firsts += usize::from(ran.unwrap().unwrap_or_else(|e| panic!("{e}")).is_first());
        }
        assert_eq!(firsts, 1);
    }
}

// R26, R40
/// An attempt was paused, its lease expired, and the next attempt has begun and perhaps ended. A
/// write of the first attempt must fail now. It does if the attempt calls `check` in the
/// transaction that writes.
#[tokio::test]
async fn a_paused_attempt_cannot_write_late() {
    let pool = pool().await;
    for ended in [false, true] {
        let key = format!("paused {ended}");
        let first = once(&key).lease(Duration::from_secs(20)).run(&pool, |attempt| {
            let (pool, key) = (pool.clone(), key.clone());
            async move {
                let mut tx = pool.begin().await.map_err(database::error)?;
                attempt.check(&mut tx).await?;
                run_sql(&mut tx, "UPDATE t SET n = n + 1 WHERE id = 1").await;
                tx.commit().await.map_err(database::error)?;

                let sql = "UPDATE leasehold_once SET lease_end = 0 WHERE state = 'started'";
                sqlx::query(sql).execute(&pool).await.map_err(database::error)?;
                let (began, begun) = tokio::sync::oneshot::channel();
                let next = tokio::spawn({
                    let (pool, key) = (pool.clone(), key.clone());
                    async move {
                        let work = |next: Attempt| async move {
                            assert_eq!(next.number(), 2);
                            began.send(()).unwrap();
                            match ended {
                                true => Ok::<_, Error>("second".to_owned()),
                                false => std::future::pending().await,
                            }
                        };
                        once(&key).run(&pool, work).await.map(drop)
                    }
                });
                begun.await.unwrap();
                match ended {
                    true => next.await.unwrap()?,
                    false => next.abort(),
                }

                let mut tx = pool.begin().await.map_err(database::error)?;
                run_sql(&mut tx, "UPDATE t SET n = 100 WHERE id = 1").await;
                let late = attempt.check(&mut tx).await.unwrap_err();
                assert_eq!(late.kind(), ErrorKind::Lost, "{late}");
                assert_eq!(format!("{late:#}").lines().count(), 1);
                tx.rollback().await.map_err(database::error)?;
                Ok::<_, Error>("first".to_owned())
            }
        });
        assert_eq!(first.await.unwrap_err().kind(), ErrorKind::Lost);
    }
    assert_eq!(number(&pool, "SELECT n FROM t WHERE id = 1").await, 2);
}

// R26
/// While an attempt has called `check` and its transaction is open, no other attempt takes over.
#[tokio::test]
async fn attempt_is_not_taken_over_between_its_check_and_commit() {
    let pool = pool().await;
    let ran = once("key").lease(Duration::from_secs(20)).run(&pool, |attempt| {
        let pool = pool.clone();
        async move {
            let sql = "UPDATE leasehold_once SET lease_end = 0 WHERE state = 'started'";
            sqlx::query(sql).execute(&pool).await.map_err(database::error)?;
            let mut tx = pool.begin().await.map_err(database::error)?;
            attempt.check(&mut tx).await?;
            let next = tokio::spawn({
                let pool = pool.clone();
                async move {
                    let work = |_| async { Ok::<_, Error>("second".to_owned()) };
                    once("key").run(&pool, work).await
                }
            });
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!next.is_finished(), "the key was taken over during the transaction");
            run_sql(&mut tx, "UPDATE t SET n = n + 1 WHERE id = 1").await;
            tx.commit().await.map_err(database::error)?;
            assert!(next.await.unwrap()?.is_first());
            Ok::<_, Error>("first".to_owned())
        }
    });
    assert_eq!(ran.await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(number(&pool, "SELECT n FROM t WHERE id = 1").await, 1);
}

// R26
/// The result of work that took an hour is not old when the work ends. Its callers still have the
/// whole retention time for retries.
#[tokio::test]
async fn retention_counts_from_the_end_of_the_work() {
    let pool = pool().await;
    let mut tx = pool.begin().await.unwrap();
    let ran = once("slow").run_in(&mut tx, async |tx| {
        run_sql(tx, "UPDATE leasehold_once SET done_at = done_at - 3600000000").await;
        Ok::<_, Error>("done".into())
    });
    assert!(ran.await.unwrap().is_first());
    tx.commit().await.unwrap();
    assert_eq!(clean_up(&pool, Duration::from_secs(1800)).await.unwrap(), 0);
}
