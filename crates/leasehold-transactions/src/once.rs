//! Idempotency keys: do a piece of work once, no matter how often it is requested.
//!
//! A key is a lock that is never released. The first caller to insert the key's row does the work,
//! and all later callers get the stored outcome. The database's unique index decides which caller
//! is first, so there is no gap between checking and inserting.
//!
//! [`run_in`](Once::run_in) puts the key and the work into *one transaction*: both commit, or
//! neither does. A concurrent caller waits on the unique index until the first caller has committed
//! (then it gets the outcome) or rolled back (then it does the work itself). A crash is a rollback.
//! The work is done exactly once. It runs after a savepoint, so failed work removes its key even if
//! the caller then commits.
//!
//! [`run`](Once::run) is for work outside of the database, such as a payment or an e-mail. No
//! transaction can contain such work, so the key has two states: *started*, under a lease that is
//! renewed while the work runs, and *done*. If the first attempt crashes, its lease expires and the
//! next caller takes over. The number of an attempt shows whether an earlier one may have done part
//! of the work. Only one attempt at a time has a valid lease, and only the current one can store
//! the outcome.
//!
//! One gap remains that no key can close: an attempt that was paused may notice too late that it
//! has lost its lease. Pass the key to the external service if that supports idempotency keys. If
//! the work writes to the database that stores the key, begin its transaction with
//! [`Attempt::check`]. The lease follows the database's wall clock: if the clock is set forward,
//! the lease expires early, and the attempt finds out at its next renewal.
//!
//! **Work is never repeated because its outcome could not be stored.** Text that a database cannot
//! store (PostgreSQL has no NUL) is escaped. If the database rejects the outcome for another reason
//! (length, character set, a trigger), the key is marked as done without an outcome. Then only the
//! first caller gets the outcome, and later callers get an error.
//!
//! **Renewals do not starve if the work uses all connections of the pool.** If the pool does not
//! provide a connection soon, a separate one is opened.
//!
//! **An error can be an outcome.** After most errors the key is free again, so that the caller can
//! retry. A final error (the card was declined) can be kept with [`Once::keep_errors`]. Later calls
//! with this key then get the same error, as is usual for payment services.
//!
//! **Only the key's own row counts as a duplicate.** `INSERT IGNORE` would turn every error of the
//! write into a warning. A unique index of your own table can also be violated for other reasons.
//! Here the key is inserted separately, so an error of the work stays an error of the work.

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
use key::{As, Begun, Ended, Requirements, begin, keep};
use leasehold_core::{
    ClaimId, DEFAULT_LEASE, Error, ErrorKind, MAX_LEASE, MIN_LEASE, Name, Result,
};

pub use attempt::Attempt;
pub use key::{clean_up, sweep, text};
pub use work::Work;

/// Default time that [`Once::run`] waits for another attempt.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// Creates an idempotency key: 1 to 512 bytes, like a lock name. `run` and `run_in` report an
/// invalid key.
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
    let requirements = Requirements::default();
    Once { key: Name::new(key), lease: DEFAULT_LEASE, wait: DEFAULT_WAIT, requirements }
}

/// An idempotency key; made by [`once()`].
#[derive(Debug)]
#[must_use = "the work runs only when run_in or run is called"]
pub struct Once {
    key: Result<Name>,
    lease: Duration,
    wait: Duration,
    requirements: Requirements,
}

/// The outcome of the work, and whether this call did it. With [kept errors](Once::keep_errors),
/// the outcome is a `Result`.
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
    /// This call did the work.
    First(O),
    /// An earlier call did the work; this one did nothing.
    Duplicate(O),
}

impl<O> Ran<O> {
    /// Returns the outcome, no matter which call did the work.
    pub fn into_outcome(self) -> O {
        match self {
            Self::First(outcome) | Self::Duplicate(outcome) => outcome,
        }
    }

    /// Returns whether this call did the work.
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
    /// Sets how long a crashed attempt of [`run`](Self::run) blocks other attempts (default 15 s,
    /// 50 ms to 24 hours). The lease is renewed while the attempt runs.
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
    ///     println!("{attempt}"); // from the second on, an earlier one may have done part of it
    ///     Ok::<_, leasehold::Error>(format!("sent by attempt {}", attempt.number()))
    /// });
    /// assert_eq!(ran.await?.into_outcome(), "sent by attempt 1");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets how long [`run`](Self::run) waits for another attempt (default 30 s).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets what is requested under this key, such as the request's body, so that reuse of the key
    /// for another request is rejected.
    ///
    /// Payment services do the same. A digest of `request` is stored with the key. If the earlier
    /// call set no fingerprint, nothing is compared.
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
        self.requirements.fingerprint = Fingerprint::of(request.as_ref());
        self
    }

    /// Sets the time after which this key can be used again, as if it were new.
    ///
    /// The time is measured by the database's clock, from when the work was done or the lease of a
    /// failed attempt expired. Without a retention time, the key can be used again once
    /// [`clean_up`] or [`sweep`] has deleted it. The row stays until they delete it, or until the
    /// key is used again.
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
    /// assert!(report(Duration::from_micros(1)).await?.is_first()); // it was done longer ago
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn retention(mut self, retention: Duration) -> Self {
        self.requirements.retention = Some(retention);
        self
    }

    /// Keeps final errors of the work as outcomes, such as a declined payment.
    ///
    /// If `keep` returns text for an error, the text is stored, and `read` turns it back into the
    /// error for later calls. If `keep` returns `None`, the error is returned as usual and the key
    /// is free again.
    ///
    /// A kept error is an *outcome* and is returned in `Ok`, so that you commit the transaction,
    /// and the key with it.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::{database, once};
    ///
    /// #[derive(Debug, PartialEq)]
    /// enum Payment {
    ///     Declined(String),
    ///     Failed(String), // retry
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

    /// Does `work` in `tx`, unless a committed transaction has already done it under this key.
    ///
    /// Key, outcome and the writes of `work` commit together when you commit `tx`. If `work` fails,
    /// all of them are undone and the transaction stays usable, except after
    /// [`ErrorKind::Conflict`].
    ///
    /// `work` gets the given transaction after a savepoint, which costs two round trips. The future
    /// of `work` must be `Send`; this is all that [`Work`] means.
    ///
    /// Needs the table `leasehold_once`, see [`database::install`](crate::database::install).
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
    ///
    /// # Errors
    /// - The errors of `work`, unchanged.
    /// - [`ErrorKind::Mismatch`]: the key was used with another [`fingerprint`](Self::fingerprint).
    /// - [`ErrorKind::Contended`]: an attempt of [`run`](Self::run) is using this key.
    /// - [`ErrorKind::Conflict`]: a deadlock or a serialization failure; run the transaction again.
    /// - [`ErrorKind::Timeout`]: a concurrent caller did not finish in time.
    /// - Any error of the database.
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
        let key = self.key.map_err(|e| e.with_operation("once"))?;
        let failed = |e: Error| E::from(e.with_operation("once").with_lock(&key));
        let savepoint = Savepoint::set(tx).await.map_err(|e| failed(e.into()))?;
        let ran = match begin(tx, &key, &self.requirements, &As::Done).await {
            Ok(Begun::Before(ended, outcome)) => {
                earlier(ended, outcome, errors).map(Ran::Duplicate).map_err(failed)
            }
            Ok(Begun::Busy) => {
                let what = "another attempt, outside of a transaction, is using this key";
                let busy = Error::new(ErrorKind::Contended, what).with_hint("retry later");
                Err(failed(busy))
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
                // If this fails, the connection or the transaction is gone, and the key with it.
                let _ = savepoint.undo(tx).await;
                Err(error)
            }
        }
    }

    /// Does `work` outside of any transaction, unless it was already done under this key.
    ///
    /// If another attempt is running, this call waits, and takes over when the lease of that
    /// attempt expires. It holds no connection from the pool while `work` runs. If the pool has
    /// none for a renewal, a separate one is opened. If the lease is lost, `work` is dropped at its
    /// next `.await`. If `work` fails, the key is immediately free for the next attempt.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::{database, once, once::Ran};
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(database::error)?;
    /// database::install(&pool).await?;
    /// for time in 1..=2 {
    ///     // Pass the key to the external service, if it supports idempotency keys.
    ///     let work = |attempt| async move { Ok::<_, leasehold::Error>(format!("receipt, {attempt}")) };
    ///     let ran = once("payment:8a1f").run(&pool, work).await?;
    ///     assert_eq!(ran.is_first(), time == 1);
    ///     assert_eq!(ran.into_outcome(), "receipt, attempt 1");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. Dropping the future drops
    /// `work`, and the next attempt can begin when the lease expires.
    ///
    /// # Errors
    /// - The errors of `work`, unchanged.
    /// - [`ErrorKind::Mismatch`]: the key was used with another [`fingerprint`](Self::fingerprint).
    /// - [`ErrorKind::Timeout`]: another attempt or transaction was still running after
    ///   [`wait`](Self::wait).
    /// - [`ErrorKind::Lost`]: the lease was lost before the outcome was stored. The work may be
    ///   done, and may be done again.
    /// - [`ErrorKind::Corrupt`]: the work was done earlier, but its outcome could not be stored.
    /// - Any error of the database.
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
        let Self { key, lease, wait, requirements } = self;
        let key = key.map_err(|e| e.with_operation("once"))?;
        let failed = |e: Error| E::from(e.with_operation("once").with_lock(&key));
        if !(MIN_LEASE..=MAX_LEASE).contains(&lease) {
            let what = format!("invalid lease {lease:?}");
            let error = Error::new(ErrorKind::Config, what);
            return Err(failed(error.with_hint("use 50 ms to 24 hours")));
        }
        let id = ClaimId::random().map_err(failed)?;
        let id = Value::Text(requirements.fingerprint.attempt_id(id));
        let beside = tokio::sync::Mutex::new(None);
        let row = Row { pool, key: &key, requirements, id, lease, beside };
        let (attempt, sent) = match row.begin(wait).await.map_err(failed)? {
            (Begun::Before(ended, outcome), _) => {
                let outcome = earlier(ended, outcome, errors).map_err(failed)?;
                return Ok(Ran::Duplicate(outcome));
            }
            (Begun::Ours(number), sent) => {
                (Attempt { number, key: key.clone(), id: row.id.clone() }, sent)
            }
            (Begun::Busy, _) => {
                let what = format!("another attempt was still running after {wait:?}");
                let error = Error::new(ErrorKind::Timeout, what);
                return Err(failed(error.with_hint("retry later, or wait longer: Once::wait")));
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
                    // If this fails, the lease expires on its own.
                    let _ = row.give_up().await;
                    Err(error)
                }
            },
        }
    }
}

/// An idempotency key that keeps errors as outcomes; made by [`Once::keep_errors`].
#[must_use = "the work runs only when run_in or run is called"]
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
    /// Does `work` in `tx` like [`Once::run_in`], and keeps its final errors.
    ///
    /// If the work ends with a kept error, its writes are undone, but the key stays: commit the
    /// transaction. This costs one more savepoint.
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
    /// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
    ///
    /// # Errors
    /// The errors of `work` that are not kept, and the errors of [`Once::run_in`].
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

    /// Does `work` outside of any transaction like [`Once::run`], and keeps its final errors.
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
    /// Not cancel safe: see [`Once::run`].
    ///
    /// # Errors
    /// The errors of `work` that are not kept, and the errors of [`Once::run`].
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

/// The reason why a transaction's work has no outcome: an error of leasehold, or one of the work.
enum Stopped<E> {
    Ours(Error),
    Theirs(E),
}

/// Does the work after the key was inserted, and stores its outcome.
///
/// If errors are kept, a savepoint separates the key from the work. Undoing the work must not undo
/// the key, because another caller could then insert it in between.
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
            // If the work cannot be undone, the transaction is gone, and the key with it.
            if behind.undo(tx).await.is_err() {
                return Err(Stopped::Theirs(error));
            }
            keep(tx, key, Ended::Refused, &text).await.map_err(ours)?;
            Ok(Err(error))
        }
    }
}
