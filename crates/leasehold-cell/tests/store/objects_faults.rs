//! Objects: the store is killed or does not reply, and foreign objects in a lock's place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::store::Evict;
use leasehold_test_support::*;
use testbed::{Proxy, SeaweedFs};

use crate::objects_front::{Does, front};

// S44
#[test]
#[ignore = "runs with ./test.sh --all"]
fn killed_object_store_keeps_locks_and_tokens() {
    run(async {
        let server = SeaweedFs::start();
        let locks = connect(&(server.url("s44") + "&session_ms=60000")).await;
        let guard = locks.mutex("s44").lease(Duration::from_secs(60)).lock().await.unwrap();
        let others = connect(&(server.url("s44") + "&session_ms=60000&poll_ms=50")).await;
        server.kill();
        let error = others.mutex("s44").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        server.restart();
        let error = others.mutex("s44").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(guard.is_held());
        let token = guard.token();
        guard.release().await.unwrap();
        let next = others.mutex("s44").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    });
}

// S13
/// A client must know that its session has ended before another client is granted the lock.
#[test]
fn partitioned_client_of_an_object_store_notices_its_loss() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = server.url("s13") + "&session_ms=2000&poll_ms=50";
        let through =
            url.replace(&server.endpoint(), &format!("http://127.0.0.1:{}", proxy.port()));
        let ours = connect(&through).await;
        let other = connect(&url).await;
        let guard = ours.mutex("s13").lock().await.unwrap();
        let waiting = {
            let lock = other.mutex("s13");
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.freeze();
        let next = waiting.await.unwrap().unwrap();
        assert!(!guard.is_held(), "two clients believe that they hold the lock");
        assert!(next.token() > guard.token());
        proxy.thaw();
        next.release().await.unwrap();
    });
}

// S90
#[test]
fn foreign_objects_are_reported_and_kept() {
    run(async {
        let server = testbed::seaweed();
        let locks = connect(&server.url("s90")).await;
        server.ask("PUT", "s90/l:s90-foreign", "42");
        let error = locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("another prefix or folder"), "{error}");
        locks.evict("s90-foreign", Evict::Holders).await.unwrap_err();
        assert_eq!(server.ask("GET", "s90/l:s90-foreign", "").1, "42");
        // The error for a newer version's object must not suggest another prefix.
        server.ask("PUT", "s90/l:s90-later", "leasehold object 2 whatever\n");
        let error = locks.mutex("s90-later").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("upgrade this leasehold"), "{error}");
        // Other locks are listed nevertheless, whatever their names.
        let names = ["a b/é.*>", "a.b", "a%2Eb", "..", &"n".repeat(200), &"ü".repeat(250)];
        let _held = names_are_listed_beside(&locks, &names, &["s90-foreign", "s90-later"]).await;
        assert_eq!(locks.list("a.").await.unwrap().len(), 1);
    });
}

/// Returns the URL with this port instead of the server's.
fn through(url: &str, server: &SeaweedFs, port: u16) -> String {
    url.replace(&server.endpoint(), &format!("http://127.0.0.1:{port}"))
}

/// A proxy sends each write twice and returns the second reply.
#[test]
fn writes_repeated_by_a_proxy_are_neither_lost_nor_applied_twice() {
    run(async {
        let server = testbed::seaweed();
        let port = front(server.port(), |first| match first.starts_with("PUT") {
            true => Does::Twice,
            false => Does::Passes,
        });
        let url = through(&(server.url("repeats") + "&poll_ms=50"), server, port);
        let [ours, other] = [connect(&url).await, connect(&url).await];
        for round in 0..5 {
            let guard = ours.mutex("a").lock().await.unwrap();
            guard.release().await.unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        ours.mutex("a").run(async |_| ()).await.unwrap();
        // An eviction does not remove the next holder.
        let guard = ours.mutex("b").lock().await.unwrap();
        let waiting = {
            let lock = other.mutex("b");
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        until_queued(&ours, "b", 2).await;
        assert_eq!(connect(&url).await.evict("b", Evict::Holders).await.unwrap(), 1);
        let next = waiting.await.unwrap().unwrap();
        guard.release().await.unwrap_err();
        next.release().await.unwrap();
        hammer(&[ours, other], "c", 2, 5).await;
    });
}

/// One object always hangs or returns an error. All other holds of the client are renewed.
#[test]
fn hanging_or_failing_object_affects_no_other_hold() {
    /// On a busy machine, the server takes seconds.
    const LEASE: Duration = Duration::from_secs(20);
    run(async {
        let server = testbed::seaweed();
        for ill in [Does::Hangs, Does::Says(503, "SlowDown"), Does::Says(500, "InternalError")] {
            let is_ill = Arc::new(AtomicBool::new(false));
            let set = is_ill.clone();
            let port = front(server.port(), move |first| {
                match set.load(SeqCst) && first.contains("bad") {
                    true => ill,
                    false => Does::Passes,
                }
            });
            let url = through(&(server.url("ill") + "&session_ms=20000"), server, port);
            let locks = connect(&url).await;
            let hold = async |name: String| {
                locks.mutex(name).lease(LEASE).lock_timeout(PATIENCE).await.unwrap()
            };
            let bad = hold("bad".into()).await;
            let mut good = Vec::new();
            for n in 0..12 {
                good.push(hold(format!("good-{n}")).await);
            }
            is_ill.store(true, SeqCst);
            tokio::time::timeout(PATIENCE, bad.lost()).await.unwrap();
            assert!(good.iter().all(|guard| guard.is_held()), "{ill:?}: {good:?}");
            for guard in good {
                guard.release().await.unwrap();
            }
            is_ill.store(false, SeqCst);
        }
    });
}

/// `doctor` races writes three times. One race without replies causes
/// neither a finding nor an error.
#[test]
fn doctor_repeats_a_race_without_replies() {
    run(async {
        let server = testbed::seaweed();
        let unanswered = Arc::new(AtomicUsize::new(0));
        let remaining = unanswered.clone();
        let port = front(server.port(), move |first| {
            let is_write = first.starts_with("PUT ");
            match is_write && remaining.try_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok() {
                true => Does::Hangs,
                false => Does::Passes,
            }
        });
        let locks = connect(&through(&server.url("race"), server, port)).await;
        unanswered.store(4, SeqCst);
        let found = locks.diagnose().await.unwrap();
        assert!(found.iter().all(|found| found.id == "lifecycle"), "{found:?}");
        assert_eq!(unanswered.load(SeqCst), 0);
        unanswered.store(usize::MAX, SeqCst);
        let error = locks.diagnose().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
}

/// Temporary errors do not end a wait, however the store words them.
#[test]
fn waiter_survives_temporary_errors_of_an_object_store() {
    run(async {
        let server = testbed::seaweed();
        for ill in [
            Does::Says(400, "RequestTimeout"),
            Does::Says(403, "RequestTimeTooSkewed"),
            Does::Says(400, "ExpiredToken"),
            Does::Says(503, "SlowDown"),
            Does::Says(599, "NobodyKnowsThis"),
        ] {
            let is_ill = Arc::new(AtomicBool::new(false));
            let set = is_ill.clone();
            let port = front(server.port(), move |first| {
                match set.load(SeqCst) && first.contains("passes") {
                    true => ill,
                    false => Does::Passes,
                }
            });
            let direct = server.url("passing") + "&poll_ms=50";
            let [holder, waiter] =
                [connect(&direct).await, connect(&through(&direct, server, port)).await];
            let guard = holder.mutex("passes").lock_timeout(PATIENCE).await.unwrap();
            let waiting = {
                let lock = waiter.mutex("passes");
                tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
            };
            until_queued(&holder, "passes", 2).await;
            // Longer than the interval of renewals, which get this error too.
            is_ill.store(true, SeqCst);
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            assert!(!waiting.is_finished(), "{ill:?}: {:?}", waiting.await);
            is_ill.store(false, SeqCst);
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
    });
}

/// Thousands of concurrent releases are as many requests, but use few sockets.
#[test]
fn many_concurrent_releases_share_few_connections() {
    const MANY: usize = 400;
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = through(&(server.url("crowd") + "&session_ms=60000"), server, proxy.port());
        let locks = connect(&url).await;
        let names: Vec<String> = (0..MANY).map(|n| format!("crowd-{n}")).collect();
        let guards = locks.lock_all(names.iter().map(String::as_str)).await.unwrap();
        drop(guards);
        locks.close().await.unwrap();
        // A slow reply costs a connection. Without sharing, each request has its own.
        assert!(proxy.connections() < MANY, "{} connections", proxy.connections());
    });
}
