//! How long a call waits for a lock.

use std::time::Duration;

/// How long a call waits for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Try,
    For(Duration),
    Forever,
}
