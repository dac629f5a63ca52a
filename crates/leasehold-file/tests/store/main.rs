//! All tests of the stores on files, in one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. The others share one of each kind (`testbed`).

mod conformance;
mod doctor;
mod file_sharing;
mod file_store;
