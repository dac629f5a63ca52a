//! A fence for HTTP services, and fencing tokens in the requests of their clients, as `tower`
//! layers.
//!
//! The client's [`TokenLayer`] adds the header `Fencing-Token` from a guard, and returns an error
//! *before* anything is sent once the lock is lost. The server's [`FenceLayer`] reads the header
//! and keeps the highest token seen for each resource in a [`TokenStorage`]. It answers `412
//! Precondition Failed` to smaller tokens, with both tokens in the body:
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
//! # What the layer rejects, and what it does not
//! The check in the layer is atomic. Of two requests, the one that reaches the token storage second
//! is compared with the first. But the write happens *after* the check. A request that was accepted
//! can be delayed in the handler while another request with a larger token is accepted and writes.
//! Then the delayed request writes too. So the layer alone is a fence only for handlers that take
//! far less time than a lease, and even then it guarantees nothing.
//!
//! **To close the gap, check again where the write is atomic.** The layer passes the accepted token
//! on as a request extension, [`Fenced`], which is itself a
//! [`Fence`](leasehold_core::fence::Fence). Pass it to `fence::sql::check` as the first step of the
//! handler's transaction, with the same resource name. Then the layer is only an early answer, and
//! the transaction is the fence. If the transaction rejects the token, [`Fenced::refusal`] returns
//! the same 412 response. A service that writes to one SQL database needs no token storage in the
//! layer: [`PassOn`] only reads the header.
//!
//! Reads carry the token too (see [`fence`](leasehold_core::fence)): protect `GET` like `PUT` if
//! what is written depends on what was read.
//!
//! # The header
//! `Fencing-Token: 1763722356000001` is one header with decimal digits only, from 1 to 2⁶³−1,
//! without a sign or a leading zero. Anything else, and a repeated header, is answered with `400`.
//! So is a missing header, unless [`allow_missing`](FenceLayer::allow_missing) is set. If the token
//! storage fails, the answer is `503`, because the token could not be checked. The token is not a
//! credential. Your authentication decides which clients may write.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod file;
mod memory;
mod server;
#[cfg(feature = "sql")]
mod sql;
mod status;
#[cfg(feature = "store")]
#[cfg_attr(docsrs, doc(cfg(feature = "store")))]
pub mod store;
#[cfg(feature = "wire")]
#[cfg_attr(docsrs, doc(cfg(feature = "wire")))]
pub mod wire;

use http::HeaderName;

pub use client::{TokenLayer, Tokened};
pub use file::FileMemory;
pub use memory::{InMemory, PassOn, TokenStorage};
pub use server::{FenceLayer, FenceService, Fenced};
#[cfg(feature = "sql")]
pub use sql::SqlMemory;
pub use status::status;

/// The name of the header with the token.
pub const TOKEN_HEADER: HeaderName = HeaderName::from_static("fencing-token");
