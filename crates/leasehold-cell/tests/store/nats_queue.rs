//! NATS: the queue, notifications of grants, and the costs of calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::cell::{CellStore, nats};
use leasehold::store::{Evict, Guarantee};
use leasehold::{Builder, Client, ErrorKind};
use leasehold_test_support::*;
use testbed::{Nats, Proxy, Setup};
use tokio::runtime::Handle;

async fn with_store(server: &Nats) -> (Client, Arc<CellStore>) {
    let url = format!("{}?{LONG_SESSION}", server.url());
    let store = Arc::new(nats::connect(&url, &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

/// Returns the number of messages that the bucket has accepted.
fn written(server: &Nats) -> u64 {
    let reply = server.ask("$JS.API.STREAM.INFO.KV_leasehold", "");
    let last = reply.split("\"last_seq\":").nth(1).and_then(|rest| rest.split(',').next());
    last.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("last_seq is missing: {reply}"))
}

// R13
#[test]
fn nats_pairs_take_two_round_trips_and_failed_tries_write_nothing() {
    const PAIRS: u64 = 200;
    run(async {
        // A separate server, so that only our own writes are counted.
        let server = &Nats::start();
        let (locks, store) = with_store(server).await;
        let (others, theirs) = with_store(server).await;
        locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        let before = (store.round_trips(), written(server));
        for _ in 0..PAIRS {
            locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        }
        assert_eq!(store.round_trips() - before.0, 2 * PAIRS);
        assert_eq!(written(server) - before.1, 2 * PAIRS);
        let guard = locks.mutex("r13").lock().await.unwrap();
        others.mutex("r13").try_lock().await.unwrap_err();
        let (before, last) = (theirs.round_trips(), written(server));
        others.mutex("r13").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        assert_eq!(written(server), last, "a failed try_lock wrote to the store");
        guard.release().await.unwrap();
    });
}

// R10
/// Waiters poll every ten seconds here, so the test fails if they are not notified.
#[test]
fn granted_waiter_is_notified() {
    run(async {
        let server = Nats::start();
        let url = server.url() + "?poll_ms=10000";
        let mut clients = Vec::new();
        for _ in 0..12 {
            clients.push(connect(&url).await);
        }
        leasehold::builder().require(Guarantee::Push).connect(&url).await.unwrap();
        let mut guard = Some(clients[0].mutex("granted").lock().await.unwrap());
        let mut waiting = Vec::new();
        for locks in &clients[1..] {
            let lock = locks.mutex("granted");
            waiting.push(tokio::spawn(async move { lock.lock_timeout(PATIENCE).await }));
            let ahead = waiting.len() + 1;
            until("all clients are in the queue", async || {
                let shown = clients[0].inspect("granted").await.unwrap();
                shown.is_some_and(|shown| shown.claims.len() == ahead)
            })
            .await;
        }
        // Waiters near the front have polled often by then, and poll rarely now.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let began = Instant::now();
        let mut last = 0;
        for turn in waiting {
            let before = guard.take().unwrap();
            assert!(before.token().get() > last);
            last = before.token().get();
            before.release().await.unwrap();
            guard = Some(turn.await.unwrap().unwrap());
        }
        let took = began.elapsed();
        println!("{} hand-overs to notified waiters: {took:?}", clients.len() - 1);
        assert!(took < Duration::from_secs(8), "{took:?}");
    });
}

// P6
/// The waiter's connection is broken during the grant, so it gets no message, and polls.
#[test]
fn waiter_disconnected_during_its_grant_polls() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = format!("{}/?poll_ms=60000", server.url());
        let waits = connect(&proxy.in_front_of(server.port(), &url)).await;
        let other = connect(&url).await;
        let guard = other.mutex("p6").lock().await.unwrap();
        let lock = waits.mutex("p6").lease(Duration::from_secs(60));
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until("the waiter is in the queue", async || {
            other.inspect("p6").await.unwrap().is_some_and(|shown| shown.claims.len() == 2)
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.refuse(true);
        proxy.cut();
        guard.release().await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let began = Instant::now();
        proxy.refuse(false);
        assert!(waiting.await.unwrap().unwrap().is_held());
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    });
}

// S06
#[test]
fn writes_whose_nats_reply_was_lost_are_recognized() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = proxy.in_front_of(server.port(), &(server.url() + "/"));
        let (ours, witness) = (connect(&url).await, connect(&server.url()).await);
        lost_replies_are_recognized(&proxy, &ours, &witness, 8).await;
    });
}

// S90
#[test]
fn foreign_values_in_a_bucket_are_reported_and_kept() {
    run(async {
        let server = Nats::start();
        let locks = connect(&server.url()).await;
        let subject = "$KV.leasehold.leasehold.l.s90-foreign";
        assert!(server.ask(subject, "42").contains("seq"));
        let error = locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("set another prefix or folder"), "{error}");
        locks.evict("s90-foreign", Evict::Holders).await.unwrap_err();
        let wanted = format!("{{\"last_by_subj\":\"{subject}\"}}");
        let kept = server.ask("$JS.API.STREAM.MSG.GET.KV_leasehold", &wanted);
        // 42 in base64.
        assert!(kept.contains("\"data\":\"NDI=\""), "{kept}");
        // Other locks are listed nevertheless, whatever their names.
        let names = ["a b/é.*>", "a.b", "a%2Eb", "$KV", &"n".repeat(200), &"ü".repeat(250)];
        let _held = names_are_listed_beside(&locks, &names, &["s90-foreign"]).await;
        assert_eq!(locks.list("a.").await.unwrap().len(), 1);
    });
}

// R10
/// Each of 32 clients acquires the lock repeatedly. None is starved, and all get about equally many
/// turns.
#[test]
fn thirty_two_clients_of_nats_all_make_progress() {
    run(async {
        let server = Nats::start();
        thirty_two_get_on(&server.url(), Duration::from_secs(1), Duration::from_secs(11)).await;
    });
}

/// Without permission to send messages, a client polls, and `doctor` reports it.
#[test]
fn client_without_notify_permission_polls() {
    run(async {
        let rules = r#"
            authorization { users: [
                { user: "all", password: "all" }
                { user: "some", password: "some", permissions: {
                    publish: ["$KV.>", "$JS.API.>"], subscribe: ["_INBOX.>"]
                } }
            ] }
        "#;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        let server = Nats::with(Setup::new().arg("-c").arg(file.path().to_str().unwrap()));
        let with = |user: &str| server.url().replace("//", &format!("//{user}@"));
        let (all, some) = (connect(&with("all:all")).await, connect(&with("some:some")).await);
        let found = some.diagnose().await.unwrap();
        assert!(found.iter().any(|found| found.id == "messages"), "{found:?}");
        let refused =
            leasehold::builder().require(Guarantee::Push).connect(with("some:some")).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
        let guard = all.mutex("rung").lock().await.unwrap();
        let lock = some.mutex("rung");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        next.release().await.unwrap();
    });
}

#[test]
fn a_waiter_evicted_while_the_connection_is_broken_is_never_granted() {
    run(async {
        let server = Nats::start();
        let proxy = Proxy::before(server.port());
        let url = server.url() + "/?session_ms=60000";
        let ours = connect(&proxy.in_front_of(server.port(), &url)).await;
        evicted_waiter_is_never_granted(&proxy, &ours, &connect(&url).await).await;
    });
}
