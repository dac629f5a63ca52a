//! The client on stores in memory: what it does whatever the store. One program, so that its waits overlap.

mod common;

mod closing;
#[cfg(feature = "testing")]
mod election;
mod errors;
mod leases;
mod options;
mod processes;
mod releases;
#[cfg(feature = "testing")]
mod several;
mod tokens;
mod waiting;
