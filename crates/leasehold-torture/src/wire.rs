//! The protocol between the parent and a worker: one JSON object per line, over the worker's
//! standard input and output.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::clocks::WallClock;
use super::history::{Event, LockSpec, OpId, Time, WorkerId};
use super::resource::Read;

/// The hidden subcommand of a worker process.
pub const WORKER: &str = "torture-worker";

/// The parameters of a worker. They are sent on its standard input and not on its command line,
/// where other users could see the credentials of a store's URL.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) worker: WorkerId,
    pub(super) store: Where,
    pub(super) locks: Vec<LockSpec>,
    pub(super) lease_ms: u64,
    /// The name of the run, if its fenced resource is in the store itself.
    pub(super) ledger: Option<String>,
    pub(super) seed: u64,
    /// The worker's wall clock, if it is a wrong one.
    pub(super) clock: Option<WallClock>,
}

/// How a worker reaches the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Where {
    /// Directly, like any other client.
    Url(String),
    /// The store is in the parent, which serves it on this socket.
    Served(PathBuf),
}

/// A message from the parent to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToWorker {
    Setup(Setup),
    /// The contents of both resources. `None`: the fenced one refused the token.
    Read {
        op: OpId,
        plain: Read,
        fenced: Option<Read>,
    },
    /// Whether each resource accepted the write.
    Wrote {
        op: OpId,
        plain: bool,
        fenced: bool,
    },
    /// Requests that the worker begins no new operations and sends `Bye` when the current ones have
    /// ended.
    Stop,
}

/// A message from a worker to the parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromWorker {
    Event(Event),
    /// Requests the contents of both resources of a lock.
    Read {
        op: OpId,
        lock: usize,
        token: u64,
    },
    /// Writes to both resources what was read, incremented and with `op` added.
    Write {
        op: OpId,
        lock: usize,
        token: u64,
        plain: Read,
        fenced: Option<Read>,
    },
    /// The process was not scheduled.
    Stalled {
        from: Time,
        to: Time,
    },
    /// The worker cannot begin, with the reason.
    Unable(String),
    /// The worker has ended everything that it began.
    Bye,
}

/// Formats a message as one line.
pub(super) fn line(message: &impl Serialize) -> String {
    // These types consist of numbers, strings and lists, which JSON can always represent.
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
        fn worker_messages_round_trip_or_are_rejected(text in testbed::texts(&[
            "{\"Write\":{\"op\":{\"worker\":{\"slot\":1,\"life\":0},\"n\":4},\"lock\":0,\"token\":9,\"plain\":{\"value\":1,\"set\":[]},\"fenced\":null}}",
            "{\"Stalled\":{\"from\":1,\"to\":2}}", "\"Bye\"", "{\"Unable\":\"x\"}",
        ])) {
            if let Ok(read) = serde_json::from_str::<FromWorker>(&text) {
                let encoded = line(&read);
                let again: FromWorker = serde_json::from_str(&encoded).unwrap();
                proptest::prop_assert_eq!(line(&again), encoded);
            }
            let _ = serde_json::from_str::<ToWorker>(&text);
        }
    }
}
