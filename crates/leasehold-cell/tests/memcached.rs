//! The suite that every store passes, on a real server.
#![cfg(feature = "memcached")]

use leasehold_core::{Builder, Registry};

leasehold_conformance::conformance_suite!(memcached, async {
    let registry =
        Registry::default().with("memcached", &["memcached"], leasehold_cell::memcached::open);
    // Nobody has held anything there before.
    let url = format!("{}?restart_delay_ms=0", testbed::memcached().url());
    Builder::new(registry).connect(url).await.unwrap()
});
