//! The client on stores in memory: what it does whatever the store. One program, so that its waits overlap.

mod common;

mod auto_traits;
mod closing;
mod conformance;
mod election;
mod errors;
mod leases;
mod memory;
mod mutants;
mod options;
mod processes;
mod queue_properties;
mod releases;
mod several;
mod tokens;
mod waiting;
