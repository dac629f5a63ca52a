//! PostgreSQL.
//!
//! # A notification is not a grant
//! Any role that may connect to the database may send a notification to any channel, and whoever may read the
//! tables knows what ours say. So a notification is a reason to look, and nothing else: what a waiter is told is
//! what the rows say (`granted`), read after it came.
//! - *What it costs.* One statement for a client that is notified, however many of its claims were granted by then; it
//!   is a read of an index, on a connection that is there. A secret in the notification would save it, but whoever
//!   grants has to read it in the row of the claim, and so could any role that may read all tables
//!   (`pg_read_all_data`), which is whom this is about.
//! - *Forged, it is harmless.* A notification for a claim that does not wait here, or whose grant was just found, is
//!   dropped. After one that was not true the next look comes later ([`DOUBT`]), so a flood costs a few reads a
//!   second; a grant among it is found by the look that is due then. A waiter is told nothing that is not so: it
//!   keeps its place, and its heartbeats go on as without.
//! - *Lost, late or twice*, it is made good by the heartbeats, or finds what is known.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgListener, PgPool, PgPoolOptions, PgQueryResult, PgRow,
};
use sqlx::{Acquire, ConnectOptions, Row};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::addresses::Addresses;
use super::borrowed::Borrowed;
use super::callers::CallersPool;
use super::ear::{Ear, Heard};
use super::fault::{self, Failure};
use super::message::{self, Message};
use super::place::{self, Place};
use super::shared::Shared;
use super::url::SqlUrl;
use super::wire::{Arg, Cell, Connect, Done, Row as Cells, Statement, Step, Wire, wire};
use leasehold_core::kit::Waiters;
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Result, Token};

fn text(row: &PgRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &PgQueryResult) -> u64 {
    0
}

wire!(PgConnection, std::convert::identity, text, no_id);

/// A connection of ours alone: what its scripts are made of is prepared on it.
#[derive(Debug)]
struct Own {
    connection: PgConnection,
    plans: Plans,
}

/// What was prepared on a connection, for scripts: a message without arguments is planned anew each
/// time, which costs more than the work.
#[derive(Debug, Default)]
struct Plans {
    names: HashMap<Arc<str>, String>,
    made: usize,
}

impl Plans {
    /// The statements of a step, and before them what prepares it if it is new.
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

/// Fails, by dividing by zero, unless the statement changes exactly one row: the row of a key.
fn changing_one(sql: &str) -> String {
    format!("WITH w AS ({sql} RETURNING 1) SELECT 1 / count(*) FROM w")
}

/// Answers how many rows the statement changed, if that is all there is to answer.
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

/// Sends a script of what is prepared on this connection, or is from now on. After a failure nobody
/// knows how much of it was prepared: all is prepared anew, under other names.
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

/// A connection on which nothing may be left prepared.
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

/// A connection to a pooler that gives each transaction any of its own connections to the server, or one that is
/// borrowed.
///
/// There a statement that was prepared under a name is gone in the next transaction, or, worse, is
/// another client's statement of the same name. And preparing without a name is a transaction of
/// its own unless one is open: so everything is done in one, and prepared in the same.
struct Pooled {
    connection: Unprepared,
    /// How a transaction begins.
    begin: Arc<str>,
    /// Whether the caller has begun a transaction.
    begun: bool,
}

impl Pooled {
    /// A transaction says with its BEGIN what our own sessions have said before.
    fn words<'a>(&'a self, sql: &'a str) -> &'a str {
        if sql.starts_with("BEGIN") { &self.begin } else { sql }
    }

    fn written(&self, step: Step<'_>) -> Vec<(String, &'static str)> {
        match step {
            Step::Raw(sql) => message::words(self.words(&sql)),
            step => unprepared(step),
        }
    }

    /// The first error is the one to tell; if a rollback fails too, so will what comes next.
    async fn rolled_back(&mut self) {
        if self.connection.raw("ROLLBACK").await.is_ok() {
            self.begun = false;
        }
    }
}

#[async_trait]
impl Wire for Pooled {
    /// A transaction of its own is one message.
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
        // A COMMIT may have a notification behind it.
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
        // Whatever comes of it: what was begun is rolled back.
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

/// How what is borrowed is spoken to.
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

/// What ends a client that was stopped with a lock's row in its hands, and who waits for one: in
/// milliseconds. Set as a session begins, so that no transaction has to. A pooler that lends the
/// server's sessions refuses them or drops them, and is found out by that.
const LIMITS: [(&str, &str); 2] =
    [("idle_in_transaction_session_timeout", "1000"), (LIMIT_SHOWN.0, "5000")];
/// One of them, as the server shows it where it has arrived.
pub(super) const LIMIT_SHOWN: (&str, &str) = ("lock_timeout", "5s");

/// How our statements are planned. The server plans each once for a session, perhaps when the tables are empty,
/// and reads all of an empty table rather than an index: rightly then, and wrongly from then on, for what
/// others take and release leaves dead rows in it by the thousand, until they are swept. (What has no index
/// is made so dear by that on older servers that they would compile it.)
const PLANS: [(&str, &str); 3] =
    [("enable_seqscan", "off"), ("jit", "off"), ("plan_cache_mode", "force_generic_plan")];
/// Each statement must see what was committed before it, also where nobody has said BEGIN.
const ISOLATION: (&str, &str) = ("default_transaction_isolation", "read committed");

#[derive(Debug)]
pub(super) struct Postgres {
    options: PgConnectOptions,
    addresses: Addresses,
    /// What of the URL says where the tables are.
    url: SqlUrl,
    /// Where they are, once a connection has found out.
    place: OnceLock<Place>,
}

impl Postgres {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let options = match &url.callers {
            Some(CallersPool::Postgres(pool, _)) => Ok((*pool.connect_options()).clone()),
            _ => url.driver.parse::<PgConnectOptions>().map_err(Failure::from),
        };
        let options = options.map_err(Failure::into_error)?.disable_statement_logging();
        let options = match options.get_application_name() {
            None => options.application_name("leasehold"),
            Some(_) => options,
        };
        let options = match url.pooler {
            // A pooler refuses startup parameters, or applies them to its next client too. PgBouncer, as it is
            // installed, refuses even the one that the driver sends by default.
            true => options.extra_float_digits(None),
            false => options.options(LIMITS).options(PLANS).options([ISOLATION]),
        };
        Ok(Self {
            options,
            addresses: Addresses::default(),
            url: url.clone(),
            place: OnceLock::new(),
        })
    }

    async fn new_connection(&self) -> sqlx::Result<PgConnection> {
        let host = self.options.get_host();
        let is_name = self.options.get_socket().is_none() && !host.starts_with('/');
        let host = is_name.then_some((host, self.options.get_port()));
        let connect = |by: Option<IpAddr>| {
            let options = self.options_by(by);
            async move { options.connect().await }
        };
        self.addresses.connect(host, connect).await
    }

    fn options_by(&self, address: Option<IpAddr>) -> PgConnectOptions {
        match address {
            Some(ip) => self.options.clone().host(&ip.to_string()),
            None => self.options.clone(),
        }
    }

    /// Where the tables are: known as soon as there was a connection.
    pub(super) fn place(&self) -> Option<&Place> {
        self.place.get()
    }

    /// Makes sure that a new connection leads to the tables, and finds nothing else.
    async fn arrive(&self, connection: &mut PgConnection) -> sqlx::Result<&Place> {
        let place = place::arrive(connection, &self.url, self.place.get()).await?;
        Ok(self.place.get_or_init(|| place))
    }
}

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

/// How long after a failure listening begins anew.
const LISTEN_AGAIN: Duration = Duration::from_millis(200);
/// How long nothing may be heard before it is asked whether the server is still there. A connection
/// that somebody on the way has forgotten ends for neither side, and nothing is heard on it for ever.
const SILENCE: Duration = Duration::from_secs(15);
/// How long nobody may have waited before it does not listen any more.
const REST: Duration = Duration::from_secs(10);
/// How long it may take to begin to listen.
const ANSWER: Duration = Duration::from_secs(5);

/// Listens for what other clients grant to ours, on a connection that serves for calls as well. Never
/// ends by itself. What was sent while nobody listened is made good by asking; while none can be had,
/// it is asked all the time.
pub(super) async fn listen(postgres: Arc<Postgres>, shared: Arc<Shared>) {
    loop {
        while shared.waiters.count() == 0 {
            shared.waiters.more().await;
        }
        let hearing = tokio::select! {
            hearing = Hearing::begin(postgres.clone(), &shared.session) => hearing,
            () = ask_meanwhile(&shared) => continue,
        };
        if let Ok(hearing) = hearing {
            let ear = shared.pool.ear();
            ear.is_now(Box::new(hearing)).await;
            shared.waiters.ask_all();
            // Whoever borrows the connection in between changes nothing of how long nobody has waited.
            let mut resting = pin!(rest(&shared.waiters));
            let mut looks = Looks::default();
            loop {
                let heard = tokio::select! {
                    biased;
                    () = looks.due() => {
                        looks.look(&shared).await;
                        continue;
                    }
                    heard = ear.hear(silence(&shared.waiters), resting.as_mut()) => heard,
                };
                match heard {
                    Heard::Message(message) => {
                        looks.notified(&shared.waiters, &message);
                        resting.set(rest(&shared.waiters));
                    }
                    Heard::Nothing => {}
                    Heard::Enough => {
                        if !be_deaf(&shared, ear).await {
                            break;
                        }
                        resting.set(rest(&shared.waiters));
                    }
                    Heard::Gone => break,
                }
            }
        }
        shared.waiters.ask_all();
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

/// Stands in for what nobody hears. Never ends.
async fn ask_meanwhile(shared: &Shared) {
    loop {
        tokio::time::sleep(LISTEN_AGAIN).await;
        if shared.waiters.count() > 0 {
            let _ = shared.ask_who_holds().await;
        }
    }
}

/// A connection that listens.
struct Hearing {
    listener: Option<PgListener>,
    plans: Plans,
    pool: PgPool,
    /// What the listener leaves behind as it is dropped is done there.
    runtime: Handle,
}

impl Drop for Hearing {
    fn drop(&mut self) {
        let _here = self.runtime.enter();
        drop(self.listener.take());
    }
}

impl Hearing {
    async fn begin(postgres: Arc<Postgres>, channel: &str) -> sqlx::Result<Self> {
        let options = postgres.options_by(postgres.addresses.served());
        // The listener wants a pool; this one is its only connection.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(ANSWER)
            .test_before_acquire(false)
            .after_connect(move |connection, _| {
                let postgres = postgres.clone();
                Box::pin(async move { postgres.arrive(connection).await.map(drop) })
            })
            .connect_lazy_with(options);
        let mut listener = PgListener::connect_with(&pool).await?;
        // Another connection in the middle of a call would be outside of its transaction.
        listener.eager_reconnect(false);
        listener.listen(channel).await?;
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
impl Wire for Hearing {
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

    async fn hear(&mut self) -> sqlx::Result<Option<String>> {
        let Some(listener) = &mut self.listener else { return Ok(None) };
        Ok(listener.try_recv().await?.map(|message| message.payload().to_owned()))
    }
}

/// Resolves when nothing was heard for a while, and somebody waits to hear something.
async fn silence(waiters: &Waiters) {
    tokio::time::sleep(SILENCE).await;
    while waiters.count() == 0 {
        waiters.more().await;
    }
}

/// Resolves when nobody has waited for a while.
async fn rest(waiters: &Waiters) {
    let mut since = Instant::now();
    while since.elapsed() < REST {
        tokio::time::sleep(REST / 8).await;
        if waiters.count() > 0 {
            since = Instant::now();
        }
    }
}

/// Stops listening until somebody waits: any news wakes all who listen in that database, whomever it is
/// for. What comes meanwhile is made good by asking. Whether the connection is still there.
async fn be_deaf(shared: &Shared, ear: &Ear) -> bool {
    if !ear.say("UNLISTEN *").await {
        return false;
    }
    while shared.waiters.count() == 0 {
        shared.waiters.more().await;
    }
    let listens = ear.say(&format!("LISTEN {}", shared.session)).await;
    shared.waiters.ask_all();
    listens
}

/// The pauses before a look after notifications that were not true.
const DOUBT: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(320)];

/// When to look who of our waiters holds, because of notifications.
#[derive(Debug, Default)]
struct Looks {
    /// Whether there was one of which nothing is known.
    is_due: bool,
    not_before: Option<Instant>,
    doubt: Duration,
    /// What the last look has found, and what it was because of.
    found: Vec<(ClaimId, Token)>,
    named: Vec<(ClaimId, Token)>,
}

impl Looks {
    /// Notes what a notification says.
    fn notified(&mut self, waiters: &Waiters, message: &str) {
        let Some(named) = read(message).filter(|(id, _)| waiters.has(*id)) else { return };
        if !self.found.contains(&named) {
            self.is_due = true;
            // The last ones are enough to tell whether any was true.
            self.named.truncate(64);
            self.named.insert(0, named);
        }
    }

    /// Resolves when it is time to look.
    async fn due(&self) {
        match (self.is_due, self.not_before) {
            (false, _) => std::future::pending().await,
            (true, Some(at)) => tokio::time::sleep_until(at).await,
            (true, None) => {}
        }
    }

    /// Looks, and tells those that hold. What cannot be read is asked by each waiter for itself.
    async fn look(&mut self, shared: &Shared) {
        self.is_due = false;
        let named = std::mem::take(&mut self.named);
        let Some(found) = shared.who_holds_by(&shared.beats).await else {
            named.iter().for_each(|(id, _)| shared.waiters.tell(*id, Signal::Ask));
            return self.doubted();
        };
        for (id, token) in &found {
            shared.waiters.tell(*id, Signal::Granted(*token));
        }
        match named.iter().any(|named| found.contains(named)) {
            true => (self.doubt, self.not_before) = (Duration::ZERO, None),
            false => self.doubted(),
        }
        self.found = found;
    }

    fn doubted(&mut self) {
        self.doubt = (self.doubt * 2).clamp(DOUBT[0], DOUBT[1]);
        self.not_before = Some(Instant::now() + self.doubt);
    }
}

/// What is sent to the client of a claim that was granted.
pub(super) fn message(id: ClaimId, token: Token) -> String {
    format!("{} {token}", id.to_hex())
}

/// The notifications that follow a COMMIT in its message, as a transaction of their own: a NOTIFY makes
/// a commit wait for every other in the server that has one, to the end of its flush. So what is durable
/// is not in it, and what is in it need not be: it is not flushed. Channels that are not a client's
/// name are left out, since this is written into SQL.
pub(super) fn telling(told: &[(&str, String)]) -> Option<String> {
    let plain = |channel: &str| {
        channel.len() < 64 && channel.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    let told = told.iter().filter(|(channel, _)| plain(channel));
    let all: String =
        told.map(|(channel, message)| format!(", pg_notify('{channel}', '{message}')")).collect();
    (!all.is_empty()).then(|| format!("SELECT set_config('synchronous_commit', 'off', true){all}"))
}

fn read(message: &str) -> Option<(ClaimId, Token)> {
    let (id, token) = message.split_once(' ')?;
    Some((ClaimId::from_hex(id)?, token.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f37_news_travels_behind_the_commit_and_is_never_sql() {
        let told = |channel| telling(&[(channel, "a 7".to_owned())]);
        assert_eq!(
            told("leasehold_hears_1f").as_deref(),
            Some(
                "SELECT set_config('synchronous_commit', 'off', true), \
                 pg_notify('leasehold_hears_1f', 'a 7')"
            )
        );
        assert_eq!(told("leasehold_hears_'); DROP TABLE x; --"), None);
        let two = telling(&[("a", "x".to_owned()), ("b", "y".to_owned())]).unwrap();
        assert!(two.ends_with(", pg_notify('a', 'x'), pg_notify('b', 'y')"));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn news_from_outside_is_read_or_none(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef 42",
        ])) {
            if let Some((id, token)) = read(&text) {
                let written = message(id, token);
                proptest::prop_assert_eq!(read(&written), Some((id, token)));
            }
        }
    }
}
