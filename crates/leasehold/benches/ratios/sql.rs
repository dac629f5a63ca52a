//! The SQL stores beside what each database offers by hand, through the same driver.
//!
//! *Pair*: a unique row that is inserted and deleted, which is the lock that people write
//! themselves (no lease, no queue, no token), and the database's own session lock, which pins a
//! connection for as long as it is held. On a server that does not wait for its disk, so that what
//! is compared is the work and not the disk, and on one that does.
//!
//! *Contention*: the contenders are spread over eight clients, each with connections and a thread
//! of its own, as on eight machines; a hand-over between two clients needs a notification or a poll.
//! All stand in the queue before the first hand-over is measured. The session lock beside it, and the
//! row by hand, have a connection for each contender, so that a thousand are too many for them. Who
//! finds the row by hand taken asks again after 10 ms, as people do.

use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold::Leasehold;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, MySqlConnection, PgConnection, SqliteConnection};
use testbed::{MariaDb, MySql, Postgres, Setup};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::contention::{self, Outcome, Window};
use crate::measure::{Effort, Result, Subject, alternate, now};
use crate::pair::{self, time_pairs};
use crate::queued;
use crate::scratch::Scratch;

/// With more contenders than this the session lock would run out of connections.
const CONNECTIONS: usize = 100;
const CLIENTS: usize = 8;

fn contenders(effort: Effort) -> [usize; 3] {
    [8, 32, effort.crowd]
}

/// Getting so many into the queue, and out of it again, takes far longer than the window.
fn effort_of(n: usize, effort: Effort) -> Effort {
    Effort { rounds: if n > CONNECTIONS { effort.rounds.min(3) } else { effort.rounds }, ..effort }
}

const TABLE: &str = "CREATE TABLE byhand (name VARCHAR(200) PRIMARY KEY, owner VARCHAR(40) \
                     NOT NULL, expires BIGINT NOT NULL)";

pub(crate) fn sqlite(effort: Effort) -> Result<()> {
    for synchronous in ["off", "full"] {
        let scratch = Scratch::new()?;
        let file = scratch.path().join("locks.db").display().to_string();
        let runtime = pair::runtime()?;
        let url = format!("sqlite:{file}?synchronous={synchronous}");
        let locks = runtime.block_on(leasehold::connect(&url))?;
        let mut byhand = runtime.block_on(SqliteConnection::connect(&file))?;
        let set = format!("PRAGMA synchronous = {synchronous}; {TABLE}");
        runtime.block_on(sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&mut byhand))?;
        let byhand = tokio::sync::Mutex::new(byhand);
        let row = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            let insert = sqlx::query("INSERT INTO byhand VALUES (?, ?, ?)");
            insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
            let delete = sqlx::query("DELETE FROM byhand WHERE name = ? AND owner = ?");
            delete.bind("pair").bind("me").execute(&mut *c).await?;
            Ok(())
        });
        let mut subjects = vec![Subject::new("insert + delete of a row", row)];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("sqlite:, synchronous={synchronous}, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 1);
    }
    for n in contenders(effort) {
        let effort = effort_of(n, effort);
        let scratch = Scratch::new()?;
        let url = format!("sqlite:{}", scratch.path().join("locks.db").display());
        let bed = Bed::new(&url, n, || None)?;
        let runtime = &bed.runtime;
        let options = SqliteConnectOptions::new()
            .filename(scratch.path().join("byhand.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(60));
        let mut first = runtime.block_on(options.connect())?;
        runtime.block_on(sqlx::raw_sql(TABLE).execute(&mut first))?;
        let connect = || async { Ok(options.connect().await?) };
        let sessions = runtime.block_on(sessions(n, connect))?;
        let mut subjects = Vec::new();
        if !sessions.is_empty() {
            let row = || {
                let turns = sessions.iter().map(|c| turn_of(c.clone(), sqlite_row));
                runtime.block_on(contend(effort, turns.collect()))
            };
            subjects.push(Subject::new("a row, asked every 10 ms", row));
        }
        let raws = subjects.len();
        subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
        contention::show(&format!("sqlite:, {n} contenders"), &alternate(effort, subjects)?, raws);
    }
    Ok(())
}

pub(crate) fn postgres(effort: Effort) -> Result<()> {
    let counting = || {
        let setup = Setup::new().arg("-c").arg("shared_preload_libraries=pg_stat_statements");
        // Those that a procedure runs, too.
        let setup = setup.arg("-c").arg("pg_stat_statements.track=all");
        setup.arg("-c").arg("pg_stat_statements.track_utility=off")
    };
    for (setup, disk) in [(counting().fast(), "without disk"), (counting(), "on disk")] {
        let server = Postgres::with(setup);
        let url = server.database();
        let runtime = pair::runtime()?;
        let locks = runtime.block_on(leasehold::connect(&url))?;
        let byhand = runtime.block_on(PgConnection::connect(&url))?;
        let byhand = tokio::sync::Mutex::new(byhand);
        runtime
            .block_on(async { sqlx::raw_sql(TABLE).execute(&mut *byhand.lock().await).await })?;
        let row = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            let insert = sqlx::query("INSERT INTO byhand VALUES ($1, $2, $3)");
            insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
            let delete = sqlx::query("DELETE FROM byhand WHERE name = $1 AND owner = $2");
            delete.bind("pair").bind("me").execute(&mut *c).await?;
            Ok(())
        });
        let session = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            sqlx::query("SELECT pg_advisory_lock($1)").bind(1_i64).execute(&mut *c).await?;
            sqlx::query("SELECT pg_advisory_unlock($1)").bind(1_i64).execute(&mut *c).await?;
            Ok(())
        });
        let mut subjects = vec![
            Subject::new("insert + delete of a row", row),
            Subject::new("pg_advisory_lock + unlock", session),
        ];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("postgres:, {disk}, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 2);
        if disk != "on disk" {
            continue;
        }
        let admin = server.url("postgres", "", url.rsplit('/').next().unwrap_or_default());
        server.admin(
            url.rsplit('/').next().unwrap_or_default(),
            "CREATE EXTENSION pg_stat_statements",
        );
        for n in contenders(effort) {
            let effort = effort_of(n, effort);
            let bed = Bed::new(&url, n, || Some(Counter::Postgres(admin.clone())))?;
            let runtime = &bed.runtime;
            let connect = || async { Ok(PgConnection::connect(&url).await?) };
            let sessions = runtime.block_on(sessions(n, connect))?;
            let mut subjects = Vec::new();
            if !sessions.is_empty() {
                let bare = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), pg_turn));
                    runtime.block_on(contend(effort, turns.collect()))
                };
                subjects.push(Subject::new("pg_advisory_lock", bare));
                let row = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), pg_row));
                    runtime.block_on(contend(effort, turns.collect()))
                };
                subjects.push(Subject::new("a row, asked every 10 ms", row));
            }
            let raws = subjects.len();
            subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
            let title = format!("postgres:, {n} contenders");
            contention::show(&title, &alternate(effort, subjects)?, raws);
        }
    }
    Ok(())
}

pub(crate) fn mariadb(effort: Effort) -> Result<()> {
    mysqls(effort, "MariaDB", "information_schema", |setup| Box::new(MariaDb::with(setup)))
}

pub(crate) fn mysql(effort: Effort) -> Result<()> {
    mysqls(effort, "MySQL", "performance_schema", MySql::with)
}

/// One of the two, which has its counters in this schema.
fn mysqls<S: Deref<Target = MariaDb>>(
    effort: Effort,
    name: &str,
    counters: &'static str,
    start: impl Fn(Setup) -> S,
) -> Result<()> {
    for (setup, disk) in [(Setup::new().fast(), "without disk"), (Setup::new(), "on disk")] {
        let server = start(setup);
        let url = server.database();
        let runtime = pair::runtime()?;
        let locks = runtime.block_on(leasehold::connect(&url))?;
        let byhand = runtime.block_on(MySqlConnection::connect(&url))?;
        let byhand = tokio::sync::Mutex::new(byhand);
        runtime
            .block_on(async { sqlx::raw_sql(TABLE).execute(&mut *byhand.lock().await).await })?;
        let row = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            let insert = sqlx::query("INSERT INTO byhand VALUES (?, ?, ?)");
            insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
            let delete = sqlx::query("DELETE FROM byhand WHERE name = ? AND owner = ?");
            delete.bind("pair").bind("me").execute(&mut *c).await?;
            Ok(())
        });
        let session = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            sqlx::query("SELECT GET_LOCK(?, 10)").bind("pair").execute(&mut *c).await?;
            sqlx::query("SELECT RELEASE_LOCK(?)").bind("pair").execute(&mut *c).await?;
            Ok(())
        });
        let mut subjects = vec![
            Subject::new("insert + delete of a row", row),
            Subject::new("GET_LOCK + RELEASE_LOCK", session),
        ];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("mysql: ({name}), {disk}, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 2);
        if disk != "on disk" {
            continue;
        }
        let admin = server.url("admin", "admin", "mysql");
        for n in contenders(effort) {
            let effort = effort_of(n, effort);
            let bed = Bed::new(&url, n, || Some(Counter::MariaDb(admin.clone(), counters)))?;
            let runtime = &bed.runtime;
            let connect = || async { Ok(MySqlConnection::connect(&url).await?) };
            let sessions = runtime.block_on(sessions(n, connect))?;
            let mut subjects = Vec::new();
            if !sessions.is_empty() {
                let bare = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), mysql_turn));
                    runtime.block_on(contend(effort, turns.collect()))
                };
                subjects.push(Subject::new("GET_LOCK", bare));
                let row = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), mysql_row));
                    runtime.block_on(contend(effort, turns.collect()))
                };
                subjects.push(Subject::new("a row, asked every 10 ms", row));
            }
            let raws = subjects.len();
            subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
            let title = format!("mysql: ({name}), {n} contenders");
            contention::show(&title, &alternate(effort, subjects)?, raws);
        }
    }
    Ok(())
}

type Shared<C> = Arc<tokio::sync::Mutex<C>>;
type Turning = Pin<Box<dyn Future<Output = Result<u64>> + Send>>;
type Turn = Box<dyn Fn() -> Turning + Send>;

/// A connection for each contender; none if there would be too many.
async fn sessions<C, F: Future<Output = Result<C>>>(
    n: usize,
    connect: impl Fn() -> F,
) -> Result<Vec<Shared<C>>> {
    let mut all = Vec::new();
    for _ in (0..n).filter(|_| n <= CONNECTIONS) {
        all.push(Arc::new(tokio::sync::Mutex::new(connect().await?)));
    }
    Ok(all)
}

fn turn_of<C, F>(connection: Shared<C>, turn: fn(Shared<C>) -> F) -> Turn
where
    C: Send + 'static,
    F: Future<Output = Result<u64>> + Send + 'static,
{
    Box::new(move || Box::pin(turn(connection.clone())))
}

async fn pg_turn(c: Shared<PgConnection>) -> Result<u64> {
    let mut c = c.lock().await;
    sqlx::query("SELECT pg_advisory_lock($1)").bind(2_i64).execute(&mut *c).await?;
    let note = now();
    sqlx::query("SELECT pg_advisory_unlock($1)").bind(2_i64).execute(&mut *c).await?;
    Ok(note)
}

async fn mysql_turn(c: Shared<MySqlConnection>) -> Result<u64> {
    let mut c = c.lock().await;
    sqlx::query("SELECT GET_LOCK(?, 60)").bind("contention").execute(&mut *c).await?;
    let note = now();
    sqlx::query("SELECT RELEASE_LOCK(?)").bind("contention").execute(&mut *c).await?;
    Ok(note)
}

/// How often people look who have a row and nobody to tell them.
const LOOK: Duration = Duration::from_millis(10);

/// Inserts a row, when it is not there, and deletes it again.
macro_rules! row_turn {
    ($turn:ident, $connection:ty, $insert:literal, $delete:literal) => {
        async fn $turn(c: Shared<$connection>) -> Result<u64> {
            let mut c = c.lock().await;
            loop {
                let insert = sqlx::query($insert).bind("contention").bind("me").bind(1_i64);
                match insert.execute(&mut *c).await {
                    Ok(_) => break,
                    Err(error) if is_taken(&error) => tokio::time::sleep(LOOK).await,
                    Err(error) => return Err(error.into()),
                }
            }
            let note = now();
            // A deadlock with somebody who inserts; the row is ours, and stays until it is deleted.
            loop {
                let delete = sqlx::query($delete).bind("contention").bind("me");
                match delete.execute(&mut *c).await {
                    Ok(_) => return Ok(note),
                    Err(error) if is_taken(&error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    };
}
row_turn!(
    sqlite_row,
    SqliteConnection,
    "INSERT INTO byhand VALUES (?, ?, ?)",
    "DELETE FROM byhand WHERE name = ? AND owner = ?"
);
row_turn!(
    pg_row,
    PgConnection,
    "INSERT INTO byhand VALUES ($1, $2, $3)",
    "DELETE FROM byhand WHERE name = $1 AND owner = $2"
);
row_turn!(
    mysql_row,
    MySqlConnection,
    "INSERT INTO byhand VALUES (?, ?, ?)",
    "DELETE FROM byhand WHERE name = ? AND owner = ?"
);

/// The row is there, or others were in the way (a deadlock, SQLite's busy).
fn is_taken(error: &sqlx::Error) -> bool {
    let others = ["40001", "40P01", "5", "261", "517"];
    error.as_database_error().is_some_and(|error| {
        error.is_unique_violation() || error.code().is_some_and(|code| others.contains(&&*code))
    })
}

/// Everybody takes turns while the window is open.
async fn contend(effort: Effort, turns: Vec<Turn>) -> Result<Outcome> {
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    for turn in turns {
        running.spawn(async move {
            tokio::time::sleep(window.opens_in()).await;
            let mut notes = Vec::new();
            loop {
                match turn().await? {
                    note if note < window.until => notes.push(note),
                    _ => return Ok(notes),
                }
            }
        });
    }
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    Ok(Outcome::of(&notes?, effort.time))
}

/// Where a server counts the statements that it is sent.
enum Counter {
    Postgres(String),
    /// And in which schema.
    MariaDb(String, &'static str),
}

/// A connection to ask for the count on.
enum Counting {
    Postgres(PgConnection),
    MariaDb(MySqlConnection, &'static str),
}

impl Counter {
    async fn connect(&self) -> Result<Counting> {
        Ok(match self {
            Self::Postgres(url) => Counting::Postgres(PgConnection::connect(url).await?),
            Self::MariaDb(url, counters) => {
                Counting::MariaDb(MySqlConnection::connect(url).await?, counters)
            }
        })
    }
}

impl Counting {
    async fn count(&mut self) -> Result<f64> {
        let count: i64 = match self {
            Self::Postgres(c) => {
                let sql = "SELECT sum(calls)::bigint FROM pg_stat_statements";
                sqlx::query_scalar(sql).fetch_one(c).await?
            }
            Self::MariaDb(c, counters) => {
                let sql = format!(
                    "SELECT CAST(variable_value AS SIGNED) FROM {counters}.global_status WHERE \
                     variable_name = 'QUESTIONS'"
                );
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(c).await?
            }
        };
        Ok(count as f64)
    }
}

/// Clients that contend.
struct Bed {
    runtime: Runtime,
    clients: Vec<Leasehold>,
    counter: Option<Counter>,
}

impl Bed {
    fn new(url: &str, n: usize, counter: impl Fn() -> Option<Counter>) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let connect = || runtime.block_on(leasehold::connect(url));
        // One more, that holds until all wait.
        let clients: Result<Vec<_>, _> = (0..=CLIENTS.min(n)).map(|_| connect()).collect();
        Ok(Self { runtime, clients: clients?, counter: counter() })
    }

    fn contend(&self, n: usize, effort: Effort) -> Result<Outcome> {
        self.runtime.block_on(self.contend_here(n, effort))
    }

    async fn contend_here(&self, n: usize, effort: Effort) -> Result<Outcome> {
        let mut counting = match &self.counter {
            Some(counter) => Some(counter.connect().await?),
            None => None,
        };
        let count = async || match &mut counting {
            Some(counting) => counting.count().await,
            None => Ok(0.0),
        };
        queued::contend(&self.clients, n, effort, Duration::ZERO, count).await
    }
}
