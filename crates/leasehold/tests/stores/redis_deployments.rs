//! The suite on Redis's other deployments: a cluster, and sentinels with grants that a replica confirms.

#![cfg(all(feature = "redis", feature = "conformance"))]

use crate::common::connect_patiently;

leasehold::conformance_suite!(redis_cluster, async {
    connect_patiently(&testbed::cluster().url()).await
});

leasehold::conformance_suite!(redis_sentinel_confirmed, async {
    connect_patiently(&(testbed::sentinel().url() + "?replicas=1&replicas_ms=4000")).await
});
