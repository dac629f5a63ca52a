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
//! **An error may be an outcome.** Most errors are to be tried again: the key is free then. One that is final (the
//! card was declined) is kept where the caller says so ([`Once::keep_errors`]), and answered again as it was, under the
//! same key, as payment services do.
//!
//! **Only the key's own row makes a duplicate.** `INSERT IGNORE` turns every error of the write into
//! a warning, and a unique index of the caller's own table may be hit for reasons that are no
//! duplicate request. Here the insert of the key stands alone; an error of the work is the work's.

mod attempt;
mod errors;
mod fingerprint;
mod key;
mod work;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::database::{Pool, Savepoint, Transaction, Value};
use attempt::{Row, within};
use errors::{Errors, earlier};
use fingerprint::Fingerprint;
use key::{As, Asked, Begun, Ended, begin, keep};
use leasehold_core::{
    ClaimId, DEFAULT_LEASE, Error, ErrorKind, MAX_LEASE, MIN_LEASE, Name, Result,
};

pub use attempt::Attempt;
pub use key::{clean_up, sweep, text};
pub use work::Work;

/// How long [`Once::run`] waits for an attempt of somebody else, unless told otherwise.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// An idempotency key: 1 to 512 bytes, as a lock's name; a bad one is reported by the run.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// # sqlx::query("CREATE TABLE payments (amount INTEGER)").execute(&pool).await.unwrap();
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
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
pub fn once(key: impl AsRef<str>) -> Once {
    let asked = Asked::default();
    Once { key: Name::new(key), lease: DEFAULT_LEASE, wait: DEFAULT_WAIT, asked }
}

/// An idempotency key; made by [`once()`].
#[derive(Debug)]
#[must_use = "nothing is done until run_in or run is called"]
pub struct Once {
    key: Result<Name>,
    lease: Duration,
    wait: Duration,
    asked: Asked,
}

/// Who did the work. The text is the work's outcome, the first time and every other; with
/// [errors that are kept](Once::keep_errors) it is a `Result`.
///
/// ```
/// use leasehold::once::Ran;
/// let ran = Ran::Duplicate("paid 100".to_owned());
/// assert!(!ran.is_first());
/// assert_eq!(ran.into_outcome(), "paid 100");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ran<O = String> {
    /// This call did.
    First(O),
    /// An earlier call did; this one did nothing.
    Duplicate(O),
}

impl<O> Ran<O> {
    /// The outcome, whoever did the work.
    pub fn into_outcome(self) -> O {
        match self {
            Self::First(outcome) | Self::Duplicate(outcome) => outcome,
        }
    }

    /// Whether this call did the work.
    pub fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }
}

impl<O, E> Ran<Result<O, E>> {
    fn transpose(self) -> Result<Ran<O>, E> {
        match self {
            Self::First(outcome) => outcome.map(Ran::First),
            Self::Duplicate(outcome) => outcome.map(Ran::Duplicate),
        }
    }
}

impl Once {
    /// How long a crashed attempt of [`run`](Self::run) keeps others out (default 15 s, 50 ms to a
    /// day). It is renewed while the attempt runs.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
    /// # leasehold::database::install(&pool).await?;
    /// # use std::time::Duration;
    /// use leasehold::once;
    /// let impatient = once("report").lease(Duration::from_secs(5)).wait(Duration::ZERO);
    /// let ran = impatient.run(&pool, |attempt| async move {
    ///     println!("{attempt}"); // from the second on, an earlier one may have done a part
    ///     Ok::<_, leasehold::Error>(format!("sent by attempt {}", attempt.number()))
    /// });
    /// assert_eq!(ran.await?.into_outcome(), "sent by attempt 1");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
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
        self.asked.fingerprint = Fingerprint::of(request.as_ref());
        self
    }

    /// After how long this key may be used anew, as if it had never been: by the database's clock, since its
    /// work was done (or the lease of an attempt that came to nothing was over). Without this, it is when
    /// [`clean_up`] or [`sweep`] has forgotten it. The row stays until they do, or until it is used.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// use leasehold::{database, once};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(database::error)?;
    /// # database::install(&pool).await?;
    /// let report = async |kept: Duration| {
    ///     let work = |_| async { Ok::<_, leasehold::Error>("sent".to_owned()) };
    ///     once("report").retention(kept).run(&pool, work).await
    /// };
    /// let day = Duration::from_secs(24 * 3600);
    /// assert!(report(day).await?.is_first());
    /// assert!(!report(day).await?.is_first());
    /// # tokio::time::sleep(Duration::from_millis(5)).await;
    /// assert!(report(Duration::from_micros(1)).await?.is_first()); // it was longer ago than that
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn retention(mut self, retention: Duration) -> Self {
        self.asked.retention = Some(retention);
        self
    }

    /// Errors of the work that are outcomes, as a business refusal is: where `keep` makes a text of one it is
    /// kept, and `read` makes the error of it again for those who come later. Where it makes none, all is as
    /// without this: the error is handed on, and the key is free.
    ///
    /// A kept error comes as the *outcome*, in `Ok`, so that the transaction is committed, and the key with it.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::{database, once};
    ///
    /// #[derive(Debug, PartialEq)]
    /// enum Payment {
    ///     Declined(String),
    ///     Failed(String), // try again
    /// }
    /// impl From<leasehold::Error> for Payment {
    ///     fn from(error: leasehold::Error) -> Self {
    ///         Self::Failed(error.to_string())
    ///     }
    /// }
    /// let kept = |error: &Payment| match error {
    ///     Payment::Declined(why) => Some(why.clone()),
    ///     Payment::Failed(_) => None,
    /// };
    ///
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.unwrap();
    /// # database::install(&pool).await?;
    /// for time in 1..=2 {
    ///     let mut tx = pool.begin().await.map_err(database::error)?;
    ///     let pay = once("payment:8a1f").keep_errors(kept, Payment::Declined);
    ///     let ran = pay.run_in(&mut tx, async |_| Err(Payment::Declined("no money".into()))).await?;
    ///     tx.commit().await.map_err(database::error)?;
    ///     assert_eq!(ran.is_first(), time == 1);
    ///     assert_eq!(ran.into_outcome(), Err(Payment::Declined("no money".into())));
    /// }
    /// # Ok::<(), Payment>(()) }).unwrap();
    /// ```
    pub fn keep_errors<E>(
        self,
        keep: fn(&E) -> Option<String>,
        read: fn(String) -> E,
    ) -> Keeping<E> {
        Keeping { once: self, errors: Errors { keep, read } }
    }

    /// Does `work` in `tx` if no committed transaction has done it under this key. Key, outcome
    /// and what `work` writes commit together, when the caller commits `tx`; if `work` fails, both
    /// are undone and the transaction is usable (after [`ErrorKind::Conflict`] it never is).
    ///
    /// `work` gets the transaction that was given, behind a savepoint, which costs two round trips. The work's
    /// future is one that may be sent ([`Work`] says no more than that).
    ///
    /// Needs the table `leasehold_once`: see [`database::install`](crate::database::install).
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
        Box::pin(async move { self.in_transaction(tx, work, None).await?.transpose() })
    }

    async fn in_transaction<T, E, F>(
        self,
        tx: &mut T,
        work: F,
        errors: Option<Errors<E>>,
    ) -> Result<Ran<Result<String, E>>, E>
    where
        T: Transaction,
        E: From<Error> + Send,
        F: Send,
        for<'t> F: Work<&'t mut T, Result<String, E>, Begun: Send>,
    {
        let key = self.key.map_err(|e| e.during("once"))?;
        let failed = |e: Error| E::from(e.during("once").on(&key));
        let savepoint = Savepoint::set(tx).await.map_err(|e| failed(e.into()))?;
        let ran = match begin(tx, &key, &self.asked, &As::Done).await {
            Ok(Begun::Before(ended, outcome)) => {
                earlier(ended, outcome, errors).map(Ran::Duplicate).map_err(failed)
            }
            Ok(Begun::Busy) => {
                let what = "an attempt outside a transaction has this key: retry later";
                Err(failed(Error::new(ErrorKind::Contended, what)))
            }
            Ok(Begun::Ours(_)) => match works(tx, &key, work, errors).await {
                Ok(outcome) => Ok(Ran::First(outcome)),
                Err(Stopped::Ours(e)) => Err(failed(e)),
                Err(Stopped::Theirs(e)) => Err(e),
            },
            Err(e) => Err(failed(e)),
        };
        match ran {
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
    /// [`fingerprint`](Self::fingerprint); [`ErrorKind::Timeout`] if somebody else was at it for all of the
    /// [wait](Self::wait), in a transaction or out of one; [`ErrorKind::Lost`] if the lease was lost before
    /// the outcome was stored (the work may be done, and may be done again); [`ErrorKind::Corrupt`] if it was
    /// done before and its outcome could not be stored then; what the database answers.
    pub async fn run<P, E, F>(self, pool: &P, work: impl FnOnce(Attempt) -> F) -> Result<Ran, E>
    where
        P: Pool,
        E: From<Error>,
        F: Future<Output = Result<String, E>>,
    {
        self.outside(pool, work, None).await?.transpose()
    }

    async fn outside<P, E, F>(
        self,
        pool: &P,
        work: impl FnOnce(Attempt) -> F,
        errors: Option<Errors<E>>,
    ) -> Result<Ran<Result<String, E>>, E>
    where
        P: Pool,
        E: From<Error>,
        F: Future<Output = Result<String, E>>,
    {
        let Self { key, lease, wait, asked } = self;
        let key = key.map_err(|e| e.during("once"))?;
        let failed = |e: Error| E::from(e.during("once").on(&key));
        if !(MIN_LEASE..=MAX_LEASE).contains(&lease) {
            let what = format!("a lease of {lease:?} is out of range: choose 50 ms to a day");
            return Err(failed(Error::new(ErrorKind::Config, what)));
        }
        let id = ClaimId::random().map_err(failed)?;
        let id = Value::Text(asked.fingerprint.attempt_id(id));
        let beside = tokio::sync::Mutex::new(None);
        let row = Row { pool, key: &key, asked, id, lease, beside };
        let (attempt, sent) = match row.begin(wait).await.map_err(failed)? {
            (Begun::Before(ended, outcome), _) => {
                let outcome = earlier(ended, outcome, errors).map_err(failed)?;
                return Ok(Ran::Duplicate(outcome));
            }
            (Begun::Ours(number), sent) => {
                (Attempt { number, key: key.clone(), id: row.id.clone() }, sent)
            }
            (Begun::Busy, _) => {
                let what = "another attempt is still at it: retry later";
                return Err(failed(Error::new(ErrorKind::Timeout, what)));
            }
        };
        let deadline = AtomicU64::new(row.deadline(sent).as_nanos());
        let outcome = match within(&deadline, row.renewals(&deadline), work(attempt)).await {
            Ok(outcome) => outcome,
            Err(reason) => return Err(failed(Error::lost(reason))),
        };
        match outcome {
            Ok(outcome) => {
                row.done(Ended::Done, &outcome, &deadline).await.map_err(failed)?;
                Ok(Ran::First(Ok(outcome)))
            }
            Err(error) => match errors.and_then(|errors| (errors.keep)(&error)) {
                Some(text) => {
                    row.done(Ended::Refused, &text, &deadline).await.map_err(failed)?;
                    Ok(Ran::First(Err(error)))
                }
                None => {
                    // Unheard, the lease says it later.
                    let _ = row.give_up().await;
                    Err(error)
                }
            },
        }
    }
}

/// An idempotency key with errors that are outcomes; made by [`Once::keep_errors`].
#[must_use = "nothing is done until run_in or run is called"]
pub struct Keeping<E> {
    once: Once,
    errors: Errors<E>,
}

impl<E> fmt::Debug for Keeping<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeping").field("once", &self.once).finish_non_exhaustive()
    }
}

type Running<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

impl<E: From<Error>> Keeping<E> {
    /// As [`Once::run_in`]. Of a work that ends in an error that is kept, all is undone but the key: commit.
    /// That costs a savepoint more.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
    /// # leasehold::database::install(&pool).await?;
    /// use leasehold::{Error, ErrorKind, database::error, once};
    /// let kept = |e: &Error| (e.kind() == ErrorKind::Denied).then(|| e.reason());
    /// let pay = once("payment:8a1f").keep_errors(kept, |why| Error::new(ErrorKind::Denied, why));
    /// let mut tx = pool.begin().await.map_err(error)?;
    /// let ran = pay.run_in(&mut tx, async |_| Err(Error::new(ErrorKind::Denied, "no money"))).await?;
    /// tx.commit().await.map_err(error)?;
    /// assert!(ran.into_outcome().is_err());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As there.
    ///
    /// # Errors
    /// Those of `work` that are not kept, and those of [`Once::run_in`].
    pub fn run_in<'a, T, F>(
        self,
        tx: &'a mut T,
        work: F,
    ) -> Running<'a, Result<Ran<Result<String, E>>, E>>
    where
        T: Transaction,
        E: Send + 'a,
        F: AsyncFnOnce(&mut T) -> Result<String, E> + Send + 'a,
        for<'t> F: Work<&'t mut T, Result<String, E>, Begun: Send>,
    {
        Box::pin(self.once.in_transaction(tx, work, Some(self.errors)))
    }

    /// As [`Once::run`].
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
    /// # leasehold::database::install(&pool).await?;
    /// use leasehold::{Error, ErrorKind, once};
    /// for time in 1..=2 {
    ///     let refusal = |_| async { Err::<String, _>(Error::new(ErrorKind::Denied, "no money")) };
    ///     let kept = |e: &Error| (e.kind() == ErrorKind::Denied).then(|| e.reason());
    ///     let pay = once("payment:8a1f").keep_errors(kept, |why| Error::new(ErrorKind::Denied, why));
    ///     let ran = pay.run(&pool, refusal).await?;
    ///     assert_eq!(ran.is_first(), time == 1);
    ///     assert_eq!(ran.into_outcome().unwrap_err().kind(), ErrorKind::Denied);
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// As there.
    ///
    /// # Errors
    /// Those of `work` that are not kept, and those of [`Once::run`].
    pub async fn run<P, F>(
        self,
        pool: &P,
        work: impl FnOnce(Attempt) -> F,
    ) -> Result<Ran<Result<String, E>>, E>
    where
        P: Pool,
        F: Future<Output = Result<String, E>>,
    {
        self.once.outside(pool, work, Some(self.errors)).await
    }
}

/// Why a transaction's work has no outcome.
enum Stopped<E> {
    Ours(Error),
    Theirs(E),
}

/// Does the work behind the key, and stores its outcome. Where errors are kept a savepoint stands between the
/// two: what is undone of the work must not undo the key, or somebody else's would come in between.
async fn works<T, E, F>(
    tx: &mut T,
    key: &Name,
    work: F,
    errors: Option<Errors<E>>,
) -> Result<Result<String, E>, Stopped<E>>
where
    T: Transaction,
    E: Send,
    F: Send,
    for<'t> F: Work<&'t mut T, Result<String, E>, Begun: Send>,
{
    let ours = |e: Error| Stopped::Ours(e);
    let behind = match errors {
        Some(_) => Some(Savepoint::set(tx).await.map_err(|e| ours(e.into()))?),
        None => None,
    };
    match work.begin(&mut *tx).await {
        Ok(outcome) => {
            keep(tx, key, Ended::Done, &outcome).await.map_err(ours)?;
            Ok(Ok(outcome))
        }
        Err(error) => {
            let text = errors.and_then(|errors| (errors.keep)(&error));
            let Some((text, behind)) = text.zip(behind) else {
                return Err(Stopped::Theirs(error));
            };
            // If it cannot be undone the transaction is gone, and the key with it.
            if behind.undo(tx).await.is_err() {
                return Err(Stopped::Theirs(error));
            }
            keep(tx, key, Ended::Refused, &text).await.map_err(ours)?;
            Ok(Err(error))
        }
    }
}
