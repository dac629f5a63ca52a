//! The SQL of a plain turn on MySQL and MariaDB (`plain.rs` says why it is right).
//!
//! No statement there both decides and writes, and one that reads all that is to be known costs more than
//! several that read a row each. So what is read, and what is decided, is kept in variables of the
//! session; the statements that write do nothing where nothing was decided. The first one sets them all, so
//! nothing is left over from the message before. The clock is read by the same statement, after the row
//! that it had to wait for.
//!
//! Who is known to hold is known to be the first: of a mutex nobody else holds, and nobody waits before
//! who holds.

use super::plain_words::Plain;
use super::procedure::{Procedure, Procedures};
use super::session::SLEEPS;
use super::wire::Statement;

impl Plain {
    /// `write` puts a statement in the database's words, `front` is how many claims the front is.
    pub(super) fn of_mysql(front: usize, write: impl Fn(&'static str, &str) -> Statement) -> Self {
        Self {
            lock: write("", LOCK),
            stand: write("iii", &stand(front)),
            hand_over: write("tit", HAND_OVER),
            tell: write("", TELL),
            told: SLEEPS,
            procedures: Some(procedures(front, write)),
        }
    }
}

/// They take the arguments of the two above, `hand_over` those of [`TELL`] besides.
fn procedures(front: usize, write: impl Fn(&'static str, &str) -> Statement) -> Procedures {
    let stand = include_str!("procedures/mysql_stand.sql").replace("{front}", &front.to_string());
    let hand_over = include_str!("procedures/mysql_hand_over.sql");
    Procedures::new(
        procedure("{stand}", 9, "iii", &stand, &write),
        procedure("{hand_over}", 4, "tit", hand_over, &write),
        // There is no right to make one that could be asked for by name.
        write("t", "SELECT 'perhaps'"),
        write("t", "SELECT CAST(COALESCE(@leasehold_left, '') AS CHAR)"),
    )
}

/// Its text is seen by who made it, and by who may see all; and it is ours only if we made it, for its maker may change
/// it.
fn procedure(
    name: &str,
    takes: usize,
    shape: &'static str,
    create: &str,
    write: impl Fn(&'static str, &str) -> Statement,
) -> Procedure {
    // As the columns are: of variables in another order nothing can be compared with them.
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

/// An aggregate answers a row also where there is none: so it sets all.
const LOCK: &str = "SELECT MAX(claim), MAX(token), MAX(last_token), MAX(claims), \
     MAX(IF(standing = 1, expires, NULL)), {now}, NULL, NULL, NULL, NULL \
     INTO @leasehold_head, @leasehold_token, @leasehold_last, @leasehold_claims, \
     @leasehold_until, @leasehold_now, @leasehold_mine, @leasehold_next, @leasehold_claim, @leasehold_session \
     FROM {locks} WHERE name = $1 AND kind = 0 AND capacity = 1{for_update}";

/// Arguments: name, claim, floor of the token, lease of a waiter, lock-delay, host, pid, label, session.
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

/// Arguments: name, claim. (`mine` is the token of who leaves, wherever its row is.)
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

/// Arguments: this client, and what the names of those begin with who can be woken. Nobody is woken
/// where nobody has that name, and the server says so.
const TELL: &str = "KILL QUERY IS_USED_LOCK(IF(@leasehold_session <> $1 AND \
     LEFT(@leasehold_session, CHAR_LENGTH($2)) = $2, @leasehold_session, ''))";
