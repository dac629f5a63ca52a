//! Determines the guarantees of the database, and checks the version of its tables.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::background::SWEPT;
use super::fault::{self, Failure};
use super::limits::TRIES;
#[cfg(feature = "postgres")]
use super::pool::Pool;
#[cfg(feature = "postgres")]
use super::postgres;
use super::rows::Cells;
use super::shared::Shared;
#[cfg(feature = "sqlite")]
use super::sqlite;
#[cfg(feature = "sqlite")]
use super::url::Synchronous;
use super::url::{Dialect, SqlUrl, is_file};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::version;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::wire::Statement;
use super::wire::{Arg, Row, Wire};
use super::{call, schema};
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Durability, Guarantees, Liveness, Stall, Survival, Wakeup,
};
use leasehold_core::{Error, ErrorKind, Result};

/// Returns the error for a replica.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn read_only_server() -> Error {
    Error::new(ErrorKind::Denied, "this server is read-only (a replica)")
        .with_hint("connect to the primary")
}

/// The idle time after which the server ends a transaction (`postgres.rs`, `mysql.rs`).
#[cfg(any(feature = "postgres", feature = "mysql"))]
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(1);

/// The maximum time that a connecting client waits for room at the server.
const FOR_ROOM: Duration = Duration::from_secs(8);
/// Pause between attempts to connect to a server without room.
const ROOM_AGAIN: Duration = Duration::from_millis(200);

/// Opens a first connection, which finds the location of the tables.
#[cfg(feature = "postgres")]
pub(super) async fn first(pool: &Pool) -> Result<()> {
    let began = Instant::now();
    loop {
        match pool.take().await {
            Ok(pooled) => {
                pool.put(pooled);
                return Ok(());
            }
            Err(error) if fault::has_no_room(&error) && began.elapsed() < FOR_ROOM => {
                tokio::time::sleep(ROOM_AGAIN).await;
            }
            Err(error) => return Err(Failure::from(error).into_error()),
        }
    }
}

impl Shared {
    /// Finds or creates the tables, and determines the guarantees. Also returns whether a sweep is
    /// overdue.
    pub(super) async fn prepare(&self, url: &SqlUrl) -> Result<(Guarantees, bool)> {
        let (mut tries, began) = (0, Instant::now());
        loop {
            tries += 1;
            match self.prepare_once(url).await {
                Ok(prepared) => return Ok(prepared),
                // Other clients create the tables at the same time.
                Err(Failure::Conflict(_)) if tries < TRIES => call::pause(tries).await,
                // Other clients close the connections that they do not need any more.
                Err(Failure::Broken(error))
                    if fault::has_no_room(&error) && began.elapsed() < FOR_ROOM =>
                {
                    tokio::time::sleep(ROOM_AGAIN).await;
                }
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    async fn prepare_once(&self, url: &SqlUrl) -> Result<(Guarantees, bool), Failure> {
        let mut pooled = self.pool.take().await?;
        let wire = &mut *pooled.wire;
        let guarantees = self.promises(wire, url).await?;
        let version = match wire.rows(&self.sql.version, Vec::new()).await {
            Ok(rows) => rows.into_iter().next(),
            // The tables are created below. If the error is another one, the table exists.
            Err(error) if fault::is_missing_table(&error) => None,
            Err(error) => return Err(error.into()),
        };
        match version.map(|row| Cells::new(row).count::<i64>()).transpose()? {
            Some(schema::VERSION) => {}
            Some(other) => {
                let what = format!(
                    "the tables have version {other}, but this leasehold needs version {}",
                    schema::VERSION,
                );
                let error = Error::new(ErrorKind::Config, what);
                return Err(error.with_hint(schema::advice(other)).into());
            }
            None if !url.create => return Err(schema::missing(url).into()),
            None => {
                for statement in schema::statements(url) {
                    wire.raw(&statement).await?;
                }
                self.begin_to_sweep(wire).await?;
            }
        }
        let swept = wire.rows(&self.sql.probe, Vec::new()).await?;
        self.pool.put(pooled);
        Ok((guarantees, is_due(swept)?))
    }

    /// Records a sweep, because nothing is old in tables that were just created.
    async fn begin_to_sweep(&self, wire: &mut dyn Wire) -> Result<(), Failure> {
        let nobody = vec![Arg::Name(String::new()), 0.into(), 1.into()];
        match wire.run(&self.sql.create, nobody).await {
            // Another client has created the row.
            Ok(_) | Err(sqlx::Error::Database(_)) => {}
            Err(error) => return Err(error.into()),
        }
        wire.run(&self.sql.sweeper, vec![0.into()]).await?;
        Ok(())
    }

    /// Returns the guarantees of the database in its current configuration.
    async fn promises(&self, wire: &mut dyn Wire, url: &SqlUrl) -> Result<Guarantees, Failure> {
        let (durability, stall) = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => {
                let durability = match url.synchronous {
                    Synchronous::Full => Durability::Disk,
                    Synchronous::Normal | Synchronous::Off => Durability::Machine,
                };
                (durability, Stall::Everybody)
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => of_postgres(wire, url.pooler).await?,
            #[cfg(feature = "mysql")]
            Dialect::MySql => of_mysql(wire).await?,
        };
        let mut notes = vec![
            Cow::Borrowed(
                "Leases expire by the database's wall clock. If it is set forward, they expire early; \
                 if it is set back, they last longer. Tokens increase either way.",
            ),
            Cow::Borrowed(
                "A waiter's heartbeat reads its lock's whole queue, so it takes longer the more claims \
                 the queue has. Acquiring and releasing read only the front of the queue.",
            ),
        ];
        if durability < Durability::Disk {
            notes.push(Cow::Borrowed(
                "Commits are acknowledged before they are on disk, so a crash can free held locks.",
            ));
        }
        let is_file = is_file(url.dialect);
        #[cfg(feature = "sqlite")]
        if is_file && let Some(table) = sqlite::shared_with(wire, &sqlite::foreign(url)).await? {
            leasehold_core::telemetry::shared_file(&self.url, &table);
            notes.push(Cow::Owned(format!(
                "The database file contains other tables ({table}). While a transaction writes to them, no \
                 lease can be renewed. Give leasehold a file of its own."
            )));
        }
        if is_file {
            notes.push(Cow::Borrowed(
                "A process that is paused during a write blocks all other clients until it resumes, and \
                 waiters can lose their places. The file must be on a local disk.",
            ));
        } else {
            notes.push(Cow::Borrowed(
                "A fail-over to a replica that lags loses the latest grants. Tokens keep increasing unless \
                 the replica's clock is behind the last token.",
            ));
        }
        let mut promised = Guarantees::least();
        promised.kinds = Cow::Borrowed(ALL_KINDS);
        promised.fifo = true;
        promised.wakeup = if self.pushes { Wakeup::Push } else { Wakeup::Poll };
        // Servers could notify of evictions too, but each holding client would need a session. See
        // `docs/stores/sql.md`.
        promised.evicted = if is_file { promised.wakeup } else { Wakeup::Poll };
        promised.liveness = Liveness::Lease;
        promised.clock = ClockModel::Wall;
        promised.lock_delay = true;
        promised.min_hold = true;
        promised.downgrades = true;
        promised.upgrades = true;
        promised.grant = durability;
        promised.token = durability;
        promised.on_pause = Survival::Fenced;
        promised.on_clock_step = Survival::Fenced;
        promised.on_store_crash = match durability {
            Durability::Process => Survival::Fenced,
            _ => Survival::Exclusive,
        };
        promised.on_failover = if is_file { Survival::NotApplicable } else { Survival::Fenced };
        promised.on_partition = if is_file { Survival::NotApplicable } else { Survival::Fenced };
        promised.stall = stall;
        promised.recovery = Duration::from_secs(2);
        promised.recovery_leases = 1;
        promised.notes = Cow::Owned(notes);
        Ok(promised)
    }
}

/// Returns whether a sweep is overdue, by the clock and the row that records the last sweep.
fn is_due(row: Vec<Row>) -> Result<bool, Failure> {
    let Some(row) = row.into_iter().next() else { return Ok(true) };
    let mut cells = Cells::new(row);
    let (now, swept) = (cells.count::<i64>()?, cells.lock()?.last_token);
    Ok(i64::try_from(swept).unwrap_or(i64::MAX).saturating_add(SWEPT) < now)
}

/// Reads one row of settings, as text.
#[cfg(any(feature = "postgres", feature = "mysql"))]
async fn ask<const N: usize>(
    wire: &mut dyn Wire,
    sql: &str,
    shape: &'static str,
) -> Result<[String; N], Failure> {
    let statement = Statement { sql: sql.to_owned().into(), shape };
    let rows = wire.rows(&statement, Vec::new()).await?;
    let mut cells = Cells::new(rows.into_iter().next().unwrap_or_default());
    let values = shape.bytes().map(|_| cells.text()).collect::<Result<Vec<_>, _>>()?;
    values.try_into().map_err(|_| {
        Error::new(ErrorKind::Corrupt, "the database did not report its settings").into()
    })
}

#[cfg(feature = "postgres")]
async fn of_postgres(wire: &mut dyn Wire, pooler: bool) -> Result<(Durability, Stall), Failure> {
    let (limit, set) = postgres::LIMIT_SHOWN;
    let asked = format!(
        "SELECT current_setting('transaction_read_only'), current_setting('fsync'), \
         current_setting('synchronous_commit'), current_setting('server_encoding'), \
         current_setting('{limit}'), current_setting('server_version_num'), \
         current_setting('server_version')"
    );
    let [read_only, fsync, commit, encoding, found_limit, number, version] =
        ask(wire, &asked, "ttttttt").await?;
    if let Some(least) = version::postgres_too_old(&number) {
        return Err(version::refused(least, &version).into());
    }
    if !pooler && found_limit != set {
        return Err(fault::undeclared_pooler().into());
    }
    // A standby, or a database or user whose transactions are read-only.
    if read_only == "on" {
        return Err(read_only_server().into());
    }
    if encoding != "UTF8" {
        let what = format!("the database's encoding {encoding} cannot store every lock name");
        let hint = "use a database with the encoding UTF8: `createdb --encoding=UTF8 \
                    --template=template0 NAME`";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint).into());
    }
    let durability = match (fsync.as_str(), commit.as_str()) {
        ("on", "off") => Durability::Process,
        ("on", _) => Durability::Disk,
        (_, "off") => Durability::Process,
        _ => Durability::Machine,
    };
    Ok((durability, Stall::SameLock(IDLE_IN_TRANSACTION)))
}

#[cfg(feature = "mysql")]
async fn of_mysql(wire: &mut dyn Wire) -> Result<(Durability, Stall), Failure> {
    let asked = "SELECT CAST(@@innodb_flush_log_at_trx_commit AS CHAR), \
                 CAST(@@global.read_only AS CHAR), VERSION()";
    let [flush, read_only, version] = ask(wire, asked, "ttt").await?;
    if let Some(least) = version::mysql_too_old(&version) {
        return Err(version::refused(least, &version).into());
    }
    // A user that may write nevertheless is refused too, because the primary does not receive these
    // writes.
    if !matches!(&*read_only.to_ascii_uppercase(), "0" | "OFF") {
        return Err(read_only_server().into());
    }
    let durability = match flush.as_str() {
        // 3 is a MariaDB value that means the same as 1.
        "1" | "3" => Durability::Disk,
        "2" => Durability::Machine,
        _ => Durability::Process,
    };
    let idle = match version::is_mariadb(&version) {
        true => IDLE_IN_TRANSACTION,
        false => 2 * IDLE_IN_TRANSACTION,
    };
    Ok((durability, Stall::SameLock(idle)))
}
