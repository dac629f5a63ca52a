//! The `sqlite:`, `postgres:` and `mysql:` stores: queues in tables of a database.
//!
//! # The tables
//! Each lock has one row in `locks`, made when the name is first used and kept after a release, so
//! that its highest token is kept too (a day after its last use it is forgotten: tokens come from
//! the server's clock, which is far above by then). That row says what the lock is, how many claims
//! stand in the table `claims`, and, if somebody came when the lock was free, who that is: the
//! *head*, always the first in the queue. Everybody else has a row in `claims`, in the order of the
//! tokens. `leasehold schema` prints them.
//!
//! # One call
//! - *The fast path*: a free lock is taken by one statement that looks at, and changes, the lock's
//!   row only; a head that nobody waits behind is released by another. "Free" is: no claims, and no
//!   head whose time (with its lock-delay) is not over; "nobody waits" is: no claims. A statement
//!   that had to wait for the row judges the row as it then is, by the clock as it then is. A name
//!   that is not known to have a row (`store/known.rs`) takes a dearer statement, which makes it; on MySQL
//!   a second one, which inserts the row as already taken or fails because it is there. It must
//!   not look at `claims` instead of the count of them: that would be read as of the time before it
//!   waited (scenario 45a).
//!   It is done in the caller's task where a connection lies idle (`store/quick.rs`): handing it to the client's
//!   thread and its answer back costs as much as the statement.
//! - *The slow path*, for all else, and at once for a name for which this client has just waited: a short
//!   transaction locks the lock's row, and only then reads the clock and the claims into a
//!   [`Queue`](leasehold_core::queue::Queue), lets it decide, and writes back what changed.
//! - *A plain turn*, on servers: a mutex that changes hands is decided at the server, by one message
//!   (`store/plain.rs`), or one call of a procedure (`store/procedures.rs`).
//!
//! They agree, since each does to the row what the queue would do: taking a free lock is joining an
//! empty queue, and releasing it with nobody behind is leaving a queue of one. Whatever either does
//! under a name, it does with that row locked, so the calls on one lock are in one order, the order
//! of their commits; tokens are drawn inside, so they are in it as well (scenario 45).
//!
//! SQLite has one writer for all, and a thread of the driver's for each connection, so what costs is to be
//! in each other's way and to switch between threads. There the fast path is left out where it would be in
//! vain (`store/contended.rs`), a section's reads are one statement and its writes are sent at once with
//! the COMMIT, and whoever finds somebody else writing tries again sooner than SQLite would
//! (`store/sqlite.rs`).
//!
//! A claim that took the fast path and lost the reply finds, when it asks again, a head that is not
//! over, goes the slow way, and is recognised there by its id.
//!
//! # Renewals and heartbeats
//! They lengthen rows by `SET expires = greatest(…) WHERE expires > now`, many by one statement, and
//! wait for none: what somebody has locked is left out, and answered as it is committed (`store/beat.rs`). A
//! slow path may at the same moment believe that a claim has expired: therefore what ends or shortens
//! a claim's place does so only if `expires` is what was read, and is otherwise undone and tried
//! again. Waiters then learn their place from one snapshot; if that shows anything expired or free, the
//! slow path settles it, while the heartbeat answers what it saw if that takes long. Renewals and
//! heartbeats have connections of their own, so that a client which was stopped with a lock's row in
//! its hands (the database ends its transaction after a second or two; SQLite cannot) costs no
//! other lock its lease.
//!
//! # Who wakes whom
//! PostgreSQL: who grants sends a NOTIFY to the client of each claim that was granted, right after the
//! transaction, and to nobody when nobody waited (NOTIFY makes commits wait for each other, flush and all).
//! One connection of each client listens while somebody waits, and a while longer; it serves for
//! calls too (`store/ear.rs`); if nothing is heard on it for a while, it is asked whether it still
//! leads anywhere. Up to PostgreSQL 18, a notification wakes all sessions that listen in the
//! database, and the server runs a transaction in each of them. Their clients are sent nothing, and
//! send nothing. If only the clients near the front listened, the others would need another signal
//! when they come near: the server makes hundreds of hand-overs between two heartbeats. PostgreSQL
//! 19 wakes those that listen to the channel.
//!
//! MySQL: who grants ends the sleep
//! of the client's session, likewise right after the transaction (`store/wake.rs`). SQLite: who grants rings
//! the client's doorbell, a FIFO beside the database file (`store/doorbell.rs`), and each client looks now
//! and then for what nobody rang for (`store/listen.rs`). PostgreSQL behind a pooler, SQLite where no file
//! can be made, and whoever finds no room for a connection that listens or sleeps: one task of each client
//! asks, for all its waiters in one statement. Who is evicted while it holds is told on SQLite only, by all
//! bells; servers would need a session of each client that holds, and it is found out at the next renewal.
//! The heartbeat is the fallback of all. Nobody who waits has a transaction open, or a connection that is
//! needed elsewhere; a client of which one waits gets on with one connection.
//!
//! # Dropped and repeated calls
//! Each call runs in a task of the client's own thread, which its caller's drop does not stop (but a renewal,
//! which may be stopped anywhere), or is ended there if it was begun in its caller's. What the database undid
//! for others' sake (deadlock, serialization, busy) is tried again with the same claim, as long as somebody
//! waits for it; a broken connection is replaced, and the call repeated. A join that ends after its claim was
//! given up leaves again (`store/joins.rs`). A leave that is said again while it is only slow is sent once
//! (`store/leaves.rs`).
//!
//! # Whose clock
//! The database's, in microseconds since 1970: PostgreSQL's `clock_timestamp()`, MySQL's
//! `SYSDATE(6)`, on SQLite the machine's. Never the time at which a transaction began.

#![cfg_attr(
    not(all(feature = "sqlite", feature = "postgres", feature = "mysql")),
    allow(
        dead_code,
        unreachable_code,
        unreachable_patterns,
        unused_assignments,
        unused_imports,
        unused_variables,
        reason = "each database needs a part of what all three need"
    )
)]

#[cfg(any(feature = "postgres", feature = "mysql"))]
mod addresses;
mod background;
mod beat;
#[cfg(feature = "postgres")]
mod borrowed;
mod call;
mod callers;
mod callers_pool;
mod contended;
mod doctor;
mod ear;
#[cfg(feature = "postgres")]
mod elsewhere;
mod fault;
mod here;
mod identity;
mod join;
mod joins;
mod known;
mod leaves;
mod limits;
mod loaded;
mod message;
#[cfg(feature = "postgres")]
mod place;
mod plain;
mod plain_words;
mod pool;
mod procedure;
mod procedures;
mod promises;
mod quick;
mod renew;
mod rows;
mod schema;
mod section;
mod session;
mod shared;
mod statements;
mod url;
mod version;
mod wire;

#[cfg(feature = "sqlite")]
mod doorbell;
#[cfg(feature = "sqlite")]
mod listen;
#[cfg(feature = "sqlite")]
mod located;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "mysql")]
mod plain_mysql;
#[cfg(feature = "postgres")]
mod plain_postgres;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "mysql")]
mod wake;

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

#[cfg(feature = "postgres")]
use self::borrowed::Lender;
use self::call::{Answer, Call, Told, out_of_step};
use self::callers::CallersPool;
pub use self::callers_pool::PoolExt;
use self::contended::Contended;
use self::fault::{closed, no_answer};
use self::here::Here;
use self::joins::Joins;
use self::known::Known;
use self::leaves::{First, Leave};
use self::limits::{LIMIT, SLOW};
use self::pool::Pool;
use self::shared::Shared;
use self::statements::Statements;
use self::url::{Dialect, SqlUrl, is_file};
use self::wire::Connect;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::store::{
    Ear, Ears, Evict, Joined, LockInfo, Mode, Renew, Renewal, Reweighed, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Name, Result, Token};

/// How many connections there are for renewals and heartbeats.
const BEATS: usize = 2;
/// Returns the statements that create the tables of the store at `url`, for your migrations.
///
/// # Errors
/// [`Config`](leasehold_core::ErrorKind::Config) if the URL does not name a SQL store of this
/// build.
pub fn schema(url: &str) -> Result<String> {
    Ok(schema::printed(&SqlUrl::parse(url)?))
}

/// Locks in a SQL database. See the module's documentation.
pub struct SqlStore {
    shared: Arc<Shared>,
    /// Has the password: not to be shown.
    parsed: SqlUrl,
    info: StoreInfo,
    runtime: Handle,
    tasks: Vec<AbortHandle>,
}

impl SqlStore {
    /// Opens the store of this URL and creates its tables if necessary. Its tasks run on `runtime`.
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
        #[cfg(feature = "postgres")]
        let mut postgres = None;
        #[cfg(feature = "mysql")]
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
        let doorbells = match url.dialect {
            Dialect::Sqlite => sqlite::doorbells(&url).ok().map(Arc::new),
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            _ => None,
        };
        // What its clients are called says how they are told.
        let (pushes, called) = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => (doorbells.is_some(), session::ASKS),
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
                Some(Arc::new(Lender::new(pool.clone(), runtime.clone(), Box::new(speak))))
            }
            _ => None,
        };
        // Beside what may be borrowed, there is one of ours.
        let calls = url.pool + usize::from(lender.is_some());
        let (pool, beats) = Pool::pair(connect.clone(), lender, calls, BEATS);
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
            beats,
            settling: Mutex::default(),
            waiters: Arc::default(),
            joins: Joins::default(),
            leaves: Arc::default(),
            contended: Contended::default(),
            known: Known::default(),
            joining: Semaphore::new(calls.saturating_sub(1).max(1)),
            waiting: Semaphore::new(BEATS - 1),
            most_bytes: std::sync::atomic::AtomicUsize::new(renew::MOST_BYTES),
            session: format!("{called}{}", id.get(..16).unwrap_or(&id)),
            pushes,
            #[cfg(feature = "sqlite")]
            doorbells: doorbells.clone(),
            ears: Ears::default(),
            hears: watch::Sender::default(),
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
            tasks.push(runtime.spawn(wake::sleep(connect, shared.clone())).abort_handle());
        }
        #[cfg(feature = "sqlite")]
        if let Some(doorbells) = doorbells {
            tasks.push(runtime.spawn(shared.clone().listen(doorbells)).abort_handle());
        }
        if !is_file(url.dialect) {
            tasks.push(runtime.spawn(shared.clone().trim()).abort_handle());
        }
        if !pushes {
            tasks.push(runtime.spawn(shared.clone().poll()).abort_handle());
        }
        Ok(Self { shared, parsed: url, info, runtime, tasks })
    }

    /// Takes a lock that is free where that costs nobody a switch between threads. `None`: it is not to
    /// be had that way.
    async fn take_here(&self, claim: &Claim) -> Option<Result<Joined>> {
        let (shared, claim) = (self.shared.clone(), claim.clone());
        if shared.contended.lately(&claim.name) {
            return None;
        }
        shared.leaves.forget(claim.id);
        shared.joins.begin(claim.id);
        Here::new(&self.runtime, async move { shared.take_or_leave(claim).await }).await
    }

    /// Runs a call where its caller's drop does not stop it.
    async fn call(&self, call: Call) -> Result<Answer> {
        let (caller, answer) = oneshot::channel();
        let shared = self.shared.clone();
        drop(self.runtime.spawn(async move {
            let done = shared.call(call, &|| caller.is_closed()).await;
            // Perhaps nobody is left to be told.
            let _ = caller.send(done);
        }));
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    async fn read_by(&self, name: &Name, call: Call) -> Result<Option<LockInfo>> {
        match self.call(call).await {
            Ok(Answer::Read(read)) => Ok(read),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.on(name).at(&self.info.url)),
        }
    }

    /// A leave, or the answer to one that is under way. It is owed, whether anybody waits for it or not.
    async fn leave_once(
        &self,
        claim: &Claim,
        keep: Option<Duration>,
        told: Told,
    ) -> Result<Answer> {
        loop {
            match self.shared.leaves.begin(claim.id) {
                Leave::Again(mut answer) => {
                    // Of one that failed nothing is told: it is for us then.
                    if let Ok(Some(left)) = answer.wait_for(Option::is_some).await.map(|left| *left)
                    {
                        return Ok(Answer::Left(left));
                    }
                }
                Leave::First(first) => return self.leave_first(claim, keep, told, first).await,
            }
        }
    }

    /// In the caller's task, if it may be one statement.
    async fn leave_first(
        &self,
        claim: &Claim,
        keep: Option<Duration>,
        told: Told,
        first: First,
    ) -> Result<Answer> {
        let (shared, claim) = (self.shared.clone(), claim.clone());
        let may_be_free = told == Told::Whatever && !shared.is_contended(&claim, told);
        if may_be_free && keep.is_none_or(|keep| keep.is_zero()) {
            return Here::new(&self.runtime, shared.release_or_leave(claim, keep, first)).await;
        }
        let leaving = self
            .runtime
            .spawn(async move { shared.leave_first(claim, keep, told, false, &first).await });
        leaving.await.unwrap_or_else(|_| Err(closed())).map(Answer::Left)
    }
}

/// The URL with the schema that the tables are in, or are to be made in.
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

/// A renewal under way. Its caller asks again if there is no answer in time, and there are few
/// connections for renewals: what has not come after a moment may never come.
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
        // Not at once: on a slow server all that it has done so far would be done again, for ever.
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
        let (shared, url) = (self.shared.clone(), self.parsed.clone());
        let looked = self.runtime.spawn(async move { shared.diagnose(&url).await });
        looked.await.unwrap_or_else(|_| Err(closed()))
    }

    async fn disconnect(&self) {
        let shared = self.shared.clone();
        let gone = async move {
            shared.hears.send_replace(false);
            #[cfg(feature = "sqlite")]
            if let Some(doorbells) = &shared.doorbells {
                doorbells.take_down(&shared.session);
            }
            tokio::join!(shared.pool.disconnect(), shared.beats.disconnect());
            shared.pool.ear().close().await;
        };
        let _ = self.runtime.spawn(gone).await;
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        if let Some(joined) = self.take_here(claim).await {
            return joined.map_err(|e| e.on(&claim.name).at(&self.info.url));
        }
        let (caller, answer) = oneshot::channel();
        let (shared, mine) = (self.shared.clone(), claim.clone());
        shared.leaves.forget(claim.id);
        shared.joins.begin(claim.id);
        drop(self.runtime.spawn(async move {
            let done = shared.join_or_leave(mine, mode, &|| caller.is_closed()).await;
            // Perhaps nobody is left to be told.
            let _ = caller.send(done);
        }));
        match answer.await.unwrap_or_else(|_| Err(closed())) {
            Ok(Answer::Joined(joined)) => Ok(joined),
            Ok(Answer::Refused(error)) => Err(error.at(&self.info.url)),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.on(&claim.name).at(&self.info.url)),
        }
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let (shared, renewals) = (self.shared.clone(), renewals.to_vec());
        let mut renewing = Renewing {
            task: self.runtime.spawn(async move { shared.renew(&renewals).await }),
            runtime: self.runtime.clone(),
            began: Instant::now(),
        };
        let renewed = (&mut renewing.task).await.unwrap_or_else(|_| Err(closed()));
        renewed.map_err(|e| e.at(&self.info.url))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        // A join that nobody waits for any more, of a claim that another was answered for.
        let in_doubt = self.shared.joins.give_up(claim.id);
        let told = match self.shared.waiters.has(claim.id) {
            true => Told::Waits,
            false if in_doubt => Told::Nothing,
            false => Told::Whatever,
        };
        self.shared.waiters.dismiss(claim.id);
        let left = self.leave_once(claim, keep, told).await;
        match left {
            Ok(Answer::Left(left)) => Ok(left || in_doubt),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.on(&claim.name).at(&self.info.url)),
        }
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        match self.call(Call::Reweigh(claim.clone())).await {
            Ok(Answer::Reweighed(reweighed)) => Ok(reweighed),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.on(&claim.name).at(&self.info.url)),
        }
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.read_by(name, Call::Read(name.clone())).await
    }

    async fn holders(&self, name: &Name, _: Option<Token>) -> Result<Option<LockInfo>> {
        self.read_by(name, Call::Holders(name.clone())).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        match self.call(Call::List(prefix.to_owned())).await {
            Ok(Answer::Listed(listed)) => Ok(listed),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.at(&self.info.url)),
        }
    }

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.shared.ears.add(ear);
        self.shared.hears.send_replace(true);
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        // It is sent once: what was closed while it lay idle is found out by a question.
        self.read(name).await?;
        match self.call(Call::Evict(name.clone(), which)).await {
            Ok(Answer::Evicted(evicted)) => Ok(evicted),
            Ok(_) => out_of_step(),
            Err(error) => Err(error.on(name).at(&self.info.url)),
        }
    }
}
