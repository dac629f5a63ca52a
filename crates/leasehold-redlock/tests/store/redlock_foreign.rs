//! Keys of other programs: other Redlock clients, other versions of leasehold, and keys that are
//! not locks.

use std::time::{Duration, Instant};

use crate::redlock_common::*;
use leasehold::ErrorKind;
use leasehold::store::{Evict, Joined, Mode, Renew};
use testbed::Redis;

// R31
#[tokio::test]
async fn other_redlock_clients_and_leasehold_exclude_each_other() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let locks = connect(&(servers.url() + SOON)).await;
    let lock = locks.mutex("shared").lease(Duration::from_secs(20));
    let set = |node: &Redis, args: &[&str]| {
        node.command(&[&["SET", "shared", "another library's value", "NX"], args].concat())
    };
    let delete = |node: &Redis| {
        let script = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) \
                      else return 0 end";
        node.command(&["EVAL", script, "1", "shared", "another library's value"])
    };
    // A foreign lock excludes leasehold, and its holder is shown.
    nodes.iter().for_each(|node| assert_eq!(set(node, &["PX", "60000"]), "OK"));
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    let shown = locks.inspect("shared").await.unwrap().unwrap();
    assert_eq!(shown.holders().count(), 1);
    // A leasehold client waits for it.
    let waiting = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    until("waiting", async || {
        locks.inspect("shared").await.unwrap().is_some_and(|info| info.waiters().count() == 1)
    })
    .await;
    nodes.iter().for_each(|node| assert_eq!(delete(node), "1"));
    let guard = waiting.await.unwrap().unwrap();
    // Leasehold's lock excludes foreign clients.
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "shared"))).await;
    nodes.iter().for_each(|node| {
        assert_eq!(set(node, &["PX", "60000"]), "");
        assert_eq!(delete(node), "0");
    });
    guard.release().await.unwrap();
    until("released", async || nodes.iter().all(|n| !has_key(n, "shared"))).await;
    // Foreign keys on a minority of the nodes have no effect.
    nodes[..2].iter().for_each(|node| drop(set(node, &["PX", "60000"])));
    lock.try_lock().await.unwrap().release().await.unwrap();
    // A foreign key that never expires is reported as an error.
    nodes.iter().for_each(|node| drop(node.command(&["SET", "shared", "for ever"])));
    let error = lock.lock_timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    // Otherwise nodes would be reserved for this waiter.
    until("the waiter has left the queue", async || {
        locks.inspect("shared").await.unwrap().is_some_and(|info| info.waiters().count() == 0)
    })
    .await;
    assert_eq!(locks.evict("shared", Evict::Holders).await.unwrap(), 1);
    lock.try_lock().await.unwrap().release().await.unwrap();
}

// F66
#[tokio::test]
async fn keys_of_another_type_are_reported_briefly_and_hide_no_lock() {
    let servers = servers(5);
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let guard = locks.mutex("good").lock_timeout(PATIENCE).await.unwrap();
    for node in servers.nodes() {
        node.command(&["LPUSH", "list", "x"]);
        node.command(&["HSET", "leasehold:redlock:lock:list", "last", "1"]);
        node.command(&["LPUSH", "leasehold:redlock:lock:record", "x"]);
    }
    let error = locks.mutex("list").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let text = format!("{error:#}");
    let without_urls = text.len() - servers.url().len() * 2;
    assert!(without_urls < 300, "{without_urls}: {text}");

    let all = locks.list("").await.unwrap();
    let names: Vec<&str> = all.iter().map(|lock| lock.name.as_str()).collect();
    assert_eq!(names, ["good", "list"], "{all:?}");
    let holder = |i: usize| all[i].holders().next().unwrap().holder.clone();
    assert_eq!(holder(0).pid, std::process::id());
    assert!(holder(1).label.contains("another type"), "{:?}", holder(1));
    guard.release().await.unwrap();
}

// F44
/// Clients of several versions use the same servers. The data of a later version is preserved, and
/// data that an earlier version did not write is not required.
#[tokio::test]
async fn data_of_other_versions_is_kept_and_missing_fields_are_tolerated() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let lock = locks.mutex("mixed");
    lock.lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    let keys = ["leasehold:redlock", "leasehold:redlock:lock:mixed"];
    for node in nodes {
        for key in keys {
            node.command(&["HSET", key, "of a later version", "kept"]);
        }
        // Earlier versions wrote the first fields, and did not write the others.
        node.command(&["HSET", keys[0], "prev", "1", "turned", "1"]);
        node.command(&["HDEL", keys[0], "lapsed", "since"]);
        node.command(&["HDEL", keys[1], "since", "holder"]);
    }
    let claim = claim("mixed", Duration::from_secs(20));
    let start = Instant::now();
    while !matches!(locks.store().join(&claim, Mode::Wait).await, Ok(Joined::Holding { .. })) {
        assert!(start.elapsed() < PATIENCE);
    }
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    until("renewed", async || locks.store().renew(&renew).await.is_ok()).await;
    assert!(locks.inspect("mixed").await.unwrap().is_some());
    let _ = locks.store().leave(&claim, None).await;
    until("released", async || nodes.iter().all(|n| !has_key(n, "mixed"))).await;
    for node in nodes {
        for key in keys {
            assert_eq!(node.command(&["HGET", key, "of a later version"]), "kept", "{key}");
        }
    }
}

/// On a majority the key never expires, and the other nodes are free.
#[tokio::test]
async fn refused_claim_leaves_no_queue_entry() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let locks = connect(&(servers.url() + SOON)).await;
    for node in &nodes[..3] {
        node.command(&["SET", "job", "for ever"]);
    }
    let mut refused = claim("job", Duration::from_secs(20));
    // The claim's places do not expire during the test.
    refused.waiter_lease = PATIENCE * 2;
    let error = loop {
        match locks.store().join(&refused, Mode::Wait).await {
            Err(error) if error.kind() == ErrorKind::Unreachable => {}
            Err(error) => break error,
            Ok(joined) => panic!("{joined:?}"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let queue = ["leasehold:redlock:waiting:job", "leasehold:redlock:alive:job"];
    until("the waiter has left the queue on all nodes", async || {
        nodes.iter().all(|node| queue.iter().all(|key| !has_key(node, key)))
    })
    .await;
    assert_eq!(locks.evict("job", Evict::Holders).await.unwrap(), 1);
    locks.mutex("job").try_lock().await.unwrap().release().await.unwrap();
}
