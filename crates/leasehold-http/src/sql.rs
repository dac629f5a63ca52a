//! Marks in a SQL database: shared by all servers, durable as the database is.

use std::fmt;

use async_trait::async_trait;

use super::TokenStorage;
use leasehold_core::{Name, Result, Token};
use leasehold_sql::database::Pool;
use leasehold_sql::fence::raise;

/// Marks in the table `leasehold_fence`, the same that
/// [`fence::sql::check`](leasehold_sql::fence::check) uses: see
/// [`database::install`](leasehold_sql::database::install). Two statements for each request, each by itself:
/// the second reads the mark after the first raised it, so what it finds is never less than the
/// offered token, and is greater only if a greater one came by.
pub struct SqlMemory<P>(P);

impl<P: Pool> SqlMemory<P> {
    /// Marks in the database of this pool.
    ///
    /// ```
    /// use leasehold::database::Pool;
    /// use leasehold::fence::http::{FenceLayer, SqlMemory};
    /// fn fence(pool: impl Pool + 'static) -> FenceLayer {
    ///     FenceLayer::new(SqlMemory::new(pool), |request| Some(request.uri.path().to_owned()))
    /// }
    /// ```
    pub fn new(pool: P) -> Self {
        Self(pool)
    }
}

impl<P> fmt::Debug for SqlMemory<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlMemory").finish_non_exhaustive()
    }
}

#[async_trait]
impl<P: Pool + 'static> TokenStorage for SqlMemory<P> {
    async fn raise(&self, resource: &Name, offered: Token) -> Result<Token> {
        let mut session = self.0.session().await.map_err(leasehold_core::Error::from)?;
        raise(&mut session, resource, offered).await
    }
}
