//! The `sqlite:`, `postgres:` and `mysql:` stores, which keep lock queues in tables of a database.
//!
//! # The tables
//! Each lock has one row in `locks`. It is created when the name is first used and kept after a
//! release, so that its highest token is kept too. The row is deleted a day after its last use.
//! This is safe, because tokens are taken from the server's clock, which is far ahead of the lock's
//! highest token by then.
//!
//! The row contains the lock's kind and capacity and the number of its claims in the table
//! `claims`. If a claim arrived when the lock was free, the row also contains that claim: the
//! *head*, which is always first in the queue. Every other claim has a row in `claims`, ordered by
//! token. `leasehold schema` prints the SQL that creates the tables.
//!
//! # One call
//! - **The fast path.** One statement acquires a free lock. It reads and changes the lock's row
//!   only. Another statement releases a head for which no claim waits. A lock is "free" if it has
//!   no claims in `claims`, and either has no head or a head that has expired (including its lock
//!   delay). "No claim waits" means that the number of claims is 0.
//!   - A statement that had to wait for the row evaluates the row and the clock as they are after
//!     the wait. It must not read `claims` instead of the number of claims in the row, because it
//!     would read that table as of the time before the wait (scenario 45a).
//!   - If a name is not known to have a row (`store/seen_names.rs`), a more expensive statement
//!     creates the row. On MySQL this is a second statement. It inserts the row as already
//!     acquired, or fails because the row exists.
//! - **The slow path** handles everything else. It is also used immediately for a name for which
//!   this client has just waited. A short transaction locks the lock's row, and only then reads the
//!   clock and the claims into a [`Queue`](leasehold_core::queue::Queue). The queue decides, and
//!   the transaction writes back what changed.
//! - **The single-message path**, on servers, for a contended mutex. The server itself makes the
//!   decision, in one message (`store/plain.rs`).
//!
//! All paths agree, because each changes the row exactly as the queue would. Acquiring a free lock
//! is the same as joining an empty queue. Releasing a lock without waiters is the same as leaving a
//! queue of one. Each path works with the lock's row locked. The calls on one lock therefore have
//! one order, the order of their commits. Tokens are assigned inside these transactions, so they
//! have the same order (scenario 45).
//!
//! SQLite allows one writer at a time, and its driver uses one thread per connection. The costs
//! there are conflicts between writers and switches between threads. The store reduces them in
//! three ways. It skips the fast path where it would probably fail (`store/contention_hints.rs`).
//! The slow path reads with one statement, and sends its writes together with the COMMIT. A client
//! that finds another writer retries sooner than SQLite would (`store/sqlite.rs`).
//!
//! If the reply of the fast path is lost, the client repeats the call. The call finds a head whose
//! lease is valid and takes the slow path, which recognizes the claim by its ID.
//!
//! # Renewals and heartbeats
//! Renewals and heartbeats extend rows by `SET expires = greatest(…) WHERE expires > now`. One
//! statement extends many rows and waits for none. Rows that another session has locked are
//! skipped, and reported in their committed state (`store/renew_unlocked.rs`).
//!
//! A slow path may find at the same moment that a claim has expired. A statement that ends or
//! shortens a claim therefore requires that `expires` is unchanged since it was read. Otherwise the
//! transaction is rolled back and repeated.
//!
//! Waiters then get their queue positions from one snapshot. If it shows an expired claim or a free
//! place, the slow path settles the queue. If that takes long, the heartbeat returns what the
//! snapshot showed.
//!
//! Renewals and heartbeats have their own connections. A client can be paused while it has locked a
//! lock's row. The database ends its transaction after a second or two, except on SQLite. In that
//! time no other lock loses its lease.
//!
//! # Notifications
//! - **PostgreSQL.** The client that grants claims sends a NOTIFY to the client of each granted
//!   claim, directly after the transaction. Without waiters, the client sends none, because NOTIFY
//!   serializes commits including their flush. A client listens on one connection while one of its
//!   claims is near the front of a queue. The same connection also serves calls
//!   (`store/listening_connection.rs`). After a period of silence, the client checks that the
//!   connection still works. Up to PostgreSQL 18, a notification wakes all listening sessions of
//!   the database, and the server runs a transaction in each of them. Clients far from the front
//!   therefore do not listen and poll their positions (`store/postgres/positions.rs`).
//! - **MySQL.** The granting client ends the sleep of the waiting client's session, also directly
//!   after the transaction (`store/mysql/wake.rs`).
//! - **SQLite.** The granting client writes to the waiting client's notification FIFO next to the
//!   database file (`store/sqlite/notify_fifo.rs`). Each client also polls occasionally for grants that
//!   were not notified (`store/sqlite/listen.rs`).
//! - **Otherwise** one task of the client polls for all its waiters with one statement. This
//!   applies to PostgreSQL behind a pooler and to SQLite where no file can be created. It also
//!   applies when the server has no room for a connection that listens or sleeps.
//! - **Evictions** of holders are notified on SQLite only, through all FIFOs. On servers, each
//!   client that holds a lock would need a session for this. There, a holder finds out at its next
//!   renewal.
//!
//! Heartbeats are the fallback for all these notifications. A waiter keeps no transaction open, and
//! occupies no connection that other calls need. A client with waiters can work with a single
//! connection.
//!
//! # Dropped and repeated calls
//! Each call runs in a task on the client's own thread, and dropping the caller's future does not
//! stop the call. Only a renewal is stopped with its caller, which is safe at any point.
//!
//! A call that the database rolled back because of other transactions (deadlock, serialization,
//! busy) is retried with the same claim, as long as the caller waits for it. A broken connection is
//! replaced and the call is repeated. If a join completes after its claim was given up, the claim
//! leaves again (`store/in_flight_joins.rs`). If a `leave` is requested again while the first
//! request is only slow, it is sent once (`store/in_flight_leaves.rs`). An eviction is sent once,
//! because repeating it could evict the next holder.
//!
//! # The clock
//! All times come from the database, in microseconds since 1970: PostgreSQL's `clock_timestamp()`,
//! MySQL's `SYSDATE(6)`, and the machine's clock on SQLite. The time at which a transaction began
//! is never used.

mod background;
mod call;
mod callers;
mod callers_pool;
mod contention_hints;
mod doctor;
mod fault;
mod identity;
mod in_flight_joins;
mod in_flight_leaves;
mod join;
mod limits;
mod listening_connection;
mod lock_turns;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod message;
mod plain;
mod plain_words;
mod pool;
mod promises;
mod queue_snapshot;
mod renew;
mod renew_unlocked;
mod rows;
mod schema;
mod section;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod seen_names;
mod session;
mod shared;
mod statements;
mod url;
mod version;
mod wire;

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use self::call::ReleaseHint;
#[cfg(feature = "postgres")]
use self::callers::CallersPool;
pub use self::callers_pool::PoolExt;
use self::contention_hints::ContentionHints;
use self::fault::{closed, no_answer};
use self::in_flight_joins::InFlightJoins;
use self::in_flight_leaves::Leave;
use self::limits::{LIMIT, SLOW};
use self::lock_turns::LockTurns;
use self::pool::Pool;
#[cfg(feature = "postgres")]
use self::postgres::borrowed::BorrowedPool;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use self::seen_names::SeenNames;
use self::shared::Shared;
use self::statements::Statements;
use self::url::{Dialect, SqlUrl, is_file};
use self::wire::Connect;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::store::{
    Converted, Evict, EvictionListener, EvictionListeners, Joined, LockInfo, Mode, Renew, Renewal,
    Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Error, Name, Result, Token};

/// The number of connections for renewals and heartbeats.
const RENEWAL_CONNECTIONS: usize = 2;
/// Returns the statements that create the tables of the store at `url`, for your migrations.
///
/// # Errors
/// [`Config`](leasehold_core::ErrorKind::Config): the URL does not name a SQL store that this build
/// supports.
pub fn schema(url: &str) -> Result<String> {
    Ok(schema::printed(&SqlUrl::parse(url)?))
}

/// A store for locks in a SQL database; see the module's documentation.
pub struct SqlStore {
    shared: Arc<Shared>,
    /// The parsed URL, which contains the password and must not be displayed.
    parsed: SqlUrl,
    info: StoreInfo,
    runtime: Handle,
    tasks: Vec<AbortHandle>,
}

impl SqlStore {
    /// Opens the store at `url` and creates its tables if necessary. The store's tasks run on
    /// `runtime`.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. The tables may have been created.
    ///
    /// # Errors
    /// An error with a hint if the database cannot be used.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let parsed = SqlUrl::parse(url)?;
        Self::open_parsed(parsed, leasehold_core::kit::redacted(url), runtime).await
    }

    async fn open_parsed(url: SqlUrl, shown: String, runtime: &Handle) -> Result<Arc<Self>> {
        let handle = runtime.clone();
        let opened = runtime.spawn(async move { Self::open_here(url, shown, handle).await });
        opened.await.unwrap_or_else(|_| Err(closed())).map(Arc::new)
    }

    async fn open_here(url: SqlUrl, shown: String, runtime: Handle) -> Result<Self> {
        // A build with one database always assigns it.
        #[cfg(feature = "postgres")]
        #[allow(unused_assignments, reason = "depends on the features")]
        let mut postgres = None;
        #[cfg(feature = "mysql")]
        #[allow(unused_assignments, reason = "depends on the features")]
        let mut mysql = None;
        let connect: Arc<dyn Connect> = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => Arc::new(sqlite::Sqlite::new(&url, &shown)?),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let found = Arc::new(postgres::Postgres::new(&url)?);
                postgres = Some(found.clone());
                found
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                let found = Arc::new(mysql::MySql::new(&url)?);
                mysql = Some(found.clone());
                found
            }
        };
        #[cfg(feature = "sqlite")]
        let notify_fifos = match url.dialect {
            Dialect::Sqlite => sqlite::notify_fifos(&url).ok().map(Arc::new),
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            _ => None,
        };
        // The prefix of a session's name shows how the client is notified.
        let (pushes, called) = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => (notify_fifos.is_some(), session::ASKS),
            #[cfg(feature = "postgres")]
            Dialect::Postgres if !url.pooler => (true, session::LISTENS),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => (false, session::ASKS),
            #[cfg(feature = "mysql")]
            Dialect::MySql => (true, session::SLEEPS),
        };
        let id = ClaimId::random()?.to_hex();
        let lender: Option<Arc<dyn Connect>> = match &url.callers {
            #[cfg(feature = "postgres")]
            Some(CallersPool::Postgres(pool, runtime)) => {
                let at = postgres.clone();
                let speak = move |borrowed| {
                    let place = at.as_ref().and_then(|at| at.place());
                    let begin = place.ok_or(sqlx::Error::PoolTimedOut)?.begin(true);
                    Ok(postgres::borrowed(borrowed, begin.into()))
                };
                Some(Arc::new(BorrowedPool::new(pool.clone(), runtime.clone(), Box::new(speak))))
            }
            _ => None,
        };
        // The client has one connection of its own in addition to those that it may borrow.
        let calls = url.pool + usize::from(lender.is_some());
        let (pool, renewal_pool) = Pool::pair(connect.clone(), lender, calls, RENEWAL_CONNECTIONS);
        #[cfg(feature = "postgres")]
        let url = match &postgres {
            Some(postgres) => resolved(url, postgres, &pool).await?,
            None => url,
        };
        let shared = Arc::new(Shared {
            url: shown,
            dialect: url.dialect,
            sql: Statements::of(&url),
            pool,
            renewal_pool,
            settling: Mutex::default(),
            waiters: Arc::default(),
            joins: InFlightJoins::default(),
            #[cfg(feature = "postgres")]
            positions: postgres::positions::Positions::default(),
            leaves: Arc::default(),
            contention_hints: ContentionHints::default(),
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            seen_names: SeenNames::default(),
            joining: Semaphore::new(calls.saturating_sub(1).max(1)),
            joins_of_lock: LockTurns::new(2),
            waiting: Semaphore::new(RENEWAL_CONNECTIONS - 1),
            most_bytes: std::sync::atomic::AtomicUsize::new(renew::MOST_BYTES),
            session: format!("{called}{}", id.get(..16).unwrap_or(&id)),
            pushes,
            #[cfg(feature = "sqlite")]
            notify_fifos: notify_fifos.clone(),
            listeners: EvictionListeners::default(),
            wants_evictions: watch::Sender::default(),
        });
        let prepared = tokio::time::timeout(LIMIT, shared.prepare(&url)).await;
        let (guarantees, sweep_is_due) = match prepared {
            Ok(prepared) => prepared?,
            Err(_) => return Err(no_answer()),
        };
        #[cfg(feature = "mysql")]
        if let Some(mysql) = mysql {
            let marked = tokio::time::timeout(LIMIT, shared.mark(&url)).await;
            let mark = marked.map_err(|_| no_answer())?.map_err(fault::Failure::into_error)?;
            mysql.expects(mark);
        }
        let identity = shared.identity(&url).await?;
        let info = StoreInfo::new(shared.url.clone(), guarantees).identified(identity);
        let mut tasks = vec![runtime.spawn(shared.clone().sweep(sweep_is_due)).abort_handle()];
        #[cfg(feature = "postgres")]
        if let Some(postgres) = postgres.filter(|_| !url.pooler) {
            let listening = postgres::listen(postgres, shared.clone());
            tasks.push(runtime.spawn(listening).abort_handle());
        }
        #[cfg(feature = "mysql")]
        if url.dialect == Dialect::MySql {
            tasks.push(runtime.spawn(mysql::wake::sleep(connect, shared.clone())).abort_handle());
        }
        #[cfg(feature = "sqlite")]
        if let Some(notify_fifos) = notify_fifos {
            tasks.push(runtime.spawn(shared.clone().listen(notify_fifos)).abort_handle());
        }
        if !is_file(url.dialect) {
            tasks.push(runtime.spawn(shared.clone().trim()).abort_handle());
        }
        if !pushes {
            tasks.push(runtime.spawn(shared.clone().poll()).abort_handle());
        }
        Ok(Self { shared, parsed: url, info, runtime, tasks })
    }

    /// Runs a call in a task that continues if the caller's future is dropped. The call gets a
    /// [`Caller`], which shows whether that has happened.
    async fn call<T, F>(&self, call: impl FnOnce(Arc<Shared>, Caller) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let waits = Arc::new(());
        let call = call(self.shared.clone(), Caller(Arc::downgrade(&waits)));
        self.runtime.spawn(call).await.unwrap_or_else(|_| Err(closed()))
    }

    /// Adds the lock and the store to an error.
    fn add_context(&self, name: &Name) -> impl FnOnce(Error) -> Error {
        move |error| error.with_lock(name).with_store(&self.info.url)
    }

    /// Removes this claim from the queue, or waits for the reply if another call is already
    /// removing it. The removal completes even if every caller stops waiting for it.
    async fn leave_once(
        &self,
        claim: &Claim,
        keep: Option<Duration>,
        hint: ReleaseHint,
    ) -> Result<bool> {
        loop {
            let mut answer = match self.shared.leaves.begin(claim.id) {
                Leave::Again(answer) => answer,
                Leave::First(first) => {
                    let claim = claim.clone();
                    let leave = |shared: Arc<Shared>, _| async move {
                        shared.leave_first(claim, keep, hint, &first).await
                    };
                    return self.call(leave).await;
                }
            };
            // If the other call failed, it left no reply, and this caller sends the request.
            if let Ok(Some(left)) = answer.wait_for(Option::is_some).await.map(|left| *left) {
                return Ok(left);
            }
        }
    }
}

/// Returns the URL with the schema that contains the tables, or in which they will be created.
#[cfg(feature = "postgres")]
async fn resolved(url: SqlUrl, postgres: &postgres::Postgres, pool: &Pool) -> Result<SqlUrl> {
    let connected = tokio::time::timeout(LIMIT, promises::first(pool)).await;
    connected.map_err(|_| no_answer())??;
    let place = postgres.place().ok_or_else(no_answer)?;
    Ok(SqlUrl { schema: Some(place.schema.clone()), ..url })
}

impl Drop for SqlStore {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl fmt::Debug for SqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlStore").field("url", &self.shared.url).finish_non_exhaustive()
    }
}

/// Shows whether the caller of a call still waits for the reply.
struct Caller(Weak<()>);

impl Caller {
    /// Returns whether the caller has dropped its future, so that it does not wait for the reply.
    fn has_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// A renewal in progress. A caller that gets no reply in time calls again. There are few
/// connections for renewals, so a renewal without a reply after [`SLOW`] is stopped.
struct Renewing {
    task: JoinHandle<Result<Vec<Renewal>>>,
    runtime: Handle,
    began: Instant,
}

impl Drop for Renewing {
    fn drop(&mut self) {
        if self.task.is_finished() {
            return;
        }
        let (task, until) = (self.task.abort_handle(), self.began + SLOW);
        // The task is not stopped immediately, because a slow server would have to repeat all work
        // that it has already done, and might never complete it.
        drop(self.runtime.spawn(async move {
            tokio::time::sleep_until(until).await;
            task.abort();
        }));
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(SqlStore::open(&url, &runtime).await? as Arc<dyn Store>) })
}

#[async_trait]
impl Store for SqlStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let url = self.parsed.clone();
        self.call(|shared, _| async move { shared.diagnose(&url).await }).await
    }

    async fn disconnect(&self) {
        let shared = self.shared.clone();
        let gone = async move {
            shared.wants_evictions.send_replace(false);
            #[cfg(feature = "sqlite")]
            if let Some(notify_fifos) = &shared.notify_fifos {
                notify_fifos.remove(&shared.session);
            }
            tokio::join!(shared.pool.disconnect(), shared.renewal_pool.disconnect());
            shared.pool.listening().close().await;
        };
        let _ = self.runtime.spawn(gone).await;
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.shared.leaves.forget(claim.id);
        self.shared.joins.begin(claim.id);
        let mine = claim.clone();
        let joined = self.call(|shared, caller| async move {
            shared.join_or_leave(mine, mode, &|| caller.has_gone()).await
        });
        joined.await.map_err(self.add_context(&claim.name))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let (shared, renewals) = (self.shared.clone(), renewals.to_vec());
        let mut renewing = Renewing {
            task: self.runtime.spawn(async move { shared.renew(&renewals).await }),
            runtime: self.runtime.clone(),
            began: Instant::now(),
        };
        let renewed = (&mut renewing.task).await.unwrap_or_else(|_| Err(closed()));
        renewed.map_err(|e| e.with_store(&self.info.url))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        // A join of this claim may still be in progress although no caller waits for it.
        let joins = self.shared.joins.give_up(claim.id);
        let hint = match self.shared.waiters.has(claim.id) {
            true => ReleaseHint::Waiting,
            false if joins.is_some() => ReleaseHint::JoinInProgress,
            false => ReleaseHint::OtherReply,
        };
        self.shared.waiters.dismiss(claim.id);
        let left = match (self.leave_once(claim, keep, hint).await, joins) {
            (left @ Ok(true), _) | (left, None) => left,
            // The join may be executed after this `leave`, and removes its claim then.
            (_, Some(joins)) => joins.removed().await.map(|()| true),
        };
        left.map_err(self.add_context(&claim.name))
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let mine = claim.clone();
        let converted = self.call(|shared, caller| async move {
            shared.convert(&mine, &|| caller.has_gone()).await
        });
        converted.await.map_err(self.add_context(&claim.name))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let lock = name.clone();
        let read = self
            .call(|shared, caller| async move { shared.read(&lock, &|| caller.has_gone()).await });
        read.await.map_err(self.add_context(name))
    }

    async fn holders(&self, name: &Name, _: Option<Token>) -> Result<Option<LockInfo>> {
        let lock = name.clone();
        let read = self.call(|shared, caller| async move {
            shared.holders(&lock, &|| caller.has_gone()).await
        });
        read.await.map_err(self.add_context(name))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let prefix = prefix.to_owned();
        let listed =
            self.call(
                |shared, caller| async move { shared.list(&prefix, &|| caller.has_gone()).await },
            );
        listed.await.map_err(|error| error.with_store(&self.info.url))
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.shared.listeners.add(listener);
        self.shared.wants_evictions.send_replace(true);
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        // An eviction is sent only once, so this read first finds out whether the idle connection
        // was closed.
        self.read(name).await?;
        let lock = name.clone();
        let evicted = self.call(|shared, caller| async move {
            shared.evict(&lock, which, &|| caller.has_gone()).await
        });
        evicted.await.map_err(self.add_context(name))
    }
}
