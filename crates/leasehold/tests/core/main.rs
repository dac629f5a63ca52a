//! Tests of the client on stores in memory, for behavior that is the same with every store. They
//! are one program, so that their waits overlap.

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
