//! The SQLite, PostgreSQL and MySQL/MariaDB [stores](store) of `leasehold`.
//!
//! Programs depend on `leasehold`, which includes all of this with its features `sqlite`,
//! `postgres` and `mysql`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[doc(hidden)]
pub mod codes;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod store;
