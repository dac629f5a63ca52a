//! Checks of a database's configuration; see [`leasehold_core::doctor`].

#[cfg(any(feature = "postgres", feature = "mysql"))]
use std::collections::BTreeMap;

use super::fault::{Failure, no_answer};
use super::limits::LIMIT;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::rows::Cells;
use super::shared::Shared;
#[cfg(feature = "sqlite")]
use super::url::Synchronous;
use super::url::{Dialect, SqlUrl};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::wire::{Statement, Wire};
use leasehold_core::doctor::Finding;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use leasehold_core::kit::wall_micros;
use leasehold_core::{Result, doctor};

/// Names and values of settings, as the server returns them.
#[cfg(any(feature = "postgres", feature = "mysql"))]
type Settings = BTreeMap<String, String>;

impl Shared {
    /// Returns all problems that were found.
    pub(super) async fn diagnose(&self, url: &SqlUrl) -> Result<Vec<Finding>> {
        let looked = tokio::time::timeout(LIMIT, self.look(url)).await;
        looked.unwrap_or_else(|_| Err(no_answer()))
    }

    async fn look(&self, url: &SqlUrl) -> Result<Vec<Finding>> {
        match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => self.look_at_sqlite(url).await.map_err(Failure::into_error),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => self.look_at_postgres(url).await.map_err(Failure::into_error),
            #[cfg(feature = "mysql")]
            Dialect::MySql => self.look_at_mysql(url).await.map_err(Failure::into_error),
        }
    }

    #[cfg(feature = "sqlite")]
    async fn look_at_sqlite(&self, url: &SqlUrl) -> Result<Vec<Finding>, Failure> {
        let mut pooled = self.pool.take().await?;
        let foreign = super::sqlite::foreign(url);
        let table = super::sqlite::shared_with(&mut *pooled.wire, &foreign).await?;
        self.pool.put(pooled);
        let mut found = sqlite(url)?;
        found.extend(table.map(|table| {
            Finding::weak(
                "shared-file",
                format!("the database file also contains other tables, such as {table:?}"),
                "a write transaction on them that lasts as long as a lease blocks its renewal, \
                 and the lock is lost; leasehold does not change the journal mode of such a file",
                "use a separate file for leasehold, such as sqlite:/var/lib/app/locks.db",
            )
        }));
        Ok(found)
    }

    #[cfg(feature = "postgres")]
    async fn look_at_postgres(&self, url: &SqlUrl) -> Result<Vec<Finding>, Failure> {
        // Uses one connection of each pool, because one pool may have room for a single connection
        // only.
        let (mut one, mut other) = (self.pool.take().await?, self.renewal_pool.take().await?);
        let mut found = Vec::new();
        let lent = are_lent(&mut *one.wire, &mut *other.wire).await?;
        found.extend(pooler(url.pooler, lent));
        let asked = format!(
            "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', \
             'synchronous_commit', 'idle_session_timeout', \
             'max_connections', 'synchronous_standby_names') UNION ALL \
             SELECT 'connections', count(*)::text FROM pg_stat_activity UNION ALL \
             SELECT 'replicas', count(*)::text FROM pg_stat_replication UNION ALL \
             SELECT 'oldest_snapshot', coalesce(max(extract(epoch from clock_timestamp() - xact_start)), \
             0)::bigint::text FROM pg_stat_activity WHERE backend_xmin IS NOT NULL \
             AND datname = current_database() AND pid <> pg_backend_pid() UNION ALL \
             SELECT 'dead_rows', coalesce(max(n_dead_tup), 0)::text FROM pg_stat_user_tables \
             WHERE relid = to_regclass('{}')",
            url.table("locks")
        );
        found.extend(judge_postgres(&pairs(&mut *one.wire, &asked).await?, url.pool));
        let others = format!(
            "SELECT n.nspname::text, '' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.relname = '{}locks'::name AND c.relkind IN ('r', 'p') AND c.oid <> to_regclass('{}')::oid",
            url.prefix,
            url.table("locks")
        );
        found.extend(other_schemas(url, &pairs(&mut *one.wire, &others).await?));
        let now =
            "SELECT (date_part('epoch', clock_timestamp()) * 1000000::float8)::bigint::text, ''";
        found.extend(clocks(&mut *one.wire, now).await?);
        self.pool.put(one);
        self.renewal_pool.put(other);
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
             'max_connections', 'transaction_isolation', 'tx_isolation', 'wsrep_on', \
             'group_replication_group_name', 'group_replication_single_primary_mode', \
             'rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled')",
        )
        .await?;
        settings.extend(
            pairs(
                wire,
                "SHOW GLOBAL STATUS WHERE Variable_name IN ('Threads_connected', 'Slave_running', \
                 'Slaves_connected')",
            )
            .await?,
        );
        settings.extend(replication(wire).await?);
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

/// Returns the rows of a query with two text columns.
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

/// Returns the server from which this one replicates (`follows`) and the number of its own replicas
/// (`replicas`), as far as this user may read them.
#[cfg(feature = "mysql")]
async fn replication(wire: &mut dyn Wire) -> Result<Settings, Failure> {
    let mut found = Settings::new();
    // The current name of the statement, and its older name.
    for question in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        match pairs(wire, question).await {
            Ok(settings) => {
                found.extend(settings.into_values().map(|host| ("follows".to_owned(), host)));
                break;
            }
            Err(Failure::Final(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    let dumps = "SELECT 'replicas', CAST(COUNT(*) AS CHAR) FROM information_schema.PROCESSLIST \
                 WHERE COMMAND LIKE 'Binlog Dump%'";
    match pairs(wire, dumps).await {
        Ok(settings) => found.extend(settings),
        Err(Failure::Final(_)) => {}
        Err(failure) => return Err(failure),
    }
    Ok(found)
}

/// Returns whether a pooler lends the server's sessions to these two connections, one transaction
/// at a time.
///
/// Without a pooler, each connection has its own server process. With a pooler, both connections
/// have the same process, or a connection changes its process between transactions. Other busy
/// clients may hide this in one round, so several rounds are made. While one connection is in a
/// transaction, the other cannot get its session.
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

/// Returns the setting of this name, if it exists and is a number.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn number(settings: &Settings, name: &str) -> Option<u64> {
    settings.get(name)?.parse().ok()
}

/// Returns a finding if few connections are left.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn connections(settings: &Settings, used: &str, pool: usize) -> Option<Finding> {
    let left = number(settings, "max_connections")?.saturating_sub(number(settings, used)?);
    // One more client needs connections for its calls, for its renewals and for listening.
    let wanted = u64::try_from(pool).unwrap_or(u64::MAX).saturating_add(3);
    (left < wanted).then(|| {
        Finding::weak(
            "connections",
            format!(
                "the server has {left} free connections, but one more client can need {wanted}"
            ),
            "a lease expires if its renewal gets no connection",
            "raise max_connections, use a connection pooler, or lower pool=N in the URL",
        )
    })
}

#[cfg(feature = "postgres")]
fn pooler(is_stated: bool, lent: bool) -> Option<Finding> {
    match (is_stated, lent) {
        (false, true) => Some(Finding::broken(
            "pooler",
            "a pooler in transaction mode is in front of this server, but the URL does not say so",
            "the pooler lends leasehold's connections to other clients: waiters are not notified, \
             and prepared statements disappear",
            "add pooler=transaction to the URL, or connect to the server directly",
        )),
        (true, false) => Some(Finding::note(
            "pooler",
            "the URL has pooler=transaction, but no pooler was detected",
            "waiters poll every few milliseconds; without pooler=transaction they would be \
             notified",
        )),
        _ => None,
    }
}

/// Returns a finding if other schemas of the database contain tables of leasehold.
#[cfg(feature = "postgres")]
fn other_schemas(url: &SqlUrl, found: &Settings) -> Option<Finding> {
    let others: Vec<&str> = found.keys().map(String::as_str).collect();
    let ours = url.schema.as_deref().unwrap_or_default();
    (!others.is_empty()).then(|| {
        Finding::note(
            "other-schemas",
            format!(
                "leasehold's tables are in the schema {ours}, and also in {}",
                others.join(", ")
            ),
            "clients whose URLs lead to different schemas do not exclude each other; if this is \
             not intended, use the same schema= in all URLs",
        )
    })
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
                "a crash of the machine can lose grants or corrupt them, and two clients then \
                 hold the same lock",
                format!("`ALTER SYSTEM SET {setting} = on`, then `SELECT pg_reload_conf()`"),
            ));
        }
    }
    if is("synchronous_commit", "off") {
        found.push(Finding::broken(
            "synchronous_commit",
            "synchronous_commit is off",
            "a crash of the server loses the latest grants: other clients can acquire these locks \
             while their holders still run, but tokens still rise",
            "`ALTER ROLE USER SET synchronous_commit = on`, or the same with ALTER SYSTEM",
        ));
    }
    let replicas = number(settings, "replicas").unwrap_or(0);
    if replicas > 0 && is("synchronous_standby_names", "") {
        found.push(Finding::weak(
            "asynchronous-replica",
            format!(
                "the server does not wait for any of its {replicas} replicas to confirm a commit"
            ),
            "a fail-over loses the grants that the replica has not received: two clients can hold \
             the same lock, but tokens still rise",
            "`ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'`, or check tokens at the \
             resource",
        ));
    }
    if number(settings, "idle_session_timeout").is_some_and(|ms| ms > 0) {
        found.push(Finding::weak(
            "idle_session_timeout",
            format!("idle_session_timeout is {} ms", settings["idle_session_timeout"]),
            "the server closes the connection that listens for grants; until it is reopened, \
             waiters have to poll",
            "`ALTER ROLE USER SET idle_session_timeout = 0`",
        ));
    }
    found.extend(old_snapshot(settings));
    found.extend(connections(settings, "connections", pool));
    found
}

/// Returns a finding if a transaction keeps an old snapshot. Each change of a lock's row creates a
/// new version, and old versions can be removed only when no transaction can read them any more.
#[cfg(feature = "postgres")]
fn old_snapshot(settings: &Settings) -> Option<Finding> {
    let seconds = number(settings, "oldest_snapshot").unwrap_or(0);
    let dead = number(settings, "dead_rows").unwrap_or(0);
    let seen = match (seconds, dead) {
        (OLD.., _) => format!("a transaction has kept its snapshot for {seconds} s"),
        // The age of other users' snapshots may be hidden, so the number of dead rows is checked
        // too.
        (_, MANY..) => format!("{dead} dead versions of lock rows have not been vacuumed"),
        _ => return None,
    };
    Some(Finding::weak(
        "old-snapshot",
        seen,
        "while a transaction in this database keeps an old snapshot (an idle REPEATABLE READ, a \
         long report, a dump), each hand-over reads all row versions since then, and locks become \
         dozens of times slower",
        "use a separate database for the locks on this server. Or end that transaction with \
         `SELECT pg_terminate_backend(PID)`, and set idle_in_transaction_session_timeout",
    ))
}

/// The minimum age, in seconds, of a snapshot that is reported.
#[cfg(feature = "postgres")]
const OLD: u64 = 30;
/// The minimum number of dead row versions that is reported if no snapshot is that old.
#[cfg(feature = "postgres")]
const MANY: u64 = 5_000;

#[cfg(feature = "mysql")]
fn judge_mysql(settings: &Settings, pool: usize) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let on = |name: &str| is_on(value(name));
    let mut found = Vec::new();
    // MariaDB uses 3 as a synonym for 1.
    if !matches!(value("innodb_flush_log_at_trx_commit"), "1" | "3") {
        found.push(Finding::broken(
            "innodb_flush_log_at_trx_commit",
            format!(
                "innodb_flush_log_at_trx_commit is {}",
                value("innodb_flush_log_at_trx_commit")
            ),
            "a crash loses the grants of the last second: other clients can acquire these locks \
             while their holders still run, but tokens still rise",
            "`SET GLOBAL innodb_flush_log_at_trx_commit = 1`, and the same in the server's \
             configuration file",
        ));
    }
    if value("innodb_doublewrite").eq_ignore_ascii_case("off") {
        found.push(Finding::broken(
            "innodb_doublewrite",
            "innodb_doublewrite is off",
            "a power failure can leave a partially written page and destroy grants",
            "set innodb_doublewrite = ON in the server's configuration file and restart it, \
             unless the file system writes pages atomically",
        ));
    }
    if on("read_only") || on("super_read_only") {
        found.push(Finding::broken(
            "read_only",
            "the server is read-only",
            "no lock can be acquired on it",
            "connect to the primary",
        ));
    }
    found.extend(binary_log(settings));
    if number(settings, "wait_timeout").is_some_and(|seconds| seconds < 60) {
        found.push(Finding::weak(
            "wait_timeout",
            format!("wait_timeout is {} s", value("wait_timeout")),
            "the server closes idle connections early, so calls and renewals often have to \
             reconnect first; no lock is lost",
            "`SET GLOBAL wait_timeout = 60` or more, and the same in the server's configuration \
             file",
        ));
    }
    found.extend(replicated(settings));
    let isolation = [value("transaction_isolation"), value("tx_isolation")].concat();
    if isolation.contains("REPEATABLE-READ") {
        found.push(Finding::note(
            "isolation",
            "the isolation level is REPEATABLE READ: a transaction sees the database as of its \
             first plain SELECT",
            "this store's locks are not affected; in your own transactions, call lock_in or the \
             fence's check before you read anything",
        ));
    }
    found.extend(connections(settings, "Threads_connected", pool));
    found
}

/// Returns the findings about the binary log, if it is enabled.
#[cfg(feature = "mysql")]
fn binary_log(settings: &Settings) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let mut found = Vec::new();
    if !is_on(value("log_bin")) {
        return found;
    }
    if value("binlog_format").eq_ignore_ascii_case("statement") {
        found.push(Finding::broken(
            "binlog_format",
            "binlog_format is STATEMENT",
            "InnoDB rejects writes at the isolation level that leasehold needs",
            "`SET GLOBAL binlog_format = ROW` (or MIXED), and the same in the server's \
             configuration file",
        ));
    }
    if value("sync_binlog") != "1" {
        found.push(Finding::weak(
            "sync_binlog",
            format!("sync_binlog is {}", value("sync_binlog")),
            "after a crash, primary and replicas can differ in the latest grants: after a \
             fail-over two clients can hold the same lock, but tokens still rise",
            "`SET GLOBAL sync_binlog = 1`, and the same in the server's configuration file",
        ));
    }
    found
}

#[cfg(feature = "mysql")]
fn is_on(value: &str) -> bool {
    value.eq_ignore_ascii_case("on") || value == "1"
}

/// Returns the findings about other writers and about replicas.
#[cfg(feature = "mysql")]
fn replicated(settings: &Settings) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let on = |name: &str| matches!(value(name).to_ascii_uppercase().as_str(), "ON" | "1");
    let mut found = Vec::new();
    let follows = settings.contains_key("follows") || on("Slave_running");
    if follows && !on("read_only") && !on("super_read_only") {
        found.push(Finding::broken(
            "two-writers",
            "this server replicates from another server and accepts writes itself",
            "if clients lock on both servers, two clients can hold the same lock without notice",
            "let all clients use one of the two servers, and run `SET GLOBAL read_only = ON` on \
             the other",
        ));
    }
    let galera = on("wsrep_on");
    let group = !value("group_replication_group_name").is_empty()
        && value("group_replication_single_primary_mode").eq_ignore_ascii_case("off");
    if galera || group {
        found.push(Finding::weak(
            "many-primaries",
            match galera {
                true => {
                    "this server belongs to a Galera cluster in which every server accepts \
                     writes"
                }
                false => {
                    "this server belongs to a replication group in which every server accepts \
                     writes"
                }
            },
            "the servers do not share row locks: if clients use different servers for one lock, a \
             transaction can fail at COMMIT, and reads can be stale",
            "let all clients use the same server",
        ));
    }
    let replicas = number(settings, "replicas").or(number(settings, "Slaves_connected"));
    let waited = on("rpl_semi_sync_master_enabled") || on("rpl_semi_sync_source_enabled");
    if replicas.is_some_and(|n| n > 0) && !waited && !galera {
        found.push(Finding::weak(
            "asynchronous-replica",
            format!(
                "the server does not wait for any of its {} replicas to confirm a commit",
                replicas.unwrap_or(0)
            ),
            "a fail-over loses the grants that the replica has not received: two clients can hold \
             the same lock, but tokens still rise",
            "enable semi-synchronous replication (rpl_semi_sync_source_enabled, or \
             rpl_semi_sync_master_enabled), or check tokens at the resource",
        ));
    }
    found
}

#[cfg(feature = "mysql")]
fn engines(tables: &Settings) -> Vec<Finding> {
    let others = tables.iter().filter(|(_, engine)| !engine.eq_ignore_ascii_case("innodb"));
    let finding = |(table, engine): (&String, &String)| {
        Finding::broken(
            "engine",
            format!("the table {table} uses the engine {engine}"),
            "this engine has no transactions: two clients can hold the same lock, and a crash can \
             destroy the table",
            format!("`ALTER TABLE {table} ENGINE = InnoDB`"),
        )
    };
    others.map(finding).collect()
}

#[cfg(feature = "sqlite")]
fn sqlite(url: &SqlUrl) -> Result<Vec<Finding>> {
    let path: &std::path::Path = url.path()?.as_ref();
    let mut found: Vec<Finding> =
        doctor::own_clock(leasehold_core::kit::wall_micros()).into_iter().collect();
    found.extend(leasehold_core::kit::file_system(path, "the database file"));
    if !super::sqlite::may_write(path) {
        found.push(Finding::broken(
            "read-only",
            "this user may not write the database file",
            "this user can take no lock",
            format!(
                "as the file's owner: chgrp GROUP {0} && chmod 660 {0}, with the group of all its \
                 users",
                path.display()
            ),
        ));
    }
    match url.synchronous {
        Synchronous::Full => {}
        Synchronous::Normal => found.push(Finding::weak(
            "synchronous",
            "the URL has synchronous=normal",
            "a power failure can lose the latest grants (a crash of a program cannot); tokens \
             still rise",
            "remove synchronous from the URL (the default is full)",
        )),
        Synchronous::Off => found.push(Finding::broken(
            "synchronous",
            "the URL has synchronous=off",
            "a power failure can destroy the database file and with it all locks",
            "remove synchronous from the URL (the default is full)",
        )),
    }
    if let Err(error) = super::sqlite::notify_fifos(url).and_then(|fifos| fifos.try_one()) {
        found.push(Finding::weak(
            "doorbell",
            format!("this user cannot create a FIFO next to the database file: {error}"),
            "clients of this user cannot be notified of a grant, so they poll every 2 to 40 ms",
            "give this user write permission on the directory of the database file",
        ));
    }
    found.push(Finding::note(
        "one-writer",
        "SQLite allows one writing process at a time",
        "a process that is paused in the middle of a write blocks all others until it resumes",
    ));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::doctor::Severity;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    fn ids(found: &[Finding]) -> Vec<&str> {
        found.iter().filter(|f| f.severity > Severity::Note).map(|f| f.id).collect()
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn settings_of_servers_not_available_in_tests_are_judged() {
        let mysql = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("version", "8.0.36"),
            ("wait_timeout", "28800"),
            ("transaction_isolation", "READ-COMMITTED"),
        ];
        assert!(ids(&judge_mysql(&settings(&mysql), 4)).is_empty());
        let replica = [
            ("innodb_flush_log_at_trx_commit", "3"),
            ("version", "10.3.39-MariaDB"),
            ("idle_transaction_timeout", "0"),
            ("super_read_only", "1"),
        ];
        assert_eq!(ids(&judge_mysql(&settings(&replica), 4)), ["read_only"]);
    }

    // F83
    #[cfg(feature = "mysql")]
    #[test]
    fn replication_settings_are_judged() {
        let judged = |pairs: &[(&str, &str)]| {
            let mut all = settings(&[("innodb_flush_log_at_trx_commit", "1")]);
            all.extend(settings(pairs));
            let found = judge_mysql(&all, 4);
            found.iter().map(|f| (f.id, f.severity)).collect::<Vec<_>>()
        };
        let two = [("two-writers", Severity::Broken)];
        assert_eq!(judged(&[("follows", "10.0.0.2")]), two);
        assert_eq!(judged(&[("Slave_running", "ON"), ("read_only", "OFF")]), two);
        let replica = [("follows", "10.0.0.2"), ("read_only", "ON")];
        assert_eq!(judged(&replica), [("read_only", Severity::Broken)]);
        assert_eq!(judged(&[("wsrep_on", "ON")]), [("many-primaries", Severity::Weak)]);
        let group = [
            ("group_replication_group_name", "b2c1"),
            ("group_replication_single_primary_mode", "OFF"),
        ];
        assert_eq!(judged(&group), [("many-primaries", Severity::Weak)]);
        let lagging = [("replicas", "1"), ("rpl_semi_sync_source_enabled", "OFF")];
        assert_eq!(judged(&lagging), [("asynchronous-replica", Severity::Weak)]);
        let waited = [("replicas", "1"), ("rpl_semi_sync_master_enabled", "ON")];
        assert!(judged(&waited).is_empty());
        assert!(judged(&[("replicas", "0"), ("Slave_running", "OFF")]).is_empty());
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn asynchronous_replicas_are_reported() {
        let lagging = [("replicas", "2"), ("synchronous_standby_names", "")];
        assert_eq!(ids(&judge_postgres(&settings(&lagging), 4)), ["asynchronous-replica"]);
        let waited = [("replicas", "2"), ("synchronous_standby_names", "*")];
        assert!(judge_postgres(&settings(&waited), 4).is_empty());
    }

    // F36
    #[cfg(feature = "postgres")]
    #[test]
    fn old_snapshot_is_reported() {
        let judged = |name, value| {
            judge_postgres(&settings(&[(name, value)]), 4).iter().map(|f| f.id).collect::<Vec<_>>()
        };
        assert_eq!(judged("oldest_snapshot", "29"), Vec::<&str>::new());
        assert_eq!(judged("oldest_snapshot", "35"), ["old-snapshot"]);
        assert_eq!(judged("dead_rows", "100"), Vec::<&str>::new());
        assert_eq!(judged("dead_rows", "90000"), ["old-snapshot"]);
    }
}
