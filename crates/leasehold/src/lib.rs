//! Locks for programs that run on more than one thread, process or machine.
#![forbid(unsafe_code)]

pub mod claim;
pub mod clock;
mod error;
mod name;
mod options;
pub mod queue;
pub mod store;

pub use claim::{Claim, ClaimId, Holder, Kind, MAX_READERS, Token};
pub use error::{Error, ErrorKind, HolderInfo, LostReason, Result};
pub use name::{MAX_NAME_BYTES, Name};
