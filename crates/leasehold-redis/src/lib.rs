//! `leasehold` in Redis and Valkey: a store on one server, Sentinel or Cluster ([`mod@redis`]), and a
//! [fence].
//!
//! Programs depend on `leasehold`, which includes all of this with its feature `redis`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod fence;
pub mod redis;
#[cfg(test)]
mod values;
