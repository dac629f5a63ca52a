//! PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgListener, PgPoolOptions, PgQueryResult, PgRow,
};
use sqlx::{ConnectOptions, Row};

use super::super::waiters::Waiters;
use super::fault::Failure;
use super::url::SqlUrl;
use super::wire::{Arg, Connect, Done, Row as Cells, Statement, Wire, wire};
use crate::claim::ClaimId;
use crate::error::Result;
use crate::store::Signal;

fn text(row: &PgRow, i: usize) -> sqlx::Result<Option<String>> {
    row.try_get(i)
}

fn no_id(_: &PgQueryResult) -> u64 {
    0
}

wire!(PgConnection, std::convert::identity, text, no_id);

/// A connection on which nothing may be left prepared.
struct Unprepared(PgConnection);

fn inner(connection: &mut Unprepared) -> &mut PgConnection {
    &mut connection.0
}

fn whole(connection: Unprepared) -> PgConnection {
    connection.0
}

wire!(Unprepared, std::convert::identity, text, no_id, inner, whole, false);

/// A connection to a pooler that gives each transaction any of its own connections to the server.
///
/// There a statement that was prepared under a name is gone in the next transaction, or, worse, is
/// another client's statement of the same name. And preparing without a name is a transaction of
/// its own unless one is open: so everything is done in one, and prepared in the same.
struct Pooled {
    connection: Unprepared,
    /// Whether the caller has begun a transaction.
    begun: bool,
}

impl Pooled {
    async fn end<T>(&mut self, done: sqlx::Result<T>) -> sqlx::Result<T> {
        match (self.begun, &done) {
            (true, _) => {}
            (false, Ok(_)) => self.connection.raw("COMMIT").await?,
            // The first error is the one to tell; if this fails too, so will what comes next.
            (false, Err(_)) => drop(self.connection.raw("ROLLBACK").await),
        }
        done
    }

    async fn begin(&mut self) -> sqlx::Result<()> {
        match self.begun {
            true => Ok(()),
            false => self.connection.raw(BEGIN_POOLED).await,
        }
    }
}

#[async_trait]
impl Wire for Pooled {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        self.begin().await?;
        let rows = self.connection.rows(statement, args).await;
        self.end(rows).await
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        self.begin().await?;
        let done = self.connection.run(statement, args).await;
        self.end(done).await
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        self.connection.raw(sql).await?;
        self.begun = match sql {
            "COMMIT" | "ROLLBACK" => false,
            _ => self.begun || sql.starts_with("BEGIN"),
        };
        Ok(())
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        Box::new(self.connection).close().await
    }
}

/// What ends a client that was stopped with a lock's row in its hands, and who waits for one: in
/// milliseconds. Set as a session begins, so that no transaction has to. A pooler that lends the
/// server's sessions refuses them or drops them, and is found out by that.
const LIMITS: [(&str, &str); 2] =
    [("idle_in_transaction_session_timeout", "1000"), (LIMIT_SHOWN.0, "5000")];
/// One of them, as the server shows it where it has arrived.
pub(super) const LIMIT_SHOWN: (&str, &str) = ("lock_timeout", "5s");

/// The same for each transaction behind a pooler, where the session is not ours: sent with the BEGIN,
/// so that it costs no round trip.
pub(super) const BEGIN_POOLED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
     SET LOCAL idle_in_transaction_session_timeout = 1000; SET LOCAL lock_timeout = 5000";

#[derive(Debug)]
pub(super) struct Postgres {
    options: PgConnectOptions,
    /// Whether a pooler of that kind is in front.
    pooler: bool,
}

impl Postgres {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let options = url.driver.parse::<PgConnectOptions>().map_err(Failure::from);
        let options = options.map_err(Failure::into_error)?.disable_statement_logging();
        let options = match options.get_application_name() {
            None => options.application_name("leasehold"),
            Some(_) => options,
        };
        let options = match url.pooler {
            // It would refuse them, or give them to whoever comes next.
            true => options,
            false => options.options(LIMITS),
        };
        Ok(Self { options, pooler: url.pooler })
    }

    pub(super) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }
}

#[async_trait]
impl Connect for Postgres {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let connection = self.options.connect().await?;
        Ok(match self.pooler {
            false => Box::new(connection),
            true => Box::new(Pooled { connection: Unprepared(connection), begun: false }),
        })
    }
}

/// How long after a failure listening begins anew.
const LISTEN_AGAIN: Duration = Duration::from_millis(200);
/// How long nothing may be heard before it is asked whether the server is still there. A connection
/// that somebody on the way has forgotten ends for neither side, and nothing is heard on it for ever.
const SILENCE: Duration = Duration::from_secs(15);
/// How long the answer to that may take.
const ANSWER: Duration = Duration::from_secs(5);

/// Listens for what other clients grant to ours, on one connection of its own. Never ends by
/// itself. What was sent while nobody listened is made good by asking.
pub(super) async fn listen(options: PgConnectOptions, channel: String, waiters: Arc<Waiters>) {
    while waiters.count() == 0 {
        waiters.more().await;
    }
    loop {
        let _ = listen_once(options.clone(), &channel, &waiters).await;
        waiters.ask_all();
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

async fn listen_once(
    options: PgConnectOptions,
    channel: &str,
    waiters: &Waiters,
) -> sqlx::Result<()> {
    // The listener wants a pool; this one is its only connection.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(options);
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(channel).await?;
    waiters.ask_all();
    loop {
        tokio::select! {
            message = listener.try_recv() => {
                let Some(message) = message? else { return Ok(()) };
                if let Some((id, signal)) = read(message.payload()) {
                    waiters.tell(id, signal);
                }
            }
            () = silence(waiters) => still_there(&mut listener).await?,
        }
    }
}

/// Resolves when nothing was heard for a while, and somebody waits to hear something.
async fn silence(waiters: &Waiters) {
    tokio::time::sleep(SILENCE).await;
    while waiters.count() == 0 {
        waiters.more().await;
    }
}

/// Fails if the server does not answer on the connection that listens.
async fn still_there(listener: &mut PgListener) -> sqlx::Result<()> {
    let asked = tokio::time::timeout(ANSWER, sqlx::raw_sql("SELECT 1").execute(listener)).await;
    asked.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))?.map(drop)
}

/// What is sent to the client of a claim that was granted.
pub(super) fn message(id: ClaimId, token: crate::claim::Token) -> String {
    format!("{} {token}", id.to_hex())
}

fn read(message: &str) -> Option<(ClaimId, Signal)> {
    let (id, token) = message.split_once(' ')?;
    Some((ClaimId::from_hex(id)?, Signal::Granted(token.parse().ok()?)))
}
