//! The doctor finds each planted misconfiguration, and nothing on a server that is set up well.

use leasehold::doctor::Severity;
use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::{findings, troubles};
use testbed::{MariaDb, PgBouncer, Postgres, Setup};

#[tokio::test]
async fn s61_sqlite_that_does_not_wait_for_the_disk() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = |how: &str| format!("sqlite:{}{how}", dir.path().join("db").display());
    let ours = |found: Vec<(&'static str, Severity)>| -> Vec<_> {
        found.into_iter().filter(|(id, _)| *id != "file-system").collect()
    };
    assert_eq!(ours(troubles(&url("")).await), []);
    assert_eq!(ours(troubles(&url("?synchronous=normal")).await), [("synchronous", Weak)]);
    assert_eq!(ours(troubles(&url("?synchronous=off")).await), [("synchronous", Broken)]);
    // Looking does not let go of a lock that SQLite has on its file in this process.
    let locks = leasehold::connect(url("")).await.unwrap();
    let guard = locks.mutex("held").try_lock().await.unwrap();
    locks.diagnose().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_postgres_that_is_set_up_well_is_found_well() {
    let server = Postgres::start();
    let url = server.database();
    assert_eq!(troubles(&url).await, []);
    // What a server says of itself can be planted for one database of it.
    let plant = |setting: &str| {
        let name = url.rsplit('/').next().unwrap();
        server.admin("postgres", &format!("ALTER DATABASE {name} SET {setting}"));
    };
    // With the least that a URL can ask for.
    assert_eq!(troubles(&format!("{url}?pool=1")).await, []);
    plant("synchronous_commit = off");
    assert_eq!(troubles(&url).await, [("synchronous_commit", Broken)]);
    plant("synchronous_commit = on");
    // Our sessions have the level that they need, whatever others have.
    plant("default_transaction_isolation = 'serializable'");
    plant("idle_session_timeout = '90s'");
    assert_eq!(troubles(&url).await, [("idle_session_timeout", Weak)]);
}

#[tokio::test]
async fn a_postgres_that_does_not_wait_for_the_disk() {
    // With `fast`, as tests like it and nobody else may.
    let found = troubles(&testbed::postgres().database()).await;
    let expected =
        [("fsync", Broken), ("full_page_writes", Broken), ("synchronous_commit", Broken)];
    assert_eq!(found, expected);
}

#[tokio::test]
async fn s42_a_pooler_in_transaction_mode_is_noticed() {
    let server = Postgres::start();
    let direct = server.database();
    let pooler = PgBouncer::before(&server);
    let url = pooler.in_front_of(&server, &direct);
    // Said, it is no trouble; unsaid, it is found, or connecting says what to write.
    assert_eq!(troubles(&format!("{url}?pooler=transaction")).await, []);
    // Also while others take turns with the server's sessions.
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
        assert!(found.iter().all(|f| f.id != "pooler"), "not noticed: {found:?}");
    }
    drop(others);
    let told = match leasehold::connect(&url).await {
        Err(error) => format!("{error:#}"),
        Ok(locks) => match locks.diagnose().await {
            Err(error) => format!("{error:#}"),
            Ok(found) => found.first().map(|f| format!("{} {}", f.severity, f.fix)).unwrap(),
        },
    };
    assert!(told.contains("pooler=transaction"), "{told}");
    let said = findings(&format!("{direct}?pooler=transaction")).await;
    assert!(said.iter().any(|f| f.id == "pooler" && f.severity == Severity::Note), "{said:?}");
}

#[tokio::test]
async fn a_mariadb_that_is_set_up_well_is_found_well() {
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
    // Who connects to a replica is told so at once; a server can become one later.
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
async fn a_mariadb_whose_binary_log_takes_no_rows() {
    let mut setup = Setup::new();
    for word in ["--log-bin", "--server-id=1", "--binlog-format=STATEMENT", "--sync-binlog=0"] {
        setup = setup.arg(word);
    }
    let server = MariaDb::with(setup);
    let url = server.database();
    // It cannot even make its tables there, so an administrator makes them.
    let name = url.rsplit('/').next().unwrap();
    let schema = leasehold::store::sql::schema(&url).unwrap();
    server.admin(&format!("USE {name}; {schema}"));
    assert_eq!(troubles(&url).await, [("binlog_format", Broken), ("sync_binlog", Weak)]);
}

#[tokio::test]
async fn servers_whose_clock_is_off() {
    let server = MariaDb::with(Setup::new().movable_clock());
    let url = server.database();
    server.shift_clock(3600);
    assert_eq!(troubles(&url).await, [("clock-difference", Weak)]);
    server.shift_clock(-3600);
    assert_eq!(troubles(&url).await, [("clock-difference", Weak)]);
    server.shift_clock(0);
    assert_eq!(troubles(&url).await, []);
}
