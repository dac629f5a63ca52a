//! A fault that waits for a worker to come into its critical section.

use rustix::process::Signal;
use tokio::sync::oneshot;

use super::history::{Time, WorkerId};

/// A fault that waits for a worker to come into its critical section.
pub(super) struct Ambush {
    pub(super) signal: Signal,
    /// Who was hit, and when.
    pub(super) hit: oneshot::Sender<(WorkerId, Time)>,
}
