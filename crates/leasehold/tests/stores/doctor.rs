//! The doctor finds each planted misconfiguration, and nothing on a server that is set up well.
#![cfg(all(
    feature = "file",
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "redis",
    feature = "redlock",
    feature = "etcd",
    feature = "zookeeper"
))]

use leasehold::doctor::{Finding, Severity};
use leasehold::store::Survival;
use testbed::{
    Cluster, Etcd, MariaDb, PgBouncer, Postgres, Redis, Redlock, Sentinel, Setup, ZooKeeper,
    ZooKeeperSetup, ZooKeepers,
};

/// What is found that is worse than a note.
async fn findings(url: &str) -> Vec<Finding> {
    try_findings(url).await.unwrap()
}

async fn try_findings(url: &str) -> leasehold::Result<Vec<Finding>> {
    let found = leasehold::connect(url).await?.diagnose().await?;
    assert!(found.is_sorted_by(|a, b| a.severity >= b.severity), "worst first: {found:?}");
    for finding in &found {
        let worse = finding.severity > Severity::Note;
        assert!(worse != finding.fix.is_empty(), "{finding:?}");
        let text = format!("{}{}{}", finding.what, finding.why, finding.fix);
        assert!(!text.contains('\n') && !finding.why.is_empty(), "{finding:?}");
        assert!(!text.contains("lh:lh"), "a password: {finding:?}");
    }
    Ok(found)
}

type Trouble = (&'static str, Severity);

async fn troubles(url: &str) -> Vec<Trouble> {
    try_troubles(url).await.unwrap()
}

async fn try_troubles(url: &str) -> leasehold::Result<Vec<Trouble>> {
    let found = try_findings(url).await?.into_iter().filter(|f| f.severity > Severity::Note);
    let mut ids: Vec<_> = found.map(|f| (f.id, f.severity)).collect();
    ids.sort_unstable();
    Ok(ids)
}

/// These and no others, in the end: a server that does not answer in time is said to be down.
async fn until_troubles(url: &str, expected: &[Trouble]) {
    let start = std::time::Instant::now();
    loop {
        let found = try_troubles(url).await;
        if found.as_ref().is_ok_and(|found| found == expected) {
            return;
        }
        assert!(start.elapsed().as_secs() < 60, "{url}: {found:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

use Severity::{Broken, Weak};

#[tokio::test]
async fn memory_says_who_sees_it() {
    assert_eq!(findings("memory:").await.first().unwrap().id, "one-process");
}

#[tokio::test]
async fn a_directory_on_a_disk_is_fine_and_others_are_not() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = format!("file:{}", dir.path().display());
    let ours = |found: &[(&'static str, Severity)]| {
        // What the tests' directory is on is not ours to choose.
        found.iter().copied().filter(|(id, _)| *id != "file-system").collect::<Vec<_>>()
    };
    assert_eq!(ours(&troubles(&url).await), []);
    let open = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode));
    open(0o777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    open(0o1777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    // As it is advised.
    open(0o2770).unwrap();
    assert_eq!(ours(&troubles(&url).await), []);
    // Every Linux has a tmpfs there.
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        let found = troubles(&format!("file:{}", dir.path().display())).await;
        assert_eq!(found, [("file-system", Weak)]);
    }
}

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

#[tokio::test]
async fn s20_a_redis_that_throws_keys_away_or_forgets() {
    let server = Redis::start();
    assert_eq!(troubles(&server.url()).await, []);
    let set = |setting: &str, value: &str| server.command(&["CONFIG", "SET", setting, value]);
    set("maxmemory", "100mb");
    assert_eq!(troubles(&server.url()).await, [], "a limit alone throws nothing away");
    for policy in ["allkeys-lru", "volatile-ttl"] {
        set("maxmemory-policy", policy);
        assert_eq!(troubles(&server.url()).await, [("eviction", Broken)]);
    }
    set("maxmemory-policy", "noeviction");
    set("appendfsync", "everysec");
    assert_eq!(troubles(&server.url()).await, [("appendfsync", Weak)]);
    set("appendonly", "no");
    assert_eq!(troubles(&server.url()).await, [("persistence", Broken)]);
    set("appendonly", "yes");
    set("appendfsync", "always");
    let replica = Redis::replica_of(server.port(), Setup::new());
    until(async || server.info("replication", "connected_slaves") == "1").await;
    assert_eq!(troubles(&server.url()).await, [("asynchronous-replica", Weak)]);
    assert_eq!(troubles(&format!("{}?replicas=1", server.url())).await, []);
    drop(replica);
}

#[tokio::test]
async fn a_redis_whose_clock_is_off() {
    let server = Redis::with(Setup::new().movable_clock());
    server.shift_clock(-3600);
    assert_eq!(troubles(&server.url()).await, [("clock-difference", Weak)]);
}

#[tokio::test]
async fn sentinels_that_cannot_agree() {
    let sentinels = Sentinel::unbroken_with(1, Setup::new());
    let found = troubles(&sentinels.url()).await;
    assert!(found.iter().all(|(_, severity)| *severity == Weak), "{found:?}");
    assert!(found.contains(&("asynchronous-replica", Weak)), "{found:?}");
    let url = sentinels.url();
    let name = url.rsplit('/').next().unwrap();
    for (quorum, severity) in [("1", Weak), ("7", Broken)] {
        for port in sentinels.sentinel_ports() {
            let mut set = std::process::Command::new("redis-cli");
            set.args(["-p", &port.to_string(), "SENTINEL", "SET", name, "quorum", quorum]);
            assert!(set.output().unwrap().status.success());
        }
        let found = troubles(&sentinels.url()).await;
        assert!(found.contains(&("quorum", severity)), "{quorum}: {found:?}");
    }
    sentinels.kill_sentinel(0);
    let found = troubles(&sentinels.url()).await;
    assert!(found.contains(&("sentinel-down", Weak)), "{found:?}");
}

#[tokio::test]
async fn s33_redlock_servers_that_vote_too_early_or_not_at_all() {
    let servers = Redlock::with(4, Setup::new());
    let old_enough = format!("{}?max_lease_ms=50&restart_delay_ms=50", servers.url());
    // On one machine, as tests are. A server that says one second may just have been started.
    let well = [("even", Weak), ("one-machine", Weak)];
    until_troubles(&old_enough, &well).await;
    let node = &servers.nodes()[0];
    node.command(&["CONFIG", "SET", "appendonly", "no"]);
    until_troubles(&old_enough, &[&[("durable", Weak)], &well[..]].concat()).await;
    node.command(&["CONFIG", "SET", "appendonly", "yes"]);
    until_troubles(&old_enough, &well).await;
    let early = format!("{}?restart_delay_ms=10", servers.url());
    assert!(troubles(&early).await.contains(&("restart-delay", Broken)));
    node.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    node.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    assert!(troubles(&servers.url()).await.contains(&("eviction", Broken)));
    node.kill();
    assert!(troubles(&servers.url()).await.contains(&("node", Weak)));
}

#[tokio::test]
async fn a_cluster_of_few_masters_or_that_refuses_all_for_one() {
    let durable = || Setup::new().arg("--appendonly").arg("yes").arg("--appendfsync").arg("always");
    let covered = Cluster::unbroken_with(3, 0, durable());
    assert_eq!(troubles(&covered.url()).await, [("full-coverage", Weak); 3]);
    let setup = durable().arg("--cluster-require-full-coverage").arg("no");
    assert_eq!(troubles(&Cluster::unbroken_with(3, 0, setup.clone()).url()).await, []);
    let few = Cluster::unbroken_with(2, 0, setup);
    assert_eq!(troubles(&few.url()).await, [("few-masters", Weak)]);
}

#[tokio::test]
async fn an_etcd_of_one_member_or_without_room() {
    let cluster = Etcd::cluster();
    // Nobody answers a new client while a leader is elected.
    let mut old = None;
    until(async || {
        let locks = leasehold::connect(cluster.url()).await.ok();
        old = locks.map(|locks| locks.guarantees().on_failover == Survival::Fenced);
        old.is_some()
    })
    .await;
    // Which it is, the installed version decides.
    let version = [("version", Weak)];
    until_troubles(&cluster.url(), &version[..usize::from(old == Some(true))]).await;
    cluster.kill(0);
    until(async || {
        let found = try_findings(&cluster.url()).await.unwrap_or_default();
        found.iter().any(|f| (f.id, f.severity) == ("member-down", Weak))
    })
    .await;
    let server = Etcd::with(Setup::new().arg("--quota-backend-bytes=200000"), 1);
    assert_eq!(troubles(&server.url()).await, [("one-member", Weak)]);
    let locks = leasehold::connect(server.url()).await.unwrap();
    let filling = "x".repeat(50_000);
    for n in 0..50 {
        let key = format!("filling{n}");
        let mut put = server.etcdctl_command();
        if !put.args(["put", &key, &filling]).output().unwrap().status.success() {
            break;
        }
    }
    let found = locks.diagnose().await.unwrap();
    let ids: Vec<_> = found.iter().filter(|f| f.severity == Broken).map(|f| f.id).collect();
    assert_eq!(ids, ["full"]);
}

#[tokio::test]
async fn s73_a_zookeeper_whose_sessions_and_numbers_are_short() {
    assert_eq!(troubles(&ZooKeepers::start().url()).await, []);
    let second = std::time::Duration::from_secs(1);
    let setup = ZooKeeperSetup::new()
        .sessions(second, second * 5)
        .sequences_at("/late", 1 << 30)
        .sequences_at("/last", i32::MAX - 500_000);
    let server = ZooKeeper::with(&setup);
    assert_eq!(troubles(&server.url()).await, [("one-member", Weak), ("session-limits", Weak)]);
    assert_eq!(troubles(&format!("{}?session=5s", server.url())).await, [("one-member", Weak)]);
    let found = troubles(&format!("{}/?session=5s", server.url())).await;
    assert_eq!(found, [("one-member", Weak), ("sequence", Weak), ("sequence", Broken)]);
}

/// Waits until it is so.
async fn until(mut so: impl AsyncFnMut() -> bool) {
    let start = std::time::Instant::now();
    while !so().await {
        assert!(start.elapsed().as_secs() < 60, "never");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
