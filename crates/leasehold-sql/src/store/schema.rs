//! The tables, as SQL that people can read and run themselves.

use leasehold_core::Error;
use leasehold_core::kit::no_store;

use super::url::{Dialect, SqlUrl};

/// The version of the tables that this code reads and writes.
pub(super) const VERSION: i64 = 1;

/// Returns a hint for tables of another version. It advises against using other tables, because
/// clients of different tables do not exclude each other.
pub(super) fn advice(found: i64) -> &'static str {
    match found > VERSION {
        true => {
            "upgrade this program. Do not switch to other tables: clients that use different \
             tables do not exclude each other"
        }
        false => {
            "stop all clients of the older leasehold, then update the tables as the change log \
             describes. Do not switch to other tables: clients that use different tables do not \
             exclude each other"
        }
    }
}

/// Returns the error for a database without the tables, if the client may not create them.
pub(super) fn missing(url: &SqlUrl) -> Error {
    let table = url.table("schema");
    no_store(format!("the table {table} is missing or empty")).with_hint(
        "check the URL; a client creates the tables when it connects, unless the URL contains \
         create=no",
    )
}

/// Returns the statements that create the tables. Each can be run again.
pub(super) fn statements(url: &SqlUrl) -> Vec<String> {
    let types = Types::of(url.dialect);
    let Types { name, text, options, .. } = types;
    let [locks, claims, schema] = ["locks", "claims", "schema"].map(|table| url.table(table));
    let index = format!("{}claims", url.prefix);
    // MySQL does not support CREATE INDEX IF NOT EXISTS.
    let inline = match types.inline_indexes {
        true => ",\n  KEY by_claim (claim), KEY by_session (session, standing)",
        false => "",
    };
    let mut all = vec![
        format!(
            "CREATE TABLE IF NOT EXISTS {locks} (\n  \
             name {name} NOT NULL PRIMARY KEY,\n  \
             kind BIGINT NOT NULL,\n  \
             capacity BIGINT NOT NULL,\n  \
             last_token BIGINT NOT NULL,\n  \
             claims BIGINT NOT NULL,\n  \
             claim {text} NOT NULL,\n  \
             token BIGINT NOT NULL,\n  \
             weight BIGINT NOT NULL,\n  \
             standing BIGINT NOT NULL,\n  \
             since BIGINT NOT NULL,\n  \
             expires BIGINT NOT NULL,\n  \
             lock_delay BIGINT NOT NULL,\n  \
             host {text} NOT NULL,\n  \
             pid BIGINT NOT NULL,\n  \
             label {text} NOT NULL\n){options}",
            options = match url.dialect {
                // Acquiring and releasing rewrites the row. With free space on its page, the index
                // does not change.
                #[cfg(feature = "postgres")]
                Dialect::Postgres => " WITH (fillfactor = 40)",
                #[cfg(any(feature = "sqlite", feature = "mysql"))]
                _ => options,
            },
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {claims} (\n  \
             name {name} NOT NULL,\n  \
             token BIGINT NOT NULL,\n  \
             claim {text} NOT NULL,\n  \
             weight BIGINT NOT NULL,\n  \
             standing BIGINT NOT NULL,\n  \
             since BIGINT NOT NULL,\n  \
             expires BIGINT NOT NULL,\n  \
             lock_delay BIGINT NOT NULL,\n  \
             host {text} NOT NULL,\n  \
             pid BIGINT NOT NULL,\n  \
             label {text} NOT NULL,\n  \
             session {text} NOT NULL,\n  \
             PRIMARY KEY (name, token){inline}\n){options}",
            options = match url.dialect {
                // Waiting, renewing and granting rewrite the row too.
                #[cfg(feature = "postgres")]
                Dialect::Postgres => " WITH (fillfactor = 50)",
                #[cfg(any(feature = "sqlite", feature = "mysql"))]
                _ => options,
            },
        ),
    ];
    if !types.inline_indexes {
        let session = match url.dialect {
            // Without `standing` in the index, a grant changes no index.
            #[cfg(feature = "postgres")]
            Dialect::Postgres => "session",
            #[cfg(any(feature = "sqlite", feature = "mysql"))]
            _ => "session, standing",
        };
        for (name, columns) in [("claim", "claim"), ("session", session)] {
            all.push(format!(
                "CREATE INDEX IF NOT EXISTS {index}_by_{name} ON {claims} ({columns})"
            ));
        }
    }
    all.push(format!(
        "CREATE TABLE IF NOT EXISTS {schema} (version BIGINT NOT NULL PRIMARY KEY){options}"
    ));
    all.push(format!(
        "INSERT INTO {schema} (version) SELECT {VERSION} FROM (SELECT 1 AS one) o \
         WHERE NOT EXISTS (SELECT 1 FROM {schema})"
    ));
    all
}

/// Returns the statements as readable text, with comments that explain the columns.
pub(super) fn printed(url: &SqlUrl) -> String {
    let mut text = String::from(
        "-- leasehold's tables. All times are microseconds since 1970, by the database's clock.\n\
         -- locks: one row for each recently used lock name. If claim is '', the lock is free, \
         and the row\n\
         --   describes the last holder. Otherwise the row is the first claim of the queue. kind: \
         0 mutex,\n\
         --   1 read-write lock, 2 semaphore. claims: number of further claims in the other \
         table.\n\
         -- claims: the rest of the queue, ordered by token.\n\
         -- standing: 0 waiting, 1 held, 2 cooldown (the holder is gone, but the lock is not free \
         yet).\n\
         -- leasehold's user needs SELECT, INSERT, UPDATE and DELETE on locks and claims, and \
         SELECT on\n\
         -- schema.\n",
    );
    for statement in statements(url) {
        text.push_str(&statement);
        text.push_str(";\n");
    }
    text
}

struct Types {
    name: &'static str,
    text: &'static str,
    options: &'static str,
    inline_indexes: bool,
}

impl Types {
    fn of(dialect: Dialect) -> Self {
        match dialect {
            // SQLite compares text byte for byte by default.
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => {
                Self { name: "TEXT", text: "TEXT", options: "", inline_indexes: false }
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => Self {
                name: "TEXT COLLATE \"C\"",
                text: "TEXT",
                options: "",
                inline_indexes: false,
            },
            // Every text collation of MySQL folds or pads some characters (including utf8mb4_bin).
            #[cfg(feature = "mysql")]
            Dialect::MySql => Self {
                name: "VARBINARY(512)",
                text: "VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
                options: " ENGINE=InnoDB",
                inline_indexes: true,
            },
        }
    }
}
