//! Leases by majority: what comes too late, what is extended, and releases whose votes or answers are on the
//! way.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use crate::redlock_common::*;
use leasehold::store::{Joined, Mode, Renew, Renewal};
use leasehold::{Claim, ErrorKind, Kind, Name};
use testbed::{Proxy, Redis};

#[tokio::test]
async fn s30_a_majority_that_comes_too_late_is_given_back_everywhere() {
    let servers = servers(5);
    let (proxies, url) = proxied(&servers);
    let locks = connect(&format!("{url}?restart_delay_ms=0&node_timeout_ms=20000")).await;
    let lease = Duration::from_millis(500);
    // The scripts are known to the servers after this.
    drop(locks.mutex("warm").try_lock().await.unwrap());
    eventually("released", async || locks.read("warm").await.unwrap().is_none()).await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    proxies.iter().for_each(Proxy::hold_replies);
    let claim = claim("late", lease);
    let store = locks.store().clone();
    let joining = tokio::spawn(async move { store.join(&claim, Mode::Try).await });
    // The lease counts from before that. (The name's record outlives the lock.)
    let record = "leasehold:redlock:lock:late";
    eventually("asked", async || servers.nodes().iter().any(|n| has_key(n, record))).await;
    tokio::time::sleep(lease * 3 / 2).await;
    proxies.iter().for_each(Proxy::thaw);
    let error = joining.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(format!("{error:#}").contains("too late"), "{error}");
    // One script that votes, one that releases.
    eventually("released on all nodes", async || {
        servers.nodes().iter().all(|node| {
            node.calls().iter().any(|(name, calls)| name == "evalsha" && *calls >= 2)
                && !has_key(node, "late")
        })
    })
    .await;
}

#[tokio::test]
async fn s31_an_extension_without_a_majority_takes_nothing_away() {
    let servers = servers(5);
    let locks = connect(&(servers.url() + "?restart_delay_ms=0&node_timeout_ms=300")).await;
    let store = locks.store();
    let claim = claim("extended", Duration::from_secs(30));
    let token = holding(&patiently(async || store.join(&claim, Mode::Try).await).await);
    let nodes = servers.nodes();
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "extended"))).await;

    nodes[2..].iter().for_each(Redis::stop);
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    let error = store.renew(&renew).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(nodes[..2].iter().all(|n| has_key(n, "extended")), "taken away");
    nodes[2..].iter().for_each(Redis::cont);
    eventually("extended again", async || match store.renew(&renew).await {
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

    // Two nodes have lost the key: they get it again, at the latest by a renewal that finds them
    // quick enough to answer.
    nodes[..2].iter().for_each(|n| drop(n.command(&["DEL", "extended"])));
    eventually("healed", async || {
        match store.renew(&renew).await {
            Ok(renewed) => assert!(matches!(renewed[..], [Renewal::Holding { .. }]), "{renewed:?}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
        }
        nodes.iter().all(|n| has_key(n, "extended"))
    })
    .await;

    // Three have: it is lost, and not taken anew.
    eventually("lost", async || {
        // Again, if what heals was still under way.
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
    eventually("given back", async || nodes.iter().all(|n| !has_key(n, "extended"))).await;
}

/// The two that answer first are a majority each time: the third is not to be left out for that.
#[tokio::test]
async fn s31_a_node_that_always_answers_last_gets_its_key_again() {
    let servers = servers(3);
    let (proxies, url) = proxied(&servers);
    let locks = connect(&(url + "?restart_delay_ms=0&node_timeout_ms=20000")).await;
    let claim = claim("slow", Duration::from_secs(30));
    holding(&locks.store().join(&claim, Mode::Try).await.unwrap());
    let nodes = servers.nodes();
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "slow"))).await;

    nodes[2].command(&["DEL", "slow"]);
    proxies[2].hold_replies();
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    let renewed = locks.store().renew(&renew).await.unwrap();
    assert!(matches!(renewed[..], [Renewal::Holding { .. }]), "{renewed:?}");
    assert!(!has_key(&nodes[2], "slow"), "healed by an answer that was held back");
    proxies[2].thaw();
    eventually("healed", async || has_key(&nodes[2], "slow")).await;

    // What is released is not set again by an answer that comes later still.
    nodes[2].command(&["DEL", "slow"]);
    proxies[2].hold_replies();
    locks.store().renew(&renew).await.unwrap();
    locks.store().leave(&claim, None).await.unwrap();
    let before = proxies[2].round_trips();
    proxies[2].thaw();
    eventually("answered", async || {
        // The next question is answered after those that were held back.
        drop(locks.read("slow").await);
        proxies[2].round_trips() > before
    })
    .await;
    eventually("released", async || nodes.iter().all(|n| !has_key(n, "slow"))).await;
}

/// One waiter's trouble was told as an error of the whole call, that of holds which were extended too.
#[tokio::test]
async fn a_damaged_lock_costs_no_other_its_renewal() {
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
    let told = store.renew(&[renew(&holds), renew(&waits)]).await.unwrap();
    let [Renewal::Holding { .. }, Renewal::Unknown { kind, why }] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(*kind, ErrorKind::Corrupt, "{why}");
    // Where nothing was learnt of any, it is an error as ever.
    let error = store.renew(&[renew(&waits)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    drop(guard);
}

/// A release that was done, and not answered, is sent again, and finds nothing any more. That is not
/// the loss of the lock.
#[tokio::test]
async fn s07_a_release_whose_answers_are_lost_is_a_release() {
    let servers = servers(3);
    let (proxies, url) = proxied(&servers);
    let url = format!("{url}?restart_delay_ms=0&node_timeout_ms=20000&max_lease_ms=60000");
    let locks = connect(&url).await;
    // The scripts are known to the servers after this.
    locks.mutex("warm").try_lock().await.unwrap().release().await.unwrap();
    let lock = locks.mutex("s07").lease(Duration::from_secs(60));
    let guard = lock.try_lock().await.unwrap();
    proxies.iter().for_each(Proxy::hold_replies);
    let releasing = tokio::spawn(guard.release());
    let end = Instant::now() + PATIENCE / 2;
    while servers.nodes().iter().any(|node| node.command(&["EXISTS", "s07"]) == "1") {
        assert!(Instant::now() < end, "never released");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxies.iter().for_each(Proxy::cut);
    proxies.iter().for_each(Proxy::thaw);
    releasing.await.unwrap().expect("a release is told as a loss");
}

/// The program ended when a majority had answered, and the others had not been sent the script yet
/// that they did not know.
#[tokio::test]
async fn f17_a_client_that_is_closed_leaves_no_vote_behind() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let (proxies, url) = proxied(&servers);
    let url = url + "?restart_delay_ms=0&node_timeout_ms=5000";
    let locks = connect(&url).await;
    let guard = locks.mutex("left").lock_timeout(PATIENCE).await.unwrap();
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "left"))).await;
    proxies[3..].iter().for_each(|proxy| proxy.delay(Duration::from_millis(200)));
    guard.release().await.unwrap();
    locks.close().await.unwrap();
    // The process is gone: nothing that it has not sent by now is sent.
    proxies.iter().for_each(Proxy::freeze);
    assert!(nodes.iter().all(|n| !has_key(n, "left")), "left behind");
}

/// A server that was being met while the lock was taken and released: its vote came after the release.
#[tokio::test]
async fn f17_no_release_is_overtaken() {
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
    // What is asked later is answered later.
    eventually("the last one votes", async || {
        if let Ok(guard) = locks.mutex("next").try_lock().await {
            let _ = guard.release().await;
        }
        has_key(last, "leasehold:redlock:lock:next")
    })
    .await;
    assert!(!has_key(last, "overtaken"), "a vote that nobody releases");
}
