//! All tests of the stores on Redis and Valkey. They are one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. All other tests share one server of each kind
//! (`testbed`).

mod conformance;
mod doctor;
mod fence_redis;
mod power;
mod redis_access;
mod redis_cluster;
mod redis_common;
mod redis_deployments;
mod redis_failover;
mod redis_faults;
mod redis_foreign;
mod redis_leases;
mod redis_queue;
mod redis_replicas;
mod redis_requests;
