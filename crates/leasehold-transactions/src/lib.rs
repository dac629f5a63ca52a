//! Tools of `leasehold` for the caller's own SQL transactions: [`lock_in`](fn@lock_in),
//! [`mod@once`], [`versioned`] and a [fence].
//!
//! Their tables are described in [`database`]. Programs depend on `leasehold`, which includes all
//! of this with its feature `sql`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod database;
pub mod fence;
pub mod lock_in;
pub mod once;
pub mod versioned;

pub use lock_in::{lock_in, lock_in_timeout, try_lock_in};
pub use once::once;
