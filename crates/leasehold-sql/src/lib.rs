//! The SQLite, PostgreSQL and MySQL/MariaDB parts of `leasehold`: the [stores](store), a [fence],
//! and tools for the caller's own transactions.
//!
//! These tools are [`lock_in`](fn@lock_in), [`mod@once`] and [`versioned`]. Their tables are
//! described in [`database`]. Programs depend on `leasehold`, which includes all of this with its
//! features `sqlite`, `postgres` and `mysql`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod database;
pub mod fence;
pub mod lock_in;
pub mod once;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod store;
pub mod versioned;

pub use lock_in::{lock_in, lock_in_timeout, try_lock_in};
pub use once::once;
