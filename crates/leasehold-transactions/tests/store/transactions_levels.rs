//! `lock_in`, `versioned`, `once` and `fence::sql` at every isolation level.

/// The cases on one database.
macro_rules! transactions {
    ($module:ident, $db:ty, $options:ty, $url:expr, $level:expr) => {
        mod $module {
            use std::time::Duration;

            use leasehold::fence::sql::{TokenColumn, check};
            use leasehold::once::{Attempt, clean_up};
            use leasehold::versioned::{Retry, Versioned, retry};
            use leasehold::{Error, ErrorKind, FencingToken, database, once};
            use sqlx::{Acquire, AssertSqlSafe};

            type Db = $db;

            async fn pool() -> sqlx::Pool<Db> {
                let pool = <$options>::new().max_connections(12).connect(&$url).await.unwrap();
                database::install(&pool).await.unwrap();
                for sql in [
                    "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, \
                     version BIGINT NOT NULL, token BIGINT)",
                    "CREATE TABLE journal (id BIGINT NOT NULL PRIMARY KEY)",
                    "INSERT INTO t VALUES (1, 0, 0, NULL)",
                ] {
                    sqlx::query(sql).execute(&pool).await.unwrap();
                }
                pool
            }

            async fn at_level(c: &mut <Db as sqlx::Database>::Connection, level: &str) {
                sqlx::query(AssertSqlSafe(format!("{} {level}", $level))).execute(c).await.unwrap();
            }

            include!("transactions_levels/cases.rs");
        }
    };
}

transactions!(
    in_postgres,
    sqlx::Postgres,
    sqlx::postgres::PgPoolOptions,
    testbed::postgres().database(),
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL"
);
transactions!(
    in_mariadb,
    sqlx::MySql,
    sqlx::mysql::MySqlPoolOptions,
    testbed::mariadb().database(),
    "SET SESSION TRANSACTION ISOLATION LEVEL"
);
