//! A lock service over HTTP: leasehold's locks for programs in any language.
//!
//! The service is the contract of [`Store`](leasehold_core::store::Store) over HTTP. It forwards
//! each call to the store behind it and keeps no state, so several servers can share one store, and
//! a server that crashes loses nothing. (A `file:` or `memory:` store is the exception: its claims
//! live in the server's process.) [`wire`](leasehold_http::wire) lists all requests.
//!
//! `leasehold serve` runs it. A program can also run it, or mount [`Service::router`] in a web
//! service of its own:
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use leasehold_server::{Access, Limits, Listener, Service, serve};
//!
//! let locks = leasehold::connect("memory:").await?;
//! let service = Service::new(locks, Access::open(), Limits::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
//! let shutdown = async { /* a signal of the operator */ };
//! serve(service, vec![Listener::Tcp(listener)], shutdown).await;
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # What a request can use
//! Every size and time is bounded by [`Limits`], and the quotas of an identity limit what all its
//! requests use together. A client that reads too slowly is disconnected.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod access;
mod claims;
mod events;
mod history;
mod history_file;
mod hold;
mod leased;
mod limits;
mod locks;
mod metrics;
mod openapi;
mod page;
mod problem;
mod recorded;
mod request;
mod requests;
mod router;
mod serve;
mod service;
mod stream;
mod tls;
mod usage;

pub use access::Access;
pub use limits::Limits;
pub use serve::{Listener, serve};
pub use service::Service;
pub use tls::Tls;
