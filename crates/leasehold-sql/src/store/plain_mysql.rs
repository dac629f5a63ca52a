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

use super::plain_words::Plain;
use super::procedure::{Procedure, Procedures};
use super::session::SLEEPS;
use super::wire::Statement;

impl Plain {
    /// Creates the statements. `write` translates a statement for the database. `front` is the
    /// number of claims in the front.
    pub(super) fn of_mysql(front: usize, write: impl Fn(&'static str, &str) -> Statement) -> Self {
        Self {
            lock: write("", LOCK),
            stand: write("iii", &stand(front)),
            hand_over: write("tit", HAND_OVER),
            tell: write("", TELL),
            notified_prefix: SLEEPS,
            procedures: Some(procedures(front, write)),
        }
    }
}

/// Returns the procedures. They take the arguments of [`stand`] and [`HAND_OVER`]. The second
/// procedure also takes those of [`TELL`].
fn procedures(front: usize, write: impl Fn(&'static str, &str) -> Statement) -> Procedures {
    let stand = include_str!("procedures/mysql_stand.sql").replace("{front}", &front.to_string());
    let hand_over = include_str!("procedures/mysql_hand_over.sql");
    Procedures::new(
        procedure("{stand}", 9, "iii", &stand, &write),
        procedure("{hand_over}", 4, "tit", hand_over, &write),
        // The permission to create procedures cannot be queried by name.
        write("t", "SELECT 'perhaps'"),
        write("t", "SELECT CAST(COALESCE(@leasehold_left, '') AS CHAR)"),
    )
}

/// Returns a procedure with the statements that find, create and call it. A procedure's text is
/// visible only to its creator and to users that may see all texts. A procedure in the database is
/// ours only if our user created it, because its creator may change it.
fn procedure(
    name: &str,
    takes: usize,
    shape: &'static str,
    create: &str,
    write: impl Fn(&'static str, &str) -> Statement,
) -> Procedure {
    // The variables have the same types as the columns. Variables with another collation cannot be
    // compared with the columns.
    let words = "VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin";
    let create = write("", &create.replace("{words}", words)).sql.trim_end().to_owned();
    let body = create.split_once("SQL SECURITY INVOKER\n").map_or("", |(_, body)| body).to_owned();
    let find = format!(
        "SELECT IF(r.SECURITY_TYPE = 'INVOKER' AND r.DEFINER = CURRENT_USER() \
         AND r.SQL_MODE = @@SESSION.sql_mode, COALESCE(r.ROUTINE_DEFINITION, 'not seen'), 'not ours') \
         FROM information_schema.ROUTINES r WHERE r.ROUTINE_TYPE = 'PROCEDURE' \
         AND r.ROUTINE_SCHEMA = DATABASE() AND r.ROUTINE_NAME = '{name}'"
    );
    let call = format!("CALL {name}({})", vec!["?"; takes].join(", "));
    Procedure { create, body, find: write("t", &find), call: write(shape, &call) }
}

/// Locks the lock's row and sets all variables. An aggregate returns a row even if no row matches.
const LOCK: &str = "SELECT MAX(claim), MAX(token), MAX(last_token), MAX(claims), \
     MAX(IF(standing = 1, expires, NULL)), {now}, NULL, NULL, NULL, NULL \
     INTO @leasehold_head, @leasehold_token, @leasehold_last, @leasehold_claims, \
     @leasehold_until, @leasehold_now, @leasehold_mine, @leasehold_next, @leasehold_claim, @leasehold_session \
     FROM {locks} WHERE name = $1 AND kind = 0 AND capacity = 1{for_update}";

/// Returns the statements that join the queue. Arguments: name, claim, minimum token, waiter's
/// lease, lock delay, host, pid, label, session.
fn stand(front: usize) -> String {
    format!(
        "SELECT IF(@leasehold_head = '', MAX(IF(f.standing = 1, f.expires, NULL)), \
         IF(@leasehold_head <> $2, @leasehold_until, NULL)) - @leasehold_now, \
         COALESCE(MIN(f.expires) > @leasehold_now, TRUE) AND NOT EXISTS (SELECT 1 \
         FROM {{claims}} c FORCE INDEX (by_claim) WHERE c.claim = $2 AND c.name = $1) \
         INTO @leasehold_until, @leasehold_mine FROM (SELECT c.expires, c.standing FROM {{claims}} c \
         WHERE c.name = $1 AND c.token > @leasehold_token ORDER BY c.token LIMIT {front}) f; \
         SET @leasehold_next = IF(@leasehold_mine AND @leasehold_until > 0, \
         {{greatest}}(@leasehold_last + 1, @leasehold_now, $3), NULL); \
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

/// Hands over to the next claim. Arguments: name, claim. (`mine` is the token of the leaving claim,
/// whichever row stores it.)
const HAND_OVER: &str = "SELECT IF(@leasehold_head = '', MAX(c.token), \
     IF(@leasehold_head = $2 AND @leasehold_until > @leasehold_now, @leasehold_token, NULL)) INTO @leasehold_mine \
     FROM {claims} c FORCE INDEX (by_claim) \
     WHERE c.claim = $2 AND c.name = $1 AND c.standing = 1 AND c.expires > @leasehold_now; \
     SELECT c.token, c.claim, c.session, c.standing = 0 AND c.expires > @leasehold_now \
     INTO @leasehold_next, @leasehold_claim, @leasehold_session, @leasehold_last FROM {claims} c \
     WHERE c.name = $1 AND c.token > @leasehold_mine ORDER BY c.token LIMIT 1; \
     SET @leasehold_mine = IF(IF(@leasehold_next IS NULL, \
     @leasehold_claims = IF(@leasehold_head = '', 1, 0), @leasehold_last), @leasehold_mine, NULL); \
     SET @leasehold_next = IF(@leasehold_mine IS NULL, NULL, @leasehold_next), \
     @leasehold_session = IF(@leasehold_mine IS NULL, NULL, @leasehold_session); \
     DELETE FROM {claims} WHERE name = $1 AND token = @leasehold_mine; \
     UPDATE {claims} SET standing = 1, since = @leasehold_now WHERE name = $1 AND token = @leasehold_next; \
     UPDATE {locks} SET claim = '', token = COALESCE(@leasehold_next - 1, token), \
     claims = claims - IF(@leasehold_head = '', 1, 0) WHERE name = $1 AND @leasehold_mine IS NOT NULL; \
     SELECT COALESCE(@leasehold_claim, ''), CAST(COALESCE(@leasehold_next, 0) AS SIGNED), \
     COALESCE(@leasehold_session, '') FROM DUAL WHERE @leasehold_mine IS NOT NULL";

/// Wakes the client of the next claim. Arguments: this client, and the prefix of the names of
/// clients that can be woken. If no session has that name, the server reports an error and no
/// session is woken.
const TELL: &str = "KILL QUERY IS_USED_LOCK(IF(@leasehold_session <> $1 AND \
     LEFT(@leasehold_session, CHAR_LENGTH($2)) = $2, @leasehold_session, ''))";
