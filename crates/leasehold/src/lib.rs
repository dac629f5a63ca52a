//! Locks for programs that run on more than one thread, process or machine.
#![forbid(unsafe_code)]

mod acquire;
mod background;
pub mod blocking;
mod claim;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod guard;
mod keeper;
mod lease;
mod locks;
mod mutex;
mod name;
mod options;
mod owner;
pub mod queue;
mod run;
mod rwlock;
mod semaphore;
pub mod store;
mod telemetry;
mod url;

pub use claim::{Claim, ClaimId, Holder, Kind, MAX_READERS, Token};
pub use clock::{Clock, Moment};
pub use error::{Error, ErrorKind, HolderInfo, LostReason, Result};
pub use guard::{Guard, Watch};
pub use lease::{Deadline, State};
pub use locks::{Builder, Leasehold};
pub use mutex::Mutex;
pub use name::{MAX_NAME_BYTES, Name};
pub use options::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE, MAX_LEASE, MIN_LEASE};
pub use owner::Owner;
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
pub use url::BUILT_IN;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
