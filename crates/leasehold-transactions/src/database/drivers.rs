//! The drivers on whose sessions leasehold can run its statements.

#[cfg(feature = "sea-orm")]
mod sea_orm;
#[cfg(any(
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "sea-orm",
    feature = "sqlx-08-postgres",
    feature = "sqlx-08-mysql"
))]
mod sqlx;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;
