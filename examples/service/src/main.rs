//! A small bank as a web service. Any number of instances can run on one PostgreSQL. It shows the
//! parts of leasehold in one program. docs/guide/web-service.md walks through it.
//!
//! ```sh
//! DATABASE_URL=postgres://user@host/db LISTEN=127.0.0.1:8080 cargo run -p service
//! ```
//!
//! The locks are in the same database, or in any store named by `LOCKS_URL`, such as a lock service:
//! `LOCKS_URL=http://locks.example:8484/`.
//!
//! | request | shows |
//! |---|---|
//! | `POST /orders`, header `Idempotency-Key` | `once`: however often it is sent, it is done once |
//! | `POST /accounts/{id}/deposit?amount=7` | a lock as an extractor, and the fenced write |
//! | `POST /reports` | a semaphore: two at once on all machines, a third is refused |
//! | `GET /leader` | an election: one instance closes the books, another takes over |
//! | `GET /ready`, `GET /metrics` | endpoints for operators |

mod app;
mod bank;
mod error;
mod locked;

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use leasehold::{LockOptions, database};
use metrics_exporter_prometheus::PrometheusBuilder;
use sqlx::PgPool;
use tokio::signal;

use crate::app::App;
use crate::error::Reply;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Buckets of several instances can be added up. Quantiles cannot.
    let waits = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];
    let metrics = PrometheusBuilder::new().set_buckets(&waits)?.install_recorder()?;
    let url = std::env::var("DATABASE_URL")?;
    let mut options = LockOptions::default();
    options.lease = Duration::from_secs(5);
    // The database may start at the same time as this service.
    let patient = leasehold::builder().options(options).label("bank");
    let locks_url = std::env::var("LOCKS_URL").unwrap_or_else(|_| url.clone());
    let locks = patient.connect_timeout(Duration::from_secs(60)).connect(&locks_url).await?;
    let pool = PgPool::connect(&url).await?;
    database::install(&pool).await?;
    bank::install(&pool, &locks).await?;
    let app = App { books: locks.election("books"), pool, locks, metrics };

    let leading = tokio::spawn(bank::close_the_books(app.clone()));
    let router = Router::new()
        .route("/orders", post(bank::order))
        .route("/accounts/{id}/deposit", post(bank::deposit))
        .route("/reports", post(bank::report))
        .route("/leader", get(leader))
        .route("/ready", get(ready))
        .route("/metrics", get(async |State(app): State<App>| app.metrics.render()))
        .with_state(app.clone());
    let listen = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:0".into());
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on {}", listener.local_addr()?);
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    let end_requested = async move {
        tokio::select! { _ = terminate.recv() => {}, _ = signal::ctrl_c() => {} }
    };
    axum::serve(listener, router).with_graceful_shutdown(end_requested).await?;

    // All requests are done. The leader steps down, so that the next one need not wait for its
    // lease to expire.
    leading.abort();
    let _ = leading.await;
    app.locks.close_timeout(Duration::from_secs(5)).await?;
    app.pool.close().await;
    Ok(())
}

/// Returns whether requests can be served. Load balancers check this, and not whether the process
/// is alive.
async fn ready(State(app): State<App>) -> Reply<&'static str> {
    app.locks.ping(Duration::from_secs(1)).await?;
    sqlx::query("SELECT 1").execute(&app.pool).await?;
    Ok("ready\n")
}

async fn leader(State(app): State<App>) -> Result<String, StatusCode> {
    app.books.leads().map(|term| format!("{term}\n")).ok_or(StatusCode::NOT_FOUND)
}
