//! The SQL of a plain turn on PostgreSQL. The argument for its correctness is in `plain.rs`.

use crate::store::plain_words::Plain;
use crate::store::session::LISTENS;
use crate::store::wire::Statement;

impl Plain {
    /// Creates the statements. `write` translates a statement for the database. `front` is the
    /// number of claims in the front.
    pub(in crate::store) fn of_postgres(
        front: usize,
        write: impl Fn(&'static str, &str) -> Statement,
    ) -> Self {
        Self {
            lock: write("", "SELECT 1 FROM {locks} WHERE name = $1{for_update}"),
            stand: write("iii", &stand(front)),
            hand_over: write("tit", &hand_over()),
            tell: write("", TELL),
            notified_prefix: LISTENS,
        }
    }
}

/// Returns the statement that joins the queue. Arguments: name, claim, minimum token, waiter's
/// lease, lock delay, host, pid, label, session.
fn stand(most: usize) -> String {
    format!(
        "WITH n AS MATERIALIZED (SELECT {{now}} AS now), \
         f AS MATERIALIZED ({front} LIMIT {most}), \
         p AS MATERIALIZED (SELECT {{greatest}}(l.last_token + 1, n.now, $3) AS token, n.now, \
         l.claims + CASE WHEN l.claim = '' THEN 0 ELSE 1 END AS ahead, \
         CASE WHEN l.claim = '' THEN m.expires ELSE l.expires END - n.now AS remains \
         FROM {{locks}} l CROSS JOIN n LEFT JOIN f m ON m.nth = 1 \
         WHERE l.name = $1 AND l.kind = 0 AND l.capacity = 1 AND CASE WHEN l.claim = '' \
         THEN m.standing = 1 AND m.expires > n.now \
         ELSE l.claim <> $2 AND l.standing = 1 AND l.expires > n.now END \
         AND NOT EXISTS (SELECT 1 FROM f WHERE f.expires <= n.now) \
         AND NOT EXISTS (SELECT 1 FROM {{claims}} c WHERE c.name{{apart}} = $1 AND c.claim = $2)), \
         u AS (UPDATE {{locks}} l SET last_token = p.token, claims = l.claims + 1 FROM p \
         WHERE l.name = $1), \
         i AS (INSERT INTO {{claims}} (name, claim, token, weight, standing, since, expires, \
         lock_delay, host, pid, label, session) SELECT $1, $2, p.token, 1, 0, p.now, p.now + $4, \
         $5, $6, $7, $8, $9 FROM p) \
         SELECT token, ahead, remains FROM p",
        front = front(),
    )
}

/// Returns the statement that hands over. Arguments: name, claim.
fn hand_over() -> String {
    format!(
        "WITH n AS MATERIALIZED (SELECT {{now}} AS now), \
         f AS MATERIALIZED ({front} LIMIT 2), \
         t AS MATERIALIZED (SELECT n.now, m.token AS mine, w.token AS next, w.claim, w.session \
         FROM {{locks}} l CROSS JOIN n LEFT JOIN f m ON l.claim = '' AND m.nth = 1 \
         LEFT JOIN f w ON w.nth = CASE WHEN l.claim = '' THEN 2 ELSE 1 END \
         WHERE l.name = $1 AND l.kind = 0 AND l.capacity = 1 AND CASE WHEN l.claim = '' \
         THEN m.claim = $2 AND m.standing = 1 AND m.expires > n.now \
         ELSE l.claim = $2 AND l.standing = 1 AND l.expires > n.now END \
         AND CASE WHEN w.token IS NULL \
         THEN l.claims = CASE WHEN l.claim = '' THEN 1 ELSE 0 END \
         ELSE w.standing = 0 AND w.expires > n.now END), \
         d AS (DELETE FROM {{claims}} c USING t WHERE c.name = $1 AND c.token = t.mine), \
         w AS (UPDATE {{claims}} c SET standing = 1, since = t.now FROM t \
         WHERE c.name = $1 AND c.token = t.next), \
         u AS (UPDATE {{locks}} l SET claim = '', token = coalesce(t.next - 1, l.token), \
         claims = l.claims - CASE WHEN t.mine IS NULL THEN 0 ELSE 1 END FROM t WHERE l.name = $1) \
         SELECT coalesce(claim, ''), coalesce(next, 0), coalesce(session, ''), \
         set_config('leasehold.to_notify', coalesce(session || ' ' || claim || ' ' || next::text, ''), false) \
         FROM t",
        front = front(),
    )
}

/// Returns the query for the first claims that have rows of their own, in order. The caller adds a
/// LIMIT. The tokens of these claims are greater than the token in the lock's row.
fn front() -> &'static str {
    "SELECT c.token, c.claim, c.standing, c.expires, c.session, \
     row_number() OVER (ORDER BY c.token) AS nth FROM {claims} c WHERE c.name = $1 \
     AND c.token > (SELECT h.token FROM {locks} h WHERE h.name = $1) ORDER BY c.token"
}

/// Notifies the client of the next claim. Arguments: this client, and the prefix of the names of
/// clients that listen. (OFFSET prevents the variable from being read again after it was emptied.)
const TELL: &str = "SELECT set_config('synchronous_commit', 'off', true), set_config('leasehold.to_notify', '', false), \
     CASE WHEN starts_with(n.session, $2) AND n.session <> $1 \
     THEN pg_notify(n.session, substr(n.message, length(n.session) + 2)) END \
     FROM (SELECT t.message, split_part(t.message, ' ', 1) AS session \
     FROM (SELECT current_setting('leasehold.to_notify', true) AS message OFFSET 0) t OFFSET 0) n \
     WHERE n.message <> ''";
