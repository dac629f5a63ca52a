//! The SQL, written once. `?` is an argument, `{now}` the server's clock in microseconds,
//! `{greatest}` the larger of two.

use super::url::{Dialect, SqlUrl};
#[cfg(feature = "mysql")]
use super::wire::Arg;
use super::wire::Statement;

/// All statements of one store.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) begin: &'static str,
    /// Takes a free lock. On SQLite and PostgreSQL also one that never was; they answer the token.
    pub(super) take: Statement,
    /// Releases a lock that nobody waits for.
    pub(super) release: Statement,
    /// Makes a lock's row.
    pub(super) create: Statement,
    /// Locks a lock's row.
    pub(super) lock: Statement,
    /// The clock, and the claims of a lock: at least one row.
    pub(super) claims: Statement,
    /// The clock, a lock's row and its claims as of one moment.
    pub(super) read: Statement,
    /// The same for many locks.
    pub(super) list: Statement,
    pub(super) write_lock: Statement,
    pub(super) insert_claim: Statement,
    pub(super) delete_claim: Statement,
    /// Writes what never shortens a claim's place.
    pub(super) extend_claim: Statement,
    /// Writes a claim's new standing and end.
    pub(super) turn_claim: Statement,
    /// Renews what holds in locks' rows, many at once, as JSON; answers claim, token and standing.
    pub(super) renew_heads: Option<Statement>,
    /// The same for what stands among the claims.
    pub(super) renew_claims: Option<Statement>,
    /// MySQL: locks what can be had of these and is not over, and lengthens it.
    #[cfg(feature = "mysql")]
    pub(super) see_heads: Several,
    #[cfg(feature = "mysql")]
    pub(super) lengthen_heads: Several,
    #[cfg(feature = "mysql")]
    pub(super) see_claims: Several,
    #[cfg(feature = "mysql")]
    pub(super) lengthen_claims: Several,
    /// Which of our waiters hold.
    pub(super) granted: Statement,
    /// Tells another client (PostgreSQL).
    pub(super) notify: Statement,
    pub(super) version: Statement,
    /// Fails if a table lacks a column.
    pub(super) probe: Statement,
    /// Forgets locks that nobody used for a day.
    pub(super) sweep: Statement,
}

/// What a lock's row is read as, and a claim's.
const LOCK: &str = "l.kind, l.capacity, l.last_token, l.claims, l.claim, l.token, l.weight, \
                    l.standing, l.since, l.expires, l.lock_delay, l.host, l.pid, l.label";
const CLAIM: &str = "c.claim, c.token, c.weight, c.standing, c.since, c.expires, c.lock_delay, \
                     c.host, c.pid, c.label, c.session";

impl Statements {
    pub(super) fn of(url: &SqlUrl) -> Self {
        let d = url.dialect;
        let say = |shape: &'static str, sql: &str| Statement { sql: write(url, sql).into(), shape };
        #[cfg(feature = "mysql")]
        let several = |shape, sql: &str| Several { sql: write(url, sql), shape };
        Self {
            begin: begin(d),
            take: say("i", take(d)),
            release: say(
                "",
                "UPDATE {locks} SET claim = '' WHERE name = ? AND claim = ? AND claims = 0 \
                 AND standing = 1 AND expires > {now}",
            ),
            create: say("", create(d)),
            lock: say(
                "iiiitiiiiiitit",
                &format!("SELECT {LOCK} FROM {{locks}} l WHERE l.name = ?{{for_update}}"),
            ),
            claims: say(
                "itiiiiiititt",
                &format!(
                    "SELECT {{now}}, {CLAIM} FROM (SELECT 1 AS one) o \
                     LEFT JOIN {{claims}} c ON c.name = ? ORDER BY c.token"
                ),
            ),
            read: say(
                "iiiiitiiiiiitittiiiiiititt",
                &format!(
                    "SELECT {{now}}, {LOCK}, {CLAIM} FROM {{locks}} l \
                     LEFT JOIN {{claims}} c ON c.name = l.name WHERE l.name = ? ORDER BY c.token"
                ),
            ),
            list: say(
                "tiiiiitiiiiiitittiiiiiititt",
                &format!(
                    "SELECT l.name, {{now}}, {LOCK}, {CLAIM} FROM {{locks}} l \
                     LEFT JOIN {{claims}} c ON c.name = l.name \
                     WHERE l.name >= ? AND (l.claim <> '' OR l.claims > 0) \
                     ORDER BY l.name, c.token"
                ),
            ),
            write_lock: say(
                "",
                "UPDATE {locks} SET kind = ?, capacity = ?, last_token = ?, claims = ?, claim = ?, \
                 token = ?, weight = ?, standing = ?, since = ?, expires = ?, lock_delay = ?, \
                 host = ?, pid = ?, label = ? WHERE name = ?",
            ),
            insert_claim: say(
                "",
                "INSERT INTO {claims} (name, claim, token, weight, standing, since, expires, \
                 lock_delay, host, pid, label, session) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ),
            delete_claim: say(
                "",
                "DELETE FROM {claims} WHERE name = ? AND token = ? AND expires = ?",
            ),
            extend_claim: say(
                "",
                "UPDATE {claims} SET standing = ?, since = ?, expires = {greatest}(expires, ?) \
                 WHERE name = ? AND token = ?",
            ),
            turn_claim: say(
                "",
                "UPDATE {claims} SET standing = ?, since = ?, expires = ? \
                 WHERE name = ? AND token = ? AND expires = ?",
            ),
            renew_heads: renew_heads(d).map(|sql| say("tii", sql)),
            renew_claims: renew_claims(d).map(|sql| say("tii", sql)),
            #[cfg(feature = "mysql")]
            see_heads: several(
                "tii",
                "SELECT claim, token, standing FROM {locks} FORCE INDEX (PRIMARY) \
                 WHERE name IN ({some}) AND claim <> '' AND standing = 1 AND expires > {now} \
                 FOR UPDATE SKIP LOCKED",
            ),
            #[cfg(feature = "mysql")]
            lengthen_heads: several(
                "",
                "UPDATE {locks} FORCE INDEX (PRIMARY) SET expires = GREATEST(expires, {now} + ?) \
                 WHERE name IN ({some})",
            ),
            #[cfg(feature = "mysql")]
            see_claims: several(
                "tii",
                "SELECT claim, token, standing FROM {claims} FORCE INDEX (by_claim) \
                 WHERE claim IN ({some}) AND standing < 2 AND expires > {now} \
                 FOR UPDATE SKIP LOCKED",
            ),
            #[cfg(feature = "mysql")]
            lengthen_claims: several(
                "",
                "UPDATE {claims} FORCE INDEX (by_claim) SET expires = GREATEST(expires, {now} + ?) \
                 WHERE claim IN ({some})",
            ),
            granted: say(
                "ti",
                "SELECT claim, token FROM {claims} WHERE session = ? AND standing = 1",
            ),
            notify: say("", "SELECT pg_notify(?, ?)"),
            version: say("i", "SELECT version FROM {schema}"),
            probe: say(
                "iiiitiiiiiititttiiiiiititt",
                &format!(
                    "SELECT {LOCK}, l.name, {CLAIM} FROM {{locks}} l \
                     LEFT JOIN {{claims}} c ON c.name = l.name WHERE 1 = 0"
                ),
            ),
            sweep: say(
                "",
                "DELETE FROM {locks} WHERE claims = 0 AND last_token < {now} - 86400000000 \
                 AND (claim = '' OR expires + lock_delay < {now} - 86400000000)",
            ),
        }
    }
}

fn begin(dialect: Dialect) -> &'static str {
    match dialect {
        // Deferred, a transaction that reads and then writes fails without waiting.
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "BEGIN IMMEDIATE",
        // Each statement must see what was committed before it. The limits end a client that was
        // stopped with a lock's row in its hands.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            "BEGIN ISOLATION LEVEL READ COMMITTED; \
             SET LOCAL idle_in_transaction_session_timeout = 1000; SET LOCAL lock_timeout = 5000"
        }
        #[cfg(feature = "mysql")]
        Dialect::MySql => "START TRANSACTION",
    }
}

/// Arguments: name, kind, capacity, claim, weight, lease, lock_delay, host, pid, label, floor of the
/// token. MySQL: floor, kind, capacity, claim, weight, lease, lock_delay, host, pid, label, name.
fn take(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "UPDATE {locks} SET \
             last_token = LAST_INSERT_ID(GREATEST(last_token + 1, {now}, ?)), token = last_token, \
             kind = ?, capacity = ?, claim = ?, weight = ?, standing = 1, since = {now}, \
             expires = since + ?, host = ?, pid = ?, label = ?, lock_delay = ? \
             WHERE name = ? AND claims = 0 AND (claim = '' OR expires + lock_delay <= {now})"
        }
        // The inner SELECTs read the clock once for both columns. Nothing but the row itself is
        // looked at, so that a statement that had to wait for it judges what it then finds.
        _ => {
            "INSERT INTO {locks} AS l (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             SELECT v.name, v.kind, v.capacity, {greatest}(v.now, v.floor), 0, v.claim, \
             {greatest}(v.now, v.floor), v.weight, 1, v.now, v.now + v.lease, v.lock_delay, v.host, \
             v.pid, v.label FROM (SELECT {text} AS name, {int} AS kind, {int} AS capacity, \
             {text} AS claim, {int} AS weight, {int} AS lease, {int} AS lock_delay, {text} AS host, \
             {int} AS pid, {text} AS label, {int} AS floor, {now} AS now) v WHERE true \
             ON CONFLICT (name) DO UPDATE SET kind = excluded.kind, capacity = excluded.capacity, \
             (last_token, token, since, expires) = (SELECT t.token, t.token, t.now, \
             t.now + excluded.expires - excluded.since FROM \
             (SELECT {greatest3}(l.last_token + 1, n.now, {int}) AS token, n.now FROM \
             (SELECT {now} AS now) n) t), \
             claim = excluded.claim, weight = excluded.weight, standing = 1, \
             lock_delay = excluded.lock_delay, host = excluded.host, pid = excluded.pid, \
             label = excluded.label \
             WHERE l.claims = 0 AND (l.claim = '' OR l.expires + l.lock_delay <= {now}) \
             RETURNING token"
        }
    }
}

fn create(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "INSERT IGNORE INTO {locks} (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             VALUES (?, ?, ?, 0, 0, '', 0, 0, 0, 0, 0, 0, '', 0, '')"
        }
        _ => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             VALUES (?, ?, ?, 0, 0, '', 0, 0, 0, 0, 0, 0, '', 0, '') ON CONFLICT (name) DO NOTHING"
        }
    }
}

/// What somebody has locked is left out: one client that was stopped must not hold up the renewals
/// of all.
fn renew_heads(dialect: Dialect) -> Option<&'static str> {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => None,
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => Some(
            "UPDATE {locks} AS l SET expires = max(l.expires, {now} + r.lease) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease FROM json_each(?)) r \
             WHERE l.name = r.name AND l.claim = r.claim AND l.standing = 1 \
             AND l.expires > {now} RETURNING claim, token, standing",
        ),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => Some(
            "UPDATE {locks} AS l SET expires = greatest(l.expires, {now} + s.lease) \
             FROM (SELECT k.name, r.lease FROM {locks} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.standing = 1 AND l.expires > {now} \
             RETURNING l.claim, l.token, l.standing",
        ),
    }
}

fn renew_claims(dialect: Dialect) -> Option<&'static str> {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => None,
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => Some(
            "UPDATE {claims} AS l SET expires = max(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN r.lease ELSE r.wait END) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease, value ->> 'wait' AS wait FROM json_each(?)) r \
             WHERE l.claim = r.claim AND l.name = r.name AND l.standing < 2 \
             AND l.expires > {now} RETURNING claim, token, standing",
        ),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => Some(
            "UPDATE {claims} AS l SET expires = greatest(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN s.lease ELSE s.wait END) \
             FROM (SELECT k.name, k.token, r.lease, r.wait FROM {claims} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.token = s.token AND l.standing < 2 \
             AND l.expires > {now} RETURNING l.claim, l.token, l.standing",
        ),
    }
}

/// A statement about several keys.
#[cfg(feature = "mysql")]
#[derive(Debug)]
pub(super) struct Several {
    sql: String,
    shape: &'static str,
}

#[cfg(feature = "mysql")]
impl Several {
    /// For these keys, at least one. Their number is rounded up by telling the last one again, so
    /// that there are few statements to prepare.
    pub(super) fn of(&self, mut args: Vec<Arg>, mut keys: Vec<Arg>) -> (Statement, Vec<Arg>) {
        let many = keys.len().next_power_of_two();
        if let Some(last) = keys.last().cloned() {
            keys.resize(many, last);
        }
        args.extend(keys);
        let sql = self.sql.replace("{some}", &vec!["?"; many].join(", "));
        (Statement { sql: sql.into(), shape: self.shape }, args)
    }
}

/// The statement in the words of one database.
fn write(url: &SqlUrl, sql: &str) -> String {
    let words: [(&str, &str); 6] = match url.dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => [
            ("{now}", "(CAST(ROUND(unixepoch('now', 'subsec') * 1000) AS INTEGER) * 1000)"),
            ("{greatest3}", "max"),
            ("{greatest}", "max"),
            ("{for_update}", ""),
            ("{int}", "?"),
            ("{text}", "?"),
        ],
        // Not now(): that is the time at which the transaction began.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => [
            ("{now}", "(extract(epoch from clock_timestamp()) * 1000000)::bigint"),
            ("{greatest3}", "greatest"),
            ("{greatest}", "greatest"),
            ("{for_update}", " FOR UPDATE"),
            ("{int}", "?::bigint"),
            ("{text}", "?::text"),
        ],
        // Not NOW(): that is the time at which the statement began.
        #[cfg(feature = "mysql")]
        Dialect::MySql => [
            ("{now}", "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"),
            ("{greatest3}", "GREATEST"),
            ("{greatest}", "GREATEST"),
            ("{for_update}", " FOR UPDATE"),
            ("{int}", "?"),
            ("{text}", "?"),
        ],
    };
    let mut text = sql.to_owned();
    for (word, meaning) in words {
        text = text.replace(word, meaning);
    }
    for table in ["locks", "claims", "schema"] {
        text = text.replace(&format!("{{{table}}}"), &url.table(table));
    }
    #[cfg(feature = "postgres")]
    if url.dialect == Dialect::Postgres {
        return numbered(&text);
    }
    text
}

/// `$1`, `$2`, … for `?`.
#[cfg(feature = "postgres")]
fn numbered(sql: &str) -> String {
    let mut text = String::with_capacity(sql.len() + 32);
    let mut n = 0;
    for c in sql.chars() {
        match c {
            '?' => {
                n += 1;
                text.push_str(&format!("${n}"));
            }
            c => text.push(c),
        }
    }
    text
}
