//! Waiters for a majority: their notifications, and how they are listed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::redlock_common::*;
use leasehold::store::{Joined, Mode};

// R31
/// The message of a free node reaches a waiter long before its next poll.
#[tokio::test]
async fn release_wakes_a_waiter_before_its_next_poll() {
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    let other = connect(&(servers.url() + SOON)).await;
    let store = locks.store();
    let guard = other.mutex("news").lock().await.unwrap();
    // So many claims are ahead that the waiter polls after 10 seconds at the earliest.
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
        early = &mut changed => panic!("the waiter was woken too early: {early:?}"),
        () = tokio::time::sleep(Duration::from_millis(300)) => {}
    }
    guard.release().await.unwrap();
    let woken = tokio::time::timeout(Duration::from_secs(6), changed).await;
    woken.expect("the waiter was not notified before its next poll").unwrap();
    holding(&patiently(async || store.join(&waiting, Mode::Wait).await).await);
}

// R31
/// A client that releases the lock and requests it again immediately comes after the waiters.
#[tokio::test]
async fn client_that_requests_again_does_not_overtake_waiters() {
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
    // This covers the time while all clients contend. At the end, the last client acquires the lock
    // several times in a row.
    let many = &turns[..2 * TURNS];
    let changed = many.windows(2).filter(|two| two[0] != two[1]).count();
    assert!(
        changed * 10 > many.len() * 7,
        "the holder changed in {changed} of {} turns: {many:?}",
        many.len()
    );
}

// F66
/// A claim that only one of five servers still knows is not listed as a waiter.
#[tokio::test]
async fn claims_known_to_a_minority_are_not_listed() {
    let servers = servers(5);
    let url = servers.url() + SOON;
    let (locks, other) = (connect(&url).await, connect(&url).await);
    let guard = locks.mutex("haunted").lock_timeout(PATIENCE).await.unwrap();
    let nodes = servers.nodes();
    until("the key is on all nodes", async || nodes.iter().all(|n| has_key(n, "haunted"))).await;
    let waiting = {
        let lock = other.mutex("haunted");
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    let shown = async || {
        let info = locks.inspect("haunted").await.unwrap().unwrap();
        info.waiters().map(|w| w.holder.host.clone()).collect::<Vec<_>>()
    };
    until("the waiter is in the queue", async || shown().await.len() == 1).await;
    let ghost = format!(r#"{:032x} somewhere {{"host":"ghost","pid":1,"label":""}}"#, 7);
    let late = "99999999999999";
    nodes[0].command(&["ZADD", "leasehold:redlock:waiting:haunted", "1", &ghost]);
    nodes[0].command(&["ZADD", "leasehold:redlock:alive:haunted", late, &ghost]);
    assert!(!shown().await.contains(&"ghost".to_owned()));
    // The holder is not listed as a waiter either, if a server refused it earlier and still has
    // that entry.
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

/// A place that expires soon does not shorten the other places.
#[tokio::test]
async fn queue_entries_expire_no_earlier_than_the_longest_lease() {
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
            assert!(left > 10_000, "{set} expires in {left} ms");
        }
    }
    guard.release().await.unwrap();
}

/// One script call reads only a part of a long queue, but all waiters are listed.
#[tokio::test]
async fn long_queue_is_read_in_pages() {
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
    let info = locks.inspect("crowd").await.unwrap().unwrap();
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
