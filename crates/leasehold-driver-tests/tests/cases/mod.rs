//! Test cases that apply to every driver.
#![allow(dead_code, reason = "not every driver has a pool")]

pub(crate) use std::time::Duration;

pub(crate) use leasehold::database::{self, Column, Dialect, Session, Value};
pub(crate) use leasehold::fence::sql::{TokenColumn, check};
pub(crate) use leasehold::once::Ran;
pub(crate) use leasehold::versioned::Versioned;
pub(crate) use leasehold::{
    Error, ErrorKind, FencingToken, lock_in, lock_in_timeout, once, try_lock_in,
};

pub(crate) const CALLERS_TABLES: [&str; 2] = [
    "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, word VARCHAR(99), \
     version BIGINT NOT NULL, token BIGINT)",
    "INSERT INTO t VALUES (1, 0, NULL, 0, NULL)",
];

pub(crate) fn token(n: u64) -> FencingToken {
    FencingToken::new(n).unwrap()
}

/// Returns one number, queried on the driver's own session.
pub(crate) async fn number(session: &mut impl Session, sql: &str) -> i64 {
    let row = session.row(sql, &[], &[Column::Int]).await.unwrap().expect("a row");
    match row[..] {
        [Value::Int(n)] => n,
        _ => panic!("{row:?}"),
    }
}

pub(crate) fn one_line(error: &Error) {
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
}

pub(crate) async fn prepare(pool: &impl database::Pool) {
    database::install(pool).await.unwrap();
    let mut session = pool.session().await.unwrap();
    for sql in CALLERS_TABLES {
        session.batch(sql).await.unwrap();
    }
}

/// Defines the cases. Each module provides `DIALECT`, a `Bed` with its own database, `client`, and
/// functions that begin and end a transaction.
macro_rules! cases {
    () => {
        #[tokio::test(flavor = "multi_thread")]
        async fn a_lock_is_held_until_the_transaction_ends() {
            let bed = bed().await;
            let (mut one, mut two) = (client(&bed).await, client(&bed).await);
            // A name from outside is data and never part of the SQL text.
            let name = "a'; DROP TABLE t; -- $1 ?";
            for end in ["commit", "rollback"] {
                let mut holder = begin(&mut one).await;
                lock_in(&mut holder, name).await.unwrap();
                let mut other = begin(&mut two).await;
                let error = try_lock_in(&mut other, name).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
                one_line(&error);
                let wait = Duration::from_millis(50);
                let error = lock_in_timeout(&mut other, name, wait).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                // The transaction whose lock was not acquired is still usable.
                other.batch("SELECT 1").await.unwrap();
                match end {
                    "commit" => commit(holder).await.unwrap(),
                    _ => rollback(holder).await,
                }
                lock_in_timeout(&mut other, name, Duration::from_secs(20)).await.unwrap();
                other.run("UPDATE t SET n = n + 1", &[]).await.unwrap();
                commit(other).await.unwrap();
            }
            let mut tx = begin(&mut one).await;
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 2);
            // Different names are different locks.
            lock_in(&mut tx, "b").await.unwrap();
            rollback(tx).await;
        }

        #[tokio::test(flavor = "multi_thread")]
        async fn once_key_runs_once_and_failed_work_is_rolled_back() {
            let bed = bed().await;
            let mut client = client(&bed).await;
            let mut tx = begin(&mut client).await;
            let failed = once("k").run_in(&mut tx, async |tx| {
                tx.run("UPDATE t SET n = 7", &[]).await.map_err(Error::from)?;
                Err::<String, Error>(Error::new(ErrorKind::Full, "no paper"))
            });
            assert_eq!(failed.await.unwrap_err().kind(), ErrorKind::Full);
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);
            // The work passes on an error of the statement itself. Then the work of one key uses
            // another key.
            let refused = once("k").run_in(&mut tx, async |tx| {
                tx.run("INSERT INTO t VALUES (1, 1, NULL, 1, NULL)", &[]).await?;
                Ok::<_, Fault>(String::new())
            });
            assert!(refused.await.unwrap_err().0.code().is_some());
            let outer = once("k").fingerprint("ü").run_in(&mut tx, async |tx| {
                let inner = once("in").run_in(tx, async |tx| {
                    tx.run("UPDATE t SET n = n + 1", &[]).await.map_err(Error::from)?;
                    Ok::<_, Error>("inner".to_owned())
                });
                Ok::<_, Error>(format!("ü 'x' \0, {}", inner.await?.into_outcome()))
            });
            assert_eq!(outer.await.unwrap(), Ran::First("ü 'x' \0, inner".into()));
            commit(tx).await.unwrap();
            let mut tx = begin(&mut client).await;
            let again = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
            assert_eq!(again.unwrap(), Ran::Duplicate("ü 'x' \0, inner".into()));
            let other = once("k").fingerprint("u");
            let error = other.run_in(&mut tx, async |_| Ok::<_, Error>("no".into())).await;
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Mismatch);
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 1);
            rollback(tx).await;
        }

        #[tokio::test]
        async fn a_stale_version_writes_nothing() {
            let bed = bed().await;
            let mut client = client(&bed).await;
            let table = Versioned::new("t", "id", "version");
            let mut tx = begin(&mut client).await;
            let set = [
                ("word", Value::from("it's ü")),
                ("n", (1i64 << 40).into()),
                ("token", Value::Null),
            ];
            assert_eq!(table.update(&mut tx, 1, 0, &set).await.unwrap(), 1);
            let error = table.update(&mut tx, 1, 0, &[("n", 9.into())]).await.unwrap_err();
            assert_eq!(error.stale_version().unwrap().found, Some(1), "{error}");
            assert_eq!(table.version(&mut tx, 1).await.unwrap(), Some(1));
            assert_eq!(table.version(&mut tx, 2).await.unwrap(), None);
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 1 << 40);
            let word = tx.row("SELECT word FROM t", &[], &[Column::Text]).await.unwrap().unwrap();
            assert_eq!(word, [Value::from("it's ü")]);
            rollback(tx).await;
        }

        #[tokio::test]
        async fn stale_token_is_rejected_with_both_tokens() {
            let bed = bed().await;
            let mut client = client(&bed).await;
            let mut tx = begin(&mut client).await;
            for n in [5, 5, 9, FencingToken::MAX - 1] {
                check(&mut tx, "r", token(n)).await.unwrap();
            }
            let error = check(&mut tx, "r", token(7)).await.unwrap_err();
            let stale = error.stale_token().unwrap();
            assert_eq!((stale.seen, stale.offered), (token(FencingToken::MAX - 1), token(7)));
            let column = TokenColumn::new("t", "id", "token");
            assert!(column.write(&mut tx, 1, token(8), &[("n", 2.into())]).await.unwrap());
            let error = column.write(&mut tx, 1, token(7), &[("n", 3.into())]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
            assert!(!column.write(&mut tx, 2, token(8), &[]).await.unwrap());
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 2);
            rollback(tx).await;
        }

        #[tokio::test]
        async fn database_errors_are_classified_by_their_codes() {
            let bed = bed().await;
            let (mut one, mut two) = (client(&bed).await, client(&bed).await);
            if DIALECT != Dialect::Sqlite {
                let (mut a, mut b) = (begin(&mut one).await, begin(&mut two).await);
                lock_in(&mut a, "a").await.unwrap();
                lock_in(&mut b, "b").await.unwrap();
                let a = async {
                    let locked = lock_in(&mut a, "b").await;
                    rollback(a).await;
                    locked.err().map(|e| e.kind())
                };
                let b = async {
                    let locked = lock_in(&mut b, "a").await;
                    rollback(b).await;
                    locked.err().map(|e| e.kind())
                };
                let (a, b) = tokio::join!(a, b);
                let errors: Vec<ErrorKind> = [a, b].into_iter().flatten().collect();
                assert_eq!(errors, [ErrorKind::Conflict]);
            }
            for (table, kind) in [
                (
                    "CREATE TABLE leasehold_row_lock (name VARCHAR(9), taken BIGINT)",
                    ErrorKind::Corrupt,
                ),
                ("SELECT 1", ErrorKind::Config),
            ] {
                let mut tx = begin(&mut one).await;
                tx.batch("DROP TABLE IF EXISTS leasehold_row_lock").await.unwrap();
                tx.batch(table).await.unwrap();
                commit(tx).await.unwrap();
                let mut tx = begin(&mut one).await;
                let error = lock_in(&mut tx, "a").await.unwrap_err();
                assert_eq!(error.kind(), kind, "{error}");
                one_line(&error);
                rollback(tx).await;
            }
        }

        /// An error type of the work that keeps the driver's code.
        struct Fault(database::Fault);
        impl From<database::Fault> for Fault {
            fn from(fault: database::Fault) -> Self {
                Self(fault)
            }
        }
        impl From<Error> for Fault {
            fn from(error: Error) -> Self {
                Self(error.into())
            }
        }
        impl std::fmt::Debug for Fault {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        /// The tasks are spawned, which requires that the futures are `Send`.
        #[tokio::test(flavor = "multi_thread")]
        async fn many_tasks_lose_no_update() {
            let bed = std::sync::Arc::new(bed().await);
            let tasks: Vec<_> = (0..6)
                .map(|_| {
                    let bed = bed.clone();
                    tokio::spawn(async move {
                        let mut client = client(&bed).await;
                        for _ in 0..4 {
                            let mut tx = begin(&mut client).await;
                            let wait = Duration::from_secs(60);
                            lock_in_timeout(&mut tx, "t:1", wait).await.unwrap();
                            let n = number(&mut tx, "SELECT n FROM t").await;
                            let sql = format!("UPDATE t SET n = {}", n + 1);
                            tx.run(&sql, &[]).await.unwrap();
                            commit(tx).await.unwrap();
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            let mut client = client(&bed).await;
            let mut tx = begin(&mut client).await;
            assert_eq!(number(&mut tx, "SELECT n FROM t").await, 24);
            rollback(tx).await;
        }
    };
}
