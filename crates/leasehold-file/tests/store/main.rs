//! All tests of the stores on files. They are one program, so that their waits overlap.
//!
//! The conformance suite's cases share one directory. All other tests create their own.

mod conformance;
mod doctor;
mod file_sharing;
mod file_store;
