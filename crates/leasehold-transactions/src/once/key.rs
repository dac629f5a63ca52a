//! The row of a key, and the statements that begin, end and delete it. Each step is one atomic
//! statement.

use std::borrow::Cow;
use std::time::Duration;

use super::fingerprint::Fingerprint;
use crate::database::{Column, Dialect, Pool, Session, Value, fill, micros, number, row, run};
use leasehold_core::{Error, ErrorKind, Name, Result};

/// The final state of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    /// The work ended with an error that is kept. Older versions, which cannot keep errors, fail
    /// for such a key as for one that is created and deleted concurrently, and do nothing.
    Refused,
}

impl Ended {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
        }
    }
}

/// How work on a key begins.
pub(super) enum As {
    /// By a transaction, which commits the key when the work is done.
    Done,
    /// By an attempt with this ID and this lease.
    Started { id: Value, lease: Duration },
}

impl As {
    const fn state(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Started { .. } => "started",
        }
    }

    /// Returns the initial value of `done_at`.
    const fn done_at(&self, dialect: Dialect) -> &'static str {
        match self {
            Self::Done => dialect.now(),
            Self::Started { .. } => "NULL",
        }
    }
}

pub(super) enum Begun {
    /// This caller has begun the key, with this attempt number.
    Ours(u64),
    /// The work ended earlier, with this outcome, or `None` if the outcome could not be stored.
    Before(Ended, Option<String>),
    /// Another attempt is using the key, and its lease is still valid.
    Busy,
}

/// The caller's requirements for a key that already exists.
#[derive(Debug, Default)]
pub(super) struct Requirements {
    pub(super) fingerprint: Fingerprint,
    /// The time after which the key may be used again.
    pub(super) retention: Option<Duration>,
}

/// Inserts the key's row, takes it over, or returns its state.
///
/// The row is taken over if the lease of its attempt has expired. It is reset if the work or the
/// lease ended longer ago than the retention time. Another transaction may roll back or delete the
/// row between two steps, so `begin` retries a few times.
pub(super) async fn begin<S: Session + ?Sized>(
    session: &mut S,
    key: &Name,
    requirements: &Requirements,
    how: &As,
) -> Result<Begun> {
    let dialect = session.dialect();
    let (id, lease) = match how {
        As::Done => (Value::Text(requirements.fingerprint.without_attempt()), 0),
        As::Started { id, lease } => (id.clone(), micros(*lease)),
    };
    let (lease, name) = (Value::Int(lease), dialect.name(key));
    for _ in 0..10 {
        match run(session, &insert(dialect, how), &[name.clone(), id.clone(), lease.clone()]).await
        {
            Ok(1) => return Ok(Begun::Ours(1)),
            Ok(_) => {}
            Err(fault) if fault.is_duplicate() => {}
            Err(fault) => return Err(fault.into()),
        }
        use Column::{Int, Text};
        let columns = [Text, Text, Text, Int, Int, Int];
        let there = row(session, &look(dialect), std::slice::from_ref(&name), &columns).await?;
        let Some(Ok([state, id_there, outcome, attempt, left, age])) =
            there.map(<[Value; 6]>::try_from)
        else {
            continue;
        };
        let ended = match state.clone().text().as_str() {
            "done" => Some(Ended::Done),
            "refused" => Some(Ended::Refused),
            _ => None,
        };
        let over_for = if ended.is_some() { age.int() } else { -left.int() };
        let retention = requirements.retention.map(micros);
        if let Some(retention) = retention.filter(|&kept| over_for >= kept) {
            let with = [id.clone(), lease.clone(), name.clone(), state, id_there, retention.into()];
            if run(session, &anew(dialect, how, ended.is_some()), &with).await? == 1 {
                return Ok(Begun::Ours(1));
            }
            continue;
        }
        requirements.fingerprint.check(&id_there.clone().text())?;
        if let Some(ended) = ended {
            let kept = !matches!(outcome, Value::Null);
            return Ok(Begun::Before(ended, kept.then(|| read_back(outcome.text()))));
        }
        if left.int() > 0 {
            return Ok(Begun::Busy);
        }
        let with = [id.clone(), lease.clone(), name.clone(), id_there];
        if run(session, &take_over(dialect, how), &with).await? == 1 {
            return Ok(Begun::Ours(u64::try_from(attempt.int()).unwrap_or(0) + 1));
        }
    }
    let what = "other callers keep creating and deleting this key at the same time";
    Err(Error::new(ErrorKind::Contended, what).with_hint("retry later"))
}

/// Returns the statement that inserts the key's row if it is missing. Parameters: name, ID, lease.
fn insert(dialect: Dialect, how: &As) -> String {
    let (state, now, done_at) = (how.state(), dialect.now(), how.done_at(dialect));
    format!(
        "INSERT INTO leasehold_once (name, state, attempt, attempt_id, lease_end, done_at) \
         VALUES (?, '{state}', 1, ?, {now} + ?, {done_at}){}",
        dialect.or_nothing()
    )
}

/// Returns the query for the row, the remaining time of its lease, and the time since the work was
/// done.
fn look(dialect: Dialect) -> String {
    let now = dialect.now();
    format!(
        "SELECT state, attempt_id, outcome, attempt, lease_end - {now}, \
         {now} - COALESCE(done_at, {now}) FROM leasehold_once WHERE name = ?{}",
        dialect.as_it_is()
    )
}

/// Returns the statement that takes over from an attempt whose lease has expired. It changes
/// nothing if the lease was renewed or taken over in between, because the end of the lease or the
/// ID is then different.
fn take_over(dialect: Dialect, how: &As) -> String {
    let (state, now, done_at) = (how.state(), dialect.now(), how.done_at(dialect));
    format!(
        "UPDATE leasehold_once SET state = '{state}', attempt = attempt + 1, attempt_id = ?, \
         lease_end = {now} + ?, done_at = {done_at} \
         WHERE name = ? AND state = 'started' AND attempt_id = ? AND lease_end <= {now}"
    )
}

/// Returns the statement that resets the row as if it had been deleted and inserted. It changes
/// nothing if another caller has done so in between, because `done_at` or `lease_end` is then too
/// recent.
fn anew(dialect: Dialect, how: &As, has_ended: bool) -> String {
    let (state, now, done_at) = (how.state(), dialect.now(), how.done_at(dialect));
    let over_at = if has_ended { "done_at" } else { "lease_end" };
    format!(
        "UPDATE leasehold_once SET state = '{state}', attempt = 1, attempt_id = ?, \
         lease_end = {now} + ?, done_at = {done_at}, outcome = NULL \
         WHERE name = ? AND state = ? AND attempt_id = ? AND {over_at} <= {now} - ?"
    )
}

/// Returns the statement that stores the outcome of a transaction's work. Parameters: outcome,
/// name.
///
/// `done_at` is set to the current time instead of the start of the work, because the retention
/// time is counted from it.
fn end(dialect: Dialect, ended: Ended) -> String {
    let (state, now) = (ended.as_str(), dialect.now());
    format!(
        "UPDATE leasehold_once SET state = '{state}', outcome = ?, done_at = {now} WHERE name = ?"
    )
}

/// Stores a transaction's outcome.
pub(super) async fn keep<S: Session + ?Sized>(
    session: &mut S,
    key: &Name,
    ended: Ended,
    outcome: &str,
) -> Result<()> {
    let dialect = session.dialect();
    let with = [Value::Text(stored(outcome).into_owned()), dialect.name(key)];
    match run(session, &end(dialect, ended), &with).await? {
        1 => Ok(()),
        _ => Err(Error::new(ErrorKind::Corrupt, "the work deleted its own idempotency key")
            .with_hint("do not change leasehold_once while the work runs")),
    }
}

/// Deletes keys whose work was done longer than `retention` ago, and returns their number.
///
/// These keys can be used again, so choose `retention` longer than any caller retries. It also
/// deletes keys of crashed or failed attempts whose lease expired longer than `retention` ago. The
/// next attempt then counts as the first.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// # use std::time::Duration;
/// use leasehold::once::clean_up;
/// let month = Duration::from_secs(30 * 24 * 3600);
/// assert_eq!(clean_up(&pool, month).await?, 0); // daily, on one machine only: `mutex.once_per`
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: some keys may have been deleted. Run it again.
///
/// # Errors
/// Any error of the database.
pub async fn clean_up<P: Pool>(pool: &P, retention: Duration) -> Result<u64> {
    sweep(pool, retention, u64::MAX).await
}

/// Deletes old keys like [`clean_up`], but at most `at_most` of them, which limits the duration of
/// a call.
///
/// Each statement deletes at most 1,000 keys, so that new calls of [`once`](crate::once()) wait no
/// longer than one such statement takes.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use leasehold::{database, once, once::sweep};
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(database::error)?;
/// # database::install(&pool).await?;
/// for key in ["a", "b", "c"] {
///     let _ = once(key).run(&pool, |_| async { Ok::<_, leasehold::Error>("done".into()) }).await?;
/// }
/// let week = Duration::from_secs(7 * 24 * 3600);
/// assert_eq!(sweep(&pool, week, 100).await?, 0); // no key is that old
/// # tokio::time::sleep(Duration::from_millis(5)).await;
/// assert_eq!(sweep(&pool, Duration::ZERO, 2).await?, 2);
/// assert_eq!(sweep(&pool, Duration::ZERO, 2).await?, 1); // fewer than `at_most`: no more are left
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: some keys may have been deleted. Run it again.
///
/// # Errors
/// Any error of the database.
pub async fn sweep<P: Pool>(pool: &P, retention: Duration, at_most: u64) -> Result<u64> {
    let swept = async {
        let mut session = pool.session().await?;
        let dialect = session.dialect();
        // The time is read first. A clock expression inside the WHERE would prevent the use of the
        // index, and the statement would lock every row that it scans.
        let now = number(&mut session, &format!("SELECT {}", dialect.now()), &[]).await?;
        let before = Value::Int(now.unwrap_or(0).saturating_sub(micros(retention)));
        let mut forgotten = 0;
        for old in OLD {
            loop {
                let some = (at_most - forgotten).min(FORGOTTEN_AT_ONCE);
                if some == 0 {
                    return Ok(forgotten);
                }
                if dialect == Dialect::Mysql {
                    // This applies to the next statement, which would otherwise lock the gap before
                    // the first row that it keeps. New keys are inserted into that gap.
                    session.batch("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
                }
                let sql = forget(dialect, old, some);
                let with = vec![before.clone(); sql.matches('?').count()];
                let deleted = run(&mut session, &sql, &with).await?;
                forgotten += deleted;
                if deleted < some {
                    break;
                }
            }
        }
        Ok(forgotten)
    };
    swept.await.map_err(|e: Error| e.with_operation("clean_up"))
}

/// Conditions for keys whose work was done, and for keys whose attempt failed and was never taken
/// over.
const OLD: [&str; 2] = ["done_at < ?", "state = 'started' AND lease_end < ?"];

/// The maximum number of keys that one statement deletes, so that other statements do not wait
/// long.
const FORGOTTEN_AT_ONCE: u64 = 1_000;

/// Returns the statement that deletes some of the keys that satisfy the condition `old`.
fn forget(dialect: Dialect, old: &str, some: u64) -> String {
    match dialect {
        Dialect::Mysql => format!("DELETE FROM leasehold_once WHERE {old} LIMIT {some}"),
        // The condition is repeated, because the row may have been begun again in the meantime.
        _ => format!(
            "DELETE FROM leasehold_once WHERE name IN (SELECT name FROM leasehold_once \
             WHERE {old} LIMIT {some}) AND {old}"
        ),
    }
}

/// Returns the SQL statements with which programs in other languages use a key in a transaction.
///
/// Such programs share the keys and the table with this library. The parameters are `:key`,
/// `:outcome` and `:before` (in µs since 1970).
///
/// ```
/// use leasehold::database::Dialect;
/// let text = leasehold::once::text(Dialect::Postgres);
/// assert!(text.contains("ON CONFLICT (name) DO NOTHING"));
/// ```
pub fn text(dialect: Dialect) -> String {
    let none = match dialect {
        Dialect::Mysql => "If it fails with error 1062 (the transaction stays usable)",
        Dialect::Sqlite | Dialect::Postgres => "If no row was inserted",
    };
    let retries = forget(dialect, OLD[0], FORGOTTEN_AT_ONCE);
    format!(
        "-- Run this in the transaction that does the work, before the work. It waits for another \
         transaction with this key.\n\
         {};\n\
         -- If one row was inserted, the key is yours. Do the work, and then:\n\
         {};\n\
         -- COMMIT. If the work fails, ROLL BACK, which also removes the key.\n\
         -- To keep an error for later calls, go back to a savepoint between the key and the \
         work, and then:\n\
         {};\n\n\
         -- {none}, the key was already used. Read it:\n\
         SELECT state, outcome FROM leasehold_once WHERE name = :key{};\n\
         -- state 'done': outcome is the result. 'refused': outcome is the error that was kept. \
         'started': an attempt is\n\
         -- running outside of a transaction; retry later. (In an outcome that begins with ESC \
         'leasehold:', ESC '0' means\n\
         -- NUL and ESC '1' means ESC.)\n\n\
         -- Run this periodically, in a transaction of its own, until it deletes no row. It \
         deletes keys whose work was done\n\
         -- before :before, in microseconds since 1970.\n\
         {};\n",
        fill(&insert(dialect, &As::Done), &[":key", "''", "0"]),
        fill(&end(dialect, Ended::Done), &[":outcome", ":key"]),
        fill(&end(dialect, Ended::Refused), &[":outcome", ":key"]),
        dialect.as_it_is(),
        fill(&retries, &[":before", ":before"]),
    )
}

/// The prefix of an outcome that is stored in escaped form.
const ESCAPED: &str = "\u{1b}leasehold:";

/// Returns the stored form of an outcome. It is escaped if it contains NUL, which PostgreSQL cannot
/// store, or begins with the prefix of escaped outcomes.
pub(super) fn stored(outcome: &str) -> Cow<'_, str> {
    if !outcome.contains('\0') && !outcome.starts_with(ESCAPED) {
        return outcome.into();
    }
    let plain = outcome.replace('\u{1b}', "\u{1b}1").replace('\0', "\u{1b}0");
    format!("{ESCAPED}{plain}").into()
}

/// Returns the outcome from which [`stored`] created this text.
fn read_back(text: String) -> String {
    match text.strip_prefix(ESCAPED) {
        Some(escaped) => escaped.replace("\u{1b}0", "\0").replace("\u{1b}1", "\u{1b}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // F35
    #[test]
    fn every_outcome_is_read_back_and_stored_without_nul() {
        for outcome in ["", "paid", "a\0b", "\0", "\u{1b}0\0\u{1b}1", ESCAPED, "\u{1b}[1mbold"] {
            let text = stored(outcome);
            assert!(!text.contains('\0'));
            assert_eq!(read_back(text.into_owned()), outcome);
        }
        // Outcomes that earlier versions stored without escaping are read unchanged.
        assert_eq!(read_back("\u{1b}0".into()), "\u{1b}0");
        assert_eq!(stored("\u{1b}0"), "\u{1b}0");
    }
}
