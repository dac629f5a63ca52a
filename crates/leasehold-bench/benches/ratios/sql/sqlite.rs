//! SQLite, compared with a row, with and without durable writes.

use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, SqliteConnection};

use super::bed::Bed;
use super::byhand::{sessions, sqlite_row, turn_of};
use super::{TABLE, contenders, effort_of};
use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::scratch::Scratch;

pub(crate) fn all(effort: Effort) -> Result<()> {
    for synchronous in ["off", "full"] {
        let scratch = Scratch::new()?;
        let file = scratch.path().join("locks.db").display().to_string();
        let runtime = pair::runtime()?;
        let url = format!("sqlite:{file}?synchronous={synchronous}");
        let locks = runtime.block_on(leasehold::connect(&url))?;
        let mut byhand = runtime.block_on(SqliteConnection::connect(&file))?;
        let set = format!("PRAGMA synchronous = {synchronous}; {TABLE}");
        runtime.block_on(sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&mut byhand))?;
        let byhand = tokio::sync::Mutex::new(byhand);
        let row = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            let insert = sqlx::query("INSERT INTO byhand VALUES (?, ?, ?)");
            insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
            let delete = sqlx::query("DELETE FROM byhand WHERE name = ? AND owner = ?");
            delete.bind("pair").bind("me").execute(&mut *c).await?;
            Ok(())
        });
        let mut subjects = vec![Subject::new("insert + delete of a row", row)];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("sqlite:, synchronous={synchronous}, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 1);
    }
    for (synchronous, n) in sqlite_crowds(effort) {
        let effort = effort_of(n, effort);
        let scratch = Scratch::new()?;
        let file = scratch.path().join("locks.db").display().to_string();
        let url =
            format!("sqlite:{file}?synchronous={}", format!("{synchronous:?}").to_lowercase());
        let bed = Bed::new(&url, n, || None)?;
        let runtime = &bed.runtime;
        let options = SqliteConnectOptions::new()
            .filename(scratch.path().join("byhand.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .busy_timeout(Duration::from_secs(60));
        let mut first = runtime.block_on(options.connect())?;
        runtime.block_on(sqlx::raw_sql(TABLE).execute(&mut first))?;
        let connect = || async { Ok(options.connect().await?) };
        let sessions = runtime.block_on(sessions(n, connect))?;
        let mut subjects = Vec::new();
        if !sessions.is_empty() {
            let row = || {
                let turns = sessions.iter().map(|c| turn_of(c.clone(), sqlite_row));
                runtime.block_on(contention::each(effort, turns.collect()))
            };
            subjects.push(Subject::new("a row, asked every 10 ms", row));
        }
        let raws = subjects.len();
        subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
        let how = match synchronous {
            SqliteSynchronous::Off => "synchronous=off, ",
            _ => "",
        };
        let title = format!("sqlite:, {how}{n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, raws);
    }
    Ok(())
}

/// Returns the cases without durable writes and with them.
fn sqlite_crowds(effort: Effort) -> Vec<(SqliteSynchronous, usize)> {
    let few = [8, 32].map(|n| (SqliteSynchronous::Off, n));
    few.into_iter().chain(contenders(effort).map(|n| (SqliteSynchronous::Full, n))).collect()
}
