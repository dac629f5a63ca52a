//! MySQL's and MariaDB's words.

use std::time::Duration;

use super::said::{self, Known};
use super::schema::Dialect;
use super::speak::sealed::{Speak, Taken};
use super::speak::{Answer, Column, Database, bind, speak};
use super::value::Value;
use leasehold_core::Name;

impl Database for sqlx::MySql {
    const DIALECT: Dialect = Dialect::Mysql;
}

#[allow(private_interfaces)]
impl Speak for sqlx::MySql {
    // The caller's session has a time zone of its own, and a local time may be two moments (when
    // summer ends). So: UTC as the statement began, and how long it has waited since, by the local
    // time, of which whole half-hours are the zone's.
    const NOW: &'static str = "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', \
                               UTC_TIMESTAMP(6)) + MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), \
                               SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED)";
    const BIGINT: &'static str = "SIGNED";
    const QUOTE: char = '`';
    // INSERT IGNORE would swallow real errors too; a plain INSERT fails with 1062 for a duplicate
    // and nothing else, and its transaction lives on.
    const OR_NOTHING: &'static str = "";
    const AS_IT_IS: &'static str = " LOCK IN SHARE MODE";

    speak!();

    /// Bytes: a text column would compare `job ` and `job` as equal.
    fn name(name: &Name) -> Value {
        Value::Bytes(name.as_str().as_bytes().to_owned())
    }

    fn is_catalogue_race(error: &sqlx::Error) -> bool {
        number(error) == Some(1050)
    }

    fn is_duplicate(error: &sqlx::Error) -> bool {
        number(error) == Some(1062)
    }

    /// A duplicate reports 2 rows: then a unique index was hit, and InnoDB locked that record
    /// alone. A new name reports 1: so does a table without a unique index, which would lock
    /// nothing that matters, so it is looked at. Hence every name is looked at once: when it is
    /// new.
    ///
    /// (Not INSERT IGNORE + SELECT FOR UPDATE: its waiters all get a shared lock first, and then
    /// deadlock over the exclusive one. Not SELECT FOR UPDATE + INSERT: its gap locks deadlock.)
    fn take<'c>(c: &'c mut Self::Connection, name: &Name) -> Answer<'c, Taken> {
        let name = Self::name(name);
        Box::pin(async move {
            let sql = "INSERT INTO leasehold_row_lock (name, taken) VALUES (?, 1) \
                       ON DUPLICATE KEY UPDATE taken = taken + 1";
            if Self::execute(c, sql, vec![name]).await? == 2 {
                return Ok(Taken::OneRow);
            }
            let sql = "SELECT \
                (SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() \
                 AND table_name = 'leasehold_row_lock' AND engine = 'InnoDB'), \
                (SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() \
                 AND table_name = 'leasehold_row_lock' AND column_name = 'name' \
                 AND data_type = 'varbinary'), \
                (SELECT COUNT(*) FROM information_schema.statistics s \
                 WHERE table_schema = DATABASE() AND table_name = 'leasehold_row_lock' \
                 AND non_unique = 0 AND column_name = 'name' AND seq_in_index = 1 \
                 AND sub_part IS NULL AND NOT EXISTS (SELECT 1 FROM information_schema.statistics \
                 t WHERE t.table_schema = s.table_schema AND t.table_name = s.table_name \
                 AND t.index_name = s.index_name AND t.seq_in_index = 2))";
            let columns = &[Column::Int, Column::Int, Column::Int];
            let row = Self::row(c, sql, vec![], columns).await?.unwrap_or_default();
            Ok(match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
                [0, ..] => Taken::Unsure("its engine is not InnoDB"),
                [_, 0, _] => Taken::Unsure("column name is not VARBINARY"),
                [_, _, n] if n > 0 => Taken::OneRow,
                _ => Taken::Unsure("column name has no unique index of its own"),
            })
        })
    }

    /// In whole seconds, which is all that the server has; at least 1, as 0 is not MySQL's.
    fn set_wait(c: &mut Self::Connection, wait: Duration) -> Answer<'_, Value> {
        Box::pin(async move {
            let sql = "SELECT CAST(@@SESSION.innodb_lock_wait_timeout AS SIGNED)";
            let before = Self::row(c, sql, vec![], &[Column::Int])
                .await?
                .and_then(|mut row| row.pop())
                .unwrap_or(Value::Int(50));
            let whole = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            let seconds = i64::try_from(whole.clamp(1, 1 << 30)).unwrap_or(1 << 30);
            Self::reset_wait(c, Value::Int(seconds)).await?;
            Ok(before)
        })
    }

    fn reset_wait(c: &mut Self::Connection, before: Value) -> Answer<'_, ()> {
        let sql = format!("SET SESSION innodb_lock_wait_timeout = {}", before.int());
        Box::pin(async move { Self::execute(c, &sql, vec![]).await.map(|_| ()) })
    }
}

bind!(sqlx::MySql);

fn spell(sql: &str) -> String {
    sql.to_owned()
}

fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    Some(error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>()?.number())
}

pub(super) fn known(number: u16) -> Known {
    match number {
        1213 => said::DEADLOCK,
        1020 => said::SERIALIZATION,
        1205 => said::WAITED,
        3572 => said::BUSY,
        1146 | 1051 => said::NO_TABLE,
        1044 | 1045 | 1142 | 1143 | 1227 => said::DENIED,
        1290 | 1792 | 1836 => said::READ_ONLY,
        1021 | 1114 => said::FULL,
        1040 | 1053 | 1077 | 1152 | 1927 | 2006 | 2013 => said::GONE,
        _ => None,
    }
}

/// The driver sees to it.
fn keeps_prepared(_: &sqlx::MySqlConnection) -> bool {
    true
}
