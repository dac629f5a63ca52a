//! The etcd store on one real member: leases that end, watches that break, other clients, bad input.

#![cfg(feature = "etcd")]

use std::path::Path;
use std::time::Duration;

use crate::etcd_common::*;
use leasehold::store::{Evict, Joined, Mode, Renew, Renewal, Signal, Standing, Store};
use leasehold::{Claim, ErrorKind, Kind, LostReason, Name};
use testbed::{Etcd, Proxy, Setup};

/// The lease that the only key with this prefix hangs on, as etcdctl writes it.
fn lease_of(server: &Etcd, prefix: &str) -> String {
    let json = server.etcdctl(&["get", "--prefix", prefix, "-w", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let kvs = json["kvs"].as_array().unwrap();
    assert_eq!(kvs.len(), 1, "{json}");
    format!("{:x}", kvs[0]["lease"].as_i64().unwrap())
}

fn keys(server: &Etcd, prefix: &str) -> usize {
    server.etcdctl(&["get", "--prefix", prefix, "--keys-only"]).split_whitespace().count()
}

fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

/// A claim that needs no heartbeat in a test's time.
fn patient(name: &str) -> Claim {
    let mut claim = claim(name);
    (claim.lease, claim.waiter_lease) = (Duration::from_secs(55), Duration::from_secs(50));
    claim
}

async fn granted(store: &dyn Store, claim: &Claim) -> Signal {
    tokio::time::timeout(PATIENCE, store.changed(claim)).await.unwrap().unwrap()
}

#[test]
fn s80_a_waiter_whose_lease_ended_is_not_told_that_it_holds() {
    run(async {
        let server = testbed::etcd();
        let (locks, store) = with_store(&server.url()).await;
        let guard = locks.mutex("s80").lock().await.unwrap();
        let (first, second) = (patient("s80"), patient("s80"));
        let joined = store.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 1), "{joined:?}");
        let joined = store.join(&second, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 2), "{joined:?}");
        let lease = lease_of(
            server,
            std::str::from_utf8(&store.ownership(&first).unwrap().unwrap().key).unwrap(),
        );
        server.etcdctl(&["lease", "revoke", &lease]);
        release(guard).await;
        assert_eq!(granted(&*store, &first).await, Signal::Ask);
        let renew = Renew { lease: first.lease, claim: first };
        let told = store.renew(&[renew]).await.unwrap();
        assert!(matches!(told[..], [Renewal::Lost]), "{told:?}");
        assert!(matches!(granted(&*store, &second).await, Signal::Granted(_)));
        assert!(store.leave(&second, None).await.unwrap());
    });
}

#[test]
fn s81_tasks_of_one_client_exclude_each_other() {
    run(async {
        let locks = connect(&testbed::etcd().url()).await;
        hammer(&[locks], "s81", 8, 15).await;
    });
}

#[test]
fn s82_a_lease_that_etcd_ended_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82").lock().await.unwrap();
        server.etcdctl(&["lease", "revoke", &lease_of(server, "s82/")]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
        // The next lease is another one.
        let next = locks.mutex("s82").lock().await.unwrap();
        assert!(next.token() > guard.token());
        release(next).await;
    });
}

#[test]
fn s82_a_key_that_a_person_deleted_is_lost() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("s82-del").lock().await.unwrap();
        server.etcdctl(&["del", "--prefix", "s82-del/"]);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Gone);
    });
}

#[test]
fn s82_silence_is_lost_by_our_own_clock() {
    run(async {
        let server = Etcd::start();
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(2);
        let guard = locks.mutex("silent").lease(lease).lock().await.unwrap();
        server.stop(0);
        // Nothing is acknowledged from here on: what was, was sent before.
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held(), "believed beyond the end of its lease");
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Expired);
        server.cont(0);
        let next = connect(&server.url()).await.mutex("silent").lock().await.unwrap();
        assert!(!guard.is_held());
        assert!(next.token() > guard.token());
    });
}

#[test]
fn s82_one_way_silence_is_lost_by_our_own_clock() {
    run(async {
        let server = Etcd::start();
        let other = connect(&server.url()).await;
        let ways: [fn(&Proxy); 2] = [Proxy::hold_requests, Proxy::hold_replies];
        for (name, silence) in ["requests", "replies"].into_iter().zip(ways) {
            let proxy = Proxy::before(server.port(0));
            let locks = connect(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
            let held = (&locks, Duration::from_secs(4));
            let next = lost_before_the_next_holds(held, &other, name, || silence(&proxy)).await;
            proxy.thaw();
            release(next).await;
            release(locks.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
        }
    });
}

#[test]
fn s83_what_is_granted_counts_and_never_more_than_was_asked_for() {
    run(async {
        // Grants no less than 9 s.
        let setup = Setup::new().arg("--election-timeout=6000").arg("--heartbeat-interval=600");
        let server = Etcd::with(setup, 1);
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(1);
        let guard = locks.mutex("short").lease(lease).no_renewal().lock().await.unwrap();
        assert!(guard.remaining() < lease);
        let info = locks.read("short").await.unwrap().unwrap();
        let told = info.holders().next().unwrap().remaining.unwrap();
        assert!(told > lease * 3, "the negotiated lease is told: {told:?}");
        tokio::time::sleep(lease).await;
        assert!(!guard.is_held());
        let rival = connect(&server.url()).await;
        let error = rival.mutex("short").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "etcd keeps it for longer: {error}");
        release(rival.mutex("short").lock().await.unwrap()).await;
    });
}

/// While a waiter hears nothing, the lock is released, and what it would have heard is compacted away.
#[test]
fn s84_compaction_takes_nothing_from_who_waits() {
    run(async {
        let server = Etcd::start();
        let proxy = Proxy::before(server.port(0));
        let locks = connect(&server.url()).await;
        let (_client, store) = with_store(&format!("etcd://127.0.0.1:{}", proxy.port())).await;
        let guard = locks.mutex("s84").lock().await.unwrap();
        // No heartbeat asks: what it is told, its watch tells.
        let waits = patient("s84");
        let joined = store.join(&waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        until("watching", async || {
            server.metric(0, "etcd_debugging_mvcc_watcher_total").is_some_and(|n| n >= 1.0)
        })
        .await;
        proxy.freeze();
        release(guard).await;
        server.etcdctl(&["put", "s84-noise", "x"]);
        let json = server.etcdctl(&["get", "s84-noise", "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let revision = json["header"]["revision"].as_i64().unwrap();
        server.etcdctl(&["compact", &revision.to_string()]);
        proxy.cut();
        proxy.thaw();
        assert!(matches!(granted(&*store, &waits).await, Signal::Granted(_)));
        assert!(store.leave(&waits, None).await.unwrap());
    });
}

#[test]
fn s84_broken_watches_begin_anew() {
    run(async {
        let server = Etcd::start();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        for _ in 0..2 {
            let guard = locks.mutex("broken").lock().await.unwrap();
            let lock = other.mutex("broken");
            let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
            until_queued(&locks, "broken", 2).await;
            server.kill(0);
            server.restart(0);
            assert!(guard.is_held(), "a restart takes no longer than the lease");
            release(guard).await;
            release(waiting.await.unwrap().unwrap()).await;
        }
    });
}

#[test]
fn s85_etcdctl_holds_and_we_wait() {
    run(async {
        let server = testbed::etcd();
        let locks = connect(&server.url()).await;
        let mut theirs = etcdctl_lock(server, "s85/held", &[]);
        until_queued(&locks, "s85/held", 1).await;
        let error = locks.mutex("s85/held").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(error.to_string().contains("another client of etcd"), "{error}");
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
        assert_eq!(listed[0].claims[0].standing, Standing::Holding);
        interrupt(&theirs);
        let guard = waiting.await.unwrap().unwrap();
        theirs.wait().unwrap();
        release(guard).await;
    });
}

#[test]
fn s85_etcdctl_waits_for_us_in_the_order_of_asking() {
    run(async {
        let server = testbed::etcd();
        let (locks, name) = (connect(&server.url()).await, "s85-order");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("order").to_str().unwrap().to_owned();
        let said = || std::fs::read_to_string(&path).unwrap_or_default();
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
        assert_eq!(said(), "", "nobody enters while we hold");
        assert_eq!(locks.read(name).await.unwrap().unwrap().claims[1].holder.host, "?");
        release(guard).await;
        assert_eq!(ours.await.unwrap(), "theirs\n", "they came before us");
        assert!(theirs.wait().unwrap().success());
    });
}

#[test]
fn s85_one_counter_of_theirs_and_ours() {
    const EACH: usize = 6;
    run(async {
        let server = testbed::etcd();
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("counter");
        std::fs::write(&file, "0").unwrap();
        let path = file.to_str().unwrap().to_owned();
        // No lock of theirs or ours is in it but the one.
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

#[test]
fn s90_a_lock_and_those_below_its_name_are_apart() {
    run(async {
        let server = testbed::etcd();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let below = locks.semaphore("top/below", 2).acquire().await.unwrap();
        let mut foreign = etcdctl_lock(server, "top/theirs", &[]);
        until_queued(&locks, "top/theirs", 1).await;
        // No lock at all, and not ours to judge.
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

#[test]
fn r13_a_pair_is_two_requests_and_a_failed_try_leaves_nothing() {
    const PAIRS: u64 = 100;
    run(async {
        let server = testbed::etcd();
        let (locks, store) = with_store(&server.url()).await;
        let lock = locks.mutex("r13");
        for _ in 0..3 {
            release(lock.lock().await.unwrap()).await;
        }
        let before = store.requests();
        for _ in 0..PAIRS {
            release(lock.lock().await.unwrap()).await;
        }
        let pairs = store.requests() - before;
        // A few keep-alives, of leases that lie idle, come between.
        assert!((2 * PAIRS..2 * PAIRS + PAIRS / 2).contains(&pairs), "{pairs} for {PAIRS} pairs");
        let guard = lock.lock().await.unwrap();
        let keys_before = keys(server, "r13/");
        for _ in 0..3 {
            lock.try_lock().await.unwrap_err();
        }
        assert_eq!(keys(server, "r13/"), keys_before);
        release(guard).await;
        assert_eq!(keys(server, "r13/"), 0);
    });
}

#[test]
fn r10_a_release_wakes_one_of_many() {
    const WAITERS: u64 = 200;
    run(async {
        let server = Etcd::start();
        let (locks, store) = with_store(&server.url()).await;
        let guard = locks.mutex("herd").lock().await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..WAITERS {
            let lock = locks.mutex("herd").lease(Duration::from_secs(60));
            waiting.spawn(async move { release(lock.lock_timeout(PATIENCE).await.unwrap()).await });
        }
        until_queued(&locks, "herd", WAITERS as usize + 1).await;
        until("watching", async || {
            let watches = server.metric(0, "etcd_debugging_mvcc_watcher_total");
            watches.is_some_and(|n| n >= WAITERS as f64)
        })
        .await;
        // Each looks once more when its watch has begun.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (before, started) = (store.requests(), std::time::Instant::now());
        release(guard).await;
        waiting.join_all().await;
        let sent = store.requests() - before;
        // A transaction to leave, a look, an end of the watch; and heartbeats, as time goes by.
        let beats = 4 * WAITERS * (1 + started.elapsed().as_secs() / 2);
        assert!(sent <= 4 * WAITERS + beats, "{sent} requests for {WAITERS} hand-overs");
    });
}

/// To join, to look when it is woken, to leave: nothing is watched anew.
#[test]
fn r10_a_turn_among_the_same_few_is_three_requests() {
    const TURNS: u64 = 100;
    run(async {
        let url = testbed::etcd().url();
        let (mut stores, mut running) = (Vec::new(), tokio::task::JoinSet::new());
        for _ in 0..3 {
            let (locks, store) = with_store(&url).await;
            stores.push(store);
            running.spawn(async move {
                for _ in 0..TURNS {
                    release(locks.mutex("few").lock_timeout(PATIENCE).await.unwrap()).await;
                }
            });
        }
        let sent = async || stores.iter().map(|store| store.requests()).sum::<u64>();
        let (before, started) = (sent().await, std::time::Instant::now());
        running.join_all().await;
        let (sent, turns) = (sent().await - before, 3 * TURNS);
        // Leases are granted and kept, and the first of each watches; one may find the lock free.
        let beats = 3 * 4 * (2 + started.elapsed().as_secs());
        assert!((2 * turns..3 * turns + turns / 2 + beats).contains(&sent), "{sent} for {turns}");
    });
}

#[test]
fn r10_all_readers_that_fit_are_woken_by_push() {
    run(async {
        let url = testbed::etcd().url();
        let writer = connect(&url).await;
        let (_, first) = with_store(&url).await;
        let (_, second) = with_store(&url).await;
        let guard = writer.rwlock("readers").write().await.unwrap();
        // The stores alone: no heartbeat makes up for what is not pushed.
        let mut waiting = Vec::new();
        for n in 0..9 {
            let store = if n % 2 == 0 { &first } else { &second };
            let name = Name::new("readers").unwrap();
            let mut reader = Claim::new(name, Kind::RwLock, 1, leasehold::MAX_READERS).unwrap();
            (reader.lease, reader.waiter_lease) = (PATIENCE, PATIENCE);
            let joined = store.join(&reader, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            waiting.push((store, reader));
        }
        release(guard).await;
        for (store, reader) in &waiting {
            while granted(&***store, reader).await == Signal::Ask {}
        }
        for (store, reader) in &waiting {
            assert!(store.leave(reader, None).await.unwrap());
        }
    });
}

#[test]
fn at_least_outlives_a_doubled_release_and_another_client_may_leave() {
    run(async {
        let url = testbed::etcd().url();
        let (_, store) = with_store(&url).await;
        let (_, other) = with_store(&url).await;
        let kept = patient("kept");
        assert!(matches!(store.join(&kept, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let keep = Some(Duration::from_secs(30));
        assert!(store.leave(&kept, keep).await.unwrap());
        assert!(store.leave(&kept, keep).await.unwrap(), "its place is still there");
        assert!(store.leave(&kept, None).await.unwrap());
        let rival = claim("kept");
        assert!(matches!(other.join(&rival, Mode::Try).await.unwrap(), Joined::Busy { .. }));
        // Who departed and comes again stands behind what it left.
        let again = other.join(&kept, Mode::Wait).await.unwrap();
        assert!(matches!(again, Joined::Waiting(p) if p.ahead == 1), "{again:?}");
        let info = other.read(&kept.name).await.unwrap().unwrap();
        assert_eq!(info.claims[0].standing, Standing::Departed);
        assert!(other.leave(&kept, None).await.unwrap());
        // Where nobody but the departed stands, it is a lock in use all the same.
        let listed = other.list("kept").await.unwrap();
        assert!(matches!(&listed[..], [one] if one.claims.len() == 1), "{listed:?}");
        assert_eq!(other.evict(&kept.name, Evict::Holders).await.unwrap(), 1);
        // What one client took, another that knows the claim may renew and give back.
        let shared = patient("shared");
        assert!(matches!(store.join(&shared, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let renew = Renew { lease: shared.lease, claim: shared.clone() };
        let told = other.renew(&[renew]).await.unwrap();
        assert!(matches!(told[..], [Renewal::Holding { .. }]), "{told:?}");
        assert!(other.leave(&shared, None).await.unwrap());
        assert!(!other.leave(&shared, None).await.unwrap());
    });
}

/// Else etcd steps over as many keys as there ever were, whenever it looks at the lock's.
#[test]
fn a_lock_that_is_used_again_is_the_same_key_and_what_comes_late_harms_nobody() {
    run(async {
        let server = testbed::etcd();
        let (_, store) = with_store(&server.url()).await;
        let mut keys = std::collections::BTreeSet::new();
        for _ in 0..20 {
            let one = patient("again");
            assert!(matches!(store.join(&one, Mode::Try).await.unwrap(), Joined::Holding { .. }));
            keys.insert(store.ownership(&one).unwrap().map(|owned| owned.key));
            assert!(store.leave(&one, None).await.unwrap());
        }
        // One lease is got ahead, for whoever comes beside the first.
        assert!(keys.len() <= 2, "{} keys for 20 uses", keys.len());
        let (first, second) = (patient("again"), patient("again"));
        assert!(matches!(store.join(&first, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        let key = store.ownership(&first).unwrap().map(|owned| owned.key);
        assert!(store.leave(&first, None).await.unwrap());
        assert!(matches!(store.join(&second, Mode::Try).await.unwrap(), Joined::Holding { .. }));
        assert_eq!(store.ownership(&second).unwrap().map(|owned| owned.key), key);
        assert_ne!(
            store.ownership(&first).unwrap().map(|owned| owned.key),
            key,
            "nobody compares with another's place"
        );
        // As after an answer that was lost.
        assert!(!store.leave(&first, None).await.unwrap());
        let renewals = [first, second.clone()].map(|claim| Renew { lease: claim.lease, claim });
        let told = store.renew(&renewals).await.unwrap();
        assert!(matches!(told[..], [Renewal::Lost, Renewal::Holding { .. }]), "{told:?}");
        // A key that stays when its holder departs is nobody else's.
        assert!(store.leave(&second, Some(Duration::from_secs(10))).await.unwrap());
        let third = patient("again");
        let joined = store.join(&third, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(p) if p.ahead == 1), "{joined:?}");
        assert_ne!(store.ownership(&third).unwrap().map(|owned| owned.key), key);
        assert!(matches!(granted(&*store, &third).await, Signal::Granted(_)));
        assert!(store.leave(&third, None).await.unwrap());
    });
}

// --- bad input ---------------------------------------------------------------------------------

/// What a client is told that is not let in: by connecting, or at the latest by its first lock.
async fn refusal(url: &str, name: &str) -> leasehold::Error {
    let error = match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex(name).try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was given on {}", locks.url()),
        },
    };
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn s94_users_passwords_and_rights() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("locks/");
        let port = server.port(0);
        let at = |user: &str, path: &str| format!("etcd://{user}127.0.0.1:{port}{path}");
        for (user, path, says) in [
            ("", "", "put one into the URL"),
            ("lh:wr0ng@", "", "refuses the user or the password"),
            ("nobody:lh@", "", "refuses the user or the password"),
            ("lh:lh@", "/secret", "secret/"),
            ("lh:lh@", "", "readwrite \"elsewhere/\" --prefix"),
            ("lh:wr0ng@", "/secret", "refuses the user or the password"),
        ] {
            let error = refusal(&at(user, path), "elsewhere").await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(error.to_string().contains(says), "{error}");
            assert!(!error.to_string().contains("wr0ng"), "{error}");
        }
        // Within what is granted, everything works; by namespace or by name.
        let locks = connect(&at("lh:lh@", "/locks")).await;
        let other = connect(&at("lh:lh@", "")).await;
        let guard = locks.mutex("mine").lock().await.unwrap();
        let lock = other.mutex("locks/mine");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&locks, "mine", 2).await;
        assert_eq!(locks.list("").await.unwrap().len(), 1);
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
        // A server that forgets its tokens (they live in memory) is asked for new ones.
        let guard = locks.mutex("kept").lock().await.unwrap();
        server.kill(0);
        server.restart(0);
        release(locks.mutex("after").lock().await.unwrap()).await;
        assert!(guard.is_held());
        release(guard).await;
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = Etcd::with(Setup::new().tls(), 1);
        let url = server.url();
        let authority = server.certificates().authority().display().to_string();
        let locks = connect(&format!("{url}?ca={authority}")).await;
        release(locks.mutex("tls").lock().await.unwrap()).await;
        let error = refusal(&url, "tls").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
        let error = refusal(&url.replace("etcds:", "etcd:"), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        let error = refusal(&format!("{url}?ca=/no/such/file"), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let error = refusal(&format!("{url}?ca=/etc/hostname"), "tls").await;
        assert_ne!(error.kind(), ErrorKind::Corrupt, "{error}");
    });
}

#[test]
fn a_server_that_wants_to_know_its_clients_is_shown_a_certificate() {
    run(async {
        let server = Etcd::with(Setup::new().client_certificates(), 1);
        let (url, certificates) = (server.url(), server.certificates());
        let url = format!("{url}?ca={}", certificates.authority().display());
        let shows = |(cert, key): (&Path, &Path)| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let ours = certificates.client();
        release(connect(&shows(ours)).await.mutex("tls").lock().await.unwrap()).await;
        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        for bad in [url.clone(), shows(other.client())] {
            let error = refusal(&bad, "tls").await;
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            assert!(error.to_string().contains("ertificate"), "{error}");
        }
        let error = refusal(&shows((ours.0, other.client().1)), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    });
}

#[test]
fn nobody_listens() {
    run(async {
        let error = refusal("etcd://127.0.0.1:1,127.0.0.1:2", "x").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.to_string().contains("no member of etcd answers"), "{error}");
    });
}

#[test]
fn evicting_another_clients_place() {
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
