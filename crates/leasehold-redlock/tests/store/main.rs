//! All tests of the Redlock store. They are one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. All other tests share one deployment (`testbed`).

mod doctor;
mod redlock_access;
mod redlock_common;
mod redlock_conformance;
mod redlock_foreign;
mod redlock_leases;
mod redlock_members;
mod redlock_queue;
mod redlock_requests;
