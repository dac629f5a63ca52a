//! One server that goes wrong: killed, emptied, still loading, full, robbed of its scripts, with a clock that
//! steps.

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use crate::redis_common::*;
use leasehold::ErrorKind;
use leasehold::store::{Evict, Guarantee, Joined, Mode, Standing};
use testbed::{Redis, Setup};

#[test]
fn s20_an_evicting_server_is_told_of_and_a_full_one_grants_nothing() {
    run(async {
        let setup = Setup::new().fast().arg("--maxmemory").arg("100mb");
        let evicting = Redis::with(setup.arg("--maxmemory-policy").arg("allkeys-lru"));
        let locks = connect(&evicting.url()).await;
        let notes = locks.guarantees().notes.join("\n");
        assert!(notes.contains("UNSAFE") && notes.contains("noeviction"), "{notes}");

        let full = fast();
        let locks = connect(&full.url()).await;
        assert!(!locks.guarantees().notes.join("\n").contains("UNSAFE"));
        full.command(&["CONFIG", "SET", "maxmemory", "1"]);
        let error = locks.mutex("none").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Full, "secret");
        assert_eq!(full.command(&["EXISTS", "none"]), "0");
        // Who waits is patient with it.
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("none").lock().await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        full.command(&["CONFIG", "SET", "maxmemory", "0"]);
        release(waiter.await.unwrap().unwrap()).await;
    });
}

#[test]
fn s20_a_full_server_keeps_what_is_held() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(6);
        let guard = locks.mutex("kept").lease(lease).lock().await.unwrap();
        let permit = locks.semaphore("permits", 2).lease(lease).acquire().await.unwrap();
        let reader = locks.rwlock("read").lease(lease).read().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = locks.mutex("kept").lease(lease);
            async move { mutex.lock().await }
        });
        let writer = tokio::spawn({
            let rwlock = locks.rwlock("read").lease(lease);
            async move { rwlock.write().await }
        });
        until_waiting(&locks, "kept", 1).await;
        until_waiting(&locks, "read", 1).await;
        let place = server.command(&["ZRANGE", "leasehold:w:kept", "0", "0", "WITHSCORES"]);
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        let full = locks.semaphore("permits", 2).try_acquire().await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full, "nobody new is let in: {full}");
        tokio::time::sleep(lease * 3 / 2).await;
        for guard in [&guard, &permit, &reader] {
            assert!(guard.is_held(), "{} was lost", guard.name());
        }
        let after = server.command(&["ZRANGE", "leasehold:w:kept", "0", "0", "WITHSCORES"]);
        assert_eq!(after, place, "the waiter lost its place");
        // Giving back and handing over need no room either.
        let token = guard.token();
        release(guard).await;
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > token);
        release(reader).await;
        let written = tokio::time::timeout(PATIENCE, writer).await.unwrap().unwrap().unwrap();
        for guard in [next, written, permit] {
            guard.release().await.unwrap();
        }
        // A place that is kept closed takes the holder's room.
        server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        let mutex = locks.mutex("closed").at_least(Duration::from_secs(60)).lock().await.unwrap();
        let permits = locks.semaphore("closed too", 1).at_least(Duration::from_secs(60));
        let permit = permits.acquire().await.unwrap();
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        for guard in [mutex, permit] {
            guard.release().await.unwrap();
        }
        for name in ["closed", "closed too"] {
            let info = locks.read(name).await.unwrap().expect("closed");
            assert_eq!(info.claims[0].standing, Standing::Departed, "{name}");
        }
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
        assert!(!format!("{error:#}").contains("nothing was locked"), "{error}");
    });
}

#[test]
fn a_server_that_is_loading_is_told_of() {
    run(async {
        let slow =
            ["--key-load-delay", "100000", "--loading-process-events-interval-bytes", "1024"];
        let setup = slow.iter().fold(Setup::new().fast(), |setup, arg| setup.arg(*arg));
        let server = Arc::new(Redis::with(setup));
        for n in 0..80 {
            // Of digits that do not repeat, or the file is too short to be read in pieces.
            let value: String = (0..300_u64).map(|i| (i * i * 7_919 + n).to_string()).collect();
            server.command(&["SET", &format!("key {n}"), &value]);
        }
        server.command(&["SAVE"]);
        server.kill();
        let up = tokio::task::spawn_blocking({
            let server = server.clone();
            move || server.restart()
        });
        // Whoever comes may be told at connecting or by the first lock.
        let refused = loop {
            let error = match leasehold::connect(&server.url()).await {
                Err(error) => error,
                Ok(locks) => match locks.mutex("early").lease(LEASE).try_lock().await {
                    Err(error) => error,
                    Ok(_) => panic!("it had loaded before anybody asked"),
                },
            };
            // It may not listen yet.
            if format!("{error:#}").contains("LOADING") {
                break error;
            }
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        };
        assert_told(&refused, ErrorKind::Unreachable, "secret");
        assert!(refused.to_string().contains("still loading"), "{refused}");
        // Who waits is patient with it.
        let locks = connect(&server.url()).await;
        release(locks.mutex("patient").lock().await.unwrap()).await;
        up.await.unwrap();
    });
}

#[test]
fn s21_the_server_clock_steps() {
    run(async {
        const YEAR: i64 = 365 * 86_400;
        let server = Redis::with(Setup::new().fast().movable_clock());
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = locks.mutex("stepped").no_renewal().lock().await.unwrap();
        let first = guard.token();
        // A year ahead: every lease is over at once, and only the token tells the two apart.
        server.shift_clock(YEAR);
        let second = other.mutex("stepped").lock().await.unwrap();
        assert!(second.token() > first);
        let mut last = second.token();
        release(second).await;
        // Back again, and an hour more: tokens go on rising from where they were.
        for shift in [0, -3_600] {
            server.shift_clock(shift);
            for name in ["stepped", "another"] {
                let next = other.mutex(name).lock().await.unwrap();
                assert!(next.token() > last, "{} after {last}", next.token());
                last = next.token();
                release(next).await;
            }
        }
        drop(guard);
    });
}

#[test]
fn s21_a_dead_holder_is_evicted_when_the_clock_was_set_back() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let dead = leased("dead", Duration::from_secs(60));
        let Joined::Holding { token, .. } = locks.store().join(&dead, Mode::Try).await.unwrap()
        else {
            panic!("not held")
        };
        server.shift_clock(-3_600);
        // Two minutes pass. The documented bound: longer than the lease, by as much as the clock was
        // set back.
        server.shift_clock(-3_600 + 120);
        let error = locks.mutex("dead").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert_eq!(locks.evict("dead", Evict::Holders).await.unwrap(), 1);
        let next = locks.mutex("dead").try_lock().await.unwrap();
        assert!(next.token() > token);
        release(next).await;
    });
}

#[test]
fn s22_tokens_rise_over_kill_9_and_lost_writes() {
    run(async {
        let setup = Setup::new().arg("--appendfsync").arg("everysec");
        let server = Redis::with(setup);
        let locks = connect(&server.url()).await;
        assert!(!locks.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let mut last = 0;
        for round in 0..4 {
            for _ in 0..50 {
                let guard = locks.mutex("counted").lock().await.unwrap();
                assert!(guard.token().get() > last, "{} after {last}", guard.token());
                last = guard.token().get();
                release(guard).await;
            }
            // The last time everything is lost, and not only the last second.
            if round < 3 {
                server.kill();
                server.restart();
            } else {
                server.restart_empty();
            }
        }
        // A client that has seen nothing: only the server's clock keeps the order.
        let fresh = connect(&server.url()).await;
        let guard = fresh.mutex("counted").lock().await.unwrap();
        assert!(guard.token().get() > last);
    });
}

#[test]
fn s22_lost_state_and_a_clock_that_is_behind() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("forgotten").no_renewal().lock().await.unwrap();
        let last = guard.token();
        server.shift_clock(-3_600);
        server.restart_empty();
        // The documented bound: tokens rise for whoever has seen the last, and for nobody else. Before
        // them, whoever has seen nothing.
        let fresh = connect(&server.url()).await;
        let behind = fresh.mutex("forgotten").try_lock().await.unwrap();
        assert!(behind.token() < last, "{} is no hour behind {last}", behind.token());
        release(behind).await;
        let next = locks.mutex("forgotten").lock().await.unwrap();
        assert!(next.token() > last, "{} after {last}", next.token());
        let last = next.token();
        release(next).await;
        // From there on they rise for all: the server has it again.
        let next = fresh.mutex("forgotten").lock().await.unwrap();
        assert!(next.token() > last, "{} after {last}", next.token());
        release(next).await;
        drop(guard);
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

#[test]
fn what_is_on_disk_outlives_kill_9() {
    run(async {
        let server = Redis::start();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        assert!(locks.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let guard = locks.mutex("kept").lock().await.unwrap();
        let waiter = tokio::spawn({
            let other = other.clone();
            async move { other.mutex("kept").lock().await }
        });
        until_waiting(&locks, "kept", 1).await;
        server.kill();
        server.restart();
        let tried = other.mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(tried.kind(), ErrorKind::Contended, "{tried}");
        assert!(guard.is_held());
        let first = guard.token();
        release(guard).await;
        assert!(waiter.await.unwrap().unwrap().token() > first);
    });
}

#[test]
fn exact_while_the_server_is_killed_and_restarted() {
    run(async {
        let server = Arc::new(Redis::start());
        let url = server.url();
        let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
        let breaking = {
            let server = server.clone();
            move || {
                for _ in 0..3 {
                    std::thread::sleep(Duration::from_millis(300));
                    server.kill();
                    server.restart();
                }
            }
        };
        hammer_while(&clients, "counted", 4, 20, breaking).await;
    });
}

#[test]
fn s25_exact_while_scripts_are_flushed_and_connections_killed() {
    run(async {
        let server = Arc::new(fast());
        let url = server.url();
        let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
        let breaking = {
            let server = server.clone();
            move || {
                for round in 0..20 {
                    std::thread::sleep(Duration::from_millis(40));
                    server.command(&["SCRIPT", "FLUSH"]);
                    let kind = if round % 2 == 0 { "normal" } else { "pubsub" };
                    server.command(&["CLIENT", "KILL", "TYPE", kind]);
                }
            }
        };
        hammer_while(&clients, "counted", 4, 20, breaking).await;
    });
}
