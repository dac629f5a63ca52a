//! The usual handmade locks: a row that is inserted and deleted, and the session locks of servers.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{MySqlConnection, MySqlPool, PgConnection, PgPool, SqliteConnection};

use super::CONNECTIONS;
use crate::contention::Turn;
use crate::measure::{Result, now};

/// Inserts and deletes a row for each task, on a connection of the pool.
macro_rules! row_pair {
    ($pair:ident, $pool:ty, $insert:literal, $delete:literal) => {
        pub(crate) async fn $pair((pool, name): ($pool, String)) -> Result<()> {
            sqlx::query($insert).bind(&name).bind("me").bind(1_i64).execute(&pool).await?;
            sqlx::query($delete).bind(&name).bind("me").execute(&pool).await?;
            Ok(())
        }
    };
}
row_pair!(
    pg_pair,
    PgPool,
    "INSERT INTO byhand VALUES ($1, $2, $3)",
    "DELETE FROM byhand WHERE name = $1 AND owner = $2"
);
row_pair!(
    mysql_pair,
    MySqlPool,
    "INSERT INTO byhand VALUES (?, ?, ?)",
    "DELETE FROM byhand WHERE name = ? AND owner = ?"
);

pub(crate) type Shared<C> = Arc<tokio::sync::Mutex<C>>;

/// Opens a connection for each contender. Empty if there would be too many.
pub(crate) async fn sessions<C, F: Future<Output = Result<C>>>(
    n: usize,
    connect: impl Fn() -> F,
) -> Result<Vec<Shared<C>>> {
    let mut all = Vec::new();
    for _ in (0..n).filter(|_| n <= CONNECTIONS) {
        all.push(Arc::new(tokio::sync::Mutex::new(connect().await?)));
    }
    Ok(all)
}

pub(crate) fn turn_of<C, F>(connection: Shared<C>, turn: fn(Shared<C>) -> F) -> Turn
where
    C: Send + 'static,
    F: Future<Output = Result<u64>> + Send + 'static,
{
    Box::new(move || Box::pin(turn(connection.clone())))
}

pub(crate) async fn pg_turn(c: Shared<PgConnection>) -> Result<u64> {
    let mut c = c.lock().await;
    sqlx::query("SELECT pg_advisory_lock($1)").bind(2_i64).execute(&mut *c).await?;
    let note = now();
    sqlx::query("SELECT pg_advisory_unlock($1)").bind(2_i64).execute(&mut *c).await?;
    Ok(note)
}

pub(crate) async fn mysql_turn(c: Shared<MySqlConnection>) -> Result<u64> {
    let mut c = c.lock().await;
    sqlx::query("SELECT GET_LOCK(?, 60)").bind("contention").execute(&mut *c).await?;
    let note = now();
    sqlx::query("SELECT RELEASE_LOCK(?)").bind("contention").execute(&mut *c).await?;
    Ok(note)
}

/// Usual poll interval of handmade locks without notifications.
const LOOK: Duration = Duration::from_millis(10);

/// Inserts a row when it does not exist, and deletes it again.
macro_rules! row_turn {
    ($turn:ident, $connection:ty, $insert:literal, $delete:literal) => {
        pub(crate) async fn $turn(c: Shared<$connection>) -> Result<u64> {
            let mut c = c.lock().await;
            loop {
                let insert = sqlx::query($insert).bind("contention").bind("me").bind(1_i64);
                match insert.execute(&mut *c).await {
                    Ok(_) => break,
                    Err(error) if is_taken(&error) => tokio::time::sleep(LOOK).await,
                    Err(error) => return Err(error.into()),
                }
            }
            let note = now();
            // This is a deadlock with an insert of another contender. The row belongs to this one
            // and stays until it is deleted.
            loop {
                let delete = sqlx::query($delete).bind("contention").bind("me");
                match delete.execute(&mut *c).await {
                    Ok(_) => return Ok(note),
                    Err(error) if is_taken(&error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    };
}
row_turn!(
    sqlite_row,
    SqliteConnection,
    "INSERT INTO byhand VALUES (?, ?, ?)",
    "DELETE FROM byhand WHERE name = ? AND owner = ?"
);
row_turn!(
    pg_row,
    PgConnection,
    "INSERT INTO byhand VALUES ($1, $2, $3)",
    "DELETE FROM byhand WHERE name = $1 AND owner = $2"
);
row_turn!(
    mysql_row,
    MySqlConnection,
    "INSERT INTO byhand VALUES (?, ?, ?)",
    "DELETE FROM byhand WHERE name = ? AND owner = ?"
);

/// Returns whether the row exists, or another contender was in the way (a deadlock, SQLite's busy).
fn is_taken(error: &sqlx::Error) -> bool {
    let others = ["40001", "40P01", "5", "261", "517"];
    error.as_database_error().is_some_and(|error| {
        error.is_unique_violation() || error.code().is_some_and(|code| others.contains(&&*code))
    })
}
