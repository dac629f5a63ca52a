//! Runs the suite on Redis's other deployments: a cluster, and sentinels with grants that a replica
//! confirms.

use leasehold_test_support::connect;

leasehold_conformance::conformance_suite!(redis_cluster, ignored, async {
    connect(&testbed::cluster().url()).await
});

leasehold_conformance::conformance_suite!(redis_sentinel_confirmed, ignored, async {
    connect(&(testbed::sentinel().url() + "?replicas=1&replicas_ms=4000")).await
});
