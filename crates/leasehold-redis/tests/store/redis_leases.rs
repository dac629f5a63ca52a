//! Leases on one server: the end of a lease and of a lock delay, a lost hold, a lost reply, and a
//! silent network.

use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::store::{Joined, Mode};
use leasehold::{ErrorKind, Kind, LostReason};
use leasehold_test_support::*;
use testbed::{Proxy, Redis, Setup};

// S15
/// The companion keys of a lock without a main key must outlive the lock delay, however long it is.
#[test]
fn long_lock_delay_of_a_semaphore_survives_its_crashed_holder() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let mut dead = claim("s15", Kind::Semaphore, 1);
        dead.lock_delay = Duration::from_secs(600);
        assert!(matches!(join(&locks, &dead).await, Joined::Holding { .. }));
        // The lease has expired long ago, but the delay has not.
        server.shift_clock(300);
        let next = claim("s15", Kind::Semaphore, 1);
        let busy = locks.store().join(&next, Mode::Try).await.unwrap();
        assert!(matches!(busy, Joined::Busy { .. }), "free too early: {busy:?}");
        // This is longer than a lease and the delay.
        server.shift_clock(900);
        assert!(matches!(join(&locks, &next).await, Joined::Holding { .. }));
    });
}

#[test]
fn lock_on_a_paused_server_is_lost_by_its_deadline() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("stopped").lease(LEASE).lock().await.unwrap();
        server.stop();
        // From here on no renewal is acknowledged. All acknowledged ones were sent before.
        tokio::time::sleep(LEASE).await;
        assert!(!guard.is_held(), "is_held() is true after the lease expired");
        assert_eq!(guard.lost().await, LostReason::Expired);
        let error = locks.mutex("stopped").lock_timeout(Duration::from_millis(300)).await;
        assert!(matches!(error.unwrap_err().kind(), ErrorKind::Timeout | ErrorKind::Unreachable));
        server.cont();
        release(locks.mutex("stopped").lock().await.unwrap()).await;
    });
}

// S28
#[test]
fn deleted_main_key_is_noticed_within_a_heartbeat() {
    run(async {
        let server = fast();
        let (holder, waiting) = (connect(&server.url()).await, connect(&server.url()).await);
        // The key is deleted, or expires.
        for end in [&["DEL", "deleted"][..], &["PEXPIRE", "deleted", "1"]] {
            // Only a heartbeat of a waiter notices the end in time.
            let mutex = holder.mutex("deleted").lease(PATIENCE * 2);
            let guard = mutex.lock().await.unwrap();
            let mut waiters = Vec::new();
            for n in 1..=2 {
                let mutex = waiting.mutex("deleted");
                waiters.push(tokio::spawn(async move { mutex.lock().await }));
                until_waiting(&holder, "deleted", n).await;
            }
            let begun = Instant::now();
            server.command(end);
            let mut last = guard.token();
            for waiter in waiters {
                let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
                assert!(next.token() > last, "{end:?}");
                last = next.token();
                release(next).await;
            }
            // A heartbeat is sent every two seconds.
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            let error = guard.renew().await.unwrap_err();
            assert_eq!(error.lost_reason(), Some(LostReason::Gone));
        }
    });
}

// S06
#[test]
fn lost_reply_is_recognized() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let locks = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        // After this the connections are open and the scripts cached.
        release(locks.mutex("warm").lock().await.unwrap()).await;
        proxy.drop_replies_after(0);
        let taking = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("lost").lock().await }
        });
        until("the reply to be dropped", async || proxy.has_dropped()).await;
        let value = server.command(&["GET", "lost"]);
        assert!(!value.is_empty(), "the lock was not granted");
        proxy.pass_replies();
        proxy.refuse(true);
        proxy.refuse(false);
        let guard = taking.await.unwrap().unwrap();
        let token: u64 = value.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(guard.token().get(), token, "the claim was granted twice");
        release(guard).await;
        assert_eq!(server.command(&["EXISTS", "lost"]), "0");
    });
}

// F49
/// A network that drops a connection silently must not stop notifications forever.
#[test]
fn idle_connections_are_kept_alive() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        release(locks.mutex("idle").lock().await.unwrap()).await;
        let port = format!(":{:04X}", server.port());
        // The rows are the client's established connections (01). The timer 02 is that of
        // keep-alive.
        let timers = || {
            let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
            let rows = table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
            let ours = rows.filter(|row| row[2].ends_with(&port) && row[3] == "01");
            ours.map(|row| row[5].split(':').next().unwrap_or_default().to_owned()).collect()
        };
        until("all connections have keep-alive", async || {
            let timers: Vec<String> = timers();
            !timers.is_empty() && timers.iter().all(|timer| timer == "02")
        })
        .await;
    });
}
