//! A fence in SQL: for data that lives in a database while its lock may live anywhere.
//!
//! Two forms. [`check`] guards a whole transaction: one row per resource holds the greatest token
//! seen, and the statement that compares and raises it also locks that row until the transaction
//! ends. So from the check to the commit no other token can pass, and what the transaction writes
//! is written in token order; if it rolls back, the mark does too, together with the writes.
//! [`TokenColumn`] guards one row of the caller's own table in one statement.
//!
//! **Check first, before you read** (see [`fence`](super)): a late write is refused only from the
//! moment the new holder has shown its token. On MySQL, whose snapshot begins with the first plain
//! read, checking first is also what makes the reads fresh.
//!
//! Equal tokens pass: one holder checks as often as it likes.

use crate::database::{
    Dialect, Session, Transaction, Value, assignments, fill, identifier, named, number, place, run,
};
use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, Guard, Name, Result, Token};

/// Lets the transaction go on only if no greater token has been seen for `resource`, and keeps
/// every other token out until it ends.
///
/// Needs the table `leasehold_fence`: see [`database::install`](crate::database::install).
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
/// let late = locks.mutex("order:42").lock().await?.token(); // released at once
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
/// Dropped meanwhile, it leaves the transaction as the driver leaves it: roll back.
///
/// # Errors
/// [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): roll back, the lock is somebody else's.
/// Those of [`Fence::fence`]; [`ErrorKind::Conflict`] and what else the database answers.
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
    judged.map_err(|e| e.during("fence").on(&resource))
}

/// As [`check`], for the resource that is called as the guard's lock is: what they are both named
/// cannot be mistyped. (Where a lock covers several resources, or they are named otherwise, it is
/// [`check`] for each of them.)
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
/// As [`check`].
///
/// # Errors
/// As [`check`].
pub async fn check_guard<T: Transaction + ?Sized>(tx: &mut T, guard: &Guard) -> Result<()> {
    check(tx, guard.name(), guard).await
}

/// Raises the mark, if it is lower, and tells the greatest token seen: ours, or somebody else's.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
/// # let pool = options.connect("sqlite::memory:").await.map_err(leasehold::database::error)?;
/// # leasehold::database::install(&pool).await?;
/// use leasehold::database::Pool as _;
/// use leasehold::{Name, Token, fence::sql::raise};
/// let (resource, [small, great]) = (Name::new("order:42")?, [7, 9].map(|n| Token::new(n).expect("above 0")));
/// let mut session = pool.session().await?;
/// assert_eq!(raise(&mut session, &resource, great).await?, great);
/// assert_eq!(raise(&mut session, &resource, small).await?, great); // stale
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Cancel safety
/// Dropped, it may have been done or not. Doing it again changes nothing.
///
/// # Errors
/// What the database answers.
pub async fn raise<S: Session + ?Sized>(
    session: &mut S,
    resource: &Name,
    offered: Token,
) -> Result<Token> {
    let dialect = session.dialect();
    let [raise, look] = statements(dialect);
    let name = dialect.name(resource);
    // MySQL's has the token twice.
    let with = [name.clone(), of(offered), of(offered)];
    run(session, raise, &with[..raise.matches('?').count()]).await?;
    let seen = number(session, look, &[name]).await?.unwrap_or(0);
    match u64::try_from(seen).ok().and_then(Token::new) {
        Some(seen) if seen >= offered => Ok(seen),
        _ => Err(Error::new(
            ErrorKind::Corrupt,
            format!("the fence holds {seen} after token {offered} was written to it"),
        )),
    }
}

fn of(token: Token) -> Value {
    // 63 bits, by the type.
    Value::Int(i64::try_from(token.get()).unwrap_or(i64::MAX))
}

/// Raise the mark and lock its row; look at it.
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

/// The fence as SQL text, for programs that are not written in Rust. Parameters are `:resource`
/// and `:token`.
///
/// ```
/// use leasehold::database::Dialect;
/// assert!(leasehold::fence::sql::text(Dialect::Mysql).contains("ON DUPLICATE KEY UPDATE"));
/// ```
pub fn text(dialect: Dialect) -> String {
    let [raise, look] = statements(dialect);
    // MySQL's protocol counts what has changed, unless a client asks for what has matched.
    let none = match dialect {
        Dialect::Mysql => {
            "-- No row MATCHED: the token is stale (or there is no such row). Many clients count the rows\n\
             -- that CHANGED: there a write that changes nothing looks like a stale one. Connect with\n\
             -- CLIENT_FOUND_ROWS, or read the token back:\n\
             SELECT token FROM your_table WHERE id = :id FOR UPDATE;\n\
             -- A number greater than :token: it is stale.\n"
        }
        Dialect::Sqlite | Dialect::Postgres => {
            "-- No row changed: the token is stale (or there is no such row).\n"
        }
    };
    format!(
        "-- In the transaction that writes, before it reads or writes anything else:\n\
         {};\n\
         {};\n\
         -- If this answers a number greater than :token, ROLL BACK: the token is stale.\n\
         -- Otherwise go on; the row stays locked until COMMIT, and no other token can pass.\n\n\
         -- Or, with a token column on your own table, in one statement:\n\
         UPDATE your_table SET your_column = :value, token = :token\n\
         \x20WHERE id = :id AND (token IS NULL OR token <= :token);\n\
         {none}",
        fill(raise, &[":resource", ":token", ":token"]),
        fill(look, &[":resource"]),
    )
}

/// A table of the caller's own with a token column: the fence of one row, in one statement.
///
/// The column is a 64-bit whole number, null or 0 before the first write.
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
/// let late = locks.mutex("order:42").lock().await?.token(); // released at once
/// let guard = locks.mutex("order:42").lock().await?;
///
/// assert!(orders.write(&mut session, 42, &guard, &[]).await?); // shows the token, before it reads
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
    /// `key` must be unique in `table`. Names are letters, digits and `_` (`schema.table` for the
    /// table), spelt as the database keeps them; others are refused by the first use.
    pub fn new(table: impl Into<String>, key: impl Into<String>, token: impl Into<String>) -> Self {
        Self { table: table.into(), key: key.into(), token: token.into() }
    }

    /// Sets columns of one row, and its token, if the row has seen no greater one: one statement,
    /// atomic in a transaction or outside of one. With no columns it only shows the token: do that
    /// before you read what the next write depends on. `false` if there is no such row.
    ///
    /// # Cancel safety
    /// Dropped, the row may have been written or not; in a transaction, roll back.
    ///
    /// # Errors
    /// [`ErrorKind::StaleToken`] (see [`Error::stale_token`]), and nothing was written. Those of
    /// [`Fence::fence`], and what the database answers.
    #[must_use = "false means that there is no such row"]
    pub async fn write<S: Session + ?Sized>(
        &self,
        session: &mut S,
        key: impl Into<Value>,
        fence: impl Fence,
        columns: &[(&str, Value)],
    ) -> Result<bool> {
        let offered = fence.fence()?;
        self.set(session, key.into(), offered, columns).await.map_err(|e| e.during("fence"))
    }

    async fn set<S: Session + ?Sized>(
        &self,
        session: &mut S,
        key: Value,
        offered: Token,
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
                let what = format!("{n} rows of {} have that key: make it unique", self.table);
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        let (big, fresh) = (dialect.bigint(), dialect.as_it_is());
        let sql = format!("SELECT CAST({token} AS {big}) FROM {table} WHERE {id} = {here}{fresh}");
        let Some(seen) = number(session, &sql, &[key]).await? else {
            return Ok(false);
        };
        match u64::try_from(seen).ok().and_then(Token::new) {
            Some(seen) if seen > offered => Err(Error::stale_fence(seen, offered)),
            _ => {
                let what = "the row came into being while it was written; write again";
                Err(Error::new(ErrorKind::Conflict, what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r35_the_printed_sql_names_its_parameters() {
        for dialect in [Dialect::Sqlite, Dialect::Postgres, Dialect::Mysql] {
            let text = text(dialect);
            assert!(!text.contains('?'), "{text}");
            assert!(text.contains("VALUES (:resource, :token)"), "{text}");
            assert!(text.contains("WHERE name = :resource"), "{text}");
        }
    }
}
