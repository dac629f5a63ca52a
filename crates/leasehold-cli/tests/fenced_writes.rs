//! Forty processes write through `fence::sql` under `leasehold run`. Meanwhile the database that
//! contains both the lock and the data is killed and restarted, and holders are paused for longer
//! than their lease. No acknowledged write is lost, and no late write is applied.
//!
//! `leasehold run` starts this program again as a writer, so the program needs a `main` of its own.
//! Some writers continue after their lock was released, and write after another client has written.
//! They simulate a holder that could not be stopped.

mod common;

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LEASEHOLD, Place, eventually};
use leasehold::database::{self, Dialect};
use leasehold::{Error, ErrorKind, FencingToken};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PROCESSES: usize = 40;
/// Writes of each process.
const ROUNDS: usize = 1;
/// Number of processes that also start a late writer.
const LATE: usize = 5;
const LEASE: Duration = Duration::from_secs(5);

/// Time limit that only a hanging test reaches, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

const TABLES: [&str; 3] = [
    "CREATE TABLE counter (n BIGINT NOT NULL)",
    "INSERT INTO counter VALUES (0)",
    "CREATE TABLE journal (n BIGINT NOT NULL PRIMARY KEY, token BIGINT NOT NULL UNIQUE)",
];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", url, dir] => std::process::exit(write(url, Path::new(dir))),
        ["write-late", url, dir] => std::process::exit(write_late(url, Path::new(dir))),
        ["write-on-signal", url, dir] => std::process::exit(write_on_signal(url, Path::new(dir))),
        _ => {}
    }
    // Like in the usual harness, a word is a part of the names of the tests to run.
    let mut wanted: Vec<&String> = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            // The next word is a value and not a name.
            "--test-threads" | "--color" | "--format" | "--skip" | "--logfile"
            | "--shuffle-seed" | "-Z" => drop(rest.next()),
            option if option.starts_with('-') => {}
            _ => wanted.push(word),
        }
    }
    let cases: &[(&str, fn())] = &[
        ("r35_fenced_writes_while_postgres_is_killed", postgres_case),
        ("r35_fenced_writes_while_mariadb_is_killed", mariadb_case),
        ("r35_a_stopped_writer_is_refused_by_sqlite", sqlite_stopped),
        ("r35_a_stopped_writer_is_refused_by_postgres", postgres_stopped),
        ("r35_a_stopped_writer_is_refused_by_mariadb", mariadb_stopped),
    ];
    if words.iter().any(|word| word == "--list") {
        return cases.iter().for_each(|(name, _)| println!("{name}: test"));
    }
    let chosen = cases
        .iter()
        .filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|part| name.contains(*part)));
    let running: Vec<_> = chosen.map(|&(name, case)| (name, std::thread::spawn(case))).collect();
    let mut failed = false;
    for (name, case) in running {
        let ok = case.join().is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        failed |= !ok;
    }
    std::process::exit(i32::from(failed));
}

// ---- the writer

/// Exit code of a writer whose token was stale.
const STALE: i32 = 3;

/// Defines what is needed to write to one database. Only the driver's types differ.
macro_rules! database {
    ($module:ident, $connection:ty) => {
        mod $module {
            use super::*;
            use leasehold::database::sqlx::{AssertSqlSafe, Connection};

            /// Adds one to the counter, once for each token.
            pub(super) async fn add(url: &str, token: FencingToken) -> Result<(), Error> {
                let mut connection = <$connection>::connect(url).await.map_err(database::error)?;
                let mut tx = connection.begin().await.map_err(database::error)?;
                leasehold::fence::sql::check(&mut tx, "counter", token).await?;
                // The answer to a commit may have been lost. The write must not be counted twice
                // then.
                let sql = format!("SELECT COUNT(*) FROM journal WHERE token = {token}");
                let done: i64 = leasehold::database::sqlx::query_scalar(AssertSqlSafe(sql))
                    .fetch_one(&mut *tx)
                    .await
                    .map_err(database::error)?;
                if done > 0 {
                    return Ok(());
                }
                let sql = "SELECT n FROM counter";
                let n: i64 = leasehold::database::sqlx::query_scalar(sql)
                    .fetch_one(&mut *tx)
                    .await
                    .map_err(database::error)?;
                tokio::time::sleep(Duration::from_millis(50)).await;
                // The statement is not n = n + 1, because the database itself would make that safe.
                for sql in [
                    format!("UPDATE counter SET n = {}", n + 1),
                    format!("INSERT INTO journal VALUES ({}, {token})", n + 1),
                ] {
                    leasehold::database::sqlx::query(AssertSqlSafe(sql))
                        .execute(&mut *tx)
                        .await
                        .map_err(database::error)?;
                }
                tx.commit().await.map_err(database::error)
            }

            /// Returns the greatest token of a write.
            pub(super) async fn greatest(url: &str) -> Result<i64, Error> {
                let mut connection = <$connection>::connect(url).await.map_err(database::error)?;
                let sql = "SELECT CAST(COALESCE(MAX(token), 0) AS DECIMAL(20)) = 0, \
                           COALESCE(MAX(token), 0) FROM journal";
                let (_, greatest): (bool, i64) = leasehold::database::sqlx::query_as(sql)
                    .fetch_one(&mut connection)
                    .await
                    .map_err(database::error)?;
                Ok(greatest)
            }

            pub(super) async fn prepare(url: &str, dialect: Dialect) {
                let mut connection = <$connection>::connect(url).await.unwrap();
                let ours = database::schema(dialect);
                for sql in TABLES.map(str::to_owned).into_iter().chain([ours]) {
                    leasehold::database::sqlx::raw_sql(AssertSqlSafe(sql))
                        .execute(&mut connection)
                        .await
                        .unwrap();
                }
            }
        }
    };
}
database!(postgres, leasehold::database::sqlx::PgConnection);
database!(mariadb, leasehold::database::sqlx::MySqlConnection);
database!(sqlite, leasehold::database::sqlx::SqliteConnection);

async fn add(url: &str, token: FencingToken) -> Result<(), Error> {
    match url.split(':').next() {
        Some("postgres") => postgres::add(url, token).await,
        Some("mysql") => mariadb::add(url, token).await,
        Some("sqlite") => sqlite::add(url, token).await,
        _ => panic!("unknown database"),
    }
}

async fn greatest(url: &str) -> Result<i64, Error> {
    match url.split(':').next() {
        Some("postgres") => postgres::greatest(url).await,
        Some("mysql") => mariadb::greatest(url).await,
        Some("sqlite") => sqlite::greatest(url).await,
        _ => panic!("unknown database"),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn our_token() -> FencingToken {
    std::env::var("LEASEHOLD_TOKEN").unwrap().parse().unwrap()
}

/// Appends one line, which stays whole even if many processes write concurrently.
fn note(dir: &Path, file: &str, line: impl std::fmt::Display) {
    let mut file = OpenOptions::new().append(true).create(true).open(dir.join(file)).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Writes, and repeats what a crash of the server has undone. Returns `None` if the token is stale.
fn until_answered(url: &str, token: FencingToken) -> Option<()> {
    let end = Instant::now() + PATIENCE;
    let runtime = runtime();
    loop {
        match runtime.block_on(add(url, token)) {
            Ok(()) => return Some(()),
            Err(error) if error.kind() == ErrorKind::StaleToken => return None,
            Err(error) => {
                assert!(error.is_retryable() && Instant::now() < end, "{error}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

fn write(url: &str, dir: &Path) -> i32 {
    match until_answered(url, our_token()) {
        Some(()) => note(dir, "acknowledged", our_token()),
        None => return STALE,
    }
    0
}

/// Writes after a later holder has written, even if the lock was lost.
fn write_late(url: &str, dir: &Path) -> i32 {
    let (token, runtime) = (our_token(), runtime());
    let end = Instant::now() + PATIENCE;
    while !runtime.block_on(greatest(url)).is_ok_and(|seen| seen > token.get().cast_signed()) {
        assert!(Instant::now() < end, "no holder wrote after {token}");
        std::thread::sleep(Duration::from_millis(50));
    }
    match until_answered(url, token) {
        Some(()) => note(dir, "late-and-applied", token),
        None => note(dir, "late-and-refused", token),
    }
    0
}

/// Holds the lock, and writes when the file `go` appears, without checking the hold again. This
/// simulates a holder that was paused after its last check. The lock is not renewed, so that the
/// process is never paused in the middle of a write to SQLite.
fn write_on_signal(url: &str, dir: &Path) -> i32 {
    runtime().block_on(async {
        let locks = leasehold::connect(url).await.unwrap();
        let mutex = locks.mutex("counter").lease(Duration::from_secs(1)).no_renewal();
        let guard = mutex.lock().await.unwrap();
        note(dir, "held", guard.token());
        while !dir.join("go").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match add(url, guard.token()).await {
            Ok(()) => note(dir, "late-and-applied", guard.token()),
            Err(error) => {
                note(dir, "late-and-refused", format!("{} {:?}", guard.token(), error.kind()))
            }
        }
    });
    0
}

// ---- the test

fn postgres_stopped() {
    let url = testbed::postgres().database();
    runtime().block_on(postgres::prepare(&url, Dialect::Postgres));
    stopped_case(&url);
}

fn mariadb_stopped() {
    let url = testbed::mariadb().database();
    runtime().block_on(mariadb::prepare(&url, Dialect::Mysql));
    stopped_case(&url);
}

fn sqlite_stopped() {
    let place = Place::new();
    let file = place.path("data.db");
    let url = format!("sqlite:{}", file.display());
    std::fs::write(&file, "").unwrap();
    runtime().block_on(sqlite::prepare(&url, Dialect::Sqlite));
    stopped_case(&url);
}

/// Pauses a holder until its lease has expired and another client holds the lock and has written.
/// Then the first process continues and writes.
fn stopped_case(url: &str) {
    let place = Place::new();
    let mut writer = Command::new(std::env::current_exe().unwrap());
    writer.args(["write-on-signal", url]).arg(place.path("")).stdin(Stdio::null());
    let mut writer = writer.spawn().unwrap();
    eventually("the writer holds the lock", || place.read("held").ends_with('\n'));
    let late = place.read("held").trim().parse::<FencingToken>().unwrap();
    let pid = Pid::from_raw(i32::try_from(writer.id()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    runtime().block_on(async {
        let locks = leasehold::connect(url).await.unwrap();
        let guard = locks.mutex("counter").lock_timeout(PATIENCE).await.unwrap();
        assert!(guard.token() > late);
        add(url, guard.token()).await.unwrap();
        assert_eq!(greatest(url).await.unwrap(), guard.token().get().cast_signed());
        // The new holder still holds the lock.
        std::fs::write(place.path("go"), "").unwrap();
        kill(pid, Signal::SIGCONT).unwrap();
        assert!(writer.wait().unwrap().success());
        assert_eq!(greatest(url).await.unwrap(), guard.token().get().cast_signed());
        guard.release().await.unwrap();
    });
    assert_eq!(place.read("late-and-refused").trim(), format!("{late} StaleToken"));
    assert_eq!(place.read("late-and-applied"), "");
}

fn postgres_case() {
    let server = testbed::Postgres::start();
    let url = server.database();
    runtime().block_on(postgres::prepare(&url, Dialect::Postgres));
    case(&url, || {
        server.kill();
        server.restart();
    });
    let database = url.rsplit('/').next().unwrap();
    let sql = "SELECT n || ' ' || token FROM journal ORDER BY n";
    check(&server.admin(database, sql), &server.admin(database, "SELECT n FROM counter"));
}

fn mariadb_case() {
    let server = testbed::MariaDb::start();
    let url = server.database();
    runtime().block_on(mariadb::prepare(&url, Dialect::Mysql));
    case(&url, || {
        server.kill();
        server.restart();
    });
    let database = url.rsplit('/').next().unwrap();
    let sql = format!("SELECT CONCAT(n, ' ', token) FROM {database}.journal ORDER BY n");
    let n = server.admin(&format!("SELECT n FROM {database}.counter"));
    check(&server.admin(&sql), &n);
}

/// Checks that the counter matches the journal. Each write must have read what the previous one
/// wrote, with a smaller token.
fn check(journal: &str, counter: &str) {
    let pairs = journal.lines().map(|line| line.split_once(' ').expect("expected two numbers"));
    let (numbers, tokens): (Vec<u64>, Vec<u64>) =
        pairs.map(|(n, token)| (n.parse::<u64>().unwrap(), token.parse::<u64>().unwrap())).unzip();
    let all = 1..=u64::try_from(numbers.len()).unwrap();
    assert!(numbers.iter().copied().eq(all), "{numbers:?}");
    assert_eq!(counter.trim(), numbers.len().to_string());
    assert!(numbers.len() >= PROCESSES * ROUNDS, "{} writes", numbers.len());
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens are not in ascending order: {tokens:?}");
    let acknowledged = ACKNOWLEDGED.with_borrow(Clone::clone);
    let applied: HashSet<u64> = tokens.into_iter().collect();
    let lost: Vec<_> = acknowledged.difference(&applied).collect();
    assert!(lost.is_empty(), "acknowledged writes are missing: {lost:?}");
    assert!(acknowledged.len() >= PROCESSES * ROUNDS);
}

thread_local! {
    /// The tokens of the acknowledged writes of this case.
    static ACKNOWLEDGED: std::cell::RefCell<HashSet<u64>> = std::cell::RefCell::default();
}

fn case(url: &str, break_server: impl Fn()) {
    let place = Place::new();
    let dir = place.path("");
    let over = AtomicBool::new(false);
    let stops = std::thread::scope(|scope| {
        let all: Vec<_> = (0..PROCESSES)
            .map(|i| {
                let dir = &dir;
                scope.spawn(move || {
                    if i < LATE {
                        run(url, dir, true);
                    }
                    (0..ROUNDS).for_each(|_| run(url, dir, false));
                })
            })
            .collect();
        let stopper = scope.spawn(|| stop_holders(url, &over));
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(1_500));
            break_server();
        }
        let results: Vec<_> = all.into_iter().map(|one| one.join()).collect();
        over.store(true, Ordering::SeqCst);
        let stops = stopper.join().expect("the thread that pauses holders panicked");
        assert!(results.into_iter().all(|one| one.is_ok()), "a client failed, see above");
        stops
    });
    assert!(stops > 0, "no holder was paused");
    let lines = |file: &str| place.read(file).lines().count();
    eventually("all late writers have tried", || {
        lines("late-and-refused") + lines("late-and-applied") >= LATE
    });
    assert_eq!(lines("late-and-applied"), 0, "late writes were applied");
    let acknowledged = place.read("acknowledged");
    let acknowledged = acknowledged.lines().map(|token| token.parse().unwrap()).collect();
    ACKNOWLEDGED.set(acknowledged);
}

/// Writes once under the lock, and retries until that succeeds.
fn run(url: &str, dir: &Path, late: bool) {
    let me: PathBuf = std::env::current_exe().unwrap();
    let end = Instant::now() + PATIENCE;
    loop {
        let mut command = Command::new(LEASEHOLD);
        command.args(["run", "--lease", &format!("{}s", LEASE.as_secs()), "counter", "--"]);
        match late {
            // A session of its own lets the writer outlive the lock.
            true => command
                .args(["sh", "-c", "setsid \"$0\" write-late \"$1\" \"$2\" </dev/null >&0 2>&0 &"])
                .arg(&me)
                .arg(url),
            false => command.arg(&me).args(["write", url]),
        };
        let command = command.arg(dir).env("LEASEHOLD_STORE", url);
        let output = command.stdin(Stdio::null()).output().unwrap();
        match output.status.code() {
            Some(0) => return,
            // The lock was lost because the test paused the holder, or the write was late. Both
            // need another round. 69 means that the server was unreachable for longer than the
            // limit, which can happen on a busy machine. Nothing was written then.
            Some(69 | 74 | STALE) if Instant::now() < end => {}
            _ => panic!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)),
        }
    }
}

/// Pauses each holder for longer than its lease. Returns how often.
fn stop_holders(url: &str, over: &AtomicBool) -> usize {
    let mut stops = 0;
    while !over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(700));
        let mut show = Command::new(LEASEHOLD);
        let shown = show.args(["show", "--json", "counter"]).env("LEASEHOLD_STORE", url).output();
        // The holder is unknown while the server is unreachable.
        let shown: serde_json::Value = match serde_json::from_slice(&shown.unwrap().stdout) {
            Ok(shown) => shown,
            Err(_) => continue,
        };
        let Some(pid) = shown["claims"][0]["pid"].as_i64() else { continue };
        // The holder is `leasehold run`. The processes that it has started write, and would
        // continue alone.
        let mut all = started_by(pid);
        all.push(pid);
        let signal = |which| {
            // The processes may have ended in the meantime.
            all.iter().filter(|&&pid| kill(to_pid(pid), which).is_ok()).count()
        };
        if signal(Signal::SIGSTOP) > 0 {
            std::thread::sleep(LEASE + Duration::from_millis(500));
            signal(Signal::SIGCONT);
            stops += 1;
        }
    }
    stops
}

fn to_pid(pid: i64) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap())
}

/// Returns the descendants of this process.
fn started_by(pid: i64) -> Vec<i64> {
    let mut parents = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(id) = process.file_name().to_string_lossy().parse::<i64>() else { continue };
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // The name may contain anything. After it come the state and the parent.
        let parent =
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parents.extend(parent.map(|parent: i64| (id, parent)));
    }
    let (mut found, mut at) = (vec![pid], 0);
    while let Some(&parent) = found.get(at) {
        found.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(id, _)| *id));
        at += 1;
    }
    found.split_off(1)
}
