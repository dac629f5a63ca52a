//! The same tests of `lock_in`, `once`, `versioned` and `fence::sql` for the transactions of every
//! driver that a feature enables, on real databases.

#[macro_use]
mod cases;

use cases::*;
use leasehold::once::clean_up;

async fn postgres() -> String {
    let url = testbed::postgres().database();
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    prepare(&pool).await;
    pool.close().await;
    url
}

async fn mariadb() -> String {
    let url = testbed::mariadb().database();
    let pool = sqlx::MySqlPool::connect(&url).await.unwrap();
    prepare(&pool).await;
    pool.close().await;
    url
}

/// Checks operations outside of transactions, if the driver has a pool.
async fn outside(pool: &impl database::Pool) {
    database::install(pool).await.unwrap();
    for time in 1..=2 {
        let work = |attempt: once::Attempt| async move { Ok::<_, Error>(attempt.to_string()) };
        let ran = once("mail").run(pool, work).await.unwrap();
        assert_eq!(ran.is_first(), time == 1);
        assert_eq!(ran.into_outcome(), "attempt 1");
    }
    let lease = Duration::from_secs(2);
    let slow = once("slow").lease(lease).run(pool, |_| async {
        tokio::time::sleep(lease * 3 / 2).await; // the lease is renewed during the sleep
        Ok::<_, Error>("slow".into())
    });
    assert_eq!(slow.await.unwrap(), Ran::First("slow".into()));
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(clean_up(pool, Duration::from_secs(3600)).await.unwrap(), 0);
    assert_eq!(clean_up(pool, Duration::ZERO).await.unwrap(), 2);
}

mod tokio_postgres {
    use super::*;
    use ::tokio_postgres::{Client, Error as Failed, NoTls, Transaction};

    const DIALECT: Dialect = Dialect::Postgres;

    async fn bed() -> String {
        postgres().await
    }

    async fn client(url: &str) -> Client {
        let (client, connection) = ::tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    async fn begin(client: &mut Client) -> Transaction<'_> {
        client.transaction().await.unwrap()
    }

    async fn commit(tx: Transaction<'_>) -> Result<(), Failed> {
        tx.commit().await
    }

    async fn rollback(tx: Transaction<'_>) {
        tx.rollback().await.unwrap();
    }

    cases!();

    #[tokio::test]
    async fn once_works_outside_of_transactions() {
        outside(&std::sync::Arc::new(client(&bed().await).await)).await;
    }

    /// PostgreSQL infers the type of an untyped parameter, and does not accept text for a uuid.
    #[tokio::test]
    async fn database_specific_types_are_supported() {
        let mut client = client(&bed().await).await;
        let table = "CREATE TABLE u (id uuid PRIMARY KEY, small int, doc jsonb, price numeric, \
                     raw bytea, ok bool, part float4, version int NOT NULL)";
        let mut tx = begin(&mut client).await;
        tx.batch(table).await.unwrap();
        let id = "7f1c7a3e-7ac5-4d44-93a8-2f6c5c3f1b11";
        tx.batch(&format!("INSERT INTO u (id, version) VALUES ('{id}', 1)")).await.unwrap();
        let columns = [
            ("small", 3.into()),
            ("doc", Value::typed("jsonb", r#"{"a": [1, 2]}"#)),
            ("price", Value::typed("numeric", "12.50")),
            ("raw", Value::from(&[0u8, 255][..])),
            ("ok", true.into()),
            ("part", 0.5.into()),
        ];
        let table = Versioned::new("u", "id", "version");
        let key = || Value::typed("uuid", id);
        assert_eq!(table.update(&mut tx, key(), 1, &columns).await.unwrap(), 2);
        assert_eq!(table.version(&mut tx, key()).await.unwrap(), Some(2));
        let right = "SELECT CAST(small = 3 AND doc->'a'->>1 = '2' AND price = 12.5 \
                     AND raw = '\\x00ff' AND ok AND part = 0.5 AS int)::bigint FROM u";
        assert_eq!(number(&mut tx, right).await, 1);
        rollback(tx).await;
    }
}

/// Defines the module for `sqlx` before 0.9.
macro_rules! sqlx_08 {
    ($dialect:ident, $database:ident, $bed:ident) => {
        use super::*;
        use ::sqlx_08::{Error as Failed, Pool, Transaction, $database};

        const DIALECT: Dialect = Dialect::$dialect;

        async fn bed() -> String {
            $bed().await
        }

        async fn client(url: &str) -> Pool<$database> {
            Pool::connect(url).await.unwrap()
        }

        async fn begin(pool: &mut Pool<$database>) -> Transaction<'static, $database> {
            pool.begin().await.unwrap()
        }

        async fn commit(tx: Transaction<'_, $database>) -> Result<(), Failed> {
            tx.commit().await
        }

        async fn rollback(tx: Transaction<'_, $database>) {
            tx.rollback().await.unwrap();
        }

        cases!();

        #[tokio::test]
        async fn once_works_outside_of_transactions() {
            outside(&client(&bed().await).await).await;
        }
    };
}

mod sqlx_08_postgres {
    sqlx_08!(Postgres, Postgres, postgres);
}

mod sqlx_08_mysql {
    sqlx_08!(Mysql, MySql, mariadb);
}

/// Defines the module for `sea-orm` on one of its databases.
macro_rules! sea_orm {
    ($dialect:ident, $bed:ident, $of:ty) => {
        use super::*;
        use ::sea_orm::{ConnectOptions, Database, DatabaseConnection, DatabaseTransaction};
        use ::sea_orm::{DbErr, TransactionTrait};

        const DIALECT: Dialect = Dialect::$dialect;

        async fn bed() -> $of {
            $bed().await
        }

        async fn client(bed: &$of) -> DatabaseConnection {
            let url: &str = bed.as_ref();
            let mut options = ConnectOptions::new(url);
            options.max_connections(1);
            Database::connect(options).await.unwrap()
        }

        async fn begin(client: &mut DatabaseConnection) -> DatabaseTransaction {
            client.begin().await.unwrap()
        }

        async fn commit(tx: DatabaseTransaction) -> Result<(), DbErr> {
            tx.commit().await
        }

        async fn rollback(tx: DatabaseTransaction) {
            tx.rollback().await.unwrap();
        }

        cases!();
    };
}

mod sea_orm_postgres {
    sea_orm!(Postgres, postgres, String);

    #[tokio::test]
    async fn once_works_outside_of_transactions() {
        let connection = client(&bed().await).await;
        outside(connection.get_postgres_connection_pool()).await;
    }
}

mod sea_orm_mysql {
    sea_orm!(Mysql, mariadb, String);
}

mod sea_orm_sqlite {
    /// A database in a file, which is deleted with its directory.
    struct File(String, tempfile::TempDir);

    impl AsRef<str> for File {
        fn as_ref(&self) -> &str {
            assert!(self.1.path().exists());
            &self.0
        }
    }

    async fn file() -> File {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}?mode=rwc", directory.path().join("db").display());
        let pool = sqlx::SqlitePool::connect(&url).await.unwrap();
        sqlx::query("PRAGMA journal_mode = WAL").execute(&pool).await.unwrap();
        prepare(&pool).await;
        pool.close().await;
        File(url, directory)
    }

    sea_orm!(Sqlite, file, File);
}
