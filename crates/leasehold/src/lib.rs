//! Distributed locks with fencing tokens, on the store you already run.
//!
//! leasehold provides mutexes, read-write locks, semaphores and leader election between threads,
//! processes and machines. The locks are kept in a *store*: a local directory, PostgreSQL, MySQL,
//! SQLite, Redis, etcd, ZooKeeper, NATS, memcached or a bucket of S3, Google Cloud Storage or
//! Azure. leasehold needs no server of its own.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let locks = leasehold::connect("memory:").await?; // or file:, …
//! let total = locks
//!     .mutex("order:42")
//!     .run(|guard| async move {
//!         // The lock is held and renewed here. If it is lost, this future is dropped.
//!         // Pass `guard.token()` to the resource that the lock protects.
//!         guard.token().get()
//!     })
//!     .await?;
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! **Every lock is a FIFO queue.** The claims at the front that fit the lock's capacity hold it
//! ([`queue`](store::queue)), so a mutex, a read-write lock and a semaphore differ only in their
//! capacity. Each holder gets a *fencing token*, a number that grows with every new holder. With
//! it, the resource behind the lock can reject writes from a holder that has already lost the lock.
//!
//! **Holds are leases.** A lease is renewed in the background, and expires if its holder crashes.
//!
//! # Locks
//! [`connect`] returns a [`Client`], a client of one store. The client creates [`Mutex`],
//! [`RwLock`] and [`Semaphore`]. [`lock_all`](Client::lock_all) acquires several locks together.
//! [`Election`] elects a leader. [`once_per`](Mutex::once_per) runs a job once per period on one of
//! many machines. An [`Owner`] can re-acquire a lock that it already holds. [`blocking`] has the
//! same locks for code without an async runtime. [`LockOptions`] are the options of an acquisition.
//! An [`Error`] has a [kind](ErrorKind) and often a hint; retry while
//! [`is_retryable`](Error::is_retryable) is `true`.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let locks = leasehold::connect("memory:").await?;
//! use std::time::Duration;
//! let permit = locks.semaphore("convert", 3).lease(Duration::from_secs(30)).acquire().await?;
//! let writer = locks.rwlock("config").write_timeout(Duration::from_secs(5)).await?;
//! let both = locks.lock_all(["stock:a", "stock:b"]).await?; // all callers acquire them in the same order
//! # drop((permit, writer, both)); Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Holds
//! A [`MutexGuard`] is a held lock. A thread of the client renews the lock. The guard counts as
//! held only while that is certain. Its [`State`] is `Held`, `AtRisk`, `Lost` or `Released`.
//! [`run`](Mutex::run) drops your work when the lock is lost. A [`Watch`] reports the state to
//! other tasks. A [`sequencer`] is the hold as a string that others can check.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # use std::time::Duration;
//! # let locks = leasehold::connect("memory:").await?;
//! let guard = locks.mutex("order:42").lock().await?;
//! guard.ensure(Duration::from_secs(2))?; // before a step that cannot be undone
//! let mut watch = guard.watch();
//! watch.wait_until_held().await?; // waits while the hold is at risk
//! guard.release().await?; // or drop it
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Fences
//! A lock cannot stop a request that a paused holder has already sent. The resource can: it rejects
//! tokens smaller than the highest token seen. [`fence`] provides such fences for SQL, Redis, HTTP,
//! objects, etcd and ZooKeeper, and explains how to write your own.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let locks = leasehold::connect("memory:").await?;
//! let late = locks.mutex("a").lock().await?.token(); // released immediately
//! let next = locks.mutex("a").lock().await?.token();
//! let mut seen = late; // the highest token seen by the resource
//! for shown in [next, late] {
//!     let refused = if shown < seen { Some(leasehold::Error::stale_fence(seen, shown)) } else { None };
//!     assert_eq!(refused.is_some(), shown == late);
//!     seen = seen.max(shown);
//! }
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Transactions
//! For data in a SQL database, inside your own transaction and with any driver (`database`):
//!
//! - `lock_in` holds a lock until the transaction ends.
//! - `versioned` detects that another client has written in the meantime.
//! - `once` executes a request once, however often it is sent (idempotency keys).
//! - `fence::sql` rejects stale holders of a lock in another store.
//!
//! These functions need a feature for the driver: `sqlite`, `postgres` or `mysql` (`sqlx` 0.9),
//! `sqlx-08-postgres`, `sqlx-08-mysql`, `tokio-postgres`, `sea-orm`, or `sql` with a driver of your
//! own.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use leasehold::{database::{self, error, sqlx}, lock_in, once};
//! # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
//! # let pool = options.connect("sqlite::memory:").await.map_err(error)?;
//! database::install(&pool).await?; // at start-up
//! let mut tx = pool.begin().await.map_err(error)?;
//! lock_in(&mut tx, "account:7").await?;
//! let paid = once("payment:8a1f").run_in(&mut tx, async |_tx| {
//!     // read, decide, write
//!     Ok::<_, leasehold::Error>("paid 100".to_owned())
//! });
//! assert!(paid.await?.is_first());
//! tx.commit().await.map_err(error)?;
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Operations
//! [`Guarantees`](store::Guarantees) state what a store guarantees, and
//! [`require`](Builder::require) refuses a store that guarantees less. A store never emulates what
//! it cannot do, but returns [`Unsupported`](ErrorKind::Unsupported).
//! [`diagnose`](Client::diagnose) checks the configuration of a store ([`doctor`]).
//! [`ping`](Client::ping) is for readiness probes. [`telemetry`] lists metrics and events.
//! [`inspect`](Client::inspect), [`list`](Client::list), [`watch`](Client::watch) and
//! [`evict`](Client::evict) do the same as the commands of `leasehold`.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # use std::time::Duration;
//! # let locks = leasehold::connect("memory:").await?;
//! locks.ping(Duration::from_secs(2)).await?;
//! for lock in locks.list("order:").await? {
//!     println!("{}: {} hold it", lock.name, lock.holders().count());
//! }
//! locks.close().await?; // releases all locks
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! To write a store of your own, implement [`store::Store`] with the help of [`store::kit`], and
//! check it with the suite `conformance`. `examples/own-store` is an example, and
//! `examples/own-cell` is one for a service that only has compare-and-set. `testing` is a store for
//! tests of your program.
//!
//! # Stores
//! A URL names the store; see [`connect`]. The parameters after its `?` depend on the store:
//!
//! - SQL stores: `pool`, `prefix`, `schema`.
//! - `redis:`: `prefix`, `replicas`, `replicas_ms`, `replicas_short`.
//! - `zookeeper:`: `create`, `naming`.
//! - `memcached:`, `nats:`, `s3:`: `session_ms`, `poll_ms`.
//! - `http:`: `prefix`, `token_file`.
//! - Stores with TLS: `ca`.
//! - All stores except `file:` and `memory:`: `token_offset`.
//!
//! `docs/stores` in the repository lists all of them, and what each store needs.
//!
//! # Features
//! - Stores: `file` (default), `sqlite`, `postgres`, `mysql`, `redis`, `redlock`, `zookeeper`,
//!   `etcd`, `memcached`, `nats`, `s3`, `gs`, `az`, `http-store`. As in `object_store`, `aws`, `gcp`
//!   and `azure` are other names of `s3`, `gs` and `az`.
//! - `tls`: encrypted connections to the servers of these stores. Without it, a URL that requires
//!   TLS is rejected.
//! - Transactions without a store: `sql`, `sqlx-08-postgres`, `sqlx-08-mysql`, `tokio-postgres`,
//!   `sea-orm`.
//! - `http`: `fence::http`.
//! - `serde`: serialization of options, names, tokens and the types that stores transmit.
//! - `metrics`, `tracing`: see [`telemetry`].
//! - `testing`: a store for tests of your program.
//! - `conformance`: the suite that every store must pass, including your own.
//!
//! leasehold works in any async executor, and without one, because renewals run on a thread of the
//! client.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod fence;
mod registry;

#[cfg(feature = "conformance")]
#[doc(inline)]
pub use leasehold_conformance as conformance;
#[cfg(feature = "conformance")]
pub use leasehold_conformance::conformance_suite;
#[cfg(feature = "testing")]
#[doc(inline)]
pub use leasehold_core::testing;
#[doc(inline)]
pub use leasehold_core::{
    Builder, Client, Clock, ConvertError, DEFAULT_LEASE, DEFAULT_WAITER_LEASE, Deadline, Election,
    Error, ErrorKind, FencingToken, Guard, Hold, Holder, HolderInfo, IntoLockRequest, Kind,
    LockEvent, LockEventKind, LockEvents, LockOptions, LockRequest, LostReason, MAX_LEASE,
    MAX_NAME_BYTES, MAX_READERS, MIN_LEASE, MultiGuard, Mutex, MutexGuard, Name, Observer, OncePer,
    Owner, Permit, ReadGuard, Released, Result, RwLock, Semaphore, Sequencer, StaleToken,
    StaleVersion, State, Token, WaitChain, WaitsFor, Watch, WriteGuard, doctor, mode, sequencer,
    telemetry,
};
#[cfg(feature = "etcd")]
pub use leasehold_etcd::EtcdGuardExt;
#[cfg(feature = "sql")]
#[doc(inline)]
pub use leasehold_transactions::{
    database, lock_in, lock_in_timeout, once, try_lock_in, versioned,
};
#[cfg(feature = "zookeeper")]
pub use leasehold_zookeeper::ZooKeeperGuardExt;

pub use registry::{BUILT_IN, registry};

/// Connects to the store with this URL.
///
/// | URL | which clients share the locks | feature |
/// |---|---|---|
/// | `file:` or `file:/a/directory` | all processes of this machine | `file` (default) |
/// | `memory:` or `memory:NAME` | this process | |
/// | `sqlite:/a/file.db` | all processes of this machine | `sqlite` |
/// | `postgres://user:password@host/database` | many machines | `postgres` |
/// | `mysql://user:password@host/database` | many machines | `mysql` |
/// | `redis://user:password@host`, `redis+sentinel://…`, `redis+cluster://…` | many machines | `redis` |
/// | `redlock://host,host,host,host,host` | many machines, with mutexes only | `redlock` |
/// | `zookeeper://host,host,host/path` | many machines | `zookeeper` |
/// | `etcd://host1,host2,host3` | many machines | `etcd` |
/// | `memcached://host`, `memcached://host,host` | many machines, unless a server loses data | `memcached` |
/// | `nats://host,host,host/bucket` | many machines | `nats` |
/// | `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` | many machines | `s3`, `gs`, `az` |
/// | `http://host:8484`, `https://host1,host2`, `http+unix:///a/socket` | all clients of a `leasehold serve` | `http-store` |
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let locks = leasehold::connect("memory:").await?;
/// locks.mutex("order:42").lock().await?.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Cancel safe: dropping the future changes nothing.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): the URL is invalid.
/// - [`Unsupported`](ErrorKind::Unsupported): the store is not compiled in. The [hint](Error::hint)
///   names its feature.
/// - [`Unreachable`](ErrorKind::Unreachable), [`Denied`](ErrorKind::Denied) and other errors of the
///   store.
pub async fn connect(url: impl AsRef<str>) -> Result<Client> {
    builder().connect(url).await
}

/// Connects to the store that the environment names, as the command `leasehold` does.
///
/// `LEASEHOLD_STORE` is the URL of the store. If it is not set, `LEASEHOLD_STORE_FILE` names a file
/// that contains the URL. `LEASEHOLD_NAMESPACE`, if it is set, is a [prefix of all lock
/// names](Builder::namespace).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # if matches!(leasehold::store::kit::store_of_environment(), Ok(None)) {
/// let error = leasehold::from_env().await.unwrap_err(); // there is no default store
/// assert!(error.to_string().contains("LEASEHOLD_STORE"));
/// # }}) ;
/// ```
///
/// # Cancel safety
/// Cancel safe: dropping the future changes nothing.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): neither variable is set, the file cannot be read or is empty,
///   or a variable is not valid UTF-8.
/// - The other errors of [`connect`].
pub async fn from_env() -> Result<Client> {
    let (builder, url) = of_the_environment()?;
    builder.connect(url).await
}

fn of_the_environment() -> Result<(Builder, String)> {
    let refused = |what: &str| Error::new(ErrorKind::Config, what).with_operation("connect");
    let variable = |name| match std::env::var(name) {
        Ok(text) => Ok(text),
        Err(std::env::VarError::NotPresent) => Ok(String::new()),
        Err(_) => Err(refused(&format!("{name} is not valid UTF-8"))),
    };
    let namespace = variable("LEASEHOLD_NAMESPACE")?;
    let Some(url) =
        store::kit::store_of_environment().map_err(|error| error.with_operation("connect"))?
    else {
        let hint = "set it to the URL of a store, such as file: or redis://host";
        return Err(refused("LEASEHOLD_STORE is not set").with_hint(hint));
    };
    Ok((builder().namespace(namespace), url))
}

/// Creates a builder, which connects with options to any store that is compiled in.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let locks = leasehold::builder().label("billing").namespace("acme/").connect("memory:").await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
pub fn builder() -> Builder {
    Builder::new(registry())
}

pub mod blocking {
    //! Locks for code without an async runtime: every call blocks its thread.
    //!
    //! ```
    //! let locks = leasehold::blocking::connect("memory:")?;
    //! let guard = locks.mutex("order:42").lock()?;
    //! println!("held, token {}", guard.token());
    //! guard.release()?;
    //! # Ok::<(), leasehold::Error>(())
    //! ```
    //!
    //! Leases are renewed in the background while your thread works or blocks. In async code, use
    //! the async types: a blocked executor thread runs nothing else.

    use crate::{Result, builder, of_the_environment};

    #[doc(inline)]
    pub use leasehold_core::blocking::*;

    /// Connects to the store with this URL, and blocks until it is done; see
    /// [`leasehold::connect`](crate::connect).
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`leasehold::connect`](crate::connect).
    pub fn connect(url: impl AsRef<str>) -> Result<Client> {
        builder().connect_blocking(url)
    }

    /// Connects to the store that the environment names, and blocks until it is done; see
    /// [`leasehold::from_env`](crate::from_env).
    ///
    /// ```
    /// # if matches!(leasehold::store::kit::store_of_environment(), Ok(None)) {
    /// assert!(leasehold::blocking::from_env().is_err()); // there is no default store
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as [`leasehold::from_env`](crate::from_env).
    pub fn from_env() -> Result<Client> {
        let (builder, url) = of_the_environment()?;
        builder.connect_blocking(url)
    }
}

pub mod store {
    //! The contract of stores, and the stores that are compiled in. A store keeps the queues of
    //! locks.
    //!
    //! A store implements only what depends on its own atomicity and clock. Everything that is the
    //! same for all stores (deadlines, renewals, retries, timeouts, re-entrancy, guards) is
    //! implemented once, in the client. [`Store`] states the contract of each method. The suite
    //! `conformance` checks it, and [`kit`] has the building blocks.

    #[cfg(any(
        feature = "memcached",
        feature = "nats",
        feature = "s3",
        feature = "gs",
        feature = "az"
    ))]
    #[doc(inline)]
    pub use leasehold_cell as cell;
    #[doc(inline)]
    pub use leasehold_core::store::*;
    #[doc(inline)]
    pub use leasehold_core::{Claim, ClaimId, Moment, Opener, Opening, Registry, kit, queue};
    #[cfg(feature = "etcd")]
    #[doc(inline)]
    pub use leasehold_etcd as etcd;
    #[cfg(feature = "file")]
    #[doc(inline)]
    pub use leasehold_file as file;
    #[cfg(feature = "http-store")]
    #[doc(inline)]
    pub use leasehold_http::store as http;
    #[cfg(feature = "redis")]
    #[doc(inline)]
    pub use leasehold_redis::redis;
    #[cfg(feature = "redlock")]
    #[doc(inline)]
    pub use leasehold_redlock as redlock;
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    #[doc(inline)]
    pub use leasehold_sql::store as sql;
    #[cfg(feature = "zookeeper")]
    #[doc(inline)]
    pub use leasehold_zookeeper as zookeeper;
}
