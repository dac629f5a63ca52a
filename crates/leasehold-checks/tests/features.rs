//! What a program builds for the features that it names: its store, what that stands on, and no other.

use std::collections::BTreeSet;

/// The packages that are built for these features.
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

/// A feature, and the packages of ours that it needs beside the core.
const FEATURES: [(&str, &[&str]); 15] = [
    ("", &[]),
    ("file", &["leasehold-file"]),
    ("sqlite", &["leasehold-sql"]),
    ("postgres", &["leasehold-sql"]),
    ("mysql", &["leasehold-sql"]),
    ("redis", &["leasehold-redis"]),
    ("redlock", &["leasehold-redis"]),
    ("zookeeper", &["leasehold-zookeeper"]),
    ("etcd", &["leasehold-etcd"]),
    ("memcached", &["leasehold-cell"]),
    ("nats", &["leasehold-cell"]),
    ("s3", &["leasehold-cell"]),
    ("gs", &["leasehold-cell"]),
    ("az", &["leasehold-cell"]),
    ("http", &["leasehold-http"]),
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

#[test]
fn f76_tls_is_built_only_for_who_asks_for_it() {
    let is_tls =
        |name: &String| name.starts_with("rustls") || name == "ring" || name == "tokio-rustls";
    let stores = ["postgres", "mysql", "redis", "redlock", "zookeeper", "etcd"];
    for store in stores {
        let plain: Vec<String> = packages(store).into_iter().filter(is_tls).collect();
        assert!(plain.is_empty(), "{store} builds {plain:?}");
        let encrypted = packages(&format!("{store},tls"));
        assert!(encrypted.iter().any(|name| name == "rustls"), "{store} with tls builds none");
    }
    assert!(!packages("tls").iter().any(is_tls), "without a store there is nothing to encrypt");
}

/// Of each feature's driver nothing is built for anybody else.
#[test]
fn a_driver_is_built_for_who_asks_for_it() {
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
