//! A program builds only the packages of the features that it enables.

use std::collections::BTreeSet;

/// Returns the packages that are built for these features.
fn packages(features: &str) -> BTreeSet<String> {
    let mut cargo = testbed::cargo();
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["tree", "--offline", "--locked", "-p", "leasehold", "--no-default-features"]);
    cargo.args(["--features", features, "-e", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// Each feature, with the leasehold packages that it needs in addition to the core.
const FEATURES: [(&str, &[&str]); 16] = [
    ("", &[]),
    ("file", &["leasehold-file"]),
    ("sqlite", &["leasehold-sql", "leasehold-transactions"]),
    ("postgres", &["leasehold-sql", "leasehold-transactions"]),
    ("mysql", &["leasehold-sql", "leasehold-transactions"]),
    ("redis", &["leasehold-redis"]),
    ("redlock", &["leasehold-redis", "leasehold-redlock"]),
    ("zookeeper", &["leasehold-zookeeper"]),
    ("etcd", &["leasehold-etcd"]),
    ("memcached", &["leasehold-cell"]),
    ("nats", &["leasehold-cell"]),
    ("s3", &["leasehold-cell"]),
    ("gs", &["leasehold-cell"]),
    ("az", &["leasehold-cell"]),
    ("http", &["leasehold-http"]),
    ("http-store", &["leasehold-http"]),
];

#[test]
fn a_store_is_built_without_the_others() {
    for (feature, needed) in FEATURES {
        let built = packages(feature);
        let ours: Vec<&str> =
            built.iter().map(String::as_str).filter(|name| name.starts_with("leasehold")).collect();
        let mut wanted = [needed, &["leasehold", "leasehold-core"]].concat();
        wanted.sort_unstable();
        assert_eq!(ours, wanted, "{feature}");
    }
}

// F76
#[test]
fn tls_is_built_only_with_the_tls_feature() {
    let is_tls =
        |name: &String| name.starts_with("rustls") || name == "ring" || name == "tokio-rustls";
    let stores =
        ["postgres", "mysql", "redis", "redlock", "zookeeper", "etcd", "memcached", "http-store"];
    for store in stores {
        let plain: Vec<String> = packages(store).into_iter().filter(is_tls).collect();
        assert!(plain.is_empty(), "{store} without tls builds {plain:?}");
        let encrypted = packages(&format!("{store},tls"));
        assert!(
            encrypted.iter().any(|name| name == "rustls"),
            "{store} with tls does not build rustls"
        );
    }
    assert!(!packages("tls").iter().any(is_tls), "tls builds a TLS library without a store");
}

/// A driver is built only for the features that need it.
#[test]
fn driver_is_built_only_for_features_that_need_it() {
    let drivers =
        ["sqlx-core", "sqlx-postgres", "sqlx-mysql", "sqlx-sqlite", "tokio-postgres", "sea-orm"];
    let features: [(&str, &[&str]); 7] = [
        ("sql", &[]),
        ("tokio-postgres", &["tokio-postgres"]),
        ("sqlx-08-postgres", &["sqlx-core", "sqlx-postgres"]),
        ("sqlx-08-mysql", &["sqlx-core", "sqlx-mysql"]),
        ("sea-orm", &["sea-orm", "sqlx-core"]),
        ("postgres", &["sqlx-core", "sqlx-postgres"]),
        ("sqlite", &["sqlx-core", "sqlx-sqlite"]),
    ];
    for (feature, wanted) in features {
        let built = packages(feature);
        let built: Vec<_> = built.iter().filter(|name| drivers.contains(&name.as_str())).collect();
        assert_eq!(built, wanted, "{feature}");
    }
}
