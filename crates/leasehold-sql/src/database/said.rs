//! What each database's codes of errors mean, in our words.

use super::dialect::Dialect;
use leasehold_core::ErrorKind;
use leasehold_core::ErrorKind::{
    Config, Conflict, Contended, Corrupt, Denied, Full, Timeout, Unreachable,
};

/// The kind, what went wrong, and the hint.
pub(crate) type Described = (ErrorKind, &'static str, &'static str);
type Known = Option<Described>;

/// What is known of this code; of SQLite's, where one code is many errors, also by what it says.
pub(super) fn known(dialect: Dialect, code: &str, says: &str) -> Known {
    match dialect {
        Dialect::Sqlite => sqlite(code.parse().unwrap_or(0), says),
        Dialect::Postgres => postgres(code),
        Dialect::Mysql => mysql(code.parse().unwrap_or(0)),
    }
}

fn sqlite(code: i32, says: &str) -> Known {
    // The low byte is the primary code; 517 is SQLITE_BUSY_SNAPSHOT.
    match (code, code & 0xff) {
        (517, _) => SERIALIZATION,
        (_, 5 | 6) => WAITED,
        (_, 3 | 23) => DENIED,
        (_, 8) => READ_ONLY,
        (_, 13) => FULL,
        (_, 1) if says.contains("no such table") => NO_TABLE,
        _ => None,
    }
}

fn postgres(code: &str) -> Known {
    match code {
        "40P01" => DEADLOCK,
        "40001" => SERIALIZATION,
        "25P02" => FAILED_BEFORE,
        "55P03" | "57014" => WAITED,
        "42P01" | "3F000" => NO_TABLE,
        "42501" | "28000" | "28P01" => DENIED,
        "25006" => READ_ONLY,
        "53100" => FULL,
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04" | "53300" => GONE,
        c if c.starts_with("08") => GONE,
        _ => None,
    }
}

fn mysql(number: u16) -> Known {
    match number {
        1213 => DEADLOCK,
        1020 => SERIALIZATION,
        1205 => WAITED,
        3572 => BUSY,
        1146 | 1051 => NO_TABLE,
        1044 | 1045 | 1142 | 1143 | 1227 => DENIED,
        1290 | 1792 | 1836 => READ_ONLY,
        1021 | 1114 => FULL,
        1040 | 1053 | 1077 | 1152 | 1927 | 2006 | 2013 => GONE,
        _ => None,
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
