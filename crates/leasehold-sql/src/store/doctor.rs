//! What is wrong with a database's set-up: see [`leasehold_core::doctor`].

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
                format!("the database file has other tables in it, {table:?} among them"),
                "a transaction that writes there for as long as a lease keeps that lease from being \
                 renewed, and the lock is lost; its journal mode is left as it is",
                "give leasehold a file of its own, such as sqlite:/var/lib/app/locks.db",
            )
        }));
        Ok(found)
    }

    #[cfg(feature = "postgres")]
    async fn look_at_postgres(&self, url: &SqlUrl) -> Result<Vec<Finding>, Failure> {
        // Of two pools: one may have room for one connection only.
        let (mut one, mut other) = (self.pool.take().await?, self.beats.take().await?);
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
        found.extend(self.lacks_procedures().then(no_procedures));
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
        found.extend(self.lacks_procedures().then(no_procedures));
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

/// Whom this server follows (`follows`), and how many follow it (`replicas`), as far as this user may
/// know.
#[cfg(feature = "mysql")]
async fn replication(wire: &mut dyn Wire) -> Result<Settings, Failure> {
    let mut found = Settings::new();
    // What it is called now, and what it was called before.
    for question in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        match pairs(wire, question).await {
            Ok(told) => {
                found.extend(told.into_values().map(|host| ("follows".to_owned(), host)));
                break;
            }
            Err(Failure::Final(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    let dumps = "SELECT 'replicas', CAST(COUNT(*) AS CHAR) FROM information_schema.PROCESSLIST \
                 WHERE COMMAND LIKE 'Binlog Dump%'";
    match pairs(wire, dumps).await {
        Ok(told) => found.extend(told),
        Err(Failure::Final(_)) => {}
        Err(failure) => return Err(failure),
    }
    Ok(found)
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

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn no_procedures() -> Finding {
    Finding::note(
        "procedures",
        "leasehold's procedures are not in this database, or not as this version has them, and this user may not make them",
        "a lock that somebody waits for changes hands by three times the server's work; what \
         `leasehold schema` prints makes them, by a user who may create in this schema",
    )
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

/// Tables of leasehold's in other schemas of the database.
#[cfg(feature = "postgres")]
fn other_schemas(url: &SqlUrl, found: &Settings) -> Option<Finding> {
    let others: Vec<&str> = found.keys().map(String::as_str).collect();
    let ours = url.schema.as_deref().unwrap_or_default();
    (!others.is_empty()).then(|| {
        Finding::note(
            "other-schemas",
            format!("leasehold's tables are in the schema {ours}, and also in {}", others.join(", ")),
            "clients whose URLs lead to different schemas exclude nobody of each other; if that is not meant, \
             write the same schema= into all URLs",
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
    if number(settings, "idle_session_timeout").is_some_and(|ms| ms > 0) {
        found.push(Finding::weak(
            "idle_session_timeout",
            format!("idle sessions are ended after {} ms", settings["idle_session_timeout"]),
            "the connection that listens for grants is idle most of the time; until it is opened \
             again, waiters learn of their turn by asking only",
            "set idle_session_timeout = 0 for the user that locks",
        ));
    }
    found.extend(old_snapshot(settings));
    found.extend(connections(settings, "connections", pool));
    found
}

/// A lock's row is written anew each time, and what was there before can only be cleared away when
/// nobody can see it any more.
#[cfg(feature = "postgres")]
fn old_snapshot(settings: &Settings) -> Option<Finding> {
    let seconds = number(settings, "oldest_snapshot").unwrap_or(0);
    let dead = number(settings, "dead_rows").unwrap_or(0);
    let seen = match (seconds, dead) {
        (OLD.., _) => format!("a transaction has had its snapshot for {seconds} s"),
        // Of other users' sessions not everybody may see how old their snapshots are.
        (_, MANY..) => format!("{dead} versions of locks' rows that are dead wait to be cleared"),
        _ => return None,
    };
    Some(Finding::weak(
        "old-snapshot",
        seen,
        "while a transaction of this database keeps an old snapshot (REPEATABLE READ that does nothing, \
         a long report, a dump), each hand-over reads through all versions of its lock's row since \
         then: locks become dozens of times slower",
        "keep the locks in a database of their own on this server, or end that transaction and set \
         idle_in_transaction_session_timeout",
    ))
}

/// How old a snapshot is that is told of, in seconds; and how many dead versions of rows.
#[cfg(feature = "postgres")]
const OLD: u64 = 30;
#[cfg(feature = "postgres")]
const MANY: u64 = 5_000;

#[cfg(feature = "mysql")]
fn judge_mysql(settings: &Settings, pool: usize) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let on = |name: &str| is_on(value(name));
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
    found.extend(binary_log(settings));
    if number(settings, "wait_timeout").is_some_and(|seconds| seconds < 60) {
        found.push(Finding::weak(
            "wait_timeout",
            format!("idle connections are closed after {} s", value("wait_timeout")),
            "no lock is tied to a connection, but each call after a pause first finds its connection \
             closed and opens another, renewals included",
            "set wait_timeout to 60 or more",
        ));
    }
    found.extend(replicated(settings));
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

/// What the binary log, where there is one, does to grants.
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
    found
}

#[cfg(feature = "mysql")]
fn is_on(value: &str) -> bool {
    value.eq_ignore_ascii_case("on") || value == "1"
}

/// Who else writes, or has what was written.
#[cfg(feature = "mysql")]
fn replicated(settings: &Settings) -> Vec<Finding> {
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let on = |name: &str| matches!(value(name).to_ascii_uppercase().as_str(), "ON" | "1");
    let mut found = Vec::new();
    let follows = settings.contains_key("follows") || on("Slave_running");
    if follows && !on("read_only") && !on("super_read_only") {
        found.push(Finding::broken(
            "two-writers",
            "this server takes writes, and follows another server besides",
            "where the two replicate both ways, or clients lock on both, two hold at once and nobody \
             is told",
            "let all clients lock on one of the two, and set read_only on the other",
        ));
    }
    let galera = on("wsrep_on");
    let group = !value("group_replication_group_name").is_empty()
        && value("group_replication_single_primary_mode").eq_ignore_ascii_case("off");
    if galera || group {
        found.push(Finding::weak(
            "many-primaries",
            match galera {
                true => "this server is one of a Galera cluster, of which each takes writes",
                false => "this server is one of a group in which each takes writes",
            },
            "row locks are not seen from one server to the other: who meets on a lock by two servers is \
             undone as it commits, and reads may be old",
            "let all clients lock on one of the servers",
        ));
    }
    let replicas = number(settings, "replicas").or(number(settings, "Slaves_connected"));
    let waited = on("rpl_semi_sync_master_enabled") || on("rpl_semi_sync_source_enabled");
    if replicas.is_some_and(|n| n > 0) && !waited && !galera {
        found.push(Finding::weak(
            "asynchronous-replica",
            format!("{} replicas follow, and none of them is waited for", replicas.unwrap_or(0)),
            "a fail-over loses the grants that the replica had not got yet, and two hold at once; \
             tokens still rise",
            "switch semi-synchronous replication on, or let the resource check tokens",
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
        doctor::own_clock(leasehold_core::kit::wall_micros()).into_iter().collect();
    found.extend(leasehold_core::kit::file_system(path, "the database file"));
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
    if let Err(error) = super::sqlite::doorbells(url).and_then(|bells| bells.try_one()) {
        found.push(Finding::weak(
            "doorbell",
            format!("no FIFO can be made beside the database file: {error}"),
            "nobody can tell a client of this user that its turn has come: it asks, every 2 to 40 ms",
            "give this user the right to make files in the database file's directory",
        ));
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
    use leasehold_core::doctor::Severity;

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
        assert!(ids(&judge_mysql(&settings(&mysql), 4)).is_empty());
        let replica = [
            ("innodb_flush_log_at_trx_commit", "3"),
            ("version", "10.3.39-MariaDB"),
            ("idle_transaction_timeout", "0"),
            ("super_read_only", "1"),
        ];
        assert_eq!(ids(&judge_mysql(&settings(&replica), 4)), ["read_only"]);
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn f83_servers_that_replicate_are_judged() {
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
    fn replicas_that_nobody_waits_for_are_a_weakness() {
        let lagging = [("replicas", "2"), ("synchronous_standby_names", "")];
        assert_eq!(ids(&judge_postgres(&settings(&lagging), 4)), ["asynchronous-replica"]);
        let waited = [("replicas", "2"), ("synchronous_standby_names", "*")];
        assert!(judge_postgres(&settings(&waited), 4).is_empty());
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn f36_a_snapshot_that_is_kept_for_long_is_told_of() {
        let judged = |name, value| {
            judge_postgres(&settings(&[(name, value)]), 4).iter().map(|f| f.id).collect::<Vec<_>>()
        };
        assert_eq!(judged("oldest_snapshot", "29"), Vec::<&str>::new());
        assert_eq!(judged("oldest_snapshot", "35"), ["old-snapshot"]);
        assert_eq!(judged("dead_rows", "100"), Vec::<&str>::new());
        assert_eq!(judged("dead_rows", "90000"), ["old-snapshot"]);
    }
}
