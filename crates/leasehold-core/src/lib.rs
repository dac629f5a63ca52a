//! The core of `leasehold`: the client, its locks, the contract of its [stores](store), and the
//! in-memory store.
//!
//! Programs depend on `leasehold`, which re-exports this crate. Stores depend on this crate; see
//! [`store::Store`] and [`kit`].
//!
//! Features: `serde` for the types that stores transmit; `metrics` and `tracing` for [`telemetry`].
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod base;
mod client;
pub mod kit;
mod lock;
pub mod queue;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod words;

pub use base::clock::{Clock, Moment};
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use base::world::{Process, World};
pub use client::lease::{Deadline, State};
pub use client::telemetry;
pub use lock::builder::Builder;
pub use lock::changes::{Became, Change, Changes};
pub use lock::election::{Election, Observer};
pub use lock::guard::{Guard, Released, Watch};
pub use lock::leasehold::{IntoWanted, Leasehold};
pub use lock::mutex::Mutex;
pub use lock::once_per::OncePer;
pub use lock::owner::Owner;
pub use lock::rwlock::RwLock;
pub use lock::semaphore::Semaphore;
pub use lock::several::Guards;
pub use lock::wanted::Wanted;
pub use lock::{blocking, fence};
pub use store::registry::{Opener, Opening, Registry};
pub use words::claim::{Claim, ClaimId, Kind, MAX_READERS};
pub use words::error::{
    Error, ErrorKind, HolderInfo, LostReason, Result, StaleToken, StaleVersion,
};
pub use words::holder::Holder;
pub use words::limits::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE, MAX_LEASE, MIN_LEASE};
pub use words::name::{MAX_NAME_BYTES, Name};
pub use words::options::LockOptions;
pub use words::sequencer::Sequencer;
pub use words::token::Token;
pub use words::{doctor, sequencer};
