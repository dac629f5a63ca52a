//! `fence::http` with real requests and real processes, one of which is paused.
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::put;
use axum::{Extension, Router};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use leasehold::database;
use leasehold::fence::http::{
    FenceLayer, Fenced, FileMemory, InMemory, PassOn, SqlMemory, TOKEN_HEADER, TokenLayer,
    TokenStorage,
};
use leasehold::fence::sql;
use leasehold::store::Evict;
use leasehold::{Client, Error, ErrorKind, FencingToken, MutexGuard, Name};
use tokio::sync::{Mutex, Notify};
use tower_layer::Layer;
use tower_service::Service;

type Http = HttpClient<HttpConnector, Body>;

fn client() -> Http {
    HttpClient::builder(TokioExecutor::new()).build_http()
}

/// The bodies that the service has accepted, in order.
type Written = Arc<Mutex<Vec<String>>>;

fn protected(parts: &http::request::Parts) -> Option<String> {
    parts.uri.path().strip_prefix("/orders/").map(|id| format!("orders/{id}"))
}

/// Serves `router` on a free port until the test ends.
async fn serve(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

/// Starts a service that stores the body of each `PUT`, behind this fence.
async fn service(fence: FenceLayer) -> (String, Written) {
    let written = Written::default();
    let write = async |State(written): State<Written>, fenced: Option<Extension<Fenced>>, body| {
        let token = fenced.map(|Extension(fenced)| fenced.token().get());
        let body: String = body;
        written.lock().await.push(body);
        format!("{token:?}")
    };
    let router = Router::new()
        .route("/orders/{id}", put(write))
        .route("/other", put(write))
        .layer(fence)
        .with_state(written.clone());
    (serve(router).await, written)
}

fn request(url: &str, body: &str) -> Request<Body> {
    Request::put(url).body(Body::from(body.to_owned())).unwrap()
}

fn with_token(url: &str, body: &str, token: &str) -> Request<Body> {
    let mut request = request(url, body);
    request.headers_mut().insert(TOKEN_HEADER, token.parse().unwrap());
    request
}

/// Returns the status, and the body as JSON, or as text if it is not JSON.
async fn answer<B>(response: Response<B>) -> (StatusCode, serde_json::Value)
where
    B: axum::body::HttpBody,
    B::Error: std::fmt::Debug,
{
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    (status, serde_json::from_str(&text).unwrap_or(text.into()))
}

async fn memory_lock(name: &str) -> (Client, MutexGuard) {
    let locks = leasehold::connect("memory:").await.unwrap();
    let guard = locks.mutex(name).lock().await.unwrap();
    (locks, guard)
}

// R35
#[tokio::test]
async fn a_stale_request_is_refused_with_both_tokens() {
    let (service, written) = service(FenceLayer::new(InMemory::new(), protected)).await;
    let url = format!("{service}/orders/42");
    let (locks, old) = memory_lock("http stale").await;
    let mut first = TokenLayer::new(&old).unwrap().layer(client());
    let (status, _) = answer(first.call(request(&url, "old")).await.unwrap()).await;
    assert_eq!(status, StatusCode::OK);

    // The old holder's next request is under way when it loses the lock, so it was sent with its
    // token.
    locks.evict("http stale", Evict::Holders).await.unwrap();
    let new = locks.mutex("http stale").lock().await.unwrap();
    let mut second = TokenLayer::new(&new).unwrap().layer(client());
    let (status, _) = answer(second.call(request(&url, "new")).await.unwrap()).await;
    assert_eq!(status, StatusCode::OK);
    let late = with_token(&url, "late", &old.token().to_string());
    let (status, body) = answer(client().request(late).await.unwrap()).await;
    assert_eq!(status, StatusCode::PRECONDITION_FAILED);
    let expected = serde_json::json!({
        "error": "stale token", "resource": "orders/42",
        "seen": new.token().get(), "offered": old.token().get(),
    });
    assert_eq!(body, expected);
    // A token passes any number of times, and each resource has its own highest token seen.
    let (status, _) = answer(second.call(request(&url, "again")).await.unwrap()).await;
    assert_eq!(status, StatusCode::OK);
    let other = with_token(&format!("{service}/orders/43"), "43", &old.token().to_string());
    assert_eq!(client().request(other).await.unwrap().status(), StatusCode::OK);
    assert_eq!(*written.lock().await, ["old", "new", "again", "43"]);
}

// R35
#[tokio::test]
async fn nothing_is_sent_once_the_guard_is_lost() {
    let (url, written) = service(FenceLayer::new(InMemory::new(), protected)).await;
    let url = format!("{url}/orders/1");
    let locks = leasehold::connect("memory:").await.unwrap();
    let lease = Duration::from_secs(5);
    let guard = locks.mutex("http lost").lease(lease).no_renewal().lock().await.unwrap();
    let mut short = TokenLayer::new(&guard).unwrap().min_validity(lease * 2).layer(client());
    let kind = |error: Box<dyn std::error::Error + Send + Sync>| {
        error.downcast_ref::<Error>().map(Error::kind)
    };
    let refused = short.call(request(&url, "short")).await.unwrap_err();
    assert_eq!(kind(refused), Some(ErrorKind::AtRisk));
    let mut tokened = TokenLayer::new(&guard).unwrap().layer(client());
    guard.lost().await;
    let refused = tokened.call(request(&url, "lost")).await.unwrap_err();
    assert_eq!(kind(refused), Some(ErrorKind::Lost));
    assert_eq!(TokenLayer::new(&guard).unwrap_err().kind(), ErrorKind::Lost);

    let guard = locks.mutex("http lost").lock().await.unwrap();
    let mut tokened = TokenLayer::new(&guard).unwrap().layer(client());
    guard.release().await.unwrap();
    let refused = tokened.call(request(&url, "released")).await.unwrap_err();
    assert_eq!(kind(refused), Some(ErrorKind::Closed));
    assert!(written.lock().await.is_empty());
}

// R35
#[tokio::test]
async fn missing_and_malformed_tokens_are_bad_requests() {
    let (url, written) = service(FenceLayer::new(InMemory::new(), protected)).await;
    let order = format!("{url}/orders/1");
    let (status, body) = answer(client().request(request(&order, "none")).await.unwrap()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(body["error"], "missing token");
    for bad in ["", "0", "-1", "+1", "01", "1.0", "1e3", "0x1", "9223372036854775808", "1, 2", "é"]
    {
        let (status, body) =
            answer(client().request(with_token(&order, bad, bad)).await.unwrap()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad:?}");
        assert_eq!(body["error"], "malformed token", "{bad:?}");
    }
    let mut twice = with_token(&order, "twice", "1");
    twice.headers_mut().append(TOKEN_HEADER, "1".parse().unwrap());
    assert_eq!(client().request(twice).await.unwrap().status(), StatusCode::BAD_REQUEST);
    let long = with_token(&format!("{order}{}", "x".repeat(600)), "long", "1");
    assert_eq!(client().request(long).await.unwrap().status(), StatusCode::BAD_REQUEST);
    assert!(written.lock().await.is_empty());
    // A request for an unprotected resource passes unchecked.
    let other = with_token(&format!("{url}/other"), "other", "nonsense");
    assert_eq!(client().request(other).await.unwrap().status(), StatusCode::OK);
    // If a missing token is allowed, a malformed or stale one is still rejected.
    let (url, written) = service(FenceLayer::new(InMemory::new(), protected).allow_missing()).await;
    let order = format!("{url}/orders/1");
    let (status, body) = answer(client().request(request(&order, "none")).await.unwrap()).await;
    assert_eq!((status, body), (StatusCode::OK, "None".into()));
    for (token, status) in [("2", 200), ("1", 412), ("x", 400)] {
        let answered = client().request(with_token(&order, token, token)).await.unwrap();
        assert_eq!(answered.status().as_u16(), status, "{token}");
    }
    assert_eq!(*written.lock().await, ["none", "2"]);
}

/// A token storage that fails like an unreachable database.
#[derive(Debug)]
struct Away;

#[async_trait::async_trait]
impl TokenStorage for Away {
    async fn raise(&self, _: &Name, _: FencingToken) -> leasehold::Result<FencingToken> {
        Err(Error::new(ErrorKind::Unreachable, "password=secret"))
    }
}

// R35
#[tokio::test]
async fn failing_memory_rejects_all_requests() {
    let (url, written) = service(FenceLayer::new(Away, protected)).await;
    let sent = with_token(&format!("{url}/orders/1"), "x", "1");
    let (status, body) = answer(client().request(sent).await.unwrap()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!body.to_string().contains("secret"), "{body}");
    assert!(written.lock().await.is_empty());
}

/// Checks that the result of a raise is not smaller than any result that was returned before it
/// began.
async fn never_goes_back(memory: Arc<dyn TokenStorage>, rounds: u64) {
    let (resource, answered) = (Name::new("r").unwrap(), Arc::new(AtomicU64::new(0)));
    let next = Arc::new(AtomicU64::new(1));
    let work = |seed: u64| {
        let (memory, resource) = (memory.clone(), resource.clone());
        let (answered, next) = (answered.clone(), next.clone());
        tokio::spawn(async move {
            for n in 0..rounds {
                // Most tokens increase, but some are late, like those of real holders.
                let newest = next.fetch_add(1, Ordering::SeqCst);
                let offered =
                    if (n + seed).is_multiple_of(3) { newest.div_ceil(2) } else { newest };
                let before = answered.load(Ordering::SeqCst);
                let seen = memory
                    .raise(&resource, FencingToken::new(offered).unwrap())
                    .await
                    .unwrap()
                    .get();
                assert!(
                    seen >= offered.max(before),
                    "the token {offered} was accepted after {before}: {seen}"
                );
                answered.fetch_max(seen, Ordering::SeqCst);
            }
        })
    };
    for task in (0..8).map(work).collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let newest = next.load(Ordering::SeqCst) - 1;
    assert!(answered.load(Ordering::SeqCst) <= newest);
}

// R35, R51
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_memory_raises_tokens_atomically() {
    never_goes_back(Arc::new(InMemory::new()), 2_000).await;
    let directory = tempfile::tempdir().unwrap();
    never_goes_back(Arc::new(FileMemory::open(directory.path().join("f")).unwrap()), 40).await;
    let file = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(directory.path().join("db"))
        .create_if_missing(true)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(60));
    let sqlite = sqlx::SqlitePool::connect_with(file).await.unwrap();
    database::install(&sqlite).await.unwrap();
    never_goes_back(Arc::new(SqlMemory::new(sqlite)), 40).await;
    let postgres = sqlx::PgPool::connect(&testbed::postgres().database()).await.unwrap();
    database::install(&postgres).await.unwrap();
    never_goes_back(Arc::new(SqlMemory::new(postgres)), 100).await;
    let mariadb = sqlx::MySqlPool::connect(&testbed::mariadb().database()).await.unwrap();
    database::install(&mariadb).await.unwrap();
    never_goes_back(Arc::new(SqlMemory::new(mariadb)), 100).await;
}

// R50
/// Shows the gap between the fence layer and the write, and how to close it. Two requests are
/// accepted in token order, and the first is delayed in its handler until the second is done.
#[tokio::test]
async fn only_a_check_in_the_transaction_fences_the_write() {
    #[derive(Clone)]
    struct Shop {
        pool: sqlx::PgPool,
        held_up: Arc<Notify>,
        go_on: Arc<Notify>,
        checks: bool,
    }
    async fn write(
        State(shop): State<Shop>,
        Path(id): Path<i64>,
        Extension(fenced): Extension<Fenced>,
        body: String,
    ) -> Response<Body> {
        if body == "first" {
            shop.held_up.notify_one();
            shop.go_on.notified().await;
        }
        let mut tx = shop.pool.begin().await.unwrap();
        if shop.checks
            && let Err(error) = sql::check(&mut tx, fenced.resource().as_str(), &fenced).await
        {
            return fenced.refusal(&error);
        }
        let sql = "UPDATE orders SET value = $1 WHERE id = $2";
        sqlx::query(sql).bind(body).bind(id).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        Response::new(Body::empty())
    }
    for checks in [false, true] {
        let pool = sqlx::PgPool::connect(&testbed::postgres().database()).await.unwrap();
        database::install(&pool).await.unwrap();
        for sql in [
            "CREATE TABLE orders (id BIGINT PRIMARY KEY, value TEXT)",
            "INSERT INTO orders VALUES (7, '')",
        ] {
            sqlx::query(sql).execute(&pool).await.unwrap();
        }
        let (held_up, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let shop =
            Shop { pool: pool.clone(), held_up: held_up.clone(), go_on: go_on.clone(), checks };
        let fence = match checks {
            false => FenceLayer::new(InMemory::new(), protected),
            // The transaction is the fence. The layer only reads the header.
            true => FenceLayer::new(PassOn, protected),
        };
        let router = Router::new().route("/orders/{id}", put(write)).layer(fence).with_state(shop);
        let url = format!("{}/orders/7", serve(router).await);
        let sent = with_token(&url, "first", "1");
        let first =
            tokio::spawn(async move { answer(client().request(sent).await.unwrap()).await });
        held_up.notified().await;
        let second = client().request(with_token(&url, "second", "2")).await.unwrap();
        assert_eq!(second.status(), StatusCode::OK);
        go_on.notify_one();
        let (status, body) = first.await.unwrap();
        let value: String =
            sqlx::query_scalar("SELECT value FROM orders").fetch_one(&pool).await.unwrap();
        match checks {
            // As documented, the layer alone does not help.
            false => assert_eq!((status, value.as_str()), (StatusCode::OK, "first")),
            true => {
                assert_eq!((status, value.as_str()), (StatusCode::PRECONDITION_FAILED, "second"));
                assert_eq!((&body["seen"], &body["offered"]), (&2.into(), &1.into()));
            }
        }
    }
}

const LEASE: Duration = Duration::from_secs(10);

/// The child of the test below. It holds a lock, is paused, and continues as if nothing had
/// happened.
#[test]
fn child_process_that_is_paused() {
    let Ok(role) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    let (store, url) = role.split_once(' ').unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let locks = leasehold::connect(store).await.unwrap();
        // Renewals are off, because a pause in the middle of one would keep SQLite's write lock.
        let lock = locks.mutex("orders/42").lease(LEASE).no_renewal();
        let guard = lock.lock().await.unwrap();
        let token = guard.token();
        let mut tokened = TokenLayer::new(&guard).unwrap().layer(client());
        let (status, _) = answer(tokened.call(request(url, "child")).await.unwrap()).await;
        println!("wrote {status}");
        // The child is paused here, with the next request about to be sent.
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let late = with_token(url, "late", &token.to_string());
        let (status, body) = answer(client().request(late).await.unwrap()).await;
        println!("late {} {} {}", status.as_u16(), body["seen"], body["offered"]);
        let error = tokened.call(request(url, "later")).await.unwrap_err();
        println!("later {:?}", error.downcast_ref::<Error>().map(Error::kind));
    });
}

// R40
#[tokio::test]
async fn paused_process_is_rejected_by_the_fence_layer() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", directory.path().join("locks.db").display());
    let memory = FileMemory::open(directory.path().join("marks")).unwrap();
    let (url, written) = service(FenceLayer::new(memory, protected)).await;
    let url = format!("{url}/orders/42");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process_that_is_paused", "--nocapture", "--test-threads=1"])
        .env("LEASEHOLD_TEST_CHILD", format!("{store} {url}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let (tell, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
    });
    let mut line = async |start: &str| loop {
        let printed = tokio::time::timeout(Duration::from_secs(60), receiver.recv()).await;
        let printed = printed.expect("the child prints nothing").expect("the child ended");
        if let Some((_, rest)) = printed.split_once(start) {
            return rest.to_owned();
        }
    };
    assert_eq!(line("wrote ").await, "200 OK");
    // SAFETY: a plain kill of a child that was not waited for yet.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let locks = leasehold::connect(&store).await.unwrap();
    let guard = locks.mutex("orders/42").lock_timeout(Duration::from_secs(60)).await.unwrap();
    let mut tokened = TokenLayer::new(&guard).unwrap().layer(client());
    let (status, _) = answer(tokened.call(request(&url, "parent")).await.unwrap()).await;
    assert_eq!(status, StatusCode::OK);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    // SAFETY: the same as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    let late = line("late ").await;
    let seen = format!("412 {} ", guard.token());
    assert!(late.starts_with(&seen), "{late}, expected {seen}");
    assert_eq!(line("later ").await, "Some(Lost)");
    assert!(child.wait().unwrap().success());
    assert_eq!(*written.lock().await, ["child", "parent"]);
}
