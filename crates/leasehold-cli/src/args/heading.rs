//! The groups of options in the help.

pub(super) const LOCK: &str = "Lock";
pub(super) const WAITING: &str = "Waiting";
pub(super) const LEASE: &str = "Lease";
pub(super) const COMMAND: &str = "Command";
pub(super) const STORE: &str = "Store";
pub(super) const OUTPUT: &str = "Output";
