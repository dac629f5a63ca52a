//! The SQL statements that create the three tables.

use super::dialect::Dialect;

/// Returns the statements that create the tables of `lock_in`, `once` and `fence::sql`, for a
/// migration. Running them again changes nothing.
///
/// ```
/// use leasehold::database::{Dialect, schema};
/// let migration = schema(Dialect::Postgres);
/// assert!(migration.contains("CREATE TABLE IF NOT EXISTS leasehold_once"));
/// ```
pub fn schema(dialect: Dialect) -> String {
    let (name, bytes, text, int, tail) = match dialect {
        Dialect::Sqlite => ("TEXT COLLATE BINARY", 0, "TEXT", "INTEGER", " WITHOUT ROWID"),
        Dialect::Postgres => ("TEXT COLLATE \"C\"", 0, "TEXT", "BIGINT", ""),
        Dialect::Mysql => {
            ("VARBINARY", 512, "LONGTEXT CHARACTER SET utf8mb4", "BIGINT", " ENGINE=InnoDB")
        }
    };
    let name = if bytes > 0 { format!("{name}({bytes})") } else { name.to_owned() };
    // clean_up finds old keys by these indexes, so it locks no other rows.
    let (inner, outer) = match dialect {
        Dialect::Mysql => (
            ",\n  INDEX leasehold_once_done (done_at),\n  \
             INDEX leasehold_once_started (state, lease_end)",
            "",
        ),
        _ => (
            "",
            "CREATE INDEX IF NOT EXISTS leasehold_once_done ON leasehold_once (done_at);\n\
             CREATE INDEX IF NOT EXISTS leasehold_once_started ON leasehold_once \
             (state, lease_end);\n",
        ),
    };
    format!(
        "-- leasehold: lock_in. One row per lock name; `taken` counts the committed holds.\n\
         CREATE TABLE IF NOT EXISTS leasehold_row_lock (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 taken {int} NOT NULL\n\
         ){tail};\n\
                  -- leasehold: once. One row per idempotency key; state is 'started', 'done' or \
                  'refused'; times\n\
         -- are microseconds since 1970 by the database's clock.\n\
         CREATE TABLE IF NOT EXISTS leasehold_once (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 state VARCHAR(8) NOT NULL,\n\
         \x20 attempt {int} NOT NULL,\n\
         \x20 attempt_id VARCHAR(32) NOT NULL,\n\
         \x20 lease_end {int} NOT NULL,\n\
         \x20 done_at {int},\n\
         \x20 outcome {text}{inner}\n\
         ){tail};\n{outer}-- leasehold: fence::sql. One row per resource; `seen` is the highest \
         token seen.\n\
         CREATE TABLE IF NOT EXISTS leasehold_fence (\n\
         \x20 name {name} NOT NULL PRIMARY KEY,\n\
         \x20 seen {int} NOT NULL\n\
         ){tail};\n"
    )
}
