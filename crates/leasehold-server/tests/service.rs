//! The service over real stores: claims, streams, locks and the end of a server.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_server::{Access, Limits};
use serde_json::{Value, json};
use support::{Server, id};
use tempfile::TempDir;

/// Runs a test over each kind of store: one with its own leases, one whose leases the server adds,
/// and one in another process.
async fn over_every_store(test: impl AsyncFn(&Server)) {
    let redis = tokio::task::spawn_blocking(testbed::Redis::start).await.unwrap();
    let directory = TempDir::new().unwrap();
    let file = format!("file:{}", directory.path().display());
    for url in ["memory:", &file, &redis.url()] {
        eprintln!("store: {url}");
        test(&Server::open(url).await).await;
    }
}

fn claim(name: &str) -> Value {
    json!({"name": name, "lease_ms": 60_000, "label": "test", "host": "h", "pid": 7})
}

fn try_join(n: u128, name: &str) -> Value {
    json!({"id": id(n), "claim": claim(name)})
}

fn join(n: u128, name: &str) -> Value {
    json!({"id": id(n), "mode": "wait", "claim": claim(name)})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_acquired_renewed_handed_over_and_released() {
    over_every_store(async |server| {
        let first = server.post("/v1/claims", try_join(1, "a")).await.is(201).json();
        assert_eq!(first["status"], "held");
        let token = first["token"].as_u64().unwrap();
        assert!(first["remaining_ms"].as_u64().is_some_and(|ms| ms <= 60_000), "{first}");
        // The same request again refers to the same claim.
        let again = server.post("/v1/claims", try_join(1, "a")).await.is(201).json();
        assert_eq!((&again["token"], &again["handle"]), (&first["token"], &first["handle"]));

        let sequencer = first["sequencer"].as_str().unwrap().replace('%', "%25");
        let check = format!("/v1/check?sequencer={sequencer}");
        assert_eq!(server.get(&check).await.is(200).json()["token"], token);

        let busy = server.post("/v1/claims", try_join(2, "a")).await.is(409).json();
        assert_eq!((&busy["kind"], &busy["status"]), (&"contended".into(), &409.into()));
        assert_eq!(busy["holders"][0]["token"], token);
        assert!(busy["detail"].as_str().unwrap().contains("held by h pid 7 (test)"), "{busy}");

        let waiting = server.post("/v1/claims", join(3, "a")).await.is(202).json();
        assert_eq!((&waiting["status"], &waiting["ahead"]), (&"waiting".into(), &1.into()));

        let path = format!("/v1/claims/{}", id(1));
        let renewed = server.call("PUT", &path, claim("a")).await.is(200).json();
        assert_eq!((&renewed["status"], &renewed["token"]), (&"held".into(), &token.into()));

        let granted = async {
            let path = format!("/v1/claims/{}?wait=60s&name=a&lease_ms=60000", id(3));
            server.get(&path).await.is(200).json()
        };
        let released = async {
            let path = format!("/v1/claims/{}?name=a&lease_ms=60000", id(1));
            server.call("DELETE", &path, Value::Null).await.is(200).json()
        };
        let (granted, released) = tokio::join!(granted, released);
        assert_eq!(released["left"], true);
        assert_eq!(granted["status"], "held");
        assert!(granted["token"].as_u64().unwrap() > token);

        let lost = server.call("PUT", &path, claim("a")).await.is(200).json();
        assert_eq!(lost["status"], "lost");
        let again = server.call("DELETE", &format!("{path}?name=a"), Value::Null).await.is(200);
        assert_eq!(again.json()["left"], false);
        server.get(&check).await.is(410);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_renewal_returns_a_result_for_each_claim() {
    over_every_store(async |server| {
        server.post("/v1/claims", try_join(1, "a")).await.is(201);
        server.post("/v1/claims", join(2, "a")).await.is(202);
        let claims: Vec<Value> = [(2, "a"), (9, "a"), (1, "a")]
            .map(|(n, name)| json!({"id": id(n), "claim": claim(name)}))
            .into();
        let renewed = server.post("/v1/claims/renew", json!({"claims": claims})).await.is(200);
        let statuses: Vec<Value> = renewed.json()["claims"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["status"].clone())
            .collect();
        assert_eq!(statuses, ["waiting", "lost", "held"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_not_renewed_expires() {
    over_every_store(async |server| {
        let mut short = try_join(1, "a");
        short["claim"]["lease_ms"] = 1000.into();
        // On a busy machine, the store may answer too late for such a short lease, so the request
        // is repeated.
        while server.post("/v1/claims", short.clone()).await.status == 503 {}
        server.post("/v1/claims", join(2, "a")).await;
        let path = format!("/v1/claims/{}?wait=60s&name=a&lease_ms=60000", id(2));
        assert_eq!(server.get(&path).await.is(200).json()["status"], "held");
        let path = format!("/v1/claims/{}", id(1));
        assert_eq!(server.call("PUT", &path, claim("a")).await.is(200).json()["status"], "lost");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_not_renewed_does_not_get_the_lock() {
    over_every_store(async |server| {
        server.post("/v1/claims", try_join(1, "a")).await.is(201);
        let mut gone = join(2, "a");
        gone["claim"]["waiter_lease_ms"] = 200.into();
        server.post("/v1/claims", gone).await.is(202);
        server.post("/v1/claims", join(3, "a")).await.is(202);
        let path = format!("/v1/claims/{}?wait=60s&name=a&lease_ms=60000", id(3));
        let release = async {
            // Until the waiter has expired, the lock may be granted to it and then expire.
            let path = format!("/v1/claims/{}?name=a", id(1));
            server.call("DELETE", &path, Value::Null).await.is(200);
        };
        let (granted, ()) = tokio::join!(server.get(&path), release);
        assert_eq!(granted.is(200).json()["status"], "held");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_share_and_can_upgrade_to_a_writer() {
    let server = Server::open("memory:").await;
    let reader = |n| {
        let claim = json!({"name": "rw", "kind": "rwlock", "weight": 1, "lease_ms": 60_000});
        json!({"id": id(n), "claim": claim})
    };
    server.post("/v1/claims", reader(1)).await.is(201);
    server.post("/v1/claims", reader(2)).await.is(201);
    let writer = json!({"name": "rw", "kind": "rwlock", "lease_ms": 60_000});
    let path = format!("/v1/claims/{}/weight", id(1));
    assert_eq!(server.post(&path, writer.clone()).await.is(200).json()["status"], "busy");
    let two = format!("/v1/claims/{}?name=rw&kind=rwlock&weight=1", id(2));
    server.call("DELETE", &two, Value::Null).await.is(200);
    assert_eq!(server.post(&path, writer).await.is(200).json()["status"], "done");
    server.post("/v1/claims", reader(3)).await.is(409);
    // A request for the same name as another kind.
    server.post("/v1/claims", try_join(4, "rw")).await.is(422);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_lasts_as_long_as_its_connection() {
    over_every_store(async |server| {
        let mut first = server.stream("POST", "/v1/locks/a%2Fb/hold?label=one", "").await;
        let held = first.until("held").await;
        assert_eq!(held["name"], "a/b");
        assert!(held["remaining_seconds"].as_f64().is_some_and(|s| s > 0.0), "{held}");
        let token = held["token"].as_u64().unwrap();
        let path = "/v1/locks/a%2Fb/hold?wait=0s";
        let busy = server.post(path, Value::Null).await.is(409).json();
        assert_eq!(busy["holders"][0]["token"], token);

        let mut second = server.stream("POST", "/v1/locks/a%2Fb/hold", "").await;
        let waiting = second.until("waiting").await;
        assert_eq!((&waiting["ahead"], &waiting["place"]), (&1.into(), &1.into()));
        assert_eq!(waiting["holders"][0]["label"], "one");
        assert!(first.ping().await.unwrap()["remaining_seconds"].as_f64().is_some());
        // The connection closes, for any reason.
        drop(first);
        assert!(second.until("held").await["token"].as_u64().unwrap() > token);
        // Without a label, the claim names the client.
        let shown = server.get("/v1/locks/a%2Fb").await.is(200).json();
        let label = shown["lock"]["claims"][0]["label"].as_str().unwrap();
        assert!(label.starts_with("anonymous at 127.0.0.1:"), "{label}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_connection_is_cut_leaves_the_queue() {
    let server = Server::open("memory:").await;
    let mut first = server.stream("POST", "/v1/locks/a/hold", "").await;
    first.until("held").await;
    let mut second = server.stream("POST", "/v1/locks/a/hold", "").await;
    second.until("waiting").await;
    let mut third = server.stream("POST", "/v1/locks/a/hold", "").await;
    assert_eq!(third.until("waiting").await["ahead"], 2);
    drop(second);
    assert_eq!(third.until("waiting").await["ahead"], 1);
    drop(first);
    third.until("held").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_stays_held_for_the_grace_period() {
    let server = Server::open("memory:").await;
    let mut first = server.stream("POST", "/v1/locks/a/hold?grace=1h", "").await;
    let token = first.until("held").await["token"].as_u64();
    let mut second = server.stream("POST", "/v1/locks/a/hold", "").await;
    second.until("waiting").await;
    drop(first);
    // The first stream is gone, but its lock is not. Two pings take longer than closing the stream.
    second.ping().await.unwrap();
    second.ping().await.unwrap();
    let lock = server.get("/v1/locks/a").await.is(200).json();
    assert_eq!(lock["lock"]["claims"][0]["token"].as_u64(), token);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_server_sent_events_if_the_client_accepts_them() {
    let server = Server::open("memory:").await;
    let accept = "Accept: text/event-stream\r\n";
    let text = {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = server.connect().await;
        let request = format!("POST /v1/locks/a/hold HTTP/1.1\r\nHost: localhost\r\n{accept}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut read = String::new();
        while !read.contains("\n\n") || !read.contains("data: ") {
            let mut part = [0; 1024];
            let n = tokio::time::timeout(support::PATIENCE, stream.read(&mut part)).await.unwrap();
            read.push_str(&String::from_utf8_lossy(&part[..n.unwrap()]));
        }
        read
    };
    assert!(text.contains("content-type: text/event-stream"), "{text}");
    assert!(text.contains("event: held\ndata: {"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_holder_is_notified() {
    over_every_store(async |server| {
        let mut held = server.stream("POST", "/v1/locks/a/hold", "").await;
        held.until("held").await;
        let mut events = server.stream("GET", "/v1/events", "").await;
        events.until("ready").await;
        let evicted = server.post("/v1/locks/a/evict", json!({})).await.is(200).json();
        assert_eq!(evicted["evicted"], 1);
        assert_eq!(held.until("lost").await["reason"], "gone");
        assert!(held.next().await.is_none(), "the stream did not end");

        // A claim over HTTP is notified by its handle, and its client finds out at its next
        // renewal.
        let joined = server.post("/v1/claims", try_join(1, "a")).await.is(201).json();
        server.post("/v1/locks/a/evict", json!({"token": joined["token"]})).await.is(200);
        let path = format!("/v1/claims/{}", id(1));
        assert_eq!(server.call("PUT", &path, claim("a")).await.json()["status"], "lost");
        if server.service_pushes_evictions().await {
            while events.until("ask").await["handle"] != joined["handle"] {}
        }
    })
    .await;
}

impl Server {
    async fn service_pushes_evictions(&self) -> bool {
        self.get("/v1/store").await.is(200).json()["guarantees"]["evicted"] == "Push"
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_queues_are_reported_after_ready() {
    over_every_store(async |server| {
        let mut events = server.stream("GET", "/v1/events?prefix=a", "").await;
        events.until("ready").await;
        server.post("/v1/claims", try_join(1, "abc")).await.is(201);
        events.until("changed").await;
        let locks = server.get("/v1/locks?prefix=a").await.is(200).json();
        assert_eq!(locks["locks"][0]["name"], "abc");
        assert_eq!(locks["locks"][0]["claims"][0]["label"], "test");
        assert!(!locks.to_string().contains(&id(1)), "a list shows a claim ID");
        assert_eq!(server.get("/v1/locks?prefix=b").await.json()["locks"], json!([]));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_lock_shows_its_reason_until_it_is_unfrozen() {
    over_every_store(async |server| {
        let request = json!({"for_ms": 3_600_000, "reason": "maintenance"});
        server.post("/v1/locks/a/freeze", request.clone()).await.is(204);
        let busy = server.post("/v1/claims", try_join(1, "a")).await.is(423).json();
        assert_eq!((&busy["frozen"], &busy["kind"]), (&"maintenance".into(), &"contended".into()));
        server.post("/v1/locks/a/hold?wait=0s", Value::Null).await.is(423);
        let mut stream = server.stream("POST", "/v1/locks/a/hold", "").await;
        assert_eq!(stream.until("waiting").await["held_by"], "frozen: maintenance");
        let lock = server.get("/v1/locks/a").await.is(200).json();
        assert_eq!(lock["lock"]["frozen"], "maintenance");
        server.post("/v1/locks/a/unfreeze", Value::Null).await.is(204);
        stream.until("held").await;
        server.post("/v1/locks/a/unfreeze", Value::Null).await.is(409);
        // `null` is an empty body.
        server.with("POST", "/v1/locks/c/evict", "", "null").await.is(200);
        let odd = json!({"for_ms": 1000, "capacity": 3});
        let odd = server.post("/v1/locks/b/freeze", odd).await.is(400).json();
        assert_eq!(odd["detail"], "only a semaphore has a capacity");
        // The lock is held now, and freezing does not wait.
        server.post("/v1/locks/a/freeze", request).await.is(409);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_reported_with_all_parties() {
    let server = Server::open("memory:").await;
    let by = |n: u128, name: &str, pid: u32| {
        let claim = json!({"name": name, "lease_ms": 60_000, "host": "h", "pid": pid});
        json!({"id": id(n), "mode": "wait", "claim": claim})
    };
    server.post("/v1/claims", by(1, "a", 1)).await.is(201);
    server.post("/v1/claims", by(2, "b", 2)).await.is(201);
    server.post("/v1/claims", by(3, "b", 1)).await.is(202);
    let why = server.get("/v1/locks/a/why").await.is(200).json();
    let names: Vec<&Value> = why["chain"].as_array().unwrap().iter().map(|l| &l["name"]).collect();
    assert_eq!((names, &why["deadlock"]), (vec![&json!("a"), &json!("b")], &json!([])));
    server.post("/v1/claims", by(4, "a", 2)).await.is(202);
    let why = server.get("/v1/locks/a/why").await.is(200).json();
    let parties = json!([
        {"host": "h", "pid": 1, "holds": "a", "waits_for": "b"},
        {"host": "h", "pid": 2, "holds": "b", "waits_for": "a"},
    ]);
    assert_eq!(why["deadlock"], parties);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_store_is_not_a_busy_lock() {
    let store = leasehold::testing::TestStore::new().unwrap();
    let faults = store.faults();
    let locks = store.client().unwrap();
    let server = Server::start(locks, Access::open(), Limits::default()).await;
    server.get("/readyz").await.is(200);
    faults.freeze();
    let problem = server.post("/v1/claims", try_join(1, "a")).await.is(503).json();
    assert_eq!(problem["kind"], "unreachable");
    assert!(problem["hint"].is_string(), "{problem}");
    server.get("/readyz").await.is(503);
    server.get("/healthz").await.is(200);
    faults.heal();
    server.post("/v1/claims", try_join(1, "a")).await.is(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_shuts_down_takes_no_claims_and_releases_its_streams() {
    let locks = support::memory();
    let store = locks.store().clone();
    let mut limits = Limits::default();
    limits.drain = Duration::from_secs(3);
    let mut server = Server::start(locks, Access::open(), limits).await;
    let mut holder = server.stream("POST", "/v1/locks/a/hold", "").await;
    holder.until("held").await;
    let mut waiter = server.stream("POST", "/v1/locks/a/hold", "").await;
    waiter.until("waiting").await;
    let mut events = server.stream("GET", "/v1/events", "").await;
    events.until("ready").await;
    server.shut_down();
    holder.until("draining").await;
    for lines in [&mut waiter, &mut events] {
        lines.until("draining").await;
        assert!(lines.next().await.is_none());
    }
    holder.until("released").await;
    assert!(holder.next().await.is_none());
    tokio::time::timeout(support::PATIENCE, server.task).await.unwrap().unwrap();
    let name = leasehold::Name::new("a").unwrap();
    assert!(store.read(&name).await.unwrap().is_none(), "the lock is still held");
}

/// Clients without another server must not lose their locks while a stream delays the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_draining_server_renews_and_releases_claims() {
    let mut server = Server::open("memory:").await;
    server.post("/v1/claims", try_join(1, "held")).await.is(201);
    let mut holder = server.stream("POST", "/v1/locks/a/hold", "").await;
    holder.until("held").await;
    server.shut_down();
    holder.until("draining").await;
    let path = format!("/v1/claims/{}", id(1));
    for _ in 0..2 {
        let renewed = server.call("PUT", &path, json!({"name": "held", "lease_ms": 60000})).await;
        assert_eq!(renewed.is(200).json()["status"], "held");
    }
    server.post("/v1/claims", try_join(2, "b")).await.is(503);
    server.get("/readyz").await.is(503);
    let metrics = server.get("/metrics").await.is(200).text;
    assert!(metrics.contains("leasehold_server_draining 1"), "{metrics}");
    server.call("DELETE", &format!("{path}?name=held"), Value::Null).await.is(200);
    // Without streams there is nothing to wait for.
    drop(holder);
    tokio::time::timeout(support::PATIENCE / 4, server.task).await.unwrap().unwrap();
}

/// If the router is part of another web service, that service owns the connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_of_a_draining_service_rejects_claims() {
    use axum::body::Body;
    use axum::http::Request;
    use tower_service::Service as _;
    let server = Server::open("memory:").await;
    server.service.drain();
    let mut router = server.service.router();
    let body = Body::from(try_join(1, "b").to_string());
    let request = Request::post("/v1/claims").header("Host", "localhost");
    let request = request.header("Content-Type", "application/json").body(body).unwrap();
    let answer = router.call(request).await.unwrap();
    assert_eq!(answer.status(), 503);
    assert!(answer.headers().contains_key("retry-after"), "{answer:?}");
    let ready = Request::get("/readyz").body(Body::empty()).unwrap();
    assert_eq!(router.call(ready).await.unwrap().status(), 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_the_same_user_needs_no_token_on_a_unix_socket() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("socket");
    let locks = support::memory();
    let service =
        leasehold_server::Service::new(locks, Access::same_user(), Limits::default()).unwrap();
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let listeners = vec![leasehold_server::Listener::Unix(listener)];
    tokio::spawn(leasehold_server::serve(service.clone(), listeners, std::future::pending()));
    let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let request = "GET /v1/locks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut read = String::new();
    stream.read_to_string(&mut read).await.unwrap();
    assert!(read.starts_with("HTTP/1.1 200 "), "{read}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_is_described_with_what_clients_can_rely_on() {
    let directory = TempDir::new().unwrap();
    let server = Server::open(&format!("file:{}", directory.path().display())).await;
    let store = server.get("/v1/store").await.is(200).json();
    // The server keeps the leases, so they are lost if it crashes.
    assert_eq!(store["guarantees"]["liveness"], "Lease");
    assert_eq!(store["guarantees"]["on_store_crash"], "Fenced");
    let server = Server::open("memory:").await;
    server.get("/v1/doctor").await.is(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_requests_and_claims_and_name_locks_only_on_request() {
    let server = Server::open("memory:").await;
    server.post("/v1/claims", try_join(1, "secret-\"name\"")).await.is(201);
    server.post("/v1/claims", join(2, "secret-\"name\"")).await.is(202);
    server.call("BREW", "/v1/claims", Value::Null).await.is(405);
    let contains = |text: &str, lines: &[&str]| {
        for line in lines {
            assert!(text.lines().any(|found| found == *line), "{line}: {text}");
        }
    };
    const REQUESTS: &str =
        r#"leasehold_server_requests_total{identity="anonymous",route="/v1/claims""#;
    let text = server.get("/metrics").await.is(200).text;
    contains(
        &text,
        &[
            &format!(r#"{REQUESTS},method="POST",status="201"}} 1"#),
            &format!(r#"{REQUESTS},method="other",status="405"}} 1"#),
            r#"leasehold_server_claims{identity="anonymous",prefix="",state="held"} 1"#,
            r#"leasehold_server_claims{identity="anonymous",prefix="",state="waiting"} 1"#,
            r#"leasehold_server_grants_total{identity="anonymous",prefix=""} 1"#,
            r#"leasehold_server_losses_total{identity="anonymous",prefix=""} 0"#,
            "leasehold_server_draining 0",
        ],
    );
    assert!(!text.contains("secret"), "{text}");
    server.post("/v1/locks/secret-%22name%22/evict", json!({})).await.is(200);
    let renewal = json!({"name": "secret-\"name\"", "lease_ms": 60000});
    let renewed = server.call("PUT", &format!("/v1/claims/{}", id(1)), renewal).await;
    assert_eq!(renewed.is(200).json()["status"], "lost");
    let text = server.get("/metrics?locks=secret").await.is(200).text;
    contains(
        &text,
        &[
            r#"leasehold_server_claims{identity="anonymous",prefix="",state="held"} 0"#,
            r#"leasehold_server_losses_total{identity="anonymous",prefix=""} 1"#,
            r#"leasehold_server_lock_claims{lock="secret-\"name\"",state="held"} 1"#,
            r#"leasehold_server_lock_claims{lock="secret-\"name\"",state="waiting"} 0"#,
        ],
    );
    let text = server.get("/metrics?locks=other").await.is(200).text;
    assert!(!text.contains("secret"), "{text}");
}

/// Returns the holds of a lock, the latest first, with label and end.
async fn history(server: &Server, name: &str) -> Vec<(String, String)> {
    let answer = server.get(&format!("/v1/locks/{name}/history")).await.is(200).json();
    let text = |value: &Value| value.as_str().unwrap_or("open").to_owned();
    let holds = answer["holds"].as_array().unwrap();
    holds.iter().map(|hold| (text(&hold["label"]), text(&hold["end"]))).collect()
}

fn hold(label: &str, end: &str) -> (String, String) {
    (label.to_owned(), end.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_of_a_lock_has_its_holds_and_how_they_ended() {
    over_every_store(async |server| {
        let labeled = |n, label: &str| {
            let mut request = join(n, "h");
            request["claim"]["label"] = label.into();
            request
        };
        server.post("/v1/claims", labeled(1, "one")).await.is(201);
        server.post("/v1/claims", labeled(2, "two")).await.is(202);
        assert_eq!(history(server, "h").await, [hold("one", "open")]);
        let path = format!("/v1/claims/{}?name=h&lease_ms=60000", id(1));
        server.call("DELETE", &path, Value::Null).await.is(200);
        let wait = format!("/v1/claims/{}?wait=60s&name=h&lease_ms=60000&label=two", id(2));
        assert_eq!(server.get(&wait).await.is(200).json()["status"], "held");
        assert_eq!(history(server, "h").await, [hold("two", "open"), hold("one", "released")]);
        server.post("/v1/locks/h/evict", json!({})).await.is(200);
        let mut stream = server.stream("POST", "/v1/locks/h/hold?label=three", "").await;
        stream.until("held").await;
        let all = [hold("three", "open"), hold("two", "evicted"), hold("one", "released")];
        assert_eq!(history(server, "h").await, all);
        drop(stream);
        while history(server, "h").await[0] == all[0] {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(history(server, "h").await[0], hold("three", "released"));
        let answer = server.get("/v1/locks/h/history").await.json();
        for hold in answer["holds"].as_array().unwrap() {
            let time = |key: &str| hold[key].as_f64().unwrap();
            assert!(time("from") <= time("seen") && time("from") <= time("to"), "{answer}");
            assert!(time("to") <= answer["now"].as_f64().unwrap(), "{answer}");
        }
        assert!(history(server, "other").await.is_empty());
    })
    .await;
}

/// A store that reports changes is listed after each change. A request for the history also reads
/// the lock, so the hold has ended before the first request.
#[tokio::test(flavor = "multi_thread")]
async fn history_records_unobserved_holds_of_other_servers() {
    let redis = tokio::task::spawn_blocking(testbed::Redis::start).await.unwrap();
    let server = Server::open(&redis.url()).await;
    let other = leasehold::connect(&redis.url()).await.unwrap();
    loop {
        let guard = other.mutex("h").label("elsewhere").lock().await.unwrap();
        tokio::time::sleep(Duration::from_millis(2500)).await;
        guard.release().await.unwrap();
        // Repeats until the machine was fast enough.
        match history(&server, "h").await.first() {
            Some(first) => break assert_eq!(*first, hold("elsewhere", "gone")),
            None => continue,
        }
    }
    let answer = server.get("/v1/locks/h/history").await.json();
    assert_eq!(answer["watches_store"], true);
}

/// A store that reports no changes is read when the history is requested.
#[tokio::test(flavor = "multi_thread")]
async fn the_history_has_the_current_holders_of_any_store() {
    let locks = support::memory();
    let store = locks.store().clone();
    let mut limits = Limits::default();
    limits.watch_store = false;
    let server = Server::start(locks, Access::open(), limits).await;
    let other = leasehold::Client::with_store(store).unwrap();
    let guard = other.mutex("h").label("elsewhere").lock().await.unwrap();
    assert_eq!(history(&server, "h").await, [hold("elsewhere", "open")]);
    guard.release().await.unwrap();
    assert_eq!(history(&server, "h").await, [hold("elsewhere", "gone")]);
    let answer = server.get("/v1/locks/h/history").await.json();
    assert_eq!(answer["watches_store"], false);
}

/// Waiters cost one heartbeat each, every two seconds. Streams of events cost nothing.
#[tokio::test(flavor = "multi_thread")]
async fn idle_streams_cause_only_the_heartbeats_of_the_store() {
    const WAITERS: u32 = 20;
    let redis = Arc::new(tokio::task::spawn_blocking(testbed::Redis::start).await.unwrap());
    let server = Server::open(&redis.url()).await;
    server.post("/v1/claims", try_join(1, "a")).await.is(201);
    let mut streams = Vec::new();
    for _ in 0..WAITERS {
        let mut waiting = server.stream("POST", "/v1/locks/a/hold", "").await;
        waiting.until("waiting").await;
        streams.push(waiting);
        let mut events = server.stream("GET", "/v1/events?name=a", "").await;
        events.until("ready").await;
        streams.push(events);
    }
    // Each call of the store is a script.
    let calls = async || {
        let redis = redis.clone();
        let all = tokio::task::spawn_blocking(move || redis.calls()).await.unwrap();
        let scripts = all.into_iter().filter(|(name, _)| name.starts_with("eval"));
        scripts.map(|(_, calls)| calls).sum::<u64>()
    };
    // The list for the history, and the queue positions that the waiters report, are over.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (before, started) = (calls().await, Instant::now());
    tokio::time::sleep(Duration::from_secs(8)).await;
    let sent = calls().await - before;
    let beats = f64::from(WAITERS) * (started.elapsed().as_secs_f64() / 2.0 + 1.0);
    assert!(sent > 0 && (sent as f64) < 2.0 * beats, "{sent} calls, and {beats} heartbeats");
}
