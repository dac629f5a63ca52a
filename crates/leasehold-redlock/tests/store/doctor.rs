//! The doctor finds each planted misconfiguration, and nothing on correctly configured servers.

use leasehold::doctor::Severity::{Broken, Weak};
use leasehold_test_support::doctor::{troubles, until_troubles};
use testbed::{Redlock, Setup};

// S33
#[tokio::test]
async fn doctor_reports_redlock_servers_that_vote_too_early_or_never() {
    let servers = Redlock::with(4, Setup::new());
    let old_enough = format!("{}?max_lease_ms=50&restart_delay_ms=50", servers.url());
    // The test servers run on one machine. A server with an uptime of one second may have just
    // started.
    let well = [("even", Weak), ("one-machine", Weak)];
    until_troubles(&old_enough, &well).await;
    let node = &servers.nodes()[0];
    node.command(&["CONFIG", "SET", "appendonly", "no"]);
    until_troubles(&old_enough, &[&[("durable", Weak)], &well[..]].concat()).await;
    node.command(&["CONFIG", "SET", "appendonly", "yes"]);
    until_troubles(&old_enough, &well).await;
    let early = format!("{}?restart_delay_ms=10", servers.url());
    assert!(troubles(&early).await.contains(&("restart-delay", Broken)));
    node.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    node.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    assert!(troubles(&servers.url()).await.contains(&("eviction", Broken)));
    node.kill();
    assert!(troubles(&servers.url()).await.contains(&("node", Weak)));
}
