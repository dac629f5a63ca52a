//! The SQL statements, written once for all databases if possible. `?` is an argument, `{now}` is
//! the server's clock in microseconds, and `{greatest}` is the greater of two values.

use std::borrow::Cow;

use super::plain_words::Plain;
use super::url::{Dialect, SqlUrl, is_file};
use super::wire::{Arg, Statement};

/// The number of claims in the front. It is enough for the readers and permits of most locks, and
/// for a few expired waiters.
pub(super) const FRONT_LIMIT: usize = 16;

/// A statement that changes one row.
pub(super) type Write<'a> = (&'a Statement, Vec<Arg>);

/// The session limits for each transaction behind a pooler, where the session is not ours. They are
/// sent with BEGIN ([`Place::begin`](super::postgres::place::Place::begin)), so they cost no round trip.
#[cfg(feature = "postgres")]
pub(super) const LIMITS_POOLED: &str =
    "SET LOCAL idle_in_transaction_session_timeout = 1000; SET LOCAL lock_timeout = 5000";

/// All statements of one store.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) begin: &'static str,
    /// Whether no other client writes while a transaction is open. In that case, one statement
    /// reads a lock's row and its claims.
    pub(super) one_writer: bool,
    /// Whether the server may be one of several that accept writes, and roll back conflicting
    /// writes.
    pub(super) certifies: bool,
    /// Acquires a free lock that has a row. (SQLite and PostgreSQL return the token, and how long
    /// ago the lease began. PostgreSQL computes the new values before it waits for a locked row. It
    /// does not compute them again if the row turns out unchanged.)
    pub(super) take: Statement,
    /// Acquires a lock that has no row. If the row exists, the statement fails on MySQL, and
    /// acquires the lock on the others if it is free.
    pub(super) take_new: Statement,
    /// Releases a lock that no other claim waits for.
    pub(super) release: Statement,
    /// Creates a lock's row.
    pub(super) create: Statement,
    /// Locks a lock's row.
    pub(super) lock: Statement,
    /// Reads the clock and the claims of a lock. Returns at least one row.
    pub(super) claims: Statement,
    /// Like `claims`, for the front of the queue and one claim wherever it is. Rows may be
    /// duplicates.
    pub(super) front: Statement,
    /// Reads the clock, a lock's row and its claims as of one moment.
    pub(super) read: Statement,
    /// Like `read`, for the front of the queue and one claim wherever it is. Rows may be
    /// duplicates.
    pub(super) look: Statement,
    /// Like `read`, for many locks, whose names are given as JSON.
    pub(super) read_many: Statement,
    /// Returns the tokens of all claims that have rows of their own, as one JSON array in any
    /// order.
    pub(super) tokens: Statement,
    /// Like `read`, for all locks in use whose names are greater than or equal to the argument.
    pub(super) list: Statement,
    pub(super) write_lock: Statement,
    pub(super) insert_claim: Statement,
    pub(super) delete_claim: Statement,
    /// Updates a claim without ever shortening its place.
    pub(super) extend_claim: Statement,
    /// Updates the weight of a claim.
    pub(super) set_weight: Statement,
    /// Updates the state and expiry time of a claim, unless it was renewed since it was read.
    pub(super) turn_claim: Statement,
    /// Renews many claims, given as JSON. One statement renews holders in locks' rows. The other
    /// renews claims in the table `claims`. They return the renewed claims with their tokens and
    /// states. Rows locked by other transactions are left to the slow path if the database can skip
    /// them. So one paused client does not block the renewals of all clients. (MySQL: several
    /// statements.)
    pub(super) renew_locks: Statement,
    pub(super) renew_claims: Statement,
    /// Returns which of our waiters hold their locks.
    pub(super) granted: Statement,
    /// For PostgreSQL. Returns the claims that hold, like `granted`, with -1 as the number of
    /// claims ahead. Also returns our first few waiters of each lock with the number of claims
    /// ahead of them. Arguments: our session twice.
    #[cfg(feature = "postgres")]
    pub(super) places: Statement,
    /// MySQL: returns which of our waiters were granted after a time. `is_new` checks for a grant
    /// that this client has not reported yet. If there is none, `sleep` sleeps, or `wait` waits for
    /// a lock that another connection holds. (One statement for both would keep a transaction
    /// open.)
    #[cfg(feature = "mysql")]
    pub(super) granted_since: Statement,
    #[cfg(feature = "mysql")]
    pub(super) is_new: Statement,
    #[cfg(feature = "mysql")]
    pub(super) sleep: Statement,
    #[cfg(feature = "mysql")]
    pub(super) wait: Statement,
    /// MySQL: acquires a lock of the server's own, by which other clients find our session.
    #[cfg(feature = "mysql")]
    pub(super) be_named: Statement,
    /// The plain turn as one message, if the database accepts several statements in a message.
    pub(super) plain: Option<Plain>,
    pub(super) version: Statement,
    /// Fails if a table lacks a column. Returns the clock, and the row that records the last sweep.
    pub(super) probe: Statement,
    /// Records a sweep now, unless one was recorded within the given time. The record is a row of
    /// the lock table with an empty name. No lock can have that name, and listings omit the row
    /// because they omit free locks.
    pub(super) sweeper: Statement,
    /// Returns the next names after the argument.
    pub(super) page: Statement,
    /// Returns the locks between two names that have a claim which expired more than a day ago.
    pub(super) abandoned: Statement,
    /// Deletes the locks between two names that were not used for a day.
    pub(super) sweep: Statement,
}

/// The maximum number of waiters of one client and lock for which a poll counts the claims ahead.
#[cfg(feature = "postgres")]
const FIRST_FEW: usize = 4;

/// The number of names that are swept at once.
pub(super) const PAGE: usize = 500;

/// The columns of a lock's row.
const LOCK: &str = "l.kind, l.capacity, l.last_token, l.claims, l.claim, l.token, l.weight, \
                    l.standing, l.since, l.expires, l.lock_delay, l.host, l.pid, l.label";
/// The columns of a claim's row.
const CLAIM: &str = "c.claim, c.token, c.weight, c.standing, c.since, c.expires, c.lock_delay, \
                     c.host, c.pid, c.label, c.session";

/// Selects the front of a queue and one claim. Arguments: name twice, name and claim. The lock's
/// row contains a number below the tokens of all claims that have rows of their own.
fn front_and() -> String {
    format!(
        "SELECT f.* FROM (SELECT * FROM {{claims}} WHERE name = ? AND \
         token > (SELECT h.token FROM {{locks}} h WHERE h.name = ?) ORDER BY token LIMIT {FRONT_LIMIT}) f \
         UNION ALL SELECT * FROM {{claims}} WHERE name{{apart}} = ? AND claim = ?"
    )
}

impl Statements {
    pub(super) fn of(url: &SqlUrl) -> Self {
        let d = url.dialect;
        let say = |shape: &'static str, sql: &str| Statement { sql: write(url, sql).into(), shape };
        Self {
            begin: begin(url),
            one_writer: is_file(d),
            certifies: certifies(d),
            take: say("ii", take(d)),
            take_new: say("i", take_new(d)),
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
            front: say(
                "itiiiiiititt",
                &format!(
                    "SELECT {{now}}, {CLAIM} FROM (SELECT 1 AS one) o LEFT JOIN \
                     ({}) c \
                     ON 1 = 1 ORDER BY c.token",
                    front_and()
                ),
            ),
            read: say(
                "iiiiitiiiiiitittiiiiiititt",
                &format!(
                    "SELECT {{now}}, {LOCK}, {CLAIM} FROM {{locks}} l \
                     LEFT JOIN {{claims}} c ON c.name = l.name WHERE l.name = ? ORDER BY c.token"
                ),
            ),
            look: say(
                "iiiiitiiiiiitittiiiiiititt",
                &format!(
                    "SELECT {{now}}, {LOCK}, {CLAIM} FROM {{locks}} l LEFT JOIN \
                     ({}) c \
                     ON c.name = l.name WHERE l.name = ? ORDER BY c.token",
                    front_and()
                ),
            ),
            read_many: say(
                "tiiiiitiiiiiitittiiiiiititt",
                &format!(
                    "SELECT l.name, {{now}}, {LOCK}, {CLAIM} FROM {} \
                     LEFT JOIN {{claims}} c ON c.name = l.name ORDER BY l.name, c.token",
                    locks_named(d)
                ),
            ),
            tokens: say(
                "t",
                &format!("SELECT {} FROM {{claims}} WHERE name = ?", tokens_in_json(d)),
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
            set_weight: say("", "UPDATE {claims} SET weight = ? WHERE name = ? AND token = ?"),
            turn_claim: say(
                "",
                "UPDATE {claims} SET standing = ?, since = ?, expires = ? \
                 WHERE name = ? AND token = ? AND expires = ?",
            ),
            renew_locks: say("tii", &renew_locks(d)),
            renew_claims: say("tii", &renew_claims(d)),
            granted: say(
                "ti",
                "SELECT claim, token FROM {claims} \
                 WHERE session = ? AND standing = 1 AND expires > {now}",
            ),
            #[cfg(feature = "postgres")]
            places: say(
                "tii",
                &format!(
                    "SELECT claim, token, -1::bigint FROM {{claims}} \
                     WHERE session = ? AND standing = 1 AND expires > {{now}} UNION ALL \
                     SELECT f.claim, f.token, CASE WHEN l.claim = '' THEN 0 ELSE 1 END + \
                     (SELECT count(*) FROM {{claims}} b WHERE b.name = f.name \
                     AND b.token > l.token AND b.token < f.token) \
                     FROM (SELECT c.name, c.claim, c.token, \
                     row_number() OVER (PARTITION BY c.name ORDER BY c.token) AS nth \
                     FROM {{claims}} c WHERE c.session = ? AND c.standing = 0) f \
                     JOIN {{locks}} l ON l.name = f.name WHERE f.nth <= {FIRST_FEW}"
                ),
            ),
            #[cfg(feature = "mysql")]
            granted_since: say(
                "tii",
                "SELECT claim, token, since FROM {claims} \
                 WHERE session = ? AND standing = 1 AND since > ?",
            ),
            #[cfg(feature = "mysql")]
            is_new: say(
                "",
                "SELECT EXISTS(SELECT 1 FROM {claims} WHERE session = ? AND standing = 1 \
                 AND since > ? AND FIND_IN_SET(claim, ?) = 0) INTO @leasehold_is_new",
            ),
            #[cfg(feature = "mysql")]
            sleep: say("", "SELECT SLEEP(IF(@leasehold_is_new, 0, ? / 1000000))"),
            #[cfg(feature = "mysql")]
            wait: say(
                "t",
                "SELECT CAST(GET_LOCK(?, IF(@leasehold_is_new, 0, ? / 1000000)) AS CHAR)",
            ),
            #[cfg(feature = "mysql")]
            be_named: say("t", "SELECT CAST(GET_LOCK(?, 0) AS CHAR)"),
            plain: plain(url),
            version: say("i", "SELECT version FROM {schema}"),
            probe: say(
                "iiiiitiiiiiititttiiiiiititt",
                &format!(
                    "SELECT {{now}}, {LOCK}, l.name, {CLAIM} FROM {{locks}} l \
                     LEFT JOIN {{claims}} c ON c.name = l.name WHERE l.name = ''"
                ),
            ),
            sweeper: say(
                "",
                "UPDATE {locks} SET last_token = {now} WHERE name = '' AND last_token < {now} - {int}",
            ),
            page: say(
                "t",
                &format!(
                    "SELECT l.name FROM {{locks}} l WHERE l.name > ? ORDER BY l.name LIMIT {PAGE}"
                ),
            ),
            abandoned: say(
                "t",
                "SELECT l.name FROM {locks} l WHERE l.name > ? AND l.name <= ? AND l.claims > 0 \
                 AND l.last_token < {now} - 86400000000 AND EXISTS (SELECT 1 FROM {claims} c \
                 WHERE c.name = l.name AND c.expires < {now} - 86400000000)",
            ),
            sweep: say(
                "",
                "DELETE FROM {locks} WHERE name > ? AND name <= ? AND claims = 0 \
                 AND last_token < {now} - 86400000000 \
                 AND (claim = '' OR expires + lock_delay < {now} - 86400000000)",
            ),
        }
    }
}

fn certifies(dialect: Dialect) -> bool {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => true,
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        _ => false,
    }
}

fn begin(url: &SqlUrl) -> &'static str {
    match url.dialect {
        // A deferred transaction that reads and then writes would fail without waiting.
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "BEGIN IMMEDIATE",
        // Each statement must see what was committed before it.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "BEGIN ISOLATION LEVEL READ COMMITTED",
        #[cfg(feature = "mysql")]
        Dialect::MySql => "START TRANSACTION",
    }
}

fn plain(url: &SqlUrl) -> Option<Plain> {
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    let say = |shape, sql: &str| Statement { sql: write(url, sql).into(), shape };
    match url.dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => None,
        #[cfg(feature = "postgres")]
        Dialect::Postgres => Some(Plain::of_postgres(FRONT_LIMIT, say)),
        #[cfg(feature = "mysql")]
        Dialect::MySql => Some(Plain::of_mysql(FRONT_LIMIT, say)),
    }
}

/// Returns the statements that renew claims on MySQL. A statement that changes rows waits for
/// locked rows. So an inner statement skips locked rows and locks the rows that it finds, and the
/// outer one changes only those. (LIMIT makes the inner one a separate table.) The rows then show
/// which claims were renewed, because their expiry time is as late as requested. The names in the
/// JSON are in hexadecimal, because they are bytes in the table.
///
/// The JSON_TABLE is in a derived table. MySQL, unlike MariaDB, otherwise assumes that `FOR UPDATE`
/// locks the JSON_TABLE too, and refuses that with error 3569.
#[cfg(feature = "mysql")]
fn renew_on_mysql(table: &str, by: &str, key: &str, lease: &str) -> String {
    let given = "(SELECT * FROM JSON_TABLE(@leasehold_all, '$[*]' COLUMNS (\
                 name VARCHAR(1024) PATH '$.name', claim VARCHAR(32) PATH '$.claim', \
                 lease BIGINT PATH '$.lease', wait BIGINT PATH '$.wait')) j) r";
    let found = format!(
        "FORCE INDEX ({by}) ON l.name = UNHEX(r.name) AND l.claim = r.claim WHERE l.standing < 2"
    );
    format!(
        "SET @leasehold_all = $1, @leasehold_now = {{now}}; \
         UPDATE (SELECT l.{key} AS found, r.name, r.lease, r.wait FROM {given} STRAIGHT_JOIN {table} l \
         {found} AND l.expires > {{now}} LIMIT 1000000000 FOR UPDATE SKIP LOCKED) r \
         STRAIGHT_JOIN {table} l FORCE INDEX (PRIMARY) ON l.name = UNHEX(r.name) AND l.{key} = r.found \
         SET l.expires = GREATEST(l.expires, {{now}} + {lease}); \
         SELECT l.claim, l.token, l.standing FROM {given} STRAIGHT_JOIN {table} l \
         {found} AND l.expires >= @leasehold_now + {lease}"
    )
}

/// Returns the `FROM` clause for the locks whose names are in a JSON array. Each is found by its
/// name.
fn locks_named(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "json_each(?) n CROSS JOIN {locks} l ON l.name = n.value",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            "json_array_elements_text(?::json) AS n(name) JOIN {locks} l ON l.name = n.name"
        }
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "(SELECT UNHEX(j.name) AS name FROM JSON_TABLE(?, '$[*]' \
             COLUMNS (name VARCHAR(1024) PATH '$')) j) n \
             STRAIGHT_JOIN {locks} l FORCE INDEX (PRIMARY) ON l.name = n.name"
        }
    }
}

fn tokens_in_json(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "json_group_array(token)",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "coalesce(json_agg(token), '[]')::text",
        // MariaDB truncates a long result with only a warning.
        #[cfg(feature = "mysql")]
        Dialect::MySql => "CAST(COALESCE(JSON_ARRAYAGG(token), '[]') AS CHAR)",
    }
}

fn renew_locks(dialect: Dialect) -> Cow<'static, str> {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "UPDATE {locks} AS l SET expires = max(l.expires, {now} + s.lease) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease FROM json_each(?)) s \
             WHERE l.name = s.name AND l.claim = s.claim AND l.standing = 1 AND l.expires > {now} \
             RETURNING claim, token, standing"
            .into(),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            "UPDATE {locks} AS l SET expires = greatest(l.expires, {now} + s.lease) \
             FROM (SELECT k.name, r.lease FROM {locks} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.standing = 1 AND l.expires > {now} \
             RETURNING l.claim, l.token, l.standing"
                .into()
        }
        #[cfg(feature = "mysql")]
        Dialect::MySql => renew_on_mysql("{locks}", "PRIMARY", "claim", "r.lease").into(),
    }
}

fn renew_claims(dialect: Dialect) -> Cow<'static, str> {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "UPDATE {claims} AS l SET expires = max(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN s.lease ELSE s.wait END) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease, value ->> 'wait' AS wait FROM json_each(?)) s \
             WHERE l.name = s.name AND l.claim = s.claim AND l.standing < 2 AND l.expires > {now} \
             RETURNING claim, token, standing"
            .into(),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "UPDATE {claims} AS l SET expires = greatest(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN s.lease ELSE s.wait END) \
             FROM (SELECT k.name, k.token, r.lease, r.wait FROM {claims} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name{apart} = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.token = s.token AND l.standing < 2 \
             AND l.expires > {now} RETURNING l.claim, l.token, l.standing"
            .into(),
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            let lease = "CASE l.standing WHEN 1 THEN r.lease ELSE r.wait END";
            renew_on_mysql("{claims}", "by_claim", "token", lease).into()
        }
    }
}

/// Returns the statement `take`. Arguments: kind, capacity, lease, minimum token, claim, weight,
/// lock_delay, host, pid, label, name. MySQL: minimum token, kind, capacity, claim, weight, lease,
/// host, pid, label, lock_delay, name.
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
        // The inner SELECTs read the clock once for all columns.
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        _ => {
            "UPDATE {locks} AS l SET kind = ?, capacity = ?, \
             (last_token, token, since, expires) = (SELECT t.token, t.token, t.now, t.now + {int} FROM \
             (SELECT {greatest3}(l.last_token + 1, n.now, {int}) AS token, n.now FROM \
             (SELECT {now} AS now) n) t), \
             claim = ?, weight = ?, standing = 1, lock_delay = ?, host = ?, pid = ?, label = ? \
             WHERE name = ? AND claims = 0 AND (claim = '' OR expires + lock_delay <= {now}) \
             RETURNING token, {now} - since"
        }
    }
}

/// Returns the statement `take_new`. Arguments: name, kind, capacity, claim, weight, lease,
/// lock_delay, host, pid, label, and the minimum token twice. MySQL: name, kind, capacity, minimum
/// token, claim, weight, lease, lock_delay, host, pid, label. On MySQL a value may use the columns
/// before it.
fn take_new(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, weight, \
             standing, since, expires, lock_delay, host, pid, label) VALUES \
             (?, ?, ?, LAST_INSERT_ID(GREATEST({now}, ?)), 0, ?, last_token, ?, 1, {now}, \
             since + ?, ?, ?, ?, ?)"
        }
        // The inner SELECTs read the clock once for all columns. Only the row itself decides
        // whether the claim is granted, so a statement that waited for the row uses the row as it
        // is after the wait. If the row looks held, perhaps from an old snapshot, the statement
        // only skips the attempt. On PostgreSQL a failed attempt would lock the row, and the row
        // lock is written and flushed.
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        _ => {
            "INSERT INTO {locks} AS l (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             SELECT v.name, v.kind, v.capacity, {greatest}(v.now, v.floor), 0, v.claim, \
             {greatest}(v.now, v.floor), v.weight, 1, v.now, v.now + v.lease, v.lock_delay, v.host, \
             v.pid, v.label FROM (SELECT {text} AS name, {int} AS kind, {int} AS capacity, \
             {text} AS claim, {int} AS weight, {int} AS lease, {int} AS lock_delay, {text} AS host, \
             {int} AS pid, {text} AS label, {int} AS floor, {now} AS now) v \
             WHERE NOT EXISTS (SELECT 1 FROM {locks} h WHERE h.name = v.name \
             AND (h.claims > 0 OR (h.claim <> '' AND h.expires + h.lock_delay > v.now))) \
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
        // Not IGNORE, which would truncate a name to the length of a column that is too short. If
        // the row exists by now, that is a conflict, and the section begins again.
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             VALUES (?, ?, ?, 0, 0, '', 0, 0, 0, 0, 0, 0, '', 0, '')"
        }
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        _ => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, \
             weight, standing, since, expires, lock_delay, host, pid, label) \
             VALUES (?, ?, ?, 0, 0, '', 0, 0, 0, 0, 0, 0, '', 0, '') ON CONFLICT (name) DO NOTHING"
        }
    }
}

/// Translates the statement for one database.
fn write(url: &SqlUrl, sql: &str) -> String {
    let words: [(&str, &str); 7] = match url.dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => [
            ("{apart}", ""),
            ("{now}", "(CAST(ROUND(unixepoch('now', 'subsec') * 1000) AS INTEGER) * 1000)"),
            ("{greatest3}", "max"),
            ("{greatest}", "max"),
            ("{for_update}", ""),
            ("{int}", "?"),
            ("{text}", "?"),
        ],
        // Not now(), which is the time at which the transaction began.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => [
            // This makes the server look up a claim by its ID. Without statistics of the table,
            // both indexes look equally good to the server. The other index would read a lock's
            // whole queue, including dead rows.
            ("{apart}", " || ''"),
            // A double holds microseconds exactly until the year 2255. The numeric of extract()
            // would make the multiplication cost more than the rest of a condition.
            ("{now}", "(date_part('epoch', clock_timestamp()) * 1000000::float8)::bigint"),
            ("{greatest3}", "greatest"),
            ("{greatest}", "greatest"),
            ("{for_update}", " FOR UPDATE"),
            ("{int}", "?::bigint"),
            ("{text}", "?::text"),
        ],
        // Not NOW(), which is the time at which the statement began.
        #[cfg(feature = "mysql")]
        Dialect::MySql => [
            ("{apart}", ""),
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

/// Replaces each `?` with `$1`, `$2`, and so on.
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

#[cfg(all(test, feature = "mysql"))]
mod tests {
    use super::*;

    // F02
    /// MySQL refuses a JSON_TABLE next to a table whose rows are locked. MariaDB does not.
    #[test]
    fn each_json_table_is_a_derived_table() {
        let sql = Statements::of(&SqlUrl::parse("mysql://h/d").unwrap());
        let all = [&sql.renew_locks, &sql.renew_claims, &sql.read_many];
        let mut seen = 0;
        for statement in all {
            for (at, _) in statement.sql.match_indices("JSON_TABLE(") {
                let (before, after) = statement.sql.split_at(at);
                let derived = ["(SELECT * FROM ", "(SELECT UNHEX(j.name) AS name FROM "]
                    .iter()
                    .any(|select| before.ends_with(select));
                assert!(derived && after.contains(" j) "), "{}", statement.sql);
                seen += 1;
            }
        }
        assert_eq!(seen, 5);
    }
}
