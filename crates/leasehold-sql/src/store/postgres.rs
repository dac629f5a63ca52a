//! The connection to PostgreSQL, and its notifications.
//!
//! # A notification is not a grant
//! Any role that may connect to the database may send a notification to any channel, and a role
//! that may read the tables knows what our notifications contain. So a notification is only a
//! reason to poll. A waiter is only notified of what the rows contain (`granted`), read after the
//! notification arrived.
//! - *What it costs.* One statement for a notified client, however many of its claims were granted
//!   by then. It reads an index, on an open connection. A secret in the notification would avoid
//!   this statement. But the granting client would have to read the secret in the claim's row. Any
//!   role that may read all tables (`pg_read_all_data`) could read it too, and could forge
//!   notifications.
//! - *A forged notification is harmless.* A notification is ignored if its claim does not wait here
//!   or its grant was just found. After a false notification, the next poll comes later
//!   ([`DOUBT`]), so a flood of them costs a few reads per second. A real grant among false ones is
//!   found by the poll that is due then. A waiter is never notified of anything false. It keeps its
//!   place, and its heartbeats continue.
//! - *A lost, late or duplicate notification* is harmless. A heartbeat finds the grant if its
//!   notification was lost, and a duplicate only names a grant that is known.

pub(super) mod borrowed;
pub(super) mod elsewhere;
mod hosts;
mod place;
pub(super) mod plain;
pub(super) mod positions;

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgListener, PgPool, PgPoolOptions, PgQueryResult, PgRow,
};
use sqlx::{Acquire, ConnectOptions, Row};
use tokio::runtime::Handle;
use tokio::time::Instant;

use self::borrowed::Borrowed;
use self::hosts::{Hosts, Server};
use self::place::Place;
use self::positions::Need;
use super::callers::CallersPool;
use super::fault::{self, Failure};
use super::listening_connection::ListenResult;
use super::message::{self, Message};
use super::shared::Shared;
use super::url::SqlUrl;
use super::wire::{Arg, Cell, Connect, Done, Row as Cells, Statement, Step, Wire, wire};
use leasehold_core::kit::{Addresses, Waiters};
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Result, Token};

fn text(row: &PgRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &PgQueryResult) -> u64 {
    0
}

wire!(PgConnection, std::convert::identity, text, no_id);

/// A connection of our own. The statements of its scripts are prepared on it.
#[derive(Debug)]
struct Own {
    connection: PgConnection,
    plans: Plans,
}

/// The statements that were prepared on a connection for scripts. A message without arguments is
/// planned each time, which costs more than its execution.
#[derive(Debug, Default)]
struct Plans {
    names: HashMap<Arc<str>, String>,
    made: usize,
}

impl Plans {
    /// Returns the statements of a step. If the statement is new, they begin with its preparation.
    fn written(&mut self, step: Step<'_>) -> Vec<(String, &'static str)> {
        let (statement, args, sql) = match step {
            Step::Raw(sql) => return message::words(&sql),
            Step::Rows(statement, args) => (statement, args, statement.sql.to_string()),
            Step::One(statement, args) => (statement, args, changing_one(&statement.sql)),
        };
        let mut written = Vec::new();
        let name = self.names.get(&statement.sql).cloned().unwrap_or_else(|| {
            self.made += 1;
            let name = format!("leasehold_{}", self.made);
            let types: Vec<_> = args.iter().map(type_of).collect();
            written.push((format!("PREPARE {name} ({}) AS {sql}", types.join(", ")), ""));
            self.names.insert(statement.sql.clone(), name.clone());
            name
        });
        let values: Vec<_> = args.iter().map(literal).collect();
        written.push((format!("EXECUTE {name} ({})", values.join(", ")), statement.shape));
        written
    }
}

/// Returns a statement that fails with a division by zero unless `sql` changes exactly one row.
fn changing_one(sql: &str) -> String {
    format!("WITH w AS ({sql} RETURNING 1) SELECT 1 / count(*) FROM w")
}

/// Returns a statement that returns the number of rows that `sql` changes, or `None` if `sql` has
/// other results.
fn counting(sql: &str) -> Option<String> {
    let changes = ["UPDATE ", "DELETE ", "INSERT "].iter().any(|word| sql.starts_with(word));
    let is_plain = changes && !sql.contains("RETURNING") && !sql.contains("; ");
    is_plain.then(|| format!("WITH w AS ({sql} RETURNING 1) SELECT count(*) FROM w"))
}

fn type_of(arg: &Arg) -> &'static str {
    match arg {
        Arg::Int(_) => "bigint",
        Arg::Text(_) | Arg::Name(_) => "text",
    }
}

fn literal(arg: &Arg) -> String {
    match arg {
        Arg::Int(n) => format!("({n})::bigint"),
        Arg::Text(text) | Arg::Name(text) if message::is_word(text) => format!("'{text}'::text"),
        Arg::Text(text) | Arg::Name(text) => {
            format!("convert_from(decode('{}', 'hex'), 'UTF8')", message::hex(text))
        }
    }
}

async fn send(
    connection: &mut PgConnection,
    message: Message,
    done: &mut Vec<Vec<Cells>>,
) -> sqlx::Result<()> {
    let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(message.sql.clone()));
    message.read::<sqlx::Postgres>(sql.fetch_many(connection), text, done).await
}

/// Sends a script of statements that are prepared on this connection. New ones are prepared first.
/// After a failure it is unknown which of them were prepared. So all statements are prepared again
/// under other names.
async fn send_prepared(
    connection: &mut PgConnection,
    plans: &mut Plans,
    steps: Vec<Step<'_>>,
    done: &mut Vec<Vec<Cells>>,
) -> sqlx::Result<()> {
    let made = plans.made;
    let sent = send(connection, Message::of(steps, |step| plans.written(step)), done).await;
    if sent.is_err() && plans.made > made {
        plans.names.clear();
    }
    sent
}

#[async_trait]
impl Wire for Own {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        Wire::rows(&mut self.connection, statement, args).await
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        Wire::run(&mut self.connection, statement, args).await
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        Wire::raw(&mut self.connection, sql).await
    }

    async fn script(
        &mut self,
        steps: Vec<Step<'_>>,
        done: &mut Vec<Vec<Cells>>,
    ) -> sqlx::Result<()> {
        send_prepared(&mut self.connection, &mut self.plans, steps, done).await
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        Wire::close(Box::new(self.connection)).await
    }
}

/// A connection on which nothing may remain prepared.
enum Unprepared {
    Ours(PgConnection),
    Borrowed(Borrowed<sqlx::Postgres>),
}

fn inner(connection: &mut Unprepared) -> sqlx::Result<&mut PgConnection> {
    match connection {
        Unprepared::Ours(connection) => Ok(connection),
        Unprepared::Borrowed(borrowed) => borrowed.connection(),
    }
}

fn whole(connection: Unprepared) -> sqlx::Result<PgConnection> {
    match connection {
        Unprepared::Ours(connection) => Ok(connection),
        Unprepared::Borrowed(borrowed) => borrowed.detached(),
    }
}

wire!(Unprepared, std::convert::identity, text, no_id, inner, whole, false);

/// A borrowed connection, or a connection to a pooler that runs each transaction on any of its own
/// connections to the server.
///
/// On such a connection, a statement that was prepared under a name can be gone in the next
/// transaction. Or, worse, the name belongs to another client's statement. Preparing without a name
/// is a transaction of its own unless one is open. So every statement is prepared and executed in
/// one transaction.
struct Pooled {
    connection: Unprepared,
    /// The statements that begin a transaction.
    begin: Arc<str>,
    /// Whether the caller has begun a transaction.
    begun: bool,
}

impl Pooled {
    /// Returns `sql`, or `self.begin` in place of a BEGIN. On a pooled connection each transaction
    /// must set the session parameters again; our own sessions set them only once.
    fn words<'a>(&'a self, sql: &'a str) -> &'a str {
        if sql.starts_with("BEGIN") { &self.begin } else { sql }
    }

    fn written(&self, step: Step<'_>) -> Vec<(String, &'static str)> {
        match step {
            Step::Raw(sql) => message::words(self.words(&sql)),
            step => unprepared(step),
        }
    }

    /// Rolls back. The caller reports the first error. If the rollback fails too, the next call
    /// will fail.
    async fn rolled_back(&mut self) {
        if self.connection.raw("ROLLBACK").await.is_ok() {
            self.begun = false;
        }
    }
}

#[async_trait]
impl Wire for Pooled {
    /// Runs the statement in a transaction of its own, in one message, unless a transaction is
    /// open.
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        if self.begun {
            return self.connection.rows(statement, args).await;
        }
        let [begin, commit] = ["BEGIN", "COMMIT"].map(|words| Step::Raw(words.into()));
        let mut done = Vec::new();
        let sent = self.script(vec![begin, Step::Rows(statement, args), commit], &mut done).await;
        if sent.is_err() {
            self.rolled_back().await;
        }
        sent?;
        Ok(done.into_iter().nth(1).unwrap_or_default())
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        if self.begun {
            return self.connection.run(statement, args).await;
        }
        if let Some(counting) = counting(&statement.sql) {
            let counted = self.rows(&Statement { sql: counting.into(), shape: "i" }, args).await?;
            let affected = match counted.first().and_then(|row| row.first()) {
                Some(Cell::Int(Some(count))) => u64::try_from(*count).unwrap_or(0),
                _ => return Err(sqlx::Error::RowNotFound),
            };
            return Ok(Done { affected, last_id: 0 });
        }
        self.raw("BEGIN").await?;
        let done = self.connection.run(statement, args).await;
        match done {
            Ok(_) => self.raw("COMMIT").await?,
            Err(_) => self.rolled_back().await,
        }
        done
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        let words = self.words(sql).to_owned();
        self.connection.raw(&words).await?;
        // A COMMIT may be followed by a notification in the same message.
        let ends = sql.starts_with("COMMIT") || sql == "ROLLBACK";
        self.begun = !ends && (self.begun || sql.starts_with("BEGIN"));
        Ok(())
    }

    async fn script(
        &mut self,
        steps: Vec<Step<'_>>,
        done: &mut Vec<Vec<Cells>>,
    ) -> sqlx::Result<()> {
        let is = |step: &Step<'_>, word| matches!(step, Step::Raw(sql) if sql.starts_with(word));
        // If the script fails, a transaction that it has begun must be rolled back.
        self.begun |= steps.iter().any(|step| is(step, "BEGIN"));
        let end = steps.iter().position(|step| is(step, "COMMIT"));
        let before = done.len();
        let message = Message::of(steps, |step| self.written(step));
        let sent = send(inner(&mut self.connection)?, message, done).await;
        self.begun &= end.is_none_or(|end| done.len() - before <= end);
        sent
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        Box::new(self.connection).close().await
    }

    fn is_borrowed(&self) -> bool {
        matches!(self.connection, Unprepared::Borrowed(_))
    }

    fn rests(&mut self) {
        if let Unprepared::Borrowed(borrowed) = &mut self.connection
            && !self.begun
        {
            borrowed.is_clean();
        }
    }
}

/// Returns the wire for a borrowed connection.
pub(super) fn borrowed(connection: Borrowed<sqlx::Postgres>, begin: Arc<str>) -> Box<dyn Wire> {
    Box::new(Pooled { connection: Unprepared::Borrowed(connection), begin, begun: false })
}

fn unprepared(step: Step<'_>) -> Vec<(String, &'static str)> {
    match step {
        Step::Raw(sql) => message::words(&sql),
        Step::Rows(statement, args) => {
            vec![(message::filled(&statement.sql, &args, literal), statement.shape)]
        }
        Step::One(statement, args) => {
            vec![(message::filled(&changing_one(&statement.sql), &args, literal), "")]
        }
    }
}

/// Limits, in milliseconds. One ends the session of a client that is paused while it has a lock's
/// row locked, and the other limits the wait for such a row. They are set when a session starts, so
/// no transaction has to set them. A pooler that shares the server's sessions refuses or drops
/// them, which reveals the pooler.
const LIMITS: [(&str, &str); 2] =
    [("idle_in_transaction_session_timeout", "1000"), (LIMIT_SHOWN.0, "5000")];
/// The lock timeout in `LIMITS`, in the form in which PostgreSQL reports it. If the server reports
/// another value, it has not applied the limits.
pub(super) const LIMIT_SHOWN: (&str, &str) = ("lock_timeout", "5s");

/// The settings for planning our statements. The server plans each statement once for a session,
/// possibly while the tables are empty. It then prefers reading the whole table to an index. That
/// is right for an empty table and wrong later, because acquiring and releasing leaves thousands of
/// dead rows until they are vacuumed. (On older servers, `enable_seqscan = off` makes a statement
/// without an index look so expensive that they would compile it. So `jit` is off.)
const PLANS: [(&str, &str); 3] =
    [("enable_seqscan", "off"), ("jit", "off"), ("plan_cache_mode", "force_generic_plan")];
/// Each statement must see what was committed before it, even outside of an explicit transaction.
const ISOLATION: (&str, &str) = ("default_transaction_isolation", "read committed");

#[derive(Debug)]
pub(super) struct Postgres {
    url: SqlUrl,
    hosts: Hosts,
    /// The latest timeline of a primary, used if the URL names several hosts.
    timeline: Arc<AtomicU32>,
    /// The location of the tables, after a connection has found it.
    place: OnceLock<Place>,
}

impl Postgres {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        options(url)?;
        Ok(Self {
            url: url.clone(),
            hosts: Hosts::new(&url.hosts),
            timeline: Arc::default(),
            place: OnceLock::new(),
        })
    }

    async fn new_connection(&self) -> sqlx::Result<PgConnection> {
        let connected = self.connect_to_primary().await;
        match self.place.get().is_some() && self.url.can_change_password() {
            true => connected.map_err(fault::while_password_changes),
            false => connected,
        }
    }

    async fn connect_to_primary(&self) -> sqlx::Result<PgConnection> {
        let options = options(&self.url).map_err(fault::refused)?;
        let connect = |server: Arc<Server>| {
            let (options, latest) = (at(options.clone(), &server), self.timeline.clone());
            async move {
                let mut connection = connect_by_address(&options, &server.addresses).await?;
                if server.host.is_some() {
                    check_primary(&mut connection, &latest).await?;
                }
                Ok(connection)
            }
        };
        self.hosts.connect(connect).await
    }

    /// Returns the location of the tables, after the first connection.
    pub(super) fn place(&self) -> Option<&Place> {
        self.place.get()
    }

    /// Returns the options for connecting to the server that served last.
    fn options_of_last(&self) -> sqlx::Result<PgConnectOptions> {
        let server = self.hosts.last();
        let options = at(options(&self.url).map_err(fault::refused)?, server);
        Ok(by_address(&options, server.addresses.served()))
    }

    /// Verifies that a new connection leads to the tables, and restricts its search path.
    async fn arrive(&self, connection: &mut PgConnection) -> sqlx::Result<&Place> {
        let place = place::arrive(connection, &self.url, self.place.get()).await?;
        Ok(self.place.get_or_init(|| place))
    }
}

/// Returns the driver's options, with the current password.
fn options(url: &SqlUrl) -> Result<PgConnectOptions> {
    let options = match &url.callers {
        Some(CallersPool::Postgres(pool, _)) => Ok((*pool.connect_options()).clone()),
        _ => url.driver.parse().map_err(Failure::from),
    };
    let options: PgConnectOptions = options.map_err(Failure::into_error)?;
    let options = match options.get_application_name() {
        None => options.application_name("leasehold"),
        Some(_) => options,
    };
    let options = match &url.password {
        Some(password) => options.password(&password.now()),
        None => options,
    };
    let options = options.disable_statement_logging();
    Ok(match url.pooler {
        // A pooler refuses startup parameters, or applies them to its next client too. PgBouncer in
        // its default configuration refuses even the parameter that the driver sends by default.
        true => options.extra_float_digits(None),
        false => options.options(LIMITS).options(PLANS).options([ISOLATION]),
    })
}

fn at(options: PgConnectOptions, server: &Server) -> PgConnectOptions {
    match &server.host {
        Some(host) => options.host(&host.name).port(host.port),
        None => options,
    }
}

fn by_address(options: &PgConnectOptions, address: Option<IpAddr>) -> PgConnectOptions {
    match address {
        Some(ip) => options.clone().host(&ip.to_string()),
        None => options.clone(),
    }
}

async fn connect_by_address(
    options: &PgConnectOptions,
    addresses: &Addresses,
) -> sqlx::Result<PgConnection> {
    let host = options.get_host();
    let is_name = options.get_socket().is_none() && !host.starts_with('/');
    let connect = |by: Option<IpAddr>| {
        let options = by_address(options, by);
        async move { options.connect().await }
    };
    addresses.connect(is_name.then_some((host, options.get_port())), connect).await
}

/// Refuses one of several servers unless it is the primary. The primary accepts writes, and is on
/// the latest timeline that this client has seen. A former primary that runs again is on an earlier
/// timeline.
async fn check_primary(connection: &mut PgConnection, latest: &AtomicU32) -> sqlx::Result<()> {
    let refused = |what: String| Err(sqlx::Error::Io(std::io::Error::other(what)));
    let read_only = sqlx::raw_sql("SHOW transaction_read_only").fetch_one(&mut *connection).await?;
    if text(&read_only, 0)?.as_deref() == Some("on") {
        return refused("the server is read-only (a standby)".into());
    }
    let asked = sqlx::raw_sql(TIMELINE).fetch_one(connection).await;
    let timeline = match asked {
        Ok(row) => u32::from_str_radix(&text(&row, 0)?.unwrap_or_default(), 16).ok(),
        // Some providers do not allow this query.
        Err(sqlx::Error::Database(_)) => None,
        Err(error) => return Err(error),
    };
    let Some(timeline) = timeline else { return Ok(()) };
    match latest.fetch_max(timeline, Ordering::SeqCst) {
        newer if newer > timeline => refused(format!(
            "the server is a former primary (its timeline is {timeline}, and that of the primary {newer})"
        )),
        _ => Ok(()),
    }
}

/// The timeline of a server that is not in recovery.
const TIMELINE: &str =
    "SELECT pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8)";

#[async_trait]
impl Connect for Postgres {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let mut connection = self.new_connection().await.map_err(fault::as_pooler)?;
        let place = self.arrive(&mut connection).await?;
        Ok(match self.url.pooler {
            false => Box::new(Own { connection, plans: Plans::default() }),
            true => {
                let begin = place.begin(false).into();
                Box::new(Pooled { connection: Unprepared::Ours(connection), begin, begun: false })
            }
        })
    }
}

/// The pause before listening again after a failure.
const LISTEN_AGAIN: Duration = Duration::from_millis(200);
/// The time without a message after which the server is checked. If a device on the path forgets
/// the connection, neither side notices, and nothing is ever received on it.
const SILENCE: Duration = Duration::from_secs(15);
/// The time without waiting claims after which the client stops listening.
const REST: Duration = Duration::from_secs(10);
/// The time limit for starting to listen.
const ANSWER: Duration = Duration::from_secs(5);

/// Listens for grants of our claims by other clients, on a connection that also serves calls. Never
/// returns. After a period without listening, a poll finds the grants of that period. While no
/// connection can be opened, this task polls continuously.
pub(super) async fn listen(postgres: Arc<Postgres>, shared: Arc<Shared>) {
    loop {
        while shared.waiters.count() == 0 {
            shared.waiters.more().await;
        }
        let connection = tokio::select! {
            connection = PgListenConnection::begin(postgres.clone()) => connection,
            () = poll_meanwhile(&shared) => continue,
        };
        if let Ok(connection) = connection {
            shared.pool.listening().set(Box::new(connection)).await;
            listen_or_poll(&shared).await;
        }
        shared.waiters.ask_all();
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

/// Listens while a waiter is near the front of a queue, and polls otherwise (`postgres/positions.rs`). Ends
/// once the connection is lost.
async fn listen_or_poll(shared: &Shared) {
    let (listening, waiters) = (shared.pool.listening(), &shared.waiters);
    let mut listens = false;
    let mut polls = NotifiedPolls::default();
    // A call may borrow the connection in between. That does not restart the time without waiters.
    let mut resting = pin!(rest(waiters));
    loop {
        let poll_at = match shared.need(listens) {
            Need::Listen if !listens => {
                if !listening.run(&format!("LISTEN {}", shared.session)).await {
                    return;
                }
                listens = true;
                resting.set(rest(waiters));
                // Finds grants that were committed before.
                polls.poll(shared).await;
                continue;
            }
            Need::PollAt(due) if due <= Instant::now() => {
                polls.poll(shared).await;
                continue;
            }
            Need::PollAt(due) if listens => {
                if !listening.run("UNLISTEN *").await {
                    return;
                }
                listens = false;
                Some(due)
            }
            Need::PollAt(due) => Some(due),
            Need::Listen | Need::Nothing => None,
        };
        let result = tokio::select! {
            biased;
            () = polls.due() => {
                polls.poll(shared).await;
                continue;
            }
            () = shared.positions.changed() => continue,
            () = reached(poll_at) => continue,
            result = listening.listen(silence(waiters), at_rest(listens, resting.as_mut())) => {
                result
            }
        };
        match result {
            ListenResult::Message(message) => {
                polls.notified(waiters, &message);
                resting.set(rest(waiters));
            }
            ListenResult::Nothing => {}
            // A listening session costs each hand-over in the database a transaction.
            ListenResult::Enough => {
                if !listening.run("UNLISTEN *").await {
                    return;
                }
                listens = false;
            }
            ListenResult::Gone => return,
        }
    }
}

/// Waits until `due`, or forever if `due` is `None`.
async fn reached(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Resolves when a client that listens has had no waiter for a while.
async fn at_rest(listens: bool, resting: impl Future<Output = ()>) {
    match listens {
        true => resting.await,
        false => std::future::pending().await,
    }
}

/// Polls while this client cannot listen. Never returns.
async fn poll_meanwhile(shared: &Shared) {
    loop {
        tokio::time::sleep(LISTEN_AGAIN).await;
        if shared.waiters.count() > 0 {
            let _ = shared.ask_who_holds().await;
        }
    }
}

/// The listening connection.
struct PgListenConnection {
    listener: Option<PgListener>,
    plans: Plans,
    pool: PgPool,
    /// The runtime for the cleanup that the listener starts when it is dropped.
    runtime: Handle,
}

impl Drop for PgListenConnection {
    fn drop(&mut self) {
        let _here = self.runtime.enter();
        drop(self.listener.take());
    }
}

impl PgListenConnection {
    async fn begin(postgres: Arc<Postgres>) -> sqlx::Result<Self> {
        let options = postgres.options_of_last()?;
        // The listener needs a pool. The listening connection is the pool's only one.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(ANSWER)
            .test_before_acquire(false)
            .after_connect(move |connection, _| {
                let postgres = postgres.clone();
                Box::pin(async move {
                    if postgres.hosts.last().host.is_some() {
                        check_primary(connection, &postgres.timeline).await?;
                    }
                    postgres.arrive(connection).await.map(drop)
                })
            })
            .connect_lazy_with(options);
        let mut listener = PgListener::connect_with(&pool).await?;
        // If it reconnected in the middle of a call, the new connection would be outside of the
        // transaction.
        listener.eager_reconnect(false);
        let plans = Plans::default();
        Ok(Self { listener: Some(listener), plans, pool, runtime: Handle::current() })
    }

    async fn connection(&mut self) -> sqlx::Result<&mut PgConnection> {
        match &mut self.listener {
            Some(listener) => listener.acquire().await,
            None => Err(sqlx::Error::PoolClosed),
        }
    }
}

#[async_trait]
impl Wire for PgListenConnection {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        Wire::rows(self.connection().await?, statement, args).await
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        Wire::run(self.connection().await?, statement, args).await
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        Wire::raw(self.connection().await?, sql).await
    }

    async fn script(
        &mut self,
        steps: Vec<Step<'_>>,
        done: &mut Vec<Vec<Cells>>,
    ) -> sqlx::Result<()> {
        let Some(listener) = &mut self.listener else { return Err(sqlx::Error::PoolClosed) };
        send_prepared(listener.acquire().await?, &mut self.plans, steps, done).await
    }

    async fn close(mut self: Box<Self>) -> sqlx::Result<()> {
        drop(self.listener.take());
        self.pool.close().await;
        Ok(())
    }

    async fn notification(&mut self) -> sqlx::Result<Option<String>> {
        let Some(listener) = &mut self.listener else { return Ok(None) };
        Ok(listener.try_recv().await?.map(|message| message.payload().to_owned()))
    }
}

/// Resolves when nothing was received for a while and a claim waits.
async fn silence(waiters: &Waiters) {
    tokio::time::sleep(SILENCE).await;
    while waiters.count() == 0 {
        waiters.more().await;
    }
}

/// Resolves when no claim has waited for a while.
async fn rest(waiters: &Waiters) {
    let mut since = Instant::now();
    while since.elapsed() < REST {
        tokio::time::sleep(REST / 8).await;
        if waiters.count() > 0 {
            since = Instant::now();
        }
    }
}

/// The shortest and the longest pause before a poll after false notifications.
const DOUBT: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(320)];

/// The schedule of polls that notifications cause.
#[derive(Debug, Default)]
struct NotifiedPolls {
    /// Whether a notification named a grant that is not known yet.
    is_due: bool,
    not_before: Option<Instant>,
    doubt: Duration,
    /// The grants that the last poll found.
    found: Vec<(ClaimId, Token)>,
    /// The grants named by notifications since then, newest first.
    named: Vec<(ClaimId, Token)>,
}

impl NotifiedPolls {
    /// Records the content of a notification.
    fn notified(&mut self, waiters: &Waiters, message: &str) {
        let Some(named) = read(message).filter(|(id, _)| waiters.has(*id)) else { return };
        if !self.found.contains(&named) {
            self.is_due = true;
            // The latest notifications are enough to decide whether any was true.
            self.named.truncate(64);
            self.named.insert(0, named);
        }
    }

    /// Waits until the next poll is due.
    async fn due(&self) {
        match (self.is_due, self.not_before) {
            (false, _) => std::future::pending().await,
            (true, Some(at)) => tokio::time::sleep_until(at).await,
            (true, None) => {}
        }
    }

    /// Polls, and notifies the waiters that hold. If the poll fails, each notified waiter polls on
    /// its own.
    async fn poll(&mut self, shared: &Shared) {
        self.is_due = false;
        let named = std::mem::take(&mut self.named);
        let Some(found) = shared.poll_places().await else {
            named.iter().for_each(|(id, _)| shared.waiters.notify(*id, Signal::Ask));
            return self.doubted();
        };
        for (id, token) in &found {
            shared.waiters.notify(*id, Signal::Granted(*token));
        }
        match named.iter().any(|named| found.contains(named)) {
            true => (self.doubt, self.not_before) = (Duration::ZERO, None),
            false if named.is_empty() => {}
            false => self.doubted(),
        }
        self.found = found;
    }

    fn doubted(&mut self) {
        self.doubt = (self.doubt * 2).clamp(DOUBT[0], DOUBT[1]);
        self.not_before = Some(Instant::now() + self.doubt);
    }
}

/// Returns the notification for the client of a granted claim.
pub(super) fn message(id: ClaimId, token: Token) -> String {
    format!("{} {token}", id.to_hex())
}

/// Returns the notifications that follow a COMMIT in its message, as a separate transaction. A
/// NOTIFY makes a commit wait until every other commit with a NOTIFY in the server is flushed. So
/// the durable changes are not in this transaction. It contains nothing that must be durable, so it
/// is not flushed. Channels that are not a client's name are left out, because they are written
/// into SQL.
pub(super) fn notify_statement(notifications: &[(&str, String)]) -> Option<String> {
    let plain = |channel: &str| {
        channel.len() < 64 && channel.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    let notifications = notifications.iter().filter(|(channel, _)| plain(channel));
    let all: String = notifications
        .map(|(channel, message)| format!(", pg_notify('{channel}', '{message}')"))
        .collect();
    (!all.is_empty()).then(|| format!("SELECT set_config('synchronous_commit', 'off', true){all}"))
}

fn read(message: &str) -> Option<(ClaimId, Token)> {
    let (id, token) = message.split_once(' ')?;
    Some((ClaimId::from_hex(id)?, token.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    // F37
    #[test]
    fn notification_follows_the_commit_and_is_never_sql() {
        let statement = |channel| notify_statement(&[(channel, "a 7".to_owned())]);
        assert_eq!(
            statement("leasehold_hears_1f").as_deref(),
            Some(
                "SELECT set_config('synchronous_commit', 'off', true), \
                 pg_notify('leasehold_hears_1f', 'a 7')"
            )
        );
        assert_eq!(statement("leasehold_hears_'); DROP TABLE x; --"), None);
        let two = notify_statement(&[("a", "x".to_owned()), ("b", "y".to_owned())]).unwrap();
        assert!(two.ends_with(", pg_notify('a', 'x'), pg_notify('b', 'y')"));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_notification_is_parsed_or_ignored(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef 42",
        ])) {
            if let Some((id, token)) = read(&text) {
                let written = message(id, token);
                proptest::prop_assert_eq!(read(&written), Some((id, token)));
            }
        }
    }
}
