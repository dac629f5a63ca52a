//! The conformance suite on this crate's stores.

leasehold_conformance::conformance_suite!(sqlite, async {
    // No power is cut here, so commits need not wait for the disk. Other tests cover that.
    let url = concat!("sqlite:", env!("CARGO_TARGET_TMPDIR"), "/conformance.db?synchronous=off");
    leasehold::connect(url).await.unwrap()
});

static POSTGRES: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| testbed::postgres().database());

leasehold_conformance::conformance_suite!(postgres, async {
    leasehold::connect(POSTGRES.as_str()).await.unwrap()
});

// A service that already has a pool.
leasehold_conformance::conformance_suite!(postgres_pool, ignored, async {
    use leasehold::store::sql::PoolExt;
    let pool = sqlx::PgPool::connect_lazy(&POSTGRES).unwrap();
    leasehold::builder().postgres(&pool, "").await.unwrap()
});

/// A user that may not create anything.
static POSTGRES_FEW_RIGHTS: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
    let server = testbed::postgres();
    let url = server.database();
    let tables = leasehold::store::sql::schema(&url).unwrap();
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

leasehold_conformance::conformance_suite!(postgres_few_rights, ignored, async {
    leasehold::connect(POSTGRES_FEW_RIGHTS.as_str()).await.unwrap()
});

static MARIADB: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| testbed::mariadb().database());

leasehold_conformance::conformance_suite!(mariadb, async {
    leasehold::connect(MARIADB.as_str()).await.unwrap()
});

static MYSQL: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| match testbed::Server::MySql.in_this_run() {
        true => testbed::mysql().database(),
        false => testbed::mariadb().database(),
    });

leasehold_conformance::conformance_suite!(mysql, ignored, async {
    leasehold::connect(MYSQL.as_str()).await.unwrap()
});
