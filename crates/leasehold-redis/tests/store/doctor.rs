//! The doctor finds each planted misconfiguration, and nothing on a correctly configured server.

use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::troubles;
use leasehold_test_support::until;
use testbed::{Cluster, Redis, Sentinel, Setup};

// S20
#[tokio::test]
async fn doctor_reports_eviction_and_missing_persistence() {
    let server = Redis::start();
    assert_eq!(troubles(&server.url()).await, []);
    let set = |setting: &str, value: &str| server.command(&["CONFIG", "SET", setting, value]);
    set("maxmemory", "100mb");
    assert_eq!(troubles(&server.url()).await, [], "a memory limit alone does not evict keys");
    for policy in ["allkeys-lru", "volatile-ttl"] {
        set("maxmemory-policy", policy);
        assert_eq!(troubles(&server.url()).await, [("eviction", Broken)]);
    }
    set("maxmemory-policy", "noeviction");
    set("appendfsync", "everysec");
    assert_eq!(troubles(&server.url()).await, [("appendfsync", Weak)]);
    set("appendonly", "no");
    assert_eq!(troubles(&server.url()).await, [("persistence", Broken)]);
    set("appendonly", "yes");
    set("appendfsync", "always");
    let replica = Redis::replica_of(server.port(), Setup::new());
    until("a replica is connected", async || server.info("replication", "connected_slaves") == "1")
        .await;
    assert_eq!(troubles(&server.url()).await, [("asynchronous-replica", Weak)]);
    assert_eq!(troubles(&format!("{}?replicas=1", server.url())).await, []);
    drop(replica);
}

#[tokio::test]
async fn doctor_reports_a_clock_difference() {
    let server = Redis::with(Setup::new().movable_clock());
    server.shift_clock(-3600);
    assert_eq!(troubles(&server.url()).await, [("clock-difference", Weak)]);
}

#[tokio::test]
async fn doctor_reports_sentinels_without_a_usable_quorum() {
    let sentinels = Sentinel::unbroken_with(1, Setup::new());
    let found = troubles(&sentinels.url()).await;
    assert!(found.iter().all(|(_, severity)| *severity == Weak), "{found:?}");
    assert!(found.contains(&("asynchronous-replica", Weak)), "{found:?}");
    let url = sentinels.url();
    let name = url.rsplit('/').next().unwrap();
    for (quorum, severity) in [("1", Weak), ("7", Broken)] {
        for port in sentinels.sentinel_ports() {
            let mut set = std::process::Command::new("redis-cli");
            set.args(["-p", &port.to_string(), "SENTINEL", "SET", name, "quorum", quorum]);
            assert!(set.output().unwrap().status.success());
        }
        let found = troubles(&sentinels.url()).await;
        assert!(found.contains(&("quorum", severity)), "{quorum}: {found:?}");
    }
    sentinels.kill_sentinel(0);
    let found = troubles(&sentinels.url()).await;
    assert!(found.contains(&("sentinel-down", Weak)), "{found:?}");
}

#[tokio::test]
async fn doctor_reports_few_masters_and_full_coverage() {
    let durable = || Setup::new().arg("--appendonly").arg("yes").arg("--appendfsync").arg("always");
    let covered = Cluster::unbroken_with(3, 0, durable());
    assert_eq!(troubles(&covered.url()).await, [("full-coverage", Weak); 3]);
    let setup = durable().arg("--cluster-require-full-coverage").arg("no");
    assert_eq!(troubles(&Cluster::unbroken_with(3, 0, setup.clone()).url()).await, []);
    let few = Cluster::unbroken_with(2, 0, setup);
    assert_eq!(troubles(&few.url()).await, [("few-masters", Weak)]);
}
