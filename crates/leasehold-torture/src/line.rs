//! How each worker's connection to the store is: what a cut changes.

use leasehold::kit::locked;
use std::collections::HashMap;
use std::sync::Mutex;

use tokio::sync::watch;

use super::history::WorkerId;

/// How a worker's connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Line {
    #[default]
    Up,
    /// Nothing passes; what is on the way arrives when it is up again.
    Frozen,
    /// Requests arrive and are done; their answers are lost.
    Deaf,
    /// Closed, and closed again when it is opened.
    Closed,
}

/// The lines of all workers, each up at first.
#[derive(Debug, Default)]
pub(super) struct Lines(Mutex<HashMap<WorkerId, watch::Sender<Line>>>);

impl Lines {
    /// Cuts a worker's connection, or mends it.
    pub(super) fn set(&self, worker: WorkerId, line: Line) {
        self.with(worker, |sender| sender.send_replace(line));
    }

    /// Follows a worker's line, until it is [forgotten](Self::forget).
    pub(super) fn of(&self, worker: WorkerId) -> watch::Receiver<Line> {
        self.with(worker, watch::Sender::subscribe)
    }

    /// The worker has ended: whoever follows its line learns so.
    pub(super) fn forget(&self, worker: WorkerId) {
        locked(&self.0).remove(&worker);
    }

    fn with<T>(&self, worker: WorkerId, work: impl FnOnce(&watch::Sender<Line>) -> T) -> T {
        work(locked(&self.0).entry(worker).or_default())
    }
}
