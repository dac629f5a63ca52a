//! What each dialect says of the errors that all of them have.
#![allow(dead_code, reason = "each dialect has some of them")]

use leasehold_core::ErrorKind;
use leasehold_core::ErrorKind::{Config, Conflict, Contended, Denied, Full, Timeout, Unreachable};

pub(super) type Known = Option<(ErrorKind, &'static str)>;

pub(crate) const DEADLOCK: Known =
    Some((Conflict, "a deadlock was broken: roll back and run the transaction again"));
pub(crate) const SERIALIZATION: Known = Some((
    Conflict,
    "another transaction changed what this one has seen: roll back and run it again",
));
pub(crate) const FAILED_BEFORE: Known =
    Some((Conflict, "an earlier statement of this transaction failed: roll back and run it again"));
pub(crate) const WAITED: Known =
    Some((Timeout, "another transaction holds it and did not finish in time: retry later"));
pub(crate) const BUSY: Known = Some((Contended, "another transaction holds it: retry later"));
pub(crate) const NO_TABLE: Known =
    Some((Config, "a table is missing: run leasehold::database::install, or what schema() prints"));
pub(crate) const DENIED: Known =
    Some((Denied, "the database refuses this user; grant SELECT, INSERT, UPDATE and DELETE"));
pub(crate) const READ_ONLY: Known =
    Some((Denied, "the database or the transaction is read-only; use the primary"));
pub(crate) const FULL: Known = Some((Full, "the database has no room left"));
pub(crate) const GONE: Known =
    Some((Unreachable, "the database ended the connection; run the transaction again"));
