//! The last write of this client per lock. If no other client has written since, the next call
//! needs no read.
//!
//! This client can only guess that no other client has written. The system refuses a write that is
//! based on a wrong guess. After a wrong guess, the client reads first until a read shows that its
//! own last write is still current.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::kit::locked;
use leasehold_core::queue::Queue;
use leasehold_core::{Moment, Name};

use crate::cells::Version;

/// Maximum number of names that are remembered.
const MOST: usize = 16_384;
/// Maximum length of a remembered queue. Longer ones change too often.
const LONGEST: usize = 2;

/// A lock's cell as it was last read or written.
#[derive(Clone, Debug)]
pub(crate) struct CellSnapshot {
    pub(crate) queue: Queue,
    /// The version of the cell; `None` if it does not exist.
    pub(crate) version: Option<Version>,
}

/// What is assumed about a queue without a read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Guess {
    /// This client left the lock free, and no other client has written since.
    Free,
    /// No other client has written since this client joined.
    Alone,
}

/// A lock's cell as this client wrote it last, and which guesses are worthwhile.
#[derive(Debug)]
struct LastWrite {
    seen: Option<CellSnapshot>,
    /// Whether each [`Guess`] is worthwhile.
    is_worth: [bool; 2],
    /// Until when this client lets other clients join first, and for how long it pauses each time.
    yielding: (Moment, Duration),
}

impl LastWrite {
    fn new() -> Self {
        Self { seen: None, is_worth: [true; 2], yielding: (Moment::from_nanos(0), Duration::ZERO) }
    }
}

/// Sessions that were seen alive, and until when another read would show nothing new.
#[derive(Debug, Default)]
pub(crate) struct AliveSessions(Mutex<HashMap<String, Moment>>);

impl AliveSessions {
    /// Returns whether the session is certainly alive.
    pub(crate) fn is_sure(&self, session: &str, now: Moment) -> bool {
        locked(&self.0).get(session).is_some_and(|until| *until > now)
    }

    /// Records that the session was seen alive and need not be read again before `until`.
    pub(crate) fn note(&self, session: &str, until: Moment) {
        let mut all = locked(&self.0);
        if all.len() >= MOST && !all.contains_key(session) {
            all.clear();
        }
        all.insert(session.to_owned(), until);
    }

    /// Records that the session may be gone.
    pub(crate) fn forget(&self, session: &str) {
        locked(&self.0).remove(session);
    }
}

/// The cells that this client wrote last. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct LastWrites(Mutex<HashMap<Name, LastWrite>>);

impl LastWrites {
    /// Returns the remembered cell, if this kind of guess is currently worthwhile and `is_of_use`
    /// accepts the queue.
    pub(crate) fn guess(
        &self,
        name: &Name,
        guess: Guess,
        is_of_use: impl Fn(&Queue) -> bool,
    ) -> Option<CellSnapshot> {
        let all = locked(&self.0);
        let kept = all.get(name).filter(|kept| kept.is_worth[guess as usize])?;
        kept.seen.clone().filter(|seen| is_of_use(&seen.queue))
    }

    /// Records what this client has written.
    pub(crate) fn keep(&self, name: &Name, seen: CellSnapshot) {
        let seen = Some(seen).filter(|seen| seen.queue.entries().len() <= LONGEST);
        let mut all = locked(&self.0);
        if all.len() >= MOST && !all.contains_key(name) {
            all.clear();
        }
        let kept = all.entry(name.clone()).or_insert_with(LastWrite::new);
        kept.seen = seen;
    }

    /// Records that a guess was wrong.
    pub(crate) fn was_wrong(&self, name: &Name, guess: Guess) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            kept.is_worth[guess as usize] = false;
        }
    }

    /// Records that another client has lost a race for the lock. Until `until`, this client pauses
    /// for about `pause` before each join.
    pub(crate) fn yield_until(&self, name: &Name, until: Moment, pause: Duration) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            kept.is_worth[Guess::Free as usize] = false;
            kept.yielding = (until, pause);
        }
    }

    /// Returns how long this client must pause before a join to let other clients join first, if at
    /// all.
    pub(crate) fn others_first(&self, name: &Name, now: Moment) -> Option<Duration> {
        let (until, pause) = locked(&self.0).get(name)?.yielding;
        (until > now).then_some(pause)
    }

    /// Marks this kind of guess as worthwhile if the read shows that this client wrote the cell
    /// last.
    pub(crate) fn was_read(&self, name: &Name, guess: Guess, now: &CellSnapshot) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            let ours = kept.seen.as_ref().and_then(|seen| seen.version.as_ref());
            kept.is_worth[guess as usize] |= ours.is_some() && ours == now.version.as_ref();
        }
    }
}
