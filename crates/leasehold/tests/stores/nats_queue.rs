//! NATS: the queue, who is told of a turn, and what calls cost.

#![cfg(feature = "nats")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::nats_common::*;
use leasehold::store::cell::{CellStore, nats};
use leasehold::store::{Evict, Guarantee};
use leasehold::{Builder, ErrorKind, Leasehold};
use testbed::{Nats, Proxy, Setup};
use tokio::runtime::Handle;

async fn with_store(server: &Nats) -> (Leasehold, Arc<CellStore>) {
    let store = Arc::new(nats::connect(&server.url(), &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

/// How many messages the bucket has taken.
fn written(server: &Nats) -> u64 {
    let told = server.ask("$JS.API.STREAM.INFO.KV_leasehold", "");
    let last = told.split("\"last_seq\":").nth(1).and_then(|rest| rest.split(',').next());
    last.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no last_seq: {told}"))
}

#[test]
fn r13_nats_pairs_are_two_round_trips_and_a_failed_try_writes_nothing() {
    const PAIRS: u64 = 200;
    run(async {
        // Of its own: what others write there is not counted.
        let server = &Nats::start();
        let (locks, store) = with_store(server).await;
        let (others, theirs) = with_store(server).await;
        locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        let before = (store.round_trips(), written(server));
        for _ in 0..PAIRS {
            locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        }
        let pairs = store.round_trips() - before.0;
        // A touch of the session may come between, on a machine that is slow.
        assert!((2 * PAIRS..2 * PAIRS + 8).contains(&pairs), "{pairs} for {PAIRS} pairs");
        let messages = written(server) - before.1;
        assert!((2 * PAIRS..2 * PAIRS + 8).contains(&messages), "{messages} for {PAIRS} pairs");
        let guard = locks.mutex("r13").lock().await.unwrap();
        others.mutex("r13").try_lock().await.unwrap_err();
        let (before, last) = (theirs.round_trips(), written(server));
        others.mutex("r13").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        // But for a touch of a session.
        assert!(written(server) <= last + 1, "a failed try wrote something");
        guard.release().await.unwrap();
    });
}

/// Who waits looks every ten seconds here: it is told, or this takes for ever.
#[test]
fn r10_who_is_let_in_is_told() {
    run(async {
        let server = Nats::start();
        let url = server.url() + "?poll_ms=10000";
        let mut clients = Vec::new();
        for _ in 0..12 {
            clients.push(connect(&url).await);
        }
        leasehold::builder().require(Guarantee::Push).connect(&url).await.unwrap();
        let mut guard = Some(clients[0].mutex("told").lock().await.unwrap());
        let mut waiting = Vec::new();
        for locks in &clients[1..] {
            let lock = locks.mutex("told");
            waiting.push(tokio::spawn(async move { lock.lock_timeout(PATIENCE).await }));
            let ahead = waiting.len() + 1;
            until("they stand in the queue", async || {
                let shown = clients[0].read("told").await.unwrap();
                shown.is_some_and(|shown| shown.claims.len() == ahead)
            })
            .await;
        }
        // Whoever stands near the front has looked often by then, and looks seldom now.
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
        println!("{} hand-overs to those who were told: {took:?}", clients.len() - 1);
        assert!(took < Duration::from_secs(8), "{took:?}");
    });
}

/// It is told nothing, and waits no longer than until it looks.
#[test]
fn p6_who_was_cut_off_as_it_was_told_looks() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = format!("{}/?poll_ms=60000", server.url());
        let waits = connect(&proxy.in_front_of(server.port(), &url)).await;
        let other = connect(&url).await;
        let guard = other.mutex("p6").lock().await.unwrap();
        let lock = waits.mutex("p6").lease(Duration::from_secs(60));
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until("it stands in the queue", async || {
            other.read("p6").await.unwrap().is_some_and(|shown| shown.claims.len() == 2)
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

#[test]
fn s06_lost_replies_of_nats_are_recognised() {
    run(async {
        let server = testbed::nats();
        let proxy = Proxy::before(server.port());
        let url = proxy.in_front_of(server.port(), &(server.url() + "/"));
        let (ours, witness) = (connect(&url).await, connect(&server.url()).await);
        lost_replies_are_recognised(&proxy, &ours, &witness, 8).await;
    });
}

#[test]
fn s90_foreign_values_in_a_bucket_are_told_of_and_stay() {
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
        // Others are listed all the same, whatever their names are.
        let names = ["a b/é.*>", "a.b", "a%2Eb", "$KV", &"n".repeat(200), &"ü".repeat(250)];
        let _held = names_are_listed_beside(&locks, &names, &["s90-foreign"]).await;
        assert_eq!(locks.list("a.").await.unwrap().len(), 1);
    });
}

/// Each of 32 clients takes the lock again and again: nobody is kept out, and all get about as much.
#[test]
fn r10_thirty_two_clients_of_nats_get_on() {
    run(async {
        let server = Nats::start();
        thirty_two_get_on(&server.url(), Duration::from_secs(1), Duration::from_secs(11)).await;
    });
}

/// Without the rights to ring, a client looks, and says so.
#[test]
fn who_may_not_ring_looks() {
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
        let with = |who: &str| server.url().replace("//", &format!("//{who}@"));
        let (all, some) = (connect(&with("all:all")).await, connect(&with("some:some")).await);
        let found = some.diagnose().await.unwrap();
        assert!(found.iter().any(|found| found.id == "bells"), "{found:?}");
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
