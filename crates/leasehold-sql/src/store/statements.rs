//! The SQL, written once. `?` is an argument, `{now}` the server's clock in microseconds,
//! `{greatest}` the larger of two.

use super::url::{Dialect, SqlUrl};
use super::wire::{Arg, Statement};

/// How many claims the front is: enough for the readers and permits of most locks, and for a few
/// dead waiters.
pub(super) const FRONT: usize = 16;

/// A statement that changes one row.
pub(super) type Write<'a> = (&'a Statement, Vec<Arg>);

/// The same for each transaction behind a pooler, where the session is not ours: sent with the BEGIN,
/// so that it costs no round trip.
pub(super) const BEGIN_POOLED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
     SET LOCAL idle_in_transaction_session_timeout = 1000; SET LOCAL lock_timeout = 5000";

/// All statements of one store.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) begin: &'static str,
    /// Whether several writes can be one statement ([`joined`]).
    pub(super) joins_writes: bool,
    /// Takes a free lock. On SQLite and PostgreSQL also one that never was; they answer the token.
    pub(super) take: Statement,
    /// Takes a lock that never was, where `take` cannot (MySQL); fails if it is there.
    pub(super) take_new: Statement,
    /// Releases a lock that nobody waits for.
    pub(super) release: Statement,
    /// Makes a lock's row.
    pub(super) create: Statement,
    /// Locks a lock's row.
    pub(super) lock: Statement,
    /// The clock, and the claims of a lock: at least one row.
    pub(super) claims: Statement,
    /// The same of the front of the queue, and of one claim wherever it stands; rows may be twice.
    pub(super) front: Statement,
    /// The clock, a lock's row and its claims as of one moment.
    pub(super) read: Statement,
    /// The same of the front of the queue, and of one claim wherever it stands; rows may be twice.
    pub(super) look: Statement,
    /// The same as `read` for many locks, whose names are given as JSON.
    pub(super) read_many: Statement,
    /// The same for all locks in use whose names are not before one.
    pub(super) list: Statement,
    pub(super) write_lock: Statement,
    pub(super) insert_claim: Statement,
    pub(super) delete_claim: Statement,
    /// Writes what never shortens a claim's place.
    pub(super) extend_claim: Statement,
    /// Writes a claim's new standing and end.
    pub(super) turn_claim: Statement,
    /// Renew what holds in locks' rows, and what stands among the claims.
    pub(super) renew_locks: Many,
    pub(super) renew_claims: Many,
    /// Which of our waiters hold.
    pub(super) granted: Statement,
    pub(super) version: Statement,
    /// Fails if a table lacks a column; the clock, and the row that says when somebody swept last.
    pub(super) probe: Statement,
    /// Says that it is swept now, unless it was less than so long ago. The row has no name: no lock
    /// has that, and nobody sees it, since it is free.
    pub(super) sweeper: Statement,
    /// The next names after one.
    pub(super) page: Statement,
    /// The locks between two names in which somebody has been dead for a day.
    pub(super) abandoned: Statement,
    /// Forgets the locks between two names that nobody used for a day.
    pub(super) sweep: Statement,
}

/// How many names are swept at once.
pub(super) const PAGE: usize = 500;

/// Renewals of many at once, given as JSON; they tell the claims that they renewed (and the tokens
/// of those in locks' rows). What somebody has locked is left to the slow path where that can be
/// told: one stopped client must not hold up the renewals of all.
#[derive(Debug)]
pub(super) struct Many {
    /// Finds and locks what can be renewed, where `renew` cannot tell; then `renew` is for those.
    pub(super) find: Option<Statement>,
    pub(super) renew: Statement,
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
        Self {
            begin: begin(url),
            joins_writes: joins_writes(d),
            take: say("i", take(d)),
            take_new: say("", take_new(d)),
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
                     (SELECT f.* FROM (SELECT * FROM {{claims}} WHERE name = ? ORDER BY token \
                     LIMIT {FRONT}) f UNION ALL SELECT * FROM {{claims}} WHERE name = ? AND claim = ?) c \
                     ON 1 = 1 ORDER BY c.token"
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
                     (SELECT f.* FROM (SELECT * FROM {{claims}} WHERE name = ? ORDER BY token \
                     LIMIT {FRONT}) f UNION ALL SELECT * FROM {{claims}} WHERE name = ? AND claim = ?) c \
                     ON c.name = l.name WHERE l.name = ? ORDER BY c.token"
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
            renew_locks: many(url, renew_locks(d)),
            renew_claims: many(url, renew_claims(d)),
            granted: say(
                "ti",
                "SELECT claim, token FROM {claims} \
                 WHERE session = ? AND standing = 1 AND expires > {now}",
            ),
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

fn begin(url: &SqlUrl) -> &'static str {
    match url.dialect {
        // Deferred, a transaction that reads and then writes fails without waiting.
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "BEGIN IMMEDIATE",
        // Each statement must see what was committed before it.
        #[cfg(feature = "postgres")]
        Dialect::Postgres if !url.pooler => "BEGIN ISOLATION LEVEL READ COMMITTED",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => BEGIN_POOLED,
        #[cfg(feature = "mysql")]
        Dialect::MySql => "START TRANSACTION",
    }
}

/// Several writes, of rows of their own each, as one statement that tells how many rows each has
/// changed. All see what was there before the statement, and none sees another's.
pub(super) fn joined(writes: Vec<Write<'_>>) -> (Statement, Vec<Arg>) {
    let (mut parts, mut counts, mut shape, mut all) = (vec![], vec![], "", vec![]);
    for (i, (statement, args)) in writes.into_iter().enumerate() {
        parts.push(format!("w{i} AS ({} RETURNING 1)", renumbered(&statement.sql, all.len())));
        counts.push(format!("(SELECT count(*) FROM w{i})"));
        shape = COUNTS.get(..=i).unwrap_or(COUNTS);
        all.extend(args);
    }
    let sql = format!("WITH {} SELECT {}", parts.join(", "), counts.join(", "));
    (Statement { sql: sql.into(), shape }, all)
}

/// As many numbers as may be told.
const COUNTS: &str = "iiiiiiii";

/// The same statement with each `$n` raised by so many.
fn renumbered(sql: &str, by: usize) -> String {
    let mut parts = sql.split('$');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, rest) = part.split_at(end);
        let number = number.parse::<usize>().unwrap_or_default() + by;
        text.push_str(&format!("${number}{rest}"));
    }
    text
}

#[allow(clippy::match_like_matches_macro, reason = "depends on the features")]
fn joins_writes(dialect: Dialect) -> bool {
    match dialect {
        #[cfg(feature = "postgres")]
        Dialect::Postgres => true,
        _ => false,
    }
}

fn many(url: &SqlUrl, [find, renew]: [&str; 2]) -> Many {
    let say = |shape, sql: &str| Statement { sql: write(url, sql).into(), shape };
    match find {
        "" => Many { find: None, renew: say("tii", renew) },
        find => Many { find: Some(say("tii", find)), renew: say("", renew) },
    }
}

/// The JSON as rows, in MySQL's words. The names are in hexadecimal: they are bytes there. It is a
/// derived table, since MySQL (and not MariaDB) takes a JSON_TABLE that stands beside a table for one
/// that `FOR UPDATE` is to lock too, and refuses that with error 3569.
#[cfg(feature = "mysql")]
macro_rules! json_table {
    () => {
        "(SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (name VARCHAR(1024) PATH '$.name', \
         claim VARCHAR(32) PATH '$.claim', lease BIGINT PATH '$.lease', \
         wait BIGINT PATH '$.wait')) j) r"
    };
}

/// The locks whose names are in a JSON array, found one by one.
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

fn renew_locks(dialect: Dialect) -> [&'static str; 2] {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => [
            "",
            "UPDATE {locks} AS l SET expires = max(l.expires, {now} + s.lease) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease FROM json_each(?)) s \
             WHERE l.name = s.name AND l.claim = s.claim AND l.standing = 1 AND l.expires > {now} \
             RETURNING claim, token, standing",
        ],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => [
            "",
            "UPDATE {locks} AS l SET expires = greatest(l.expires, {now} + s.lease) \
             FROM (SELECT k.name, r.lease FROM {locks} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.standing = 1 AND l.expires > {now} \
             RETURNING l.claim, l.token, l.standing",
        ],
        // By that index, or it would wait for whatever rows somebody has locked.
        #[cfg(feature = "mysql")]
        Dialect::MySql => [
            concat!(
                "SELECT l.claim, l.token, l.standing FROM ",
                json_table!(),
                " STRAIGHT_JOIN {locks} l FORCE INDEX (PRIMARY) ON l.name = UNHEX(r.name) AND l.claim = r.claim \
                 WHERE l.standing = 1 AND l.expires > {now} FOR UPDATE SKIP LOCKED"
            ),
            concat!(
                "UPDATE ",
                json_table!(),
                " STRAIGHT_JOIN {locks} l FORCE INDEX (PRIMARY) ON l.name = UNHEX(r.name) AND l.claim = r.claim \
                 SET l.expires = GREATEST(l.expires, {now} + r.lease)"
            ),
        ],
    }
}

fn renew_claims(dialect: Dialect) -> [&'static str; 2] {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => [
            "",
            "UPDATE {claims} AS l SET expires = max(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN s.lease ELSE s.wait END) \
             FROM (SELECT value ->> 'name' AS name, value ->> 'claim' AS claim, \
             value ->> 'lease' AS lease, value ->> 'wait' AS wait FROM json_each(?)) s \
             WHERE l.name = s.name AND l.claim = s.claim AND l.standing < 2 AND l.expires > {now} \
             RETURNING claim, token, standing",
        ],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => [
            "",
            "UPDATE {claims} AS l SET expires = greatest(l.expires, {now} + \
             CASE l.standing WHEN 1 THEN s.lease ELSE s.wait END) \
             FROM (SELECT k.name, k.token, r.lease, r.wait FROM {claims} k JOIN \
             json_to_recordset(?::json) AS r(name text, claim text, lease bigint, wait bigint) \
             ON k.name = r.name AND k.claim = r.claim FOR UPDATE OF k SKIP LOCKED) s \
             WHERE l.name = s.name AND l.token = s.token AND l.standing < 2 \
             AND l.expires > {now} RETURNING l.claim, l.token, l.standing",
        ],
        // By that index, or it would look at, and lock, the rest of the queue for each of them.
        #[cfg(feature = "mysql")]
        Dialect::MySql => [
            concat!(
                "SELECT l.claim, l.token, l.standing FROM ",
                json_table!(),
                " STRAIGHT_JOIN {claims} l FORCE INDEX (by_claim) \
                 ON l.claim = r.claim AND l.name = UNHEX(r.name) \
                 WHERE l.standing < 2 AND l.expires > {now} FOR UPDATE SKIP LOCKED"
            ),
            concat!(
                "UPDATE ",
                json_table!(),
                " STRAIGHT_JOIN {claims} l FORCE INDEX (by_claim) \
                 ON l.claim = r.claim AND l.name = UNHEX(r.name) \
                 SET l.expires = GREATEST(l.expires, {now} + \
                 CASE l.standing WHEN 1 THEN r.lease ELSE r.wait END) WHERE l.standing < 2"
            ),
        ],
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
        // The inner SELECTs read the clock once for both columns. Nothing but the row itself lets a
        // claim in, so that a statement that had to wait for it judges what it then finds. That a row
        // is seen which is taken, perhaps by now no longer, only keeps it from trying: on PostgreSQL
        // a try in vain would lock the row, and that is written and flushed.
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

/// Arguments: name, kind, capacity, floor of the token, claim, weight, lease, lock_delay, host, pid,
/// label. MySQL alone needs it; there a value may name the columns that stand before it.
fn take_new(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, weight, \
             standing, since, expires, lock_delay, host, pid, label) VALUES \
             (?, ?, ?, LAST_INSERT_ID(GREATEST({now}, ?)), 0, ?, last_token, ?, 1, {now}, \
             since + ?, ?, ?, ?, ?)"
        }
        _ => "",
    }
}

fn create(dialect: Dialect) -> &'static str {
    match dialect {
        // Not IGNORE, which would cut a name to the length of a column that somebody made too short.
        // That the row is there by now is a conflict: the section begins again.
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "INSERT INTO {locks} (name, kind, capacity, last_token, claims, claim, token, \
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

#[cfg(all(test, feature = "mysql"))]
mod tests {
    use super::*;

    /// MySQL refuses a JSON_TABLE beside a table of which rows are locked; MariaDB does not.
    #[test]
    fn f02_each_json_table_is_a_derived_table() {
        let sql = Statements::of(&SqlUrl::parse("mysql://h/d").unwrap());
        let many = [&sql.renew_locks, &sql.renew_claims];
        let mut all: Vec<&Statement> = many.iter().filter_map(|many| many.find.as_ref()).collect();
        all.extend(many.iter().map(|many| &many.renew));
        all.push(&sql.read_many);
        assert_eq!(all.len(), 5);
        for statement in all {
            let (before, after) = statement.sql.split_once("JSON_TABLE(").expect("one");
            let derived = ["(SELECT * FROM ", "(SELECT UNHEX(j.name) AS name FROM "]
                .iter()
                .any(|select| before.ends_with(select));
            assert!(derived && after.contains(" j) "), "{}", statement.sql);
        }
    }
}
