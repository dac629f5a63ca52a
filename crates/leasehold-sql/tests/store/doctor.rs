//! The doctor finds each planted misconfiguration, and nothing on a well-configured server.

use leasehold::doctor::Severity;
use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::{findings, troubles};
use testbed::{MariaDb, PgBouncer, Postgres, Setup};

// S61
#[tokio::test]
async fn doctor_reports_sqlite_that_does_not_sync() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = |how: &str| format!("sqlite:{}{how}", dir.path().join("db").display());
    let ours = |found: Vec<(&'static str, Severity)>| -> Vec<_> {
        found.into_iter().filter(|(id, _)| *id != "file-system").collect()
    };
    assert_eq!(ours(troubles(&url("")).await), []);
    assert_eq!(ours(troubles(&url("?synchronous=normal")).await), [("synchronous", Weak)]);
    assert_eq!(ours(troubles(&url("?synchronous=off")).await), [("synchronous", Broken)]);
    // Diagnosing does not release a lock that SQLite has on its file in this process.
    let locks = leasehold::connect(url("")).await.unwrap();
    let guard = locks.mutex("held").try_lock().await.unwrap();
    locks.diagnose().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn postgres_with_good_config_passes_doctor() {
    let server = Postgres::start();
    let url = server.database();
    assert_eq!(troubles(&url).await, []);
    // Settings can be changed for a single database of the server.
    let plant = |setting: &str| {
        let name = url.rsplit('/').next().unwrap();
        server.admin("postgres", &format!("ALTER DATABASE {name} SET {setting}"));
    };
    // With the smallest pool that a URL can configure.
    assert_eq!(troubles(&format!("{url}?pool=1")).await, []);
    plant("synchronous_commit = off");
    assert_eq!(troubles(&url).await, [("synchronous_commit", Broken)]);
    plant("synchronous_commit = on");
    // Our sessions have the isolation level that they need, whatever the default is.
    plant("default_transaction_isolation = 'serializable'");
    plant("idle_session_timeout = '90s'");
    assert_eq!(troubles(&url).await, [("idle_session_timeout", Weak)]);
}

#[tokio::test]
async fn doctor_reports_postgres_that_does_not_sync() {
    // `fast` is a setup for tests only.
    let found = troubles(&testbed::postgres().database()).await;
    let expected =
        [("fsync", Broken), ("full_page_writes", Broken), ("synchronous_commit", Broken)];
    assert_eq!(found, expected);
}

// S42
#[tokio::test]
async fn pooler_in_transaction_mode_is_detected() {
    let server = Postgres::start();
    let direct = server.database();
    let pooler = PgBouncer::before(&server);
    let url = pooler.in_front_of(&server, &direct);
    // A declared pooler is not a problem. An undeclared one is found, or connecting fails with the
    // fix.
    assert_eq!(troubles(&format!("{url}?pooler=transaction")).await, []);
    // The same while other clients use the server's sessions.
    let busy = leasehold::connect(format!("{url}?pooler=transaction")).await.unwrap();
    let mut others = tokio::task::JoinSet::new();
    for n in 0..8 {
        let mutex = busy.mutex(format!("busy {n}"));
        others.spawn(async move {
            loop {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
        });
    }
    for _ in 0..20 {
        let found = findings(&format!("{url}?pooler=transaction&pool=1")).await;
        assert!(
            found.iter().all(|f| f.id != "pooler"),
            "a warning about the pooler, although pooler=transaction is set: {found:?}"
        );
    }
    drop(others);
    let message = match leasehold::connect(&url).await {
        Err(error) => format!("{error:#}"),
        Ok(locks) => match locks.diagnose().await {
            Err(error) => format!("{error:#}"),
            Ok(found) => found.first().map(|f| format!("{} {}", f.severity, f.fix)).unwrap(),
        },
    };
    assert!(message.contains("pooler=transaction"), "{message}");
    let reported = findings(&format!("{direct}?pooler=transaction")).await;
    assert!(
        reported.iter().any(|f| f.id == "pooler" && f.severity == Severity::Note),
        "{reported:?}"
    );
}

#[tokio::test]
async fn mariadb_with_good_config_passes_doctor() {
    let server = MariaDb::start();
    let url = server.database();
    assert_eq!(troubles(&url).await, []);
    for (plant, back, expected) in [
        ("innodb_flush_log_at_trx_commit = 2", "1", ("innodb_flush_log_at_trx_commit", Broken)),
        ("innodb_flush_log_at_trx_commit = 0", "1", ("innodb_flush_log_at_trx_commit", Broken)),
        ("wait_timeout = 20", "28800", ("wait_timeout", Weak)),
    ] {
        server.admin(&format!("SET GLOBAL {plant}"));
        assert_eq!(troubles(&url).await, [expected], "{plant}");
        let setting = plant.split(' ').next().unwrap();
        server.admin(&format!("SET GLOBAL {setting} = {back}"));
    }
    assert_eq!(troubles(&url).await, []);
    // Connecting to a replica fails immediately. A server can become a replica later.
    let locks = leasehold::connect(&url).await.unwrap();
    server.admin("SET GLOBAL read_only = 1");
    assert_eq!(locks.diagnose().await.unwrap().first().map(|f| f.id), Some("read_only"));
    let error = leasehold::connect(&url).await.unwrap_err();
    assert!(format!("{error:#}").contains("connect to the primary"), "{error}");
    server.admin("SET GLOBAL read_only = 0");
    server.admin("SET GLOBAL max_connections = 20");
    assert_eq!(troubles(&format!("{url}?pool=30")).await, [("connections", Weak)]);
    let name = url.rsplit('/').next().unwrap();
    server.admin(&format!("ALTER TABLE {name}.leasehold_locks ENGINE = MyISAM"));
    assert_eq!(troubles(&url).await, [("engine", Broken)]);
}

#[tokio::test]
async fn doctor_reports_mariadb_with_a_statement_binary_log() {
    let mut setup = Setup::new();
    for word in ["--log-bin", "--server-id=1", "--binlog-format=STATEMENT", "--sync-binlog=0"] {
        setup = setup.arg(word);
    }
    let server = MariaDb::with(setup);
    let url = server.database();
    // A client cannot create its tables there, so an administrator does.
    let name = url.rsplit('/').next().unwrap();
    let schema = leasehold::store::sql::schema(&url).unwrap();
    server.admin(&format!("USE {name}; {schema}"));
    assert_eq!(troubles(&url).await, [("binlog_format", Broken), ("sync_binlog", Weak)]);
}

#[tokio::test]
async fn doctor_reports_a_clock_difference() {
    let server = MariaDb::with(Setup::new().movable_clock());
    let url = server.database();
    server.shift_clock(3600);
    assert_eq!(troubles(&url).await, [("clock-difference", Weak)]);
    server.shift_clock(-3600);
    assert_eq!(troubles(&url).await, [("clock-difference", Weak)]);
    server.shift_clock(0);
    assert_eq!(troubles(&url).await, []);
}
