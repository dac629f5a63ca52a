//! Every store in this build passes the suite.

use std::sync::Arc;

use leasehold::store::MemoryStore;
use leasehold::{BUILT_IN, Builder};

leasehold::conformance_suite!(memory, async {
    leasehold::connect("memory:conformance").await.unwrap()
});

#[cfg(feature = "file")]
leasehold::conformance_suite!(file, async {
    leasehold::connect(concat!("file:", env!("CARGO_TARGET_TMPDIR"), "/conformance")).await.unwrap()
});

#[cfg(feature = "sqlite")]
leasehold::conformance_suite!(sqlite, async {
    // No power is cut here; that the disk is waited for is tested elsewhere.
    let url = concat!("sqlite:", env!("CARGO_TARGET_TMPDIR"), "/conformance.db?synchronous=off");
    leasehold::connect(url).await.unwrap()
});

#[cfg(feature = "postgres")]
static POSTGRES: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| testbed::postgres().database());

#[cfg(feature = "postgres")]
leasehold::conformance_suite!(postgres, async {
    leasehold::connect(POSTGRES.as_str()).await.unwrap()
});

// A service whose pool is there already.
#[cfg(feature = "postgres")]
leasehold::conformance_suite!(postgres_pool, async {
    use leasehold::store::sql::PoolExt;
    let pool = sqlx::PgPool::connect_lazy(&POSTGRES).unwrap();
    leasehold::builder().postgres(&pool, "").await.unwrap()
});

/// A user who may make nothing: turns are taken without procedures.
#[cfg(feature = "postgres")]
static POSTGRES_FEW_RIGHTS: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
    let server = testbed::postgres();
    let url = server.database();
    let printed = leasehold::store::sql::schema(&url).unwrap();
    let (tables, _) = printed.split_once("-- The following is optional").unwrap();
    let database = url.rsplit('/').next().unwrap();
    server.admin(
        database,
        &format!(
            "{tables} REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE few LOGIN PASSWORD 'few'; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO few"
        ),
    );
    url.replace("lh:lh@", "few:few@")
});

#[cfg(feature = "postgres")]
leasehold::conformance_suite!(postgres_few_rights, async {
    leasehold::connect(POSTGRES_FEW_RIGHTS.as_str()).await.unwrap()
});

#[cfg(feature = "mysql")]
static MARIADB: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| testbed::mariadb().database());

#[cfg(feature = "mysql")]
leasehold::conformance_suite!(mariadb, async {
    leasehold::connect(MARIADB.as_str()).await.unwrap()
});

/// A user who may make tables and no procedures.
#[cfg(feature = "mysql")]
static MARIADB_FEW_RIGHTS: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
    let server = testbed::mariadb();
    let url = server.database();
    let database = url.rsplit('/').next().unwrap();
    server.admin(&format!(
        "CREATE USER few@'127.0.0.1' IDENTIFIED BY 'few'; \
         GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON {database}.* TO few@'127.0.0.1'"
    ));
    url.replace("lh:lh@", "few:few@")
});

#[cfg(feature = "mysql")]
leasehold::conformance_suite!(mariadb_few_rights, async {
    leasehold::connect(MARIADB_FEW_RIGHTS.as_str()).await.unwrap()
});

#[cfg(feature = "mysql")]
static MYSQL: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| match testbed::Server::MySql.in_this_run() {
        true => testbed::mysql().database(),
        false => testbed::mariadb().database(),
    });

#[cfg(feature = "mysql")]
leasehold::conformance_suite!(mysql, async { leasehold::connect(MYSQL.as_str()).await.unwrap() });

#[cfg(feature = "redis")]
leasehold::conformance_suite!(redis, async {
    leasehold::connect(testbed::redis().url()).await.unwrap()
});

#[cfg(feature = "redis")]
leasehold::conformance_suite!(valkey, async {
    let server = match testbed::Server::Valkey.in_this_run() {
        true => testbed::valkey(),
        false => testbed::redis(),
    };
    leasehold::connect(server.url()).await.unwrap()
});

#[cfg(feature = "zookeeper")]
leasehold::conformance_suite!(zookeeper, async {
    leasehold::connect(testbed::zookeeper().url()).await.unwrap()
});

#[cfg(feature = "zookeeper")]
leasehold::conformance_suite!(zookeeper_kazoo, async {
    let url = format!("{}/kazoo?naming=kazoo&create=yes", testbed::zookeeper().url());
    leasehold::connect(url).await.unwrap()
});

#[cfg(feature = "etcd")]
static ETCD: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| testbed::etcd().url());

#[cfg(feature = "etcd")]
leasehold::conformance_suite!(etcd, async { leasehold::connect(ETCD.as_str()).await.unwrap() });

#[cfg(feature = "memcached")]
leasehold::conformance_suite!(memcached, async {
    // Nobody has held anything there before.
    let url = format!("{}?restart_delay_ms=0", testbed::memcached().url());
    leasehold::connect(url).await.unwrap()
});

#[cfg(feature = "memcached")]
static THREE: std::sync::LazyLock<[testbed::Memcached; 3]> =
    std::sync::LazyLock::new(|| std::array::from_fn(|_| testbed::Memcached::start()));

#[cfg(feature = "memcached")]
leasehold::conformance_suite!(memcached_three, async {
    let [a, b, c] = THREE.each_ref().map(testbed::Memcached::port);
    let hosts = format!("127.0.0.1:{a},127.0.0.1:{b},127.0.0.1:{c}");
    leasehold::connect(format!("memcached://{hosts}/?restart_delay_ms=0")).await.unwrap()
});

#[cfg(feature = "nats")]
leasehold::conformance_suite!(nats, async {
    leasehold::connect(testbed::nats().url()).await.unwrap()
});

#[cfg(feature = "s3")]
leasehold::conformance_suite!(s3, slow, async {
    let url = testbed::seaweed().url("conformance") + "&poll_ms=50";
    leasehold::connect(url).await.unwrap()
});

#[cfg(feature = "gs")]
leasehold::conformance_suite!(gs, slow, async {
    let url = testbed::google().url("conformance") + "&poll_ms=200";
    leasehold::connect(url).await.unwrap()
});

#[cfg(feature = "az")]
leasehold::conformance_suite!(az, slow, async {
    let url = testbed::azurite().url("conformance") + "&poll_ms=200";
    leasehold::connect(url).await.unwrap()
});

// Every token is told greater than the store draws it.
leasehold::conformance_suite!(token_offset, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().token_offset(1 << 60).store(STORE.clone()).unwrap()
});

// What a third party writes for a store of its own.
leasehold::conformance_suite!(third_party, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().store(STORE.clone()).unwrap()
});

#[test]
fn every_built_in_store_is_in_the_suite() {
    // That of redlock: is in a file of its own.
    let suites = [
        "memory",
        "file",
        "sqlite",
        "postgres",
        "mysql",
        "redis",
        "redlock",
        "zookeeper",
        "etcd",
        "memcached",
        "nats",
        "s3",
        "gs",
        "az",
    ];
    for scheme in BUILT_IN {
        assert!(suites.contains(scheme), "the store {scheme}: has no conformance suite above");
    }
}
