//! Servers that are killed, stopped, emptied, full, replicated or listed twice, and what their majority still
//! knows.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use crate::redlock_common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Joined, Mode, Renew};
use leasehold::{ErrorKind, Leasehold};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

#[tokio::test]
async fn s32_two_nodes_that_are_down_or_hang_are_no_obstacle() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let limit = Duration::from_secs(20);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    let before = connect(&url).await;
    nodes[0].kill();
    nodes[4].stop();
    // One that knew them all, and one that comes now.
    let start = Instant::now();
    let after = connect(&(servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000")).await;
    for locks in [&before, &after] {
        let guard = locks.mutex("quorum").try_lock().await.unwrap();
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
    assert!(start.elapsed() < limit, "waited for a node that hangs: {:?}", start.elapsed());
    // A third one is one too many, and it is said which.
    nodes[2].kill();
    let locks = connect_later(&servers).await;
    let error = locks.mutex("quorum").lease(Duration::from_secs(1)).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    nodes[4].cont();
    let guard = before.mutex("quorum").lock_timeout(PATIENCE).await.unwrap();
    drop(guard);
}

/// A client that was connected while there was a majority.
async fn connect_later(servers: &Redlock) -> Leasehold {
    let nodes = servers.nodes();
    nodes[4].cont();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=300";
    let locks = patiently(async || leasehold::connect(&url).await).await;
    nodes[4].stop();
    locks
}

/// A node that hangs, and that a majority needs, costs its time once and no more.
#[tokio::test]
async fn s32_a_node_that_hangs_and_is_needed_costs_one_timeout() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let held = claim("held", Duration::from_secs(30));
    let store = locks.store();
    holding(&patiently(async || store.join(&held, Mode::Try).await).await);
    nodes[0].kill();
    nodes[1].stop();
    // Far below one lease, and below the fifteen seconds that who waits is patient for.
    let (least, most) = (Duration::from_millis(990), Duration::from_secs(10));
    let start = Instant::now();
    let new = claim("new", Duration::from_secs(30));
    let error = store.join(&new, Mode::Try).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(format!("{error}").contains("did not answer within 1s"), "{error}");
    let took = start.elapsed();
    assert!(took >= least && took < most, "{took:?}");

    let start = Instant::now();
    let renew = [Renew { claim: held.clone(), lease: held.lease }];
    assert_eq!(store.renew(&renew).await.unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(store.leave(&held, None).await.unwrap_err().kind(), ErrorKind::Unreachable);
    let took = start.elapsed();
    assert!(took >= least * 2 && took < most * 2, "{took:?}");
    nodes[1].cont();
    // What was owed to it is paid.
    eventually("released", async || nodes[1..].iter().all(|node| !has_key(node, "held"))).await;
}

#[tokio::test]
async fn f50_a_server_that_hangs_does_not_keep_a_client_from_connecting() {
    let servers = servers(5);
    let url = servers.url() + "?restart_delay_ms=0";
    servers.nodes()[1].stop();
    let start = Instant::now();
    let locks = connect(&url).await;
    let took = start.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    locks.mutex("hangs").lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    // It is met when it goes on.
    servers.nodes()[1].cont();
    eventually("it votes", async || {
        let guard = locks.mutex("hangs").lock_timeout(PATIENCE).await.unwrap();
        let voted = has_key(&servers.nodes()[1], "hangs");
        let _ = guard.release().await;
        voted
    })
    .await;
}

/// Longer than anybody is patient with a store that does not answer.
#[tokio::test]
async fn f51_servers_that_do_not_vote_yet_are_waited_for() {
    let servers = servers(5);
    let url = servers.url() + "?max_lease_ms=18000&node_timeout_ms=1000";
    let locks = connect(&url).await;
    let lock = locks.mutex("young").lease(Duration::from_secs(15));
    let start = Instant::now();
    let error = lock.try_lock().await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(4), "tried for {:?}", start.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let text = format!("{error:#}");
    for node in servers.nodes() {
        // Once in the URL, once with its trouble.
        let node = format!("127.0.0.1:{}", node.port());
        assert_eq!(text.matches(&node).count(), 2, "{node}: {text}");
    }
    assert_eq!(text.matches(" s (restart_delay_ms)").count(), 1, "{text}");
    lock.lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    assert!(start.elapsed() > Duration::from_secs(15), "this shows nothing");
}

#[tokio::test]
async fn s33_a_node_that_lost_its_data_does_not_vote_until_the_longest_lease_is_over() {
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
    // Three nodes of five know of nobody.
    let contender = second.mutex("restart").lease(lease);
    // Contended, if the two that know of the holder answer first: then the others are not waited for.
    // Nor is it told, if they do not answer in time.
    let error = loop {
        let error = contender.try_lock().await.unwrap_err();
        if format!("{error:#}").contains("restarted") {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    // Two of five are not enough to extend, so the hold ends by itself, before anybody else's begins.
    let next = contender.lock_timeout(PATIENCE).await.unwrap();
    assert!(!guard.is_held(), "two holders");
    assert!(start.elapsed() >= Duration::from_secs(9), "voted after {:?}", start.elapsed());
    assert!(next.token() > guard.token());
}

/// What the delay is for: a client that does not keep to it gets a second majority.
#[tokio::test]
async fn s33_without_the_delay_there_are_two_holders() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let first = connect(&(servers.url() + SOON)).await;
    nodes[3].kill();
    nodes[4].kill();
    // It would find out by renewing.
    let lock = first.mutex("restart").lease(Duration::from_secs(30)).no_renewal();
    let guard = lock.try_lock().await.unwrap();
    nodes[2].restart_empty();
    nodes[3].restart_empty();
    nodes[4].restart_empty();
    let second = connect(&(servers.url() + SOON)).await;
    assert_eq!(second.guarantees().on_store_crash, leasehold::store::Survival::Unsafe);
    let next = second.mutex("restart").lock_timeout(Duration::from_secs(20)).await.unwrap();
    assert!(guard.is_held() && next.is_held(), "then the delay is not needed");
}

/// One node after the other loses all that it knew; a majority always remembers. No clock helps:
/// the clients' proposals are far below what was granted.
#[tokio::test]
async fn s33_tokens_rise_over_nodes_that_forget_one_after_the_other() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let locks = connect(&url).await;
    let mut far = claim("forgetful", Duration::from_secs(5));
    // A token from a clock that is a year ahead.
    let now = locks.mutex("now").try_lock().await.unwrap().token().get();
    far.seen = now + 31_536_000_000_000;
    let mut highest = holding(&patiently(async || locks.store().join(&far, Mode::Try).await).await);
    assert!(highest.get() > far.seen);
    patiently(async || locks.store().leave(&far, None).await).await;
    for node in nodes.iter().chain(nodes) {
        node.restart_empty();
        // A client that has seen nothing.
        let locks = connect(&url).await;
        let guard = locks.mutex("forgetful").lock_timeout(PATIENCE).await.unwrap();
        assert!(guard.token() > highest, "{} after {highest}", guard.token());
        highest = guard.token();
        guard.release().await.unwrap();
    }
}

/// No server has had a vote before it was up for so long, and no lease is longer.
const LONGEST: &str = "?max_lease_ms=8000&node_timeout_ms=1000";

const LEASE: Duration = Duration::from_millis(7_900);

/// Returns when one of them holds the lock, which `holder` must have lost by then.
async fn only_after(holder: &leasehold::Guard, others: &[&Leasehold], name: &str) {
    let start = Instant::now();
    loop {
        for locks in others {
            match locks.mutex(name).lease(LEASE).try_lock().await {
                Ok(guard) => {
                    assert!(!holder.is_held(), "two holders after {:?}", start.elapsed());
                    assert!(guard.token() > holder.token());
                    return;
                }
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
        assert!(start.elapsed() < PATIENCE, "nobody ever got it");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The holder has three of five servers, since it cannot reach the others. One of the three is
/// emptied, and with the other two it was a majority for the next, at once.
#[tokio::test]
async fn f15_a_server_that_was_emptied_has_no_vote_until_what_it_forgot_is_over() {
    let servers = servers(5);
    let nodes = servers.nodes();
    let (proxies, url) = proxied(&servers);
    let (holder, knew) = (connect(&(url + LONGEST)).await, servers.url() + LONGEST);
    let knew = connect(&knew).await;
    for locks in [&holder, &knew] {
        let before = locks.mutex("before").lease(LEASE).lock_timeout(PATIENCE).await.unwrap();
        eventually("all have voted", async || nodes.iter().all(|n| has_key(n, "before"))).await;
        before.release().await.unwrap();
        eventually("released", async || nodes.iter().all(|n| !has_key(n, "before"))).await;
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

/// One of three addresses leads to a promoted copy that lagged behind: it does not know of the
/// holder, and has been up for long.
#[tokio::test]
async fn f78_another_server_at_a_known_address_is_treated_as_one_that_restarted() {
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
    eventually("up for longer than the delay", async || up() > 9).await;
    third.refuse(true);
    third.cut();
    let lock = first.mutex("copied").lease(LEASE).no_renewal();
    let guard = lock.lock_timeout(PATIENCE).await.unwrap();
    let url = redlock_url([copy.port(), nodes[1].port(), nodes[2].port()]) + LONGEST;
    let second = connect(&url).await;
    only_after(&guard, &[&second], "copied").await;
}

#[tokio::test]
async fn f78_a_server_that_has_a_replica_has_no_vote() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + SOON;
    let one = Redis::replica_of(nodes[0].port(), Setup::new().fast());
    nodes[0].wait_for_replicas(1);
    // The others do without it.
    let locks = connect(&url).await;
    let guard = locks.mutex("replicated").lock_timeout(PATIENCE).await.unwrap();
    assert!(!has_key(&nodes[0], "replicated"), "it voted");
    guard.release().await.unwrap();
    let found = locks.diagnose().await.unwrap();
    let broken = |f: &&leasehold::doctor::Finding| f.id == "node" && f.severity == Severity::Broken;
    let told: Vec<String> = found.iter().filter(broken).map(|f| f.what.clone()).collect();
    assert!(matches!(&told[..], [one] if one.contains("1 replica(s)")), "{found:?}");

    let two = Redis::replica_of(nodes[1].port(), Setup::new().fast());
    nodes[1].wait_for_replicas(1);
    let error = leasehold::connect(&url).await.expect_err("one of three votes");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(format!("{error:#}").contains("replica"), "{error}");
    drop((one, two));
}

#[tokio::test]
async fn s34_one_server_has_one_vote_under_whatever_name() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let [a, b, c] = [nodes[0].port(), nodes[1].port(), nodes[2].port()];
    let error =
        refused(&format!("redlock://127.0.0.1:{a},localhost:{a},127.0.0.1:{b}{SOON}")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(format!("{error:#}").contains("same server"), "{error}");

    // Later: a name that led nowhere leads to a server that is there already.
    let proxy = Proxy::before(a);
    proxy.refuse(true);
    let url = redlock_url([a, b, proxy.port()]) + SOON;
    let locks = connect(&url).await;
    locks.mutex("twin").try_lock().await.unwrap().release().await.unwrap();
    proxy.refuse(false);
    eventually("the third name is known", async || {
        // Given back before the next try, as far as the nodes answer.
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
    // And the other way round: three that are three.
    nodes[1].restart();
    let locks = connect(&(redlock_url([a, b, c]) + SOON)).await;
    assert!(locks.mutex("twin").try_lock().await.unwrap().is_held());
}

#[tokio::test]
async fn s35_tokens_rise_over_changing_majorities_clocks_and_late_answers() {
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
        // Two nodes get the requests, and their answers come when the round is over.
        let slow = [round % 5, (round + 1 + round / 5) % 5];
        slow.iter().for_each(|i| proxies[*i].hold_replies());
        let locks = if round % 2 == 0 { &early } else { &late };
        let mut claim = claim("majorities", Duration::from_secs(20));
        // The second client's clock is an hour ahead, and the first has seen nothing of that.
        claim.seen = if round % 7 == 6 { highest + 3_600_000_000 } else { 0 };
        let start = Instant::now();
        let token = loop {
            match locks.store().join(&claim, Mode::Wait).await {
                Ok(Joined::Holding { token, .. }) => break token,
                Ok(Joined::Busy { .. }) => panic!("nobody else holds it"),
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
        // A repetition does not know what the first has done.
        assert!(left.await || tries > 1, "it was not there");
        slow.iter().for_each(|i| proxies[*i].thaw());
    }
}

/// To look and to take are one command, which a server without room refuses: who holds is told all the
/// same, and the lock is given back.
#[tokio::test]
async fn servers_that_are_full_tell_who_holds() {
    let servers = servers(3);
    let (one, other) =
        (connect(&(servers.url() + SOON)).await, connect(&(servers.url() + SOON)).await);
    // The other knows the servers by then.
    drop(other.mutex("known").try_lock().await.unwrap());
    let guard = one.mutex("full").try_lock().await.unwrap();
    eventually("on all nodes", async || servers.nodes().iter().all(|n| has_key(n, "full"))).await;
    for node in servers.nodes() {
        node.command(&["CONFIG", "SET", "maxmemory", "1"]);
    }
    let error = other.mutex("full").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    let error = other.mutex("free").try_lock().await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Contended, "{error}");
    guard.release().await.unwrap();
    assert!(servers.nodes().iter().all(|n| !has_key(n, "free")), "granted without room");
    eventually("released", async || servers.nodes().iter().all(|n| !has_key(n, "full"))).await;
}
