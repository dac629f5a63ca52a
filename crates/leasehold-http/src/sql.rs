//! Marks in a SQL database: shared by all servers, durable as the database is.

use std::fmt;

use async_trait::async_trait;
use sqlx::Pool;

use super::TokenStorage;
use leasehold_core::{Name, Result, Token};
use leasehold_sql::database::{self, Database};
use leasehold_sql::fence::raise;

/// Marks in the table `leasehold_fence`, the same that
/// [`fence::sql::check`](leasehold_sql::fence::check) uses: see
/// [`database::install`](leasehold_sql::database::install). Two statements for each request, each by itself:
/// the second reads the mark after the first raised it, so what it finds is never less than the
/// offered token, and is greater only if a greater one came by.
pub struct SqlMemory<DB: Database>(Pool<DB>);

impl<DB: Database> SqlMemory<DB> {
    /// Marks in the database of this pool.
    pub fn new(pool: Pool<DB>) -> Self {
        Self(pool)
    }
}

impl<DB: Database> fmt::Debug for SqlMemory<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SqlMemory").field(&DB::DIALECT).finish()
    }
}

#[async_trait]
impl<DB: Database> TokenStorage for SqlMemory<DB> {
    async fn raise(&self, resource: &Name, offered: Token) -> Result<Token> {
        let mut connection = self.0.acquire().await.map_err(database::error)?;
        raise::<DB>(&mut connection, resource, offered).await
    }
}
