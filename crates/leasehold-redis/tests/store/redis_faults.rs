//! Faults of one server: it is killed or emptied, still loads its data, is full, loses its scripts,
//! or has a clock that is set.

use std::sync::Arc;
use std::time::Duration;

use crate::redis_common::*;
use leasehold::store::{ClaimState, Evict, Guarantee, Joined, Mode};
use leasehold::{ErrorKind, Hold};
use leasehold_test_support::*;
use testbed::{Redis, Setup};

// S20
#[test]
fn evicting_server_is_reported_and_full_one_grants_nothing() {
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
        // The waiter continues to wait during the fault.
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("none").lock().await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        full.command(&["CONFIG", "SET", "maxmemory", "0"]);
        release(waiter.await.unwrap().unwrap()).await;
    });
}

// S20
#[test]
#[ignore = "runs with ./test.sh --all"]
fn full_server_keeps_held_locks_and_waiters() {
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
        assert_eq!(full.kind(), ErrorKind::Full, "expected the kind Full: {full}");
        tokio::time::sleep(lease * 3 / 2).await;
        for hold in [&*guard, &*permit, &*reader] {
            assert!(hold.is_held(), "{} was lost", hold.name());
        }
        let after = server.command(&["ZRANGE", "leasehold:w:kept", "0", "0", "WITHSCORES"]);
        assert_eq!(after, place, "the waiter lost its queue position");
        // Releasing and handing over need no memory either.
        let token = guard.token();
        release(guard).await;
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > token);
        release(reader).await;
        let written = tokio::time::timeout(PATIENCE, writer).await.unwrap().unwrap().unwrap();
        for hold in [next.into(), written.into(), Hold::from(permit)] {
            hold.release().await.unwrap();
        }
        // A place in cooldown uses the holder's memory.
        server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        let mutex = locks.mutex("closed").min_hold(Duration::from_secs(60)).lock().await.unwrap();
        let permits = locks.semaphore("closed too", 1).min_hold(Duration::from_secs(60));
        let permit = permits.acquire().await.unwrap();
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        for hold in [mutex.into(), Hold::from(permit)] {
            hold.release().await.unwrap();
        }
        for name in ["closed", "closed too"] {
            let info = locks.inspect(name).await.unwrap().expect("closed");
            assert_eq!(info.claims[0].state, ClaimState::Cooldown, "{name}");
        }
    });
}

// F64
#[test]
fn full_server_recognizes_a_repeated_request_of_the_holder() {
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
fn loading_server_is_reported() {
    run(async {
        let slow =
            ["--key-load-delay", "100000", "--loading-process-events-interval-bytes", "1024"];
        let setup = slow.iter().fold(Setup::new().fast(), |setup, arg| setup.arg(*arg));
        let server = Arc::new(Redis::with(setup));
        for n in 0..80 {
            // The digits must not repeat. Otherwise the file is too short to be read in pieces.
            let value: String = (0..300_u64).map(|i| (i * i * 7_919 + n).to_string()).collect();
            server.command(&["SET", &format!("key {n}"), &value]);
        }
        server.command(&["SAVE"]);
        server.kill();
        let up = tokio::task::spawn_blocking({
            let server = server.clone();
            move || server.restart()
        });
        // A new client may get the error when it connects, or at its first lock.
        let refused = loop {
            let error = match leasehold::connect(&server.url()).await {
                Err(error) => error,
                Ok(locks) => match locks.mutex("early").lease(LEASE).try_lock().await {
                    Err(error) => error,
                    Ok(_) => panic!("the server had loaded its data before the first request"),
                },
            };
            // The server may not listen yet.
            if format!("{error:#}").contains("LOADING") {
                break error;
            }
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        };
        assert_told(&refused, ErrorKind::Unreachable, "secret");
        assert!(refused.to_string().contains("still loading"), "{refused}");
        // The waiter continues to wait while the server loads.
        let locks = connect(&server.url()).await;
        release(locks.mutex("patient").lock().await.unwrap()).await;
        up.await.unwrap();
    });
}

// S21
#[test]
fn tokens_rise_when_the_server_clock_steps() {
    run(async {
        const YEAR: i64 = 365 * 86_400;
        let server = Redis::with(Setup::new().fast().movable_clock());
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = locks.mutex("stepped").no_renewal().lock().await.unwrap();
        let first = guard.token();
        // The clock is set a year ahead. Every lease expires immediately, and only the token
        // distinguishes the holders.
        server.shift_clock(YEAR);
        let second = other.mutex("stepped").lock().await.unwrap();
        assert!(second.token() > first);
        let mut last = second.token();
        release(second).await;
        // The clock is set back, and then by another hour. Tokens continue to rise.
        for shift in [0, -3_600] {
            server.shift_clock(shift);
            for name in ["stepped", "another"] {
                let next = other.mutex(name).lock().await.unwrap();
                assert!(next.token() > last, "token {} after {last}", next.token());
                last = next.token();
                release(next).await;
            }
        }
        drop(guard);
    });
}

// S21
#[test]
fn crashed_holder_can_be_evicted_after_the_clock_was_set_back() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let dead = leased("dead", Duration::from_secs(60));
        let Joined::Holding { token, .. } = locks.store().join(&dead, Mode::Try).await.unwrap()
        else {
            panic!("not held")
        };
        server.shift_clock(-3_600);
        // Two minutes pass. The documented limit is the lease plus the time by which the clock was
        // set back.
        server.shift_clock(-3_600 + 120);
        let error = locks.mutex("dead").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert_eq!(locks.evict("dead", Evict::Holders).await.unwrap(), 1);
        let next = locks.mutex("dead").try_lock().await.unwrap();
        assert!(next.grant() > token);
        release(next).await;
    });
}

// S21
#[test]
fn crashed_holder_expires_at_the_documented_limit_after_the_clock_was_set_back() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(60);
        let dead = leased("dead", lease);
        let joined = locks.store().join(&dead, Mode::Try).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        server.shift_clock(-3_600);
        // The lease and the time by which the clock was set back pass.
        server.shift_clock(1 + 60);
        release(locks.mutex("dead").try_lock().await.unwrap()).await;
    });
}

// S22
#[test]
fn tokens_rise_despite_kill_9_and_lost_writes() {
    run(async {
        let setup = Setup::new().arg("--appendfsync").arg("everysec");
        let server = Redis::with(setup);
        let locks = connect(&server.url()).await;
        assert!(!locks.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let mut last = 0;
        for round in 0..4 {
            for _ in 0..50 {
                let guard = locks.mutex("counted").lock().await.unwrap();
                assert!(guard.token().get() > last, "token {} after {last}", guard.token());
                last = guard.token().get();
                release(guard).await;
            }
            // In the last round all data is lost, not only that of the last second.
            if round < 3 {
                server.kill();
                server.restart();
            } else {
                server.restart_empty();
            }
        }
        // This client has seen no token, so only the server's clock keeps the order.
        let fresh = connect(&server.url()).await;
        let guard = fresh.mutex("counted").lock().await.unwrap();
        assert!(guard.token().get() > last);
    });
}

// S22
#[test]
fn tokens_rise_after_data_loss_for_clients_that_know_the_last_token() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("forgotten").no_renewal().lock().await.unwrap();
        let last = guard.token();
        server.shift_clock(-3_600);
        server.restart_empty();
        // The documented limit is that tokens rise only for clients that have seen the last one.
        // This client has not.
        let fresh = connect(&server.url()).await;
        let behind = fresh.mutex("forgotten").try_lock().await.unwrap();
        assert!(behind.token() < last, "{} is not an hour behind {last}", behind.token());
        release(behind).await;
        let next = locks.mutex("forgotten").lock().await.unwrap();
        assert!(next.token() > last, "token {} after {last}", next.token());
        let last = next.token();
        release(next).await;
        // From now on tokens rise for all clients, because the server has the last one again.
        let next = fresh.mutex("forgotten").lock().await.unwrap();
        assert!(next.token() > last, "token {} after {last}", next.token());
        release(next).await;
        drop(guard);
    });
}

// F81
#[test]
#[ignore = "runs with ./test.sh --all"]
fn emptied_server_grants_nothing_until_old_leases_expire() {
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
            a.mutex("mutex").no_renewal().lease(lease).lock().await.unwrap().into(),
            Hold::from(
                a.semaphore("permits", 1).no_renewal().lease(lease).acquire().await.unwrap(),
            ),
        ];
        server.restart_empty();
        // A request that was sent over the old connection may have to be repeated.
        let error = b.mutex("mutex").lease(lease).try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "secret");
        let (mutex, permits) =
            (b.mutex("mutex").lease(lease), b.semaphore("permits", 1).lease(lease));
        let (second, permit) = tokio::join!(mutex.lock(), permits.acquire());
        let (second, permit) = (second.unwrap(), permit.unwrap());
        for guard in &guards {
            assert!(!guard.is_held(), "two clients hold {}", guard.name());
        }
        release(second).await;
        release(permit).await;
        // Later calls have no such error.
        release(b.mutex("mutex").lease(lease).try_lock().await.unwrap()).await;
    });
}

#[test]
fn synced_lock_and_queue_survive_kill_9() {
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
fn locks_stay_exclusive_while_the_server_restarts() {
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

// S25
#[test]
fn locks_stay_exclusive_while_scripts_and_connections_are_lost() {
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

/// The server accepts connections and does not reply, like a paused one.
#[test]
fn dropped_calls_to_a_hanging_server_share_one_connection_attempt() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.kill();
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", server.port())).await.unwrap();
        let began = tokio::time::Instant::now();
        let calls = async {
            let lock = locks.mutex("m");
            for _ in 0..40 {
                let _ = tokio::time::timeout(Duration::from_millis(50), lock.try_lock()).await;
            }
        };
        let mut accepted = Vec::new();
        tokio::select! {
            () = calls => {}
            () = async { loop { accepted.push(listener.accept().await.unwrap()); } } => {}
        }
        // The caller's runtime and the client's own each make one attempt, for at most 5 s.
        let attempts = 2 * (1 + usize::try_from(began.elapsed().as_secs() / 5).unwrap());
        assert!((1..=attempts).contains(&accepted.len()), "{} connections", accepted.len());
    });
}
