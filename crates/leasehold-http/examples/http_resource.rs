//! A resource behind HTTP that rejects late writers, with `fence::http` on both sides.
//!
//! ```sh
//! cargo run -p leasehold-http --example http_resource
//! ```
//!
//! A small axum service stores documents. Its clients lock a document before they write it, and
//! their requests carry the token of the lock. One client is delayed (here it "pauses" after its
//! lease has expired) and writes too late. The service answers 412, and nothing is overwritten.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::get;
use http::Request;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use leasehold::Token;
use leasehold::fence::http::{FenceLayer, FileMemory, TOKEN_HEADER, TokenLayer};
use tower_layer::Layer;
use tower_service::Service;

type Documents = Arc<Mutex<HashMap<String, String>>>;
type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn read(State(all): State<Documents>, Path(id): Path<String>) -> String {
    all.lock().expect("no panic under it").get(&id).cloned().unwrap_or_default()
}

async fn write(State(all): State<Documents>, Path(id): Path<String>, text: String) {
    // Nothing is awaited between the fence layer and this line, so no other request can run in
    // between on this thread. A handler that uses a database checks the token again there. See the
    // module's documentation.
    all.lock().expect("no panic under it").insert(id, text);
}

async fn serve(marks: std::path::PathBuf) -> Result<String, Failure> {
    // Reads need no token here. A client that reads in order to write would need one for its read
    // too.
    let fence = FenceLayer::new(FileMemory::open(marks)?, |request| {
        (request.method == http::Method::PUT).then(|| request.uri.path().to_owned())
    });
    let router = Router::new()
        .route("/documents/{id}", get(read).put(write))
        .layer(fence)
        .with_state(Documents::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/documents/plan", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(url)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let own = std::env::temp_dir().join(format!("leasehold-example-{}", std::process::id()));
    std::fs::create_dir_all(&own)?;
    let url = serve(own.join("marks")).await?;
    let locks = leasehold::connect("memory:").await?;
    let http = Client::builder(TokioExecutor::new()).build_http();
    let put = |text: &'static str, token: Option<Token>| {
        let request = Request::put(&url);
        let request = match token {
            Some(token) => request.header(TOKEN_HEADER, token.get()),
            None => request,
        };
        request.body(Body::from(text))
    };

    let short = Duration::from_secs(5);
    let held_up = locks.mutex("document:plan").lease(short).no_renewal().lock().await?;
    let mut client = TokenLayer::new(&held_up)?.layer(http.clone());
    let answer = client.call(put("draft", None)?).await?;
    println!("the first writes under token {}: {}", held_up.token(), answer.status());
    println!("… and is held up; its lock is lost: {}", held_up.lost().await);

    let next = locks.mutex("document:plan").lock().await?;
    let mut other = TokenLayer::new(&next)?.layer(http.clone());
    let answer = other.call(put("final", None)?).await?;
    println!("the next writes under token {}: {}", next.token(), answer.status());

    // The client's own layer keeps the first client from sending more requests …
    let refused = client.call(put("late", None)?).await.expect_err("it lost its lock");
    println!("the first wakes, and sends nothing: {refused}");
    // … but a request may already be under way. The service rejects it.
    let answer = http.request(put("late", Some(held_up.grant()))?).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    println!("what it had sent before: {status}: {}", String::from_utf8_lossy(&body));
    assert_eq!(status, http::StatusCode::PRECONDITION_FAILED);

    let answer = http.request(Request::get(&url).body(Body::empty())?).await?;
    let text = answer.into_body().collect().await?.to_bytes();
    println!("the document: {}", String::from_utf8_lossy(&text));
    assert_eq!(text, "final");
    std::fs::remove_dir_all(own)?;
    Ok(())
}
