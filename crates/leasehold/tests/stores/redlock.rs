//! Redlock on real servers that are stopped, killed, emptied, slowed down and listed twice.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use leasehold::store::{Evict, Joined, Mode, Renew, Renewal};
use leasehold::{Claim, ErrorKind, Kind, Leasehold, Name, Token};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// No delay after a restart, and time enough for a slow machine.
const SOON: &str = "?restart_delay_ms=0&node_timeout_ms=1000";

fn five() -> Redlock {
    Redlock::with(5, Setup::new().fast())
}

async fn connect(url: &str) -> Leasehold {
    leasehold::connect(url).await.unwrap()
}

async fn refused(url: &str) -> leasehold::Error {
    match leasehold::connect(url).await {
        Err(error) => {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            error
        }
        Ok(_) => panic!("{url} was not refused"),
    }
}

fn claim(name: &str, lease: Duration) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    claim.lease = lease;
    claim
}

fn holding(joined: &Joined) -> Token {
    match joined {
        Joined::Holding { token, .. } => *token,
        other => panic!("not held: {other:?}"),
    }
}

async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Asks again, as long as the nodes do not answer in time.
async fn patiently<T>(mut ask: impl AsyncFnMut() -> leasehold::Result<T>) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
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

#[tokio::test]
async fn s30_a_majority_that_comes_too_late_is_given_back_everywhere() {
    let servers = five();
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
    assert!(error.to_string().contains("too late"), "{error}");
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
    let servers = five();
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
    let servers = Redlock::with(3, Setup::new().fast());
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

#[tokio::test]
async fn s32_two_nodes_that_are_down_or_hang_are_no_obstacle() {
    let servers = five();
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

#[tokio::test]
async fn s33_a_node_that_lost_its_data_does_not_vote_until_the_longest_lease_is_over() {
    let servers = five();
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
        if error.to_string().contains("restarted") {
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
    let servers = five();
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
    let servers = five();
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

#[tokio::test]
async fn s34_one_server_has_one_vote_under_whatever_name() {
    let servers = Redlock::with(3, Setup::new().fast());
    let nodes = servers.nodes();
    let [a, b, c] = [nodes[0].port(), nodes[1].port(), nodes[2].port()];
    let error =
        refused(&format!("redlock://127.0.0.1:{a},localhost:{a},127.0.0.1:{b}{SOON}")).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("same server"), "{error}");

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
    assert!(error.to_string().contains("same server"), "{error}");
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

#[tokio::test]
async fn r31_other_clients_of_the_recipe_and_we_exclude_each_other() {
    let servers = five();
    let nodes = servers.nodes();
    let locks = connect(&(servers.url() + SOON)).await;
    let lock = locks.mutex("shared").lease(Duration::from_secs(20));
    let set = |node: &Redis, args: &[&str]| {
        node.command(&[&["SET", "shared", "somebody's random value", "NX"], args].concat())
    };
    let delete = |node: &Redis| {
        let script = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) \
                      else return 0 end";
        node.command(&["EVAL", script, "1", "shared", "somebody's random value"])
    };
    // Theirs excludes us, and we see that somebody holds.
    nodes.iter().for_each(|node| assert_eq!(set(node, &["PX", "60000"]), "OK"));
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    let shown = locks.read("shared").await.unwrap().unwrap();
    assert_eq!(shown.holders().count(), 1);
    // It is waited for.
    let waiting = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    eventually("waiting", async || {
        locks.read("shared").await.unwrap().is_some_and(|info| info.waiters().count() == 1)
    })
    .await;
    nodes.iter().for_each(|node| assert_eq!(delete(node), "1"));
    let guard = waiting.await.unwrap().unwrap();
    // Ours excludes them.
    eventually("on all nodes", async || nodes.iter().all(|n| has_key(n, "shared"))).await;
    nodes.iter().for_each(|node| {
        assert_eq!(set(node, &["PX", "60000"]), "");
        assert_eq!(delete(node), "0");
    });
    guard.release().await.unwrap();
    eventually("released", async || nodes.iter().all(|n| !has_key(n, "shared"))).await;
    // Theirs on a minority is no obstacle.
    nodes[..2].iter().for_each(|node| drop(set(node, &["PX", "60000"])));
    lock.try_lock().await.unwrap().release().await.unwrap();
    // One that never ends is not waited for in silence.
    nodes.iter().for_each(|node| drop(node.command(&["SET", "shared", "for ever"])));
    let error = lock.lock_timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(locks.evict("shared", Evict::Holders).await.unwrap(), 1);
    lock.try_lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn what_cannot_work_is_refused_at_connect() {
    let servers = Redlock::with(3, Setup::new().fast());
    let ports: Vec<u16> = servers.nodes().iter().map(Redis::port).collect();
    for ports in [&ports[..2], &[&ports[..], &[1, 2, 3, 4, 5, 6, 7]].concat()] {
        let error = refused(&(redlock_url(ports.iter().copied()) + SOON)).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    // A password on one of them; and nobody's secrets in the answer.
    let locked = Redis::with(Setup::new().fast().arg("--requirepass").arg("right"));
    let hosts = redlock_url([ports[0], ports[1], locked.port()]);
    let error = refused(&(hosts.replace("redlock://", "redlock://:wrong@") + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!error.to_string().contains("wrong@"), "{error}");
    // A replica of another.
    let replica = Redis::replica_of(ports[0], Setup::new().fast());
    let error = refused(&(redlock_url([ports[0], ports[1], replica.port()]) + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("replica"), "{error}");
    // Nobody there.
    servers.nodes()[1..].iter().for_each(Redis::kill);
    let error = refused(&(servers.url() + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[tokio::test]
async fn what_cannot_work_is_refused_when_it_is_asked_for() {
    let servers = Redlock::with(3, Setup::new().fast());
    let locks = connect(&(servers.url() + SOON)).await;
    let long = locks.mutex("a").lease(Duration::from_secs(31)).try_lock().await.unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Config, "{long}");
    let ours = locks.mutex("leasehold:redlock").try_lock().await.unwrap_err();
    assert_eq!(ours.kind(), ErrorKind::InvalidName, "{ours}");
    let shared = locks.rwlock("a").try_read().await.unwrap_err();
    assert_eq!(shared.kind(), ErrorKind::Unsupported, "{shared}");
    // The name of a key that is something else, on most nodes.
    for node in &servers.nodes()[..2] {
        node.command(&["LPUSH", "list", "x"]);
    }
    let list = locks.mutex("list").lock_timeout(PATIENCE).await.unwrap_err();
    assert_eq!(list.kind(), ErrorKind::Corrupt, "{list}");
}

#[tokio::test]
async fn tls_and_a_password() {
    let setup = Setup::new().fast().tls().arg("--requirepass").arg("p:w");
    let servers = Redlock::with(3, setup);
    let url: Vec<String> = servers.nodes().iter().map(Redis::url).collect();
    let hosts: Vec<&str> =
        url.iter().map(|u| u.rsplit_once('@').unwrap().1.trim_end_matches('/')).collect();
    let hosts = hosts.join(",");
    // Each has an authority of its own: all of them in one file.
    let directory = tempfile::tempdir().unwrap();
    let bundle = directory.path().join("authorities.pem");
    let all = servers.nodes().iter().map(|n| std::fs::read(n.certificates().authority()).unwrap());
    std::fs::write(&bundle, all.collect::<Vec<_>>().concat()).unwrap();
    let bundle = bundle.display();
    let url = format!(
        "redlocks://:p%3Aw@{hosts}?restart_delay_ms=0&node_timeout_ms=1000&tls_ca={bundle}"
    );
    let locks = connect(&url).await;
    locks.mutex("secret").try_lock().await.unwrap().release().await.unwrap();
    // Without the authorities nobody is trusted.
    let error = refused(&format!("redlocks://:p%3Aw@{hosts}{SOON}")).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

/// Names used once leave nothing that does not go away by itself.
#[tokio::test]
async fn what_is_kept_for_a_name_goes_away() {
    let servers = Redlock::with(3, Setup::new().fast());
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

/// One script at each node to take and one to release, in one round trip each (R13, R31).
#[tokio::test]
async fn r31_taking_and_releasing_cost_one_request_to_each_node() {
    let servers = five();
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
    for node in servers.nodes() {
        assert_eq!(scripts(node), 6, "{:?}", node.calls());
    }
    assert_eq!(requests() - before, 6 * servers.nodes().len());
}

/// The message that a node is free reaches who waits long before it would ask by itself.
#[tokio::test]
async fn r31_a_release_wakes_who_waits_early() {
    let servers = Redlock::with(3, Setup::new().fast());
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

/// A node that hangs, and that a majority needs, costs its time once and no more.
#[tokio::test]
async fn s32_a_node_that_hangs_and_is_needed_costs_one_timeout() {
    let servers = Redlock::with(3, Setup::new().fast());
    let nodes = servers.nodes();
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
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

/// The rights that the documentation names are enough for everything, and none is too many.
#[tokio::test]
async fn r31_the_documented_rights_are_enough_and_none_is_too_many() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/stores/redlock.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rule) = page.split_once("```\nACL SETUSER ").unwrap();
    let (rule, _) = rule.split_once("```").unwrap();
    let words: Vec<&str> = rule.split_whitespace().collect();
    let servers = Redlock::with(3, Setup::new().fast());
    for node in servers.nodes() {
        node.command(&[&["ACL", "SETUSER"], &words[..]].concat());
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    let url = servers.url().replace("redlock://", "redlock://app:secret@") + "/1" + SOON;
    let locks = connect(&url).await;
    let second = connect(&url).await;
    let name = "app:rights";
    let guard = locks.mutex(name).lock().await.unwrap();
    let waiter = {
        let lock = second.mutex(name);
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    eventually("waiting", async || {
        locks.read(name).await.unwrap().is_some_and(|info| info.waiters().count() == 1)
    })
    .await;
    assert_eq!(locks.list("app:").await.unwrap().len(), 1);
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    let mut used = std::collections::BTreeSet::new();
    for node in servers.nodes() {
        used.extend(node.calls().into_iter().map(|(name, _)| name));
    }
    // A second round trip for the token, an extension, keys that are set again.
    let mut far = claim(name, Duration::from_secs(20));
    far.seen = 1 << 52;
    holding(&patiently(async || locks.store().join(&far, Mode::Try).await).await);
    assert!(second.mutex(name).try_lock().await.is_err());
    servers.nodes()[0].command(&[
        "EVAL",
        "redis.call('SELECT', 1) redis.call('DEL', KEYS[1])",
        "1",
        name,
    ]);
    let renew = [Renew { claim: far.clone(), lease: far.lease }];
    patiently(async || locks.store().renew(&renew).await).await;
    assert_eq!(locks.evict(name, Evict::Holders).await.unwrap(), 1);
    locks.mutex(name).lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    let found = locks.diagnose().await.unwrap();
    assert!(found.iter().all(|f| f.id != "node"), "{found:?}");

    let unused = |right: &&&str| {
        right
            .strip_prefix('+')
            .is_some_and(|command| !used.iter().any(|call| call.split('|').next() == Some(command)))
    };
    let unused: Vec<_> = words.iter().filter(unused).collect();
    assert!(unused.is_empty(), "nobody needs {unused:?}: {used:?}");

    // One that is missing is named, with those that there are.
    for node in servers.nodes() {
        node.command(&["ACL", "SETUSER", "app", "-hmget"]);
    }
    let error = locks.mutex(name).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    let rights = words.iter().filter(|word| word.starts_with('+'));
    let connecting = ["+hello", "+select"];
    for right in rights.filter(|right| !connecting.contains(right)) {
        assert!(error.to_string().contains(right), "{right} is not in: {error}");
    }
}
