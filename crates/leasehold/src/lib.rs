//! Locks for programs that run on more than one thread, process or machine.
#![forbid(unsafe_code)]

mod acquire;
mod background;
pub mod blocking;
mod claim;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod database;
mod error;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod fence;
mod guard;
mod keeper;
mod lease;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod lock_in;
mod locks;
mod mutex;
mod name;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod once;
mod options;
mod owner;
pub mod queue;
mod run;
mod rwlock;
mod semaphore;
pub mod store;
mod telemetry;
mod url;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod versioned;

pub use claim::{Claim, ClaimId, Holder, Kind, MAX_READERS, Token};
pub use clock::{Clock, Moment};
pub use error::{Error, ErrorKind, HolderInfo, LostReason, Result, StaleToken, StaleVersion};
pub use guard::{Guard, Watch};
pub use lease::{Deadline, State};
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use lock_in::{lock_in, lock_in_timeout, try_lock_in};
pub use locks::{Builder, Leasehold};
pub use mutex::Mutex;
pub use name::{MAX_NAME_BYTES, Name};
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use once::once;
pub use options::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE, MAX_LEASE, MIN_LEASE};
pub use owner::Owner;
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
pub use url::BUILT_IN;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
