//! How long the caller is willing to wait.

use std::time::Duration;

/// How long the caller is willing to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Try,
    For(Duration),
    Forever,
}
