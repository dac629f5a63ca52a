//! The SQL phrases in which the three databases differ.

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
    /// Returns the expression for the database's clock, in µs since 1970.
    ///
    /// The expression is evaluated at the moment of use, not at the start of the transaction.
    pub(crate) const fn now(self) -> &'static str {
        match self {
            Self::Sqlite => "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
            // now() would return the start of the transaction. Both factors have the same type, so
            // that no operator of another schema matches better than the server's own operator.
            Self::Postgres => {
                "CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * \
                 CAST(1000000 AS numeric)) AS BIGINT)"
            }
            // The caller's session has its own time zone, and one local time can be two moments (at
            // the end of summer time). The expression therefore uses the UTC time at which the
            // statement began. It adds the time that the statement has waited since, measured in
            // local time. Whole half hours of that difference are dropped, because they come from
            // the time zone.
            Self::Mysql => {
                "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + \
                 MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED)"
            }
        }
    }

    /// Returns the type to which an integer is cast before it is read.
    pub(crate) const fn bigint(self) -> &'static str {
        match self {
            Self::Sqlite => "INTEGER",
            Self::Postgres => "BIGINT",
            Self::Mysql => "SIGNED",
        }
    }

    /// Returns the character that quotes an identifier.
    pub(crate) const fn quote(self) -> char {
        match self {
            Self::Sqlite | Self::Postgres => '"',
            Self::Mysql => '`',
        }
    }

    /// Returns the clause that makes an `INSERT` skip an existing key.
    ///
    /// The clause is empty if a duplicate causes an error that does not abort the transaction.
    pub(crate) const fn or_nothing(self) -> &'static str {
        match self {
            // On PostgreSQL an error would abort the whole transaction.
            Self::Sqlite | Self::Postgres => " ON CONFLICT (name) DO NOTHING",
            // INSERT IGNORE would hide other errors too. A plain INSERT fails with 1062 only for a
            // duplicate, and its transaction stays usable.
            Self::Mysql => "",
        }
    }

    /// Returns the clause that makes a read see the row's current state instead of the state at the
    /// transaction's start.
    pub(crate) const fn as_it_is(self) -> &'static str {
        match self {
            Self::Sqlite | Self::Postgres => "",
            Self::Mysql => " LOCK IN SHARE MODE",
        }
    }

    /// Returns a name in the form that the tables store.
    pub(crate) fn name(self, name: &Name) -> Value {
        match self {
            Self::Sqlite | Self::Postgres => Value::Text(name.as_str().to_owned()),
            // Bytes, because a text column would compare `job ` and `job` as equal.
            Self::Mysql => Value::Bytes(name.as_str().as_bytes().to_owned()),
        }
    }

    /// Replaces `?` with the database's parameter syntax. leasehold's statements contain no other
    /// question mark.
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

/// Returns one of leasehold's statements with named parameters, for display.
pub(crate) fn fill(sql: &str, names: &[&str]) -> String {
    let mut parts = sql.split('?');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for (part, name) in parts.zip(names) {
        out.push_str(name);
        out.push_str(part);
    }
    out
}
