//! A fault that is injected when a worker enters its critical section.

use rustix::process::Signal;
use tokio::sync::oneshot;

use super::history::{Time, WorkerId};

/// A fault that is injected when a worker enters its critical section.
pub(super) struct Ambush {
    pub(super) signal: Signal,
    /// Receives the worker that was hit, and when.
    pub(super) hit: oneshot::Sender<(WorkerId, Time)>,
}
