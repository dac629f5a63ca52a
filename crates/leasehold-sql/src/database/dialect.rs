//! The few words in which the three databases differ.

use super::value::Value;
use leasehold_core::Name;

/// A SQL dialect. It determines the parameter syntax and the meaning of error codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dialect {
    /// SQLite. Parameters are `?`; an error's code is the extended result code, `"517"`.
    Sqlite,
    /// PostgreSQL. Parameters are `$1`, `$2`, …; an error's code is the SQLSTATE, `"40001"`.
    Postgres,
    /// MySQL and MariaDB. Parameters are `?`; an error's code is the server's number, `"1213"`.
    Mysql,
}

impl Dialect {
    /// The database's clock at the moment of evaluation, in µs since 1970, never frozen at the
    /// transaction's start.
    pub(crate) const fn now(self) -> &'static str {
        match self {
            Self::Sqlite => "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
            // now() would be the start of the transaction. Both factors are of one type, so that no operator of
            // another schema fits better than the server's.
            Self::Postgres => {
                "CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * \
                 CAST(1000000 AS numeric)) AS BIGINT)"
            }
            // The caller's session has a time zone of its own, and a local time may be two moments (when
            // summer ends). So: UTC as the statement began, and how long it has waited since, by the local
            // time, of which whole half-hours are the zone's.
            Self::Mysql => {
                "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + \
                 MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED)"
            }
        }
    }

    /// The type that a whole number is cast to before it is read.
    pub(crate) const fn bigint(self) -> &'static str {
        match self {
            Self::Sqlite => "INTEGER",
            Self::Postgres => "BIGINT",
            Self::Mysql => "SIGNED",
        }
    }

    /// What quotes an identifier.
    pub(crate) const fn quote(self) -> char {
        match self {
            Self::Sqlite | Self::Postgres => '"',
            Self::Mysql => '`',
        }
    }

    /// What an `INSERT` of a key that may exist ends with; empty where the duplicate is an error that does
    /// not end the transaction.
    pub(crate) const fn or_nothing(self) -> &'static str {
        match self {
            // An error would end the whole transaction on PostgreSQL.
            Self::Sqlite | Self::Postgres => " ON CONFLICT (name) DO NOTHING",
            // INSERT IGNORE would swallow real errors too; a plain INSERT fails with 1062 for a duplicate
            // and nothing else, and its transaction lives on.
            Self::Mysql => "",
        }
    }

    /// What makes a read see the row as it is now, not as it was at the transaction's start.
    pub(crate) const fn as_it_is(self) -> &'static str {
        match self {
            Self::Sqlite | Self::Postgres => "",
            Self::Mysql => " LOCK IN SHARE MODE",
        }
    }

    /// A name as the tables store it.
    pub(crate) fn name(self, name: &Name) -> Value {
        match self {
            Self::Sqlite | Self::Postgres => Value::Text(name.as_str().to_owned()),
            // Bytes: a text column would compare `job ` and `job` as equal.
            Self::Mysql => Value::Bytes(name.as_str().as_bytes().to_owned()),
        }
    }

    /// `?` as the database has it. Our statements hold no other question mark.
    pub(crate) fn spell(self, sql: &str) -> String {
        if self != Self::Postgres {
            return sql.to_owned();
        }
        let mut parts = sql.split('?');
        let mut out = parts.next().unwrap_or_default().to_owned();
        for (n, part) in parts.enumerate() {
            out.push_str(&format!("${}{part}", n + 1));
        }
        out
    }
}

/// A statement of ours with its parameters by name, for people.
pub(crate) fn fill(sql: &str, names: &[&str]) -> String {
    let mut parts = sql.split('?');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for (part, name) in parts.zip(names) {
        out.push_str(name);
        out.push_str(part);
    }
    out
}
