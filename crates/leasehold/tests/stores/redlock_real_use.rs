//! What real use broke on the Redlock store.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use leasehold::doctor::Severity;
use leasehold::store::{Joined, Mode, Renew};
use leasehold::{Claim, ErrorKind, Kind, Leasehold, Name};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn servers(count: usize) -> Redlock {
    Redlock::with(count, Setup::new().fast())
}

async fn connect(url: &str) -> Leasehold {
    leasehold::connect(url).await.unwrap()
}

async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn has_key(node: &Redis, name: &str) -> bool {
    node.command(&["EXISTS", name]) == "1"
}

/// Proxies in front of all nodes, and the URL through them.
fn proxied(servers: &Redlock) -> (Vec<Proxy>, String) {
    let proxies: Vec<Proxy> = servers.nodes().iter().map(|n| Proxy::before(n.port())).collect();
    let url = redlock_url(proxies.iter().map(Proxy::port));
    (proxies, url)
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
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
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
    assert!(error.to_string().contains("replica"), "{error}");
    drop((one, two));
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
    let text = error.to_string();
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
async fn f66_keys_of_another_type_are_told_in_short_and_hide_nothing() {
    let servers = servers(5);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
    let locks = connect(&url).await;
    let guard = locks.mutex("good").lock_timeout(PATIENCE).await.unwrap();
    for node in servers.nodes() {
        node.command(&["LPUSH", "list", "x"]);
        node.command(&["HSET", "leasehold:redlock:lock:list", "last", "1"]);
        node.command(&["LPUSH", "leasehold:redlock:lock:record", "x"]);
    }
    let error = locks.mutex("list").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let text = error.to_string();
    let without_urls = text.len() - servers.url().len() * 2;
    assert!(without_urls < 300, "{without_urls}: {text}");

    let all = locks.list("").await.unwrap();
    let names: Vec<&str> = all.iter().map(|lock| lock.name.as_str()).collect();
    assert_eq!(names, ["good", "list"], "{all:?}");
    let holder = |i: usize| all[i].holders().next().unwrap().holder.clone();
    assert_eq!(holder(0).pid, std::process::id());
    assert!(holder(1).label.contains("no lock"), "{:?}", holder(1));
    guard.release().await.unwrap();
}

/// Who is remembered by one server of five does not wait any more.
#[tokio::test]
async fn f66_no_ghosts_are_shown() {
    let servers = servers(5);
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
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

/// Clients of several versions use the same servers: what a later one keeps there survives what this
/// one does, and what an earlier one did not keep is not missed.
#[tokio::test]
async fn f44_what_other_versions_keep_is_left_alone_and_what_they_lack_is_not_missed() {
    let servers = servers(3);
    let nodes = servers.nodes();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
    let locks = connect(&url).await;
    let lock = locks.mutex("mixed");
    lock.lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    let keys = ["leasehold:redlock", "leasehold:redlock:lock:mixed"];
    for node in nodes {
        for key in keys {
            node.command(&["HSET", key, "of a later version", "kept"]);
        }
        // Earlier ones kept these, and not those.
        node.command(&["HSET", keys[0], "prev", "1", "turned", "1"]);
        node.command(&["HDEL", keys[0], "lapsed", "since"]);
        node.command(&["HDEL", keys[1], "since", "holder"]);
    }
    let mut claim = Claim::new(Name::new("mixed").unwrap(), Kind::Mutex, 1, 1).unwrap();
    claim.lease = Duration::from_secs(20);
    let start = Instant::now();
    while !matches!(locks.store().join(&claim, Mode::Wait).await, Ok(Joined::Holding { .. })) {
        assert!(start.elapsed() < PATIENCE);
    }
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    eventually("renewed", async || locks.store().renew(&renew).await.is_ok()).await;
    assert!(locks.read("mixed").await.unwrap().is_some());
    let _ = locks.store().leave(&claim, None).await;
    eventually("released", async || nodes.iter().all(|n| !has_key(n, "mixed"))).await;
    for node in nodes {
        for key in keys {
            assert_eq!(node.command(&["HGET", key, "of a later version"]), "kept", "{key}");
        }
    }
}
