//! Storage for the highest token seen for each resource.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use leasehold_core::{FencingToken, Name, Result};

/// Keeps the highest token seen for each resource.
///
/// All servers of a resource must share one storage, and it must outlive them. A storage that loses
/// its data accepts the next stale writer, until it sees a newer token.
#[async_trait]
pub trait TokenStorage: fmt::Debug + Send + Sync + 'static {
    /// Raises the stored token of `resource` to `offered` if it is smaller, and returns the highest
    /// token seen, including `offered`.
    ///
    /// This must be one atomic step, and durable *before* it returns. The future may be dropped at
    /// any await, and may or may not have raised the token by then.
    ///
    /// # Errors
    /// Any error of the storage. The layer then rejects the request.
    async fn raise(&self, resource: &Name, offered: FencingToken) -> Result<FencingToken>;
}

#[async_trait]
impl<M: TokenStorage + ?Sized> TokenStorage for Arc<M> {
    async fn raise(&self, resource: &Name, offered: FencingToken) -> Result<FencingToken> {
        (**self).raise(resource, offered).await
    }
}

/// Keeps tokens in the memory of this process, until it ends.
///
/// Use it for tests, and for services of one process whose resources end with the process. It keeps
/// one entry for each resource, forever.
#[derive(Debug, Default)]
pub struct InMemory(Mutex<HashMap<Name, FencingToken>>);

impl InMemory {
    /// Creates an instance that contains no tokens.
    ///
    /// ```
    /// let tokens = leasehold::fence::http::InMemory::new();
    /// # let _ = tokens;
    /// ```
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl TokenStorage for InMemory {
    async fn raise(&self, resource: &Name, offered: FencingToken) -> Result<FencingToken> {
        // Nothing that can panic runs under the lock.
        let mut marks = locked(&self.0);
        let mark = marks.entry(resource.clone()).or_insert(offered);
        *mark = offered.max(*mark);
        Ok(*mark)
    }
}

/// Stores nothing and accepts every valid token. For handlers that check [`Fenced`](super::Fenced)
/// in the transaction that writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassOn;

#[async_trait]
impl TokenStorage for PassOn {
    async fn raise(&self, _: &Name, offered: FencingToken) -> Result<FencingToken> {
        Ok(offered)
    }
}
