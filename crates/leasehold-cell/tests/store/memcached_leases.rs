//! memcached: what a server keeps and loses, and how this affects holders.

use std::time::{Duration, Instant};

use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use leasehold::{ErrorKind, LostReason};
use leasehold_test_support::*;
use testbed::{Memcached, Proxy, Setup};

/// Sessions of one second, for which the server's cells live four seconds.
const SHORT: &str = "?session_ms=1000";
/// Time for which no lock is granted after a loss of data, by the server's clock.
const CLOSED: Duration = Duration::from_millis(3_200);

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn restarted_server_grants_nothing_until_old_leases_expire() {
    run(async {
        let server = Memcached::start();
        let url = server.url() + SHORT;
        let (ours, other) = (connect(&url).await, connect(&url).await);
        // A new server is treated like one that has lost its data.
        let error = ours.mutex("a").try_lock().await.unwrap_err();
        assert!(error.kind() == ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains("restarted or emptied, or is new"), "{error}");
        let mut guard = ours.mutex("a").lock().await.unwrap();
        let forget: [fn(&Memcached); 2] = [Memcached::restart, Memcached::flush];
        for forget in forget {
            let last = guard.token();
            let began = Instant::now();
            forget(&server);
            // In the first round this client has never requested the lock before, in the second it
            // has.
            let next = other.mutex("a").lock_timeout(PATIENCE).await.unwrap();
            assert!(began.elapsed() >= CLOSED, "{:?}", began.elapsed());
            assert!(!guard.is_held(), "two clients hold the lock");
            assert!(next.token() > last, "token {} after {last}", next.token());
            next.release().await.unwrap();
            guard = ours.mutex("a").lock_timeout(PATIENCE).await.unwrap();
            assert!(guard.is_held());
        }
    });
}

// R36
#[test]
fn lock_deleted_by_the_server_is_reported_lost_and_tokens_rise() {
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

/// Stores values of each size until none is accepted.
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

// R36
/// A write without room is refused, and the old value is lost.
#[test]
fn server_out_of_memory_grants_no_locks() {
    run(async {
        let server = Memcached::with(Setup::new().arg("-M").arg("-m").arg("8"));
        let url = server.url() + SHORT;
        let (ours, other, late) = (connect(&url).await, connect(&url).await, connect(&url).await);
        // Each client gets its session and knows the lock's value.
        for locks in [&late, &other] {
            locks.mutex("a").lock().await.unwrap().release().await.unwrap();
        }
        let guard = ours.mutex("a").lease(Duration::from_secs(1)).lock().await.unwrap();
        fill(&server);
        // A client that waits for the lock needs room for its session or for a longer queue.
        let waits = other.mutex("a").lock_timeout(Duration::from_millis(300)).await;
        assert!(waits.is_err(), "two clients hold the lock");
        // It depends on their order which of its writes is refused. This write loses the queue.
        let longer = "x".repeat(400);
        let refused = server.say(&format!("set leasehold:l:a 0 0 400\r\n{longer}"));
        assert_eq!(refused, ["SERVER_ERROR out of memory storing object"]);
        assert_eq!(server.say("mg leasehold:l:a s"), ["EN"], "the lock's value still exists");
        while guard.is_held() {
            let tried = late.mutex("a").try_lock().await;
            assert!(tried.is_err() || !guard.is_held(), "two clients hold the lock");
        }
    });
}

// R46
/// A client is partitioned. Its lock is free when its session has expired, and the client knows
/// earlier.
#[test]
fn partitioned_client_notices_its_loss_before_the_next_grant() {
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
        assert!(!guard.is_held(), "two clients hold the lock");
        assert!(next.token() > guard.token());
        assert!(took >= Duration::from_secs(1), "{took:?}");
        assert!(
            took < recovery + PATIENCE / 6,
            "took {took:?}, but the stated recovery time is {recovery:?}"
        );
        println!("free {took:?} after the partition of its holder, stated: {recovery:?}");
    });
}

// S14
/// The server is paused for longer than any session. No client holds the lock in the meantime, and
/// one does afterwards.
#[test]
fn paused_server_grants_again_after_resuming() {
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
fn require_and_doctor_report_missing_guarantees() {
    run(async {
        let server = Memcached::with(Setup::new().arg("-m").arg("2"));
        for wanted in [
            Guarantee::ExclusiveOnStoreCrash,
            Guarantee::TokenDurability(Durability::Machine),
            Guarantee::MinHold,
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
        // More than the server has room for.
        let filling = "x".repeat(100_000);
        for n in 0..100 {
            server.say(&format!("set filling{n} 0 0 100000\r\n{filling}"));
        }
        let found = found(server.url()).await;
        assert_eq!(found[0], ("eviction", Severity::Broken), "{found:?}");
    });
}
