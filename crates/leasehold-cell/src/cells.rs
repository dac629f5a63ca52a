//! What a system must be able to do that is to keep locks: read one value, and write it if it is still
//! what was read. What it can do besides is data ([`System`]).

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::wall_micros;
use leasehold_core::{Error, ErrorKind, Result};
use tokio::sync::mpsc::UnboundedSender;

/// Which state of a cell was read, as the system tells them apart. No two states that a cell ever had
/// have the same, not even after it was removed and made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(pub String);

/// One step on one cell. Keys are printable ASCII without spaces, no longer than
/// [`System::longest_key`].
#[derive(Clone, Debug)]
pub enum Request {
    /// Reads it.
    Get {
        /// Which cell.
        key: String,
    },
    /// Writes it if there is none.
    Create {
        /// Which cell.
        key: String,
        /// What is in it.
        value: Vec<u8>,
        /// When it goes by itself; `None`: never.
        lives: Option<Duration>,
    },
    /// Writes it if it is still what was read.
    Replace {
        /// Which cell.
        key: String,
        /// What is in it from now on.
        value: Vec<u8>,
        /// What was read.
        version: Version,
        /// When it goes by itself; `None`: never.
        lives: Option<Duration>,
    },
    /// Lets it live for that long from now, if it is there. Where that takes a write, it is written as it
    /// was, if it is still what was read.
    Touch {
        /// Which cell.
        key: String,
        /// What is in it.
        value: Vec<u8>,
        /// What was read.
        version: Version,
        /// How long.
        lives: Duration,
    },
    /// Removes it if it is still what was read. In a system that forgets nothing, only a client's own session is, and
    /// nothing but a mark that it is gone is ever created under that key again.
    Remove {
        /// Which cell.
        key: String,
        /// What was read.
        version: Version,
    },
}

impl Request {
    /// Which cell it is about.
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

/// What one [`Request`] came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// There is no such cell: what a `Get` and a `Touch` find.
    Absent,
    /// What a `Get` found.
    Found(Found),
    /// Created, replaced, or touched by a write; this is what it is now.
    Written(Version),
    /// Removed; or touched, and it is what it was, its version too.
    Done,
    /// Not what was read, or not absent: nothing was written.
    Refused,
    /// A `Replace` was refused, and was perhaps done before: the request may be repeated on its way, and
    /// another client has written since.
    InDoubt,
}

/// A cell as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What is in it.
    pub value: Vec<u8>,
    /// What it is to be compared with.
    pub version: Version,
    /// What is left of its life, where it ends by itself.
    pub remaining: Option<Duration>,
}

/// How many cells are looked at in one round trip.
const AT_ONCE: usize = 256;

/// How late an answer may be, where the system says nothing else.
pub(crate) const SLOW: Duration = Duration::from_secs(1);

/// The largest queue, where the system says nothing else.
pub(crate) const CROWD: usize = 4_000;

/// How long a queue stays where nobody stands, if not for good: clocks are not off by as much.
pub(crate) const IDLE: Duration = Duration::from_secs(86_400);

/// What a system is like.
#[derive(Clone, Debug)]
pub struct System {
    /// The longest key, in bytes: at least 100.
    pub longest_key: usize,
    /// The largest value, in bytes.
    pub largest_value: usize,
    /// How many claims a queue has at most. Each look reads the whole queue, so that the bytes of a crowd grow with the
    /// square of its size: more than the connections carry, and the heartbeats of all would be late.
    pub crowd: usize,
    /// By how much earlier than it was told to a cell may go by itself: the grain of the system's clock.
    pub grain: Duration,
    /// An answer that took longer proves nothing of the life of a session: a system that was stopped, and goes on, may
    /// reckon with an old time.
    pub slow: Duration,
    /// Whether it may lose all at once and go on, empty: then locks stay closed for as long as a holder
    /// may go on that it has forgotten.
    pub forgets: bool,
    /// Whether a look may show what was, and is no more: then no session is taken for gone that only a
    /// look says is gone.
    pub looks_behind: bool,
    /// How long a queue stays where nobody stands: for so long its last token is remembered. `None`: for
    /// good.
    pub idle: Option<Duration>,
}

impl System {
    /// One that forgets nothing, shows what is, and reckons as finely as it is asked to: what an adapter sets
    /// otherwise is what is odd about its system.
    pub const fn lasting(longest_key: usize, largest_value: usize) -> Self {
        let (forgets, looks_behind, idle) = (false, false, None);
        let (crowd, grain, slow) = (CROWD, Duration::ZERO, SLOW);
        Self { longest_key, largest_value, crowd, grain, slow, forgets, looks_behind, idle }
    }
}

/// What is heard of other clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// One of them said this.
    Said(String),
    /// Something may have been said that was not heard.
    Missed,
}

/// How clients tell each other something, where the system has a way to: what is said arrives at once, or
/// not at all.
#[async_trait]
pub trait Bells: fmt::Debug + Send + Sync {
    /// Hears from now on what is said to this name, and no more what is said to the one before.
    ///
    /// # Errors
    /// As the system fails.
    async fn listen(&self, name: &str, heard: UnboundedSender<Heard>) -> Result<()>;

    /// Says this to whoever listens under that name. No answer is waited for.
    async fn ring(&self, name: &str, what: String);
}

/// A system that can compare and set one value.
#[async_trait]
pub trait Cells: fmt::Debug + Send + Sync + 'static {
    /// What it is like; does not change.
    fn system(&self) -> &System;

    /// Does these, in one round trip where the system has a way to; one answer for each. Between two of
    /// them others may do theirs. One after the other where the system [`forgets`](System::forgets), and
    /// where they are about the same cell: a look behind a write is for the case that it is refused, and
    /// may be left out, as if nothing were there, where it is done.
    ///
    /// No write is repeated here whose answer was lost: the second of one that was done would be refused, and
    /// told as if nothing had been written.
    ///
    /// # Cancel safety
    /// Dropped, any of them may be done, also later.
    ///
    /// # Errors
    /// As the system fails; then it is unknown which of them were done, and they may still be.
    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>>;

    /// Looks at these cells, each on its own: one that fails or hangs costs no other one its answer. One answer for
    /// each, none later than `limit` where the system is asked for each cell separately.
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

    /// The wall clock that tokens are drawn from, in microseconds since 1970: the system's where it can
    /// be told. No I/O.
    fn wall_micros(&self) -> u64 {
        wall_micros()
    }

    /// The bells of clients, where the system has any.
    fn bells(&self) -> Option<&dyn Bells> {
        None
    }

    /// The keys that begin so, for people: some that come or go meanwhile may be missing.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where there is no such thing; otherwise as the system fails.
    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let _ = prefix;
        let what = "this system cannot list its keys: ask for one lock by its name";
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    /// What is wrong with the set-up.
    ///
    /// # Errors
    /// As the system fails.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// How many round trips it made so far: for measurements.
    fn round_trips(&self) -> u64 {
        0
    }
}
