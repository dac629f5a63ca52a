//! Servers that are killed, paused, emptied, full, replicated or listed twice, and what the
//! majority still knows.

use std::time::{Duration, Instant};

use crate::redlock_common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Joined, Mode, Renew};
use leasehold::{Client, ErrorKind};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

// S32
#[tokio::test]
async fn two_failed_nodes_of_five_do_not_block_the_lock() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let limit = Duration::from_secs(20);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    let before = connect(&url).await;
    nodes[0].kill();
    nodes[4].stop();
    // One client knew all servers, and the other one connects now.
    let start = Instant::now();
    let after = connect(&(servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000")).await;
    for locks in [&before, &after] {
        let guard = locks.mutex("quorum").try_lock().await.unwrap();
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
    assert!(start.elapsed() < limit, "waited {:?} for a node that hangs", start.elapsed());
    // With a third failure no majority is left, and the error names the servers.
    nodes[2].kill();
    let locks = connect_later(&servers).await;
    let error = locks.mutex("quorum").lease(Duration::from_secs(1)).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    nodes[4].cont();
    let guard = before.mutex("quorum").lock_timeout(PATIENCE).await.unwrap();
    drop(guard);
}

/// Returns a client that connected while a majority was available.
async fn connect_later(servers: &Redlock) -> Client {
    let nodes = servers.nodes();
    nodes[4].cont();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=300";
    let locks = patiently(async || leasehold::connect(&url).await).await;
    nodes[4].stop();
    locks
}

// S32
/// An unresponsive node that is needed for a majority delays a call by one timeout only.
#[tokio::test]
async fn hanging_node_that_is_needed_costs_one_timeout() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let held = claim("held", Duration::from_secs(30));
    let store = locks.store();
    holding(&patiently(async || store.join(&held, Mode::Try).await).await);
    nodes[0].kill();
    nodes[1].stop();
    // That is much less than a lease, and less than the fifteen seconds for which a waiter retries.
    let (least, most) = (Duration::from_millis(990), Duration::from_secs(10));
    let start = Instant::now();
    let new = claim("new", Duration::from_secs(30));
    let error = store.join(&new, Mode::Try).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(format!("{error:#}").contains("did not respond within 1s"), "{error:#}");
    let took = start.elapsed();
    assert!(took >= least && took < most, "{took:?}");

    let start = Instant::now();
    let renew = [Renew { claim: held.clone(), lease: held.lease }];
    assert_eq!(store.renew(&renew).await.unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(store.leave(&held, None).await.unwrap_err().kind(), ErrorKind::Unreachable);
    let took = start.elapsed();
    assert!(took >= least * 2 && took < most * 2, "{took:?}");
    nodes[1].cont();
    // The node gets the releases that it had not answered.
    until("released", async || nodes[1..].iter().all(|node| !has_key(node, "held"))).await;
}

// F50
#[tokio::test]
async fn hanging_server_does_not_prevent_connecting() {
    let servers = servers(5);
    let url = servers.url() + "?restart_delay_ms=0";
    servers.nodes()[1].stop();
    let start = Instant::now();
    let locks = connect(&url).await;
    let took = start.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    locks.mutex("hangs").lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    // The client meets the node when it resumes.
    servers.nodes()[1].cont();
    until("the resumed node votes", async || {
        let guard = locks.mutex("hangs").lock_timeout(PATIENCE).await.unwrap();
        let voted = has_key(&servers.nodes()[1], "hangs");
        let _ = guard.release().await;
        voted
    })
    .await;
}

// F51
/// The delay is longer than callers wait for a store that does not respond.
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn waiter_waits_for_servers_that_do_not_vote_yet() {
    let servers = servers(5);
    let url = servers.url() + "?max_lease_ms=18000&node_timeout_ms=1000";
    let locks = connect(&url).await;
    let lock = locks.mutex("young").lease(Duration::from_secs(15));
    let start = Instant::now();
    let error = lock.try_lock().await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(4), "try_lock took {:?}", start.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let text = format!("{error:#}");
    for node in servers.nodes() {
        // The URL and the problem each contain the node once.
        let node = format!("127.0.0.1:{}", node.port());
        assert_eq!(text.matches(&node).count(), 2, "{node}: {text}");
    }
    assert_eq!(text.matches(" s (restart_delay_ms)").count(), 1, "{text}");
    lock.lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    assert!(
        start.elapsed() > Duration::from_secs(15),
        "the servers were not new enough for this test"
    );
}

// S33
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn emptied_node_does_not_vote_until_the_longest_lease_expired() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let url = servers.url() + "?max_lease_ms=10000&node_timeout_ms=1000";
    let lease = Duration::from_millis(9_900);
    let (first, second) = (connect(&url).await, connect(&url).await);
    // The servers have just been started themselves.
    let lock = first.mutex("restart").lease(lease);
    lock.lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();

    nodes[3].kill();
    nodes[4].kill();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    let start = Instant::now();
    nodes[2].restart_empty();
    nodes[3].restart_empty();
    nodes[4].restart_empty();
    // Three of five nodes do not know the holder.
    let contender = second.mutex("restart").lease(lease);
    // The error is `Contended` if the two nodes that know the holder reply first. The other nodes
    // are then not waited for. The restart is not reported either if they do not reply in time.
    let error = loop {
        let error = contender.try_lock().await.unwrap_err();
        if format!("{error:#}").contains("restarted") {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    // Two of five nodes cannot extend the lease, so the hold expires before another one begins.
    let next = contender.lock_timeout(PATIENCE).await.unwrap();
    assert!(!guard.is_held(), "two clients hold the lock");
    assert!(start.elapsed() >= Duration::from_secs(9), "voted after {:?}", start.elapsed());
    assert!(next.token() > guard.token());
}

// S33
/// This shows the purpose of the delay. A client that ignores it gets a second majority.
#[tokio::test]
async fn two_clients_hold_if_the_restart_delay_is_ignored() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let first = connect(&(servers.url() + SOON)).await;
    nodes[3].kill();
    nodes[4].kill();
    // With renewals the client would detect the loss.
    let lock = first.mutex("restart").lease(Duration::from_secs(30)).no_renewal();
    let guard = lock.try_lock().await.unwrap();
    nodes[2].restart_empty();
    nodes[3].restart_empty();
    nodes[4].restart_empty();
    let second = connect(&(servers.url() + SOON)).await;
    assert_eq!(second.guarantees().on_store_crash, leasehold::store::Survival::Unsafe);
    let next = second.mutex("restart").lock_timeout(Duration::from_secs(20)).await.unwrap();
    assert!(guard.is_held() && next.is_held(), "without the delay, two clients must hold the lock");
}

// S33
/// One node after the other loses all its data, while a majority always remembers. Clocks do not
/// help, because the clients' proposals are far below the granted tokens.
#[tokio::test]
async fn tokens_rise_while_nodes_lose_their_data_one_by_one() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let mut far = claim("forgetful", Duration::from_secs(5));
    // The token is that of a clock a year ahead.
    let now = locks.mutex("now").try_lock().await.unwrap().token().get();
    far.seen = now + 31_536_000_000_000;
    let mut highest = holding(&patiently(async || locks.store().join(&far, Mode::Try).await).await);
    assert!(highest.get() > far.seen);
    patiently(async || locks.store().leave(&far, None).await).await;
    for node in nodes.iter().chain(nodes) {
        node.restart_empty();
        // This client has seen no token.
        let locks = connect(&url).await;
        let guard = locks.mutex("forgetful").lock_timeout(PATIENCE).await.unwrap();
        assert!(guard.grant() > highest, "{} after {highest}", guard.grant());
        highest = guard.grant();
        guard.release().await.unwrap();
    }
}

/// A server votes only after this time of uptime, and no lease is longer.
const LONGEST: &str = "?max_lease_ms=8000&node_timeout_ms=1000";

const LEASE: Duration = Duration::from_millis(7_900);

/// Waits until one of the other clients holds the lock. By then `holder` must have lost it.
async fn only_after(holder: &leasehold::MutexGuard, others: &[&Client], name: &str) {
    let start = Instant::now();
    loop {
        for locks in others {
            match locks.mutex(name).lease(LEASE).try_lock().await {
                Ok(guard) => {
                    assert!(
                        !holder.is_held(),
                        "two clients hold the lock after {:?}",
                        start.elapsed()
                    );
                    assert!(guard.token() > holder.token());
                    return;
                }
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
        assert!(start.elapsed() < PATIENCE, "no client ever acquired the lock");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// F15
/// The holder has three of five servers, because the others were unreachable. One of the three is
/// emptied. With the other two it must not form a majority for another client yet.
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn flushed_server_has_no_vote_until_forgotten_leases_expire() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let (proxies, url) = proxied(&servers);
    let (holder, knew) = (connect(&(url + LONGEST)).await, servers.url() + LONGEST);
    let knew = connect(&knew).await;
    for locks in [&holder, &knew] {
        let before = locks.mutex("before").lease(LEASE).lock_timeout(PATIENCE).await.unwrap();
        until("all nodes have voted", async || nodes.iter().all(|n| has_key(n, "before"))).await;
        before.release().await.unwrap();
        until("released", async || nodes.iter().all(|n| !has_key(n, "before"))).await;
    }
    for proxy in &proxies[3..] {
        proxy.refuse(true);
        proxy.cut();
    }
    let lock = holder.mutex("emptied").lease(LEASE).no_renewal();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    nodes[2].command(&["FLUSHALL"]);
    let new = connect(&(servers.url() + LONGEST)).await;
    only_after(&guard, &[&knew, &new], "emptied").await;
}

// F78
/// One of three addresses leads to a promoted copy that lagged behind. It does not know the holder,
/// and has been up for long.
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn another_server_at_a_known_address_counts_as_restarted() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let third = Proxy::before(nodes[2].port());
    let url = redlock_url([nodes[0].port(), nodes[1].port(), third.port()]) + LONGEST;
    let first = connect(&url).await;
    let before = first.mutex("before").lease(LEASE).lock_timeout(PATIENCE).await.unwrap();
    before.release().await.unwrap();
    let copy = Redis::replica_of(nodes[0].port(), Setup::new().fast());
    nodes[0].wait_for_replicas(1);
    copy.command(&["REPLICAOF", "NO", "ONE"]);
    let up = || copy.info("server", "uptime_in_seconds").parse::<u64>().unwrap();
    until("the copy is up for longer than the delay", async || up() > 9).await;
    third.refuse(true);
    third.cut();
    let lock = first.mutex("copied").lease(LEASE).no_renewal();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    let url = redlock_url([copy.port(), nodes[1].port(), nodes[2].port()]) + LONGEST;
    let second = connect(&url).await;
    only_after(&guard, &[&second], "copied").await;
}

// F78
#[tokio::test]
async fn server_with_a_replica_has_no_vote() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let one = Redis::replica_of(nodes[0].port(), Setup::new().fast());
    nodes[0].wait_for_replicas(1);
    // The other servers are sufficient.
    let locks = connect(&url).await;
    let guard = locks.mutex("replicated").lock_timeout(PATIENCE).await.unwrap();
    assert!(!has_key(&nodes[0], "replicated"), "the node with a replica has voted");
    guard.release().await.unwrap();
    let found = locks.diagnose().await.unwrap();
    let broken = |f: &&leasehold::doctor::Finding| f.id == "node" && f.severity == Severity::Broken;
    let findings: Vec<String> = found.iter().filter(broken).map(|f| f.what.clone()).collect();
    assert!(matches!(&findings[..], [one] if one.contains("1 replica(s)")), "{found:?}");

    let two = Redis::replica_of(nodes[1].port(), Setup::new().fast());
    nodes[1].wait_for_replicas(1);
    let error = leasehold::connect(&url)
        .await
        .expect_err("connected, although only one of three nodes votes");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(format!("{error:#}").contains("replica"), "{error}");
    drop((one, two));
}

// S34
#[tokio::test]
async fn server_with_several_names_has_one_vote() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let [a, b, c] = [nodes[0].port(), nodes[1].port(), nodes[2].port()];
    let error =
        refused(&format!("redlock://127.0.0.1:{a},localhost:{a},127.0.0.1:{b}{SOON}")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(format!("{error:#}").contains("same server"), "{error}");

    // Later, a name that was unreachable leads to a server that is already in the URL.
    let proxy = Proxy::before(a);
    proxy.refuse(true);
    let url = redlock_url([a, b, proxy.port()]) + SOON;
    let locks = connect(&url).await;
    locks.mutex("twin").try_lock().await.unwrap().release().await.unwrap();
    proxy.refuse(false);
    until("the client knows the third name", async || {
        // The lock is released before the next try, as far as the nodes respond.
        if let Ok(guard) = locks.mutex("twin").try_lock().await {
            let _ = guard.release().await;
        }
        proxy.requests() > 0
    })
    .await;
    nodes[1].kill();
    let error = locks.mutex("twin").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(format!("{error:#}").contains("same server"), "{error}");
    // In the opposite case, the three names lead to three servers.
    nodes[1].restart();
    let locks = connect(&(redlock_url([a, b, c]) + SOON)).await;
    assert!(locks.mutex("twin").try_lock().await.unwrap().is_held());
}

// S35
#[tokio::test]
async fn tokens_rise_despite_changing_majorities_and_late_replies() {
    let setups = (0..5)
        .map(|i| if i == 4 { Setup::new().fast().movable_clock() } else { Setup::new().fast() });
    let nodes: Vec<Redis> = setups.map(Redis::with).collect();
    nodes[4].shift_clock(2);
    let proxies: Vec<Proxy> = nodes.iter().map(|n| Proxy::before(n.port())).collect();
    let url = redlock_url(proxies.iter().map(Proxy::port));
    let url = url + "?restart_delay_ms=0&node_timeout_ms=200";
    let (early, late) = (connect(&url).await, connect(&url).await);
    let mut highest = 0;
    for round in 0..30_usize {
        // Two nodes receive the requests, but their replies arrive after the round.
        let slow = [round % 5, (round + 1 + round / 5) % 5];
        slow.iter().for_each(|i| proxies[*i].hold_replies());
        let locks = if round % 2 == 0 { &early } else { &late };
        let mut claim = claim("majorities", Duration::from_secs(20));
        // The second client's clock is an hour ahead, and the first client has not seen its tokens.
        claim.seen = if round % 7 == 6 { highest + 3_600_000_000 } else { 0 };
        let start = Instant::now();
        let token = loop {
            match locks.store().join(&claim, Mode::Wait).await {
                Ok(Joined::Holding { token, .. }) => break token,
                Ok(Joined::Busy { .. }) => {
                    panic!("the lock is busy, although no other client holds it")
                }
                Ok(Joined::Waiting(_)) => {}
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(start.elapsed() < PATIENCE);
        };
        assert!(token.get() > highest, "round {round}: {token} after {highest}");
        highest = token.get();
        let mut tries = 0;
        let left = patiently(async || {
            tries += 1;
            locks.store().leave(&claim, None).await
        });
        // A repeated call does not know the result of the first one.
        assert!(left.await || tries > 1, "the claim was not on the servers when it was released");
        slow.iter().for_each(|i| proxies[*i].thaw());
    }
}

/// Checking and acquiring are one command, which a full server refuses. The holder is still
/// reported, and the lock can be released.
#[tokio::test]
async fn full_servers_still_report_the_holder() {
    let servers = servers(3);
    let (one, other) =
        (connect(&(servers.url() + SOON)).await, connect(&(servers.url() + SOON)).await);
    // By then the other client has met the servers.
    drop(other.mutex("known").try_lock().await.unwrap());
    let guard = one.mutex("full").try_lock().await.unwrap();
    until("the key is on all nodes", async || servers.nodes().iter().all(|n| has_key(n, "full")))
        .await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "SET", "maxmemory", "1"]);
    }
    let error = other.mutex("full").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    let error = other.mutex("free").try_lock().await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Contended, "{error}");
    guard.release().await.unwrap();
    assert!(
        servers.nodes().iter().all(|n| !has_key(n, "free")),
        "the lock was granted without free memory"
    );
    until("released", async || servers.nodes().iter().all(|n| !has_key(n, "full"))).await;
}
