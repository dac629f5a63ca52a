//! Sessions of `sea-orm` 2, which is built on `sqlx` 0.9.
//!
//! Its pool is a pool of `sqlx`, returned by `get_postgres_connection_pool()`, and needs no code
//! here.

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, RuntimeErr, Statement};

use super::sqlx::error_info;
use crate::database::dialect::Dialect;
use crate::database::fault::Fault;
use crate::database::session::{Column, Session, Transaction};
use crate::database::value::{Param, Value};

impl Session for DatabaseTransaction {
    fn dialect(&self) -> Dialect {
        match self.get_database_backend() {
            DbBackend::Postgres => Dialect::Postgres,
            DbBackend::MySql => Dialect::Mysql,
            _ => Dialect::Sqlite,
        }
    }

    async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
        let done = self.execute_raw(statement(self, sql, with)).await?;
        Ok(done.rows_affected())
    }

    async fn row(
        &mut self,
        sql: &str,
        with: &[Param<'_>],
        columns: &[Column],
    ) -> Result<Option<Vec<Value>>, Fault> {
        let row = self.query_one_raw(statement(self, sql, with)).await?;
        let Some(row) = row else { return Ok(None) };
        let number = |i| row.try_get_by_index(i);
        let read = Column::try_read(columns, number, |i| row.try_get_by_index(i));
        read.map(Some).map_err(Fault::unreadable)
    }

    async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
        self.execute_unprepared(sql).await?;
        Ok(())
    }
}

impl Transaction for DatabaseTransaction {}

fn statement(tx: &DatabaseTransaction, sql: &str, with: &[Param<'_>]) -> Statement {
    let values = with.iter().map(|param| match *param {
        Param::Null => None::<String>.into(),
        Param::Int(v) => v.into(),
        Param::Bool(v) => v.into(),
        Param::Float(v) => v.into(),
        Param::Text(v) => v.into(),
        Param::Bytes(v) => v.into(),
    });
    Statement::from_sql_and_values(tx.get_database_backend(), sql, values)
}

impl From<DbErr> for Fault {
    fn from(error: DbErr) -> Self {
        let info = match &error {
            DbErr::Conn(RuntimeErr::SqlxError(e))
            | DbErr::Exec(RuntimeErr::SqlxError(e))
            | DbErr::Query(RuntimeErr::SqlxError(e)) => error_info(e),
            DbErr::ConnectionAcquire(_) | DbErr::Conn(_) => return Self::unanswered(error),
            _ => return Self::unreadable(error),
        };
        info.because(error)
    }
}
