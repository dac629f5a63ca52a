//! The conformance suite on this crate's stores.

static ETCD: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| testbed::etcd().url());

leasehold_conformance::conformance_suite!(etcd, async {
    leasehold::connect(ETCD.as_str()).await.unwrap()
});
