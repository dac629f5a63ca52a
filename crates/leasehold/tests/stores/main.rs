//! All tests that need a server, in one program, so that their waits overlap: most of what they do is
//! waiting, for leases to end and for servers to start.
//!
//! A server that a test breaks is its own; the others share one of each kind (crates/testbed).

mod common;
mod etcd_common;
mod review_common;
mod sql_common;
mod zookeeper_common;

mod conformance;
mod doctor;
mod etcd_cluster;
mod etcd_real_use;
mod etcd_review;
mod etcd_scenarios;
mod fence_etcd;
mod fence_http;
mod fence_redis;
mod fence_zookeeper;
mod redis_deployments;
mod redis_failover;
mod redis_foreign;
mod redis_input;
mod redis_real_use;
mod redis_review;
mod redis_server;
mod redlock;
mod redlock_conformance;
mod redlock_real_use;
mod redlock_review;
mod sql_postgres;
mod sql_real_use;
mod sql_review;
mod sql_servers;
mod sql_sqlite;
mod sql_statements;
mod sql_transactions;
mod sql_transactions_servers;
mod zookeeper_driver;
mod zookeeper_ensemble;
mod zookeeper_interop;
mod zookeeper_real_use;
mod zookeeper_review;
mod zookeeper_server;
