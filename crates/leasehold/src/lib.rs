//! Locks for programs that run on more than one thread, process or machine.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let locks = leasehold::connect("memory:").await?; // or file:, …
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
//! There are five things here.
//!
//! # Locks
//! [`connect`] gives a [`Leasehold`], a client of one store. [`Mutex`], [`RwLock`] and [`Semaphore`] are its
//! locks; [`lock_all`](Leasehold::lock_all) takes several at once, [`Election`] keeps one of many leading,
//! [`once_per`](Mutex::once_per) lets one of many work once per period. [`Owner`] may re-enter; [`blocking`]
//! is the same without a runtime, [`LockOptions`] how a lock is taken. An [`Error`] is one line and a
//! [kind](ErrorKind); [`is_retryable`](Error::is_retryable) is what a loop goes on for.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let locks = leasehold::connect("memory:").await?;
//! use std::time::Duration;
//! let permit = locks.semaphore("convert", 3).lease(Duration::from_secs(30)).acquire().await?;
//! let writer = locks.rwlock("config").write_timeout(Duration::from_secs(5)).await?;
//! let both = locks.lock_all(["stock:a", "stock:b"]).await?; // in one order for all
//! # drop((permit, writer, both)); Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Holds
//! A [`Guard`] means "held", is renewed by a thread of the client's own, and never claims more than it knows:
//! `Held`, `AtRisk`, `Lost` ([`State`]). [`run`](Mutex::run) drops the work when the hold is lost; [`Watch`]
//! is for other tasks; a [`sequencer`] is a hold as a string, that others check.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # use std::time::Duration;
//! # let locks = leasehold::connect("memory:").await?;
//! let guard = locks.mutex("order:42").lock().await?;
//! guard.ensure(Duration::from_secs(2))?; // so much is left, before what cannot be undone
//! let mut watch = guard.watch();
//! watch.wait_until_held().await?; // the pause button
//! guard.release().await?; // or drop it
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Fences
//! No lock can stop what a paused holder has already sent. The resource can: it refuses tokens smaller than
//! the greatest that it has seen. [`fence`] has this for SQL, Redis, HTTP, objects, etcd and ZooKeeper, and
//! says what one of your own must do.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # let locks = leasehold::connect("memory:").await?;
//! let late = locks.mutex("a").lock().await?.token(); // released at once
//! let next = locks.mutex("a").lock().await?.token();
//! let mut seen = late; // the resource's
//! for shown in [next, late] {
//!     let refused = if shown < seen { Some(leasehold::Error::stale_fence(seen, shown)) } else { None };
//!     assert_eq!(refused.is_some(), shown == late);
//!     seen = seen.max(shown);
//! }
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! # Transactions
//! For data in a SQL database, in a transaction of yours, whatever driver began it (`database`): `lock_in`
//! locks until it ends, `versioned` notices that somebody else wrote meanwhile, `once` does something once,
//! however often it is asked for, and `fence::sql` refuses late holders of a lock that lives elsewhere. By
//! the features `sqlite`, `postgres`, `mysql` (`sqlx` 0.9), `sqlx-08-postgres`, `sqlx-08-mysql`,
//! `tokio-postgres`, `sea-orm`; or `sql`, with a driver of your own.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use leasehold::{database::{self, error}, lock_in, once};
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
//! [`Guarantees`](store::Guarantees) says what a store promises, and [`require`](Builder::require) refuses
//! one that promises less; what it cannot do is [`Unsupported`](ErrorKind::Unsupported), never emulated.
//! [`diagnose`](Leasehold::diagnose) says what is wrong with a store as it is set up ([`doctor`]),
//! [`ping`](Leasehold::ping) is for readiness, [`telemetry`] lists metrics and events.
//! [`read`](Leasehold::read), [`list`](Leasehold::list), [`watch`](Leasehold::watch) and
//! [`evict`](Leasehold::evict) are what the command does, too.
//!
//! ```
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! # use std::time::Duration;
//! # let locks = leasehold::connect("memory:").await?;
//! locks.ping(Duration::from_secs(2)).await?;
//! for lock in locks.list("order:").await? {
//!     println!("{}: {} hold it", lock.name, lock.holders().count());
//! }
//! locks.close().await?; // gives back what is held
//! # Ok::<(), leasehold::Error>(()) }).unwrap();
//! ```
//!
//! [`store::Store`] and [`kit`] are for a store of your own (`examples/own-store` is one, `examples/own-cell`
//! one that needs compare-and-set alone), the suite `conformance` asks all of it, and `testing` is a store
//! for tests of your program.
//!
//! # Stores
//! A URL names one: see [`connect`]. What stands behind its `?` differs: `pool`, `prefix` and `schema` of the
//! SQL stores, `prefix`, `replicas`, `replicas_ms` and `replicas_short` of `redis:`, `create` and `naming` of
//! `zookeeper:`, `session_ms` and `poll_ms` of `memcached:`, `nats:` and `s3:`, `ca` where there is TLS,
//! `token_offset` of all. The repository's `docs/stores` has all of them, and what each store needs.
//!
//! # Features
//! `file` (default), `sqlite`, `postgres`, `mysql`, `redis`, `redlock`, `zookeeper`, `etcd`, `memcached`,
//! `nats`, `s3`, `gs`, `az`: the stores. `tls`: encryption on the way to their servers; without it a URL that
//! demands it is refused. `sql`, `sqlx-08-postgres`, `sqlx-08-mysql`, `tokio-postgres`, `sea-orm`:
//! transactions without a store. `http`: `fence::http`. `serde`: what crosses a store's wire. `metrics`,
//! `tracing`: see [`telemetry`]. `conformance`: the suite that every store passes, for your own store too.
//!
//! Works in any async executor, and with none: renewals run on a thread of the client's own.
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
    Became, Builder, Change, Changes, Claim, ClaimId, Clock, DEFAULT_LEASE, DEFAULT_WAITER_LEASE,
    Deadline, Election, Error, ErrorKind, Guard, Guards, Holder, HolderInfo, IntoWanted, Kind,
    Leasehold, LockOptions, LostReason, MAX_LEASE, MAX_NAME_BYTES, MAX_READERS, MIN_LEASE, Moment,
    Mutex, Name, Observer, OncePer, Opener, Opening, Owner, Registry, Released, Result, RwLock,
    Semaphore, Sequencer, StaleToken, StaleVersion, State, Token, Wanted, Watch, doctor, kit,
    queue, sequencer, telemetry,
};
#[cfg(feature = "etcd")]
pub use leasehold_etcd::EtcdGuardExt;
#[cfg(feature = "sql")]
#[doc(inline)]
pub use leasehold_sql::{database, lock_in, lock_in_timeout, once, try_lock_in, versioned};
#[cfg(feature = "zookeeper")]
pub use leasehold_zookeeper::ZooKeeperGuardExt;

pub use registry::{BUILT_IN, registry};

/// Connects to the store of this URL:
///
/// | URL | store |
/// |---|---|
/// | `file:` or `file:/a/directory` | this machine, every process of it (feature `file`) |
/// | `memory:` or `memory:NAME` | this process |
/// | `sqlite:/a/file.db` | this machine (feature `sqlite`) |
/// | `postgres://user:password@host/database` | many machines (feature `postgres`) |
/// | `mysql://user:password@host/database` | many machines (feature `mysql`) |
/// | `redis://user:password@host`, `redis+sentinel://…`, `redis+cluster://…` | many machines (feature `redis`) |
/// | `redlock://host,host,host,host,host` | many machines, a mutex only (feature `redlock`) |
/// | `zookeeper://host,host,host/path` | many machines (feature `zookeeper`) |
/// | `etcd://host1,host2,host3` | many machines (feature `etcd`) |
/// | `memcached://host`, `memcached://host,host` | many machines, as long as the servers forget nothing (feature `memcached`) |
/// | `nats://host,host,host/bucket` | many machines (feature `nats`) |
/// | `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` | many machines (features `s3`, `gs`, `az`) |
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let locks = leasehold::connect("memory:").await?;
/// locks.mutex("order:42").lock().await?.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Dropped, nothing is left of it.
///
/// # Errors
/// [`ErrorKind::Config`] for a URL that cannot work, [`ErrorKind::Unsupported`] for a store
/// that this build leaves out; otherwise as the store fails.
pub async fn connect(url: impl AsRef<str>) -> Result<Leasehold> {
    builder().connect(url).await
}

/// Connects as the environment says, which is the same for the command: LEASEHOLD_STORE is the store's URL,
/// LEASEHOLD_NAMESPACE, if it is there, what stands [before all names](Builder::namespace).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # if std::env::var_os("LEASEHOLD_STORE").is_none() {
/// let error = leasehold::from_env().await.unwrap_err(); // nothing is guessed
/// assert!(error.to_string().contains("LEASEHOLD_STORE"));
/// # }}) ;
/// ```
///
/// # Cancel safety
/// Dropped, nothing is left of it.
///
/// # Errors
/// [`ErrorKind::Config`] if LEASEHOLD_STORE is not set or empty, or either is no text; and as [`connect`].
pub async fn from_env() -> Result<Leasehold> {
    let (builder, url) = of_the_environment()?;
    builder.connect(url).await
}

fn of_the_environment() -> Result<(Builder, String)> {
    let refused = |what: &str| Error::new(ErrorKind::Config, what).during("connect");
    let said = |name| match std::env::var(name) {
        Ok(text) => Ok(text),
        Err(std::env::VarError::NotPresent) => Ok(String::new()),
        Err(_) => Err(refused(&format!("{name} is not UTF-8: set it anew"))),
    };
    let (url, namespace) = (said("LEASEHOLD_STORE")?, said("LEASEHOLD_NAMESPACE")?);
    if url.is_empty() {
        let what = "LEASEHOLD_STORE is not set: set it to the URL of a store, such as file: or redis://host";
        return Err(refused(what));
    }
    Ok((builder().namespace(namespace), url))
}

/// Connects with options, to any store that is in this build.
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
    //! The same locks for code without a runtime: every call blocks its thread.
    //!
    //! ```
    //! let locks = leasehold::blocking::connect("memory:")?;
    //! let guard = locks.mutex("order:42").lock()?;
    //! println!("held, token {}", guard.token());
    //! guard.release()?;
    //! # Ok::<(), leasehold::Error>(())
    //! ```
    //!
    //! Renewal goes on in the background while your thread works or blocks. In async code use the async
    //! face: a blocked executor thread runs nothing else.

    use crate::{Result, builder, of_the_environment};

    #[doc(inline)]
    pub use leasehold_core::blocking::*;

    /// See [`leasehold::connect`](crate::connect).
    ///
    /// ```
    /// let locks = leasehold::blocking::connect("memory:")?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there.
    pub fn connect(url: impl AsRef<str>) -> Result<Leasehold> {
        builder().connect_blocking(url)
    }

    /// See [`leasehold::from_env`](crate::from_env).
    ///
    /// ```
    /// # if std::env::var_os("LEASEHOLD_STORE").is_none() {
    /// assert!(leasehold::blocking::from_env().is_err()); // nothing is guessed
    /// # }
    /// ```
    ///
    /// # Errors
    /// As there.
    pub fn from_env() -> Result<Leasehold> {
        let (builder, url) = of_the_environment()?;
        builder.connect_blocking(url)
    }
}

pub mod store {
    //! What a store is: the keeper of the queues, behind one small trait. And those in this build.
    //!
    //! A store does what needs the store's own atomicity and clock, and nothing else. All that is the
    //! same everywhere (deadlines, renewal, retries, giving up, re-entrancy, guards) is written once,
    //! above. The contract, method by method, is on [`Store`]; what a store is built with is in
    //! [`kit`](crate::kit), and the public suite `conformance` checks it.

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
    #[cfg(feature = "etcd")]
    #[doc(inline)]
    pub use leasehold_etcd as etcd;
    #[cfg(feature = "file")]
    #[doc(inline)]
    pub use leasehold_file as file;
    #[cfg(feature = "redis")]
    #[doc(inline)]
    pub use leasehold_redis::redis;
    #[cfg(feature = "redlock")]
    #[doc(inline)]
    pub use leasehold_redis::redlock;
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    #[doc(inline)]
    pub use leasehold_sql::store as sql;
    #[cfg(feature = "zookeeper")]
    #[doc(inline)]
    pub use leasehold_zookeeper as zookeeper;
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// And so are those of the FAQ.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/faq.md")]
struct Faq;

/// And those for users of Redisson.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/migrating/redisson.md")]
struct Redisson;

/// And those of the tutorial, which also need a database.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../../../docs/tutorial.md")]
struct Tutorial;

/// And those of the page on transactions.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../../../docs/guide/transactions.md")]
struct Transactions;

/// And those of the page on tests.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../../../docs/guide/testing.md")]
struct Testing;
