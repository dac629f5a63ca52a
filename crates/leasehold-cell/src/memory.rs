//! Cells in memory, for tests of the queue, and as the simplest possible adapter.
//!
//! A test can make these cells lose replies, lose one cell or all of them, or stop responding. As
//! in a real system, requests of other clients can run between two requests of one call. They can
//! also behave [like a stream](MemoryCells::like_a_stream) of messages.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::kit::locked;
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};
use tokio::sync::mpsc::UnboundedSender;

use crate::cells::{
    Answer, CROWD, Cells, Found, IDLE, Message, Messenger, Request, SLOW, System, Version,
};

/// Cells in memory. See the module's documentation.
#[derive(Debug)]
pub struct MemoryCells {
    system: System,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cells: HashMap<String, Kept>,
    writes: u64,
    round_trips: u64,
    /// Number of calls whose replies will be lost.
    lost: usize,
    /// Number of writes that will fail because the store is full.
    full: usize,
    is_away: bool,
    /// Keys that reads do not find.
    hidden: HashSet<String>,
    /// Whether a touch is a write.
    rewrites: bool,
    /// The listeners by name.
    listening: HashMap<String, UnboundedSender<Message>>,
}

#[derive(Debug)]
struct Kept {
    value: Vec<u8>,
    version: u64,
    ends: Moment,
}

impl Default for MemoryCells {
    fn default() -> Self {
        let system = System {
            longest_key: 250,
            largest_value: 1 << 20,
            crowd: CROWD,
            slow: SLOW,
            grain: Duration::ZERO,
            forgets: true,
            looks_behind: false,
            idle: Some(IDLE),
        };
        Self { system, clock: Clock::default(), state: Mutex::default() }
    }
}

impl MemoryCells {
    /// Uses `clock` for expiry.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Creates cells that lose no data, where a touch is a write, reads can be stale, and clients
    /// can send messages.
    pub fn like_a_stream() -> Self {
        let mut cells = Self::default();
        let system = &mut cells.system;
        (system.forgets, system.looks_behind) = (false, true);
        (system.idle, system.grain) = (None, Duration::from_millis(500));
        locked(&cells.state).rewrites = true;
        cells
    }

    /// Hides a key from reads, as on a server that lags behind, or shows it again.
    pub fn hide(&self, key: &str, is_hidden: bool) {
        let mut state = locked(&self.state);
        if is_hidden {
            state.hidden.insert(key.to_owned())
        } else {
            state.hidden.remove(key)
        };
    }

    /// Removes a key, as a full cache does.
    pub fn evict(&self, key: &str) {
        locked(&self.state).cells.remove(key);
    }

    /// Removes all keys.
    pub fn flush(&self) {
        locked(&self.state).cells.clear();
    }

    /// Writes a value as another program would.
    pub fn put(&self, key: &str, value: &[u8]) {
        let mut state = locked(&self.state);
        state.writes += 1;
        let version = state.writes;
        let kept = Kept { value: value.to_vec(), version, ends: Moment::NEVER };
        state.cells.insert(key.to_owned(), kept);
    }

    /// Returns the value of a key.
    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        locked(&self.state).cells.get(key).map(|kept| kept.value.clone())
    }

    /// Executes the next `calls` calls, but loses their replies.
    pub fn lose_answers(&self, calls: usize) {
        locked(&self.state).lost = calls;
    }

    /// Makes the next `calls` writes fail because the store is full. The old value is lost.
    pub fn fill(&self, calls: usize) {
        locked(&self.state).full = calls;
    }

    /// Makes the system unreachable, or reachable again.
    pub fn set_away(&self, is_away: bool) {
        locked(&self.state).is_away = is_away;
    }
}

impl State {
    fn write(&mut self, key: String, value: Vec<u8>, ends: Moment) -> Answer {
        self.writes += 1;
        let version = self.writes;
        self.cells.insert(key, Kept { value, version, ends });
        Answer::Written(Version(version.to_string()))
    }

    fn is(&self, key: &str, version: &Version) -> bool {
        self.cells.get(key).is_some_and(|kept| kept.version.to_string() == version.0)
    }

    fn one(&mut self, request: Request, now: Moment) -> Answer {
        self.cells.retain(|_, kept| kept.ends > now);
        let ends = |lives: Option<Duration>| lives.map_or(Moment::NEVER, |lives| now.plus(lives));
        match request {
            Request::Get { key } => match self.cells.get(&key) {
                _ if self.hidden.contains(&key) => Answer::Absent,
                None => Answer::Absent,
                Some(kept) => Answer::Found(Found {
                    value: kept.value.clone(),
                    version: Version(kept.version.to_string()),
                    remaining: (kept.ends < Moment::NEVER).then(|| kept.ends.since(now)),
                }),
            },
            Request::Create { key, value, lives } if !self.cells.contains_key(&key) => {
                self.write(key, value, ends(lives))
            }
            Request::Replace { key, value, version, lives } if self.is(&key, &version) => {
                self.write(key, value, ends(lives))
            }
            Request::Touch { key, value, version, lives } if self.rewrites => {
                match self.is(&key, &version) {
                    true => self.write(key, value, now.plus(lives)),
                    false => Answer::Refused,
                }
            }
            Request::Touch { key, lives, .. } => match self.cells.get_mut(&key) {
                Some(kept) => {
                    kept.ends = now.plus(lives);
                    Answer::Done
                }
                None => Answer::Absent,
            },
            Request::Remove { key, version } if self.is(&key, &version) => {
                self.cells.remove(&key);
                Answer::Done
            }
            Request::Create { .. } | Request::Replace { .. } | Request::Remove { .. } => {
                Answer::Refused
            }
        }
    }
}

#[async_trait]
impl Cells for MemoryCells {
    fn system(&self) -> &System {
        &self.system
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let silent = || Error::new(ErrorKind::Unreachable, "the test made the store unreachable");
        if locked(&self.state).is_away {
            return Err(silent());
        }
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            tokio::task::yield_now().await;
            let writes = matches!(request, Request::Create { .. } | Request::Replace { .. });
            let mut state = locked(&self.state);
            if writes && state.full > 0 {
                state.full -= 1;
                state.cells.remove(request.key());
                return Err(Error::new(ErrorKind::Full, "the test made the store full"));
            }
            drop(state);
            answers.push(locked(&self.state).one(request, self.clock.now()));
        }
        tokio::task::yield_now().await;
        let mut state = locked(&self.state);
        state.round_trips += 1;
        if state.lost > 0 {
            state.lost -= 1;
            return Err(silent());
        }
        Ok(answers)
    }

    fn wall_micros(&self) -> u64 {
        self.clock.wall_micros()
    }

    fn messenger(&self) -> Option<&dyn Messenger> {
        locked(&self.state).rewrites.then_some(self)
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let state = locked(&self.state);
        Ok(state.cells.keys().filter(|key| key.starts_with(prefix)).cloned().collect())
    }

    fn round_trips(&self) -> u64 {
        locked(&self.state).round_trips
    }
}

#[async_trait]
impl Messenger for MemoryCells {
    async fn listen(&self, name: &str, sender: UnboundedSender<Message>) -> Result<()> {
        let mut state = locked(&self.state);
        state.listening.retain(|_, others| !others.is_closed() && !others.same_channel(&sender));
        state.listening.insert(name.to_owned(), sender);
        Ok(())
    }

    async fn send(&self, name: &str, what: String) {
        if let Some(sender) = locked(&self.state).listening.get(name) {
            // The listener may be gone.
            let _ = sender.send(Message::Text(what));
        }
    }
}
