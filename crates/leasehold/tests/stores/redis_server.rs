//! One Redis server as it is in production: killed, stopped, cut off, out of memory, with a clock that
//! steps.

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::store::{Evict, Guarantee, Joined, Mode, Signal, Standing};
use leasehold::{Claim, ErrorKind, Guard, Kind, Leasehold, LostReason, Name};
use testbed::{Proxy, Redis, Setup};
use tokio::task::JoinHandle;

const LEASE: Duration = Duration::from_millis(1_500);

fn fast() -> Redis {
    Redis::with(Setup::new().fast())
}

/// Waits until it is so.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until so many wait.
async fn until_waiting(locks: &Leasehold, name: &str, count: usize) {
    let end = Instant::now() + PATIENCE;
    loop {
        let info = locks.read(name).await.unwrap();
        if info.is_some_and(|info| info.waiters().count() == count) {
            return;
        }
        assert!(Instant::now() < end, "{count} never waited");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn claim(name: &str, lease: Duration) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    (claim.lease, claim.waiter_lease) = (lease, lease);
    claim
}

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
            if error.to_string().contains("LOADING") {
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
        let dead = claim("dead", Duration::from_secs(60));
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
        let breaking = tokio::task::spawn_blocking({
            let server = server.clone();
            move || {
                for _ in 0..3 {
                    std::thread::sleep(Duration::from_millis(300));
                    server.kill();
                    server.restart();
                }
            }
        });
        // Rounds until the breaking is over, so that it cannot miss.
        loop {
            hammer(&clients, "counted", 4, 20).await;
            if breaking.is_finished() {
                break;
            }
        }
        breaking.await.unwrap();
    });
}

#[test]
fn a_stopped_server_loses_the_lock_by_the_deadline() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("stopped").lease(LEASE).lock().await.unwrap();
        server.stop();
        // Nothing is acknowledged from here on: what was, was sent before.
        tokio::time::sleep(LEASE).await;
        assert!(!guard.is_held(), "believed beyond the end of its lease");
        assert_eq!(guard.lost().await, LostReason::Expired);
        let error = locks.mutex("stopped").lock_timeout(Duration::from_millis(300)).await;
        assert!(matches!(error.unwrap_err().kind(), ErrorKind::Timeout | ErrorKind::Unreachable));
        server.cont();
        release(locks.mutex("stopped").lock().await.unwrap()).await;
    });
}

#[test]
fn r13_one_round_trip_to_take_and_one_to_release() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let locks = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        // So long that nothing is renewed meanwhile.
        let mutex = locks.mutex("counted").lease(Duration::from_secs(600));
        let permits = locks.semaphore("counted too", 2).lease(Duration::from_secs(600));
        // The connections are made and the scripts known.
        release(mutex.lock().await.unwrap()).await;
        release(permits.acquire().await.unwrap()).await;
        for n in 1..=20 {
            let before = proxy.round_trips();
            let guard = match n % 2 {
                0 => mutex.lock().await.unwrap(),
                _ => permits.acquire().await.unwrap(),
            };
            assert_eq!(proxy.round_trips() - before, 1, "to take");
            guard.release().await.unwrap();
            assert_eq!(proxy.round_trips() - before, 2, "to release");
        }
    });
}

#[test]
fn r10_one_command_and_one_message_a_hand_over() {
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
                done.expect("no task panics");
            }
            let calls: std::collections::HashMap<_, _> = server.calls().into_iter().collect();
            let count = |name| calls.get(name).copied().unwrap_or(0);
            // The last release hands over to nobody.
            let turns = waiters as u64 + 1;
            assert_eq!(count("publish"), turns - 1, "messages of {waiters} waiters");
            // Two clients beat for those who still wait, every two seconds (in several commands, if
            // these came slowly), and renew what is held for long: nothing of that grows with the
            // hand-overs. One command more for each of them would be two hundred.
            let beats = 20 * (begun.elapsed().as_secs() + 1);
            let sent = count("evalsha");
            assert!((turns..=turns + beats).contains(&sent), "{sent} commands for {turns} turns");
        }
    });
}

/// One client holds, and a task of another one's waits.
async fn one_behind_another(
    holder: &Leasehold,
    waiting: &Leasehold,
) -> (Guard, JoinHandle<leasehold::Result<Guard>>) {
    let guard = holder.mutex("deaf").lock().await.unwrap();
    let mutex = waiting.mutex("deaf");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    until_waiting(holder, "deaf", 1).await;
    (guard, waiter)
}

/// What a hand-over costs whose message is lost: a heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(2 + 2);

#[test]
fn s24_a_lost_message_costs_one_heartbeat() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let waiting = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        let holder = connect(&server.url()).await;
        let mut fastest = PATIENCE;
        for round in 0..3 {
            let (guard, waiter) = one_behind_another(&holder, &waiting).await;
            // The connection stays up, and the message alone is lost.
            let connections = proxy.connections();
            proxy.drop_messages(true);
            let begun = Instant::now();
            release(guard).await;
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            fastest = fastest.min(begun.elapsed());
            until("the message to be dropped", || proxy.has_dropped()).await;
            // (The first heartbeat of all makes its own.)
            assert!(round == 0 || proxy.connections() == connections, "it was cut");
            proxy.drop_messages(false);
            release(guard).await;
        }
        assert!(fastest < HEARTBEAT, "{fastest:?}");
    });
}

#[test]
fn s24_a_connection_that_is_cut_costs_no_turn() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let waiting = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        let holder = connect(&server.url()).await;
        for _ in 0..3 {
            let (guard, waiter) = one_behind_another(&holder, &waiting).await;
            // The connections go, with whatever is sent meanwhile.
            proxy.refuse(true);
            release(guard).await;
            proxy.refuse(false);
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

#[test]
fn s25_exact_while_scripts_are_flushed_and_connections_killed() {
    run(async {
        let server = Arc::new(fast());
        let url = server.url();
        let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
        let breaking = tokio::task::spawn_blocking({
            let server = server.clone();
            move || {
                for round in 0..20 {
                    std::thread::sleep(Duration::from_millis(40));
                    server.command(&["SCRIPT", "FLUSH"]);
                    let kind = if round % 2 == 0 { "normal" } else { "pubsub" };
                    server.command(&["CLIENT", "KILL", "TYPE", kind]);
                }
            }
        });
        loop {
            hammer(&clients, "counted", 4, 20).await;
            if breaking.is_finished() {
                break;
            }
        }
        breaking.await.unwrap();
    });
}

#[test]
fn s28_a_main_key_that_goes_is_noticed_within_a_heartbeat() {
    run(async {
        let server = fast();
        let (holder, waiting) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = holder.mutex("deleted").lock().await.unwrap();
        let waiter = tokio::spawn(async move { waiting.mutex("deleted").lock().await });
        until_waiting(&holder, "deleted", 1).await;
        let begun = Instant::now();
        server.command(&["DEL", "deleted"]);
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        // And not at the end of the lease, which is 15 s.
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(next.token() > guard.token());
        // Its holder finds out at its next renewal.
        assert_eq!(guard.lost().await, LostReason::Gone);
        release(next).await;
    });
}

#[test]
fn s29_a_grant_to_a_dead_waiter_costs_its_place_and_no_lease() {
    run(async {
        let server = fast();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = locks.mutex("dead").lock().await.unwrap();
        // It joined, and was killed: nobody beats for it.
        let mut dead = claim("dead", Duration::from_secs(60));
        dead.waiter_lease = Duration::from_secs(6);
        let begun = Instant::now();
        let joined = locks.store().join(&dead, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        let waiter = tokio::spawn(async move { other.mutex("dead").lock().await });
        until_waiting(&locks, "dead", 2).await;
        release(guard).await;
        // It was granted, and told.
        assert!(matches!(locks.store().changed(&dead).await.unwrap(), Signal::Granted(_)));
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        let place = dead.waiter_lease - Duration::from_millis(100);
        assert!(begun.elapsed() >= place, "while it was alive");
        assert!(begun.elapsed() < Duration::from_secs(40), "a lease was lost");
        release(next).await;
    });
}

#[test]
fn s06_a_lost_reply_is_recognised() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let locks = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        // The connections are made and the scripts known.
        release(locks.mutex("warm").lock().await.unwrap()).await;
        proxy.drop_replies_after(0);
        let taking = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("lost").lock().await }
        });
        until("the reply to be dropped", || proxy.has_dropped()).await;
        let value = server.command(&["GET", "lost"]);
        assert!(!value.is_empty(), "it was granted");
        proxy.pass_replies();
        proxy.refuse(true);
        proxy.refuse(false);
        let guard = taking.await.unwrap().unwrap();
        let token: u64 = value.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(guard.token().get(), token, "granted twice");
        release(guard).await;
        assert_eq!(server.command(&["EXISTS", "lost"]), "0");
    });
}

#[test]
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
        // Once round, so that they are in their common batches.
        tokio::time::sleep(Duration::from_secs(5)).await;
        server.command(&["CONFIG", "RESETSTAT"]);
        let before = Instant::now();
        tokio::time::sleep(Duration::from_secs(10)).await;
        let calls = server.calls();
        let periods = before.elapsed().as_secs_f64() / 5.0;
        let sent: u64 = calls.iter().filter(|(name, _)| name == "evalsha").map(|(_, n)| n).sum();
        let (most, renewed) = ((periods.ceil() * 20.0) as u64, sent > 0);
        assert!(renewed && sent <= most, "{sent} commands in {periods:.1} periods");
        assert!(held.iter().all(Guard::is_held));
        // It waits for a lease's time, which ten thousand releases may exceed.
        let _ = locks.close().await;
    });
}

#[test]
fn s92_ten_thousand_waiters_on_one_lock() {
    let many = testbed::sized(10_000, 1_000);
    run(async {
        let server = fast();
        let holder = connect(&server.url()).await;
        let mut clients = Vec::new();
        for _ in 0..10 {
            clients.push(connect(&server.url()).await);
        }
        let guard = holder.mutex("crowded").lock().await.unwrap();
        let witness = Arc::<Witness>::default();
        let mut waiting = tokio::task::JoinSet::new();
        for n in 0..many {
            let (mutex, witness) = (clients[n % 10].mutex("crowded"), witness.clone());
            waiting.spawn(async move {
                let guard = mutex.lock().await.unwrap_or_else(|error| panic!("{error}"));
                witness.enter(&guard);
                witness.leave();
                release(guard).await;
            });
        }
        until("all to wait", || {
            server.command(&["ZCARD", "leasehold:w:crowded"]) == many.to_string()
        })
        .await;
        // A few heartbeats of all of them, and the holder's renewals beside them.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(guard.is_held());
        let used: usize = server.info("memory", "used_memory").parse().unwrap();
        assert!(used < 5_000_000 + many * 3_500, "{used} bytes for {many} waiters");
        server.command(&["CONFIG", "RESETSTAT"]);
        assert_eq!(witness.count(), 0, "somebody held beside the holder");
        release(guard).await;
        while let Some(done) = waiting.join_next().await {
            done.expect("no task panics");
        }
        assert_eq!(witness.count(), many as u64);
        // One message for each hand-over, however many wait.
        let calls = server.calls();
        let published = calls.iter().find(|(name, _)| name == "publish").map_or(0, |(_, n)| *n);
        assert!(published <= many as u64 + 10, "{published} messages");
    });
}

#[test]
fn memory_does_not_grow_with_the_names_ever_used() {
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
                    // Half of them are released, the others left to expire; some of those that are
                    // released to a waiter, who is dead.
                    let lease = Duration::from_millis(if n % 2 == 0 { 30_000 } else { 200 });
                    let once = claim(&format!("once {task} {n}"), lease);
                    let joined = store.join(&once, Mode::Try).await.unwrap();
                    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
                    if n % 10 == 0 {
                        let dead = claim(once.name.as_str(), Duration::from_millis(200));
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
            done.expect("no task panics");
        }
        until("all to expire", || server.command(&["DBSIZE"]) == "1").await;
        assert_eq!(server.command(&["KEYS", "*"]), "leasehold:clock");
    });
}

#[test]
fn companions_of_the_dead_expire() {
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
            // Or it has expired since it was listed.
            let bounded = (0..=70_000).contains(&left) || left == -2;
            assert!(bounded || key == "leasehold:clock", "{key} expires in {left} ms");
        }
    });
}

#[test]
fn s27_a_foreign_holder_is_respected_and_refused() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        // The recipe of other libraries, by hand: they hold, and we wait.
        let held = server.command(&["SET", "shared", "foreign", "NX", "PX", "60000"]);
        assert_eq!(held, "OK");
        let error = locks.mutex("shared").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("shared").lock().await }
        });
        until_waiting(&locks, "shared", 1).await;
        server.command(&["DEL", "shared"]);
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        // We hold, and they are refused; and their release does not match.
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "60000"]), "");
        let recipe = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', \
                      KEYS[1]) else return 0 end";
        assert_eq!(server.command(&["EVAL", recipe, "1", "shared", "foreign"]), "0");
        let value = server.command(&["GET", "shared"]);
        let id = value.split(' ').next().unwrap();
        assert!(id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit()), "{value}");
        release(guard).await;
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "300"]), "OK");
        // And when their key just expires.
        release(locks.mutex("shared").lock().await.unwrap()).await;
    });
}

#[test]
fn s27_a_foreign_key_that_never_expires_is_told_of() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["SET", "endless", "foreign"]);
        for error in [
            locks.mutex("endless").try_lock().await.unwrap_err(),
            locks.mutex("endless").lock().await.unwrap_err(),
        ] {
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(error.to_string().contains("never expires"), "{error}");
        }
        // Also when it comes while we wait.
        server.command(&["SET", "later", "foreign", "PX", "60000"]);
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("later").lock().await }
        });
        until_waiting(&locks, "later", 1).await;
        server.command(&["PERSIST", "later"]);
        let waited = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::Corrupt);
        // Whether it is held, only they know who set it: a person's order does not delete it either.
        let refused = locks.evict("endless", Evict::Holders).await.unwrap_err();
        assert_told(&refused, ErrorKind::Corrupt, "secret");
        assert_eq!(server.command(&["DEL", "endless"]), "1");
        release(locks.mutex("endless").try_lock().await.unwrap()).await;
    });
}

#[test]
fn a_prefix_keeps_names_apart() {
    run(async {
        let server = fast();
        let plain = connect(&server.url()).await;
        let prefixed = connect(&format!("{}?prefix=app:", server.url())).await;
        let one = plain.mutex("job").try_lock().await.unwrap();
        let two = prefixed.mutex("job").try_lock().await.unwrap();
        let error = plain.mutex("app:job").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let names = |listed: Vec<leasehold::store::LockInfo>| -> Vec<String> {
            listed.iter().map(|info| info.name.as_str().to_owned()).collect()
        };
        assert_eq!(names(prefixed.list("").await.unwrap()), ["job"]);
        assert_eq!(names(plain.list("").await.unwrap()), ["app:job", "job"]);
        release(one).await;
        release(two).await;
    });
}
