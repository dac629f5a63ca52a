//! `lock_in`, `versioned`, `once` and `fence::sql` on real databases. The cases are the same for
//! each database. Faults that only one of them can have are tested here.
use std::time::Duration;

use leasehold::database::Dialect;
use leasehold::{Error, ErrorKind, lock_in, lock_in_timeout, try_lock_in};

/// A database of one test, with our tables and tables of "the caller's".
struct Bed<DB: sqlx::Database> {
    pool: sqlx::Pool<DB>,
    _directory: Option<tempfile::TempDir>,
}

const CALLERS_TABLES: [&str; 3] = [
    "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, version BIGINT NOT NULL, \
     token BIGINT)",
    "CREATE TABLE journal (id BIGINT NOT NULL PRIMARY KEY, token BIGINT NOT NULL)",
    "INSERT INTO t VALUES (1, 0, 0, NULL)",
];

macro_rules! bed {
    ($pool:expr, $directory:expr) => {{
        let pool = $pool;
        database::install(&pool).await.unwrap();
        // Installed again and concurrently, as every process does when it starts.
        let (a, b) = tokio::join!(database::install(&pool), database::install(&pool));
        a.and(b).unwrap();
        for sql in CALLERS_TABLES {
            sqlx::query(sql).execute(&pool).await.unwrap();
        }
        Bed { pool, _directory: $directory }
    }};
}

/// Asserts that the message is one line.
fn one_line(error: &Error) {
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
}

mod postgres {
    use super::*;

    type Db = sqlx::Postgres;
    const DIALECT: Dialect = Dialect::Postgres;
    /// Returns how long a statement waits for a lock.
    const WAIT_IS: &str = "SELECT current_setting('lock_timeout')";
    /// Makes statements of this transaction wait only briefly for a lock.
    const IMPATIENT: &str = "SET LOCAL lock_timeout = '50ms'";
    const LOCKS_ROWS: bool = true;

    async fn bed() -> Bed<Db> {
        let options = sqlx::postgres::PgPoolOptions::new().max_connections(12);
        bed!(options.connect(&testbed::postgres().database()).await.unwrap(), None)
    }

    include!("transactions/cases.rs");

    // R26, R23
    /// The session is killed in the middle of the work. Key, lock and write are rolled back with
    /// it.
    #[tokio::test]
    async fn killed_session_rolls_back_key_lock_and_write() {
        let bed = bed().await;
        let mut tx = bed.pool.begin().await.unwrap();
        lock_in(&mut tx, "a").await.unwrap();
        let pool = bed.pool.clone();
        let error = once("k")
            .run_in(&mut tx, async |tx| {
                sqlx::query("UPDATE t SET n = n + 1")
                    .execute(&mut **tx)
                    .await
                    .map_err(database::error)?;
                let id: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
                    .fetch_one(&mut **tx)
                    .await
                    .map_err(database::error)?;
                let kill = format!("SELECT pg_terminate_backend({id})");
                sqlx::query(sqlx::AssertSqlSafe(kill))
                    .execute(&pool)
                    .await
                    .map_err(database::error)?;
                // The server may take a moment to end the session.
                loop {
                    sqlx::query("SELECT n FROM t")
                        .execute(&mut **tx)
                        .await
                        .map_err(database::error)?;
                }
                #[allow(unreachable_code)]
                Ok::<_, Error>(String::new())
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.is_retryable());
        one_line(&error);
        drop(tx);
        let mut tx = bed.pool.begin().await.unwrap();
        lock_in_timeout(&mut tx, "a", Duration::from_secs(20)).await.unwrap();
        let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("done".into())).await;
        assert_eq!(ran.unwrap(), Ran::First("done".into()));
        assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);
    }

    // F67
    /// The result is neither success nor a stale token, but a transaction that must be repeated.
    #[tokio::test]
    async fn fence_check_that_cannot_be_serialized_is_a_conflict() {
        let bed = bed().await;
        for (n, level) in [(10, "REPEATABLE READ"), (20, "SERIALIZABLE")] {
            let begin = async || {
                let mut tx = bed.pool.begin().await.unwrap();
                let set = format!("SET TRANSACTION ISOLATION LEVEL {level}");
                sqlx::query(sqlx::AssertSqlSafe(set)).execute(&mut *tx).await.unwrap();
                tx
            };
            let mut ours = begin().await;
            sqlx::query("SELECT n FROM t").execute(&mut *ours).await.unwrap();
            let mut theirs = begin().await;
            check(&mut theirs, "r", token(n)).await.unwrap();
            theirs.commit().await.unwrap();
            let error = check(&mut ours, "r", token(n + 1)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            drop(ours);
            let mut again = begin().await;
            check(&mut again, "r", token(n + 1)).await.unwrap();
            again.commit().await.unwrap();
            let mut late = begin().await;
            let error = check(&mut late, "r", token(n)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        }
    }

    // F35
    /// An outcome that the database refuses to store is left out, and the work is not repeated.
    #[tokio::test]
    async fn refused_outcome_is_omitted_and_work_is_not_repeated() {
        let bed = bed().await;
        let refuse = "ALTER TABLE leasehold_once ADD CHECK (outcome <> 'refused')";
        sqlx::query(refuse).execute(&bed.pool).await.unwrap();
        let paid = AtomicU32::new(0);
        let pay = async || {
            let work = |_| async {
                paid.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Error>("refused".to_owned())
            };
            once("k").run(&bed.pool, work).await
        };
        assert_eq!(pay().await.unwrap(), Ran::First("refused".into()));
        for _ in 0..2 {
            let error = pay().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            one_line(&error);
        }
        assert_eq!(paid.load(Ordering::SeqCst), 1);
    }

    // F39
    /// Types for which PostgreSQL accepts no bound text.
    #[tokio::test]
    async fn keys_and_columns_of_postgres_types_are_supported() {
        use leasehold::database::Value;
        let bed = bed().await;
        let table = "CREATE TABLE u (id uuid PRIMARY KEY, at timestamptz, ok bool, doc jsonb, \
                     price numeric(10, 2), version bigint NOT NULL, token bigint)";
        sqlx::query(table).execute(&bed.pool).await.unwrap();
        let id = "7f1c7a3e-7ac5-4d44-93a8-2f6c5c3f1b11";
        let insert = format!("INSERT INTO u (id, version) VALUES ('{id}', 1)");
        sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&bed.pool).await.unwrap();
        let key = || Value::typed("uuid", id);
        let columns = [
            ("at", Value::typed("timestamptz", "2026-01-02 03:04:05+00")),
            ("ok", true.into()),
            ("doc", Value::typed("jsonb", r#"{"a": [1, 2]}"#)),
            ("price", Value::typed("numeric", "12.50")),
        ];
        let versioned = Versioned::new("u", "id", "version");
        let mut tx = bed.pool.begin().await.unwrap();
        assert_eq!(versioned.update(&mut tx, key(), 1, &columns).await.unwrap(), 2);
        let error = versioned.update(&mut tx, key(), 1, &columns).await.unwrap_err();
        assert_eq!(error.stale_version().unwrap().found, Some(2), "{error}");
        assert_eq!(versioned.version(&mut *tx, key()).await.unwrap(), Some(2));
        let fence = TokenColumn::new("u", "id", "token");
        assert!(fence.write(&mut *tx, key(), token(5), &columns).await.unwrap());
        let error = fence.write(&mut *tx, key(), token(4), &columns).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        let all = "SELECT at = '2026-01-02 03:04:05+00' AND ok AND doc->'a'->>1 = '2' \
                   AND price = 12.50 FROM u";
        let right: bool = sqlx::query_scalar(all).fetch_one(&mut *tx).await.unwrap();
        assert!(right);
        // A type's name must be a plain name.
        let bad = Value::typed("uuid) OR (1=1", id);
        let error = versioned.update(&mut tx, bad, 2, &[]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }

    // R23
    /// The danger of a lock that is only read: it would be granted although the snapshot is stale.
    #[tokio::test]
    async fn a_stale_snapshot_never_gets_the_lock() {
        let bed = bed().await;
        let mut holder = bed.pool.begin().await.unwrap();
        lock_in(&mut holder, "a").await.unwrap();
        holder.commit().await.unwrap();

        let mut holder = bed.pool.begin().await.unwrap();
        let mut late = bed.pool.begin().await.unwrap();
        sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            .execute(&mut *late)
            .await
            .unwrap();
        sqlx::query("SELECT n FROM t").execute(&mut *late).await.unwrap();
        lock_in(&mut holder, "a").await.unwrap();
        sqlx::query("UPDATE t SET n = 1").execute(&mut *holder).await.unwrap();
        holder.commit().await.unwrap();
        let error = lock_in(&mut late, "a").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.is_retryable());
        one_line(&error);
    }
}

mod mariadb {
    use super::*;

    type Db = sqlx::MySql;
    const DIALECT: Dialect = Dialect::Mysql;
    /// Returns how long a statement waits for a lock.
    const WAIT_IS: &str = "SELECT CAST(@@SESSION.innodb_lock_wait_timeout AS CHAR)";
    const IMPATIENT: &str = "SET SESSION innodb_lock_wait_timeout = 1";
    const LOCKS_ROWS: bool = true;

    async fn bed() -> Bed<Db> {
        let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(12);
        bed!(options.connect(&testbed::mariadb().database()).await.unwrap(), None)
    }

    include!("transactions/cases.rs");

    // R26, R23
    /// The session is killed in the middle of the work. Key, lock and write are rolled back with
    /// it.
    #[tokio::test]
    async fn killed_session_rolls_back_key_lock_and_write() {
        let bed = bed().await;
        let mut tx = bed.pool.begin().await.unwrap();
        lock_in(&mut tx, "a").await.unwrap();
        let pool = bed.pool.clone();
        let error = once("k")
            .run_in(&mut tx, async |tx| {
                sqlx::query("UPDATE t SET n = n + 1")
                    .execute(&mut **tx)
                    .await
                    .map_err(database::error)?;
                let id: u64 = sqlx::query_scalar("SELECT CONNECTION_ID()")
                    .fetch_one(&mut **tx)
                    .await
                    .map_err(database::error)?;
                let kill = format!("KILL {id}");
                sqlx::query(sqlx::AssertSqlSafe(kill))
                    .execute(&pool)
                    .await
                    .map_err(database::error)?;
                // The server may take a moment to end the session.
                loop {
                    sqlx::query("SELECT n FROM t")
                        .execute(&mut **tx)
                        .await
                        .map_err(database::error)?;
                }
                #[allow(unreachable_code)]
                Ok::<_, Error>(String::new())
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.is_retryable());
        one_line(&error);
        drop(tx);
        let mut tx = bed.pool.begin().await.unwrap();
        lock_in_timeout(&mut tx, "a", Duration::from_secs(20)).await.unwrap();
        let ran = once("k").run_in(&mut tx, async |_| Ok::<_, Error>("done".into())).await;
        assert_eq!(ran.unwrap(), Ran::First("done".into()));
        assert_eq!(number(&mut tx, "SELECT n FROM t").await, 0);
    }

    // R52
    /// Shows what `FOR UPDATE` without an index does, which `lock_in` refuses to do.
    #[tokio::test]
    async fn row_lock_without_an_index_locks_the_whole_table() {
        let bed = bed().await;
        sqlx::query("INSERT INTO t VALUES (2, 7, 0, NULL)").execute(&bed.pool).await.unwrap();
        let mut one = bed.pool.begin().await.unwrap();
        let mut other = bed.pool.begin().await.unwrap();
        sqlx::query("SELECT * FROM t WHERE n = 0 FOR UPDATE").execute(&mut *one).await.unwrap();
        sqlx::query(IMPATIENT).execute(&mut *other).await.unwrap();
        let error = sqlx::query("SELECT * FROM t WHERE n = 7 FOR UPDATE")
            .execute(&mut *other)
            .await
            .unwrap_err();
        assert_eq!(database::error(error).kind(), ErrorKind::Timeout);
    }

    // R52
    #[tokio::test]
    async fn an_engine_without_row_locks_is_refused() {
        let bed = bed().await;
        sqlx::query("ALTER TABLE leasehold_row_lock ENGINE = MyISAM")
            .execute(&bed.pool)
            .await
            .unwrap();
        let mut tx = bed.pool.begin().await.unwrap();
        let error = lock_in(&mut tx, "a").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
}

mod sqlite {
    use super::*;

    type Db = sqlx::Sqlite;
    const DIALECT: Dialect = Dialect::Sqlite;
    /// Returns how long a statement waits for a lock.
    const WAIT_IS: &str = "SELECT CAST(timeout AS TEXT) FROM pragma_busy_timeout";
    const IMPATIENT: &str = "PRAGMA busy_timeout = 50";
    /// There is one write lock for the whole file.
    const LOCKS_ROWS: bool = false;

    async fn bed() -> Bed<Db> {
        let directory = tempfile::tempdir().unwrap();
        let options = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(directory.path().join("db"))
            .create_if_missing(true)
            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
            .synchronous(sqlx::sqlite::SqliteSynchronous::Off)
            .busy_timeout(Duration::from_secs(60));
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(12);
        bed!(pool.connect_with(options).await.unwrap(), Some(directory))
    }

    include!("transactions/cases.rs");

    // R23, S60
    #[tokio::test]
    async fn stale_snapshot_never_gets_a_lock_in_the_callers_transaction() {
        let bed = bed().await;
        let mut late = bed.pool.begin().await.unwrap();
        sqlx::query("SELECT n FROM t").fetch_one(&mut *late).await.unwrap();
        sqlx::query("UPDATE t SET n = 1").execute(&bed.pool).await.unwrap();
        let error = lock_in(&mut late, "a").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    }
}
