//! Keys of other clients: etcd's own clients in the same queue, values of older and newer versions,
//! and keys that are not locks and stay unchanged.

use std::time::Duration;

use crate::etcd_common::*;
use leasehold::store::{ClaimState, Evict};
use leasehold::{Client, ErrorKind, Hold, Result};
use testbed::Etcd;

/// Grants a lease of this length that no client renews. Returns its ID as etcdctl writes it.
fn lease_of_etcdctl(server: &Etcd, seconds: u32) -> String {
    let output = server.etcdctl(&["lease", "grant", &seconds.to_string()]);
    let id = output.split_whitespace().nth(1).unwrap();
    assert!(u64::from_str_radix(id, 16).is_ok(), "{output}");
    id.to_owned()
}

/// Puts a key with this value on a lease.
fn put(server: &Etcd, key: &str, value: &str, lease: &str) {
    server.etcdctl(&["put", &format!("--lease={lease}"), "--", key, value]);
}

/// Clients announce evictions in keys. None of these keys may belong to another program.
#[test]
fn eviction_keeps_foreign_keys_beside_eviction_notices() {
    run(async {
        // The test uses its own server, because other tests evict clients too and leave notices for
        // a moment.
        let server = testbed::Etcd::start();
        let keys = ["leasehold", "leasehold:told:", "leasehold:told:0"];
        for key in keys {
            server.etcdctl(&["put", "--", key, "theirs"]);
        }
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = locks.mutex("beside").lease(Duration::from_secs(60)).lock().await.unwrap();
        assert_eq!(other.evict("beside", Evict::Holders).await.unwrap(), 1);
        assert_eq!(guard.lost().await, leasehold::LostReason::Gone);
        for key in keys {
            let kept = server.etcdctl(&["get", "--print-value-only", "--", key]);
            assert_eq!(kept.trim(), "theirs", "{key}");
        }
        // The notice itself is deleted by a second request, which follows the first.
        let count = async || server.etcdctl(&["get", "--prefix", "--keys-only", "leasehold:told:"]);
        let end = std::time::Instant::now() + PATIENCE;
        while count().await.split_whitespace().count() > 2 {
            assert!(std::time::Instant::now() < end, "notices remain: {}", count().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for key in keys {
            server.etcdctl(&["del", "--", key]);
        }
    });
}

// S85
#[test]
fn waiter_is_granted_after_etcdctl_releases() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let mut theirs = etcdctl_lock(server, "s85/held", &[]);
        until_queued(&locks, "s85/held", 1).await;
        let error = locks.mutex("s85/held").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(format!("{error:#}").contains("another client of etcd"), "{error}");
        let error = locks.rwlock("s85/held").try_read().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let error = locks.rwlock("s85/held").read().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let lock = locks.mutex("s85/held");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&locks, "s85/held", 2).await;
        assert!(!waiting.is_finished());
        let listed = locks.list("s85/").await.unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].claims[0].state, ClaimState::Holding);
        interrupt(&theirs);
        let guard = waiting.await.unwrap().unwrap();
        theirs.wait().unwrap();
        release(guard).await;
    });
}

// S85
#[test]
fn etcdctl_and_leasehold_clients_are_granted_in_fifo_order() {
    run(async {
        let server = testbed::etcd();
        let (locks, name) = (connect(&server.url()).await, "s85-order");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("order").to_str().unwrap().to_owned();
        let printed = || std::fs::read_to_string(&path).unwrap_or_default();
        let guard = locks.mutex(name).lock().await.unwrap();
        let mut theirs =
            etcdctl_lock(server, name, &["sh", "-c", "echo theirs >> \"$0\"", path.as_str()]);
        until_queued(&locks, name, 2).await;
        let (lock, file) = (locks.mutex(name), path.clone());
        let ours = tokio::spawn(async move {
            let guard = lock.lock_timeout(PATIENCE).await.unwrap();
            let before = std::fs::read_to_string(&file).unwrap();
            release(guard).await;
            before
        });
        until_queued(&locks, name, 3).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(printed(), "", "etcdctl acquired the lock while leasehold held it");
        assert_eq!(locks.inspect(name).await.unwrap().unwrap().claims[1].holder.host, "?");
        release(guard).await;
        assert_eq!(ours.await.unwrap(), "theirs\n", "etcdctl was not granted first");
        assert!(theirs.wait().unwrap().success());
    });
}

// S85
#[test]
fn etcdctl_and_leasehold_exclude_each_other() {
    const EACH: usize = 6;
    run(async {
        let server = testbed::etcd();
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("counter");
        std::fs::write(&file, "0").unwrap();
        let path = file.to_str().unwrap().to_owned();
        // Only the one lock protects the counter.
        let script = "n=$(cat \"$0\"); sleep 0.01; echo $((n + 1)) > \"$0\"";
        let theirs = (0..3).map(|_| {
            let path = path.clone();
            tokio::task::spawn_blocking(move || {
                for _ in 0..EACH {
                    let mut child =
                        etcdctl_lock(testbed::etcd(), "s85-count", &["sh", "-c", script, &path]);
                    assert!(child.wait().unwrap().success());
                }
            })
        });
        let theirs: Vec<_> = theirs.collect();
        let url = server.url();
        let ours = (0..3).map(|_| {
            let (path, url) = (path.clone(), url.clone());
            tokio::spawn(async move {
                let locks = connect(&url).await;
                for _ in 0..EACH {
                    let guard = locks.mutex("s85-count").lock().await.unwrap();
                    let n: usize = std::fs::read_to_string(&path).unwrap().trim().parse().unwrap();
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    std::fs::write(&path, (n + 1).to_string()).unwrap();
                    assert!(guard.is_held());
                    release(guard).await;
                }
            })
        });
        for task in ours.collect::<Vec<_>>().into_iter().chain(theirs) {
            task.await.unwrap();
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), (6 * EACH).to_string());
    });
}

/// Takes a shared lock without waiting.
async fn shared(locks: &Client, name: &str) -> Result<Hold> {
    match name {
        "shared" => locks.rwlock(name).try_read().await.map(Hold::from),
        "of-3" => locks.semaphore(name, 3).try_acquire().await.map(Hold::from),
        _ => locks.semaphore(name, 9).try_acquire_many(2).await.map(Hold::from),
    }
}

/// Takes a shared lock and waits for it.
async fn shared_in_time(locks: &Client, name: &str) -> Result<Hold> {
    let limit = Duration::from_secs(2);
    match name {
        "shared" => locks.rwlock(name).read_timeout(limit).await.map(Hold::from),
        "of-3" => locks.semaphore(name, 3).acquire_timeout(limit).await.map(Hold::from),
        _ => locks.semaphore(name, 9).acquire_many_timeout(2, limit).await.map(Hold::from),
    }
}

// F03
/// A client of etcd itself wants the lock exclusively. It waits for all claims ahead of it and for
/// none after it. So no claim after it may be granted at the same time.
#[test]
fn shared_claims_do_not_overtake_a_waiting_etcdctl() {
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
                    until("etcdctl holds the lock", async || inside.exists()).await;
                }
                for refused in [shared(&other, name).await, shared_in_time(&other, name).await] {
                    let error = refused
                        .err()
                        .unwrap_or_else(|| panic!("{name}: two clients hold the lock"));
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

// F03
/// Claims that disagree about the lock are never holders at the same time, in whatever order they
/// joined.
#[test]
fn claims_that_disagree_about_the_lock_never_hold_together() {
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
            let info = locks.inspect("f03-mixed").await.unwrap().unwrap();
            assert_eq!(info.holders().count(), 1, "{info:?}");
            server.etcdctl(&["del", &key]);
        }
        assert!(locks.inspect("f03-mixed").await.unwrap().is_none());
    });
}

#[test]
fn entry_of_another_etcd_client_can_be_evicted() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let mut theirs = etcdctl_lock(server, "evicted", &[]);
        until_queued(&locks, "evicted", 1).await;
        assert_eq!(locks.evict("evicted", Evict::Holders).await.unwrap(), 1);
        release(locks.mutex("evicted").lock().await.unwrap()).await;
        interrupt(&theirs);
        theirs.wait().unwrap();
    });
}

// F01
/// The key of a service's own record lies in the range of a lock and is attached to a lease, but no
/// lock created it.
#[test]
fn evict_deletes_only_keys_that_are_queue_entries() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let lease = lease_of_etcdctl(server, 120);
        let by_lease = format!("sd/{lease}");
        let exists = |key: &str| !server.etcdctl(&["get", "--keys-only", key]).is_empty();
        for (key, value) in [("sd/service-1", ""), (&by_lease, "10.0.0.1:80")] {
            put(server, key, value, &lease);
            // The key blocks the lock, as it does for etcd's own client.
            let info = locks.inspect("sd").await.unwrap().unwrap();
            let token = info.claims[0].token.unwrap();
            assert_eq!(info.claims[0].state, ClaimState::Holding);
            for which in [Evict::Holders, Evict::Token(token)] {
                let error = locks.evict("sd", which).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
                assert!(format!("{error:#}").contains(key), "{error}");
            }
            assert!(exists(key), "{key}");
            server.etcdctl(&["del", key]);
        }
        // Keys that are certainly entries are evicted, whether etcdctl or leasehold created them.
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

// F44
/// Places that older or newer versions have written work in the same queue.
#[test]
fn values_of_older_and_newer_versions_share_one_queue() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let golden = include_str!("../../golden/values.txt");
        for (n, value) in golden.lines().enumerate() {
            let newer = value.replacen("{", "{\"new\":[1],", 1);
            let unreadable = format!("{} ?", value.split_once(' ').unwrap().0);
            for (m, value) in [value.to_owned(), newer, unreadable].into_iter().enumerate() {
                let name = format!("f44-{n}-{m}");
                let lease = lease_of_etcdctl(server, 60);
                put(server, &format!("{name}/{lease}"), &value, &lease);
                let info = locks.inspect(&name).await.unwrap().unwrap();
                let [one] = &info.claims[..] else { panic!("{info:?}") };
                let kind_and_capacity =
                    format!("{:?}:{} ", info.kind, info.capacity).to_lowercase();
                assert!(value.starts_with(&kind_and_capacity), "{value}: {info:?}");
                let weight = match (value.starts_with("semaphore"), m) {
                    (true, 2) => 9,
                    (false, 2) => info.capacity,
                    (is_semaphore, _) => 1 + u32::from(is_semaphore),
                };
                assert_eq!(one.weight, weight, "{value}");
                // A client that agrees about the lock waits for it or shares it.
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

// S90
#[test]
fn lock_and_locks_below_its_name_are_independent() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let below = locks.semaphore("top/below", 2).acquire().await.unwrap();
        let mut foreign = etcdctl_lock(server, "top/theirs", &[]);
        until_queued(&locks, "top/theirs", 1).await;
        // These keys are not locks, so leasehold ignores them.
        server.etcdctl(&["put", "top/config", "x"]);
        server.etcdctl(&["put", "top/below/config", "x"]);
        let guard = locks.mutex("top").try_lock().await.unwrap();
        let error = other.mutex("top").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let lock = other.mutex("top");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&locks, "top", 2).await;
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
        let error = other.mutex("top/below").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let reader = other.rwlock("top").try_read().await.unwrap();
        release(other.rwlock("top").read().await.unwrap()).await;
        let names: Vec<String> =
            locks.list("top").await.unwrap().iter().map(|l| l.name.as_str().into()).collect();
        assert_eq!(names, ["top", "top/below", "top/theirs"]);
        release(reader).await;
        release(below).await;
        interrupt(&foreign);
        foreign.wait().unwrap();
    });
}

// F47
/// A shared etcd holds many other keys that are not locks, whatever their names are.
#[test]
fn listing_a_shared_etcd_omits_foreign_keys() {
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
        release(locks.mutex("f47-kept").min_hold(PATIENCE).lock().await.unwrap()).await;
        let names: Vec<String> =
            locks.list("").await.unwrap().iter().map(|l| l.name.as_str().into()).collect();
        assert_eq!(names, ["f47-kept", "f47-list"]);
        release(guard).await;
    });
}
