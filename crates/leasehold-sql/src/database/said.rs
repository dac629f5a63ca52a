//! What each database's codes of errors mean, in our words.

use super::dialect::Dialect;
use leasehold_core::ErrorKind;
use leasehold_core::ErrorKind::{Config, Conflict, Contended, Denied, Full, Timeout, Unreachable};

type Known = Option<(ErrorKind, &'static str)>;

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
