//! Tables and names. Tables are created by many clients at once, by an administrator or by another
//! version, next to other programs' tables, or under other prefixes. Names are unusual or do not
//! fit.

use std::sync::Arc;

use crate::sql_common::*;
use leasehold::ErrorKind;
use sqlx::Connection;

on_all![
    tables_can_be_created_by_many_clients_at_once,
    names_are_compared_byte_by_byte,
    names_that_do_not_fit_are_refused,
    foreign_tables_are_refused_and_unchanged,
    prefix_and_schema_separate_stores,
    tables_of_another_version_are_refused,
    tables_created_by_an_administrator_are_used,
    a_client_that_may_not_create_the_store_creates_nothing,
];

// S50
async fn tables_can_be_created_by_many_clients_at_once<S: Server>() {
    let url = S::shared().database();
    let mut connecting = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let url = url.clone();
        connecting.spawn(async move {
            let locks = connect(&url).await;
            release(locks.mutex("first").lock().await.unwrap()).await;
        });
    }
    while let Some(connected) = connecting.join_next().await {
        connected.unwrap();
    }
}

// S51
async fn names_are_compared_byte_by_byte<S: Server>() {
    let url = S::shared().database();
    let locks = connect(&url).await;
    let long = ["x".repeat(512), format!("{}y", "x".repeat(511)), "é".repeat(256)];
    let mut names: Vec<&str> = vec![
        "Job",
        "job",
        "JOB",
        "job ",
        "job  ",
        " job",
        "jöb",
        "jo\u{308}b",
        "jób",
        "job\u{200b}",
        "ß",
        "ss",
        "ſ",
        "😀",
        "😁",
        "a%",
        "a_",
        "ab",
        "a\\",
        "a'b",
        "a\"b",
        "a`b",
        "a;--",
        "?",
        "$1",
        "a/../b",
        "\u{a0}",
        "ı",
        "i",
        "İ",
    ];
    names.extend(long.iter().map(String::as_str));
    let mut held = Vec::new();
    for name in &names {
        let guard = locks.mutex(name).try_lock().await.unwrap_or_else(|e| panic!("{e}"));
        held.push(guard);
    }
    let mut listed: Vec<String> =
        locks.list("").await.unwrap().iter().map(|info| info.name.as_str().to_owned()).collect();
    let mut expected: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    for (prefix, count) in [("a%", 1), ("a_", 1), ("job", 4), ("a\\", 1), ("Job", 1), ("j", 7)] {
        let listed = locks.list(prefix).await.unwrap();
        assert_eq!(listed.len(), count, "{prefix:?}: {listed:?}");
    }
    for guard in held {
        guard.release().await.unwrap();
    }
    assert_eq!(locks.list("").await.unwrap().len(), 0);
}

/// The column for names is too short. A truncated name would be the lock of another name.
async fn names_that_do_not_fit_are_refused<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let short = match std::any::type_name::<S>().contains("Postgres") {
        true => "ALTER TABLE leasehold_locks ALTER COLUMN name TYPE varchar(8)",
        false => "ALTER TABLE leasehold_locks MODIFY name VARBINARY(8) NOT NULL",
    };
    server.admin(&url, short);
    // Both ways of creating a row. A lock that cannot be acquired immediately takes the slow path.
    for error in [
        locks.mutex("much too long").try_lock().await.unwrap_err(),
        locks.rwlock("much too long").try_write().await.unwrap_err(),
    ] {
        assert_told(&error, ErrorKind::Corrupt, "lh:lh");
    }
    // The row without a name records the last sweep.
    let made = "SELECT count(*) FROM leasehold_locks WHERE length(name) > 0";
    assert_eq!(server.admin(&url, made), "0");
    release(locks.mutex("short").lock().await.unwrap()).await;
}

async fn foreign_tables_are_refused_and_unchanged<S: Server>() {
    let server = S::shared();
    let url = server.database();
    release(connect(&url).await.mutex("first").lock().await.unwrap()).await;
    let tables = server.tables(&url);
    assert!(tables.len() >= 2, "{tables:?}");
    for table in &tables {
        let other = server.database();
        let sql = format!("CREATE TABLE {table} (theirs int)");
        server.admin(&other, &sql);
        // The other program's table is not changed, whatever permissions we have on it.
        let reachable = server.tables(&other).contains(table);
        assert!(reachable);
        if std::any::type_name::<S>().contains("Postgres") {
            server.admin(&other, &format!("ALTER TABLE {table} OWNER TO lh"));
        }
        let error = refusal(&other).await;
        assert_told(&error, ErrorKind::Corrupt, "lh:lh");
        assert_eq!(server.admin(&other, &format!("SELECT count(theirs) FROM {table}")), "0");
    }
}

async fn prefix_and_schema_separate_stores<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let mut stores = vec![url.clone(), format!("{url}?prefix=a_"), format!("{url}?prefix=b_")];
    if std::any::type_name::<S>().contains("Postgres") {
        let nowhere = refusal(&format!("{url}?schema=nosuch")).await;
        assert_told(&nowhere, ErrorKind::Config, "lh:lh");
        assert!(nowhere.to_string().contains("schema"), "{nowhere}");
        server.admin(&url, "CREATE SCHEMA apart AUTHORIZATION lh");
        stores.extend([format!("{url}?schema=apart"), format!("{url}?schema=apart&prefix=a_")]);
    }
    let (mut held, mut others) = (Vec::new(), Vec::new());
    for store in &stores {
        let guard = connect(store).await.mutex("same").try_lock().await;
        held.push(guard.unwrap_or_else(|error| panic!("{store}: {error}")));
    }
    for store in &stores {
        let other = connect(store).await;
        let error =
            other.mutex("same").try_lock().await.expect_err("a second client acquired the lock");
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let mutex = other.mutex("same");
        others.push(tokio::spawn(async move { mutex.lock().await }));
    }
    // All paths of the store use its own tables, for waiting, handing over and renewing.
    for (guard, other) in held.into_iter().zip(others) {
        let token = guard.token();
        guard.release().await.unwrap();
        let guard = tokio::time::timeout(PATIENCE, other).await.unwrap().unwrap().unwrap();
        assert!(guard.token() > token);
        guard.release().await.unwrap();
    }
}

async fn tables_of_another_version_are_refused<S: Server>() {
    let server = S::shared();
    let url = server.database();
    release(connect(&url).await.mutex("first").lock().await.unwrap()).await;
    server.admin(&url, "UPDATE leasehold_schema SET version = 2");
    let error = refusal(&url).await;
    assert_told(&error, ErrorKind::Config, "lh:lh");
    // Clients of those tables would not exclude a client with a different prefix (F44).
    let message = format!("{error:#}");
    assert!(message.contains("version 2") && message.contains("upgrade"), "{message}");
    assert!(!message.contains("prefix"), "{message}");
    // Our own tables can be created next to them.
    release(connect(&format!("{url}?prefix=ours_")).await.mutex("x").lock().await.unwrap()).await;
}

/// The output of `leasehold schema` is enough for a user that may not create tables.
async fn tables_created_by_an_administrator_are_used<S: Server>() {
    let server = S::shared();
    let url = server.database();
    server.user(&url, "nobody", "SELECT");
    let nobody = url.replace("lh:lh@", "nobody:nobody@");
    let error = refusal(&nobody).await;
    assert_told(&error, ErrorKind::Denied, "nobody:nobody");
    assert!(format!("{error:#}").contains("leasehold schema"), "{error}");
    let printed = leasehold::store::sql::schema(&url).unwrap();
    // A migration may be run again.
    for _ in 0..2 {
        server.script(&url, &printed).await;
    }
    server.user(&url, "byhand", "SELECT, INSERT, UPDATE, DELETE");
    let by_hand = url.replace("lh:lh@", "byhand:byhand@");
    let clients = [connect(&by_hand).await, connect(&by_hand).await];
    hammer(&clients, "made by hand", 3, 3).await;
}

async fn a_client_that_may_not_create_the_store_creates_nothing<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let reading = format!("{url}?create=no");
    let error = refusal(&reading).await;
    assert_told(&error, ErrorKind::Config, "lh:lh");
    assert!(format!("{error:#}").contains("leasehold_schema is missing or empty"), "{error:#}");
    assert_eq!(server.tables(&url), [""; 0]);
    let held = connect(&url).await.mutex("x").lock().await.unwrap();
    let reader = connect(&reading).await;
    assert_eq!(reader.inspect("x").await.unwrap().unwrap().holders().count(), 1);
    release(held).await;
}

async fn journal_mode(path: &std::path::Path) -> String {
    let path = path.display().to_string();
    let mut connection = sqlx::SqliteConnection::connect(&path).await.unwrap();
    sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut connection).await.unwrap()
}

// F33
/// The journal mode belongs to the file, for all programs that open it.
#[test]
fn foreign_file_keeps_its_journal_mode() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let [theirs, ours] = ["theirs.db", "ours.db"].map(|name| directory.path().join(name));
        let address = format!("sqlite:{}?mode=rwc", theirs.display());
        let mut connection = sqlx::SqliteConnection::connect(&address).await.unwrap();
        let sql = "PRAGMA journal_mode = DELETE; CREATE TABLE orders (n INT)";
        sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
        for (path, mode, is_refused) in [(&theirs, "delete", true), (&ours, "wal", false)] {
            let locks = connect(&format!("sqlite:{}", path.display())).await;
            release(locks.mutex("x").lock().await.unwrap()).await;
            assert_eq!(journal_mode(path).await, mode);
            let found = locks.diagnose().await.unwrap();
            let shared = found.iter().find(|finding| finding.id == "shared-file");
            assert_eq!(shared.is_some_and(|f| f.what.contains("orders")), is_refused, "{found:?}");
            let notes = &locks.guarantees().notes;
            assert_eq!(notes.iter().any(|note| note.contains("orders")), is_refused, "{notes:?}");
            // The second time, leasehold's own tables exist.
            drop(connect(&format!("sqlite:{}", path.display())).await);
            assert_eq!(journal_mode(path).await, mode);
        }
    });
}

/// Collects the log.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// F74
#[test]
fn installing_again_logs_nothing() {
    let log = Log::default();
    let written = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || written.clone()).finish();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::subscriber::with_default(subscriber, || {
        runtime.block_on(async {
            let pool = sqlx::PgPool::connect(&testbed::postgres().database()).await.unwrap();
            for _ in 0..2 {
                leasehold::database::install(&pool).await.unwrap();
            }
            // Shows that such a message would be seen.
            let sql = "CREATE TABLE IF NOT EXISTS leasehold_fence (n INT)";
            sqlx::raw_sql(sql).execute(&pool).await.unwrap();
        });
    });
    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(logged.matches("already exists").count(), 1, "{logged}");
}
