//! Costs of an acquisition with its release and of a failed try on each server, and the remaining
//! data of a name.

use std::time::Duration;

use crate::redlock_common::*;
use leasehold::ErrorKind;
use testbed::{Proxy, Redis};

// R31
/// Acquiring and releasing each take one script per node, in one round trip (R13, R31).
#[tokio::test]
async fn acquire_and_release_take_one_request_per_node_each() {
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
    // After this the servers have cached the scripts, and all requests have been answered.
    let nodes = servers.nodes();
    let guard = lock.try_lock().await.unwrap();
    until("known", async || nodes.iter().all(|node| has_key(node, "counted"))).await;
    guard.release().await.unwrap();
    until("known", async || nodes.iter().all(|node| !has_key(node, "counted"))).await;
    let requests = || proxies.iter().map(Proxy::requests).sum::<usize>();
    let mut before = requests();
    until("quiet", async || {
        tokio::time::sleep(Duration::from_millis(200)).await;
        std::mem::replace(&mut before, requests()) == requests()
    })
    .await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    for pairs in 1..=3 {
        let guard = lock.try_lock().await.unwrap();
        until("asked", async || servers.nodes().iter().all(|n| scripts(n) >= 2 * pairs - 1)).await;
        guard.release().await.unwrap();
        until("asked", async || servers.nodes().iter().all(|n| scripts(n) >= 2 * pairs)).await;
    }
    // No other request arrives later.
    tokio::time::sleep(Duration::from_millis(200)).await;
    // Acquiring uses HMGET, SET, HSET twice, TIME and PEXPIRE. Releasing uses ZRANGE, GET and DEL.
    for node in servers.nodes() {
        assert_eq!(scripts(node), 6, "{:?}", node.calls());
        let ours = |name: &str| name != "info" && !name.starts_with("config");
        let calls = node.calls();
        let commands: u64 = calls.iter().filter(|(name, _)| ours(name)).map(|(_, n)| n).sum();
        assert_eq!(commands, 3 * 11, "{calls:?}");
    }
    assert_eq!(requests() - before, 6 * servers.nodes().len());
}

// F41
/// A failed try leaves no data on the servers that the holder has.
#[tokio::test]
async fn failed_try_writes_nothing() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=5000";
    let (locks, other) = (connect(&url).await, connect(&url).await);
    let lock = locks.mutex("tried").lease(Duration::from_secs(30)).no_renewal();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "tried"))).await;
    let changes = |node: &Redis| node.info("persistence", "rdb_changes_since_last_save");
    let before: Vec<String> = nodes.iter().map(changes).collect();
    for _ in 0..5 {
        let error = other.mutex("tried").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    }
    assert_eq!(nodes.iter().map(changes).collect::<Vec<_>>(), before);
    drop(guard);
}

/// Names that are used once leave only data that expires.
#[tokio::test]
async fn data_of_used_names_expires() {
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
