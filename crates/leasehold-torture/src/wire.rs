//! What the parent and a worker say to each other: one JSON object a line, over the worker's
//! standard input and output.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::history::{Event, LockSpec, OpId, Time, WorkerId};
use super::resource::Read;

/// The hidden subcommand of a worker process.
pub const WORKER: &str = "torture-worker";

/// What a worker needs to begin. Told on its standard input and not on its command line, where
/// other people would see the credentials of a store's URL.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) worker: WorkerId,
    pub(super) store: Where,
    pub(super) locks: Vec<LockSpec>,
    pub(super) lease_ms: u64,
    /// The run whose fenced resource is in the store itself, if it is.
    pub(super) ledger: Option<String>,
    pub(super) seed: u64,
}

/// How a worker reaches the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Where {
    /// As any user would.
    Url(String),
    /// The store lives in the parent, which serves it on this socket.
    Served(PathBuf),
}

/// From the parent to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToWorker {
    Setup(Setup),
    /// What both resources hold; `None`: the fenced one refused the token.
    Read {
        op: OpId,
        plain: Read,
        fenced: Option<Read>,
    },
    /// Whether each resource took the write.
    Wrote {
        op: OpId,
        plain: bool,
        fenced: bool,
    },
    /// No new operations; say goodbye when those under way have ended.
    Stop,
}

/// From a worker to the parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromWorker {
    Event(Event),
    /// Asks both resources of a lock for what they hold.
    Read {
        op: OpId,
        lock: usize,
        token: u64,
    },
    /// Writes what was read, incremented and with `op` added, back to both.
    Write {
        op: OpId,
        lock: usize,
        token: u64,
        plain: Read,
        fenced: Option<Read>,
    },
    /// The process did not get to run.
    Stalled {
        from: Time,
        to: Time,
    },
    /// It cannot begin, and why.
    Unable(String),
    /// It has ended all it began.
    Bye,
}

/// One line.
pub(super) fn line(message: &impl Serialize) -> String {
    // Numbers, strings and lists of them: there is nothing in these types that JSON lacks.
    let mut line = serde_json::to_string(message).unwrap_or_default();
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn what_a_worker_says_is_read_as_it_was_said_or_refused(text in testbed::texts(&[
            "{\"Write\":{\"op\":{\"worker\":{\"slot\":1,\"life\":0},\"n\":4},\"lock\":0,\"token\":9,\"plain\":{\"value\":1,\"set\":[]},\"fenced\":null}}",
            "{\"Stalled\":{\"from\":1,\"to\":2}}", "\"Bye\"", "{\"Unable\":\"x\"}",
        ])) {
            if let Ok(read) = serde_json::from_str::<FromWorker>(&text) {
                let said = line(&read);
                let again: FromWorker = serde_json::from_str(&said).unwrap();
                proptest::prop_assert_eq!(line(&again), said);
            }
            let _ = serde_json::from_str::<ToWorker>(&text);
        }
    }
}
