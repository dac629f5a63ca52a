//! Tokens in a SQL database: shared by all servers, and as durable as the database.

use std::fmt;

use async_trait::async_trait;

use super::TokenStorage;
use leasehold_core::{FencingToken, Name, Result};
use leasehold_transactions::database::Pool;
use leasehold_transactions::fence::raise;

/// Keeps tokens in the table `leasehold_fence`, which
/// [`fence::sql::check`](leasehold_transactions::fence::check) uses too; see
/// [`database::install`](leasehold_transactions::database::install).
///
/// Each request costs two separate statements. The first one raises the token, and the second one
/// reads it. So the result is never smaller than the offered token, and it is larger only if a
/// larger token was seen.
pub struct SqlMemory<P>(P);

impl<P: Pool> SqlMemory<P> {
    /// Creates a storage in the database of this pool.
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
    async fn raise(&self, resource: &Name, offered: FencingToken) -> Result<FencingToken> {
        let mut session = self.0.session().await.map_err(leasehold_core::Error::from)?;
        raise(&mut session, resource, offered).await
    }
}
