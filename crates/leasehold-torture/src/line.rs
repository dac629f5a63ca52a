//! The state of each worker's connection to the store, which a cut changes.

use leasehold::store::kit::locked;
use std::collections::HashMap;
use std::sync::Mutex;

use tokio::sync::watch;

use super::history::WorkerId;

/// The state of a worker's connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Line {
    #[default]
    Up,
    /// Nothing passes. Data in transit arrives when the line is up again.
    Frozen,
    /// Requests arrive and are executed. Their answers arrive when the line is up again.
    Withheld,
    /// Requests arrive and are executed, but their answers are lost.
    Deaf,
    /// The connection is closed, and closed again whenever it is opened.
    Closed,
}

/// The lines of all workers. Each line is up at first.
#[derive(Debug, Default)]
pub(super) struct Lines(Mutex<HashMap<WorkerId, watch::Sender<Line>>>);

impl Lines {
    /// Cuts or restores a worker's connection.
    pub(super) fn set(&self, worker: WorkerId, line: Line) {
        self.with(worker, |sender| sender.send_replace(line));
    }

    /// Subscribes to a worker's line, until it is [forgotten](Self::forget).
    pub(super) fn of(&self, worker: WorkerId) -> watch::Receiver<Line> {
        self.with(worker, watch::Sender::subscribe)
    }

    /// Removes a worker that has ended. The subscribers of its line are notified.
    pub(super) fn forget(&self, worker: WorkerId) {
        locked(&self.0).remove(&worker);
    }

    fn with<T>(&self, worker: WorkerId, work: impl FnOnce(&watch::Sender<Line>) -> T) -> T {
        work(locked(&self.0).entry(worker).or_default())
    }
}
