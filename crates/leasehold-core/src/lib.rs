//! The core of `leasehold`: the client, its locks, the contract of its [stores](store), and the
//! in-memory store.
//!
//! Programs depend on `leasehold`, which re-exports this crate. Stores depend on this crate; see
//! [`store::Store`] and [`kit`].
//!
//! Features: `serde` for the types that stores transmit, `metrics` and `tracing` for [`telemetry`].
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
pub mod kit;
mod lock;
pub mod queue;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod types;
mod util;

pub use client::lease::{Deadline, State};
pub use client::telemetry;
pub use lock::builder::Builder;
pub use lock::client::{Client, IntoLockRequest};
pub use lock::election::{Election, Observer};
pub use lock::events::{LockEvent, LockEventKind, LockEvents};
pub use lock::guard::{ConvertError, Guard, MutexGuard, Permit, ReadGuard, WriteGuard, mode};
pub use lock::hold::{Hold, Released};
pub use lock::mutex::Mutex;
pub use lock::once_per::OncePer;
pub use lock::owner::Owner;
pub use lock::request::LockRequest;
pub use lock::rwlock::RwLock;
pub use lock::semaphore::Semaphore;
pub use lock::several::MultiGuard;
pub use lock::wait_chain::{WaitChain, WaitsFor};
pub use lock::watch::Watch;
pub use lock::{blocking, fence};
pub use store::registry::{Opener, Opening, Registry};
pub use types::claim::{Claim, ClaimId, Kind, MAX_READERS};
pub use types::error::{
    Error, ErrorKind, HolderInfo, LostReason, Result, StaleToken, StaleVersion,
};
pub use types::holder::Holder;
pub use types::limits::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE, MAX_LEASE, MIN_LEASE};
pub use types::name::{MAX_NAME_BYTES, Name};
pub use types::options::LockOptions;
pub use types::sequencer::Sequencer;
pub use types::token::{FencingToken, Token};
pub use types::{doctor, sequencer};
pub use util::clock::{Clock, Moment};
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use util::world::{Process, World};
