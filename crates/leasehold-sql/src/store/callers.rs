//! The pool of a caller's that a client stands beside.

#[cfg(feature = "postgres")]
use tokio::runtime::Handle;

/// Whose connections the client's are like, and from which its calls may borrow.
#[derive(Clone, Debug)]
pub(super) enum CallersPool {
    /// With the runtime that drives its connections.
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool, Handle),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
}
