//! The statements printed for other languages. psql, mysql and Python run exactly what is printed,
//! next to this library.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::database::{self, Dialect, Pool, Session as _};
use leasehold::once::{self, Ran};
use leasehold::versioned::{self, Versioned};
use leasehold::{Error, ErrorKind, lock_in};

/// Another program with its own client for one database.
enum Other {
    Psql(String),
    Mysql(String),
    Python(String),
}

const PYTHON: &str = "
import json, sqlite3, sys
asked = json.load(sys.stdin)
db = sqlite3.connect(asked['file'], isolation_level=None, timeout=0.3)
for sql in asked['sql']:
    for row in db.execute(sql, asked['with']):
        print('|'.join(map(str, row)))
";

impl Other {
    /// Runs the statements in one session. Returns the rows of the answers, or the error.
    fn run(&self, sql: &[&str], with: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let (mut command, input) = match self {
            Self::Psql(url) => {
                let mut psql = Command::new("psql");
                psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", url]);
                for (name, value) in with {
                    psql.args(["-v", &format!("{name}={}", literal(value))]);
                }
                (psql, format!("SET lock_timeout = '300ms';\n{};\n", sql.join(";\n")))
            }
            Self::Mysql(url) => {
                let rest = url.strip_prefix("mysql://").unwrap();
                let (user, at) = rest.split_once('@').unwrap();
                let (user, password) = user.split_once(':').unwrap();
                let (at, database) = at.split_once('/').unwrap();
                let (host, port) = at.split_once(':').unwrap();
                let mut mysql = Command::new("mysql");
                mysql.args(["--no-defaults", "-N", "-B", "-h", host, "-P", port, "-u", user]);
                mysql.args([&format!("-p{password}"), database]);
                let mut text = "SET innodb_lock_wait_timeout = 1;\n".to_owned();
                for (name, value) in with {
                    text.push_str(&format!("SET @{name} = {};\n", literal(value)));
                }
                let mut sql = sql.join(";\n");
                for (name, _) in with {
                    sql = sql.replace(&format!(":{name}"), &format!("@{name}"));
                }
                (mysql, format!("{text}{sql};\n"))
            }
            Self::Python(file) => {
                let mut python = Command::new("python3");
                python.args(["-c", PYTHON]);
                let with: serde_json::Map<_, _> = with
                    .iter()
                    .map(|(name, value)| {
                        let number = value.parse::<i64>().map(Into::into);
                        ((*name).to_owned(), number.unwrap_or_else(|_| (*value).into()))
                    })
                    .collect();
                let asked = serde_json::json!({"file": file, "sql": sql, "with": with});
                (python, asked.to_string())
            }
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap().lines().map(Into::into).collect()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
}

/// Returns a number unchanged, and a text in quotes.
fn literal(value: &str) -> String {
    match value.parse::<i64>() {
        Ok(_) => value.to_owned(),
        Err(_) => format!("'{}'", value.replace('\'', "''")),
    }
}

/// Returns the statements in a printed text.
fn statements(text: &str) -> Vec<String> {
    assert!(!text.contains('?'), "{text}");
    let sql: Vec<&str> = text.lines().filter(|line| !line.starts_with("--")).collect();
    let sql = sql.join("\n").replace("your_table", "t").replace("your_column", "n");
    sql.split(';').map(str::trim).filter(|sql| !sql.is_empty()).map(Into::into).collect()
}

async fn prepare(pool: &impl Pool) {
    database::install(pool).await.unwrap();
    let mut session = pool.session().await.unwrap();
    let table = "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, version BIGINT NOT NULL)";
    session.batch(table).await.unwrap();
    session.batch("INSERT INTO t VALUES (1, 5, 0)").await.unwrap();
}

async fn postgres() -> (sqlx::PgPool, Other) {
    let url = testbed::postgres().database();
    (sqlx::PgPool::connect(&url).await.unwrap(), Other::Psql(url))
}

async fn mysql() -> (sqlx::MySqlPool, Other) {
    let url = testbed::mariadb().database();
    (sqlx::MySqlPool::connect(&url).await.unwrap(), Other::Mysql(url))
}

async fn sqlite(directory: &std::path::Path) -> (sqlx::SqlitePool, Other) {
    let file = directory.join("db").display().to_string();
    let url = format!("sqlite://{file}?mode=rwc");
    (sqlx::SqlitePool::connect(&url).await.unwrap(), Other::Python(file))
}

macro_rules! of_each {
    ($case:ident) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $case() {
            let (pool, other) = postgres().await;
            $case!(pool, other, Dialect::Postgres);
            let (pool, other) = mysql().await;
            $case!(pool, other, Dialect::Mysql);
            let directory = tempfile::tempdir().unwrap();
            let (pool, other) = sqlite(directory.path()).await;
            $case!(pool, other, Dialect::Sqlite);
        }
    };
}

macro_rules! one_key_is_used_once_in_both_languages {
    ($pool:expr, $other:expr, $dialect:expr) => {{
        let (pool, other, dialect) = ($pool, $other, $dialect);
        prepare(&pool).await;
        let text = statements(&once::text(dialect));
        let [insert, done, refused, look, forget] = &text[..] else { panic!("{text:?}") };
        let run = |sql: &[&str], key: &str, outcome: &str| {
            other.run(sql, &[("key", key), ("outcome", outcome), ("before", "1")])
        };
        let ran = async |key: &str| {
            let work = |_| async { Ok::<_, Error>("rust's".to_owned()) };
            once::once(key).run(&pool, work).await
        };
        // The library finds a key of the other program, unless the other program rolled it back.
        run(&["BEGIN", insert, done, "COMMIT"], "a", "it's paid").unwrap();
        assert_eq!(ran("a").await.unwrap(), Ran::Duplicate("it's paid".into()));
        run(&["BEGIN", insert, done, "ROLLBACK"], "b", "no").unwrap();
        assert_eq!(ran("b").await.unwrap(), Ran::First("rust's".into()));
        // The other program finds a key of the library. It inserts nothing and then reads the key.
        let inserted = run(&["BEGIN", insert, "COMMIT"], "b", "");
        match dialect {
            Dialect::Mysql => assert!(inserted.unwrap_err().contains("1062")),
            _ => assert_eq!(inserted.unwrap(), Vec::<String>::new()),
        }
        let there = run(&[look], "b", "").unwrap().join("|").replace('\t', "|");
        let there: Vec<_> = there.split('|').collect();
        assert_eq!(there, ["done", "rust's"]);
        // An error that is stored.
        run(&["BEGIN", insert, refused, "COMMIT"], "c", "no money").unwrap();
        #[derive(Debug, PartialEq)]
        struct Refused(String);
        impl From<Error> for Refused {
            fn from(error: Error) -> Self {
                Self(format!("{error:#}"))
            }
        }
        let keeping = once::once("c").keep_errors(|e: &Refused| Some(e.0.clone()), Refused);
        let ran_c = keeping.run(&pool, |_| async { Ok("no".into()) }).await.unwrap();
        assert_eq!(ran_c, Ran::Duplicate(Err(Refused("no money".into()))));
        // No key is older than the beginning of 1970, and all keys are older than the far future.
        other.run(&[forget], &[("before", "1")]).unwrap();
        assert!(!ran("a").await.unwrap().is_first());
        other.run(&[forget], &[("before", "9000000000000000")]).unwrap();
        assert!(ran("a").await.unwrap().is_first());
    }};
}
of_each!(one_key_is_used_once_in_both_languages);

macro_rules! one_lock_is_held_by_one_of_both_languages {
    ($pool:expr, $other:expr, $dialect:expr) => {{
        let (pool, other) = ($pool, $other);
        prepare(&pool).await;
        let text = statements(&lock_in::text($dialect));
        let [lock] = &text[..] else { panic!("{text:?}") };
        let lock = |name| other.run(&["BEGIN", lock, "COMMIT"], &[("name", name)]);
        let mut tx = pool.begin().await.unwrap();
        lock_in(&mut tx, "it's a").await.unwrap();
        let error = lock("it's a").unwrap_err();
        let phrases = ["lock timeout", "1205", "locked"];
        assert!(phrases.iter().any(|phrase| error.contains(phrase)), "{error}");
        tx.commit().await.unwrap();
        lock("it's a").unwrap();
        lock("new").unwrap();
        let taken = "SELECT taken FROM leasehold_row_lock ORDER BY name";
        let taken = other.run(&[taken], &[]).unwrap();
        assert_eq!(taken, ["2", "1"], "expected one row for each name");
        let mut tx = pool.begin().await.unwrap();
        leasehold::lock_in_timeout(&mut tx, "new", Duration::from_secs(20)).await.unwrap();
    }};
}
of_each!(one_lock_is_held_by_one_of_both_languages);

macro_rules! one_version_is_written_by_one_of_both_languages {
    ($pool:expr, $other:expr, $dialect:expr) => {{
        let (pool, other) = ($pool, $other);
        prepare(&pool).await;
        let text = statements(&versioned::text($dialect));
        let [read, write] = &text[..] else { panic!("{text:?}") };
        let write = |value, expected| {
            let with = [("id", "1"), ("value", value), ("expected", expected)];
            other.run(&[write, read], &with).unwrap().join("|").replace('\t', "|")
        };
        assert_eq!(write("6", "0"), "6|1");
        assert_eq!(write("7", "0"), "6|1", "a stale write must change no row");
        let table = Versioned::new("t", "id", "version");
        let mut tx = pool.begin().await.unwrap();
        let error = table.update(&mut tx, 1, 0, &[("n", 8.into())]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleVersion, "{error}");
        assert_eq!(table.update(&mut tx, 1, 1, &[("n", 8.into())]).await.unwrap(), 2);
        tx.commit().await.unwrap();
        assert_eq!(write("9", "1"), "8|2", "a stale write must change no row");
        assert_eq!(write("9", "2"), "9|3");
    }};
}
of_each!(one_version_is_written_by_one_of_both_languages);
