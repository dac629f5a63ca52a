//! `leasehold` in Redis and Valkey: the store of one server, Sentinel or Cluster ([`mod@redis`]), the
//! one on a majority of independent servers (`redlock`), and a [fence]. Programs depend on
//! `leasehold`, which has all of this by its features `redis` and `redlock`.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod fence;
pub mod redis;
#[cfg(feature = "redlock")]
pub mod redlock;
#[cfg(test)]
mod values;
