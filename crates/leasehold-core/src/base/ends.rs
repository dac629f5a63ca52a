//! A task that ends with whoever keeps it.

use tokio::task::{AbortHandle, JoinHandle};

/// Ends a task when it is dropped.
#[derive(Debug)]
pub struct Ends(AbortHandle);

impl Ends {
    /// Ends this one.
    pub fn new<T>(task: &JoinHandle<T>) -> Self {
        Self(task.abort_handle())
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}
