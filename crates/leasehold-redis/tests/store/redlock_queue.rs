//! Who waits for a majority: who is woken, and who is shown.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::redlock_common::*;
use leasehold::store::{Joined, Mode};

/// The message that a node is free reaches who waits long before it would ask by itself.
#[tokio::test]
async fn r31_a_release_wakes_who_waits_early() {
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    let other = connect(&(servers.url() + SOON)).await;
    let store = locks.store();
    let guard = other.mutex("news").lock().await.unwrap();
    // So many came before it that it would ask again after 10 seconds at the least.
    let crowd: Vec<String> = (0..4_000).flat_map(|i| ["1".into(), format!("{i}")]).collect();
    let crowd: Vec<&str> = crowd.iter().map(String::as_str).collect();
    let queue = "leasehold:redlock:waiting:news";
    for node in servers.nodes() {
        node.command(&[&["ZADD", queue], &crowd[..]].concat());
    }
    let mut waiting = claim("news", Duration::from_secs(20));
    waiting.waiter_lease = Duration::from_secs(60);
    let joined = patiently(async || store.join(&waiting, Mode::Wait).await).await;
    assert!(matches!(&joined, Joined::Waiting(place) if place.ahead > 4_000), "{joined:?}");
    for node in servers.nodes() {
        node.command(&["ZREMRANGEBYSCORE", queue, "1", "1"]);
    }
    let mut changed = std::pin::pin!(store.changed(&waiting));
    tokio::select! {
        early = &mut changed => panic!("woken by nobody: {early:?}"),
        () = tokio::time::sleep(Duration::from_millis(300)) => {}
    }
    guard.release().await.unwrap();
    let woken = tokio::time::timeout(Duration::from_secs(6), changed).await;
    woken.expect("it was not woken, and would have asked by itself later").unwrap();
    holding(&patiently(async || store.join(&waiting, Mode::Wait).await).await);
}

/// Who has just given it back, and asks again at once, comes after those who wait.
#[tokio::test]
async fn r31_who_asks_again_overtakes_nobody_who_waits() {
    const TURNS: usize = 25;
    let servers = servers(3);
    let url = servers.url() + SOON;
    let turns = Arc::new(Mutex::new(Vec::new()));
    let mut contending = tokio::task::JoinSet::new();
    for who in 0..4 {
        let (lock, turns) = (connect(&url).await.mutex("turns"), turns.clone());
        contending.spawn(async move {
            for _ in 0..TURNS {
                let guard = lock.lock_timeout(PATIENCE).await.unwrap();
                turns.lock().unwrap().push(who);
                guard.release().await.unwrap();
            }
        });
    }
    contending.join_all().await;
    let turns = turns.lock().unwrap();
    // While all of them contend; who is alone at the end has several turns in a row.
    let many = &turns[..2 * TURNS];
    let changed = many.windows(2).filter(|two| two[0] != two[1]).count();
    assert!(changed * 10 > many.len() * 7, "{changed} of {} turns: {many:?}", many.len());
}

/// Who is remembered by one server of five does not wait any more.
#[tokio::test]
async fn f66_no_ghosts_are_shown() {
    let servers = servers(5);
    let url = servers.url() + SOON;
    let (locks, other) = (connect(&url).await, connect(&url).await);
    let guard = locks.mutex("haunted").lock_timeout(PATIENCE).await.unwrap();
    let nodes = servers.nodes();
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "haunted"))).await;
    let waiting = {
        let lock = other.mutex("haunted");
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    let shown = async || {
        let info = locks.read("haunted").await.unwrap().unwrap();
        info.waiters().map(|w| w.holder.host.clone()).collect::<Vec<_>>()
    };
    eventually("it waits", async || shown().await.len() == 1).await;
    let ghost = format!(r#"{:032x} somewhere {{"host":"ghost","pid":1,"label":""}}"#, 7);
    let late = "99999999999999";
    nodes[0].command(&["ZADD", "leasehold:redlock:waiting:haunted", "1", &ghost]);
    nodes[0].command(&["ZADD", "leasehold:redlock:alive:haunted", late, &ghost]);
    assert!(!shown().await.contains(&"ghost".to_owned()));
    // Nor does the holder, where one server refused it and forgot that later.
    let value = nodes[0].command(&["GET", "haunted"]);
    let holder = nodes[0].command(&["HGET", "leasehold:redlock:lock:haunted", "holder"]);
    let own = format!("{} somewhere {holder}", value.split('.').next().unwrap());
    for node in nodes {
        node.command(&["ZADD", "leasehold:redlock:waiting:haunted", "1", &own]);
        node.command(&["ZADD", "leasehold:redlock:alive:haunted", late, &own]);
    }
    assert_eq!(shown().await.len(), 1);
    drop(guard);
    let _ = waiting.await.unwrap();
}

/// One whose place expires soon does not end the places of the others.
#[tokio::test]
async fn places_last_as_long_as_the_longest() {
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    let store = locks.store();
    let guard = locks.mutex("job").lock().await.unwrap();
    for waiter_lease in [PATIENCE, Duration::from_secs(1)] {
        let mut waiting = claim("job", Duration::from_secs(20));
        waiting.waiter_lease = waiter_lease;
        let joined = patiently(async || store.join(&waiting, Mode::Wait).await).await;
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
    }
    for node in servers.nodes() {
        for set in ["waiting", "alive"] {
            let left = node.command(&["PTTL", &format!("leasehold:redlock:{set}:job")]);
            let left: u64 = left.parse().unwrap();
            assert!(left > 10_000, "{set} ends in {left} ms");
        }
    }
    guard.release().await.unwrap();
}

/// A script that reads looks at some of a crowd only, and everyone is shown.
#[tokio::test]
async fn a_crowd_is_read_in_pages() {
    const CROWD: usize = 1_201;
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    let who = |n: usize| format!(r#"{n:032x} inbox {{"host":"a","pid":{n},"label":""}}"#);
    for node in servers.nodes() {
        for (set, first) in [("waiting", 1), ("alive", 9_000_000_000_000_000)] {
            let crowd: Vec<String> =
                (0..CROWD).flat_map(|n| [(first + n).to_string(), who(n)]).collect();
            let crowd: Vec<&str> = crowd.iter().map(String::as_str).collect();
            let key = format!("leasehold:redlock:{set}:crowd");
            node.command(&[&["ZADD", &key], &crowd[..]].concat());
        }
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    let info = locks.read("crowd").await.unwrap().unwrap();
    let shown: std::collections::BTreeSet<u32> =
        info.waiters().map(|waiter| waiter.holder.pid).collect();
    assert_eq!(shown.len(), CROWD);
    for node in servers.nodes() {
        let calls = node.calls();
        let scripts: u64 =
            calls.iter().filter(|(name, _)| name.starts_with("eval")).map(|(_, n)| n).sum();
        assert!((3..=4).contains(&scripts), "{calls:?}");
    }
}
