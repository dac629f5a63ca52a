//! What each database's codes of errors mean, in our words.

use super::codes::{self, Class};
use super::dialect::Dialect;
use leasehold_core::ErrorKind;
use leasehold_core::ErrorKind::{Config, Conflict, Contended, Denied, Full, Timeout, Unreachable};

type Known = Option<(ErrorKind, &'static str)>;

/// What is known of this code; of SQLite's, where one code is many errors, also by what it says.
pub(super) fn known(dialect: Dialect, code: &str, says: &str) -> Known {
    let class = match dialect {
        Dialect::Sqlite => codes::sqlite(code.parse().unwrap_or(0)),
        Dialect::Postgres => codes::postgres(code),
        Dialect::Mysql => codes::mysql(code.parse().unwrap_or(0), ""),
    };
    match class {
        Class::Deadlock => DEADLOCK,
        Class::Serialization => SERIALIZATION,
        Class::FailedBefore => FAILED_BEFORE,
        Class::Waited => WAITED,
        Class::Busy => BUSY,
        Class::NoTable if dialect == Dialect::Sqlite && !says.contains("no such table") => None,
        Class::NoTable if code == "42703" || code == "1054" => None,
        Class::NoTable | Class::NoSchema => NO_TABLE,
        Class::Refused | Class::Denied => DENIED,
        Class::ReadOnly => READ_ONLY,
        Class::Full => FULL,
        Class::Gone | Class::StoodStill | Class::NoRoom => GONE,
        Class::Unavailable => UNAVAILABLE,
        Class::Exists
        | Class::Stale
        | Class::NoDatabase
        | Class::Unprepared
        | Class::TooLong
        | Class::Damaged
        | Class::CannotOpen
        | Class::Permanent
        | Class::Unknown => None,
    }
}

const DEADLOCK: Known =
    Some((Conflict, "a deadlock was broken: roll back and run the transaction again"));
const SERIALIZATION: Known = Some((
    Conflict,
    "another transaction changed what this one has seen: roll back and run it again",
));
const FAILED_BEFORE: Known =
    Some((Conflict, "an earlier statement of this transaction failed: roll back and run it again"));
const WAITED: Known =
    Some((Timeout, "another transaction holds it and did not finish in time: retry later"));
const BUSY: Known = Some((Contended, "another transaction holds it: retry later"));
const NO_TABLE: Known =
    Some((Config, "a table is missing: run leasehold::database::install, or what schema() prints"));
const DENIED: Known =
    Some((Denied, "the database refuses this user; grant SELECT, INSERT, UPDATE and DELETE"));
const READ_ONLY: Known =
    Some((Denied, "the database or the transaction is read-only; use the primary"));
const FULL: Known = Some((Full, "the database has no room left"));
const GONE: Known =
    Some((Unreachable, "the database ended the connection; run the transaction again"));
const UNAVAILABLE: Known =
    Some((Unreachable, "the database cannot serve this now; run the transaction again"));
