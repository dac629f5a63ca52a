//! Sessions of `sqlx` 0.9 and 0.8. The code is the same except for how a statement's text is
//! passed.
#![allow(unused_macros, reason = "each database and each version is a feature")]

use crate::database::dialect::Dialect;
use crate::database::fault::{Because, Fault};
use crate::database::server_errors::Described;

/// The information that leasehold uses from an error of `sqlx`.
pub(super) enum ErrorInfo {
    Code(Dialect, String),
    Described(Described),
}

impl ErrorInfo {
    pub(super) fn because(self, because: impl Into<Because>) -> Fault {
        match self {
            Self::Code(dialect, code) => Fault::answered(dialect, code, because),
            Self::Described(described) => Fault::of(described, because),
        }
    }
}

/// Implements the transactions, pools and errors of one version, for the databases that are
/// enabled.
macro_rules! version {
    ($sqlx:ident) => {
        use $sqlx::ConnectOptions as _;

        use super::ErrorInfo;
        use crate::database::dialect::Dialect;
        use crate::database::fault::Fault;
        use crate::database::session::{Column, Pool, Session, Transaction};
        use crate::database::value::{Param, Value};

        /// Forwards the methods of a type that wraps a connection.
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

        /// A connection from the pool, or one that was opened separately.
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
                error_info(&error).because(error)
            }
        }

        pub(in crate::database::drivers) fn error_info(error: &$sqlx::Error) -> ErrorInfo {
            use crate::database::server_errors;
            use leasehold_core::ErrorKind::{Closed, Config, Unreachable};
            let described = match error {
                $sqlx::Error::Database(e) => match code(e.as_ref()) {
                    Some((dialect, code)) => return ErrorInfo::Code(dialect, code),
                    None => server_errors::REJECTED,
                },
                $sqlx::Error::PoolTimedOut => (
                    Unreachable,
                    "timed out while waiting for a connection from the pool",
                    "raise max_connections of the pool, or hold connections for a shorter time",
                ),
                $sqlx::Error::PoolClosed => {
                    (Closed, "the connection pool was closed", "create a new pool")
                }
                $sqlx::Error::Io(_)
                | $sqlx::Error::Tls(_)
                | $sqlx::Error::Protocol(_)
                | $sqlx::Error::WorkerCrashed
                | $sqlx::Error::BeginFailed => server_errors::NO_RESPONSE,
                $sqlx::Error::Configuration(_) => (
                    Config,
                    "invalid database URL or settings",
                    "check the host, port and parameters",
                ),
                _ => server_errors::OTHER_TABLE,
            };
            ErrorInfo::Described(described)
        }
    };
}

/// Implements [`Session`](crate::database::Session) for one database's connections.
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
                // In 0.8 the future of `RawSql::execute` is not `Send`.
                $sqlx::Executor::execute(self, $sqlx::raw_sql(text(sql))).await?;
                Ok(())
            }
        }
    };
}

/// Builds a query with its parameters.
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

/// Implements the PostgreSQL part of this version.
macro_rules! postgres {
    ($sqlx:ident) => {
        connection!($sqlx, PgConnection, Postgres, keeps_prepared);

        /// Returns whether the caller's driver keeps prepared statements on this connection.
        ///
        /// If it keeps none (`statement-cache-capacity=0`), a pooler may share the connection with
        /// other clients, and a statement that was prepared under a name would conflict with
        /// theirs. A connection with no prepared statement *yet* looks the same, which costs one
        /// more round trip.
        fn keeps_prepared(connection: &$sqlx::PgConnection) -> bool {
            $sqlx::Connection::cached_statements_size(connection) > 0
        }

        fn postgres_code(error: &dyn $sqlx::error::DatabaseError) -> Option<(Dialect, String)> {
            let error = error.try_downcast_ref::<$sqlx::postgres::PgDatabaseError>()?;
            Some((Dialect::Postgres, error.code().to_owned()))
        }
    };
}

/// Implements the MySQL and MariaDB part of this version. The driver manages prepared statements.
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

    /// Returns the database's error code. Each database has its own error type.
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

    /// Marks the statement as safe for `sqlx`. It consists only of leasehold's own text and checked
    /// identifiers.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    fn text(sql: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(sql.to_owned())
    }
}
#[cfg(feature = "sea-orm")]
pub(super) use current::error_info;

/// sqlx 0.8, without SQLite, because a program can contain only one version of SQLite's library.
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
