//! `sqlx`, 0.9 and 0.8, whose text is the same but for how a statement is handed over.
#![allow(unused_macros, reason = "each database and each version is a feature")]

use crate::database::dialect::Dialect;
use crate::database::fault::{Because, Fault};
use crate::database::said::Described;

/// What one of its errors tells.
pub(super) enum Told {
    Code(Dialect, String),
    Described(Described),
}

impl Told {
    pub(super) fn because(self, because: impl Into<Because>) -> Fault {
        match self {
            Self::Code(dialect, code) => Fault::answered(dialect, code, because),
            Self::Described(described) => Fault::of(described, because),
        }
    }
}

/// One version: its transactions, its pools and its errors, for whatever databases it has.
macro_rules! version {
    ($sqlx:ident) => {
        use $sqlx::ConnectOptions as _;

        use super::Told;
        use crate::database::dialect::Dialect;
        use crate::database::fault::Fault;
        use crate::database::session::{Column, Pool, Session, Transaction};
        use crate::database::value::{Param, Value};

        /// Hands on what a type that is a connection at heart is asked.
        macro_rules! connection_within {
            () => {
                fn dialect(&self) -> Dialect {
                    (**self).dialect()
                }

                async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
                    (**self).run(sql, with).await
                }

                async fn row(
                    &mut self,
                    sql: &str,
                    with: &[Param<'_>],
                    columns: &[Column],
                ) -> Result<Option<Vec<Value>>, Fault> {
                    (**self).row(sql, with, columns).await
                }

                async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
                    (**self).batch(sql).await
                }
            };
        }

        impl<DB> Session for $sqlx::Transaction<'_, DB>
        where
            DB: $sqlx::Database<Connection: Session>,
        {
            connection_within!();
        }

        impl<DB> Transaction for $sqlx::Transaction<'_, DB> where
            DB: $sqlx::Database<Connection: Session>
        {
        }

        impl<DB> Session for $sqlx::pool::PoolConnection<DB>
        where
            DB: $sqlx::Database<Connection: Session>,
        {
            connection_within!();
        }

        /// A connection of the pool, or one beside it.
        pub enum Line<DB: $sqlx::Database> {
            Pooled($sqlx::pool::PoolConnection<DB>),
            Beside(DB::Connection),
        }

        impl<DB: $sqlx::Database> std::ops::Deref for Line<DB> {
            type Target = DB::Connection;

            fn deref(&self) -> &DB::Connection {
                match self {
                    Self::Pooled(connection) => connection,
                    Self::Beside(connection) => connection,
                }
            }
        }

        impl<DB: $sqlx::Database> std::ops::DerefMut for Line<DB> {
            fn deref_mut(&mut self) -> &mut DB::Connection {
                match self {
                    Self::Pooled(connection) => connection,
                    Self::Beside(connection) => connection,
                }
            }
        }

        impl<DB> Session for Line<DB>
        where
            DB: $sqlx::Database<Connection: Session + Sync>,
        {
            connection_within!();
        }

        impl<DB> Pool for $sqlx::Pool<DB>
        where
            DB: $sqlx::Database<Connection: Session + Sync>,
        {
            type Session = Line<DB>;

            async fn session(&self) -> Result<Line<DB>, Fault> {
                Ok(Line::Pooled(self.acquire().await?))
            }

            async fn beside(&self) -> Result<Line<DB>, Fault> {
                Ok(Line::Beside(self.connect_options().connect().await?))
            }
        }

        impl From<$sqlx::Error> for Fault {
            fn from(error: $sqlx::Error) -> Self {
                told(&error).because(error)
            }
        }

        pub(in crate::database::drivers) fn told(error: &$sqlx::Error) -> Told {
            use crate::database::said;
            use leasehold_core::ErrorKind::{Closed, Config, Unreachable};
            let described = match error {
                $sqlx::Error::Database(e) => match code(e.as_ref()) {
                    Some((dialect, code)) => return Told::Code(dialect, code),
                    None => said::REJECTED,
                },
                $sqlx::Error::PoolTimedOut => (
                    Unreachable,
                    "no connection became free in the pool in time",
                    "raise max_connections of the pool, or hold connections for a shorter time",
                ),
                $sqlx::Error::PoolClosed => {
                    (Closed, "the connection pool was closed", "create a new pool")
                }
                $sqlx::Error::Io(_)
                | $sqlx::Error::Tls(_)
                | $sqlx::Error::Protocol(_)
                | $sqlx::Error::WorkerCrashed
                | $sqlx::Error::BeginFailed => said::NO_RESPONSE,
                $sqlx::Error::Configuration(_) => {
                    (Config, "invalid database URL or settings", "check host, port and parameters")
                }
                _ => said::OTHER_TABLE,
            };
            Told::Described(described)
        }
    };
}

/// The connections of one database.
macro_rules! connection {
    ($sqlx:ident, $connection:ident, $dialect:ident, $keeps_prepared:expr) => {
        impl Session for $sqlx::$connection {
            fn dialect(&self) -> Dialect {
                Dialect::$dialect
            }

            async fn run(&mut self, sql: &str, with: &[Param<'_>]) -> Result<u64, Fault> {
                let query = bind!($sqlx, sql, with).persistent($keeps_prepared(self));
                Ok(query.execute(self).await?.rows_affected())
            }

            async fn row(
                &mut self,
                sql: &str,
                with: &[Param<'_>],
                columns: &[Column],
            ) -> Result<Option<Vec<Value>>, Fault> {
                use $sqlx::Row as _;
                let query = bind!($sqlx, sql, with).persistent($keeps_prepared(self));
                let Some(row) = query.fetch_optional(self).await? else {
                    return Ok(None);
                };
                let read = Column::try_read(columns, |i| row.try_get(i), |i| row.try_get(i));
                Ok(Some(read?))
            }

            async fn batch(&mut self, sql: &str) -> Result<(), Fault> {
                // (Of 0.8, `RawSql::execute` is no future that may be sent.)
                $sqlx::Executor::execute(self, $sqlx::raw_sql(text(sql))).await?;
                Ok(())
            }
        }
    };
}

/// A statement with its parameters.
macro_rules! bind {
    ($sqlx:ident, $sql:expr, $with:expr) => {
        $with.iter().fold($sqlx::query(text($sql)), |query, param| match *param {
            Param::Null => query.bind(None::<String>),
            Param::Bool(v) => query.bind(v),
            Param::Int(v) => query.bind(v),
            Param::Float(v) => query.bind(v),
            Param::Text(v) => query.bind(v.to_owned()),
            Param::Bytes(v) => query.bind(v.to_owned()),
        })
    };
}

/// PostgreSQL, of this version.
macro_rules! postgres {
    ($sqlx:ident) => {
        connection!($sqlx, PgConnection, Postgres, keeps_prepared);

        /// Whether the caller's driver keeps statements prepared on this connection. If it keeps none
        /// (`statement-cache-capacity=0`) there may be a pooler that lends the connection to others: a
        /// statement prepared under a name would be theirs tomorrow. That nothing is kept *yet* looks
        /// the same, and costs one round trip.
        fn keeps_prepared(connection: &$sqlx::PgConnection) -> bool {
            $sqlx::Connection::cached_statements_size(connection) > 0
        }

        fn postgres_code(error: &dyn $sqlx::error::DatabaseError) -> Option<(Dialect, String)> {
            let error = error.try_downcast_ref::<$sqlx::postgres::PgDatabaseError>()?;
            Some((Dialect::Postgres, error.code().to_owned()))
        }
    };
}

/// MySQL and MariaDB, of this version. The driver sees to what is prepared.
macro_rules! mysql {
    ($sqlx:ident) => {
        connection!($sqlx, MySqlConnection, Mysql, |_: &$sqlx::MySqlConnection| true);

        fn mysql_code(error: &dyn $sqlx::error::DatabaseError) -> Option<(Dialect, String)> {
            let error = error.try_downcast_ref::<$sqlx::mysql::MySqlDatabaseError>()?;
            Some((Dialect::Mysql, error.number().to_string()))
        }
    };
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "sea-orm"))]
mod current {
    version!(sqlx);
    #[cfg(feature = "postgres")]
    postgres!(sqlx);
    #[cfg(feature = "mysql")]
    mysql!(sqlx);
    #[cfg(feature = "sqlite")]
    connection!(sqlx, SqliteConnection, Sqlite, |_: &sqlx::SqliteConnection| true);

    #[cfg(feature = "sqlite")]
    fn sqlite_code(error: &dyn sqlx::error::DatabaseError) -> Option<(Dialect, String)> {
        let error = error.try_downcast_ref::<sqlx::sqlite::SqliteError>()?;
        let code = sqlx::error::DatabaseError::code(error).unwrap_or_default();
        Some((Dialect::Sqlite, code.into_owned()))
    }

    /// The database's code: each is another type's.
    fn code(error: &dyn sqlx::error::DatabaseError) -> Option<(Dialect, String)> {
        let code = None;
        #[cfg(feature = "postgres")]
        let code = code.or_else(|| postgres_code(error));
        #[cfg(feature = "mysql")]
        let code = code.or_else(|| mysql_code(error));
        #[cfg(feature = "sqlite")]
        let code = code.or_else(|| sqlite_code(error));
        let _ = error;
        code
    }

    /// Ours, or the caller's identifiers, which were checked.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    fn text(sql: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(sql.to_owned())
    }
}
#[cfg(feature = "sea-orm")]
pub(super) use current::told;

/// Without SQLite: of its library only one version can be in a program.
#[cfg(any(feature = "sqlx-08-postgres", feature = "sqlx-08-mysql"))]
mod before {
    version!(sqlx_08);
    #[cfg(feature = "sqlx-08-postgres")]
    postgres!(sqlx_08);
    #[cfg(feature = "sqlx-08-mysql")]
    mysql!(sqlx_08);

    fn code(error: &dyn sqlx_08::error::DatabaseError) -> Option<(Dialect, String)> {
        let code = None;
        #[cfg(feature = "sqlx-08-postgres")]
        let code = code.or_else(|| postgres_code(error));
        #[cfg(feature = "sqlx-08-mysql")]
        let code = code.or_else(|| mysql_code(error));
        code
    }

    fn text(sql: &str) -> &str {
        sql
    }
}
