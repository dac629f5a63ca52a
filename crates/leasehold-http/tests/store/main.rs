//! All tests of the store `http:`, in one program, so that their waits overlap.

mod common;
mod conformance;
mod faults;
mod proxy;
mod tls;
