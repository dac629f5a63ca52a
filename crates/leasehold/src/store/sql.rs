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
//!   that had to wait for the row judges the row as it then is, by the clock as it then is. It must
//!   not look at `claims` instead of the count of them: that would be read as of the time before it
//!   waited (scenario 45a).
//! - *The slow path*, for all else: a short transaction locks the lock's row, and only then reads
//!   the clock and the claims into a [`Queue`], lets it decide, and writes back what changed.
//!
//! Both agree, since each does to the row what the queue would do: taking a free lock is joining an
//! empty queue, and releasing it with nobody behind is leaving a queue of one. Whatever either does
//! under a name, it does with that row locked, so the calls on one lock are in one order, the order
//! of their commits; tokens are drawn inside, so they are in it as well (scenario 45).
//!
//! A claim that took the fast path and lost the reply finds, when it asks again, a head that is not
//! over, goes the slow way, and is recognised there by its id.
//!
//! # Renewals and heartbeats
//! They lengthen rows without locking any lock's row but that of a head: a claim's row is lengthened
//! by `SET expires = greatest(…) WHERE expires > now`. A slow path may at the same moment believe
//! that the claim has expired: therefore what ends or shortens a claim's place does so only if
//! `expires` is what was read, and is otherwise undone and tried again. Waiters then learn their
//! place from one snapshot; if that shows anything expired or free, the slow path settles it, while
//! the heartbeat answers what it saw if that takes long. Renewals and heartbeats have connections of
//! their own, so that a client which was stopped with a lock's row in its hands (the database ends
//! its transaction after a second; SQLite and MySQL cannot) costs nobody a lease.
//!
//! # Who wakes whom
//! PostgreSQL: who grants sends a NOTIFY to the client of each claim that was granted, in the same
//! transaction, and to nobody when nobody waited (NOTIFY makes commits wait for each other). One
//! connection of each client listens, from the first time that it waits. SQLite, MySQL, and
//! PostgreSQL behind a pooler: one task of each client asks, for all its waiters in one statement.
//! The heartbeat is the fallback of both. Nobody who waits has a connection, or a transaction open.
//!
//! # Dropped and repeated calls
//! Each call runs in a task of the client's own thread, which its caller's drop does not stop. What
//! the database undid for others' sake (deadlock, serialization, busy) is tried again with the same
//! claim; a broken connection is replaced, and the call repeated.
//!
//! # Whose clock
//! The database's, in microseconds since 1970: PostgreSQL's `clock_timestamp()`, MySQL's
//! `SYSDATE(6)`, on SQLite the machine's. Never the time at which a transaction began.

#![cfg_attr(
    not(all(feature = "sqlite", feature = "postgres", feature = "mysql")),
    allow(
        dead_code,
        unreachable_patterns,
        unused_assignments,
        unused_imports,
        unused_variables,
        reason = "each database needs a part of what all three need"
    )
)]

mod fault;
mod schema;
mod section;
mod statements;
mod url;
mod wire;

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use self::fault::Failure;
use self::section::{Cells, Loaded, int, kind_number, micros, plain};
use self::statements::Statements;
use self::url::{Dialect, SqlUrl, Synchronous};
use self::wire::{Arg, Connect, Pool, Statement, Wire};
use super::guarantees::ALL_KINDS;
use super::waiters::Waiters;
use super::{
    ClockModel, Durability, Evict, Guarantees, Joined, Liveness, LockInfo, Mode, Place, Renew,
    Renewal, Signal, Store, Survival, Wakeup, mismatch,
};
use crate::claim::{Claim, ClaimId, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::queue::{At, Queue};

/// The longest that one try of a call may take: then its connection is given up.
const LIMIT: Duration = Duration::from_secs(10);
/// How often others may get in the way.
const TRIES: u32 = 30;
/// How many connections there are for renewals and heartbeats.
const BEATS: usize = 2;
/// How long a heartbeat waits for what it settles, before it answers what it saw.
const SETTLED_IN: Duration = Duration::from_millis(60);
/// The poller's pauses, from just after something happened to long after.
const POLL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(40)];
/// What the name of a client begins with that listens for notifications; also those tell it that
/// cannot listen themselves.
const LISTENS: &str = "leasehold_hears_";
/// How many renewals share a transaction where each is a statement.
const RENEWED_TOGETHER: usize = 200;
/// How often what nobody uses any more is looked for.
const SWEEP: Duration = Duration::from_secs(600);

/// Prints the statements that make the tables of the store at `url`, for people whose migrations
/// own the database.
///
/// # Errors
/// [`ErrorKind::Config`] for a URL that names no SQL store of this build.
pub fn schema(url: &str) -> Result<String> {
    Ok(schema::printed(&SqlUrl::parse(url)?))
}

/// Queues in a database. See the module's documentation.
pub struct SqlStore {
    shared: Arc<Shared>,
    runtime: Handle,
    guarantees: Guarantees,
    tasks: Vec<AbortHandle>,
}

/// What the calls' tasks share.
#[derive(Debug)]
struct Shared {
    url: String,
    dialect: Dialect,
    sql: Statements,
    pool: Pool,
    /// For renewals and heartbeats alone, so that they never stand behind calls that wait for a
    /// lock's row.
    beats: Pool,
    /// What some heartbeat is settling just now.
    settling: Mutex<HashSet<Name>>,
    waiters: Arc<Waiters>,
    /// This client, as its claims' rows name it; PostgreSQL's channel.
    session: String,
    pushes: bool,
}

/// One call.
#[derive(Clone, Debug)]
enum Call {
    Join(Claim, Mode),
    Beat(Vec<Renew>),
    /// Renewals on one lock, with its row locked.
    Renew(Vec<Renew>),
    Leave(Claim, Option<Duration>),
    Read(Name),
    List(String),
    Evict(Name, Evict),
}

/// Its answer.
#[derive(Debug)]
enum Answer {
    Joined(Joined),
    Beaten(Vec<Beaten>),
    Renewed(Vec<Renewal>),
    Left(bool),
    Read(Option<LockInfo>),
    Listed(Vec<LockInfo>),
    Evicted(usize),
}

/// What a heartbeat without the lock's row has found.
#[derive(Clone, Debug)]
enum Beaten {
    Renewed(Renewal),
    /// It waits, and so much is sure; but something is to be settled.
    Unsettled(Renewal),
    /// Only the queue itself knows.
    Unknown,
}

impl SqlStore {
    /// Opens the store of this URL and makes its tables if there are none. Its work is done on
    /// `runtime`.
    ///
    /// # Errors
    /// One line that says what to do, if the database cannot be used.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let parsed = SqlUrl::parse(url)?;
        let shown = crate::url::redacted(url);
        let handle = runtime.clone();
        let opened = runtime.spawn(async move { Self::open_here(parsed, shown, handle).await });
        opened.await.unwrap_or_else(|_| Err(closed())).map(Arc::new)
    }

    async fn open_here(url: SqlUrl, shown: String, runtime: Handle) -> Result<Self> {
        #[cfg(feature = "postgres")]
        let mut listener = None;
        let connect: Arc<dyn Connect> = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => Arc::new(sqlite::Sqlite::new(&url)?),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let postgres = postgres::Postgres::new(&url)?;
                listener = (!url.pooler).then(|| postgres.options());
                Arc::new(postgres)
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => Arc::new(mysql::MySql::new(&url)?),
        };
        #[cfg(feature = "postgres")]
        let pushes = listener.is_some();
        #[cfg(not(feature = "postgres"))]
        let pushes = false;
        let id = ClaimId::random()?.to_hex();
        let shared = Arc::new(Shared {
            url: shown,
            dialect: url.dialect,
            sql: Statements::of(&url),
            pool: Pool::new(connect.clone(), url.pool),
            beats: Pool::new(connect, BEATS),
            settling: Mutex::default(),
            waiters: Arc::default(),
            session: format!(
                "{}{}",
                if pushes { LISTENS } else { "leasehold_asks_" },
                id.get(..16).unwrap_or(&id)
            ),
            pushes,
        });
        let prepared = tokio::time::timeout(LIMIT, shared.prepare(&url)).await;
        let guarantees = match prepared {
            Ok(prepared) => prepared?,
            Err(_) => return Err(no_answer()),
        };
        let mut tasks = vec![runtime.spawn(shared.clone().sweep()).abort_handle()];
        #[cfg(feature = "postgres")]
        if let Some(options) = listener {
            let listening =
                postgres::listen(options, shared.session.clone(), shared.waiters.clone());
            tasks.push(runtime.spawn(listening).abort_handle());
        }
        if !pushes {
            tasks.push(runtime.spawn(shared.clone().poll()).abort_handle());
        }
        Ok(Self { shared, runtime, guarantees, tasks })
    }

    /// Runs a call where its caller's drop does not stop it.
    async fn call(&self, call: Call) -> Result<Answer> {
        let shared = self.shared.clone();
        let called = self.runtime.spawn(async move { shared.call(call).await });
        called.await.unwrap_or_else(|_| Err(closed()))
    }

    fn out_of_step<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Corrupt, "the store answered another call: report this"))
    }
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

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the client's runtime was shut down: connect again")
}

fn no_answer() -> Error {
    let what = format!("the database did not answer within {LIMIT:?}: check that it runs");
    Error::new(ErrorKind::Unreachable, what)
}

impl Shared {
    /// Finds the tables, or makes them, and what the database promises.
    async fn prepare(&self, url: &SqlUrl) -> Result<Guarantees> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.prepare_once(url).await {
                Ok(guarantees) => return Ok(guarantees),
                // Others make the tables at the same time.
                Err(Failure::Conflict(_)) if tries < TRIES => pause(tries).await,
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    async fn prepare_once(&self, url: &SqlUrl) -> Result<Guarantees, Failure> {
        let mut pooled = self.pool.take().await?;
        let wire = &mut *pooled.wire;
        let guarantees = self.promises(wire, url).await?;
        let version = match wire.rows(&self.sql.version, Vec::new()).await.map_err(Failure::from) {
            Ok(rows) => rows.into_iter().next(),
            // No such table: made below, or refused there for want of a right.
            Err(Failure::Final(_)) => None,
            Err(failure) => return Err(failure),
        };
        match version.map(|row| Cells::new(row).count::<i64>()).transpose()? {
            Some(schema::VERSION) => {}
            Some(other) => {
                let what = format!(
                    "the tables are of version {other}, this leasehold knows {}: use one version, \
                     or another prefix",
                    schema::VERSION
                );
                return Err(Error::new(ErrorKind::Config, what).into());
            }
            None => {
                for statement in schema::statements(url) {
                    wire.raw(&statement).await?;
                }
            }
        }
        wire.rows(&self.sql.probe, Vec::new()).await?;
        self.pool.put(pooled);
        Ok(guarantees)
    }

    /// What the database, as it is set up, promises.
    async fn promises(&self, wire: &mut dyn Wire, url: &SqlUrl) -> Result<Guarantees, Failure> {
        let mut notes = vec![
            Cow::Borrowed(
                "Leases are judged by the database's wall clock: set forward, it ends them early; \
                 set back, it makes them longer. Tokens rise all the same.",
            ),
            Cow::Borrowed(
                "A call that finds others in the queue reads all of that lock's queue, so its time \
                 grows with the number of claims in it.",
            ),
        ];
        #[cfg(any(feature = "postgres", feature = "mysql"))]
        let mut ask = async |sql: &str, shape| -> Result<Vec<String>, Failure> {
            let statement = Statement { sql: sql.into(), shape };
            let rows = wire.rows(&statement, Vec::new()).await?;
            let mut cells = Cells::new(rows.into_iter().next().unwrap_or_default());
            shape.bytes().map(|_| cells.text()).collect()
        };
        let durability = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => match url.synchronous {
                Synchronous::Full => Durability::Disk,
                Synchronous::Normal | Synchronous::Off => Durability::Machine,
            },
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let asked = "SELECT pg_is_in_recovery()::text, current_setting('fsync'), \
                             current_setting('synchronous_commit'), \
                             current_setting('server_encoding')";
                let found = ask(asked, "tttt").await?;
                let [recovery, fsync, commit, encoding] = &found[..] else {
                    return Err(Error::new(ErrorKind::Corrupt, "no settings").into());
                };
                if recovery == "true" {
                    let what = "this server is a read-only standby: connect to the primary";
                    return Err(Error::new(ErrorKind::Denied, what).into());
                }
                if encoding != "UTF8" {
                    let what = format!(
                        "the database's encoding is {encoding}, in which not every lock name can \
                         be written: use one with UTF8"
                    );
                    return Err(Error::new(ErrorKind::Config, what).into());
                }
                match (fsync.as_str(), commit.as_str()) {
                    ("on", "off") => Durability::Process,
                    ("on", _) => Durability::Disk,
                    (_, "off") => Durability::Process,
                    _ => Durability::Machine,
                }
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                let asked = "SELECT CAST(@@innodb_flush_log_at_trx_commit AS CHAR), \
                             CAST(@@global.read_only AS CHAR)";
                let found = ask(asked, "tt").await?;
                match found.first().map(String::as_str) {
                    Some("1") => Durability::Disk,
                    Some("2") => Durability::Machine,
                    _ => Durability::Process,
                }
            }
        };
        if durability < Durability::Disk {
            notes.push(Cow::Borrowed(
                "Commits are not on disk when they are answered: a crash may free what was held.",
            ));
        }
        let is_file = is_file(url.dialect);
        if is_file {
            notes.push(Cow::Borrowed(
                "A process that is stopped in the middle of a write stops all others until it goes \
                 on, and waiters may lose their places by that; the file must be on a local disk.",
            ));
        } else {
            notes.push(Cow::Borrowed(
                "A fail-over to a replica that lags loses the latest grants; tokens go on rising \
                 if its clock is not behind the last that was drawn.",
            ));
        }
        Ok(Guarantees {
            kinds: Cow::Borrowed(ALL_KINDS),
            fifo: true,
            wakeup: if self.pushes { Wakeup::Push } else { Wakeup::Poll },
            liveness: Liveness::Lease,
            clock: ClockModel::Wall,
            lock_delay: true,
            at_least: true,
            grant: durability,
            token: durability,
            on_pause: Survival::Fenced,
            on_clock_step: Survival::Fenced,
            on_store_crash: match durability {
                Durability::Process => Survival::Fenced,
                _ => Survival::Exclusive,
            },
            on_failover: if is_file { Survival::NotApplicable } else { Survival::Fenced },
            on_partition: if is_file { Survival::NotApplicable } else { Survival::Fenced },
            stalls: is_file,
            recovery: Duration::from_secs(2),
            recovery_leases: 1,
            notes: Cow::Owned(notes),
        })
    }

    /// One call, as often as it takes.
    async fn call(&self, call: Call) -> Result<Answer> {
        let (mut tries, mut replaced, mut in_doubt) = (0, 0, false);
        loop {
            tries += 1;
            let pool = if matches!(call, Call::Beat(_)) { &self.beats } else { &self.pool };
            let mut pooled = match pool.take().await {
                Ok(pooled) => pooled,
                Err(error) => return Err(Failure::from(error).into_error()),
            };
            let done = self.perform(&mut *pooled.wire, &call, in_doubt);
            let failure = match tokio::time::timeout(LIMIT, done).await {
                Ok(Ok(answer)) => {
                    pool.put(pooled);
                    return Ok(answer);
                }
                Ok(Err(failure)) => failure,
                Err(_) => return Err(no_answer()),
            };
            match failure {
                // Closed by the server while it lay idle, as likely as not.
                Failure::Broken(_) if pooled.used && replaced < 2 => {
                    in_doubt = true;
                    replaced += 1;
                    pool.forget_idle();
                }
                Failure::Broken(error) => return Err(Failure::Broken(error).into_error()),
                Failure::Conflict(error) => {
                    // Ends the transaction; one that cannot be ended so ends with its connection.
                    if pooled.wire.raw("ROLLBACK").await.is_ok() {
                        pool.put(pooled);
                    }
                    if tries >= TRIES {
                        return Err(Failure::Conflict(error).into_error());
                    }
                    pause(tries).await;
                }
                Failure::Final(error) => return Err(error),
            }
        }
    }

    async fn perform(
        &self,
        wire: &mut dyn Wire,
        call: &Call,
        in_doubt: bool,
    ) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Join(claim, mode) => Answer::Joined(self.join(wire, claim, *mode).await?),
            Call::Beat(renewals) => Answer::Beaten(self.beat(wire, renewals).await?),
            Call::Renew(renewals) => {
                let Some(first) = renewals.first() else { return Ok(Answer::Renewed(Vec::new())) };
                let renewed = self.section(wire, &first.claim.name, None, |queue, now| {
                    renewals.iter().map(|r| queue.renew(&r.claim, r.lease, now)).collect()
                });
                let lost = || vec![Renewal::Lost; renewals.len()];
                Answer::Renewed(renewed.await?.unwrap_or_else(lost))
            }
            Call::Leave(claim, keep) => {
                Answer::Left(self.leave(wire, claim, *keep).await? || in_doubt)
            }
            Call::Read(name) => {
                let mut loaded = self.snapshot(wire, name).await?;
                Answer::Read(loaded.as_mut().and_then(|loaded| describe(name, loaded)))
            }
            Call::List(prefix) => {
                let rows = wire.rows(&self.sql.list, vec![Arg::Name(prefix.clone())]).await?;
                let mut all = section::snapshots(rows)?;
                all.retain(|(name, _)| name.as_str().starts_with(prefix));
                all.sort_by(|(a, _), (b, _)| a.cmp(b));
                let shown = all.iter_mut().filter_map(|(name, loaded)| describe(name, loaded));
                Answer::Listed(shown.collect())
            }
            Call::Evict(name, which) => {
                let evicted = self.section(wire, name, None, |q, now| q.evict(*which, now));
                Answer::Evicted(evicted.await?.unwrap_or(0))
            }
        })
    }

    async fn join(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Joined, Failure> {
        if let Some(token) = self.take(wire, claim).await? {
            return Ok(Joined::Holding { token, remaining: Some(claim.lease) });
        }
        if mode == Mode::Wait {
            self.waiters.enlist(claim.id, || ());
        }
        let joined = self.section(wire, &claim.name, Some(claim), |queue, now| {
            queue.join(claim, mode, At { now, stamp: now }, &self.session)
        });
        let joined = joined.await?.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
        if !matches!(joined, Ok(Joined::Waiting(_))) {
            self.waiters.dismiss(claim.id);
        }
        joined.map_err(|m| Failure::Final(mismatch(claim, m.kind, m.capacity)))
    }

    /// The fast path. The lease it answers is counted from before the call was sent, so it is no
    /// longer than the row says.
    async fn take(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<Option<Token>, Failure> {
        if claim.weight == 0 || claim.weight > claim.capacity {
            return Ok(None);
        }
        let floor = || int(claim.seen.saturating_add(1).min(Token::MAX / 2));
        let name = || Arg::Name(claim.name.as_str().to_owned());
        let what = || [kind_number(claim.kind).into(), i64::from(claim.capacity).into()];
        let who = || [claim.id.to_hex().into(), i64::from(claim.weight).into()];
        let people = || {
            [
                plain(&claim.holder.host).into(),
                i64::from(claim.holder.pid).into(),
                plain(&claim.holder.label).into(),
            ]
        };
        let (lease, delay) = (|| micros(claim.lease), || micros(claim.lock_delay));
        let mut args = Vec::with_capacity(12);
        match self.dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                args.push(floor());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.extend(people());
                args.push(delay());
                args.push(name());
                let done = wire.run(&self.sql.take, args).await?;
                Ok(if done.affected == 1 { Token::new(done.last_id) } else { None })
            }
            _ => {
                args.push(name());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.push(delay());
                args.extend(people());
                args.push(floor());
                args.push(floor());
                let rows = wire.rows(&self.sql.take, args).await?;
                let Some(row) = rows.into_iter().next() else { return Ok(None) };
                Ok(Token::new(Cells::new(row).count()?))
            }
        }
    }

    async fn leave(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<bool, Failure> {
        let waits = self.waiters.has(claim.id);
        if keep.is_none_or(|keep| keep.is_zero()) && !waits {
            let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
            if wire.run(&self.sql.release, args).await?.affected == 1 {
                return Ok(true);
            }
        }
        let left = self.section(wire, &claim.name, None, |q, now| q.leave(claim.id, keep, now));
        let left = left.await?.unwrap_or(false);
        self.waiters.dismiss(claim.id);
        Ok(left)
    }

    /// The slow path: works on the queue of `name` with its row locked. With `create`, makes the
    /// row if there is none.
    async fn section<T>(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
        create: Option<&Claim>,
        work: impl FnOnce(&mut Queue, u64) -> T + Send,
    ) -> Result<Option<T>, Failure> {
        wire.raw(self.sql.begin).await?;
        let mut loaded = section::load(wire, &self.sql, name).await?;
        if let (None, Some(claim)) = (&loaded, create) {
            section::create(wire, &self.sql, claim).await?;
            loaded = section::load(wire, &self.sql, name).await?;
        }
        let Some(mut loaded) = loaded else {
            wire.raw("COMMIT").await?;
            return Ok(None);
        };
        let now = loaded.now;
        let done = work(&mut loaded.queue, now);
        let granted = self.granted(&mut loaded);
        loaded.save(wire, &self.sql, name).await?;
        for (id, token, session) in &granted {
            if *session != self.session && session.starts_with(LISTENS) {
                self.notify(wire, session, *id, *token).await?;
            }
        }
        wire.raw("COMMIT").await?;
        for (id, token, _) in granted {
            self.waiters.tell(id, Signal::Granted(token));
        }
        Ok(Some(done))
    }

    /// Those that the section granted: claim, token, client.
    fn granted(&self, loaded: &mut Loaded) -> Vec<(ClaimId, Token, String)> {
        let fresh: HashSet<ClaimId> = loaded.queue.take_fresh_grants().into_iter().collect();
        let new = loaded.queue.entries().filter(|e| fresh.contains(&e.id));
        new.map(|e| (e.id, e.token, e.session.clone())).collect()
    }

    #[cfg_attr(not(feature = "postgres"), allow(unused_variables, clippy::unused_async))]
    async fn notify(
        &self,
        wire: &mut dyn Wire,
        session: &str,
        id: ClaimId,
        token: Token,
    ) -> Result<(), Failure> {
        #[cfg(feature = "postgres")]
        wire.run(&self.sql.notify, vec![session.into(), postgres::message(id, token).into()])
            .await?;
        Ok(())
    }

    async fn snapshot(&self, wire: &mut dyn Wire, name: &Name) -> Result<Option<Loaded>, Failure> {
        let rows = wire.rows(&self.sql.read, vec![Arg::Name(name.as_str().into())]).await?;
        section::snapshot(rows)
    }

    /// Renewals and heartbeats, as far as no lock's row is needed for them.
    async fn beat(&self, wire: &mut dyn Wire, renewals: &[Renew]) -> Result<Vec<Beaten>, Failure> {
        let mut answers = vec![Beaten::Unknown; renewals.len()];
        let heads = self.renew_heads(wire, renewals).await?;
        let mut open: BTreeSet<usize> = (0..renewals.len()).collect();
        for (i, token) in heads {
            // As for the fast path: no longer than the row says.
            let remaining = Some(renewals[i].lease);
            answers[i] = Beaten::Renewed(Renewal::Holding { token, remaining });
            open.remove(&i);
        }
        let open: Vec<usize> = open.into_iter().collect();
        let mut by_name: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
        for i in self.renew_claims(wire, renewals, &open).await? {
            by_name.entry(&renewals[i].claim.name).or_default().push(i);
        }
        for (name, indices) in by_name {
            let Some(mut seen) = self.snapshot(wire, name).await? else { continue };
            let (settled, now) = (seen.is_settled(), seen.now);
            for i in indices {
                let Renew { claim, lease } = &renewals[i];
                let Some(renewal) = seen.standing_of(claim, *lease, now) else { continue };
                answers[i] = match (settled, &renewal) {
                    (false, Renewal::Waiting(_)) => Beaten::Unsettled(renewal),
                    _ => Beaten::Renewed(renewal),
                };
            }
        }
        Ok(answers)
    }

    /// Renews many: what needs a lock's row is settled apart, each lock for itself.
    async fn renew(self: &Arc<Self>, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let Answer::Beaten(beaten) = self.call(Call::Beat(renewals.to_vec())).await? else {
            return SqlStore::out_of_step();
        };
        let mut answers = vec![Renewal::Lost; renewals.len()];
        let mut open: BTreeMap<&Name, Vec<(usize, Option<Renewal>)>> = BTreeMap::new();
        for (i, beaten) in beaten.into_iter().enumerate() {
            let seen = match beaten {
                Beaten::Renewed(renewal) => {
                    answers[i] = renewal;
                    continue;
                }
                Beaten::Unsettled(renewal) => Some(renewal),
                Beaten::Unknown => None,
            };
            open.entry(&renewals[i].claim.name).or_default().push((i, seen));
        }
        let mut settling = Vec::new();
        for (name, some) in open {
            let all_seen = some.iter().all(|(_, seen)| seen.is_some());
            // One of us is enough; the others were seen to wait, and ask again soon.
            let mine = lock(&self.settling).insert(name.clone());
            if !mine && all_seen {
                for (i, seen) in some {
                    answers[i] = seen.map_or(Renewal::Lost, in_a_moment);
                }
                continue;
            }
            let these: Vec<Renew> = some.iter().map(|(i, _)| renewals[*i].clone()).collect();
            let (shared, name) = (self.clone(), name.clone());
            let task = tokio::spawn(async move {
                let done = shared.call(Call::Renew(these)).await;
                if mine {
                    lock(&shared.settling).remove(&name);
                }
                done
            });
            settling.push((task, some, all_seen));
        }
        let until = tokio::time::Instant::now() + SETTLED_IN;
        for (task, some, all_seen) in settling {
            let done = match all_seen {
                true => tokio::time::timeout_at(until, task).await.ok(),
                false => Some(task.await),
            };
            match done {
                Some(Ok(Ok(Answer::Renewed(renewed)))) => {
                    for ((i, _), renewal) in some.into_iter().zip(renewed) {
                        answers[i] = renewal;
                    }
                }
                Some(Ok(Err(error))) if !all_seen => return Err(error),
                Some(Ok(Ok(_)) | Err(_)) if !all_seen => return Err(closed()),
                _ => {
                    for (i, seen) in some {
                        answers[i] = seen.map_or(Renewal::Lost, in_a_moment);
                    }
                }
            }
        }
        Ok(answers)
    }

    /// Renews those that are heads; tells which, and their tokens.
    async fn renew_heads(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
    ) -> Result<Vec<(usize, Token)>, Failure> {
        // Who waits is no head.
        let maybe = |i: &usize| !self.waiters.has(renewals[*i].claim.id);
        let mut indices: Vec<usize> = (0..renewals.len()).filter(maybe).collect();
        // In one order, so that two who renew many do not wait for each other.
        indices.sort_by(|a, b| renewals[*a].claim.name.cmp(&renewals[*b].claim.name));
        let mut renewed = Vec::new();
        if let Some(many) = &self.sql.renew_locks {
            if indices.is_empty() {
                return Ok(renewed);
            }
            let rows = wire.rows(many, vec![json(renewals, &indices).into()]).await?;
            let mut tokens = BTreeMap::new();
            for row in rows {
                let mut cells = Cells::new(row);
                tokens.insert(cells.text()?, cells.count::<u64>()?);
            }
            for i in indices {
                let token = tokens.get(&renewals[i].claim.id.to_hex()).copied();
                renewed.extend(token.and_then(Token::new).map(|token| (i, token)));
            }
            return Ok(renewed);
        }
        for some in indices.chunks(RENEWED_TOGETHER) {
            wire.raw(self.sql.begin).await?;
            for &i in some {
                let Renew { claim, lease } = &renewals[i];
                let args = vec![
                    micros(*lease),
                    Arg::Name(claim.name.as_str().into()),
                    claim.id.to_hex().into(),
                ];
                let token = match returns_rows(self.dialect) {
                    true => {
                        let row = wire.rows(&self.sql.renew_lock, args).await?.into_iter().next();
                        row.map(|row| Cells::new(row).count()).transpose()?
                    }
                    false => {
                        let done = wire.run(&self.sql.renew_lock, args).await?;
                        (done.affected == 1).then_some(done.last_id)
                    }
                };
                renewed.extend(token.and_then(Token::new).map(|token| (i, token)));
            }
            wire.raw("COMMIT").await?;
        }
        Ok(renewed)
    }

    /// Lengthens the places of those of `indices` that stand among the claims; tells which.
    async fn renew_claims(
        &self,
        wire: &mut dyn Wire,
        renewals: &[Renew],
        indices: &[usize],
    ) -> Result<Vec<usize>, Failure> {
        let mut renewed = Vec::new();
        if indices.is_empty() {
            return Ok(renewed);
        }
        if let Some(many) = &self.sql.renew_claims {
            let rows = wire.rows(many, vec![json(renewals, indices).into()]).await?;
            let mut claims = HashSet::new();
            for row in rows {
                claims.insert(Cells::new(row).text()?);
            }
            let done = |i: &usize| claims.contains(&renewals[*i].claim.id.to_hex());
            return Ok(indices.iter().copied().filter(done).collect());
        }
        for some in indices.chunks(RENEWED_TOGETHER) {
            wire.raw(self.sql.begin).await?;
            for &i in some {
                let Renew { claim, lease } = &renewals[i];
                let args = vec![
                    micros(*lease),
                    micros(claim.waiter_lease),
                    claim.id.to_hex().into(),
                    Arg::Name(claim.name.as_str().into()),
                ];
                if wire.run(&self.sql.renew_claim, args).await?.affected > 0 {
                    renewed.push(i);
                }
            }
            wire.raw("COMMIT").await?;
        }
        Ok(renewed)
    }

    /// Asks for all our waiters which of them hold by now. Never ends by itself.
    async fn poll(self: Arc<Self>) {
        let [shortest, longest] = POLL;
        let mut pause = shortest;
        let mut known: BTreeSet<String> = BTreeSet::new();
        loop {
            if self.waiters.count() == 0 {
                known.clear();
                self.waiters.more().await;
                pause = shortest;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(longest);
            let Ok(mut pooled) = self.pool.take().await else { continue };
            let asked = pooled.wire.rows(&self.sql.granted, vec![self.session.clone().into()]);
            let Ok(Ok(rows)) = tokio::time::timeout(LIMIT, asked).await else { continue };
            self.pool.put(pooled);
            for row in rows {
                let mut cells = Cells::new(row);
                let (Ok(id), Ok(token)) = (cells.text(), cells.count()) else { continue };
                if let (Some(claim), Some(token)) = (ClaimId::from_hex(&id), Token::new(token)) {
                    if known.insert(id) {
                        pause = shortest;
                    }
                    self.waiters.tell(claim, Signal::Granted(token));
                }
            }
        }
    }

    /// Forgets, now and then, what nobody used for a day. Never ends by itself.
    async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let Ok(mut pooled) = self.pool.take().await else { continue };
            // Who may not delete leaves the rows: they do no harm.
            let swept = pooled.wire.run(&self.sql.sweep, Vec::new());
            if let Ok(Ok(_)) = tokio::time::timeout(LIMIT, swept).await {
                self.pool.put(pooled);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs between two consistent states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For one whose lock is being settled: it asks again soon, but not at once.
fn in_a_moment(renewal: Renewal) -> Renewal {
    match renewal {
        Renewal::Waiting(place) => Renewal::Waiting(Place {
            head_remaining: place.head_remaining.map(|left| left.max(SETTLED_IN / 3)),
            ..place
        }),
        other => other,
    }
}

/// The queue as people see it: settled, though nothing is written.
fn describe(name: &Name, loaded: &mut Loaded) -> Option<LockInfo> {
    let now = loaded.now;
    let queue = &mut loaded.queue;
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// What many renewals are, for a database that takes them at once.
fn json(renewals: &[Renew], indices: &[usize]) -> String {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4);
    let all = indices.iter().map(|&i| {
        let Renew { claim, lease } = &renewals[i];
        serde_json::json!({
            "name": claim.name.as_str(),
            "claim": claim.id.to_hex(),
            "lease": micros(*lease),
            "wait": micros(claim.waiter_lease),
        })
    });
    serde_json::Value::Array(all.collect()).to_string()
}

#[allow(clippy::match_like_matches_macro, reason = "depends on the features")]
fn returns_rows(dialect: Dialect) -> bool {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => false,
        _ => true,
    }
}

#[allow(clippy::match_like_matches_macro, reason = "depends on the features")]
fn is_file(dialect: Dialect) -> bool {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => true,
        _ => false,
    }
}

/// Between tries: longer each time, and spread, so that those who met once do not meet for ever.
async fn pause(tries: u32) {
    let spread = ClaimId::random().map_or(0, |id| (id.as_u128() % 1_000) as u64);
    let most = 1_000 << tries.min(5);
    tokio::time::sleep(Duration::from_micros(500 + most * spread / 1_000)).await;
}

#[async_trait]
impl Store for SqlStore {
    fn guarantees(&self) -> &Guarantees {
        &self.guarantees
    }

    fn url(&self) -> &str {
        &self.shared.url
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        match self.call(Call::Join(claim.clone(), mode)).await {
            Ok(Answer::Joined(joined)) => Ok(joined),
            Ok(_) => Self::out_of_step(),
            Err(error) => Err(error.on(&claim.name).at(self.url())),
        }
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let (shared, renewals) = (self.shared.clone(), renewals.to_vec());
        let renewed = self.runtime.spawn(async move { shared.renew(&renewals).await });
        renewed.await.unwrap_or_else(|_| Err(closed())).map_err(|e| e.at(self.url()))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        match self.call(Call::Leave(claim.clone(), keep)).await {
            Ok(Answer::Left(left)) => Ok(left),
            Ok(_) => Self::out_of_step(),
            Err(error) => Err(error.on(&claim.name).at(self.url())),
        }
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        match self.call(Call::Read(name.clone())).await {
            Ok(Answer::Read(read)) => Ok(read),
            Ok(_) => Self::out_of_step(),
            Err(error) => Err(error.on(name).at(self.url())),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        match self.call(Call::List(prefix.to_owned())).await {
            Ok(Answer::Listed(listed)) => Ok(listed),
            Ok(_) => Self::out_of_step(),
            Err(error) => Err(error.at(self.url())),
        }
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        match self.call(Call::Evict(name.clone(), which)).await {
            Ok(Answer::Evicted(evicted)) => Ok(evicted),
            Ok(_) => Self::out_of_step(),
            Err(error) => Err(error.on(name).at(self.url())),
        }
    }
}
