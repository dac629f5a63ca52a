//! A fence at the door of an HTTP service, and the token in its clients' requests: `tower` layers.
//!
//! The client's [`TokenLayer`] adds the header `Fencing-Token` from a guard, and fails *before*
//! anything is sent once the guard is lost. The server's [`FenceLayer`] reads it, keeps the greatest
//! token of each resource in a [`TokenStorage`], and answers `412 Precondition Failed` to smaller ones,
//! with both tokens in the body:
//!
//! ```json
//! {"error":"stale token","resource":"orders/42","seen":1763722356000002,"offered":1763722356000001}
//! ```
//!
//! ```
//! # use leasehold::fence::http::{FenceLayer, Fenced, InMemory};
//! let fence = FenceLayer::new(InMemory::new(), |request| {
//!     // What is protected, and under which name; everything else passes.
//!     request.uri.path().strip_prefix("/orders/").map(|id| format!("orders/{id}"))
//! });
//! // axum::Router::new().route("/orders/{id}", put(write)).layer(fence)
//! # let _ = fence;
//! ```
//!
//! # What the door keeps out, and what it does not
//! The check at the door is atomic: of two requests, the one that comes to the memory second is
//! judged by the first. But the write comes *behind* the door. A request that was admitted can be
//! held up in the handler while a greater token is admitted, writes and is done; then it writes too.
//! So the door alone is a fence for handlers that take far less time than a lease, and no proof.
//!
//! **To close the gap, check again where the write is atomic.** The layer hands the admitted token
//! on as a request extension, [`Fenced`], which is itself a [`Fence`](leasehold_core::fence::Fence): give it to
//! `fence::sql::check` first thing in the handler's transaction, under the same
//! resource name. Then the door is only the early answer, and the transaction is the fence; if it
//! refuses, [`Fenced::refusal`] makes the same 412 of it. A service that writes to one SQL database
//! needs no memory at the door at all: [`PassOn`] only reads the header.
//!
//! Reads carry the token too (see [`fence`](leasehold_core::fence)): protect `GET` like `PUT` if what is written
//! depends on what was read.
//!
//! # The header
//! `Fencing-Token: 1763722356000001`: one header, decimal digits only, 1 to 2⁶³−1, no sign, no
//! leading zero. Anything else, and the header twice, is `400`. A missing one is `400` unless
//! [`allow_missing`](FenceLayer::allow_missing). A memory that fails is `503`: unknown is not a yes.
//! The token is no credential: who may write is for your authentication to say.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod file;
mod memory;
mod server;
#[cfg(feature = "sql")]
mod sql;
mod status;

use http::HeaderName;

pub use client::{TokenLayer, Tokened};
pub use file::FileMemory;
pub use memory::{InMemory, PassOn, TokenStorage};
pub use server::{FenceLayer, FenceService, Fenced};
#[cfg(feature = "sql")]
pub use sql::SqlMemory;
pub use status::status;

/// The header that carries the token.
pub const TOKEN_HEADER: HeaderName = HeaderName::from_static("fencing-token");
