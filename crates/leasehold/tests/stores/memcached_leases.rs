//! memcached: what is kept, what is forgotten, and what becomes of those who hold.

#![cfg(feature = "memcached")]

use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use leasehold::{ErrorKind, LostReason};
use testbed::{Memcached, Proxy, Setup};

/// Sessions of a second: the server's cells live for four.
const SHORT: &str = "?session_ms=1000";
/// Nobody is let in for so long after everything was forgotten, by the server's clock.
const CLOSED: Duration = Duration::from_millis(3_200);

#[test]
fn r36_a_restart_forgets_and_the_lock_is_closed_until_nobody_believes() {
    run(async {
        let server = Memcached::start();
        let url = server.url() + SHORT;
        let (ours, other) = (connect(&url).await, connect(&url).await);
        // It is new, which is the same to us.
        let error = ours.mutex("a").try_lock().await.unwrap_err();
        assert!(error.kind() == ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains("restarted or emptied, or is new"), "{error}");
        let mut guard = ours.mutex("a").lock().await.unwrap();
        let forget: [fn(&Memcached); 2] = [Memcached::restart, Memcached::flush];
        for forget in forget {
            let last = guard.token();
            let began = Instant::now();
            forget(&server);
            // One who asks for the first time, and one who has asked before.
            let next = other.mutex("a").lock_timeout(PATIENCE).await.unwrap();
            assert!(began.elapsed() >= CLOSED, "{:?}", began.elapsed());
            assert!(!guard.is_held(), "two hold");
            assert!(next.token() > last, "{} after {last}", next.token());
            next.release().await.unwrap();
            guard = ours.mutex("a").lock_timeout(PATIENCE).await.unwrap();
            assert!(guard.is_held());
        }
    });
}

#[test]
fn r36_an_evicted_lock_is_found_lost_and_tokens_rise() {
    run(async {
        let server = testbed::memcached();
        let url = server.url() + "?restart_delay_ms=0";
        let (ours, other) = (connect(&url).await, connect(&url).await);
        let guard = ours.mutex("evicted").lease(Duration::from_secs(2)).lock().await.unwrap();
        assert_eq!(server.say("delete leasehold:l:evicted"), ["DELETED"]);
        let next = other.mutex("evicted").try_lock().await.unwrap();
        assert!(next.token() > guard.token());
        let lost = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(lost, LostReason::Gone);
        assert!(next.is_held());
    });
}

/// Fills every size of values, until none is taken.
fn fill(server: &Memcached) {
    use std::io::{BufRead, BufReader, Write};
    let stream = std::net::TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    let mut stream = BufReader::new(stream);
    for size in [40, 60, 80, 100, 130, 170, 210, 270, 340, 430, 540, 700, 900, 1_200, 5_000] {
        for n in 0.. {
            let value = "x".repeat(size);
            let mut all = String::new();
            for m in 0..200 {
                all += &format!("ms fill-{size}-{n}-{m} {size}\r\n{value}\r\n");
            }
            stream.get_mut().write_all(all.as_bytes()).unwrap();
            let mut refused = 0;
            for _ in 0..200 {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                refused += usize::from(line.starts_with("SERVER_ERROR"));
            }
            if refused == 200 {
                break;
            }
        }
    }
}

/// What is written where there is no room is refused, and what stood there is gone.
#[test]
fn r36_a_server_without_room_closes_all_locks() {
    run(async {
        let server = Memcached::with(Setup::new().arg("-M").arg("-m").arg("8"));
        let url = server.url() + SHORT;
        let (ours, other, late) = (connect(&url).await, connect(&url).await, connect(&url).await);
        // Each has its session, and the lock's value as it was.
        for locks in [&late, &other] {
            locks.mutex("a").lock().await.unwrap().release().await.unwrap();
        }
        let guard = ours.mutex("a").lease(Duration::from_secs(1)).lock().await.unwrap();
        fill(&server);
        // Those who wait for it write, and are refused.
        let waits = other.mutex("a").lock_timeout(Duration::from_millis(300)).await;
        assert!(waits.is_err(), "two hold");
        assert_eq!(server.say("mg leasehold:l:a s"), ["EN"], "the lock's value is gone");
        while guard.is_held() {
            let tried = late.mutex("a").try_lock().await;
            assert!(tried.is_err() || !guard.is_held(), "two hold");
        }
    });
}

/// A client that is cut off: its lock is free when its session is over, and it knows that before.
#[test]
fn r46_a_client_that_is_cut_off_is_replaced_and_knows_it_first() {
    run(async {
        let server = testbed::memcached();
        let proxy = Proxy::before(server.port());
        let url = server.url() + SHORT + "&restart_delay_ms=0";
        let cut_off = connect(&proxy.in_front_of(server.port(), &url)).await;
        let other = connect(&url).await;
        let guard = cut_off.mutex("cut").lock().await.unwrap();
        proxy.refuse(true);
        let began = Instant::now();
        let next = other.mutex("cut").lock_timeout(PATIENCE).await.unwrap();
        let (took, recovery) = (began.elapsed(), other.guarantees().recovery);
        assert!(!guard.is_held(), "two hold");
        assert!(next.token() > guard.token());
        assert!(took >= Duration::from_secs(1), "{took:?}");
        assert!(took < recovery + PATIENCE / 6, "{took:?}, where {recovery:?} is stated");
        println!("free {took:?} after its holder was cut off, {recovery:?} is stated");
    });
}

/// The server stands still for longer than any session, and goes on: nobody believes meanwhile, and one
/// holds afterwards.
#[test]
fn s14_a_server_that_was_stopped_goes_on() {
    run(async {
        let server = Memcached::start();
        let url = server.url() + SHORT + "&restart_delay_ms=0";
        let (ours, other) = (connect(&url).await, connect(&url).await);
        let guard = ours.mutex("a").lock().await.unwrap();
        server.stop();
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert!(!guard.is_held());
        server.cont();
        let next = other.mutex("a").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > guard.token() && !guard.is_held());
    });
}

#[test]
fn require_and_doctor_say_what_it_cannot_keep() {
    run(async {
        let server = Memcached::with(Setup::new().arg("-m").arg("2"));
        for wanted in [
            Guarantee::ExclusiveOnStoreCrash,
            Guarantee::TokenDurability(Durability::Machine),
            Guarantee::AtLeast,
        ] {
            let refused = leasehold::builder().require(wanted).connect(server.url()).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported, "{wanted}");
        }
        let found = async |url: String| {
            let found = connect(&url).await.diagnose().await.unwrap();
            found.iter().map(|f| (f.id, f.severity)).collect::<Vec<_>>()
        };
        let possible = ("eviction-possible", Severity::Weak);
        let new = ("restarted", Severity::Note);
        assert_eq!(found(server.url()).await, [possible, new]);
        let delay = ("restart-delay", Severity::Broken);
        assert_eq!(found(server.url() + "?restart_delay_ms=0").await, [delay, possible]);
        let kept = Memcached::with(Setup::new().arg("-M"));
        assert_eq!(found(kept.url()).await, [new]);
        // More than it has room for.
        let filling = "x".repeat(100_000);
        for n in 0..100 {
            server.say(&format!("set filling{n} 0 0 100000\r\n{filling}"));
        }
        let found = found(server.url()).await;
        assert_eq!(found[0], ("eviction", Severity::Broken), "{found:?}");
    });
}
