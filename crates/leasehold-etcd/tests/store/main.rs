//! All tests of the stores on etcd, in one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. The others share one of each kind (`testbed`).

mod conformance;
mod doctor;
mod etcd_access;
mod etcd_common;
mod etcd_foreign;
mod etcd_leases;
mod etcd_members;
mod etcd_queue;
mod etcd_requests;
mod fence_etcd;
mod power;
