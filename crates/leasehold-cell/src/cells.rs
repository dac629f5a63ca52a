//! What a system must support to store locks: read a value, and write it if it has not changed
//! since. [`System`] describes its other properties.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::wall_micros;
use leasehold_core::{Error, ErrorKind, Result};
use tokio::sync::mpsc::UnboundedSender;

/// The version of a cell that was read. It is unique among all states that a cell ever had, even
/// after the cell was removed and created again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(pub String);

/// An operation on one cell. Keys are printable ASCII without spaces, at most
/// [`System::longest_key`] bytes.
#[derive(Clone, Debug)]
pub enum Request {
    /// Reads the cell.
    Get {
        /// The cell's key.
        key: String,
    },
    /// Writes the cell if it does not exist.
    Create {
        /// The cell's key.
        key: String,
        /// The value.
        value: Vec<u8>,
        /// Time until the cell expires; `None`: never.
        lives: Option<Duration>,
    },
    /// Writes the cell if it still has the version that was read.
    Replace {
        /// The cell's key.
        key: String,
        /// The new value.
        value: Vec<u8>,
        /// The version that was read.
        version: Version,
        /// Time until the cell expires; `None`: never.
        lives: Option<Duration>,
    },
    /// Sets the time until an existing cell expires. If the system needs a write for this, it
    /// writes the same value, provided that the cell still has the version that was read.
    Touch {
        /// The cell's key.
        key: String,
        /// The current value.
        value: Vec<u8>,
        /// The version that was read.
        version: Version,
        /// Time until the cell expires.
        lives: Duration,
    },
    /// Removes the cell if it still has the version that was read. In a system that cannot lose its
    /// data, a client only removes its own session. Under that key, only a marker for the removed
    /// session is ever created again.
    Remove {
        /// The cell's key.
        key: String,
        /// The version that was read.
        version: Version,
    },
}

impl Request {
    /// Returns the cell's key.
    pub fn key(&self) -> &str {
        match self {
            Self::Get { key }
            | Self::Create { key, .. }
            | Self::Replace { key, .. }
            | Self::Touch { key, .. }
            | Self::Remove { key, .. } => key,
        }
    }
}

/// The result of a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The cell does not exist (result of `Get` and `Touch`).
    Absent,
    /// The cell that a `Get` has read.
    Found(Found),
    /// The cell was created, replaced, or touched with a write; this is its new version.
    Written(Version),
    /// The cell was removed, or touched without a change of its version.
    Done,
    /// Nothing was written: the cell has another version, or already exists.
    Refused,
    /// A `Replace` was rejected, but it may still have taken effect. A proxy or server may have
    /// delivered the request twice and returned only the second result. Reading the cell does not
    /// settle it: another client has written since, or the first delivery is still being processed.
    InDoubt,
}

/// A cell as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The value.
    pub value: Vec<u8>,
    /// The version, for conditional writes.
    pub version: Version,
    /// Time until the cell expires, if it does.
    pub remaining: Option<Duration>,
}

/// Maximum number of cells read in one round trip.
const AT_ONCE: usize = 256;

/// Default of [`System::slow`].
pub(crate) const SLOW: Duration = Duration::from_secs(1);

/// Default maximum number of claims in a queue.
pub(crate) const CROWD: usize = 4_000;

/// How long an empty queue is kept if queues expire. Must exceed the error of any client's clock.
pub(crate) const IDLE: Duration = Duration::from_secs(86_400);

/// The properties of a system that stores cells.
#[derive(Clone, Debug)]
pub struct System {
    /// Maximum length of a key in bytes; at least 100.
    pub longest_key: usize,
    /// Maximum size of a value in bytes.
    pub largest_value: usize,
    /// Maximum number of claims in a queue. Each read returns the whole queue, so the traffic grows
    /// with the square of its length. In a longer queue, renewals would be late.
    pub crowd: usize,
    /// The maximum time by which a cell may expire too early, because of the resolution of the
    /// system's clock.
    pub grain: Duration,
    /// An answer that took longer than this does not prove that a session is alive, because a
    /// system that was paused may use an old time when it resumes.
    pub slow: Duration,
    /// Whether the system can lose all data and continue empty. If so, clients grant no lock after
    /// a loss until all lost holds have ended.
    pub forgets: bool,
    /// Whether reads can be stale. If so, a session is never considered expired because of a read
    /// alone.
    pub looks_behind: bool,
    /// How long an empty queue, and so its last token, is kept; `None`: forever.
    pub idle: Option<Duration>,
}

impl System {
    /// Describes a system that loses no data, has no stale reads, and has an exact clock. An
    /// adapter changes the fields that differ for its system.
    pub const fn lasting(longest_key: usize, largest_value: usize) -> Self {
        let (forgets, looks_behind, idle) = (false, false, None);
        let (crowd, grain, slow) = (CROWD, Duration::ZERO, SLOW);
        Self { longest_key, largest_value, crowd, grain, slow, forgets, looks_behind, idle }
    }
}

/// A message from another client, or the loss of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The text of the message.
    Text(String),
    /// Messages may have been lost.
    Missed,
}

/// Messages between clients, if the system supports them. A message arrives immediately or not at
/// all.
#[async_trait]
pub trait Messenger: fmt::Debug + Send + Sync {
    /// Forwards the messages to `name` to `sender` from now on, instead of those to the previous
    /// name.
    ///
    /// # Errors
    /// The errors of the system.
    async fn listen(&self, name: &str, sender: UnboundedSender<Message>) -> Result<()>;

    /// Sends a message to the client that listens under this name, without waiting for a reply.
    async fn send(&self, name: &str, what: String);
}

/// A system that supports compare-and-set of single values.
#[async_trait]
pub trait Cells: fmt::Debug + Send + Sync + 'static {
    /// Returns the properties of the system, which do not change.
    fn system(&self) -> &System;

    /// Runs the requests, in one round trip if possible, and returns one answer for each.
    ///
    /// Other clients may run requests in between. The implementation must keep the order of
    /// requests on the same cell, and of all requests if the system [`forgets`](System::forgets). A
    /// `Get` after a write on the same cell is needed only if the write is refused. If the write
    /// succeeds, the implementation may skip the `Get` and answer [`Answer::Absent`].
    ///
    /// Do not repeat a write whose reply was lost. If the first one succeeded, the second would be
    /// refused and reported as if nothing had been written.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened, and may still happen later.
    ///
    /// # Errors
    /// The errors of the system. It is then unknown which requests were executed, and some may
    /// still be executed later.
    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>>;

    /// Reads the cells with these keys independently. A cell that fails or hangs does not affect
    /// the others. Returns one answer per key, within `limit` if the system reads each cell
    /// separately.
    async fn looks(&self, keys: Vec<String>, limit: Duration) -> Vec<Result<Answer>> {
        let _ = limit;
        let mut all = Vec::with_capacity(keys.len());
        for some in keys.chunks(AT_ONCE) {
            let get = |key: &String| Request::Get { key: key.clone() };
            match self.run(some.iter().map(get).collect()).await {
                Ok(answers) => all.extend(answers.into_iter().map(Ok)),
                Err(error) if some.len() > 1 && error.kind() != ErrorKind::Unreachable => {
                    for key in some {
                        let answer = self.run(vec![get(key)]).await;
                        all.push(answer.map(|mut one| one.pop().unwrap_or(Answer::Absent)));
                    }
                }
                Err(error) => {
                    all.extend(some.iter().map(|_| Err(Error::new(error.kind(), error.reason()))));
                }
            }
        }
        all
    }

    /// Returns the wall clock for new tokens, in microseconds since 1970. This is the system's
    /// clock if it is known. No I/O.
    fn wall_micros(&self) -> u64 {
        wall_micros()
    }

    /// Returns the messenger between clients, or `None` if the system has none.
    fn messenger(&self) -> Option<&dyn Messenger> {
        None
    }

    /// Returns the keys with this prefix, for listings. Keys that are created or removed at the
    /// same time may be missing.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`]: the system cannot list keys.
    /// - The errors of the system.
    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let _ = prefix;
        let what = "this store cannot list its keys";
        Err(Error::new(ErrorKind::Unsupported, what).with_hint("give the name of one lock"))
    }

    /// Returns problems with the system's configuration.
    ///
    /// # Errors
    /// The errors of the system.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Returns the number of round trips so far. For measurements.
    fn round_trips(&self) -> u64 {
        0
    }
}
