//! Costs of an acquisition and its release, a hand-over, a failed try and all renewals: round
//! trips, commands, messages and memory.

use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::store::{Claim, Joined, Mode};
use leasehold::{Client, ErrorKind, Hold, Kind, Name};
use leasehold_test_support::*;
use testbed::{Cluster, Proxy, Redis};

// R13
#[test]
fn acquire_and_release_take_one_round_trip_each() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let locks = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        // The lease is so long that nothing is renewed during the test.
        let mutex = locks.mutex("counted").lease(Duration::from_secs(600));
        let permits = locks.semaphore("counted too", 2).lease(Duration::from_secs(600));
        // After this the connections are open and the scripts cached.
        release(mutex.lock().await.unwrap()).await;
        release(permits.acquire().await.unwrap()).await;
        for n in 1..=20 {
            let before = proxy.round_trips();
            let guard = match n % 2 {
                0 => Hold::from(mutex.lock().await.unwrap()),
                _ => permits.acquire().await.unwrap().into(),
            };
            assert_eq!(proxy.round_trips() - before, 1, "round trips to acquire");
            guard.release().await.unwrap();
            assert_eq!(proxy.round_trips() - before, 2, "round trips to acquire and release");
        }
    });
}

// R13
/// Counts the server's work, including the commands within scripts.
#[test]
fn common_calls_cost_few_commands_and_failed_try_only_reads() {
    run(async {
        let server = fast();
        let (one, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let long = Duration::from_secs(600);
        let mutex = |locks: &Client| locks.mutex("few").lease(long);
        for locks in [&one, &other] {
            release(mutex(locks).lock().await.unwrap()).await;
        }
        let counted = || {
            let own = |(name, _): &(String, u64)| name != "info" && !name.starts_with("config");
            let calls: std::collections::BTreeMap<_, _> =
                server.calls().into_iter().filter(own).collect();
            server.command(&["CONFIG", "RESETSTAT"]);
            calls
        };
        counted();
        let guard = mutex(&one).lock().await.unwrap();
        let calls = counted();
        assert_eq!(calls.values().sum::<u64>(), 5, "commands to acquire: {calls:?}");

        let busy = mutex(&other).try_lock().await.unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Contended, "{busy}");
        let calls = counted();
        let reads: Vec<&str> = calls.keys().map(String::as_str).collect();
        assert_eq!(reads, ["evalsha", "exists", "get", "time"]);
        assert_eq!(
            calls.values().sum::<u64>(),
            4,
            "commands of an unsuccessful try_lock: {calls:?}"
        );

        let store = other.store();
        let waiting = [leased("few", long), leased("few", long)];
        for (place, commands) in waiting.iter().zip([10, 13]) {
            let joined = store.join(place, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            let calls = counted();
            assert_eq!(calls.values().sum::<u64>(), commands, "commands to wait: {calls:?}");
        }
        release(guard).await;
        let calls = counted();
        assert_eq!(calls.values().sum::<u64>(), 9, "commands to hand over: {calls:?}");
        for place in &waiting {
            assert!(store.leave(place, None).await.unwrap());
        }
        counted();
        let guard = mutex(&one).lock().await.unwrap();
        counted();
        release(guard).await;
        let calls = counted();
        assert_eq!(calls.values().sum::<u64>(), 4, "commands to release: {calls:?}");
    });
}

// F41
#[test]
fn failed_try_writes_nothing() {
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

// R10
#[test]
fn hand_over_takes_one_command_and_one_message() {
    run(async {
        let server = fast();
        let holder = connect(&server.url()).await;
        let clients = [connect(&server.url()).await, connect(&server.url()).await];
        for waiters in [2, 200] {
            let name = format!("handed {waiters}");
            let guard = holder.mutex(&name).lease(Duration::from_secs(600)).lock().await.unwrap();
            let mut waiting = tokio::task::JoinSet::new();
            for n in 0..waiters {
                let mutex = clients[n % 2].mutex(&name);
                waiting.spawn(async move { release(mutex.lock().await.unwrap()).await });
            }
            until_waiting(&holder, &name, waiters).await;
            server.command(&["CONFIG", "RESETSTAT"]);
            let begun = Instant::now();
            release(guard).await;
            while let Some(done) = waiting.join_next().await {
                done.expect("a task panicked");
            }
            let calls: std::collections::HashMap<_, _> = server.calls().into_iter().collect();
            let count = |name| calls.get(name).copied().unwrap_or(0);
            // The last release has no waiter to hand over to.
            let turns = waiters as u64 + 1;
            assert_eq!(count("publish"), turns - 1, "messages for {waiters} waiters");
            // Two clients renew the waiters' places every two seconds (in several commands, if
            // these arrive slowly), and the long holds. None of that grows with the number of
            // hand-overs. One more command for each hand-over would be two hundred.
            let beats = 20 * (begun.elapsed().as_secs() + 1);
            let sent = count("evalsha");
            assert!((turns..=turns + beats).contains(&sent), "{sent} commands for {turns} turns");
        }
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn ten_thousand_held_locks_are_renewed_by_twenty_commands() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let mut taking = tokio::task::JoinSet::new();
        for task in 0..20 {
            let locks = locks.clone();
            taking.spawn(async move {
                let mut held = Vec::new();
                for n in 0..500 {
                    held.push(locks.mutex(format!("many {task} {n}")).lock().await.unwrap());
                }
                held
            });
        }
        let held: Vec<_> = taking.join_all().await.into_iter().flatten().collect();
        // After one period all claims are in common batches.
        tokio::time::sleep(Duration::from_secs(5)).await;
        server.command(&["CONFIG", "RESETSTAT"]);
        let before = Instant::now();
        tokio::time::sleep(Duration::from_secs(10)).await;
        let calls = server.calls();
        let periods = before.elapsed().as_secs_f64() / 5.0;
        let sent: u64 = calls.iter().filter(|(name, _)| name == "evalsha").map(|(_, n)| n).sum();
        let (most, renewed) = ((periods.ceil() * 20.0) as u64, sent > 0);
        assert!(renewed && sent <= most, "{sent} commands in {periods:.1} periods");
        assert!(held.iter().all(|guard| guard.is_held()));
        // Closing waits for one lease, which ten thousand releases may exceed.
        let _ = locks.close().await;
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn cluster_renews_with_one_command_per_slot() {
    const SLOTS: usize = 100;
    run(async {
        let cluster = Cluster::unbroken();
        let locks = connect(&cluster.url()).await;
        let mut held = Vec::new();
        for slot in 0..SLOTS {
            for n in 0..30 {
                held.push(locks.mutex(format!("{{{slot}}} {n}")).lock().await.unwrap());
            }
        }
        // After one period all claims are in common batches.
        tokio::time::sleep(Duration::from_secs(5)).await;
        for node in cluster.nodes() {
            node.command(&["CONFIG", "RESETSTAT"]);
        }
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs(10)).await;
        let calls: Vec<_> = cluster.nodes().iter().flat_map(Redis::calls).collect();
        let sent: u64 = calls.iter().filter(|(name, _)| name == "evalsha").map(|(_, n)| n).sum();
        // Locks of one slot are renewed in two batches if they were acquired on both sides of a
        // batch boundary.
        let periods = begun.elapsed().as_secs_f64() / 5.0;
        let most = periods.ceil() as u64 * SLOTS as u64 * 2;
        assert!((1..=most).contains(&sent), "{sent} commands in {periods:.1} periods");
        assert!(held.iter().all(|guard| guard.is_held()));
        // Closing waits for one lease, which three thousand releases may exceed.
        let _ = locks.close().await;
    });
}

#[test]
fn memory_does_not_grow_with_the_number_of_names_used() {
    let names = testbed::sized(100_000, 10_000);
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let store = locks.store().clone();
        let mut using = tokio::task::JoinSet::new();
        for task in 0..50 {
            let store = store.clone();
            using.spawn(async move {
                for n in 0..names / 50 {
                    // Half of the claims are released, and the others expire. Some of the released
                    // locks are granted to a waiter that is dead.
                    let lease = Duration::from_millis(if n % 2 == 0 { 30_000 } else { 200 });
                    let once = leased(&format!("once {task} {n}"), lease);
                    let joined = store.join(&once, Mode::Try).await.unwrap();
                    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
                    if n % 10 == 0 {
                        let dead = leased(once.name.as_str(), Duration::from_millis(200));
                        let joined = store.join(&dead, Mode::Wait).await.unwrap();
                        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
                    }
                    if n % 2 == 0 {
                        store.leave(&once, None).await.unwrap();
                    }
                }
            });
        }
        while let Some(done) = using.join_next().await {
            done.expect("a task panicked");
        }
        until("all to expire", async || server.command(&["DBSIZE"]) == "2").await;
        assert_eq!(server.command(&["EXISTS", "leasehold:clock", "leasehold:store"]), "2");
    });
}

#[test]
fn auxiliary_keys_of_crashed_clients_expire() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        for kind in [Kind::Mutex, Kind::Semaphore] {
            let claims: Vec<Claim> = (0..3)
                .map(|_| {
                    let name = Name::new(format!("dead {kind}")).unwrap();
                    let mut claim = Claim::new(name, kind, 1, 1).unwrap();
                    (claim.lease, claim.waiter_lease) = (LEASE, LEASE);
                    claim
                })
                .collect();
            for claim in &claims {
                locks.store().join(claim, Mode::Wait).await.unwrap();
            }
        }
        for key in server.command(&["KEYS", "*"]).lines() {
            let left: i64 = server.command(&["PTTL", key]).parse().unwrap();
            // The key may also have expired since it was listed.
            let bounded = (0..=70_000).contains(&left) || left == -2;
            let lasts = matches!(key, "leasehold:clock" | "leasehold:store");
            assert!(bounded || lasts, "{key} expires in {left} ms");
        }
    });
}

/// Dragonfly refuses undeclared keys. Here the server's MONITOR output shows which keys each script
/// received.
#[test]
fn scripts_declare_every_key_that_they_touch() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let other = connect(&server.url()).await;
        let monitor = redis::Client::open(server.url()).unwrap();
        let mut monitor = monitor.get_connection().unwrap();
        monitor.send_packed_command(&redis::cmd("MONITOR").get_packed_command()).unwrap();
        let guard = locks.mutex("job").lock().await.unwrap();
        let waiter = tokio::spawn(async move { other.mutex("job").lease(PATIENCE).lock().await });
        until_waiting(&locks, "job", 1).await;
        release(guard).await;
        release(waiter.await.unwrap().unwrap()).await;
        release(locks.semaphore("permits", 2).acquire().await.unwrap()).await;
        server.command(&["ECHO", "no more of it"]);
        let mut declared = Vec::new();
        let mut touched = 0;
        loop {
            let redis::Value::SimpleString(line) = monitor.recv_response().unwrap() else {
                continue;
            };
            if line.contains("no more of it") {
                break;
            }
            // The words are in quotes as they were sent. The commands of a script follow it.
            let Some((_, words)) = line.split_once('"') else { continue };
            let words: Vec<&str> =
                words.strip_suffix('"').unwrap_or(words).split("\" \"").collect();
            if !line.contains(" lua] ") {
                let keys = words.get(2).and_then(|n| n.parse().ok()).unwrap_or(0);
                declared = words.iter().skip(3).take(keys).map(ToString::to_string).collect();
            } else if !["TIME", "PUBLISH"].contains(&words[0]) {
                touched += 1;
                let last = if matches!(words[0], "EXISTS" | "DEL") { words.len() } else { 2 };
                for key in &words[1..last] {
                    assert!(declared.iter().any(|known| known == key), "{line}: {declared:?}");
                }
            }
        }
        assert!(touched > 10, "{touched}");
    });
}
