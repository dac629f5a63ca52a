//! A fence in SQL, for data in a database. The lock itself may be in any store.
//!
//! There are two forms. [`check`] guards a whole transaction: one row per resource stores the
//! highest token seen. The statement that compares and raises the token also locks this row until
//! the transaction ends. From the check to the commit, no other token can pass, so transactions
//! write in token order. A rollback undoes the raised token together with the writes.
//! [`TokenColumn`] guards one row of your own table with a single statement.
//!
//! **Check first, before you read** (see [`fence`](super)). A late write is rejected only after the
//! new holder has presented its token. On MySQL, whose snapshot begins with the first plain read,
//! checking first also makes the reads fresh.
//!
//! Equal tokens pass, so a holder may check any number of times.

use crate::database::{
    Dialect, Session, Transaction, Value, assignments, fill, identifier, named, number, place, run,
};
use leasehold_core::fence::Fence;
use leasehold_core::mode::Exclusive;
use leasehold_core::{Error, ErrorKind, FencingToken, Guard, Name, Result};

/// Fails if `resource` has seen a higher token, and otherwise keeps every other token out until the
/// transaction ends.
///
/// Needs the table `leasehold_fence`, see [`database::install`](crate::database::install).
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::database::{self, error};
/// use leasehold::{fence, ErrorKind};
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(error)?;
/// # let locks = leasehold::connect("memory:").await?;
/// database::install(&pool).await?;
/// let late = locks.mutex("order:42").lock().await?.token(); // released immediately
/// let guard = locks.mutex("order:42").lock().await?;
///
/// let mut tx = pool.begin().await.map_err(error)?;
/// fence::sql::check(&mut tx, "order:42", &guard).await?; // before anything else in it
/// // read, write
/// tx.commit().await.map_err(error)?;
///
/// let mut tx = pool.begin().await.map_err(error)?;
/// let refused = fence::sql::check(&mut tx, "order:42", late).await.unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::StaleToken);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. Roll back the transaction.
///
/// # Errors
/// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): a later holder has already presented
///   its token. Roll back.
/// - [`ErrorKind::Conflict`]: a deadlock or a serialization failure; run the transaction again.
/// - The errors of [`Fence::fence`], and any error of the database.
pub async fn check<T: Transaction + ?Sized>(
    tx: &mut T,
    resource: impl AsRef<str>,
    fence: impl Fence,
) -> Result<()> {
    let resource = named(resource, "fence")?;
    let offered = fence.fence()?;
    let seen = raise(tx, &resource, offered).await;
    let judged = seen.and_then(|seen| match seen == offered {
        true => Ok(()),
        false => Err(Error::stale_fence(seen, offered)),
    });
    judged.map_err(|e| e.with_operation("fence").with_lock(&resource))
}

/// Calls [`check`] for the resource that has the same name as the guard's lock.
///
/// If the lock covers several resources, or a resource with another name, call [`check`] for each
/// of them.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// # let guard = leasehold::connect("memory:").await?.mutex("order:42").lock().await?;
/// use leasehold::database::error;
/// let mut tx = pool.begin().await.map_err(error)?;
/// leasehold::fence::sql::check_guard(&mut tx, &guard).await?; // before anything else in it
/// // read, write
/// tx.commit().await.map_err(error)?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: see [`check`].
///
/// # Errors
/// The errors of [`check`].
pub async fn check_guard<T, M>(tx: &mut T, guard: &Guard<M>) -> Result<()>
where
    T: Transaction + ?Sized,
    M: Exclusive,
{
    check(tx, guard.name(), guard).await
}

/// Raises the highest token seen to `offered` if it is lower, and returns the highest token seen.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::database::Pool as _;
/// use leasehold::{Name, FencingToken, fence::sql::raise};
/// let (resource, [small, great]) = (Name::new("order:42")?, [7, 9].map(|n| FencingToken::new(n).expect("above 0")));
/// let mut session = pool.session().await?;
/// assert_eq!(raise(&mut session, &resource, great).await?, great);
/// assert_eq!(raise(&mut session, &resource, small).await?, great); // stale
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened. Repeating it is harmless.
///
/// # Errors
/// Any error of the database.
pub async fn raise<S: Session + ?Sized>(
    session: &mut S,
    resource: &Name,
    offered: FencingToken,
) -> Result<FencingToken> {
    let dialect = session.dialect();
    let [raise, look] = statements(dialect);
    let name = dialect.name(resource);
    // MySQL's statement contains the token twice.
    let with = [name.clone(), of(offered), of(offered)];
    run(session, raise, &with[..raise.matches('?').count()]).await?;
    let seen = number(session, look, &[name]).await?.unwrap_or(0);
    match u64::try_from(seen).ok().and_then(FencingToken::new) {
        Some(seen) if seen >= offered => Ok(seen),
        _ => Err(Error::new(
            ErrorKind::Corrupt,
            format!("the fence's row contains {seen} after token {offered} was written to it"),
        )
        .with_hint(
            "check leasehold_fence for triggers, rules and other programs that write to it",
        )),
    }
}

fn of(token: FencingToken) -> Value {
    // The token has at most 63 bits, by its type.
    Value::Int(i64::try_from(token.get()).unwrap_or(i64::MAX))
}

/// Returns two statements: one raises the highest token seen and locks its row, the other reads it.
fn statements(dialect: Dialect) -> [&'static str; 2] {
    match dialect {
        Dialect::Postgres => [
            "INSERT INTO leasehold_fence AS f (name, seen) VALUES (?, ?) \
             ON CONFLICT (name) DO UPDATE SET seen = GREATEST(f.seen, EXCLUDED.seen)",
            "SELECT seen FROM leasehold_fence WHERE name = ?",
        ],
        Dialect::Sqlite => [
            "INSERT INTO leasehold_fence (name, seen) VALUES (?, ?) \
             ON CONFLICT (name) DO UPDATE SET seen = MAX(seen, EXCLUDED.seen)",
            "SELECT seen FROM leasehold_fence WHERE name = ?",
        ],
        Dialect::Mysql => [
            "INSERT INTO leasehold_fence (name, seen) VALUES (?, ?) \
             ON DUPLICATE KEY UPDATE seen = GREATEST(seen, ?)",
            "SELECT seen FROM leasehold_fence WHERE name = ? FOR UPDATE",
        ],
    }
}

/// Returns the fence as SQL text, for programs in other languages. Its parameters are `:resource`
/// and `:token`.
///
/// ```
/// use leasehold::database::Dialect;
/// assert!(leasehold::fence::sql::text(Dialect::Mysql).contains("ON DUPLICATE KEY UPDATE"));
/// ```
pub fn text(dialect: Dialect) -> String {
    let [raise, look] = statements(dialect);
    // MySQL counts changed rows, unless the client requests matched rows.
    let none = match dialect {
        Dialect::Mysql => {
            "-- If no row MATCHED, the token is stale (or the row does not exist). Many clients \
             count the rows that\n\
             -- CHANGED instead: there, a write that changes nothing looks like a stale one. \
             Connect with\n\
             -- CLIENT_FOUND_ROWS, or read the token back:\n\
             SELECT token FROM your_table WHERE id = :id FOR UPDATE;\n\
             -- If the result is greater than :token, the token is stale.\n"
        }
        Dialect::Sqlite | Dialect::Postgres => {
            "-- If no row changed, the token is stale (or the row does not exist).\n"
        }
    };
    format!(
        "-- Run this in the transaction that writes, before it reads or writes anything else:\n\
         {};\n\
         {};\n\
         -- If the result is greater than :token, the token is stale: ROLL BACK.\n\
         -- Otherwise continue. The row stays locked until COMMIT, so no other token can pass.\n\n\
         -- Or, with a token column in your own table, in one statement:\n\
         UPDATE your_table SET your_column = :value, token = :token\n\
         \x20WHERE id = :id AND (token IS NULL OR token <= :token);\n\
         {none}",
        fill(raise, &[":resource", ":token", ":token"]),
        fill(look, &[":resource"]),
    )
}

/// Fences the rows of your own table by a token column. Each write is one statement.
///
/// The column is a 64-bit integer, NULL or 0 before the first write.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::database::{Pool as _, Session as _};
/// use leasehold::{ErrorKind, fence::sql::TokenColumn};
/// # let locks = leasehold::connect("memory:").await?;
/// # let mut session = pool.session().await?;
/// # session.batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, token BIGINT)").await?;
/// # session.batch("INSERT INTO orders VALUES (42, 'new', NULL)").await?;
/// let orders = TokenColumn::new("orders", "id", "token");
/// let late = locks.mutex("order:42").lock().await?.token(); // released immediately
/// let guard = locks.mutex("order:42").lock().await?;
///
/// assert!(orders.write(&mut session, 42, &guard, &[]).await?); // presents the token first
/// assert!(orders.write(&mut session, 42, &guard, &[("state", "paid".into())]).await?);
/// let refused = orders.write(&mut session, 42, late, &[("state", "void".into())]).await.unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::StaleToken);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct TokenColumn {
    table: String,
    key: String,
    token: String,
}

impl TokenColumn {
    /// Names the table, its unique key column and its token column.
    ///
    /// Names consist of letters, digits and `_` (`schema.table` for the table), and are spelled as
    /// in the database. Other names are rejected at the first use.
    pub fn new(table: impl Into<String>, key: impl Into<String>, token: impl Into<String>) -> Self {
        Self { table: table.into(), key: key.into(), token: token.into() }
    }

    /// Sets columns of one row and its token, and returns whether the row exists.
    ///
    /// The write is one statement, which is atomic inside and outside of a transaction. Without
    /// columns, it only presents the token: do that before you read data on which the next write
    /// depends.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. In a transaction, roll back.
    ///
    /// # Errors
    /// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): the row has seen a higher token,
    ///   and nothing was written.
    /// - The errors of [`Fence::fence`], and any error of the database.
    #[must_use = "false means that the row does not exist"]
    pub async fn write<S: Session + ?Sized>(
        &self,
        session: &mut S,
        key: impl Into<Value>,
        fence: impl Fence,
        columns: &[(&str, Value)],
    ) -> Result<bool> {
        let offered = fence.fence()?;
        self.set(session, key.into(), offered, columns).await.map_err(|e| e.with_operation("fence"))
    }

    async fn set<S: Session + ?Sized>(
        &self,
        session: &mut S,
        key: Value,
        offered: FencingToken,
        columns: &[(&str, Value)],
    ) -> Result<bool> {
        let dialect = session.dialect();
        let (table, id) = (identifier(dialect, &self.table)?, identifier(dialect, &self.key)?);
        let token = identifier(dialect, &self.token)?;
        let mut sql = format!("UPDATE {table} SET {token} = ?");
        let mut with = vec![of(offered)];
        sql.push_str(&assignments(dialect, columns, &mut with)?);
        let here = place(dialect, &key)?;
        sql.push_str(&format!(" WHERE {id} = {here} AND ({token} IS NULL OR {token} <= ?)"));
        with.extend([key.clone(), of(offered)]);
        match run(session, &sql, &with).await? {
            1 => return Ok(true),
            0 => {}
            n => {
                let what = format!("{n} rows of table {:?} have this key", self.table);
                let hint = "roll back, and add a unique index on the key";
                return Err(Error::new(ErrorKind::Corrupt, what).with_hint(hint));
            }
        }
        let (big, fresh) = (dialect.bigint(), dialect.as_it_is());
        let sql = format!("SELECT CAST({token} AS {big}) FROM {table} WHERE {id} = {here}{fresh}");
        let Some(seen) = number(session, &sql, &[key]).await? else {
            return Ok(false);
        };
        match u64::try_from(seen).ok().and_then(FencingToken::new) {
            Some(seen) if seen > offered => Err(Error::stale_fence(seen, offered)),
            _ => {
                let what =
                    "another transaction changed the row at the same time; nothing was written";
                Err(Error::new(ErrorKind::Conflict, what).with_hint("retry the write"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // R35
    #[test]
    fn the_printed_sql_names_its_parameters() {
        for dialect in [Dialect::Sqlite, Dialect::Postgres, Dialect::Mysql] {
            let text = text(dialect);
            assert!(!text.contains('?'), "{text}");
            assert!(text.contains("VALUES (:resource, :token)"), "{text}");
            assert!(text.contains("WHERE name = :resource"), "{text}");
        }
    }
}
