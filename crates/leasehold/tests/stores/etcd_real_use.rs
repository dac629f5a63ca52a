//! What real use of the etcd store broke, and does not any more.

#![cfg(feature = "etcd")]

use std::time::{Duration, Instant};

use crate::etcd_common::*;
use leasehold::store::{Durability, Evict, Standing};
use leasehold::{ErrorKind, Guard, Leasehold, Result};
use testbed::{Etcd, Proxy, Setup};

/// A lease of so many seconds that nobody keeps alive, as etcdctl writes it.
fn lease_of_etcdctl(server: &Etcd, seconds: u32) -> String {
    let told = server.etcdctl(&["lease", "grant", &seconds.to_string()]);
    let id = told.split_whitespace().nth(1).unwrap();
    assert!(u64::from_str_radix(id, 16).is_ok(), "{told}");
    id.to_owned()
}

/// Puts a key with a value as it is, on a lease.
fn put(server: &Etcd, key: &str, value: &str, lease: &str) {
    server.etcdctl(&["put", &format!("--lease={lease}"), "--", key, value]);
}

/// One way to hold a lock with others, at once or not at all.
async fn shared(locks: &Leasehold, name: &str) -> Result<Guard> {
    match name {
        "shared" => locks.rwlock(name).try_read().await,
        "of-3" => locks.semaphore(name, 3).try_acquire().await,
        _ => locks.semaphore(name, 9).try_acquire_many(2).await,
    }
}

/// The same, by those who would wait for it.
async fn shared_in_time(locks: &Leasehold, name: &str) -> Result<Guard> {
    let limit = Duration::from_secs(2);
    match name {
        "shared" => locks.rwlock(name).read_timeout(limit).await,
        "of-3" => locks.semaphore(name, 3).acquire_timeout(limit).await,
        _ => locks.semaphore(name, 9).acquire_many_timeout(2, limit).await,
    }
}

/// A client of etcd's own wants the lock for itself. It waits for whoever came before and for nobody
/// who comes later, so nobody may hold beside it who came later.
#[test]
fn f03_who_waits_with_etcdctl_is_not_overtaken_by_those_who_share() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        for name in ["shared", "of-3", "of-9"] {
            let first = shared(&locks, name).await.unwrap();
            let directory = tempfile::tempdir().unwrap();
            let inside = directory.path().join("inside");
            let go = directory.path().join("go");
            let script = "touch \"$0\"; while [ ! -e \"$1\" ]; do sleep 0.02; done; rm \"$0\"";
            let args = ["sh", "-c", script, inside.to_str().unwrap(), go.to_str().unwrap()];
            let mut theirs = etcdctl_lock(server, name, &args);
            until_queued(&locks, name, 2).await;
            for theirs_holds in [false, true] {
                if theirs_holds {
                    until("etcdctl to hold", async || inside.exists()).await;
                }
                for refused in [shared(&other, name).await, shared_in_time(&other, name).await] {
                    let error = refused.err().unwrap_or_else(|| panic!("{name}: two hold"));
                    assert_eq!(error.kind(), ErrorKind::Mismatch, "{name}: {error}");
                }
                if !theirs_holds {
                    assert!(!inside.exists() && first.is_held(), "{name}");
                    assert_eq!(locks.evict(name, Evict::Holders).await.unwrap(), 1);
                }
            }
            std::fs::write(&go, "").unwrap();
            assert!(theirs.wait().unwrap().success());
            assert!(!inside.exists());
            release(shared_in_time(&other, name).await.unwrap()).await;
        }
    });
}

/// However they came to stand in one queue: those who do not agree what the lock is never hold together.
#[test]
fn f03_those_who_disagree_never_hold_together() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let values = [
            "semaphore:3 {\"claim\":\"00000000000000000000000000000001\",\"weight\":1,\"since\":1,\
             \"holder\":{\"host\":\"a\",\"pid\":1}}",
            "",
            "semaphore:5 {\"claim\":\"00000000000000000000000000000002\",\"weight\":1,\"since\":1,\
             \"holder\":{\"host\":\"b\",\"pid\":1}}",
            "semaphore:3 {\"claim\":\"00000000000000000000000000000003\",\"weight\":1,\"since\":1,\
             \"holder\":{\"host\":\"c\",\"pid\":1}}",
        ];
        let mut keys = Vec::new();
        for value in values {
            let lease = lease_of_etcdctl(server, 60);
            keys.push(format!("f03-mixed/{lease}"));
            put(server, &format!("f03-mixed/{lease}"), value, &lease);
        }
        for key in keys {
            let info = locks.read("f03-mixed").await.unwrap().unwrap();
            assert_eq!(info.holders().count(), 1, "{info:?}");
            server.etcdctl(&["del", &key]);
        }
        assert!(locks.read("f03-mixed").await.unwrap().is_none());
    });
}

/// What lies where a lock's keys lie, hangs on a lease and was made by no lock: a service's own record.
#[test]
fn f01_force_ends_no_key_that_is_no_place_in_a_queue() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let lease = lease_of_etcdctl(server, 120);
        let by_lease = format!("sd/{lease}");
        let exists = |key: &str| !server.etcdctl(&["get", "--keys-only", key]).is_empty();
        for (key, value) in [("sd/service-1", ""), (&by_lease, "10.0.0.1:80")] {
            put(server, key, value, &lease);
            // It is in the way of the lock, as it is for etcd's own client.
            let info = locks.read("sd").await.unwrap().unwrap();
            let token = info.claims[0].token.unwrap();
            assert_eq!(info.claims[0].standing, Standing::Holding);
            for which in [Evict::Holders, Evict::Token(token)] {
                let error = locks.evict("sd", which).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert_eq!(error.to_string().lines().count(), 1, "{error}");
                assert!(error.to_string().contains(key), "{error}");
            }
            assert!(exists(key), "{key}");
            server.etcdctl(&["del", key]);
        }
        // What certainly stands in a queue goes: theirs, and ours.
        let mut theirs = etcdctl_lock(server, "sd", &[]);
        until_queued(&locks, "sd", 1).await;
        put(server, "sd/service-1", "", &lease);
        assert_eq!(locks.evict("sd", Evict::Holders).await.unwrap(), 1);
        assert!(exists("sd/service-1"));
        interrupt(&theirs);
        theirs.wait().unwrap();
        server.etcdctl(&["del", "sd/service-1"]);
        let guard = locks.mutex("sd").lock().await.unwrap();
        assert_eq!(locks.evict("sd", Evict::Holders).await.unwrap(), 1);
        drop(guard);
    });
}

/// What was written by the versions before stands in one queue with us, and what later ones write too.
#[test]
fn f44_values_of_older_and_newer_versions_stand_in_one_queue() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let golden = include_str!("../../../leasehold-etcd/golden/values.txt");
        for (n, value) in golden.lines().enumerate() {
            let newer = value.replacen("{", "{\"new\":[1],", 1);
            let unreadable = format!("{} ?", value.split_once(' ').unwrap().0);
            for (m, value) in [value.to_owned(), newer, unreadable].into_iter().enumerate() {
                let name = format!("f44-{n}-{m}");
                let lease = lease_of_etcdctl(server, 60);
                put(server, &format!("{name}/{lease}"), &value, &lease);
                let info = locks.read(&name).await.unwrap().unwrap();
                let [one] = &info.claims[..] else { panic!("{info:?}") };
                let said = format!("{:?}:{} ", info.kind, info.capacity).to_lowercase();
                assert!(value.starts_with(&said), "{value}: {info:?}");
                let weight = match (value.starts_with("semaphore"), m) {
                    (true, 2) => 9,
                    (false, 2) => info.capacity,
                    (is_semaphore, _) => 1 + u32::from(is_semaphore),
                };
                assert_eq!(one.weight, weight, "{value}");
                // One who agrees what the lock is waits for it or shares it; nobody says otherwise.
                if value.starts_with("mutex") {
                    let error = locks.mutex(&name).try_lock().await.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
                } else if value.starts_with("rwlock") {
                    let error = locks.rwlock(&name).try_write().await.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
                    assert_eq!(locks.rwlock(&name).try_read().await.is_ok(), m < 2, "{value}");
                }
                assert_eq!(locks.list(&name).await.unwrap().len(), 1);
                let evicted = locks.evict(&name, Evict::Holders).await.unwrap();
                assert!(evicted > 0, "{value}");
                let left = server.etcdctl(&["get", "--keys-only", &format!("{name}/{lease}")]);
                assert!(left.is_empty(), "{left}");
            }
        }
    });
}

/// Each lock has a lease of its own, and a member that does not lead asks the leader about one after the
/// other: on one stream, all together take longer than any may be late.
#[test]
fn f09_thousands_of_locks_behind_a_member_that_is_far_from_its_leader() {
    const MANY: usize = 1_600;
    run(async {
        let cluster = Etcd::apart(Duration::from_millis(2));
        let follower = (cluster.leader() + 1) % 3;
        let locks = connect(&format!("etcd://127.0.0.1:{}", cluster.port(follower))).await;
        let mut held = Vec::new();
        for first in (0..MANY).step_by(200) {
            let mut taking = tokio::task::JoinSet::new();
            for n in first..first + 200 {
                let lock = locks.mutex(format!("f09-{n}"));
                taking.spawn(async move { lock.lock_timeout(PATIENCE).await.unwrap() });
            }
            held.extend(taking.join_all().await);
        }
        // Some renewals of all of them.
        tokio::time::sleep(Duration::from_secs(22)).await;
        let lost = held.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "of {MANY}");
        // Giving them back would wait for all that leave.
        drop(held);
    });
}

/// A cluster that is merely slow: whoever gives up soon must not cost those who hold their connection,
/// and with it the keep-alives that are under way.
#[test]
fn f10_impatient_callers_cost_a_slow_cluster_no_connection() {
    run(async {
        let cluster = Etcd::cluster();
        let proxies: Vec<Proxy> = (0..3).map(|n| Proxy::before(cluster.port(n))).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|p| format!("127.0.0.1:{}", p.port())).collect();
        let locks = connect(&format!("etcd://{}", hosts.join(","))).await;
        let blocker = connect(&cluster.url()).await.mutex("f10").lock().await.unwrap();
        let held = locks.mutex("f10-held").lease(Duration::from_secs(6)).lock().await.unwrap();
        proxies.iter().for_each(|proxy| proxy.delay(Duration::from_millis(60)));
        let connections = || proxies.iter().map(Proxy::connections).sum::<usize>();
        let before = connections();
        let end = Instant::now() + Duration::from_secs(14);
        let mut impatient = tokio::task::JoinSet::new();
        for n in 0..8 {
            let lock = locks.mutex("f10");
            impatient.spawn(async move {
                while Instant::now() < end {
                    let limit = Duration::from_millis(130 + 40 * n);
                    let error = lock.lock_timeout(limit).await.unwrap_err();
                    assert!(
                        matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable),
                        "{error}"
                    );
                }
            });
        }
        impatient.join_all().await;
        assert!(held.is_held(), "{held:?}");
        let more = connections() - before;
        // A machine that stood still may have cost one or two.
        assert!(more <= 4, "{more} connections where none was needed");
        release(held).await;
        drop(blocker);
    });
}

/// It neither answers nor ends its connections.
async fn one_silent_member_costs_no_hold_and_no_more_than_two_seconds(members: usize) {
    let cluster = Etcd::with(Setup::new(), members);
    let url = cluster.url();
    let mut slowest = Vec::new();
    for round in 0..3 {
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(connect(&url).await);
        }
        let mut held = Vec::new();
        for (n, locks) in clients.iter().enumerate() {
            for lease in [5, 15] {
                let lock = locks.mutex(format!("silent-{round}-{n}-{lease}"));
                held.push(lock.lease(Duration::from_secs(lease)).lock().await.unwrap());
            }
        }
        // No election: that takes its own time.
        let member = (cluster.leader() + 1 + round % 2) % members;
        cluster.stop(member);
        let mut took = Duration::ZERO;
        let mut taking = tokio::task::JoinSet::new();
        for (n, locks) in clients.iter().enumerate() {
            let lock = locks.mutex(format!("wanted-{round}-{n}"));
            taking.spawn(async move {
                let begun = Instant::now();
                release(lock.lock().await.unwrap()).await;
                begun.elapsed()
            });
        }
        for each in taking.join_all().await {
            took = took.max(each);
        }
        slowest.push(took);
        // Longer than any of the leases would last unrenewed.
        tokio::time::sleep(Duration::from_secs(16)).await;
        assert!(held.iter().all(Guard::is_held), "{held:?}");
        let begun = Instant::now();
        let late = connect(&url).await;
        slowest.push(begun.elapsed());
        cluster.cont(member);
        drop((held, late));
        if slowest.iter().rev().take(2).all(|took| *took <= Duration::from_secs(2)) {
            return;
        }
    }
    // A busy machine may cost a round or two.
    panic!("never within two seconds: {slowest:?}");
}

#[test]
fn f10_one_silent_member_of_three_costs_no_hold_and_no_more_than_two_seconds() {
    run(one_silent_member_costs_no_hold_and_no_more_than_two_seconds(3));
}

#[test]
fn f10_one_silent_member_of_five_costs_no_hold_and_no_more_than_two_seconds() {
    run(one_silent_member_costs_no_hold_and_no_more_than_two_seconds(5));
}

/// What a proxy answers to a keep-alive may be older than the question, and it numbers watches itself.
#[test]
fn f11_etcds_grpc_proxy_is_recognised_and_refused() {
    run(async {
        let server = testbed::etcd();
        // The second shows the cluster's own list of members.
        for more in [&[][..], &["--advertise-client-url="]] {
            let proxy = server.grpc_proxy(more);
            let url = format!("etcd://127.0.0.1:{}", proxy.port());
            let mut told = None;
            until("the proxy", async || match leasehold::connect(&url).await {
                Err(e) if e.kind() == ErrorKind::Unreachable => false,
                other => {
                    told = Some(other.err());
                    true
                }
            })
            .await;
            let error = told.unwrap().unwrap_or_else(|| panic!("not recognised: {more:?}"));
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("grpc-proxy"), "{error}");
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    });
}

/// The URL has always said who we are; now etcd asks.
#[test]
fn f12_users_are_enabled_while_locks_are_held_and_waited_for() {
    run(async {
        let server = Etcd::start();
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(6);
        let held = locks.mutex("f12").lease(lease).lock().await.unwrap();
        let lock = other.mutex("f12").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "f12", 2).await;
        server.enable_auth("");
        tokio::time::sleep(lease * 2).await;
        assert!(held.is_held(), "{held:?}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        // And one who comes for the first time since.
        release(other.mutex("f12-new").lock().await.unwrap()).await;
        release(held).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

/// Tokens of two seconds, and leases of more.
#[test]
fn f12_a_users_token_may_end_while_locks_are_held_and_waited_for() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        std::fs::write(&key, "a secret of sixty-four bytes, so that nobody finds it too short!")
            .unwrap();
        let token = format!("jwt,sign-method=HS256,priv-key={},ttl=2s", key.display());
        let server = Etcd::with(Setup::new().arg(format!("--auth-token={token}")), 1);
        server.enable_auth("");
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(6);
        let held = locks.mutex("f12-jwt").lease(lease).lock().await.unwrap();
        let lock = other.mutex("f12-jwt").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "f12-jwt", 2).await;
        tokio::time::sleep(lease * 2).await;
        assert!(held.is_held(), "{held:?}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        release(held).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

/// A learner has all data and no vote: its presence makes no majority.
#[test]
fn f47_a_learner_is_no_member_that_counts() {
    run(async {
        let server = Etcd::start();
        let add = ["member", "add", "learner", "--learner", "--peer-urls=http://127.0.0.1:1"];
        server.etcdctl(&add);
        let locks = connect(&server.url()).await;
        assert_eq!(locks.guarantees().grant, Durability::Disk);
        let found = locks.diagnose().await.unwrap();
        assert!(found.iter().any(|f| f.id == "one-member"), "{found:?}");
        assert!(found.iter().all(|f| f.id != "even"), "{found:?}");
        release(locks.mutex("f47").lock().await.unwrap()).await;
    });
}

/// Much else lies in an etcd that is shared, and is no lock, whatever it is called.
#[test]
fn f47_a_shared_etcd_is_listed_without_what_is_not_ours() {
    run(async {
        let server = Etcd::start();
        let locks = connect(&server.url()).await;
        let big = "x".repeat(60_000);
        let lease = lease_of_etcdctl(&server, 120);
        for n in 0..40 {
            put(&server, &format!("config/{n}"), &big, &lease);
        }
        put(&server, &format!("config/{lease}"), &big, &lease);
        let guard = locks.mutex("f47-list").lock().await.unwrap();
        release(locks.mutex("f47-kept").at_least(PATIENCE).lock().await.unwrap()).await;
        let names: Vec<String> =
            locks.list("").await.unwrap().iter().map(|l| l.name.as_str().into()).collect();
        assert_eq!(names, ["f47-kept", "f47-list"]);
        release(guard).await;
    });
}

/// The delay is the last part of the lease: neither its late holder nor anybody else can cut it short, and
/// other clients of etcd wait for its end as well.
#[test]
fn f82_a_lock_delay_is_kept_whatever_comes_late() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let (lease, delay) = (Duration::from_secs(2), Duration::from_secs(7));
        let lock = locks.mutex("f82").lease(lease).lock_delay(delay);
        // Of a clean end nothing remains, and a renewed hold is no delay.
        let guard = lock.lock().await.unwrap();
        tokio::time::sleep(lease * 2).await;
        assert!(guard.is_held(), "{guard:?}");
        other.check(&guard.sequencer()).await.unwrap();
        release(guard).await;
        release(other.mutex("f82").try_lock().await.unwrap()).await;

        let begun = Instant::now();
        let guard = lock.no_renewal().lock().await.unwrap();
        let mut theirs = etcdctl_lock(server, "f82", &["true"]);
        until_queued(&other, "f82", 2).await;
        guard.lost().await;
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        until("the delay to be seen", async || {
            let info = other.read("f82").await.unwrap().unwrap();
            info.claims[0].standing == Standing::Departed
        })
        .await;
        let error = other.mutex("f82").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        release(other.mutex("f82").lock_timeout(PATIENCE).await.unwrap()).await;
        assert!(begun.elapsed() >= lease + delay, "open after {:?}", begun.elapsed());
        assert!(theirs.wait().unwrap().success());
    });
}
