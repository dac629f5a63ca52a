//! The `leasehold` command.
mod torture;
fn main() {}
