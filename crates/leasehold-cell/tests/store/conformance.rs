//! The conformance suite on this crate's stores.

leasehold_conformance::conformance_suite!(memcached, async {
    // The server is new, so no client can have lost a hold there.
    let url = format!("{}?restart_delay_ms=0", testbed::memcached().url());
    leasehold::connect(url).await.unwrap()
});

static THREE: std::sync::LazyLock<[testbed::Memcached; 3]> =
    std::sync::LazyLock::new(|| std::array::from_fn(|_| testbed::Memcached::start()));

leasehold_conformance::conformance_suite!(memcached_three, ignored, async {
    let [a, b, c] = THREE.each_ref().map(testbed::Memcached::port);
    let hosts = format!("127.0.0.1:{a},127.0.0.1:{b},127.0.0.1:{c}");
    leasehold::connect(format!("memcached://{hosts}/?restart_delay_ms=0")).await.unwrap()
});

leasehold_conformance::conformance_suite!(nats, async {
    leasehold::connect(testbed::nats().url()).await.unwrap()
});

leasehold_conformance::conformance_suite!(s3, slow, async {
    let url = testbed::seaweed().url("conformance") + "&poll_ms=50";
    leasehold::connect(url).await.unwrap()
});

leasehold_conformance::conformance_suite!(gs, slow, ignored, async {
    let url = testbed::google().url("conformance") + "&poll_ms=200";
    leasehold::connect(url).await.unwrap()
});

leasehold_conformance::conformance_suite!(az, slow, ignored, async {
    let url = testbed::azurite().url("conformance") + "&poll_ms=200";
    leasehold::connect(url).await.unwrap()
});
