//! The conformance suite on this crate's stores.

leasehold_conformance::conformance_suite!(zookeeper, async {
    leasehold::connect(testbed::zookeeper().url()).await.unwrap()
});

leasehold_conformance::conformance_suite!(zookeeper_kazoo, ignored, async {
    let url = format!("{}/kazoo?naming=kazoo&create=yes", testbed::zookeeper().url());
    leasehold::connect(url).await.unwrap()
});
