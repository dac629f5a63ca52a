//! Error kinds, messages and hints for each database's error codes.

use super::dialect::Dialect;
use leasehold_core::ErrorKind;
use leasehold_core::ErrorKind::{
    Config, Conflict, Contended, Corrupt, Denied, Full, Timeout, Unreachable,
};
use leasehold_sql::codes::{self, Class};

/// The kind of an error, what went wrong, and a hint.
pub(crate) type Described = (ErrorKind, &'static str, &'static str);
type Known = Option<Described>;

/// Returns the description of the error with this code, or `None` if there is no specific one. Some
/// codes of SQLite cover several errors, so the message `says` is used too.
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

const AGAIN: &str = "roll back and run the transaction again";

const DEADLOCK: Known =
    Some((Conflict, "the database stopped this transaction to resolve a deadlock", AGAIN));
const SERIALIZATION: Known =
    Some((Conflict, "another transaction changed data that this one has read", AGAIN));
const FAILED_BEFORE: Known =
    Some((Conflict, "an earlier statement of this transaction failed", AGAIN));
const WAITED: Known = Some((
    Timeout,
    "another transaction holds the row's lock and did not finish in time",
    "retry later",
));
const BUSY: Known = Some((Contended, "another transaction holds the row's lock", "retry later"));
const NO_TABLE: Known = Some((
    Config,
    "a table is missing",
    "call leasehold::database::install, or run the statements of leasehold::database::schema",
));
const DENIED: Known = Some((
    Denied,
    "the database denied access to this user",
    "GRANT SELECT, INSERT, UPDATE, DELETE on the tables to this user",
));
const READ_ONLY: Known = Some((
    Denied,
    "the database or the transaction is read-only",
    "connect to the primary, and begin a read-write transaction",
));
const FULL: Known = Some((Full, "the database's disk is full", "free disk space"));
const GONE: Known =
    Some((Unreachable, "the database closed the connection", "run the transaction again"));

const UNAVAILABLE: Known = Some((
    Unreachable,
    "the database cannot process the request at the moment",
    "run the transaction again",
));

pub(crate) const REJECTED: Described = (
    Config,
    "the database rejected the statement",
    "fix the problem that the database's message names",
);
pub(crate) const NO_RESPONSE: Described = (Unreachable, "the database does not respond", "retry");
pub(crate) const OTHER_TABLE: Described = (
    Corrupt,
    "the table differs from the one that leasehold created",
    "compare it with the output of leasehold::database::schema",
);
