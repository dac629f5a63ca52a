//! All tests that need a server, in one program, so that their waits overlap: most of what they do is
//! waiting, for leases to end and for servers to start.
//!
//! A server that a test breaks is its own; the others share one of each kind (crates/testbed).
//!
//! A store's tests lie by their subject: `…_queue` (who waits, and who is told of a turn), `…_requests` (what
//! it costs, and what becomes of it), `…_leases` (what is kept and what is lost), `…_foreign` (what is others';
//! of SQL: `sql_tables`), `…_access` (who is let in, and what is refused), `…_faults` (one server that goes
//! wrong), `…_members` (several servers that fail; Redis's are three: `failover`, `cluster` and `replicas`).
//! `…_common` is what a store's tests share.

mod common;
mod etcd_common;
mod pushes;
mod redis_common;
mod redlock_common;
mod sql_common;
mod zookeeper_common;

mod conformance;
mod doctor;
mod etcd_access;
mod etcd_foreign;
mod etcd_leases;
mod etcd_members;
mod etcd_queue;
mod etcd_requests;
mod fence_cells;
mod fence_etcd;
mod fence_http;
mod fence_redis;
mod fence_zookeeper;
mod memcached_leases;
mod memcached_requests;
mod memcached_servers;
mod nats_access;
mod nats_common;
mod nats_leases;
mod nats_members;
mod nats_queue;
mod objects_access;
mod objects_faults;
mod objects_requests;
mod redis_access;
mod redis_cluster;
mod redis_deployments;
mod redis_failover;
mod redis_faults;
mod redis_foreign;
mod redis_leases;
mod redis_queue;
mod redis_replicas;
mod redis_requests;
mod redlock_access;
mod redlock_conformance;
mod redlock_foreign;
mod redlock_leases;
mod redlock_members;
mod redlock_queue;
mod redlock_requests;
mod sql_access;
mod sql_connections;
mod sql_faults;
mod sql_leases;
mod sql_pool;
mod sql_postgres;
mod sql_queue;
mod sql_requests;
mod sql_sqlite;
mod sql_statements;
mod sql_tables;
mod sql_transactions;
mod sql_transactions_levels;
mod sql_transactions_servers;
mod zookeeper_access;
mod zookeeper_driver;
mod zookeeper_followed;
mod zookeeper_foreign;
mod zookeeper_interop;
mod zookeeper_leases;
mod zookeeper_members;
mod zookeeper_queue;
mod zookeeper_requests;
