//! Where the door keeps the greatest token of each resource.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use leasehold_core::{Name, Result, Token};

/// Keeps the greatest token seen of each resource.
///
/// All servers of one resource must share one memory, and it must outlive them: a memory that
/// forgets lets the next late writer in, whatever its token, until a newer one comes by.
#[async_trait]
pub trait TokenStorage: fmt::Debug + Send + Sync + 'static {
    /// Raises the mark of `resource` to `offered` if it is lower, and tells the greatest token seen,
    /// `offered` included: in one atomic step, and as durable as the memory is *before* it answers.
    /// May be dropped at any await, and then may or may not have raised the mark.
    ///
    /// # Errors
    /// As the memory fails; then the request is not let in.
    async fn raise(&self, resource: &Name, offered: Token) -> Result<Token>;
}

#[async_trait]
impl<M: TokenStorage + ?Sized> TokenStorage for Arc<M> {
    async fn raise(&self, resource: &Name, offered: Token) -> Result<Token> {
        (**self).raise(resource, offered).await
    }
}

/// Marks in this process: gone when it ends. For services of one process whose resources end with
/// it, and for tests. One entry for each resource ever written, kept for ever.
#[derive(Debug, Default)]
pub struct InMemory(Mutex<HashMap<Name, Token>>);

impl InMemory {
    /// No marks yet.
    ///
    /// ```
    /// let marks = leasehold::fence::http::InMemory::new();
    /// # let _ = marks;
    /// ```
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl TokenStorage for InMemory {
    async fn raise(&self, resource: &Name, offered: Token) -> Result<Token> {
        // Nothing that can panic runs under the lock.
        let mut marks = locked(&self.0);
        let mark = marks.entry(resource.clone()).or_insert(offered);
        *mark = offered.max(*mark);
        Ok(*mark)
    }
}

/// Remembers nothing and lets every well-formed token in: for handlers that check
/// [`Fenced`](super::Fenced) in the transaction that writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassOn;

#[async_trait]
impl TokenStorage for PassOn {
    async fn raise(&self, _: &Name, offered: Token) -> Result<Token> {
        Ok(offered)
    }
}
