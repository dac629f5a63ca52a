//! The core of `leasehold`, which is what programs depend on: a client, its locks, the contract of
//! its [stores](store), and the store in memory. Stores depend on this package: see [`store::Store`]
//! and [`kit`].
//!
//! Features: `serde` for what crosses a store's wire; `metrics` and `tracing` for [`telemetry`].
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod background;
pub mod blocking;
mod claim;
mod clock;
pub mod doctor;
mod error;
pub mod fence;
mod guard;
mod keeper;
pub mod kit;
mod lease;
mod locked;
mod locks;
mod mutex;
mod name;
mod options;
mod owner;
mod percent;
pub mod queue;
mod registry;
mod run;
mod rwlock;
mod semaphore;
pub mod sequencer;
pub mod store;
pub mod telemetry;
mod url;
mod world;

pub use claim::{Claim, ClaimId, Holder, Kind, MAX_READERS, Token};
pub use clock::{Clock, Moment};
pub use error::{Error, ErrorKind, HolderInfo, LostReason, Result, StaleToken, StaleVersion};
pub use guard::{Guard, Released, Watch};
pub use lease::{Deadline, State};
pub use locks::{Builder, Leasehold};
pub use mutex::Mutex;
pub use name::{MAX_NAME_BYTES, Name};
pub use options::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE, MAX_LEASE, MIN_LEASE};
pub use owner::Owner;
pub use registry::{Opener, Opening, Registry};
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
pub use sequencer::Sequencer;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use world::{Process, World};
