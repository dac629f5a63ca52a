//! Idempotency keys: work that is done once, however often it is asked for.
//!
//! A key is a lock that is never released. Whoever inserts its row first does the work; everybody
//! after that gets the stored outcome. The database's unique index decides who is first, so there
//! is no moment between looking and inserting.
//!
//! [`run_in`](Once::run_in) puts key and work into *one transaction*: both commit or neither does.
//! A racing caller waits on the unique index until the first has committed (then it gets the
//! outcome) or rolled back (then it is the first); a crash is a rollback. The work is done exactly
//! once. It stands in a savepoint of its own, so that work that fails takes its key with it even if
//! the caller goes on and commits.
//!
//! [`run`](Once::run) is for work outside of the database (a payment, an e-mail). No transaction can
//! hold such work, so the key has two states: *started*, under a lease that is renewed while the
//! work runs, and *done*. If the first attempt crashes, its lease ends and the next caller takes
//! over; the attempt's number says that an earlier one may have done a part. Only one attempt at
//! a time is ever within its lease, and only the current one can write the outcome. What
//! remains, and no key can close: an attempt that was paused may find out too late that it lost its
//! lease. So give the other side the key too, where it takes one; and what is written in the database
//! of the key itself, write in a transaction that begins with [`Attempt::check`]. (The lease is
//! judged by the database's wall clock: one that is set forward ends it early, and the attempt is
//! told at its next renewal.)
//!
//! **What was done is never done again for want of a place for its outcome.** Text that a database
//! cannot hold (PostgreSQL has no NUL) is stored escaped. An outcome that the database refuses all
//! the same (too long, another character set, a trigger) is left out, and the key is done without
//! it: the first caller gets it, those who come later are told that it is gone.
//!
//! **A pool that the work itself uses up starves no renewals**: what the pool does not give soon is
//! done on a connection beside it.
//!
//! **Only the key's own row makes a duplicate.** `INSERT IGNORE` turns every error of the write into
//! a warning, and a unique index of the caller's own table may be hit for reasons that are no
//! duplicate request. Here the insert of the key stands alone; an error of the work is the work's.

mod fingerprint;
mod work;

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use crate::database::{
    Column, Dialect, Pool, Savepoint, Session, Transaction, Value, micros, number, row, run,
};
use crate::versioned::jittered;
use fingerprint::Fingerprint;
use leasehold_core::kit::drift;
use leasehold_core::{
    ClaimId, Clock, DEFAULT_LEASE, Error, ErrorKind, LostReason, MAX_LEASE, MIN_LEASE, Moment,
    Name, Result, telemetry,
};
pub use work::Work;

/// How long [`Once::run`] waits for an attempt of somebody else, unless told otherwise.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// An idempotency key: 1 to 512 bytes, as a lock's name; a bad one is reported by the run.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn f(pool: sqlx::PgPool) -> leasehold::Result<()> {
/// use leasehold::{database::error, once, once::Ran};
/// let mut tx = pool.begin().await.map_err(error)?;
/// let ran = once("payment:8a1f").run_in(&mut tx, async |tx| {
///     let paying = sqlx::query("INSERT INTO payments (amount) VALUES (100)").execute(&mut **tx);
///     paying.await.map_err(error)?;
///     Ok::<_, leasehold::Error>("paid 100".to_owned())
/// });
/// match ran.await? {
///     Ran::First(outcome) => println!("{outcome}"),
///     Ran::Duplicate(outcome) => println!("{outcome} (before)"),
/// }
/// tx.commit().await.map_err(error)?;
/// # Ok(()) }
/// ```
pub fn once(key: impl AsRef<str>) -> Once {
    let fingerprint = Fingerprint::default();
    Once { key: Name::new(key), lease: DEFAULT_LEASE, wait: DEFAULT_WAIT, fingerprint }
}

/// An idempotency key; made by [`once()`].
#[derive(Debug)]
#[must_use = "nothing is done until run_in or run is called"]
pub struct Once {
    key: Result<Name>,
    lease: Duration,
    wait: Duration,
    fingerprint: Fingerprint,
}

/// Who did the work. The text is the work's outcome, the first time and every other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ran {
    /// This call did.
    First(String),
    /// An earlier call did; this one did nothing.
    Duplicate(String),
}

impl Ran {
    /// The outcome, whoever did the work.
    pub fn into_outcome(self) -> String {
        match self {
            Self::First(outcome) | Self::Duplicate(outcome) => outcome,
        }
    }

    /// Whether this call did the work.
    pub fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }
}

/// One attempt of [`Once::run`].
#[derive(Clone)]
pub struct Attempt {
    number: u64,
    key: Name,
    id: Value,
}

impl Attempt {
    /// 1 for the first. More: an earlier attempt crashed, failed or lost its lease, and may have
    /// done a part of the work.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Lets a transaction in the database of the key go on only if this is still the current
    /// attempt, and keeps others from taking over until it ends. So an attempt that was paused for
    /// longer than its lease cannot write late, once the next attempt has begun: what is written
    /// after this, in `tx`, is written before that. One statement, atomic at every isolation level.
    ///
    /// Until `tx` ends the lease cannot be renewed: keep it shorter than the lease.
    ///
    /// # Cancel safety
    /// Dropped meanwhile, it leaves the transaction as the driver leaves it: roll back.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`]: roll back, the work is somebody else's. [`ErrorKind::Conflict`] and what
    /// else the database answers.
    pub async fn check<T: Transaction + ?Sized>(&self, tx: &mut T) -> Result<()> {
        let sql = "UPDATE leasehold_once SET attempt = attempt \
                   WHERE name = ? AND attempt_id = ? AND state = 'started'";
        let with = [tx.dialect().name(&self.key), self.id.clone()];
        let checked = match run(tx, sql, &with).await {
            Ok(1) => return Ok(()),
            Ok(_) => Error::lost(LostReason::Gone),
            Err(fault) => fault.into(),
        };
        Err(checked.during("once").on(&self.key))
    }
}

impl fmt::Debug for Attempt {
    /// Without the secret that stores the outcome.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Attempt");
        shown.field("key", &self.key).field("number", &self.number).finish_non_exhaustive()
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attempt {}", self.number)
    }
}

impl Once {
    /// How long a crashed attempt of [`run`](Self::run) keeps others out (default 15 s, 50 ms to a
    /// day). It is renewed while the attempt runs.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long [`run`](Self::run) waits for somebody else's attempt (default 30 s).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// What is asked for under this key, such as the request's body: then the same key with another body is refused, as
    /// payment services do, instead of answered with an outcome that is not its own. A digest of it is kept with
    /// the key. Where the earlier call did not say what it asked for, nothing is known, and nothing is refused.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::{ErrorKind, database, once};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(database::error)?;
    /// # database::install(&pool).await?;
    /// let pay = async |amount: &'static str| {
    ///     let work = |_| async { Ok::<_, leasehold::Error>(format!("paid {amount}")) };
    ///     once("payment:8a1f").fingerprint(amount).run(&pool, work).await
    /// };
    /// assert!(pay("100").await?.is_first());
    /// assert!(!pay("100").await?.is_first());
    /// assert_eq!(pay("200").await.unwrap_err().kind(), ErrorKind::Mismatch); // HTTP: 422
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn fingerprint(mut self, request: impl AsRef<[u8]>) -> Self {
        self.fingerprint = Fingerprint::of(request.as_ref());
        self
    }

    /// Does `work` in `tx` if no committed transaction has done it under this key. Key, outcome
    /// and what `work` writes commit together, when the caller commits `tx`; if `work` fails, both
    /// are undone and the transaction is usable (after [`ErrorKind::Conflict`] it never is).
    ///
    /// `work` gets the transaction that was given, behind a savepoint, which costs two round trips. The work's
    /// future is one that may be sent ([`Work`] says no more than that).
    ///
    /// Needs the table `leasehold_once`: see [`database::install`].
    ///
    /// # Cancel safety
    /// Dropped meanwhile, it leaves the transaction as the driver leaves it: roll back.
    ///
    /// # Errors
    /// Those of `work`, as they are; [`ErrorKind::Mismatch`] if the key was used with another
    /// [`fingerprint`](Self::fingerprint); [`ErrorKind::Contended`] while an attempt of
    /// [`run`](Self::run) has this key; [`ErrorKind::Conflict`], [`ErrorKind::Timeout`] (a racing
    /// caller was waited for in vain) and what else the database answers.
    pub fn run_in<'a, T, E, F>(
        self,
        tx: &'a mut T,
        work: F,
    ) -> Pin<Box<dyn Future<Output = Result<Ran, E>> + Send + 'a>>
    where
        T: Transaction,
        E: From<Error> + Send + 'a,
        F: AsyncFnOnce(&mut T) -> Result<String, E> + Send + 'a,
        for<'t> F: Work<&'t mut T, Result<String, E>, Begun: Send>,
    {
        Box::pin(self.in_transaction(tx, work))
    }

    async fn in_transaction<T, E, F>(self, tx: &mut T, work: F) -> Result<Ran, E>
    where
        T: Transaction,
        E: From<Error> + Send,
        F: Send,
        for<'t> F: Work<&'t mut T, Result<String, E>, Begun: Send>,
    {
        let key = self.key.map_err(|e| e.during("once"))?;
        let failed = |e: Error| e.during("once").on(&key);
        let savepoint = Savepoint::set(tx).await.map_err(|e| failed(e.into()))?;
        let done = match begin(tx, &key, &self.fingerprint, &As::Done).await {
            Ok(Begun::Before(outcome)) => {
                outcome.map(Ran::Duplicate).ok_or_else(|| failed(outcome_gone()).into())
            }
            Ok(Begun::Busy) => {
                let what = "an attempt outside a transaction has this key: retry later";
                Err(failed(Error::new(ErrorKind::Contended, what)).into())
            }
            Ok(Begun::Ours(_)) => match work.begin(&mut *tx).await {
                Ok(outcome) => {
                    keep(tx, &key, outcome).await.map(Ran::First).map_err(|e| failed(e).into())
                }
                Err(e) => Err(e),
            },
            Err(e) => Err(failed(e).into()),
        };
        match done {
            Ok(ran) => {
                savepoint.keep(tx).await.map_err(|e| failed(e.into()))?;
                Ok(ran)
            }
            Err(error) => {
                // If this fails the connection or the transaction is gone, and the key with it.
                let _ = savepoint.undo(tx).await;
                Err(error)
            }
        }
    }

    /// Does `work`, outside of any transaction, if nobody has done it under this key; waits while
    /// somebody is at it, and takes over when that attempt's lease ends. No connection of the pool
    /// is held while `work` runs; where the pool gives none for a renewal, one is opened beside it.
    /// `work` is dropped at its next `.await` if the lease is lost. If `work`
    /// fails, the key is free for the next attempt at once.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::{database, once, once::Ran};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(database::error)?;
    /// database::install(&pool).await?;
    /// for time in 1..=2 {
    ///     // Give the other side the key as well, where it takes one.
    ///     let work = |attempt| async move { Ok::<_, leasehold::Error>(format!("receipt, {attempt}")) };
    ///     let ran = once("payment:8a1f").run(&pool, work).await?;
    ///     assert_eq!(ran.is_first(), time == 1);
    ///     assert_eq!(ran.into_outcome(), "receipt, attempt 1");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// A future that is dropped stops `work`, and leaves the key to the next attempt when the lease is over.
    ///
    /// # Errors
    /// Those of `work`, as they are; [`ErrorKind::Mismatch`] if the key was used with another
    /// [`fingerprint`](Self::fingerprint); [`ErrorKind::Timeout`] if somebody else was at it for all of
    /// the [wait](Self::wait), in a transaction or out of one; [`ErrorKind::Lost`] if the lease was lost before the outcome was
    /// stored (the work may be done, and may be done again); [`ErrorKind::Corrupt`] if it was done
    /// before and its outcome could not be stored then; what the database answers.
    pub async fn run<P, E, F>(self, pool: &P, work: impl FnOnce(Attempt) -> F) -> Result<Ran, E>
    where
        P: Pool,
        E: From<Error>,
        F: Future<Output = Result<String, E>>,
    {
        let Self { key, lease, wait, fingerprint } = self;
        let key = key.map_err(|e| e.during("once"))?;
        let failed = |e: Error| e.during("once").on(&key);
        if !(MIN_LEASE..=MAX_LEASE).contains(&lease) {
            let what = format!("a lease of {lease:?} is out of range: choose 50 ms to a day");
            return Err(failed(Error::new(ErrorKind::Config, what)).into());
        }
        let id = ClaimId::random().map_err(failed)?;
        let (id, beside) = (Value::Text(fingerprint.attempt_id(id)), tokio::sync::Mutex::new(None));
        let row = Row { pool, key: &key, fingerprint, id, lease, beside };
        let (attempt, sent) = match row.begin(wait).await.map_err(failed)? {
            (Begun::Before(outcome), _) => {
                let outcome = outcome.ok_or_else(|| failed(outcome_gone()))?;
                return Ok(Ran::Duplicate(outcome));
            }
            (Begun::Ours(number), sent) => {
                (Attempt { number, key: key.clone(), id: row.id.clone() }, sent)
            }
            (Begun::Busy, _) => {
                let what = "another attempt is still at it: retry later";
                return Err(failed(Error::new(ErrorKind::Timeout, what)).into());
            }
        };
        let deadline = AtomicU64::new(row.deadline(sent).as_nanos());
        match within(&deadline, row.renewals(&deadline), work(attempt)).await {
            Ok(Ok(outcome)) => {
                row.done(&outcome, &deadline).await.map_err(failed)?;
                Ok(Ran::First(outcome))
            }
            Ok(Err(error)) => {
                // Unheard, the lease says it later.
                let _ = row.give_up().await;
                Err(error)
            }
            Err(reason) => Err(failed(Error::lost(reason)).into()),
        }
    }
}

/// Forgets keys that were done longer than `retention` ago, and so may be done again: choose it
/// longer than any caller retries. Gives their number. Keys of attempts that crashed or failed and
/// that nobody took over are forgotten as long after their lease has ended; the next attempt is then
/// the first again.
///
/// # Cancel safety
/// Dropped, some may have been removed. Run it again.
///
/// # Errors
/// What the database answers.
pub async fn clean_up<P: Pool>(pool: &P, retention: Duration) -> Result<u64> {
    let clean = async {
        let mut session = pool.session().await?;
        let dialect = session.dialect();
        // The time is asked for first: a clock inside the WHERE would forbid the index, and the
        // statement would lock every row that it scans.
        let now = number(&mut session, &format!("SELECT {}", dialect.now()), &[]).await?;
        let before = Value::Int(now.unwrap_or(0).saturating_sub(micros(retention)));
        let mut forgotten = 0;
        for old in ["done_at < ?", "state = 'started' AND lease_end < ?"] {
            let sql = forgetting(dialect, old);
            loop {
                if dialect == Dialect::Mysql {
                    // For the next statement: else it would lock the gap before the first row that it
                    // keeps, which is where whoever begins inserts.
                    session.batch("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
                }
                let with = vec![before.clone(); sql.matches('?').count()];
                let some = run(&mut session, &sql, &with).await?;
                forgotten += some;
                if some < FORGOTTEN_AT_ONCE {
                    break;
                }
            }
        }
        Ok(forgotten)
    };
    clean.await.map_err(|e: Error| e.during("clean_up"))
}

/// So few that nobody waits long for them.
const FORGOTTEN_AT_ONCE: u64 = 1_000;

/// Deletes some of the keys of which this is true.
fn forgetting(dialect: Dialect, old: &str) -> String {
    match dialect {
        Dialect::Mysql => {
            format!("DELETE FROM leasehold_once WHERE {old} LIMIT {FORGOTTEN_AT_ONCE}")
        }
        // The condition again: a row may have been begun anew meanwhile.
        _ => format!(
            "DELETE FROM leasehold_once WHERE name IN (SELECT name FROM leasehold_once \
             WHERE {old} LIMIT {FORGOTTEN_AT_ONCE}) AND {old}"
        ),
    }
}

/// How a key is begun.
enum As {
    /// By a transaction, which commits it when it is done.
    Done,
    /// By an attempt with this id, for this long.
    Started { id: Value, lease: Duration },
}

enum Begun {
    /// By us: attempt number so and so.
    Ours(u64),
    /// Done before, with this outcome, if it could be stored.
    Before(Option<String>),
    /// By an attempt within its lease.
    Busy,
}

/// Inserts the key's row, or takes over from an attempt whose lease has ended, or tells what is
/// there. Each step is one statement that decides by itself; what it finds may be gone at the next
/// (the other rolled back, or was cleaned up), hence the few rounds.
async fn begin<S: Session + ?Sized>(
    session: &mut S,
    key: &Name,
    fingerprint: &Fingerprint,
    how: &As,
) -> Result<Begun> {
    let dialect = session.dialect();
    let now = dialect.now();
    let (state, id, lease, done_at) = match how {
        As::Done => ("done", Value::Text(fingerprint.without_attempt()), 0, now),
        As::Started { id, lease } => ("started", id.clone(), micros(*lease), "NULL"),
    };
    let (lease, name) = (Value::Int(lease), dialect.name(key));
    for _ in 0..10 {
        let sql = format!(
            "INSERT INTO leasehold_once (name, state, attempt, attempt_id, lease_end, done_at) \
             VALUES (?, '{state}', 1, ?, {now} + ?, {done_at}){}",
            dialect.or_nothing()
        );
        match run(session, &sql, &[name.clone(), id.clone(), lease.clone()]).await {
            Ok(1) => return Ok(Begun::Ours(1)),
            Ok(_) => {}
            Err(fault) if fault.is_duplicate() => {}
            Err(fault) => return Err(fault.into()),
        }
        let sql = format!(
            "SELECT state, attempt_id, outcome, attempt, lease_end - {now} FROM leasehold_once \
             WHERE name = ?{}",
            dialect.as_it_is()
        );
        use Column::{Int, Text};
        let columns = [Text, Text, Text, Int, Int];
        let Some(there) = row(session, &sql, std::slice::from_ref(&name), &columns).await? else {
            continue;
        };
        let Ok([state_there, id_there, outcome, attempt, left]) = <[Value; 5]>::try_from(there)
        else {
            continue;
        };
        fingerprint.check(&id_there.clone().text())?;
        if state_there.text() == "done" {
            let kept = !matches!(outcome, Value::Null);
            return Ok(Begun::Before(kept.then(|| read_back(outcome.text()))));
        }
        if left.int() > 0 {
            return Ok(Begun::Busy);
        }
        // Whoever renewed or took over since has another lease end or another id.
        let sql = format!(
            "UPDATE leasehold_once SET state = '{state}', attempt = attempt + 1, attempt_id = ?, \
             lease_end = {now} + ?, done_at = {done_at} \
             WHERE name = ? AND state = 'started' AND attempt_id = ? AND lease_end <= {now}"
        );
        let with = [id.clone(), lease.clone(), name.clone(), id_there];
        if run(session, &sql, &with).await? == 1 {
            return Ok(Begun::Ours(u64::try_from(attempt.int()).unwrap_or(0) + 1));
        }
    }
    Err(Error::new(ErrorKind::Contended, "the key comes and goes: retry later"))
}

/// What begins an outcome that is stored escaped.
const ESCAPED: &str = "\u{1b}leasehold:";

/// An outcome as it is stored: itself, or escaped if it has a NUL, which PostgreSQL cannot hold.
fn stored(outcome: &str) -> Cow<'_, str> {
    if !outcome.contains('\0') && !outcome.starts_with(ESCAPED) {
        return outcome.into();
    }
    let plain = outcome.replace('\u{1b}', "\u{1b}1").replace('\0', "\u{1b}0");
    format!("{ESCAPED}{plain}").into()
}

/// What [`stored`] was given.
fn read_back(text: String) -> String {
    match text.strip_prefix(ESCAPED) {
        Some(escaped) => escaped.replace("\u{1b}0", "\0").replace("\u{1b}1", "\u{1b}"),
        None => text,
    }
}

fn outcome_gone() -> Error {
    let what = "it was done before, and the database could not store its outcome then: ask whoever \
                did it; it is not done again";
    Error::new(ErrorKind::Corrupt, what)
}

/// Stores a transaction's outcome.
async fn keep<S: Session>(session: &mut S, key: &Name, outcome: String) -> Result<String> {
    let dialect = session.dialect();
    // Done now, not when the work began: retention counts from here.
    let sql = format!(
        "UPDATE leasehold_once SET outcome = ?, done_at = {} WHERE name = ?",
        dialect.now()
    );
    let text = Value::Text(stored(&outcome).into_owned());
    match run(session, &sql, &[text, dialect.name(key)]).await? {
        1 => Ok(outcome),
        _ => Err(Error::new(ErrorKind::Corrupt, "the work deleted its own idempotency key")),
    }
}

/// The row of a running attempt.
struct Row<'a, P: Pool> {
    pool: &'a P,
    key: &'a Name,
    fingerprint: Fingerprint,
    id: Value,
    lease: Duration,
    /// A session of our own, once the pool had none for us.
    beside: tokio::sync::Mutex<Option<P::Session>>,
}

/// A session, and whether it is our own.
struct Line<S> {
    session: S,
    is_beside: bool,
}

impl<P: Pool> Row<'_, P> {
    fn now() -> Moment {
        Clock::default().now()
    }

    /// Until when a lease that was asked for at `sent` certainly lasts.
    fn deadline(&self, sent: Moment) -> Moment {
        sent.plus(self.lease.saturating_sub(drift(self.lease)))
    }

    /// Begins, waiting for somebody else's attempt; and when the request that did was sent.
    async fn begin(&self, wait: Duration) -> Result<(Begun, Moment)> {
        let until = Self::now().plus(wait);
        let how = As::Started { id: self.id.clone(), lease: self.lease };
        let mut pause = Duration::from_millis(5);
        loop {
            let begin = async {
                let mut session = self.pool.session().await?;
                let sent = Self::now();
                Ok((begin(&mut session, self.key, &self.fingerprint, &how).await?, sent))
            };
            // A transaction of somebody else's, with the key in it, may go on for ever.
            let limit = until.since(Self::now()).max(self.patience());
            let begun = tokio::time::timeout(limit, begin).await.unwrap_or_else(|_| {
                let what =
                    "the database, or somebody's transaction with this key in it, stands still";
                Err(Error::new(ErrorKind::Timeout, what))
            });
            let left = until.since(Self::now());
            match begun {
                Ok((Begun::Busy, _)) if !left.is_zero() => {}
                // Undone for others' sake; there is no transaction of the caller's to be told.
                Err(e) if e.kind() == ErrorKind::Conflict && !left.is_zero() => {}
                begun => return begun,
            }
            tokio::time::sleep(jittered(pause).max(Duration::from_millis(1)).min(left)).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// One statement on our row while it is ours, which sets `what` to these values.
    async fn set(
        &self,
        what: impl FnOnce(Dialect) -> String,
        mut with: Vec<Value>,
    ) -> Result<bool> {
        let mut line = self.line().await?;
        let dialect = line.session.dialect();
        let sql = format!(
            "UPDATE leasehold_once SET {} WHERE name = ? AND attempt_id = ? AND state = 'started'",
            what(dialect)
        );
        with.extend([dialect.name(self.key), self.id.clone()]);
        let rows = run(&mut line.session, &sql, &with).await;
        self.put_back(line, rows.is_ok()).await;
        Ok(rows? == 1)
    }

    /// A session to speak on. The work may have all of the pool's, for longer than our lease:
    /// what the pool does not give soon is opened beside it.
    async fn line(&self) -> Result<Line<P::Session>> {
        if let Some(session) = self.beside.lock().await.take() {
            return Ok(Line { session, is_beside: true });
        }
        let soon = (self.lease / 20).clamp(Duration::from_millis(10), Duration::from_millis(500));
        match tokio::time::timeout(soon, self.pool.session()).await {
            Ok(session) => Ok(Line { session: session?, is_beside: false }),
            Err(_) => Ok(Line { session: self.pool.beside().await?, is_beside: true }),
        }
    }

    /// Keeps our own session for the next time, unless it may be broken.
    async fn put_back(&self, line: Line<P::Session>, well: bool) {
        if line.is_beside && well {
            *self.beside.lock().await = Some(line.session);
        }
    }

    /// How long one statement may take before another connection is tried: the network may have lost
    /// this one without a word.
    fn patience(&self) -> Duration {
        (self.lease / 3).max(Duration::from_secs(1))
    }

    /// What is answered within `limit`.
    async fn in_time<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            let what = format!("no answer within {limit:?}: check that the database runs");
            Err(Error::new(ErrorKind::Unreachable, what))
        })
    }

    /// Renews until the row is not ours any more. An error is no answer: the deadline decides.
    async fn renewals(&self, deadline: &AtomicU64) -> LostReason {
        let mut pause = self.lease / 3;
        loop {
            tokio::time::sleep(pause).await;
            let sent = Self::now();
            let ends = Moment::from_nanos(deadline.load(Ordering::SeqCst));
            if sent >= ends {
                return LostReason::Expired;
            }
            let limit = ends.since(sent).min(self.patience());
            let renewed = self.set(
                |dialect| format!("lease_end = {} + ?", dialect.now()),
                vec![Value::Int(micros(self.lease))],
            );
            match Self::in_time(limit, renewed).await {
                Ok(true) => {
                    deadline.store(self.deadline(sent).as_nanos(), Ordering::SeqCst);
                    pause = self.lease / 3;
                }
                Ok(false) => return LostReason::Gone,
                Err(_) => pause = self.lease / 20,
            }
        }
    }

    /// Stores the outcome: only the current attempt can, so trying is never wrong. The work is
    /// done: an outcome that the database refuses, or cannot take in half of the time that is left,
    /// is left out.
    async fn done(&self, outcome: &str, deadline: &AtomicU64) -> Result<()> {
        let begun = Self::now();
        let ends = Moment::from_nanos(deadline.load(Ordering::SeqCst));
        let half = begun.plus(ends.since(begun) / 2);
        let text = Value::Text(stored(outcome).into_owned());
        loop {
            let storing = self.store(Some(text.clone()));
            let error = match Self::in_time(self.patience(), storing).await {
                Ok(true) => return Ok(()),
                Ok(false) => return Err(Error::lost(LostReason::Gone)),
                Err(error) => error,
            };
            let final_word = !error.is_retryable();
            if final_word || Self::now() >= half {
                let storing = self.store(None);
                if let Ok(true) = Self::in_time(self.patience(), storing).await {
                    telemetry::outcome_lost(self.key, &error);
                    return Ok(());
                }
            }
            if final_word || Self::now() >= ends {
                return Err(error);
            }
            tokio::time::sleep(self.lease / 20).await;
        }
    }

    /// Whether the outcome is stored, now or before.
    async fn store(&self, outcome: Option<Value>) -> Result<bool> {
        let place = if outcome.is_some() { "?" } else { "NULL" };
        let done = |dialect: Dialect| {
            format!("state = 'done', done_at = {}, outcome = {place}", dialect.now())
        };
        Ok(self.set(done, outcome.into_iter().collect()).await? || self.is_done().await?)
    }

    /// Whether an earlier answer of [`done`](Self::done) was lost on its way.
    async fn is_done(&self) -> Result<bool> {
        let sql = "SELECT attempt FROM leasehold_once \
                   WHERE name = ? AND attempt_id = ? AND state = 'done'";
        let mut line = self.line().await?;
        let with = [line.session.dialect().name(self.key), self.id.clone()];
        let there = number(&mut line.session, sql, &with).await;
        self.put_back(line, there.is_ok()).await;
        Ok(there?.is_some())
    }

    /// Lets the next attempt in at once. Now, not 0: retention counts from here.
    async fn give_up(&self) -> Result<bool> {
        let over = self.set(|dialect| format!("lease_end = {}", dialect.now()), vec![]);
        Self::in_time(self.patience(), over).await
    }
}

/// Runs `work` while the lease lasts: the clock is looked at before each step of it.
async fn within<T>(
    deadline: &AtomicU64,
    renewals: impl Future<Output = LostReason>,
    work: impl Future<Output = T>,
) -> Result<T, LostReason> {
    let (mut renewals, mut work) = (pin!(renewals), pin!(work));
    let clock = Clock::default();
    poll_fn(|cx| {
        if clock.now().as_nanos() >= deadline.load(Ordering::SeqCst) {
            return Poll::Ready(Err(LostReason::Expired));
        }
        if let Poll::Ready(reason) = renewals.as_mut().poll(cx) {
            return Poll::Ready(Err(reason));
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f35_every_outcome_comes_back_and_none_has_a_nul() {
        for outcome in ["", "paid", "a\0b", "\0", "\u{1b}0\0\u{1b}1", ESCAPED, "\u{1b}[1mbold"] {
            let text = stored(outcome);
            assert!(!text.contains('\0'));
            assert_eq!(read_back(text.into_owned()), outcome);
        }
        // What earlier versions stored reads as it is.
        assert_eq!(read_back("\u{1b}0".into()), "\u{1b}0");
        assert_eq!(stored("\u{1b}0"), "\u{1b}0");
    }
}
