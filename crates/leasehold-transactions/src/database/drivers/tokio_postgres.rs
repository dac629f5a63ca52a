//! Sessions of `tokio-postgres`.
//!
//! Each parameter is sent with its type, in one message with the statement. Nothing is prepared
//! under a name, so a pooler can be in front of the server.

use std::sync::Arc;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, GenericClient as _};

use crate::database::dialect::Dialect;
use crate::database::fault::Fault;
use crate::database::session::{Column, Pool, Session, Transaction};
use crate::database::value::{Param, Value};

macro_rules! session {
    ($($of:ty),+) => {$(
        impl Session for $of {
            fn dialect(&self) -> Dialect {
                Dialect::Postgres
            }

            async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
                run(self.client(), sql, with).await
            }

            async fn row(
                &mut self,
                sql: &str,
                with: &[Param<'_>],
                columns: &[Column],
            ) -> Result<Option<Vec<Value>>, Fault> {
                row(self.client(), sql, with, columns).await
            }

            async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
                Ok(self.client().batch_execute(sql).await?)
            }
        }
    )+};
}
session!(tokio_postgres::Transaction<'_>, Client, Arc<Client>);

impl Transaction for tokio_postgres::Transaction<'_> {}

/// A single client pipelines its requests without waiting for replies, so a session is always
/// available.
impl Pool for Arc<Client> {
    type Session = Self;

    async fn session(&self) -> Result<Self, Fault> {
        Ok(self.clone())
    }
}

async fn run(client: &Client, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
    let with: Vec<_> = with.iter().map(typed).collect();
    Ok(client.execute_typed(sql, &with).await?)
}

async fn row(
    client: &Client,
    sql: &str,
    with: &[Param<'_>],
    columns: &[Column],
) -> Result<Option<Vec<Value>>, Fault> {
    let with: Vec<_> = with.iter().map(typed).collect();
    let rows = client.query_typed(sql, &with).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let read = Column::try_read(columns, |i| row.try_get(i), |i| row.try_get(i));
    read.map(Some).map_err(Fault::unreadable)
}

fn typed<'a>(param: &'a Param<'_>) -> (&'a (dyn ToSql + Sync), Type) {
    match param {
        Param::Null => (&None::<&str>, Type::TEXT),
        Param::Int(v) => (v, Type::INT8),
        Param::Bool(v) => (v, Type::BOOL),
        Param::Float(v) => (v, Type::FLOAT8),
        Param::Text(v) => (v, Type::TEXT),
        Param::Bytes(v) => (v, Type::BYTEA),
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error.code() {
            Some(code) => Self::answered(Dialect::Postgres, code.code().to_owned(), error),
            None => Self::unanswered(error),
        }
    }
}
