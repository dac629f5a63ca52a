//! Leases by majority: late grants, extensions, and releases whose votes or replies are still on
//! their way.

use std::time::{Duration, Instant};

use crate::redlock_common::*;
use leasehold::store::{Claim, Joined, Mode, Renew, Renewal};
use leasehold::{ErrorKind, Kind, Name};
use testbed::{Proxy, Redis};

// S30
#[tokio::test]
async fn late_majority_is_released_on_all_nodes() {
    let servers = servers(5);
    let (proxies, url) = proxied(&servers);
    let locks = connect(&format!("{url}?restart_delay_ms=0&node_timeout_ms=20000")).await;
    let lease = Duration::from_millis(500);
    // After this the servers have cached the scripts.
    drop(locks.mutex("warm").try_lock().await.unwrap());
    until("released", async || locks.inspect("warm").await.unwrap().is_none()).await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    proxies.iter().for_each(Proxy::hold_replies);
    let claim = claim("late", lease);
    let store = locks.store().clone();
    let joining = tokio::spawn(async move { store.join(&claim, Mode::Try).await });
    // The lease starts before that. (The name's record outlives the lock.)
    let record = "leasehold:redlock:lock:late";
    until("a node has voted", async || servers.nodes().iter().any(|n| has_key(n, record))).await;
    tokio::time::sleep(lease * 3 / 2).await;
    proxies.iter().for_each(Proxy::thaw);
    let error = joining.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(format!("{error:#}").contains("too late"), "{error}");
    // One script votes, and one releases.
    until("released on all nodes", async || {
        servers.nodes().iter().all(|node| {
            node.calls().iter().any(|(name, calls)| name == "evalsha" && *calls >= 2)
                && !has_key(node, "late")
        })
    })
    .await;
}

// S31
#[tokio::test]
async fn failed_renewal_releases_no_votes() {
    let servers = servers(5);
    let locks = connect(&(servers.url() + "?restart_delay_ms=0&node_timeout_ms=300")).await;
    let store = locks.store();
    let claim = claim("extended", Duration::from_secs(30));
    let token = holding(&patiently(async || store.join(&claim, Mode::Try).await).await);
    let nodes = servers.nodes();
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "extended"))).await;

    nodes[2..].iter().for_each(Redis::stop);
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    let error = store.renew(&renew).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(
        nodes[..2].iter().all(|n| has_key(n, "extended")),
        "an unconfirmed renewal released the lock"
    );
    nodes[2..].iter().for_each(Redis::cont);
    until("the lock is extended again", async || match store.renew(&renew).await {
        Ok(renewed) => {
            assert!(matches!(renewed[..], [Renewal::Holding { token: t, .. }] if t == token));
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            false
        }
    })
    .await;

    // Two nodes have lost the key. They get it again with the first renewal to which they reply
    // quickly enough.
    nodes[..2].iter().for_each(|n| drop(n.command(&["DEL", "extended"])));
    until("healed", async || {
        match store.renew(&renew).await {
            Ok(renewed) => assert!(matches!(renewed[..], [Renewal::Holding { .. }]), "{renewed:?}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
        }
        nodes.iter().all(|n| has_key(n, "extended"))
    })
    .await;

    // Three nodes have lost the key, so the lock is lost and not acquired again.
    until("lost", async || {
        // The keys are deleted repeatedly, in case a restoration was still in progress.
        nodes[..3].iter().for_each(|n| drop(n.command(&["DEL", "extended"])));
        match store.renew(&renew).await {
            Ok(renewed) => matches!(renewed[..], [Renewal::Lost]),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                false
            }
        }
    })
    .await;
    until("the lock is released on all nodes", async || {
        nodes.iter().all(|n| !has_key(n, "extended"))
    })
    .await;
}

// S31
/// The two nodes that reply first are always a majority. The third one must still get its key.
#[tokio::test]
async fn node_that_always_replies_last_gets_its_key_back() {
    let servers = servers(3);
    let (proxies, url) = proxied(&servers);
    let locks = connect(&(url + "?restart_delay_ms=0&node_timeout_ms=20000")).await;
    let claim = claim("slow", Duration::from_secs(30));
    holding(&locks.store().join(&claim, Mode::Try).await.unwrap());
    let nodes = servers.nodes();
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "slow"))).await;

    nodes[2].command(&["DEL", "slow"]);
    proxies[2].hold_replies();
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    let renewed = locks.store().renew(&renew).await.unwrap();
    assert!(matches!(renewed[..], [Renewal::Holding { .. }]), "{renewed:?}");
    assert!(!has_key(&nodes[2], "slow"), "a delayed reply restored the lock on the third node");
    proxies[2].thaw();
    until("healed", async || has_key(&nodes[2], "slow")).await;

    // A late reply must not restore the key of a released lock.
    nodes[2].command(&["DEL", "slow"]);
    proxies[2].hold_replies();
    locks.store().renew(&renew).await.unwrap();
    locks.store().leave(&claim, None).await.unwrap();
    let before = proxies[2].round_trips();
    proxies[2].thaw();
    until("answered", async || {
        // The reply to this request follows those that were held back.
        drop(locks.inspect("slow").await);
        proxies[2].round_trips() > before
    })
    .await;
    until("released", async || nodes.iter().all(|n| !has_key(n, "slow"))).await;
}

/// A waiter's error must not be returned for the whole call, because holds in it were extended.
#[tokio::test]
async fn damaged_lock_does_not_stop_other_renewals() {
    let servers = servers(3);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    let (locks, other) = (connect(&url).await, connect(&url).await);
    let store = locks.store();
    let claim = |name: &str| Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    let renew = |claim: &Claim| Renew { lease: claim.lease, claim: claim.clone() };
    let (holds, waits) = (claim("good"), claim("odd"));
    let guard = other.mutex("odd").try_lock().await.unwrap();
    assert!(matches!(store.join(&holds, Mode::Try).await.unwrap(), Joined::Holding { .. }));
    assert!(matches!(store.join(&waits, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
    for node in servers.nodes() {
        node.command(&["DEL", "odd"]);
        node.command(&["LPUSH", "odd", "x"]);
    }
    let renewed = store.renew(&[renew(&holds), renew(&waits)]).await.unwrap();
    let [Renewal::Holding { .. }, Renewal::Unknown { kind, why }] = &renewed[..] else {
        panic!("{renewed:?}");
    };
    assert_eq!(*kind, ErrorKind::Corrupt, "{why}");
    // If the result of every claim is unknown, the call returns an error.
    let error = store.renew(&[renew(&waits)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    drop(guard);
}

// S07
/// A release was executed but not answered. The repeated release does not find the key, which is
/// not a loss of the lock.
#[tokio::test]
async fn release_with_lost_replies_is_not_a_loss() {
    let servers = servers(3);
    let (proxies, url) = proxied(&servers);
    let url = format!("{url}?restart_delay_ms=0&node_timeout_ms=20000&max_lease_ms=60000");
    let locks = connect(&url).await;
    // After this the servers have cached the scripts.
    locks.mutex("warm").try_lock().await.unwrap().release().await.unwrap();
    let lock = locks.mutex("s07").lease(Duration::from_secs(60));
    let guard = lock.try_lock().await.unwrap();
    proxies.iter().for_each(Proxy::hold_replies);
    let releasing = tokio::spawn(guard.release());
    let end = Instant::now() + PATIENCE / 2;
    while servers.nodes().iter().any(|node| node.command(&["EXISTS", "s07"]) == "1") {
        assert!(Instant::now() < end, "the lock was never released");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxies.iter().for_each(Proxy::cut);
    proxies.iter().for_each(Proxy::thaw);
    releasing.await.unwrap().expect("the release reports a loss");
}

// F17
/// The program exits after a majority has replied. The other servers had not received the script
/// yet.
#[tokio::test]
async fn closed_client_leaves_no_vote_behind() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let (proxies, url) = proxied(&servers);
    let url = url + "?restart_delay_ms=0&node_timeout_ms=5000";
    let locks = connect(&url).await;
    let guard = locks.mutex("left").lock_timeout(PATIENCE).await.unwrap();
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "left"))).await;
    proxies[3..].iter().for_each(|proxy| proxy.delay(Duration::from_millis(200)));
    guard.release().await.unwrap();
    locks.close().await.unwrap();
    // The process is gone, so requests that it has not sent yet are never sent.
    proxies.iter().for_each(Proxy::freeze);
    assert!(nodes.iter().all(|n| !has_key(n, "left")), "a key remains on a node");
}

// F17
/// The client was still meeting a server while the lock was acquired and released. Its vote must
/// not follow the release.
#[tokio::test]
async fn late_vote_never_follows_a_release() {
    let servers = servers(3);
    let (proxies, url) = proxied(&servers);
    let last = &servers.nodes()[2];
    proxies[2].freeze();
    let locks = connect(&(url + "?restart_delay_ms=0&node_timeout_ms=300")).await;
    let store = locks.store();
    let claim = Claim::new(Name::new("overtaken").unwrap(), Kind::Mutex, 1, 1).unwrap();
    let start = Instant::now();
    loop {
        match store.join(&claim, Mode::Try).await {
            Ok(Joined::Holding { .. }) => break,
            other => assert!(start.elapsed() < PATIENCE, "{other:?}"),
        }
    }
    store.leave(&claim, None).await.unwrap();
    proxies[2].thaw();
    // Replies to later requests arrive later.
    until("the last node votes", async || {
        if let Ok(guard) = locks.mutex("next").try_lock().await {
            let _ = guard.release().await;
        }
        has_key(last, "leasehold:redlock:lock:next")
    })
    .await;
    assert!(!has_key(last, "overtaken"), "a late vote was never released");
}
