//! `leasehold` in SQLite, PostgreSQL and MySQL/MariaDB: the [stores](store), a [fence], and what
//! works inside the caller's own transactions: [`lock_in`](fn@lock_in), [`mod@once`], [`versioned`], whose
//! tables are those of [`database`]. Programs depend on `leasehold`, which has all of this by its
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
