//! A handle that aborts its task when it is dropped.

use tokio::task::{AbortHandle, JoinHandle};

/// Aborts a task when it is dropped.
#[derive(Debug)]
pub struct Ends(AbortHandle);

impl Ends {
    /// Creates a handle that aborts this task.
    pub fn new<T>(task: &JoinHandle<T>) -> Self {
        Self(task.abort_handle())
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}
