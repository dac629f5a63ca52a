//! The meaning of each database's error codes, with one table per database.
//!
//! PostgreSQL codes that are not listed individually are classified by their first two characters.
//! Unlisted MySQL and MariaDB numbers are classified by their SQLSTATE, and SQLite codes by the
//! primary code. A code that matches no rule is [`Class::Unknown`]. leasehold's stores treat it as
//! a transient error, retry, and report it. An error is classified as permanent only if a retry
//! cannot help, because a waiter that gives up loses its queue position.

/// The meaning of an error for the code that handles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The transaction was rolled back to break a deadlock.
    Deadlock,
    /// The transaction was rolled back because another transaction changed data that this one had
    /// read. The other transaction may have run on another node.
    Serialization,
    /// A wait timed out, or a limit ended the statement.
    Waited,
    /// Another session holds the lock, and the statement was sent with `NOWAIT`.
    Busy,
    /// An earlier statement of the transaction failed.
    FailedBefore,
    /// The transaction was idle for too long and was rolled back together with its session.
    StoodStill,
    /// The row or the table already exists.
    Exists,
    /// The connection is closed, or is about to be.
    Gone,
    /// The prepared statement no longer matches the tables.
    Stale,
    /// The server cannot serve this request, or any request, at this time. It is starting,
    /// stopping, short of memory or outside of its cluster, or the proxy in front has no server.
    Unavailable,
    /// The connection limit is reached.
    NoRoom,
    /// The server accepts no writes.
    ReadOnly,
    /// The disk or the table is full.
    Full,
    /// The user name or the password was rejected.
    Refused,
    /// A permission is missing.
    Denied,
    NoDatabase,
    NoSchema,
    NoTable,
    /// The named prepared statement is missing or already exists, because a pooler shares sessions.
    Unprepared,
    /// The message is longer than the server accepts.
    TooLong,
    /// The data on disk is damaged.
    Damaged,
    /// The file cannot be opened.
    CannotOpen,
    /// The statement is rejected no matter when it is sent.
    Permanent,
    /// The code is in no table.
    Unknown,
}

/// Classifies PostgreSQL's SQLSTATE.
pub fn postgres(code: &str) -> Class {
    use Class::*;
    match code {
        "40P01" => Deadlock,
        "55P03" | "57014" => Waited,
        "23505" | "42P07" | "42710" | "42P06" | "42723" => Exists,
        "25006" => ReadOnly,
        "25P02" => FailedBefore,
        "25P03" | "25P04" => StoodStill,
        "0A000" => Stale,
        "26000" | "42P05" => Unprepared,
        "42501" => Denied,
        "3D000" => NoDatabase,
        "3F000" => NoSchema,
        "42P01" | "42703" => NoTable,
        "53300" => NoRoom,
        "53100" => Full,
        "57P01" | "57P02" | "57P03" | "57P04" | "57P05" => Gone,
        "XX001" | "XX002" => Damaged,
        _ => match code.get(..2).unwrap_or_default() {
            "08" => Gone,
            "40" => Serialization,
            "28" => Refused,
            // The session is not in the expected state, so a new session helps.
            "25" => FailedBefore,
            // Resources, objects in use, operator, system, configuration file, internal errors.
            "53" | "55" | "57" | "58" | "72" | "F0" | "XX" => Unavailable,
            "03" | "0A" | "0B" | "0F" | "0L" | "0P" | "0Z" | "20" | "21" | "22" | "23" | "24"
            | "27" | "2B" | "2D" | "2F" | "34" | "38" | "39" | "3B" | "42" | "44" | "54" | "HV"
            | "P0" => Permanent,
            _ => Unknown,
        },
    }
}

/// Classifies the error number of MySQL, MariaDB or ProxySQL, with the SQLSTATE if it is known.
pub fn mysql(number: u16, state: &str) -> Class {
    use Class::*;
    match number {
        1213 => Deadlock,
        // 1180: the commit failed. 3101: Group Replication rolled it back. 1412 and 1020: the data
        // changed after it was read.
        1020 | 1180 | 1412 | 1637 | 3101 => Serialization,
        1205 | 1969 | 3024 | 1317 => Waited,
        3572 => Busy,
        1062 | 1050 | 1304 | 1061 => Exists,
        1053
        | 1077
        | 1079
        | 1080
        | 1152
        | 1184
        | 1158..=1161
        | 1927
        | 2000..=2100
        | 3169
        | 4031 => Gone,
        1615 => Stale,
        // Memory, threads and files. Also: node not prepared (Galera), server offline, hook of
        // Group Replication, blocked host.
        1015 | 1016 | 1018 | 1023 | 1024 | 1026 | 1028 | 1030 | 1037 | 1038 | 1041 | 1047
        | 1105 | 1129 | 1135 | 1188 | 1189 | 1206 | 1218 | 1223 | 1297 | 1815 | 3032 | 3100
        | 3168 => Unavailable,
        // ProxySQL.
        9000..=9999 => Unavailable,
        1040 | 1203 | 1226 => NoRoom,
        1290 | 1792 | 1836 => ReadOnly,
        1021 | 1114 => Full,
        1045 | 1130 | 1156 | 1251 | 1524 | 1698 | 1820 | 1862 | 3118 | 4151 => Refused,
        1044 | 1142 | 1143 | 1227 | 1370 | 1410 => Denied,
        1046 | 1049 => NoDatabase,
        1051 | 1054 | 1146 => NoTable,
        1153 | 1301 => TooLong,
        1034 | 1035 | 1194 | 1195 | 1712 | 1877 => Damaged,
        1193 | 1235 | 1305 | 1064 | 1149 | 1406 | 1264 | 1366 | 1048 | 1364 => Permanent,
        _ => match state.get(..2).unwrap_or_default() {
            "08" => Gone,
            "40" => Serialization,
            "28" => Refused,
            "23" | "21" | "22" | "42" | "0A" | "2F" | "24" => Permanent,
            _ => Unknown,
        },
    }
}

/// Classifies SQLite's extended result code, whose low byte is the primary code.
pub fn sqlite(code: i32) -> Class {
    use Class::*;
    match (code, code & 0xff) {
        // SQLITE_BUSY_SNAPSHOT.
        (517, _) => Serialization,
        // SQLITE_IOERR_SHMSIZE: the file with the index of the log cannot grow.
        (4874, _) => Full,
        (_, 5 | 6) => Waited,
        (_, 17) => Stale,
        // Abort, no memory, interrupt, failed read or write, and an error of the locking protocol.
        (_, 4 | 7 | 9 | 10 | 15) => Unavailable,
        (_, 8) => ReadOnly,
        (_, 13) => Full,
        (_, 3 | 23) => Denied,
        (_, 14) => CannotOpen,
        (_, 11 | 26) => Damaged,
        (_, 1) => NoTable,
        (1555 | 2067, _) => Exists,
        (_, 2 | 12 | 16 | 18 | 19 | 20 | 21 | 22 | 24 | 25) => Permanent,
        _ => Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::Class::*;
    use super::*;

    #[test]
    fn every_postgres_error_class_is_classified() {
        for (code, expected) in [
            ("40001", Serialization),
            ("40003", Serialization),
            ("40P01", Deadlock),
            ("55P03", Waited),
            ("55006", Unavailable),
            ("57014", Waited),
            ("57000", Unavailable),
            ("57P01", Gone),
            ("57P03", Gone),
            ("53000", Unavailable),
            ("53100", Full),
            ("53200", Unavailable),
            ("53300", NoRoom),
            ("53400", Unavailable),
            ("58000", Unavailable),
            ("58030", Unavailable),
            ("58P01", Unavailable),
            ("XX000", Unavailable),
            ("XX001", Damaged),
            ("F0001", Unavailable),
            ("08006", Gone),
            ("08P01", Gone),
            ("25006", ReadOnly),
            ("25001", FailedBefore),
            ("25P02", FailedBefore),
            ("25P03", StoodStill),
            ("0A000", Stale),
            ("26000", Unprepared),
            ("28P01", Refused),
            ("28000", Refused),
            ("42501", Denied),
            ("42601", Permanent),
            ("42883", Permanent),
            ("42P01", NoTable),
            ("3D000", NoDatabase),
            ("3F000", NoSchema),
            ("23505", Exists),
            ("23514", Permanent),
            ("22001", Permanent),
            ("2D000", Permanent),
            ("54000", Permanent),
            ("P0001", Permanent),
            ("ZZ999", Unknown),
            ("", Unknown),
        ] {
            assert_eq!(postgres(code), expected, "{code}");
        }
    }

    #[test]
    fn error_numbers_of_mysql_clusters_and_proxies_are_classified() {
        for (number, state, expected) in [
            (1213, "40001", Deadlock),
            (1205, "HY000", Waited),
            (1047, "08S01", Unavailable),
            (3100, "HY000", Unavailable),
            (3101, "HY000", Serialization),
            (3032, "08S01", Unavailable),
            (9001, "HY000", Unavailable),
            (9006, "HY000", Unavailable),
            (1815, "HY000", Unavailable),
            (1129, "HY000", Unavailable),
            (1180, "HY000", Serialization),
            (1158, "08S01", Gone),
            (1161, "08S01", Gone),
            (1153, "08S01", TooLong),
            (2013, "HY000", Gone),
            (1040, "08004", NoRoom),
            (1203, "42000", NoRoom),
            (1226, "42000", NoRoom),
            (1290, "HY000", ReadOnly),
            (1792, "25006", ReadOnly),
            (1045, "28000", Refused),
            (1698, "28000", Refused),
            (1142, "42000", Denied),
            (1049, "42000", NoDatabase),
            (1146, "42S02", NoTable),
            (1062, "23000", Exists),
            (1064, "42000", Permanent),
            (1235, "42000", Permanent),
            // A query that only another server product understands.
            (1193, "HY000", Permanent),
            // Numbers that are classified by their SQLSTATE only.
            (6000, "08S01", Gone),
            (6000, "40000", Serialization),
            (6000, "42000", Permanent),
            (6000, "HY000", Unknown),
        ] {
            assert_eq!(mysql(number, state), expected, "{number} {state}");
        }
    }

    #[test]
    fn every_primary_sqlite_code_is_classified() {
        for primary in 1..=26 {
            assert_ne!(sqlite(primary), Unknown, "{primary}");
            // An unknown extended code falls back to the class of its primary code.
            assert_ne!(sqlite(primary | 99 << 8), Unknown, "{primary}");
        }
        for (code, expected) in [
            (5, Waited),
            (517, Serialization),
            (261, Waited),
            (10, Unavailable),
            (4874, Full),
            (266, Unavailable),
            (7, Unavailable),
            (8, ReadOnly),
            (1032, ReadOnly),
            (13, Full),
            (11, Damaged),
            (14, CannotOpen),
            (99, Unknown),
        ] {
            assert_eq!(sqlite(code), expected, "{code}");
        }
    }
}
