//! Compares four statements that are common against duplicate writes with `once`. It shows which
//! duplicates each one lets through, with 32 concurrent writers on real databases.
//!
//! ```sh
//! cargo run -p leasehold-transactions --features sqlite,postgres,mysql --example four_statements
//! cargo run … --example four_statements -- postgres://user@host/db mysql://user@host/db sqlite:file
//! ```
//!
//! Without URLs, the example starts private, temporary servers from the installed packages. In each
//! database it creates and drops a table `four_statements`, and creates leasehold's own tables.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use leasehold::once::Ran;
use leasehold::{Error, database, once};
use sqlx::{AssertSqlSafe, Connection as _, Pool};
use tokio::sync::Barrier;

const WRITERS: usize = 32;
const ROUNDS: usize = 20;
/// Fewer rounds for SQLite, which allows one writer at a time. So it is slow, and the rounds vary
/// little.
const ROUNDS_OF_SQLITE: usize = 4;

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The operations of a database that the experiment uses.
trait Run: Clone + Send + Sync + 'static {
    /// The type of an ID that the database generates.
    const ID: &'static str;
    /// Runs a statement in a transaction, and returns how many rows were written according to the
    /// database.
    fn exec(&self, sql: String) -> Answer<'_, Result<u64, Error>> {
        self.exec_after("", sql)
    }
    /// Like `exec`, but first runs another statement that prepares for the
    /// transaction.
    fn exec_after(&self, first: &'static str, sql: String) -> Answer<'_, Result<u64, Error>>;
    /// Returns the number that a query selects, or `None` if it selects no row.
    fn number(&self, sql: String) -> Answer<'_, Option<i64>>;
    /// Runs a statement once for this key. Returns 1 for the first call and 0 for a duplicate.
    fn once(&self, key: String, sql: String) -> Answer<'_, Result<u64, Error>>;
    /// Creates leasehold's tables.
    fn install(&self) -> Answer<'_, ()>;
}

macro_rules! run {
    ($db:ty, $id:literal) => {
        impl Run for Pool<$db> {
            const ID: &'static str = $id;

            fn exec_after(
                &self,
                first: &'static str,
                sql: String,
            ) -> Answer<'_, Result<u64, Error>> {
                Box::pin(async move {
                    let mut connection = self.acquire().await.map_err(database::error)?;
                    if !first.is_empty() {
                        sqlx::query(first)
                            .execute(&mut *connection)
                            .await
                            .map_err(database::error)?;
                    }
                    let mut tx = connection.begin().await.map_err(database::error)?;
                    let rows = sqlx::query(AssertSqlSafe(sql))
                        .execute(&mut *tx)
                        .await
                        .map_err(database::error)?;
                    // Like a real transaction, it runs another statement before it commits.
                    sqlx::query("SELECT 1").execute(&mut *tx).await.map_err(database::error)?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(rows.rows_affected())
                })
            }

            fn number(&self, sql: String) -> Answer<'_, Option<i64>> {
                Box::pin(async move {
                    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_optional(self).await.expect("read")
                })
            }

            fn once(&self, key: String, sql: String) -> Answer<'_, Result<u64, Error>> {
                Box::pin(async move {
                    let mut tx = self.begin().await.map_err(database::error)?;
                    let work = async |tx: &mut sqlx::Transaction<'_, $db>| {
                        sqlx::query(AssertSqlSafe(sql))
                            .execute(&mut **tx)
                            .await
                            .map_err(database::error)?;
                        Ok::<_, Error>("written".to_owned())
                    };
                    let ran = once(key).run_in(&mut tx, work).await?;
                    tx.commit().await.map_err(database::error)?;
                    Ok(match ran {
                        Ran::First(_) => 1,
                        Ran::Duplicate(_) => 0,
                    })
                })
            }

            fn install(&self) -> Answer<'_, ()> {
                Box::pin(async move {
                    database::install(self).await.expect("leasehold's tables");
                    // Deletes the keys of an earlier run of this example.
                    let forget = "DELETE FROM leasehold_once WHERE name LIKE 'four:%'";
                    sqlx::query(forget).execute(self).await.expect("forget");
                })
            }
        }
    };
}
run!(sqlx::Sqlite, "INTEGER PRIMARY KEY AUTOINCREMENT");
run!(sqlx::Postgres, "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY");
run!(sqlx::MySql, "BIGINT AUTO_INCREMENT PRIMARY KEY");

/// One way to write. `{k}` is the request's key, and `{a}` is the amount.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    sql: &'static str,
    /// Whether the request's key has a unique index. `WHERE NOT EXISTS` is common without such an
    /// index, for example if rows that are only marked as deleted may have the same key.
    unique: bool,
    once: bool,
    /// The statement that runs before the transaction, or an empty text.
    first: &'static str,
}

const fn way(name: &'static str, sql: &'static str) -> Way {
    Way { name, sql, unique: true, once: false, first: "" }
}

const ONCE: Way = Way {
    name: "once(key).run_in",
    sql: "INSERT INTO four_statements (req, amount) VALUES ('{k}', {a})",
    unique: false,
    once: true,
    first: "",
};
const NOT_EXISTS: Way = Way {
    name: "INSERT … SELECT … WHERE NOT EXISTS",
    sql: "INSERT INTO four_statements (req, amount) SELECT '{k}', {a} FROM (SELECT 1 AS one) x \
          WHERE NOT EXISTS (SELECT 1 FROM four_statements WHERE req = '{k}' AND deleted = 0)",
    unique: false,
    once: false,
    first: "",
};
const NOT_EXISTS_READ_COMMITTED: Way = Way {
    name: "… the same at READ COMMITTED",
    first: "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ..NOT_EXISTS
};
const INSERT_IGNORE: Way =
    way("INSERT IGNORE", "INSERT IGNORE INTO four_statements (req, amount) VALUES ('{k}', {a})");
const REPLACE: Way =
    way("REPLACE INTO", "REPLACE INTO four_statements (req, amount) VALUES ('{k}', {a})");
const ON_CONFLICT: Way = way(
    "INSERT … ON CONFLICT DO UPDATE",
    "INSERT INTO four_statements (req, amount) VALUES ('{k}', {a}) \
     ON CONFLICT (req) DO UPDATE SET amount = EXCLUDED.amount",
);

const SQLITE: &[Way] = &[
    way(
        "INSERT OR IGNORE",
        "INSERT OR IGNORE INTO four_statements (req, amount) VALUES ('{k}', {a})",
    ),
    ON_CONFLICT,
    NOT_EXISTS,
    REPLACE,
    ONCE,
];
const POSTGRES: &[Way] = &[
    way(
        "INSERT … ON CONFLICT DO NOTHING",
        "INSERT INTO four_statements (req, amount) VALUES ('{k}', {a}) ON CONFLICT DO NOTHING",
    ),
    ON_CONFLICT,
    NOT_EXISTS,
    ONCE,
];
const MYSQL: &[Way] = &[
    INSERT_IGNORE,
    way(
        "INSERT … ON DUPLICATE KEY UPDATE",
        "INSERT INTO four_statements (req, amount) VALUES ('{k}', {a}) \
         ON DUPLICATE KEY UPDATE amount = {a}",
    ),
    NOT_EXISTS,
    NOT_EXISTS_READ_COMMITTED,
    REPLACE,
    ONCE,
];

async fn write<R: Run>(db: &R, way: Way, key: &str, amount: &str) -> Result<u64, Error> {
    let sql = way.sql.replace("{k}", key).replace("{a}", amount);
    if way.once {
        db.once(format!("four:{key}"), sql).await
    } else {
        db.exec_after(way.first, sql).await
    }
}

async fn count<R: Run>(db: &R, which: &str) -> i64 {
    let sql = format!("SELECT COUNT(*) FROM four_statements WHERE {which}");
    db.number(sql).await.unwrap_or(0)
}

/// The sums over all rounds, in each of which 32 writers use one key.
#[derive(Default)]
struct Race {
    duplicates: i64,
    firsts: u64,
    overwritten: i64,
    deadlocks: u64,
    errors: u64,
}

async fn race<R: Run>(db: &R, way: Way, rounds: usize) -> Race {
    let mut race = Race::default();
    for round in 0..rounds {
        let key = format!("race{round}");
        let start = Arc::new(Barrier::new(WRITERS));
        let writers: Vec<_> = (0..WRITERS)
            .map(|i| {
                let (db, key, start) = (db.clone(), key.clone(), start.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    write(&db, way, &key, &(i + 1).to_string()).await.map(|rows| (i + 1, rows))
                })
            })
            .collect();
        let mut first = Vec::new();
        for writer in writers {
            match writer.await.expect("a writer panicked") {
                Ok((i, 1)) => first.push(i),
                Ok(_) => {}
                Err(e) if e.kind() == leasehold::ErrorKind::Conflict => race.deadlocks += 1,
                Err(_) => race.errors += 1,
            }
        }
        race.firsts += first.len() as u64;
        race.duplicates += count(db, &format!("req = '{key}'")).await - 1;
        // Exactly one writer counted as the first, but its amount may have been overwritten.
        if let [only] = first[..] {
            race.overwritten += 1 - count(db, &format!("req = '{key}' AND amount = {only}")).await;
        }
    }
    race
}

/// Writes NULL to a column that does not allow it, and returns whether the error is hidden.
async fn bad_value<R: Run>(db: &R, way: Way) -> &'static str {
    let reply = write(db, way, "bad", "NULL").await;
    let there = count(db, "req = 'bad'").await;
    match (reply, there) {
        (Err(_), _) => "error",
        (Ok(_), 0) => "HIDDEN, lost",
        (Ok(_), _) => "HIDDEN, wrong row",
    }
}

/// Repeats a request, and returns whether the row keeps its ID.
async fn row_id<R: Run>(db: &R, way: Way) -> &'static str {
    let id = || db.number("SELECT MAX(id) FROM four_statements WHERE req = 'id'".into());
    let _ = write(db, way, "id", "1").await;
    let before = id().await;
    let _ = write(db, way, "id", "1").await;
    if before == id().await { "kept" } else { "CHANGED" }
}

/// Repeats a request whose row was marked as deleted, and returns what the repetition does.
async fn deleted<R: Run>(db: &R, way: Way) -> &'static str {
    let _ = write(db, way, "gone", "1").await;
    db.exec("UPDATE four_statements SET deleted = 1 WHERE req = 'gone'".into())
        .await
        .expect("delete logically");
    let reply = write(db, way, "gone", "2").await;
    let rows = count(db, "req = 'gone'").await;
    let live = count(db, "req = 'gone' AND deleted = 0").await;
    let changed = count(db, "req = 'gone' AND deleted = 1 AND amount = 2").await;
    match (reply, rows, live, changed) {
        (Err(_), ..) => "error",
        (_, _, 0, 1) => "WRITTEN TO DELETED",
        (_, 1, 0, _) => "nothing",
        (_, 1, 1, _) => "DONE AGAIN, replaced",
        _ => "DONE AGAIN, 2 rows",
    }
}

async fn compare<R: Run>(title: &str, db: R, ways: &[Way], rounds: usize) {
    db.install().await;
    println!("\n{title}: {WRITERS} writers of one key at once, {rounds} times");
    println!(
        "  {:<36} {:>5} {:>9} {:>11} {:>9} {:>6}  {:<17} {:<8} after a logical delete",
        "", "dupl.", "\"first\"", "overwritten", "deadlocks", "errors", "NULL value", "row id"
    );
    for &way in ways {
        let drop = "DROP TABLE IF EXISTS four_statements";
        db.exec(drop.into()).await.expect("drop");
        let create = format!(
            "CREATE TABLE four_statements (id {}, req VARCHAR(40) NOT NULL{}, \
             amount BIGINT NOT NULL, deleted INT NOT NULL DEFAULT 0)",
            R::ID,
            if way.unique { " UNIQUE" } else { "" }
        );
        db.exec(create).await.expect("create");
        if !way.unique {
            let index = "CREATE INDEX four_statements_req ON four_statements (req)";
            db.exec(index.into()).await.expect("index");
        }
        let race = race(&db, way, rounds).await;
        let (bad, id, deleted) =
            (bad_value(&db, way).await, row_id(&db, way).await, deleted(&db, way).await);
        let Race { duplicates, firsts, overwritten, deadlocks, errors } = &race;
        println!(
            "  {:<36} {duplicates:>5} {:>9} {overwritten:>11} {deadlocks:>9} {errors:>6}  \
             {bad:<17} {id:<8} {deleted}",
            way.name,
            format!("{firsts}/{rounds}"),
        );
        db.exec(drop.into()).await.expect("drop");
        shows(way, &race, rounds, bad, id);
    }
}

/// Asserts the results that do not depend on timing.
fn shows(way: Way, race: &Race, rounds: usize, bad: &str, id: &str) {
    if way.once {
        let found = (race.duplicates, race.firsts, race.overwritten, bad, id);
        assert_eq!(found, (0, rounds as u64, 0, "error", "kept"), "{}", way.name);
    }
    if way.name == REPLACE.name {
        assert_eq!((race.duplicates, id), (0, "CHANGED"), "{}", way.name);
    }
    if way.name == INSERT_IGNORE.name {
        assert!(race.duplicates == 0 && bad.starts_with("HIDDEN"), "{}: {bad}", way.name);
    }
}

async fn at(url: &str) -> Result<(), Error> {
    let most = WRITERS as u32 + 1;
    if url.starts_with("sqlite:") {
        let options: sqlx::sqlite::SqliteConnectOptions = url.parse().map_err(database::error)?;
        let options = options
            .create_if_missing(true)
            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
            // The example tests races, not power cuts.
            .synchronous(sqlx::sqlite::SqliteSynchronous::Off)
            .busy_timeout(std::time::Duration::from_secs(60));
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(most);
        compare(
            "SQLite",
            pool.connect_with(options).await.map_err(database::error)?,
            SQLITE,
            ROUNDS_OF_SQLITE,
        )
        .await;
    } else if url.starts_with("postgres") {
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(most);
        compare("PostgreSQL", pool.connect(url).await.map_err(database::error)?, POSTGRES, ROUNDS)
            .await;
    } else {
        // Some of these statements wait unsuccessfully for the whole timeout, which is 50 s by
        // default.
        let pool =
            sqlx::mysql::MySqlPoolOptions::new().max_connections(most).after_connect(|c, _| {
                Box::pin(async move {
                    sqlx::query("SET SESSION innodb_lock_wait_timeout = 3")
                        .execute(c)
                        .await
                        .map(drop)
                })
            });
        compare("MySQL/MariaDB", pool.connect(url).await.map_err(database::error)?, MYSQL, ROUNDS)
            .await;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut urls: Vec<String> = std::env::args().skip(1).collect();
    let directory = tempfile::tempdir().expect("a temporary directory");
    if urls.is_empty() {
        urls.push(format!("sqlite://{}", directory.path().join("db").display()));
        urls.push(testbed::postgres().database());
        urls.push(testbed::mariadb().database());
    }
    for url in urls {
        at(&url).await?;
    }
    println!(
        "\ndupl.: surplus rows. \"first\": writers for which the database reported 1 new row, of \
         the number of rounds.\noverwritten: rounds with one first writer whose amount was \
         missing afterwards.\nafter a logical delete: what a repetition of the request does. \
         `once` answers each duplicate\nwith the stored outcome, and takes no unique index of the \
         caller's."
    );
    Ok(())
}
