//! Locks for programs that run on more than one thread, process or machine.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let locks = leasehold::Leasehold::connect("memory:").await?; // or file:, …
//! let total = locks
//!     .mutex("order:42")
//!     .run(|guard| async move {
//!         // Here the lock is held, and renewed. If it is lost, this future is dropped.
//!         // Hand `guard.token()` to whatever the lock protects.
//!         guard.token().get()
//!     })
//!     .await?;
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! **A lock is a queue.** Whoever asks joins at the back; the front that fits holds ([`queue`]). So
//! mutex, read-write lock and semaphore are one thing with three capacities, all are first come,
//! first served, and the number drawn on joining is the *fencing token*: a resource that refuses
//! smaller ones than it has seen cannot be fooled by a holder that was paused.
//!
//! - [`Leasehold`] is a client of one store; [`Mutex`], [`RwLock`] and [`Semaphore`] are its locks.
//! - [`Guard`] means "held", and never claims more than it knows: `Held`, `AtRisk`, `Lost`
//!   ([`State`]).
//! - [`Owner`] may re-enter; [`blocking`] is the same without a runtime.
//! - [`Error`] is one line and a [kind](ErrorKind); [`is_retryable`](Error::is_retryable) is what a
//!   loop goes on for.
//! - [`store`] is what keeps the queue. [`Guarantees`](store::Guarantees) says what a store promises;
//!   what it cannot do is [`Unsupported`](ErrorKind::Unsupported), never emulated. [`doctor`] says
//!   what is wrong with a store as it is set up ([`Leasehold::diagnose`]).
//! - [`telemetry`] lists metrics and events.
//!
//! # Beside the lock
//! | for | is | feature |
//! |---|---|---|
//! | a resource that refuses late writers | [`fence`]: `fence::sql`, `fence::redis`, `fence::http` | of the database; `http` |
//! | a lock that a transaction of yours holds until it ends | `lock_in`, `try_lock_in`, `lock_in_timeout` | `sqlite`, `postgres`, `mysql` |
//! | noticing that somebody else wrote meanwhile | `versioned` | likewise |
//! | something that happens once, however often it is asked for | `once` | likewise |
//! | their tables | `database` | likewise |
//! | a hold as a string that others check | [`sequencer`] | |
//! | a store of your own | [`store::Store`], and the suite `conformance` | `conformance` |
//!
//! # Stores
//! A URL names one: see [`Leasehold::connect`]. What stands behind its `?` differs: `pool`,
//! `prefix` and `schema` of the SQL stores, `prefix`, `replicas`, `replicas_ms` and
//! `replicas_short` of `redis:`, `create` and `naming` of `zookeeper:`, `ca` where there is TLS,
//! `token_offset` of all. The repository's `docs/stores` has all of them, and what each store
//! needs.
//!
//! # Features
//! `file` (default), `sqlite`, `postgres`, `mysql`, `redis`, `redlock`, `zookeeper`, `etcd`: the
//! stores. `http`: `fence::http`. `serde`: what crosses a store's wire. `metrics`, `tracing`: see
//! [`telemetry`]. `conformance`: the suite that every store passes, for your own store too.
//!
//! Works in any async executor, and with none: renewals run on a thread of the client's own.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod background;
pub mod blocking;
mod claim;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod database;
pub mod doctor;
mod error;
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
mod percent;
pub mod queue;
mod run;
mod rwlock;
mod semaphore;
pub mod sequencer;
pub mod store;
pub mod telemetry;
mod url;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod versioned;

pub use claim::{Claim, ClaimId, Holder, Kind, MAX_READERS, Token};
pub use clock::{Clock, Moment};
pub use error::{Error, ErrorKind, HolderInfo, LostReason, Result, StaleToken, StaleVersion};
pub use guard::{Guard, Released, Watch};
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
pub use sequencer::Sequencer;
pub use url::BUILT_IN;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
