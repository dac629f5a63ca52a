//! A cut of the power of all members of NATS.
#![cfg(feature = "nats")]

use std::time::{Duration, Instant};

use leasehold_test_support::power::{acquire, grants_survive_a_power_cut, is_refused, with_disk};
use leasehold_test_support::*;
use testbed::NatsCluster;

fn url(cluster: &NatsCluster) -> String {
    cluster.url() + "/?session_ms=180000"
}

fn kill(cluster: &NatsCluster) {
    (0..3).for_each(|member| cluster.kill(member));
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn grants_survive_a_power_cut_if_nats_syncs_always() {
    with_disk("power::grants_survive_a_power_cut_if_nats_syncs_always", |disk| async move {
        let cluster = NatsCluster::durable();
        let (kill, restart) = (|| kill(&cluster), || cluster.restart_all());
        grants_survive_a_power_cut(&disk, &url(&cluster), kill, restart).await;
    });
}

/// NATS acknowledges writes that it syncs up to two minutes later. Jepsen found that it loses them:
/// <https://jepsen.io/analyses/nats-2.12.1>. The documentation says which guarantee this breaks:
/// the lock gets a second holder. Its token is higher nevertheless, so a fence protects the
/// resource.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn default_nats_loses_grants_in_a_power_cut_but_tokens_increase() {
    let name = "power::default_nats_loses_grants_in_a_power_cut_but_tokens_increase";
    with_disk(name, |disk| async move {
        let cluster = NatsCluster::start();
        let (ours, other) = (connect(&url(&cluster)).await, connect(&url(&cluster)).await);
        // Two minutes pass, so the bucket itself is not lost.
        disk.sync();
        let guard = acquire(&ours, "lost").await;
        assert!(is_refused(&other, "lost").await);
        let began = Instant::now();
        tokio::task::block_in_place(|| {
            disk.cycle_power(|| kill(&cluster));
            cluster.restart_all();
        });
        let next = acquire(&other, "lost").await;
        assert!(began.elapsed() < Duration::from_secs(50), "the lease may have expired");
        assert!(next.token() > guard.token(), "token {} after {}", next.token(), guard.token());
    });
}
