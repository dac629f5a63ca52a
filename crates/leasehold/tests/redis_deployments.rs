//! The suite on Redis's other deployments: a cluster, and sentinels with grants that a replica confirms.

#![cfg(all(feature = "redis", feature = "conformance"))]

use leasehold::Leasehold;

leasehold::conformance_suite!(redis_cluster, async {
    Leasehold::connect(testbed::cluster().url()).await.unwrap()
});

leasehold::conformance_suite!(redis_sentinel_confirmed, async {
    Leasehold::connect(testbed::sentinel().url() + "?replicas=1&replicas_ms=4000").await.unwrap()
});
