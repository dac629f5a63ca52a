//! Attacks that must fail.

mod support;

use std::path::PathBuf;
use std::time::Duration;

use leasehold_server::{Access, Limits};
use serde_json::{Value, json};
use support::{Server, hash, id, logged};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const ALICE: &str = "alice-token-3f1c9b7a";
const BOB: &str = "bob-token-77aa01d2";
const GUEST: &str = "guest-token-51b0c4ee";
const WORKER: &str = "worker-token-9d2e66f0";

/// Returns the identities. Alice and Bob share the prefix "shared:", and each has a prefix of its
/// own. The guest may read locks. The worker may not.
fn identities() -> Value {
    json!({"identities": [
        {
            "name": "alice",
            "token_sha256": [hash(ALICE)],
            "prefixes": ["alice:", "shared:"],
            "rights": ["hold", "inspect"],
            "quota": {"claims": 2, "streams": 1},
        },
        {
            "name": "bob",
            "token_sha256": [hash(BOB)],
            "prefixes": ["bob:", "shared:"],
            "rights": ["hold", "inspect", "evict", "freeze"],
        },
        {
            "name": "guest",
            "token_sha256": [hash(GUEST)],
            "prefixes": [""],
            "rights": ["inspect"],
            "quota": {"requests_per_second": 3},
        },
        {
            "name": "worker",
            "token_sha256": [hash(WORKER)],
            "prefixes": [""],
            "rights": ["hold", "evict", "freeze"],
        },
    ]})
}

struct Guarded {
    server: Server,
    file: PathBuf,
    _directory: TempDir,
}

impl Guarded {
    async fn start(limits: Limits) -> Self {
        logged::begin();
        let directory = TempDir::new().unwrap();
        let file = directory.path().join("tokens.json");
        std::fs::write(&file, identities().to_string()).unwrap();
        let locks = support::memory();
        let server = Server::start(locks, Access::tokens(&file).unwrap(), limits).await;
        Self { server, file, _directory: directory }
    }

    async fn call(&self, token: &str, method: &str, path: &str, body: Value) -> support::Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.server.with(method, path, &bearer(token), &body).await
    }

    async fn join(&self, token: &str, n: u128, name: &str) -> support::Answer {
        self.call(token, "POST", "/v1/claims", claim(n, name)).await
    }
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

fn claim(n: u128, name: &str) -> Value {
    json!({"id": id(n), "claim": {"name": name, "lease_ms": 60_000}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_valid_token_is_rejected() {
    let guarded = Guarded::start(Limits::default()).await;
    let body = claim(1, "alice:a").to_string();
    for headers in [
        String::new(),
        bearer(""),
        bearer("wrong"),
        bearer(&hash(ALICE)),
        bearer(&ALICE[1..]),
        bearer(&"x".repeat(600)),
        format!("Authorization: Basic {ALICE}\r\n"),
        format!("Authorization: {ALICE}\r\n"),
        format!("Cookie: token={ALICE}\r\n"),
        "Authorization: Bearer \u{7f}\r\n".to_owned(),
    ] {
        for (method, path) in
            [("POST", "/v1/claims"), ("GET", "/v1/locks"), ("GET", "/v1/store"), ("GET", "/v1/x")]
        {
            let body = if method == "POST" { body.as_str() } else { "" };
            let answer = guarded.server.with(method, path, &headers, body).await;
            assert!([400, 401].contains(&answer.status), "{headers:?} {path}: {answer:?}");
        }
    }
    guarded.join(ALICE, 1, "alice:a").await.is(201);
    // This path reveals nothing about locks.
    guarded.server.get("/healthz").await.is(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_confined_to_its_prefixes() {
    let guarded = Guarded::start(Limits::default()).await;
    guarded.join(BOB, 1, "bob:secret").await.is(201);
    for name in ["bob:secret", "alice", "Alice:a", "", "shared", "ali%63e:a"] {
        let status = guarded.join(ALICE, 2, name).await.status;
        assert!([400, 403].contains(&status), "{name:?}: {status}");
    }
    for (method, path) in [
        ("GET", "/v1/locks/bob:secret"),
        ("GET", "/v1/locks/bob%3Asecret/holders"),
        ("GET", "/v1/locks/bob:secret/why"),
        ("GET", "/v1/locks/bob:secret/history"),
        ("GET", "/v1/events?name=bob:secret"),
        ("GET", "/v1/events?prefix="),
        ("GET", "/v1/events?prefix=bob:"),
        ("POST", "/v1/locks/bob:secret/hold"),
        ("GET", "/v1/check?sequencer=lh1:mutex:1:m:bob%253Asecret"),
        ("GET", "/v1/doctor"),
    ] {
        guarded.call(ALICE, method, path, Value::Null).await.is(403);
    }
    let path = format!("/v1/claims/{}", id(1));
    let body = json!({"name": "bob:secret"});
    guarded.call(ALICE, "PUT", &path, body.clone()).await.is(403);
    guarded.call(ALICE, "DELETE", &format!("{path}?name=bob:secret"), Value::Null).await.is(403);
    guarded.call(ALICE, "POST", &format!("{path}/weight"), body).await.is(403);
    let renew = json!({"claims": [{"id": id(1), "claim": {"name": "bob:secret"}}]});
    guarded.call(ALICE, "POST", "/v1/claims/renew", renew).await.is(403);
    // A list contains only what the identity may see.
    guarded.join(ALICE, 3, "alice:a").await.is(201);
    for path in ["/v1/locks", "/v1/locks?prefix=", "/v1/locks?prefix=bob:"] {
        let listed = guarded.call(ALICE, "GET", path, Value::Null).await.is(200);
        assert!(!listed.text.contains("secret"), "{path}: {}", listed.text);
    }
    let why = guarded.call(ALICE, "GET", "/v1/locks/alice:a/why", Value::Null).await.is(200);
    assert!(!why.text.contains("secret"), "{}", why.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_confined_to_its_rights() {
    let guarded = Guarded::start(Limits::default()).await;
    guarded.join(ALICE, 1, "alice:a").await.is(201);
    let freeze = json!({"for_ms": 1000});
    for (token, path, body) in [
        (ALICE, "/v1/locks/alice:a/evict", json!({})),
        (ALICE, "/v1/locks/alice:a/freeze", freeze.clone()),
        (ALICE, "/v1/locks/alice:a/unfreeze", Value::Null),
        (ALICE, "/v1/locks/alice:b/hold?label=frozen:%20x", Value::Null),
        (GUEST, "/v1/locks/alice:a/hold", Value::Null),
        (GUEST, "/v1/claims", claim(2, "alice:a")),
    ] {
        guarded.call(token, "POST", path, body).await.is(403);
    }
    // A label that would freeze the lock when the claim leaves needs that right.
    let mut labeled = claim(3, "alice:b");
    labeled["claim"]["label"] = "frozen".into();
    guarded.call(ALICE, "POST", "/v1/claims", labeled).await.is(403);
    guarded.call(BOB, "POST", "/v1/locks/bob:a/freeze", freeze).await.is(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_inspect_sees_no_lock_and_no_history() {
    let guarded = Guarded::start(Limits::default()).await;
    guarded.join(WORKER, 1, "alice:a").await.is(201);
    for path in [
        "/v1/locks/alice:a/history",
        "/v1/locks/alice:a",
        "/v1/locks/alice:a/why",
        "/v1/locks",
        "/v1/events?prefix=",
    ] {
        guarded.call(WORKER, "GET", path, Value::Null).await.is(403);
    }
    let path = "/v1/locks/alice:a/history";
    let shown = guarded.call(ALICE, "GET", path, Value::Null).await.is(200).json();
    assert_eq!(shown["holds"].as_array().unwrap().len(), 1, "{shown}");
}

/// The page reveals nothing about locks, and the browser blocks other scripts and sites.
#[tokio::test(flavor = "multi_thread")]
async fn the_page_needs_no_token_and_allows_no_foreign_code() {
    let guarded = Guarded::start(Limits::default()).await;
    guarded.join(ALICE, 1, "alice:secret").await.is(201);
    let page = guarded.server.get("/").await.is(200);
    assert!(page.text.contains("<html"), "{page:?}");
    assert!(!page.text.contains("alice"));
    let head = page.head.to_lowercase();
    for part in [
        "default-src 'none'",
        "script-src 'sha256-",
        "style-src 'sha256-",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
    ] {
        assert!(head.contains(part), "{part}: {head}");
    }
    assert!(!head.contains("unsafe") && !head.contains("set-cookie"), "{head}");
    guarded.server.post("/", Value::Null).await.is(405);
    let document = guarded.server.get("/openapi.json").await.is(200).json();
    assert_eq!(document["openapi"], "3.1.0");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_confined_to_its_quotas() {
    let guarded = Guarded::start(Limits::default()).await;
    guarded.join(ALICE, 1, "alice:a").await.is(201);
    guarded.join(ALICE, 2, "alice:b").await.is(201);
    let over = guarded.join(ALICE, 3, "alice:c").await.is(429);
    assert!(over.head.to_lowercase().contains("retry-after: "), "{}", over.head);
    assert_eq!(over.json()["kind"], "full");
    // Claims that it already has, and other identities, are not affected.
    guarded.join(ALICE, 1, "alice:a").await.is(201);
    guarded.join(BOB, 3, "bob:c").await.is(201);
    // The same claim ID on another lock is another claim.
    guarded.join(ALICE, 1, "alice:e").await.is(429);
    let path = format!("/v1/claims/{}?name=alice:a", id(1));
    guarded.call(ALICE, "DELETE", &path, Value::Null).await.is(200);

    let hold = "/v1/locks/alice:d/hold";
    let mut stream = guarded.server.stream("POST", hold, &bearer(ALICE)).await;
    stream.until("held").await;
    guarded.call(ALICE, "POST", hold, Value::Null).await.is(429);
    guarded.call(ALICE, "GET", "/v1/events", Value::Null).await.is(429);
    drop(stream);
    // The stream's slot is free again once the server has noticed the end.
    while guarded.call(ALICE, "POST", "/v1/locks/alice:b/hold?wait=0s", Value::Null).await.status
        == 429
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // All at once, so that a slow machine sends them within a second too.
    let one = format!("GET /v1/store HTTP/1.1\r\nHost: localhost\r\n{}", bearer(GUEST));
    let all = format!("{}{one}Connection: close\r\n\r\n", format!("{one}\r\n").repeat(50));
    let answers = guarded.server.raw(all.as_bytes()).await;
    let rejected = answers.text.matches("HTTP/1.1 429 ").count();
    assert_eq!(answers.status, 200);
    assert!(rejected > 0, "the rate is not limited");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_identitys_claim_id_is_useless() {
    let guarded = Guarded::start(Limits::default()).await;
    let held = guarded.join(BOB, 1, "shared:a").await.is(201).json();
    let path = format!("/v1/claims/{}", id(1));
    let body = json!({"name": "shared:a"});
    let renewed = guarded.call(ALICE, "PUT", &path, body.clone()).await.is(200).json();
    assert_eq!(renewed["status"], "lost");
    let delete = format!("{path}?name=shared:a");
    let left = guarded.call(ALICE, "DELETE", &delete, Value::Null).await.is(200).json();
    assert_eq!(left["left"], false);
    guarded.join(ALICE, 1, "shared:a").await.is(409);
    let still = guarded.call(BOB, "PUT", &path, body).await.is(200).json();
    assert_eq!((&still["status"], &still["token"]), (&"held".into(), &held["token"]));
    assert_ne!(renewed["handle"], held["handle"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_requests_are_rejected() {
    let guarded = Guarded::start(Limits::default()).await;
    let long = format!("X-Long: {}\r\n", "x".repeat(64 << 10));
    let answer = guarded.server.with("GET", "/v1/store", &long, "").await;
    assert_eq!(answer.status, 431, "{answer:?}");
    let many: String = (0..200).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(guarded.server.with("GET", "/v1/store", &many, "").await.status, 431);
    let body = format!(r#"{{"id": "{}"}}"#, "x".repeat(2 << 20));
    let answer = guarded.server.with("POST", "/v1/claims", &bearer(ALICE), &body).await;
    // The server answers before it has read everything, so the answer can be lost with a reset.
    assert!([0, 413].contains(&answer.status), "{answer:?}");
    let name = format!("alice:{}", "x".repeat(600));
    guarded.join(ALICE, 1, &name).await.is(400);
    guarded.call(ALICE, "GET", &format!("/v1/locks/{name}"), Value::Null).await.is(400);
    let claims: Vec<Value> = (0..1001).map(|n| claim(n, "alice:a")).collect();
    guarded.call(ALICE, "POST", "/v1/claims/renew", json!({"claims": claims})).await.is(400);
    guarded.join(ALICE, 1, "alice:a").await.is(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_request_is_disconnected() {
    let mut limits = Limits::default();
    limits.request_time = Duration::from_millis(300);
    let guarded = Guarded::start(limits).await;
    let head = format!("POST /v1/claims HTTP/1.1\r\nHost: localhost\r\n{}", bearer(ALICE));
    let body = format!("{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{");
    for part in ["", "POST /v1/cl", &head, &body] {
        let mut stream = guarded.server.connect().await;
        stream.write_all(part.as_bytes()).await.unwrap();
        let mut read = Vec::new();
        let ended = tokio::time::timeout(support::PATIENCE, stream.read_to_end(&mut read)).await;
        assert!(ended.is_ok(), "{part:?} keeps its connection");
        let text = String::from_utf8_lossy(&read);
        assert!(text.is_empty() || text.contains(" 408 "), "{part:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_data_and_never_paths() {
    let directory = TempDir::new().unwrap();
    let url = format!("file:{}", directory.path().join("store").display());
    let server = Server::open(&url).await;
    for (path, name) in [
        ("/v1/locks/..%2F..%2Fetc%2Fpasswd/hold?wait=0s", "../../etc/passwd"),
        ("/v1/locks/%2E%2E/hold?wait=0s", ".."),
        ("/v1/locks/a%252Fb/hold?wait=0s", "a%2Fb"),
        ("/v1/locks/a%3Fwait=0s/hold?wait=0s", "a?wait=0s"),
    ] {
        let mut stream = server.stream("POST", path, "").await;
        assert_eq!(stream.until("held").await["name"], name);
    }
    for path in [
        "/v1/locks/a%00b/hold?wait=0s",
        "/v1/locks/a%0D%0Ab/hold?wait=0s",
        "/v1/locks/%FF/hold?wait=0s",
    ] {
        server.post(path, Value::Null).await.is(400);
    }
    for path in ["/v1/locks/../store", "/v1/../healthz", "//v1/store", "/v1/locks//hold"] {
        assert_ne!(server.call("POST", path, Value::Null).await.status, 200, "{path}");
    }
    let outside: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(outside.len(), 1, "{outside:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_inject_neither_headers_nor_lines() {
    let server = Server::open("memory:").await;
    let path = "/v1/locks/a/hold?label=x%0D%0ASet-Cookie:%20evil%0A%7B%22event%22:%22lost%22%7D";
    let mut first = server.stream("POST", path, "").await;
    first.until("held").await;
    let mut joined = claim(1, "a");
    joined["mode"] = "wait".into();
    joined["claim"]["label"] = "y\r\nSet-Cookie: evil\u{1b}[2J".into();
    joined["claim"]["host"] = "h\nh".into();
    server.post("/v1/claims", joined).await.is(202);
    let busy = server.post("/v1/locks/a/hold?wait=0s", Value::Null).await.is(409);
    assert!(!busy.head.contains("evil"), "{}", busy.head);
    let lock = server.get("/v1/locks/a").await.is(200).json();
    for n in [0, 1] {
        let claim = &lock["lock"]["claims"][n];
        for text in [&claim["label"], &claim["host"]] {
            assert!(!text.as_str().unwrap().contains(char::is_control), "{text:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_in_no_log_and_no_response() {
    let guarded = Guarded::start(Limits::default()).await;
    let (mine, odd) = (0xfeed_face_0123_4567_89ab_cdef_u128, "not-hex-but-nearly-secret");
    guarded.join(ALICE, mine, "alice:a").await.is(201);
    let path = format!("/v1/claims/{}", id(mine));
    guarded.call(ALICE, "PUT", &path, json!({"name": "alice:a"})).await.is(200);
    guarded.call(ALICE, "GET", &format!("{path}?name=alice:a"), Value::Null).await.is(200);
    guarded.call(ALICE, "GET", &format!("{path}?nonsense={}", id(mine)), Value::Null).await.is(400);
    let error = guarded.call(ALICE, "PUT", &format!("/v1/claims/{odd}"), json!({})).await.is(400);
    assert!(!error.text.contains(odd), "{}", error.text);
    guarded.call("wrong-token-xyz", "PUT", &path, json!({})).await.is(401);
    for path in
        ["/v1/locks", "/v1/locks/alice:a", "/v1/locks/alice:a/why", "/v1/locks/alice:a/history"]
    {
        let shown = guarded.call(ALICE, "GET", path, Value::Null).await.is(200);
        assert!(!shown.text.contains(&id(mine)), "{path} shows a claim ID");
    }
    let log = logged::text();
    assert!(log.contains("/v1/claims/{id}"), "requests are not logged: {log}");
    for secret in [&id(mine), ALICE, BOB, &hash(ALICE), "wrong-token-xyz", odd] {
        assert!(!log.contains(secret), "the log has {secret}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cross_site_requests_from_a_local_browser_are_rejected() {
    let server = Server::open("memory:").await;
    let body = claim(1, "a").to_string();
    for headers in ["Origin: https://evil.example\r\n", "Origin: null\r\n"] {
        server.with("POST", "/v1/claims", headers, &body).await.is(403);
        server.with("POST", "/v1/locks/a/unfreeze", headers, "").await.is(403);
    }
    // This is a host name of the attacker that now resolves to this machine.
    let rebound = "GET /v1/locks HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    server.raw(rebound.as_bytes()).await.is(403);
    // A form can send this content type, but not JSON.
    let form = format!(
        "POST /v1/claims HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: \
         text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    server.raw(form.as_bytes()).await.is(415);
    server.with("POST", "/v1/claims", "Origin: http://localhost\r\n", &body).await.is(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_token_file_changes_nothing_and_a_removed_token_ends_its_streams() {
    let guarded = Guarded::start(Limits::default()).await;
    let mut stream = guarded.server.stream("POST", "/v1/locks/alice:a/hold", &bearer(ALICE)).await;
    stream.until("held").await;
    let mut twice = identities();
    twice["identities"][1]["token_sha256"] = json!([hash(ALICE)]);
    let mut plain = identities();
    plain["identities"][0]["token_sha256"] = json!([ALICE]);
    let mut unknown = identities();
    unknown["identities"][0]["rihgts"] = json!([]);
    let mut local = identities();
    local["identities"][0]["name"] = "local".into();
    let texts = [twice, plain, unknown, local].map(|bad| bad.to_string());
    for bad in texts.iter().map(String::as_str).chain(["", "{", "{\"identities\": 1}"]) {
        std::fs::write(&guarded.file, bad).unwrap();
        let error = guarded.server.service.reload().unwrap_err();
        assert_eq!(error.kind(), leasehold::ErrorKind::Config);
        guarded.call(ALICE, "GET", "/v1/store", Value::Null).await.is(200);
    }
    let mut without = identities();
    without["identities"].as_array_mut().unwrap().remove(0);
    // The server notices the change without a signal.
    std::fs::write(&guarded.file, without.to_string()).unwrap();
    let failed = stream.until("failed").await;
    assert_eq!(failed["kind"], "denied");
    guarded.call(ALICE, "GET", "/v1/store", Value::Null).await.is(401);
    guarded.join(BOB, 1, "bob:a").await.is(201);
}

/// Schemathesis derives requests from the OpenAPI document, with valid, missing, wrong and extreme
/// values. It fails if a response has an undescribed form or a status of 500 or more, if the server
/// accepts a value that the document forbids, or if a request without a token succeeds.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs with ./test.sh --all"]
async fn requests_derived_from_the_openapi_document_are_answered_as_described() {
    const TOKEN: &str = "all-rights-token-2c81";
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("tokens.json");
    let identity = json!({
        "name": "all",
        "token_sha256": [hash(TOKEN)],
        "prefixes": [""],
        "rights": ["hold", "inspect", "evict", "freeze"],
    });
    std::fs::write(&file, json!({"identities": [identity]}).to_string()).unwrap();
    let access = Access::tokens(&file).unwrap();
    let server = Server::start(support::memory(), access, Limits::default()).await;
    let mut schemathesis =
        tokio::process::Command::new(testbed::python().with_file_name("schemathesis"));
    schemathesis
        .arg("--config-file")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/schemathesis.toml"))
        .args(["run", &format!("http://127.0.0.1:{}/openapi.json", server.port)])
        .args(["--header", &format!("Authorization: Bearer {TOKEN}"), "--no-color"])
        // The same requests in each run.
        .args(["--seed", "1", "--generation-deterministic", "--max-examples", "20"])
        .current_dir(directory.path())
        .kill_on_drop(true);
    let done = schemathesis.output().await.unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{output}{}", String::from_utf8_lossy(&done.stderr));
    assert!(output.contains("Tested: 20"), "{output}");
}
