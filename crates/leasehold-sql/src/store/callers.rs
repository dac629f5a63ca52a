//! An existing pool of the caller, whose database a client uses.

#[cfg(feature = "postgres")]
use tokio::runtime::Handle;

/// An existing pool of the caller. The client's own connections have the same settings. Its calls
/// may borrow connections from a PostgreSQL pool.
#[derive(Clone, Debug)]
pub(super) enum CallersPool {
    /// The pool, with the runtime that drives its connections.
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool, Handle),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
}
