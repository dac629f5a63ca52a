//! What is wrong with a database's set-up: see [`crate::doctor`].

use std::collections::BTreeMap;

#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::fault::Failure;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::rows::Cells;
#[cfg(feature = "sqlite")]
use super::url::Synchronous;
use super::url::{Dialect, SqlUrl};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::wire::{Statement, Wire};
use super::{LIMIT, Shared, no_answer};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::clock::wall_micros;
use crate::doctor::{self, Finding};
use crate::error::Result;

/// Names and values, as the server tells them.
type Settings = BTreeMap<String, String>;

impl Shared {
    /// Everything that is found wrong.
    pub(super) async fn diagnose(&self, url: &SqlUrl) -> Result<Vec<Finding>> {
        let looked = tokio::time::timeout(LIMIT, self.look(url)).await;
        looked.unwrap_or_else(|_| Err(no_answer()))
    }

    async fn look(&self, url: &SqlUrl) -> Result<Vec<Finding>> {
        match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => sqlite(url),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => self.look_at_postgres(url).await.map_err(Failure::into_error),
            #[cfg(feature = "mysql")]
            Dialect::MySql => self.look_at_mysql(url).await.map_err(Failure::into_error),
        }
    }

    #[cfg(feature = "postgres")]
    async fn look_at_postgres(&self, url: &SqlUrl) -> Result<Vec<Finding>, Failure> {
        // Of two pools: one may have room for one connection only.
        let (mut one, mut other) = (self.pool.take().await?, self.beats.take().await?);
        let mut found = Vec::new();
        let lent = are_lent(&mut *one.wire, &mut *other.wire).await?;
        found.extend(pooler(url.pooler, lent));
        let settings = pairs(
            &mut *one.wire,
            "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', \
             'synchronous_commit', 'default_transaction_isolation', 'idle_session_timeout', \
             'max_connections', 'synchronous_standby_names') UNION ALL \
             SELECT 'connections', count(*)::text FROM pg_stat_activity UNION ALL \
             SELECT 'replicas', count(*)::text FROM pg_stat_replication",
        );
        found.extend(judge_postgres(&settings.await?, url.pool));
        let now = "SELECT (extract(epoch from clock_timestamp()) * 1000000)::bigint::text, ''";
        found.extend(clocks(&mut *one.wire, now).await?);
        self.pool.put(one);
        self.beats.put(other);
        Ok(found)
    }

    #[cfg(feature = "mysql")]
    async fn look_at_mysql(&self, url: &SqlUrl) -> Result<Vec<Finding>, Failure> {
        let mut pooled = self.pool.take().await?;
        let wire = &mut *pooled.wire;
        let mut settings = pairs(
            wire,
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('innodb_flush_log_at_trx_commit', \
             'innodb_doublewrite', 'sync_binlog', 'log_bin', 'binlog_format', 'wait_timeout', \
             'read_only', 'super_read_only', 'idle_transaction_timeout', 'version', \
             'max_connections', 'transaction_isolation', 'tx_isolation')",
        )
        .await?;
        settings.extend(pairs(wire, "SHOW GLOBAL STATUS LIKE 'Threads_connected'").await?);
        let mut found = judge_mysql(&settings, url.pool);
        let tables = format!(
            "SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = \
             DATABASE() AND TABLE_NAME IN ('{0}locks', '{0}claims')",
            url.prefix
        );
        found.extend(engines(&pairs(wire, &tables).await?));
        let now = "SELECT CAST(CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS CHAR), ''";
        found.extend(clocks(wire, now).await?);
        self.pool.put(pooled);
        Ok(found)
    }
}

/// The rows of two columns of text.
#[cfg(any(feature = "postgres", feature = "mysql"))]
async fn pairs(wire: &mut dyn Wire, sql: &str) -> Result<Settings, Failure> {
    let statement = Statement { sql: sql.into(), shape: "tt" };
    let mut pairs = Settings::new();
    for row in wire.rows(&statement, Vec::new()).await? {
        let mut cells = Cells::new(row);
        pairs.insert(cells.text()?, cells.text()?);
    }
    Ok(pairs)
}

/// Whether a pooler lends these two the server's sessions for a transaction each. A session of its
/// own has a process of its own at the server; theirs is the same for both, or another from one turn
/// to the next. Others who are busy may hide that for a turn, so there are some; and while one is in
/// a transaction, the other cannot have its session.
#[cfg(feature = "postgres")]
async fn are_lent(one: &mut dyn Wire, other: &mut dyn Wire) -> Result<bool, Failure> {
    let pid = "SELECT pg_backend_pid()::text, ''";
    let (mut ones, mut others) = (Settings::new(), Settings::new());
    for _ in 0..5 {
        ones.extend(pairs(one, pid).await?);
        others.extend(pairs(other, pid).await?);
        other.raw("BEGIN").await?;
        ones.extend(pairs(one, pid).await?);
        other.raw("COMMIT").await?;
        let both = ones.keys().any(|pid| others.contains_key(pid));
        if both || ones.len() > 1 || others.len() > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
async fn clocks(wire: &mut dyn Wire, sql: &str) -> Result<Vec<Finding>, Failure> {
    let before = wall_micros();
    let answer = pairs(wire, sql).await?;
    let after = wall_micros();
    let theirs = answer.keys().next().and_then(|text| text.parse().ok()).unwrap_or(0);
    Ok(doctor::clocks(before, theirs, after))
}

/// The number of this name, if it is there and is one.
fn number(settings: &Settings, name: &str) -> Option<u64> {
    settings.get(name)?.parse().ok()
}

/// Few connections are left.
fn connections(settings: &Settings, used: &str, pool: usize) -> Option<Finding> {
    let left = number(settings, "max_connections")?.saturating_sub(number(settings, used)?);
    // One client more: its calls, its renewals, its listener.
    let wanted = u64::try_from(pool).unwrap_or(u64::MAX).saturating_add(3);
    (left < wanted).then(|| {
        Finding::weak(
            "connections",
            format!(
                "the server has {left} connections left, and one more client may want {wanted}"
            ),
            "a renewal that gets no connection is a lease that runs out",
            "raise max_connections, put a pooler in front, or write a smaller pool=N into the URL",
        )
    })
}

#[cfg(feature = "postgres")]
fn pooler(said: bool, lent: bool) -> Option<Finding> {
    match (said, lent) {
        (false, true) => Some(Finding::broken(
            "pooler",
            "a pooler in transaction mode is in front of this server, and the URL does not say so",
            "waiters listen on a connection that the pooler lends to others, so they are not woken, \
             and prepared statements vanish under us",
            "write pooler=transaction into the URL, or connect to the server itself",
        )),
        (true, false) => Some(Finding::note(
            "pooler",
            "the URL says that a pooler is in front, and none was noticed",
            "waiters ask every few milliseconds; without pooler=transaction they would be told",
        )),
        _ => None,
    }
}

#[cfg(feature = "postgres")]
fn judge_postgres(settings: &Settings, pool: usize) -> Vec<Finding> {
    let is = |name: &str, value: &str| settings.get(name).is_some_and(|v| v == value);
    let mut found = Vec::new();
    for setting in ["fsync", "full_page_writes"] {
        if is(setting, "off") {
            found.push(Finding::broken(
                setting,
                format!("{setting} is off"),
                "a crash of the machine can lose or destroy what was granted, and two hold at once",
                format!("set {setting} = on, and restart the server"),
            ));
        }
    }
    if is("synchronous_commit", "off") {
        found.push(Finding::broken(
            "synchronous_commit",
            "synchronous_commit is off",
            "a crash of the server forgets the grants of the last moments, and gives those locks to \
             others while their holders live on; tokens still rise",
            "set synchronous_commit = on, for the server or for the user that locks",
        ));
    }
    let replicas = number(settings, "replicas").unwrap_or(0);
    if replicas > 0 && is("synchronous_standby_names", "") {
        found.push(Finding::weak(
            "asynchronous-replica",
            format!("{replicas} replicas follow, and none of them is waited for"),
            "a fail-over loses the grants that the replica had not got yet, and two hold at once; \
             tokens still rise",
            "name a synchronous standby, or let the resource check tokens",
        ));
    }
    if !is("default_transaction_isolation", "read committed") {
        found.push(Finding::weak(
            "isolation",
            format!(
                "default_transaction_isolation is {}",
                settings.get("default_transaction_isolation").map_or("unknown", String::as_str)
            ),
            "statements that meet on one lock undo each other and are tried again, which costs time",
            "set it to 'read committed' for the user that locks",
        ));
    }
    if number(settings, "idle_session_timeout").is_some_and(|ms| ms > 0) {
        found.push(Finding::weak(
            "idle_session_timeout",
            format!("idle sessions are ended after {} ms", settings["idle_session_timeout"]),
            "the connection that listens for grants is idle most of the time; until it is opened \
             again, waiters learn of their turn by asking only",
            "set idle_session_timeout = 0 for the user that locks",
        ));
    }
    found.extend(connections(settings, "connections", pool));
    found
}

#[cfg(feature = "mysql")]
fn judge_mysql(settings: &Settings, pool: usize) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let on = |name: &str| matches!(value(name).to_ascii_uppercase().as_str(), "ON" | "1");
    let mut found = Vec::new();
    // 3 is MariaDB's way to write 1.
    if !matches!(value("innodb_flush_log_at_trx_commit"), "1" | "3") {
        found.push(Finding::broken(
            "innodb_flush_log_at_trx_commit",
            format!(
                "innodb_flush_log_at_trx_commit is {}",
                value("innodb_flush_log_at_trx_commit")
            ),
            "a crash forgets the grants of the last second, and gives those locks to others while \
             their holders live on; tokens still rise",
            "set innodb_flush_log_at_trx_commit = 1",
        ));
    }
    if value("innodb_doublewrite").eq_ignore_ascii_case("off") {
        found.push(Finding::broken(
            "innodb_doublewrite",
            "innodb_doublewrite is off",
            "a power cut can leave a page half-written, and destroy what was granted",
            "set innodb_doublewrite = ON, unless the file system writes whole pages",
        ));
    }
    if on("read_only") || on("super_read_only") {
        found.push(Finding::broken(
            "read_only",
            "the server is read only",
            "nothing can be locked on it",
            "connect to the primary",
        ));
    }
    if on("log_bin") {
        if value("binlog_format").eq_ignore_ascii_case("statement") {
            found.push(Finding::broken(
                "binlog_format",
                "binlog_format is STATEMENT",
                "InnoDB refuses to write at the isolation level that locks need",
                "set binlog_format = ROW (or MIXED)",
            ));
        }
        if value("sync_binlog") != "1" {
            found.push(Finding::weak(
                "sync_binlog",
                format!("sync_binlog is {}", value("sync_binlog")),
                "after a crash, replicas may lack grants that the primary has, or the other way \
                 round; a fail-over then lets two hold at once. Tokens still rise",
                "set sync_binlog = 1",
            ));
        }
    }
    if number(settings, "wait_timeout").is_some_and(|seconds| seconds < 60) {
        found.push(Finding::weak(
            "wait_timeout",
            format!("idle connections are closed after {} s", value("wait_timeout")),
            "no lock is tied to a connection, but each call after a pause first finds its connection \
             closed and opens another, renewals included",
            "set wait_timeout to 60 or more",
        ));
    }
    if settings.contains_key("version") && !settings.contains_key("idle_transaction_timeout") {
        found.push(Finding::weak(
            "stopped-client",
            "this server cannot end a transaction whose client was stopped",
            "a client that is stopped in the middle of a call keeps that lock's row until it goes on, \
             and nobody gets in or out meanwhile",
            "MariaDB can (idle_transaction_timeout); with MySQL, keep clients from being stopped",
        ));
    }
    let isolation = [value("transaction_isolation"), value("tx_isolation")].concat();
    if isolation.contains("REPEATABLE-READ") {
        found.push(Finding::note(
            "isolation",
            "transactions see the database as of their first plain SELECT (REPEATABLE READ)",
            "locks of this store do not mind; in transactions of yours, call lock_in or the fence's \
             check before anything else",
        ));
    }
    found.extend(connections(settings, "Threads_connected", pool));
    found
}

#[cfg(feature = "mysql")]
fn engines(tables: &Settings) -> Vec<Finding> {
    let others = tables.iter().filter(|(_, engine)| !engine.eq_ignore_ascii_case("innodb"));
    let finding = |(table, engine): (&String, &String)| {
        Finding::broken(
            "engine",
            format!("the table {table} is kept by {engine}"),
            "it has no transactions, so two may hold at once, and a crash may destroy it",
            format!("ALTER TABLE {table} ENGINE = InnoDB"),
        )
    };
    others.map(finding).collect()
}

#[cfg(feature = "sqlite")]
fn sqlite(url: &SqlUrl) -> Result<Vec<Finding>> {
    let path: &std::path::Path = url.path()?.as_ref();
    let mut found: Vec<Finding> =
        doctor::own_clock(crate::clock::wall_micros()).into_iter().collect();
    found.extend(crate::store::machine::file_system(path, "the database file"));
    match url.synchronous {
        Synchronous::Full => {}
        Synchronous::Normal => found.push(Finding::weak(
            "synchronous",
            "the URL says synchronous=normal",
            "a power cut may forget the grants of the last moments (a crash of programs does not); \
             tokens still rise",
            "leave synchronous out of the URL: full is the default",
        )),
        Synchronous::Off => found.push(Finding::broken(
            "synchronous",
            "the URL says synchronous=off",
            "a power cut may destroy the database file, and with it everything that was granted",
            "leave synchronous out of the URL: full is the default",
        )),
    }
    found.push(Finding::note(
        "one-writer",
        "SQLite lets one process write at a time",
        "a process that is stopped in the middle of a write stops all others until it goes on",
    ));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Severity;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    fn ids(found: &[Finding]) -> Vec<&str> {
        found.iter().filter(|f| f.severity > Severity::Note).map(|f| f.id).collect()
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn servers_that_no_test_can_start_are_judged_as_well() {
        let mysql = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("version", "8.0.36"),
            ("wait_timeout", "28800"),
            ("transaction_isolation", "READ-COMMITTED"),
        ];
        assert_eq!(ids(&judge_mysql(&settings(&mysql), 4)), ["stopped-client"]);
        let replica = [
            ("innodb_flush_log_at_trx_commit", "3"),
            ("version", "10.3.39-MariaDB"),
            ("idle_transaction_timeout", "0"),
            ("super_read_only", "1"),
        ];
        assert_eq!(ids(&judge_mysql(&settings(&replica), 4)), ["read_only"]);
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn replicas_that_nobody_waits_for_are_a_weakness() {
        let read_committed = ("default_transaction_isolation", "read committed");
        let lagging = [("replicas", "2"), ("synchronous_standby_names", ""), read_committed];
        assert_eq!(ids(&judge_postgres(&settings(&lagging), 4)), ["asynchronous-replica"]);
        let waited = [("replicas", "2"), ("synchronous_standby_names", "*"), read_committed];
        assert!(judge_postgres(&settings(&waited), 4).is_empty());
    }
}
