//! MariaDB and MySQL, compared with a row and with their GET_LOCK.

use std::ops::Deref;

use sqlx::mysql::MySqlPoolOptions;
use sqlx::{Connection, MySqlConnection};
use testbed::{MariaDb, MySql, Setup};

use super::bed::{Bed, Counter};
use super::byhand::{mysql_pair, mysql_row, mysql_turn, sessions, turn_of};
use super::{POOL, TABLE, contenders, effort_of, many};
use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::spread;

pub(crate) fn mariadb(effort: Effort) -> Result<()> {
    mysqls(effort, "MariaDB", "information_schema", |setup| Box::new(MariaDb::with(setup)))
}

pub(crate) fn mysql(effort: Effort) -> Result<()> {
    mysqls(effort, "MySQL", "performance_schema", MySql::with)
}

/// Measures one of the two, which has its counters in this schema.
fn mysqls<S: Deref<Target = MariaDb>>(
    effort: Effort,
    name: &str,
    counters: &'static str,
    start: impl Fn(Setup) -> S,
) -> Result<()> {
    for (setup, disk) in [(Setup::new().fast(), "without disk"), (Setup::new(), "on disk")] {
        let server = start(setup);
        let url = server.database();
        let runtime = pair::runtime()?;
        let locks = runtime.block_on(leasehold::connect(&url))?;
        let byhand = runtime.block_on(MySqlConnection::connect(&url))?;
        let byhand = tokio::sync::Mutex::new(byhand);
        runtime
            .block_on(async { sqlx::raw_sql(TABLE).execute(&mut *byhand.lock().await).await })?;
        let row = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            let insert = sqlx::query("INSERT INTO byhand VALUES (?, ?, ?)");
            insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
            let delete = sqlx::query("DELETE FROM byhand WHERE name = ? AND owner = ?");
            delete.bind("pair").bind("me").execute(&mut *c).await?;
            Ok(())
        });
        let session = time_pairs(&runtime, effort, async || {
            let mut c = byhand.lock().await;
            sqlx::query("SELECT GET_LOCK(?, 10)").bind("pair").execute(&mut *c).await?;
            sqlx::query("SELECT RELEASE_LOCK(?)").bind("pair").execute(&mut *c).await?;
            Ok(())
        });
        let mut subjects = vec![
            Subject::new("insert + delete of a row", row),
            Subject::new("GET_LOCK + RELEASE_LOCK", session),
        ];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("mysql: ({name}), {disk}, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 2);
        let title = format!("mysql: ({name}), {disk}");
        many(effort, &title, &url, |runtime| {
            let pool = MySqlPoolOptions::new().max_connections(POOL).connect(&url);
            let pool = runtime.block_on(pool)?;
            Ok(move |i| spread::task((pool.clone(), format!("raw {i}")), mysql_pair))
        })?;
        if disk != "on disk" {
            continue;
        }
        let admin = server.url("admin", "admin", "mysql");
        for n in contenders(effort) {
            let effort = effort_of(n, effort);
            let bed = Bed::new(&url, n, || Some(Counter::MariaDb(admin.clone(), counters)))?;
            let runtime = &bed.runtime;
            let connect = || async { Ok(MySqlConnection::connect(&url).await?) };
            let sessions = runtime.block_on(sessions(n, connect))?;
            let mut subjects = Vec::new();
            if !sessions.is_empty() {
                let bare = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), mysql_turn));
                    runtime.block_on(contention::each(effort, turns.collect()))
                };
                subjects.push(Subject::new("GET_LOCK", bare));
                let row = || {
                    let turns = sessions.iter().map(|c| turn_of(c.clone(), mysql_row));
                    runtime.block_on(contention::each(effort, turns.collect()))
                };
                subjects.push(Subject::new("a row, asked every 10 ms", row));
            }
            let raws = subjects.len();
            subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
            let title = format!("mysql: ({name}), {n} contenders");
            contention::show(&title, &alternate(effort, subjects)?, raws);
        }
    }
    Ok(())
}
