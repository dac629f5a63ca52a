//! `leasehold` in Redis and Valkey.
//!
//! The crate has a store on one server, Sentinel or Cluster ([`mod@redis`]), a store on a majority
//! of independent servers (`redlock`), and a [fence]. Programs depend on `leasehold`, which
//! includes all of this with its features `redis` and `redlock`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod fence;
pub mod redis;
#[cfg(feature = "redlock")]
pub mod redlock;
#[cfg(test)]
mod values;
