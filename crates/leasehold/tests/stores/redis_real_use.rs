//! What real use of the Redis store broke: keys of others, long queues, demotions, servers that
//! forget.

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Evict, Guarantee, Joined, Mode, Renew, Renewal, Signal};
use leasehold::{Claim, ErrorKind, Kind, Leasehold, LostReason, Name, Released};
use testbed::{Cluster, Redis, Sentinel, Setup};

/// How Redisson names who holds: a client's id and a thread's number.
const REDISSON: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:61";
/// How redis-py and many others do: a random word.
const RANDOM: &str = "0f8fad5bd9cb469fa16570867728950e";

fn fast() -> Redis {
    Redis::with(Setup::new().fast())
}

fn claim(name: &str, kind: Kind, capacity: u32) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), kind, 1, capacity).unwrap();
    (claim.lease, claim.waiter_lease) = (PATIENCE, PATIENCE);
    claim
}

fn mutex(name: &str) -> Claim {
    claim(name, Kind::Mutex, 1)
}

async fn join(locks: &Leasehold, claim: &Claim) -> Joined {
    locks.store().join(claim, Mode::Wait).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn hold(locks: &Leasehold, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
}

async fn wait(locks: &Leasehold, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
}

async fn renew(locks: &Leasehold, claim: &Claim) -> leasehold::Result<Renewal> {
    let renewal = Renew { claim: claim.clone(), lease: claim.lease };
    locks.store().renew(&[renewal]).await.map(|mut all| all.remove(0))
}

/// Waits until it is so.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn until_waiting(locks: &Leasehold, name: &str) {
    let end = Instant::now() + PATIENCE;
    while locks.read(name).await.unwrap().is_none_or(|info| info.waiters().count() == 0) {
        assert!(Instant::now() < end, "nobody waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Resolves when the claim is told of its grant, by a message.
async fn told(locks: &Leasehold, claim: &Claim) {
    while !matches!(locks.store().changed(claim).await.unwrap(), Signal::Granted(_)) {
        tokio::task::yield_now().await;
    }
}

#[test]
fn f79_a_lock_of_redissons_is_waited_for_and_named() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let writer = format!("{REDISSON}:write");
        let hashes: [(&str, &[&str]); 3] = [
            ("plain", &[REDISSON, "1"]),
            ("read", &["mode", "read", REDISSON, "2"]),
            ("write", &["mode", "write", &writer, "1"]),
        ];
        for (name, fields) in hashes {
            server.command(&[&["HSET", name], fields].concat());
            server.command(&["PEXPIRE", name, "600000"]);
            let error = locks.mutex(name).try_lock().await.unwrap_err();
            assert_told(&error, ErrorKind::Contended, "secret");
            assert!(error.to_string().contains("Redisson"), "{error}");
            let error = locks.semaphore(name, 3).try_acquire().await.unwrap_err();
            assert_told(&error, ErrorKind::Mismatch, "secret");
            assert!(error.to_string().contains("Redisson"), "{error}");
            let waiter = tokio::spawn({
                let mutex = locks.mutex(name);
                async move { mutex.lock().await }
            });
            until_waiting(&locks, name).await;
            let info = locks.read(name).await.unwrap().expect("held");
            let holder = info.holders().next().expect("shown");
            assert!(holder.holder.host.contains("Redisson"), "{holder:?}");
            let limit = Duration::from_millis(300);
            let error = locks.mutex(name).lock_timeout(limit).await.unwrap_err();
            assert_told(&error, ErrorKind::Timeout, "secret");
            assert!(error.to_string().contains("Redisson"), "{error}");
            let error = locks.evict(name, Evict::Holders).await.unwrap_err();
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(error.to_string().contains("Redisson"), "{error}");
            assert_eq!(server.command(&["DEL", name]), "1", "we deleted it");
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

/// No advice may cost somebody their lock.
#[test]
fn f79_nobody_is_told_to_delete_what_may_be_held() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["HSET", "endless", REDISSON, "1"]);
        server.command(&["SET", "permits", "3"]);
        server.command(&["SET", "redis-py", RANDOM]);
        server.command(&["HSET", "hash", "mode", "dark"]);
        server.command(&["RPUSH", "list", "a"]);
        let named = [
            ("endless", "Redisson"),
            ("permits", "semaphore of Redisson"),
            ("redis-py", "never expires"),
            ("hash", "something else than a lock"),
            ("list", "something else than a lock"),
        ];
        for (name, what) in named {
            for error in [
                locks.mutex(name).lock().await.unwrap_err(),
                locks.evict(name, Evict::Holders).await.unwrap_err(),
            ] {
                assert_told(&error, ErrorKind::Corrupt, "secret");
                let text = error.to_string();
                assert!(text.contains(what), "{name}: {text}");
                for advice in ["--force", "remove the key", "NAME", "DEL"] {
                    assert!(!text.contains(advice), "{name}: {text}");
                }
            }
            assert_eq!(server.command(&["EXISTS", name]), "1", "{name} was deleted");
        }
    });
}

#[test]
fn f01_release_force_deletes_locks_and_nothing_else() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let others = [
            "17",
            "1",
            "true",
            "{\"user\":7,\"cart\":[1,2,3]}",
            "a sentence of somebody's",
            "https://example.com/path/1",
            "short-1",
        ];
        for value in others {
            server.command(&["SET", "other", value, "PX", "600000"]);
            let error = locks.evict("other", Evict::Holders).await.unwrap_err();
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(error.to_string().contains("nothing was deleted"), "{error}");
            assert!(!error.to_string().contains(value) || value.len() < 5, "{error}");
            assert_eq!(server.command(&["GET", "other"]), value);
        }
        let recipes = [RANDOM, "xbFBIj9MQ2qwuHGLOmHN5A==", "c56a4180-65aa-42ec-a945-5fd21dec0538"];
        for value in recipes {
            server.command(&["SET", "lock", value, "PX", "600000"]);
            let removed = locks.evict("lock", Evict::Holders).await;
            assert_eq!(removed.unwrap_or_else(|e| panic!("{value}: {e}")), 1);
            assert_eq!(server.command(&["EXISTS", "lock"]), "0");
        }
        let ours = mutex("lock");
        hold(&locks, &ours).await;
        assert_eq!(locks.evict("lock", Evict::Holders).await.unwrap(), 1);
    });
}

#[test]
fn f63_messages_about_others_holds_say_whose_and_which() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["SET", "theirs", RANDOM, "PX", "600000"]);
        let error = locks.mutex("theirs").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Contended, RANDOM);
        assert!(error.to_string().contains("another library"), "{error}");
        // A key that never expires has nothing that remains.
        server.command(&["PERSIST", "theirs"]);
        let info = locks.read("theirs").await.unwrap().expect("held");
        assert_eq!(info.claims[0].remaining, None, "{info:?}");
        let notes = locks.guarantees().notes.join("\n");
        assert!(
            notes.contains("lists no locks that only other libraries' clients hold"),
            "{notes}"
        );
    });
}

#[test]
fn f41_a_try_that_fails_writes_nothing() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let holder = mutex("held");
        hold(&locks, &holder).await;
        let permits = claim("permits", Kind::Semaphore, 1);
        hold(&locks, &permits).await;
        let writes = || server.info("persistence", "rdb_changes_since_last_save");
        let before = writes();
        for other in [mutex("held"), claim("permits", Kind::Semaphore, 1)] {
            let joined = locks.store().join(&other, Mode::Try).await.unwrap();
            assert!(matches!(joined, Joined::Busy { .. }), "{joined:?}");
        }
        assert!(locks.mutex("held").try_lock().await.is_err());
        assert_eq!(writes(), before);
    });
}

/// A lock whose queue is long, with waiters that live or died.
fn queue(server: &Redis, name: &str, count: usize, dead: bool) {
    let code = "local t = redis.call('TIME')
        local ends = (ARGV[3] == 'dead' and 1 or 600000000 + t[1] * 1000000)
        for i = 1, ARGV[2] do
          local member = string.format('%032x 0 nobody:1 {\"host\":\"host\",\"pid\":%d,\"label\":\"\"}', i, i)
          redis.call('ZADD', KEYS[1], i, member)
          redis.call('ZADD', KEYS[2], ends, member)
        end";
    let (w, x) = (format!("leasehold:w:{name}"), format!("leasehold:x:{name}"));
    let state = if dead { "dead" } else { "alive" };
    server.command(&["EVAL", code, "2", &w, &x, name, &count.to_string(), state]);
}

#[test]
fn f13_a_wait_that_runs_out_reads_no_queue() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let held = locks.mutex("busy").lock().await.unwrap();
        queue(&server, "busy", 3_000, false);
        let sent = || server.info("stats", "total_net_output_bytes").parse::<u64>().unwrap();
        let before = sent();
        let limit = Duration::from_millis(200);
        let error = locks.mutex("busy").lock_timeout(limit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let label = format!("pid {}", std::process::id());
        assert!(error.to_string().contains(&label), "the holder is not named: {error}");
        assert!(locks.check(&held.sequencer()).await.is_ok());
        let sent = sent() - before;
        assert!(sent < 50_000, "{sent} bytes were answered");
    });
}

#[test]
fn f13_a_long_queue_is_read_in_pages() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let held = locks.mutex("long").lock().await.unwrap();
        queue(&server, "long", 1_700, false);
        server.command(&["CONFIG", "RESETSTAT"]);
        let info = locks.read("long").await.unwrap().expect("held");
        let scripts = |name: &str| server.calls().iter().find(|c| c.0 == name).map_or(0, |c| c.1);
        assert!(scripts("evalsha") + scripts("eval") > 3, "{:?}", server.calls());
        assert_eq!((info.claims.len(), info.holders().count()), (1_701, 1));
        let pids: Vec<u32> = info.waiters().map(|c| c.holder.pid).collect();
        assert!(pids.iter().copied().eq(1..=1_700), "out of order");
        assert_eq!(locks.list("").await.unwrap()[0].claims.len(), 1_701);
        release(held).await;
        // A semaphore's holders are as many.
        let mut held = Vec::new();
        for _ in 0..1_200 {
            let permit = claim("permits", Kind::Semaphore, 1_200);
            hold(&locks, &permit).await;
            held.push(permit);
        }
        wait(&locks, &claim("permits", Kind::Semaphore, 1_200)).await;
        let info = locks.read("permits").await.unwrap().expect("held");
        assert_eq!((info.holders().count(), info.waiters().count()), (1_200, 1));
        let tokens: Vec<_> = info.claims.iter().map(|c| c.token.unwrap()).collect();
        assert!(tokens.is_sorted(), "out of order");
    });
}

#[test]
fn f13_one_call_buries_some_of_many_dead_and_grants_none_past_the_rest() {
    const DEAD: usize = 5_500;
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let left = |name: &str| {
            server.command(&["ZCARD", &format!("leasehold:x:{name}")]).parse::<usize>().unwrap()
        };
        let holder = mutex("dead");
        hold(&locks, &holder).await;
        queue(&server, "dead", DEAD, true);
        assert!(locks.store().join(&mutex("dead"), Mode::Try).await.is_ok());
        assert!((1..DEAD).contains(&left("dead")), "{} of {DEAD} are left", left("dead"));
        let next = mutex("dead");
        wait(&locks, &next).await;
        // Whoever releases goes on until somebody has it.
        assert!(locks.store().leave(&holder, None).await.unwrap());
        tokio::time::timeout(PATIENCE, told(&locks, &next)).await.expect("handed over");
        assert_eq!(left("dead"), 0);
        // A free lock behind many dead: nobody is let in past those who may live, and soon all are.
        queue(&server, "free", DEAD, true);
        let guard = tokio::time::timeout(PATIENCE, locks.mutex("free").lock()).await;
        release(guard.expect("granted").unwrap()).await;
    });
}

/// Redis 7 demotes whom it is told to; the name leads to another server, or to this one again.
#[test]
fn f14_a_demotion_is_waited_for() {
    run(async {
        let (server, other) = (fast(), fast());
        let locks = connect(&server.url()).await;
        let held = locks.mutex("demoted").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = locks.mutex("demoted").lease(PATIENCE);
            async move { mutex.lock().await }
        });
        until_waiting(&locks, "demoted").await;
        server.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        until("the replica", || server.info("replication", "master_link_status") == "up").await;
        let lease = Duration::from_secs(3);
        let error = locks.mutex("tried").lease(lease).try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "secret");
        assert!(error.to_string().contains("replica"), "{error}");
        // Given back meanwhile: that is still owed when there is a master again.
        match held.release().await {
            Ok(released) => assert_eq!(released, Released::Owed),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Lost, "{error}"),
        }
        server.command(&["REPLICAOF", "NO", "ONE"]);
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        release(guard.unwrap_or_else(|error| panic!("{error}"))).await;
    });
}

/// Who waited when the master died hears of its grant from the replica that was promoted.
#[test]
fn f49_who_joined_before_a_failover_of_a_cluster_is_told_of_its_grant() {
    run(async {
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Cluster::with(3, 1, setup);
        let locks = connect_patiently(&cluster.url()).await;
        let (holder, waiter) = (mutex("b"), mutex("b"));
        hold(&locks, &holder).await;
        wait(&locks, &waiter).await;
        // Key, clock and the two sets of the queue.
        until("the replica has all", || cluster.nodes()[3].command(&["DBSIZE"]) == "4").await;
        cluster.nodes()[0].kill();
        cluster.wait_for_failover(0);
        let end = Instant::now() + PATIENCE;
        while !matches!(renew(&locks, &holder).await, Ok(Renewal::Holding { .. })) {
            assert!(Instant::now() < end, "the new master was never found");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let hearing = tokio::spawn({
            let (locks, waiter) = (locks.clone(), waiter.clone());
            async move { told(&locks, &waiter).await }
        });
        assert!(locks.store().leave(&holder, None).await.unwrap());
        let heard = tokio::time::timeout(PATIENCE / 2, hearing).await;
        heard.expect("nobody was told").unwrap();
    });
}

/// A network that forgets a connection without a word must not make us deaf for ever.
#[test]
fn f49_idle_connections_are_kept_alive() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        release(locks.mutex("idle").lock().await.unwrap()).await;
        let port = format!(":{:04X}", server.port());
        // Of each of our connections, established (01): which timer runs; 02 is that of keep-alive.
        let timers = || {
            let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
            let rows = table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
            let ours = rows.filter(|row| row[2].ends_with(&port) && row[3] == "01");
            ours.map(|row| row[5].split(':').next().unwrap_or_default().to_owned()).collect()
        };
        until("keep-alive on all", || {
            let timers: Vec<String> = timers();
            !timers.is_empty() && timers.iter().all(|timer| timer == "02")
        })
        .await;
    });
}

/// Has the sentinels promote the replica though the master is well.
async fn fail_over(set: &Sentinel) {
    let [old, new] = [&set.servers()[0], &set.servers()[1]];
    let ports: Vec<String> = set.sentinel_ports().iter().map(u16::to_string).collect();
    let ask_of = |port: &str, words: &[&str]| {
        let mut cli = std::process::Command::new("redis-cli");
        let said = cli.args(["-p", port, "SENTINEL"]).args(words).output().unwrap();
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    // As by default: else the others demote the new master before the one that promotes it has seen it.
    for port in &ports {
        ask_of(port, &["DEBUG", "publish-period", "2000"]);
    }
    let ask = |words: &[&str]| ask_of(&ports[0], words);
    let named = |port: u16| {
        ask(&["GET-MASTER-ADDR-BY-NAME", "mymaster"]).lines().nth(1) == Some(&port.to_string())
    };
    let end = Instant::now() + PATIENCE;
    // One that takes longer than two seconds is given up, and then asked for again.
    while !named(new.port()) {
        assert!(Instant::now() < end, "never failed over");
        ask(&["FAILOVER", "mymaster"]);
        let pause = Instant::now() + Duration::from_secs(5);
        while !named(new.port()) && Instant::now() < pause {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    set.wait_for_failover(old.port());
}

/// A refusal is no doubt: the release that is sent to the new master is the first that is done.
#[test]
fn f49_a_release_that_was_refused_elsewhere_still_tells_the_loss() {
    run(async {
        let set = Sentinel::unbroken();
        let locks = connect_patiently(&set.url()).await;
        let holder = mutex("lost");
        hold(&locks, &holder).await;
        fail_over(&set).await;
        until("the demotion", || set.servers()[0].info("replication", "role") == "slave").await;
        set.servers()[1].command(&["DEL", "lost"]);
        let end = Instant::now() + PATIENCE;
        let left = loop {
            match locks.store().leave(&holder, None).await {
                Ok(left) => break left,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
        };
        assert!(!left, "it was lost, and its holder is told that all went well");
    });
}

/// A master that nobody can demote goes on: only the sentinels know that it is one no more.
#[test]
fn f59_the_sentinels_are_believed_before_a_master_that_goes_on() {
    run(async {
        let set = Sentinel::unbroken();
        let [old, new] = [&set.servers()[0], &set.servers()[1]];
        let locks = connect_patiently(&set.url()).await;
        let guard = locks.mutex("kept").lease(Duration::from_secs(6)).lock().await.unwrap();
        until("the replica has it", || new.command(&["EXISTS", "kept"]) == "1").await;
        old.command(&["ACL", "SETUSER", "default", "-replicaof", "-slaveof"]);
        fail_over(&set).await;
        // As if it had been granted too late to be replicated.
        new.command(&["DEL", "kept"]);
        let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
        assert_eq!(lost.expect("renewed by the old master"), LostReason::Gone);
        assert_eq!(old.info("replication", "role"), "master");
        let next = locks.mutex("kept").lock().await.unwrap();
        assert!(new.command(&["EXISTS", "kept"]) == "1" && next.token() > guard.token());
        release(next).await;
    });
}

#[test]
fn f46_the_grade_is_what_the_settings_keep() {
    run(async {
        let server = Redis::start();
        let grade = async || connect(&server.url()).await.guarantees().clone();
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Disk, Durability::Disk));
        assert!(found.meets(Guarantee::ExclusiveOnStoreCrash));
        // Not synced while the file is written anew.
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        let ids: Vec<_> = connect(&server.url()).await.diagnose().await.unwrap();
        assert!(ids.iter().any(|f| f.id == "no-appendfsync-on-rewrite"), "{ids:?}");
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"]);
        server.command(&["CONFIG", "SET", "appendfsync", "everysec"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        // kill -9 loses nothing that was written, synced or not; but the machine may go down with it.
        assert!(!found.meets(Guarantee::ExclusiveOnStoreCrash));
        server.command(&["CONFIG", "SET", "appendonly", "no"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Process, Durability::Process));
        server.command(&["CONFIG", "SET", "appendonly", "yes"]);
        server.command(&["CONFIG", "SET", "appendfsync", "always"]);
        server.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
        for policy in ["allkeys-lru", "volatile-ttl"] {
            server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
            for wanted in [
                Guarantee::ExclusiveOnStoreCrash,
                Guarantee::ExclusiveOnFailover,
                Guarantee::ExclusiveOnClockStep,
                Guarantee::GrantDurability(Durability::Machine),
            ] {
                let error = leasehold::builder().require(wanted).connect(server.url()).await;
                let error = error.map(drop).expect_err("locks may be thrown away");
                assert_told(&error, ErrorKind::Unsupported, "secret");
            }
        }
    });
}

#[test]
fn f81_a_server_that_forgets_lets_nobody_in_before_its_leases_are_over() {
    run(async {
        let server = Arc::new(fast());
        let lease = Duration::from_secs(6);
        let url = format!("{}?restart_delay_ms=8000", server.url());
        let (a, b) = (connect(&url).await, connect(&url).await);
        assert!(a.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        assert!(!connect(&server.url()).await.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let long = a.mutex("long").lease(Duration::from_secs(9)).try_lock().await.unwrap_err();
        assert_told(&long, ErrorKind::Config, "secret");
        let guards = [
            a.mutex("mutex").no_renewal().lease(lease).lock().await.unwrap(),
            a.semaphore("permits", 1).no_renewal().lease(lease).acquire().await.unwrap(),
        ];
        server.restart_empty();
        // A take that was sent over the old connection may have to be made anew.
        let error = b.mutex("mutex").lease(lease).try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "secret");
        let (mutex, permits) =
            (b.mutex("mutex").lease(lease), b.semaphore("permits", 1).lease(lease));
        let (second, permit) = tokio::join!(mutex.lock(), permits.acquire());
        let (second, permit) = (second.unwrap(), permit.unwrap());
        for guard in &guards {
            assert!(!guard.is_held(), "two hold {}", guard.name());
        }
        release(second).await;
        release(permit).await;
        // Later it costs nothing.
        release(b.mutex("mutex").lease(lease).try_lock().await.unwrap()).await;
    });
}

#[tokio::test]
async fn f81_the_doctor_advises_the_delay_and_knows_it() {
    let server = fast();
    for (url, severity) in [
        (server.url(), Severity::Broken),
        (format!("{}?restart_delay_ms=60000", server.url()), Severity::Weak),
    ] {
        let found = connect(&url).await.diagnose().await.unwrap();
        let found = found.iter().find(|finding| finding.id == "persistence").expect("found");
        assert_eq!(found.severity, severity, "{found:?}");
        let text = format!("{} {}", found.why, found.fix);
        assert!(text.contains("restart_delay_ms"), "{text}");
    }
}

fn without(command: &str) -> Redis {
    Redis::with(Setup::new().fast().arg("--rename-command").arg(command).arg(""))
}

#[test]
fn f64_a_command_that_was_disabled_is_named() {
    run(async {
        for command in ["EVALSHA", "SUBSCRIBE"] {
            let server = without(command);
            let refused = match leasehold::connect(&server.url()).await {
                Err(error) => error,
                Ok(locks) => locks.mutex("x").try_lock().await.unwrap_err(),
            };
            assert_told(&refused, ErrorKind::Unsupported, "secret");
            let text = refused.to_string();
            assert!(text.contains(command) && text.contains("rename-command"), "{text}");
            assert!(!text.contains("upgrade"), "{text}");
        }
        // INFO tells what is promised, and locks work without it.
        let server = without("INFO");
        let locks = connect(&server.url()).await;
        assert!(locks.guarantees().notes.join("\n").contains("INFO"));
        release(locks.mutex("x").lock().await.unwrap()).await;
        assert!(locks.diagnose().await.is_ok());
    });
}

#[test]
fn f64_a_full_server_knows_the_holder_that_asks_again() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let holder = mutex("mine");
        hold(&locks, &holder).await;
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        hold(&locks, &holder).await;
        let error = locks.mutex("new").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Full, "secret");
        assert!(!error.to_string().contains("nothing was locked"), "{error}");
    });
}

/// What versions before this one have written, and will read. A change here is a change of the
/// format: clients of both versions use one server while a fleet is upgraded.
#[test]
fn f44_the_format_of_the_keys_is_what_it_was() {
    const ID: &str = "00112233445566778899aabbccddeeff";
    const WHO: &str = r#"{"host":"old","pid":7,"label":"job","more":"a field of a later version"}"#;
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let begins = |key: &str, pattern: &str| {
            let value = server.command(&["GET", key]);
            let mut words = value.splitn(5, ' ');
            let shape: Vec<_> = words.by_ref().take(4).map(shape).collect();
            assert_eq!(shape.join(" "), pattern, "{key}: {value}");
            let who = words.next().unwrap_or_default();
            assert!(who.starts_with("{\"host\":\""), "{key}: {value}");
        };
        // Written now: claim, token, since (µs), lock-delay (ms), holder.
        let mut held = mutex("mutex");
        held.lock_delay = Duration::from_secs(2);
        hold(&locks, &held).await;
        begins("mutex", "32x 16d 16d 4d");
        let next = mutex("mutex");
        wait(&locks, &next).await;
        for letter in ["w", "x"] {
            let member =
                server.command(&["ZRANGE", &format!("leasehold:{letter}:mutex"), "0", "0"]);
            let words: Vec<&str> = member.splitn(4, ' ').collect();
            assert_eq!((words[0], words[1]), (next.id.to_hex().as_str(), "0"), "{member}");
            assert!(words[2].starts_with("leasehold:inbox:"), "{member}");
            assert!(words[3].starts_with("{\"host\":\""), "{member}");
        }
        let permit = claim("permits", Kind::Semaphore, 3);
        hold(&locks, &permit).await;
        let meta = |field: &str| server.command(&["HGET", "leasehold:m:permits", field]);
        assert_eq!((meta("k"), meta("c"), meta("h")), ("semaphore".into(), "3".into(), "1".into()));
        let entry = meta(&permit.id.to_hex());
        let words: Vec<&str> = entry.splitn(6, ' ').collect();
        assert_eq!((words[0], words[1], words[2]), ("h", "1", "0"), "{entry}");
        assert!(words[3].starts_with("leasehold:inbox:") && shape(words[4]) == "16d", "{entry}");
        assert!(words[5].starts_with("{\"host\":\""), "{entry}");
        // Read: what another version wrote, with what it knows and we do not.
        let value = format!("{ID} 4503 1700000000000000 0 {WHO}");
        server.command(&["SET", "old", &value, "PX", "600000"]);
        let info = locks.read("old").await.unwrap().expect("held");
        assert_eq!((info.claims[0].holder.host.as_str(), info.claims[0].holder.pid), ("old", 7));
        let member = format!("{ID} 0 leasehold:inbox:ffff:1 {WHO}");
        let far = "9000000000000000";
        let holder = mutex("handed");
        hold(&locks, &holder).await;
        server.command(&["ZADD", "leasehold:w:handed", "9007199254740000", &member]);
        server.command(&["ZADD", "leasehold:x:handed", far, &member]);
        assert!(locks.store().leave(&holder, None).await.unwrap());
        // And is kept as it was: nothing that we do not know is dropped.
        let handed = server.command(&["GET", "handed"]);
        assert!(handed.starts_with(ID) && handed.ends_with(WHO), "{handed}");
        // A value of a later version that we cannot read is somebody's lock: waited for, kept.
        server.command(&["SET", "later", &format!("2:{value}"), "PX", "600000"]);
        let error = locks.mutex("later").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(locks.evict("later", Evict::Holders).await.is_err());
        assert_eq!(server.command(&["EXISTS", "later"]), "1");
    });
}

/// How many characters, and of which kind.
fn shape(word: &str) -> String {
    let kind = match word.chars().all(|c| c.is_ascii_digit()) {
        true => 'd',
        false if word.chars().all(|c| c.is_ascii_hexdigit()) => 'x',
        false => '?',
    };
    format!("{}{kind}", word.len())
}
