//! A task that ends with whoever keeps it.

use tokio::task::AbortHandle;

/// Ends a task when it is dropped.
#[derive(Debug)]
pub(super) struct Ends(pub(super) AbortHandle);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}
