//! Runs the conformance suite on this crate's stores.

leasehold_conformance::conformance_suite!(redis, async {
    leasehold::connect(testbed::redis().url()).await.unwrap()
});

leasehold_conformance::conformance_suite!(valkey, ignored, async {
    let server = match testbed::Server::Valkey.in_this_run() {
        true => testbed::valkey(),
        false => testbed::redis(),
    };
    leasehold::connect(server.url()).await.unwrap()
});
