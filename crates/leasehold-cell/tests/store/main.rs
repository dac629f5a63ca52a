//! All tests of the stores on memcached, NATS and object stores. They are one program, so that
//! their waits overlap.
//!
//! A test that breaks a server starts its own. The others share one server of each kind
//! (`testbed`).

mod addresses;
mod conformance;
mod fence_cells;
mod memcached_leases;
mod memcached_requests;
mod memcached_servers;
mod nats_access;
mod nats_leases;
mod nats_members;
mod nats_queue;
mod objects_access;
mod objects_faults;
mod objects_front;
mod objects_requests;
mod power;
