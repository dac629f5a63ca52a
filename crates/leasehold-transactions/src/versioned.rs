//! Optimistic locking: compare-and-set on a version column of your own table.
//!
//! No lock is held between reading and writing. You read a row with its version, and the write
//! succeeds only if the row still has this version. The database checks and writes in one step:
//! `UPDATE … SET version = version + 1 WHERE id = ? AND version = ?`. If several writers start from
//! the same version, exactly one succeeds. The others get [`ErrorKind::StaleVersion`] with both
//! numbers, and read again ([`retry`]).
//!
//! The version is a counter that every write increments by one. A time would not work, because two
//! writes can have the same time, and neither would the row's content, which can return to an
//! earlier state. Other programs that write to the table must increment the version, too. A row
//! that is deleted and inserted again restarts its versions, so do not reuse keys.

use std::future::Future;
use std::time::Duration;

use crate::database::{
    Dialect, Session, Transaction, Value, assignments, identifier, number, place, run,
};
use leasehold_core::{Error, ErrorKind, Result};

/// A table with a version column.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn f(pool: sqlx::PgPool) -> leasehold::Result<()> {
/// use leasehold::database::error;
/// use leasehold::versioned::{Retry, Versioned, retry};
/// let stock = Versioned::new("stock", "id", "version");
/// retry(Retry::default(), || async {
///     let mut tx = pool.begin().await.map_err(error)?;
///     let (left, version): (i64, i64) =
///         sqlx::query_as("SELECT left_over, version FROM stock WHERE id = 7")
///             .fetch_one(&mut *tx)
///             .await
///             .map_err(error)?;
///     // For other types of the database, also as keys: Value::typed("uuid", "7f1c…").
///     stock.update(&mut tx, 7, version, &[("left_over", (left - 1).into())]).await?;
///     tx.commit().await.map_err(error)?;
///     Ok(())
/// })
/// .await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Versioned {
    table: String,
    key: String,
    version: String,
}

impl Versioned {
    /// Names the table, its unique key column and its version column (an integer, NOT NULL).
    ///
    /// Names consist of letters, digits and `_` (`schema.table` for the table), and are spelled as
    /// in the database. Other names are rejected at the first use.
    pub fn new(
        table: impl Into<String>,
        key: impl Into<String>,
        version: impl Into<String>,
    ) -> Self {
        Self { table: table.into(), key: key.into(), version: version.into() }
    }

    /// Returns the row's current version, or `None` if the row does not exist.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    /// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
    /// # leasehold::database::install(&pool).await?;
    /// use leasehold::database::{Pool as _, Session as _, error};
    /// use leasehold::{ErrorKind, versioned::Versioned};
    /// # let mut session = pool.session().await?;
    /// # session.batch("CREATE TABLE stock (id INTEGER PRIMARY KEY, left_over INTEGER, version INTEGER NOT NULL)").await?;
    /// # session.batch("INSERT INTO stock VALUES (7, 10, 1)").await?;
    /// # drop(session);
    /// let stock = Versioned::new("stock", "id", "version");
    /// let mut tx = pool.begin().await.map_err(error)?;
    /// let read = stock.version(&mut tx, 7).await?.expect("it is there");
    /// assert_eq!(stock.update(&mut tx, 7, read, &[("left_over", 9.into())]).await?, read + 1);
    /// let late = stock.update(&mut tx, 7, read, &[("left_over", 8.into())]).await.unwrap_err();
    /// assert_eq!(late.kind(), ErrorKind::StaleVersion);
    /// tx.commit().await.map_err(error)?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// Any error of the database.
    pub async fn version<S: Session + ?Sized>(
        &self,
        session: &mut S,
        key: impl Into<Value>,
    ) -> Result<Option<i64>> {
        self.look(session, key.into()).await.map_err(|e| e.with_operation("version"))
    }

    /// Sets columns of one row if its version is still `expected`, and returns the new version,
    /// `expected + 1`.
    ///
    /// The update is one statement. Without columns, it only increments the version. Until the
    /// commit, no other transaction can update the row with [`Versioned`].
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
    ///
    /// # Errors
    /// - [`ErrorKind::StaleVersion`] (see [`Error::stale_version`]): nothing was written.
    /// - [`ErrorKind::Corrupt`]: the key is not unique. Roll back.
    /// - Any error of the database.
    pub async fn update<T: Transaction + ?Sized>(
        &self,
        tx: &mut T,
        key: impl Into<Value>,
        expected: i64,
        columns: &[(&str, Value)],
    ) -> Result<i64> {
        self.set(tx, key.into(), expected, columns).await.map_err(|e| e.with_operation("update"))
    }

    async fn set<T: Transaction + ?Sized>(
        &self,
        tx: &mut T,
        key: Value,
        expected: i64,
        columns: &[(&str, Value)],
    ) -> Result<i64> {
        let Some(next) = expected.checked_add(1) else {
            let what = "the version column has reached its maximum (2^63-1)";
            return Err(Error::new(ErrorKind::Full, what));
        };
        let dialect = tx.dialect();
        let version = identifier(dialect, &self.version)?;
        let mut sql = format!("UPDATE {} SET {version} = ?", identifier(dialect, &self.table)?);
        let mut with = vec![Value::Int(next)];
        sql.push_str(&assignments(dialect, columns, &mut with)?);
        let (id, key_here) = (identifier(dialect, &self.key)?, place(dialect, &key)?);
        sql.push_str(&format!(" WHERE {id} = {key_here} AND {version} = ?"));
        with.extend([key.clone(), Value::Int(expected)]);
        match run(tx, &sql, &with).await? {
            1 => Ok(next),
            0 => Err(Error::stale_row(expected, self.look(tx, key).await?)),
            n => Err(Error::new(
                ErrorKind::Corrupt,
                format!("{n} rows of table {:?} have this key", self.table),
            )
            .with_hint("roll back, and add a unique index on the key")),
        }
    }

    async fn look<S: Session + ?Sized>(&self, session: &mut S, key: Value) -> Result<Option<i64>> {
        let dialect = session.dialect();
        let sql = format!(
            "SELECT CAST({} AS {}) FROM {} WHERE {} = {}{}",
            identifier(dialect, &self.version)?,
            dialect.bigint(),
            identifier(dialect, &self.table)?,
            identifier(dialect, &self.key)?,
            place(dialect, &key)?,
            dialect.as_it_is(),
        );
        Ok(number(session, &sql, &[key]).await?)
    }
}

/// Returns the write as SQL text, for programs in other languages.
///
/// The parameters are `:value`, `:id` and `:expected`.
///
/// ```
/// use leasehold::database::Dialect;
/// assert!(leasehold::versioned::text(Dialect::Sqlite).contains("AND version = :expected"));
/// ```
pub fn text(dialect: Dialect) -> String {
    let counted = match dialect {
        Dialect::Mysql => "If one row MATCHED (or changed, since the version always changes)",
        Dialect::Sqlite | Dialect::Postgres => "If one row changed",
    };
    format!(
        "-- Read the row with its version:\n\
         SELECT your_column, version FROM your_table WHERE id = :id;\n\
         -- Write the value that you computed from it:\n\
         UPDATE your_table SET version = version + 1, your_column = :value WHERE id = :id AND \
         version = :expected;\n\
                  -- {counted}, the value is written and the version is one higher. If none did, \
                  another client has written in the\n\
         -- meantime, or the row does not exist. Begin a new transaction and read again.\n"
    )
}

/// The number of tries of [`retry`], and the pauses between them.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// use leasehold::versioned::{Retry, retry};
/// use leasehold::{Error, ErrorKind};
/// let policy = Retry::default().tries(5).pauses(Duration::from_millis(1), Duration::from_millis(50));
/// let mut times = 0;
/// let result = retry(policy, || {
///     times += 1; // begins a transaction of its own each time
///     let is_late = times < 3;
///     async move {
///         match is_late {
///             true => Err(Error::new(ErrorKind::Conflict, "another client has written")),
///             false => Ok("written"),
///         }
///     }
/// });
/// assert_eq!(result.await?, "written");
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    tries: u32,
    first: Duration,
    longest: Duration,
}

impl Default for Retry {
    /// Returns 10 tries, with pauses that double from 2 ms to 200 ms.
    fn default() -> Self {
        Self { tries: 10, first: Duration::from_millis(2), longest: Duration::from_millis(200) }
    }
}

impl Retry {
    /// Sets the maximum number of tries (at least one).
    pub fn tries(mut self, tries: u32) -> Self {
        self.tries = tries.max(1);
        self
    }

    /// Sets the pauses: the first is at most `first`, and each next limit is twice the previous
    /// one, up to `longest`.
    pub fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        (self.first, self.longest) = (first, longest);
        self
    }

    /// Returns the longest pause before the next try after `failed` failures.
    fn pause(&self, failed: u32) -> Duration {
        self.first.saturating_mul(1 << failed.saturating_sub(1).min(20)).min(self.longest)
    }
}

/// Runs `work` again as long as it fails with [`ErrorKind::StaleVersion`] or
/// [`ErrorKind::Conflict`], up to the limit of `policy`.
///
/// The pauses in between are random. `work` must begin its own transaction each time, because after
/// both kinds of error everything that it has read is stale.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::versioned::{Retry, retry};
/// let written = retry(Retry::default(), || async {
///     // begin, read, `update` with the version that you read, commit
///     Ok::<_, leasehold::Error>(())
/// });
/// written.await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Dropping the future drops the current try. The cancel safety of `work` applies.
///
/// # Errors
/// The errors of `work`, the last one if the tries are used up.
pub async fn retry<T, F>(policy: Retry, mut work: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut failed = 0;
    loop {
        match work().await {
            Err(e) if matches!(e.kind(), ErrorKind::StaleVersion | ErrorKind::Conflict) => {
                failed += 1;
                if failed >= policy.tries {
                    return Err(e);
                }
                tokio::time::sleep(jittered(policy.pause(failed))).await;
            }
            done => return done,
        }
    }
}

/// Returns a random duration up to `d`, so that contenders that failed together do not retry
/// together.
pub(crate) fn jittered(d: Duration) -> Duration {
    let mut random = [0; 4];
    match getrandom::fill(&mut random) {
        Ok(()) => d.mul_f64(f64::from(u32::from_le_bytes(random)) / f64::from(u32::MAX)),
        Err(_) => d / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_jitter_only_shortens() {
        let policy = Retry::default().pauses(Duration::from_millis(2), Duration::from_millis(9));
        let pauses: Vec<u128> = (1..6).map(|n| policy.pause(n).as_millis()).collect();
        assert_eq!(pauses, [2, 4, 8, 9, 9]);
        assert_eq!(policy.pause(u32::MAX).as_millis(), 9);
        assert!((0..100).all(|_| jittered(policy.longest) <= policy.longest));
    }

    #[tokio::test]
    async fn a_retry_is_bounded_and_other_errors_are_not_retried() {
        let policy = Retry::default().tries(3).pauses(Duration::ZERO, Duration::ZERO);
        for (error, times) in [
            (ErrorKind::StaleVersion, 3),
            (ErrorKind::Conflict, 3),
            (ErrorKind::Unreachable, 1),
            (ErrorKind::Config, 1),
        ] {
            let mut ran = 0;
            let result: Result<()> = retry(policy, || {
                ran += 1;
                async move { Err(Error::new(error, "")) }
            })
            .await;
            assert_eq!((result.unwrap_err().kind(), ran), (error, times));
        }
    }
}
