//! An attempt outside of any transaction, which owns its row while its lease is renewed.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::key::{As, Begun, Ended, Requirements, begin, stored};
use crate::database::{Dialect, Pool, Session, Transaction, Value, micros, number, run};
use crate::versioned::jittered;
use leasehold_core::kit::drift;
use leasehold_core::{Clock, Error, ErrorKind, LostReason, Moment, Name, Result, telemetry};

/// One attempt of [`Once::run`](super::Once::run).
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::{database::error, once};
/// let ran = once("report").run(&pool, |attempt| async {
///     let attempt = attempt;
///     println!("attempt {}", attempt.number());
///     let mut tx = pool.begin().await.map_err(error)?;
///     attempt.check(&mut tx).await?; // before anything else in it
///     // write what was done; an attempt that was paused for too long fails in the check
///     tx.commit().await.map_err(error)?;
///     Ok::<_, leasehold::Error>("done".to_owned())
/// });
/// assert!(ran.await?.is_first());
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Attempt {
    pub(super) number: u64,
    pub(super) key: Name,
    pub(super) id: Value,
}

impl Attempt {
    /// Returns the number of this attempt, beginning with 1.
    ///
    /// If the number is higher than 1, an earlier attempt crashed, failed or lost its lease, and
    /// may have done part of the work.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Fails if this is no longer the current attempt, and otherwise prevents other attempts from
    /// taking over until `tx` ends. `tx` must be a transaction in the database that stores the key.
    ///
    /// An attempt that was paused for longer than its lease therefore cannot write late: all writes
    /// of `tx` after this check come before the next attempt. The check is one statement, which is
    /// atomic at every isolation level.
    ///
    /// The lease cannot be renewed until `tx` ends, so keep the transaction shorter than the lease.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
    ///
    /// # Errors
    /// - [`ErrorKind::Lost`]: another attempt has taken over. Roll back.
    /// - [`ErrorKind::Conflict`]: a deadlock or a serialization failure.
    /// - Any error of the database.
    pub async fn check<T: Transaction + ?Sized>(&self, tx: &mut T) -> Result<()> {
        let sql = "UPDATE leasehold_once SET attempt = attempt \
                   WHERE name = ? AND attempt_id = ? AND state = 'started'";
        let with = [tx.dialect().name(&self.key), self.id.clone()];
        let checked = match run(tx, sql, &with).await {
            Ok(1) => return Ok(()),
            Ok(_) => Error::lost(LostReason::Gone),
            Err(fault) => fault.into(),
        };
        Err(checked.with_operation("once").with_lock(&self.key))
    }
}

impl fmt::Debug for Attempt {
    /// Formats the attempt without the secret ID that allows it to store the outcome.
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

/// The row of a running attempt.
pub(super) struct Row<'a, P: Pool> {
    pub(super) pool: &'a P,
    pub(super) key: &'a Name,
    pub(super) requirements: Requirements,
    pub(super) id: Value,
    pub(super) lease: Duration,
    /// A separate session, opened when the pool had none available.
    pub(super) beside: tokio::sync::Mutex<Option<P::Session>>,
}

/// A session, and whether it was opened separately from the pool.
struct Line<S> {
    session: S,
    is_beside: bool,
}

/// Rejects a session without automatic commits, such as a session of MySQL with `autocommit=0`.
///
/// In such a session the key would stay uncommitted until the pool closes the connection. It would
/// then be rolled back, and the work would be done again.
async fn commits<S: Session + ?Sized>(session: &mut S) -> Result<()> {
    if session.dialect() != Dialect::Mysql {
        return Ok(());
    }
    match number(session, "SELECT CAST(@@autocommit AS SIGNED)", &[]).await? {
        Some(0) => {
            let what = "the pool's sessions have autocommit=0, so a key outside of a transaction is never committed: \
                        set autocommit=1 for the pool, or use run_in with a transaction";
            Err(Error::new(ErrorKind::Config, what))
        }
        _ => Ok(()),
    }
}

impl<P: Pool> Row<'_, P> {
    fn now() -> Moment {
        Clock::default().now()
    }

    /// Returns the time until which a lease that was requested at `sent` is certainly valid.
    pub(super) fn deadline(&self, sent: Moment) -> Moment {
        sent.plus(self.lease.saturating_sub(drift(self.lease)))
    }

    /// Begins the attempt. If another attempt is in progress, waits up to `wait` for it to end.
    /// Returns the result and the time just before the last request was sent.
    pub(super) async fn begin(&self, wait: Duration) -> Result<(Begun, Moment)> {
        let until = Self::now().plus(wait);
        let how = As::Started { id: self.id.clone(), lease: self.lease };
        let mut pause = Duration::from_millis(5);
        loop {
            let begin = async {
                let mut session = self.pool.session().await?;
                commits(&mut session).await?;
                let sent = Self::now();
                Ok((begin(&mut session, self.key, &self.requirements, &how).await?, sent))
            };
            // Another transaction with the key in it may stay open without limit.
            let limit = until.since(Self::now()).max(self.patience());
            let begun = tokio::time::timeout(limit, begin).await.unwrap_or_else(|_| {
                let what = format!(
                    "no reply within {limit:?}: the database does not respond, or another \
                     transaction with this key is still open"
                );
                Err(Error::new(ErrorKind::Timeout, what).with_hint("retry later"))
            });
            let left = until.since(Self::now());
            match begun {
                Ok((Begun::Busy, _)) if !left.is_zero() => {}
                // The statement was rolled back because of other transactions. The caller has no
                // transaction that it could run again.
                Err(e) if e.kind() == ErrorKind::Conflict && !left.is_zero() => {}
                begun => return begun,
            }
            tokio::time::sleep(jittered(pause).max(Duration::from_millis(1)).min(left)).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// Runs one statement that sets `what` to these values in the row, if this attempt still owns
    /// the row. Returns whether it does.
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

    /// Returns a session to use. The work may use all sessions of the pool for longer than the
    /// lease. If the pool does not provide one soon, a separate session is opened.
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

    /// Keeps a separate session for the next statement, unless it may be broken.
    async fn put_back(&self, line: Line<P::Session>, well: bool) {
        if line.is_beside && well {
            *self.beside.lock().await = Some(line.session);
        }
    }

    /// Returns how long one statement may take before another connection is tried. The network may
    /// have dropped the current connection without an error.
    fn patience(&self) -> Duration {
        (self.lease / 3).max(Duration::from_secs(1))
    }

    /// Runs `work`, and fails if it takes longer than `limit`.
    async fn in_time<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            let what = format!("the database did not respond within {limit:?}");
            let error = Error::new(ErrorKind::Unreachable, what);
            Err(error.with_hint("check that it is running and reachable"))
        })
    }

    /// Renews the lease until this attempt no longer owns the row. After an error it tries again,
    /// until the deadline has passed.
    pub(super) async fn renewals(&self, deadline: &AtomicU64) -> LostReason {
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

    /// Stores the outcome.
    ///
    /// Only the current attempt can store it, so trying is always safe. The work must not be
    /// repeated. If the database rejects the outcome, or cannot store it within half of the
    /// remaining time, the key is therefore marked as done without an outcome.
    pub(super) async fn done(
        &self,
        ended: Ended,
        outcome: &str,
        deadline: &AtomicU64,
    ) -> Result<()> {
        let begun = Self::now();
        let ends = Moment::from_nanos(deadline.load(Ordering::SeqCst));
        let half = begun.plus(ends.since(begun) / 2);
        let text = Value::Text(stored(outcome).into_owned());
        loop {
            let storing = self.store(ended, Some(text.clone()));
            let error = match Self::in_time(self.patience(), storing).await {
                Ok(true) => return Ok(()),
                Ok(false) => return Err(Error::lost(LostReason::Gone)),
                Err(error) => error,
            };
            let final_word = !error.is_retryable();
            if final_word || Self::now() >= half {
                let storing = self.store(ended, None);
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

    /// Returns whether the outcome is stored, by this call or an earlier one.
    async fn store(&self, ended: Ended, outcome: Option<Value>) -> Result<bool> {
        let place = if outcome.is_some() { "?" } else { "NULL" };
        let done = |dialect: Dialect| {
            let state = ended.as_str();
            format!("state = '{state}', done_at = {}, outcome = {place}", dialect.now())
        };
        Ok(self.set(done, outcome.into_iter().collect()).await? || self.has_ended(ended).await?)
    }

    /// Returns whether an earlier call of [`done`](Self::done) succeeded but its reply was lost.
    async fn has_ended(&self, ended: Ended) -> Result<bool> {
        let sql = "SELECT attempt FROM leasehold_once \
                   WHERE name = ? AND attempt_id = ? AND state = ?";
        let mut line = self.line().await?;
        let name = line.session.dialect().name(self.key);
        let with = [name, self.id.clone(), ended.as_str().into()];
        let there = number(&mut line.session, sql, &with).await;
        self.put_back(line, there.is_ok()).await;
        Ok(there?.is_some())
    }

    /// Ends the lease, so that the next attempt can begin immediately. The end of the lease is set
    /// to the current time instead of 0, because the retention time is counted from it.
    pub(super) async fn give_up(&self) -> Result<bool> {
        let over = self.set(|dialect| format!("lease_end = {}", dialect.now()), vec![]);
        Self::in_time(self.patience(), over).await
    }
}

/// Runs `work` while the lease is valid. The clock is read before each poll of `work`.
pub(super) async fn within<T>(
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
