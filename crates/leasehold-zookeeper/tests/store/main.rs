//! All tests of the stores on ZooKeeper, in one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. The others share one of each kind (`testbed`).

mod conformance;
mod doctor;
mod fence_zookeeper;
mod power;
mod zookeeper_access;
mod zookeeper_common;
mod zookeeper_driver;
mod zookeeper_foreign;
mod zookeeper_interop;
mod zookeeper_leases;
mod zookeeper_members;
mod zookeeper_queue;
mod zookeeper_requests;
mod zookeeper_waiting;
