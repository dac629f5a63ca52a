//! The SQL of a plain turn on MySQL and MariaDB. The argument for its correctness is in `plain.rs`.
//!
//! On these databases, no statement can both decide and write. One statement that reads everything
//! costs more than several that read one row each. So session variables store what was read and
//! what was decided. The writing statements do nothing if nothing was decided. The first statement
//! sets all variables, so nothing remains from the previous message. It also reads the clock, after
//! any wait for the row.
//!
//! A claim that is known to hold is the first in the queue, because a mutex has only one holder,
//! and no waiter is ahead of a holder.

use crate::store::plain_words::Plain;
use crate::store::session::SLEEPS;
use crate::store::wire::Statement;

impl Plain {
    /// Creates the statements. `write` translates a statement for the database. `front` is the
    /// number of claims in the front.
    pub(in crate::store) fn of_mysql(
        front: usize,
        write: impl Fn(&'static str, &str) -> Statement,
    ) -> Self {
        Self {
            lock: write("", LOCK),
            stand: write("iii", &stand(front)),
            hand_over: write("tit", HAND_OVER),
            tell: write("", TELL),
            notified_prefix: SLEEPS,
        }
    }
}

/// Locks the lock's row and sets all variables. An aggregate returns a row even if no row matches.
const LOCK: &str = "SELECT MAX(claim), MAX(token), MAX(last_token), MAX(claims), \
     MAX(IF(standing = 1, expires, NULL)), {now}, NULL, NULL, NULL, NULL \
     INTO @leasehold_head, @leasehold_token, @leasehold_last, @leasehold_claims, \
     @leasehold_until, @leasehold_now, @leasehold_mine, @leasehold_next, @leasehold_claim, @leasehold_session \
     FROM {locks} WHERE name = $1 AND kind = 0 AND capacity = 1{for_update}";

/// Returns the statements that join the queue. Arguments: name, claim, minimum token, waiter's
/// lease, lock delay, host, pid, label, session. (INTO assigns each variable before the server
/// computes the next one. So `until` is assigned last, because both are computed from it.)
fn stand(front: usize) -> String {
    let remains = "IF(@leasehold_head = '', MAX(IF(f.standing = 1, f.expires, NULL)), \
                   IF(@leasehold_head <> $2, @leasehold_until, NULL)) - @leasehold_now";
    format!(
        "SELECT IF({remains} > 0 AND COALESCE(MIN(f.expires) > @leasehold_now, TRUE) \
         AND NOT EXISTS (SELECT 1 FROM {{claims}} c FORCE INDEX (by_claim) WHERE c.claim = $2 AND c.name = $1), \
         {{greatest}}(@leasehold_last + 1, @leasehold_now, $3), NULL), {remains} \
         INTO @leasehold_next, @leasehold_until FROM (SELECT c.expires, c.standing FROM {{claims}} c \
         WHERE c.name = $1 AND c.token > @leasehold_token ORDER BY c.token LIMIT {front}) f; \
         INSERT INTO {{claims}} (name, claim, token, weight, standing, since, expires, \
         lock_delay, host, pid, label, session) \
         SELECT $1, $2, @leasehold_next, 1, 0, @leasehold_now, @leasehold_now + $4, \
         $5, $6, $7, $8, $9 FROM DUAL WHERE @leasehold_next IS NOT NULL; \
         UPDATE {{locks}} SET last_token = @leasehold_next, claims = claims + 1 \
         WHERE name = $1 AND @leasehold_next IS NOT NULL; \
         SELECT CAST(@leasehold_next AS SIGNED), CAST(@leasehold_claims + IF(@leasehold_head = '', 0, 1) AS SIGNED), \
         CAST(@leasehold_until AS SIGNED) FROM DUAL WHERE @leasehold_next IS NOT NULL"
    )
}

/// Hands over to the next claim. Arguments: name, claim. `mine` is the token of the leaving claim,
/// whichever row stores it. It is NULL from the second statement on if nothing is to be done.
const HAND_OVER: &str = "SELECT IF(@leasehold_head = '', MAX(c.token), \
     IF(@leasehold_head = $2 AND @leasehold_until > @leasehold_now, @leasehold_token, NULL)) INTO @leasehold_mine \
     FROM {claims} c FORCE INDEX (by_claim) \
     WHERE c.claim = $2 AND c.name = $1 AND c.standing = 1 AND c.expires > @leasehold_now; \
     SELECT MAX(n.token), MAX(n.claim), MAX(n.session), IF(IF(MAX(n.token) IS NULL, \
     @leasehold_claims = IF(@leasehold_head = '', 1, 0), MAX(n.waits)), @leasehold_mine, NULL) \
     INTO @leasehold_next, @leasehold_claim, @leasehold_session, @leasehold_mine \
     FROM (SELECT c.token, c.claim, c.session, c.standing = 0 AND c.expires > @leasehold_now AS waits FROM {claims} c \
     WHERE c.name = $1 AND c.token > @leasehold_mine ORDER BY c.token LIMIT 1) n; \
     DELETE FROM {claims} WHERE name = $1 AND token = @leasehold_mine; \
     UPDATE {claims} SET standing = 1, since = @leasehold_now \
     WHERE name = $1 AND token = @leasehold_next AND @leasehold_mine IS NOT NULL; \
     UPDATE {locks} SET claim = '', token = COALESCE(@leasehold_next - 1, token), \
     claims = claims - IF(@leasehold_head = '', 1, 0) WHERE name = $1 AND @leasehold_mine IS NOT NULL; \
     SELECT COALESCE(@leasehold_claim, ''), CAST(COALESCE(@leasehold_next, 0) AS SIGNED), \
     COALESCE(@leasehold_session, '') FROM DUAL WHERE @leasehold_mine IS NOT NULL";

/// Wakes the client of the next claim. Arguments: this client, and the prefix of the names of
/// clients that can be woken. If no session has that name, the server reports an error and no
/// session is woken.
const TELL: &str = "KILL QUERY IS_USED_LOCK(IF(@leasehold_mine IS NOT NULL AND @leasehold_session <> $1 AND \
     LEFT(@leasehold_session, CHAR_LENGTH($2)) = $2, @leasehold_session, ''))";
