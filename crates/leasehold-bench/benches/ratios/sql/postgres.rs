//! PostgreSQL, compared with a row and with its advisory lock. It is also measured while other
//! clients listen, for a minute, and with latency.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use testbed::{Postgres, Setup};

use super::bed::{Bed, Counter};
use super::byhand::{pg_pair, pg_row, pg_turn, sessions, turn_of};
use super::{POOL, TABLE, contenders, effort_of, many};
use crate::contention;
use crate::line::Line;
use crate::measure::{Effort, Result, Subject, alternate, digits, duration, rate, table};
use crate::pair::{self, time_pairs};
use crate::spread;

const FAR: [Duration; 2] = [Duration::from_millis(1), Duration::from_micros(2_500)];
const LISTENERS: usize = 100;

pub(crate) fn all(effort: Effort) -> Result<()> {
    for (setup, disk) in [(counting().fast(), "without disk"), (counting(), "on disk")] {
        pairs(effort, &Postgres::with(setup), disk)?;
    }
    let server = Postgres::with(counting());
    let url = server.database();
    let database = url.rsplit('/').next().unwrap_or_default();
    server.admin(database, "CREATE EXTENSION pg_stat_statements");
    let counter = || Some(Counter::Postgres(server.url("postgres", "", database)));
    with_table(&url)?;
    for n in contenders(effort) {
        contended(effort_of(n, effort), &format!("postgres:, {n} contenders"), &url, n, counter)?;
    }
    while_others_listen(effort, &url)?;
    for_a_minute(effort, &url)?;
    for away in FAR {
        let line = Line::to(server.port(), away)?;
        let title = format!("postgres:, 8 contenders {away:?} away");
        contended(effort, &title, &line.before(server.port(), &url), 8, || None)?;
    }
    Ok(())
}

/// Returns the setup of a server that counts statements.
fn counting() -> Setup {
    let setup = Setup::new().arg("-c").arg("shared_preload_libraries=pg_stat_statements");
    let setup = setup.arg("-c").arg("pg_stat_statements.track_utility=off");
    // This allows for a hundred listeners.
    setup.arg("-c").arg("max_connections=300")
}

fn with_table(url: &str) -> Result<()> {
    pair::runtime()?.block_on(async {
        let mut c = PgConnection::connect(url).await?;
        sqlx::raw_sql(TABLE).execute(&mut c).await?;
        Ok(())
    })
}

fn pairs(effort: Effort, server: &Postgres, disk: &str) -> Result<()> {
    let url = server.database();
    with_table(&url)?;
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(&url))?;
    let byhand = runtime.block_on(PgConnection::connect(&url))?;
    let byhand = tokio::sync::Mutex::new(byhand);
    let row = time_pairs(&runtime, effort, async || {
        let mut c = byhand.lock().await;
        let insert = sqlx::query("INSERT INTO byhand VALUES ($1, $2, $3)");
        insert.bind("pair").bind("me").bind(1_i64).execute(&mut *c).await?;
        let delete = sqlx::query("DELETE FROM byhand WHERE name = $1 AND owner = $2");
        delete.bind("pair").bind("me").execute(&mut *c).await?;
        Ok(())
    });
    let session = time_pairs(&runtime, effort, async || {
        let mut c = byhand.lock().await;
        sqlx::query("SELECT pg_advisory_lock($1)").bind(1_i64).execute(&mut *c).await?;
        sqlx::query("SELECT pg_advisory_unlock($1)").bind(1_i64).execute(&mut *c).await?;
        Ok(())
    });
    let mut subjects = vec![
        Subject::new("insert + delete of a row", row),
        Subject::new("pg_advisory_lock + unlock", session),
    ];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    let title = format!("postgres:, {disk}, uncontended pair");
    pair::show(&title, &alternate(effort, subjects)?, 2);
    let title = format!("postgres:, {disk}");
    many(effort, &title, &url, |runtime| {
        let pool = runtime.block_on(PgPoolOptions::new().max_connections(POOL).connect(&url))?;
        Ok(move |i| spread::task((pool.clone(), format!("raw {i}")), pg_pair))
    })
}

/// Measures `n` contenders on eight clients.
fn contended(
    effort: Effort,
    title: &str,
    url: &str,
    n: usize,
    counter: impl Fn() -> Option<Counter>,
) -> Result<()> {
    let bed = Bed::new(url, n, counter)?;
    let runtime = &bed.runtime;
    let connect = || async { Ok(PgConnection::connect(url).await?) };
    let sessions = runtime.block_on(sessions(n, connect))?;
    let mut subjects = Vec::new();
    if !sessions.is_empty() {
        let bare = || {
            let turns = sessions.iter().map(|c| turn_of(c.clone(), pg_turn));
            runtime.block_on(contention::each(effort, turns.collect()))
        };
        subjects.push(Subject::new("pg_advisory_lock", bare));
        let row = || {
            let turns = sessions.iter().map(|c| turn_of(c.clone(), pg_row));
            runtime.block_on(contention::each(effort, turns.collect()))
        };
        subjects.push(Subject::new("a row, asked every 10 ms", row));
    }
    let raws = subjects.len();
    subjects.push(Subject::new("leasehold", || bed.contend(n, effort)));
    contention::show(title, &alternate(effort, subjects)?, raws);
    Ok(())
}

/// Measures with other listeners. The server wakes every client that listens to anything, for each
/// message.
fn while_others_listen(effort: Effort, url: &str) -> Result<()> {
    let bed = Bed::new(url, 8, || None)?;
    let runtime = &bed.runtime;
    let alone = || bed.contend(8, effort);
    let beside = || {
        // The listeners need the runtime's context in order to end.
        let _within = runtime.enter();
        let _others = runtime.block_on(listeners(url))?;
        bed.contend(8, effort)
    };
    let name = format!("leasehold, while {LISTENERS} others listen");
    let subjects = vec![Subject::new("leasehold", alone), Subject::new(&name, beside)];
    contention::show("postgres:, 8 contenders and others", &alternate(effort, subjects)?, 1);
    Ok(())
}

async fn listeners(url: &str) -> Result<Vec<PgListener>> {
    let mut all = Vec::new();
    for _ in 0..LISTENERS {
        let mut listener = PgListener::connect(url).await?;
        listener.listen("something_else").await?;
        all.push(listener);
    }
    Ok(all)
}

/// Checks that the leftovers of each turn do not slow later turns, by comparing the first and the
/// last second of a minute.
fn for_a_minute(effort: Effort, url: &str) -> Result<()> {
    let bed = Bed::new(url, 8, || None)?;
    let minute = Effort { rounds: 1, time: effort.time * 120, ..effort };
    let outcome = bed.contend(8, minute)?;
    let row = vec![
        format!("{:?}", minute.time),
        rate(outcome.turns_per_second),
        duration(outcome.handover_p50),
        digits(outcome.kept_up),
    ];
    let head = ["", "turns/s", "hand-over p50", "turns of the last sixtieth beside the first"];
    table("postgres:, 8 contenders for a minute", &head, vec![row]);
    Ok(())
}
