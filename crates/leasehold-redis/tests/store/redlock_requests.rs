//! What a pair and a failed try cost each server, and what stays of a name.

use std::time::Duration;

use crate::redlock_common::*;
use leasehold::ErrorKind;
use testbed::{Proxy, Redis};

/// One script at each node to take and one to release, in one round trip each (R13, R31).
#[tokio::test]
async fn r31_taking_and_releasing_cost_one_request_to_each_node() {
    let servers = servers(5);
    let (proxies, url) = proxied(&servers);
    let url = url + "?restart_delay_ms=0&node_timeout_ms=20000&max_lease_ms=600000";
    let locks = connect(&url).await;
    let lock = locks.mutex("counted").lease(Duration::from_secs(600));
    let scripts = |node: &Redis| {
        let calls = node.calls();
        let of = |what: &str| calls.iter().find(|(name, _)| name == what).map_or(0, |c| c.1);
        assert_eq!(of("eval"), 0, "a script that the server does not know: {calls:?}");
        of("evalsha")
    };
    // The scripts are known to the servers after this, and all of it has been answered.
    let nodes = servers.nodes();
    let guard = lock.try_lock().await.unwrap();
    eventually("known", async || nodes.iter().all(|node| has_key(node, "counted"))).await;
    guard.release().await.unwrap();
    eventually("known", async || nodes.iter().all(|node| !has_key(node, "counted"))).await;
    let requests = || proxies.iter().map(Proxy::requests).sum::<usize>();
    let mut before = requests();
    eventually("quiet", async || {
        tokio::time::sleep(Duration::from_millis(200)).await;
        std::mem::replace(&mut before, requests()) == requests()
    })
    .await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    for pairs in 1..=3 {
        let guard = lock.try_lock().await.unwrap();
        eventually("asked", async || servers.nodes().iter().all(|n| scripts(n) >= 2 * pairs - 1))
            .await;
        guard.release().await.unwrap();
        eventually("asked", async || servers.nodes().iter().all(|n| scripts(n) >= 2 * pairs)).await;
    }
    // Nothing else comes later.
    tokio::time::sleep(Duration::from_millis(200)).await;
    // HMGET, SET, HSET twice, TIME and PEXPIRE to take; ZRANGE, GET and DEL to release.
    for node in servers.nodes() {
        assert_eq!(scripts(node), 6, "{:?}", node.calls());
        let ours = |name: &str| name != "info" && !name.starts_with("config");
        let calls = node.calls();
        let commands: u64 = calls.iter().filter(|(name, _)| ours(name)).map(|(_, n)| n).sum();
        assert_eq!(commands, 3 * 11, "{calls:?}");
    }
    assert_eq!(requests() - before, 6 * servers.nodes().len());
}

/// Where the holder has a server, whoever tries in vain there leaves nothing.
#[tokio::test]
async fn f41_a_try_in_vain_writes_nothing() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=5000";
    let (locks, other) = (connect(&url).await, connect(&url).await);
    let lock = locks.mutex("tried").lease(Duration::from_secs(30)).no_renewal();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "tried"))).await;
    let changes = |node: &Redis| node.info("persistence", "rdb_changes_since_last_save");
    let before: Vec<String> = nodes.iter().map(changes).collect();
    for _ in 0..5 {
        let error = other.mutex("tried").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    }
    assert_eq!(nodes.iter().map(changes).collect::<Vec<_>>(), before);
    drop(guard);
}

/// Names used once leave nothing that does not go away by itself.
#[tokio::test]
async fn what_is_kept_for_a_name_goes_away() {
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    for i in 0..200 {
        locks.mutex(format!("once-{i}")).try_lock().await.unwrap().release().await.unwrap();
    }
    for node in servers.nodes() {
        let keys = node.command(&["KEYS", "*"]);
        let forever = keys.lines().filter(|key| node.command(&["TTL", key]) == "-1");
        assert_eq!(forever.collect::<Vec<_>>(), ["leasehold:redlock"]);
    }
}
