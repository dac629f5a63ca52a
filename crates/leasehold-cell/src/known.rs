//! What this client wrote last, by the lock's name: where nobody came in between, the next call needs no
//! look. It is only ever a guess, which the system refuses if it is wrong; and then there is none until a
//! look has shown that nobody else comes there any more.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::kit::locked;
use leasehold_core::queue::Queue;
use leasehold_core::{Moment, Name};

use crate::cells::Version;

/// How many names are kept in mind.
const MOST: usize = 16_384;
/// The longest queue that is worth it: others change too often.
const LONGEST: usize = 2;

/// A lock's cell, as it was when it was last read or written.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) queue: Queue,
    /// `None`: there is no cell.
    pub(crate) version: Option<Version>,
}

/// What is guessed at.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Guess {
    /// That the lock is as free as we left it.
    Free,
    /// That nobody has come since we did.
    Alone,
}

/// A lock's cell as we wrote it last, and what is worth guessing.
#[derive(Debug)]
struct Kept {
    seen: Option<Seen>,
    /// By [`Guess`].
    is_worth: [bool; 2],
    /// Until then others go first, for about so long.
    polite: (Moment, Duration),
}

impl Kept {
    fn new() -> Self {
        Self { seen: None, is_worth: [true; 2], polite: (Moment::from_nanos(0), Duration::ZERO) }
    }
}

/// Sessions that were seen alive, and until when another look would show nothing else.
#[derive(Debug, Default)]
pub(crate) struct Alive(Mutex<HashMap<String, Moment>>);

impl Alive {
    /// Whether a look at this session would show that it lives.
    pub(crate) fn is_sure(&self, session: &str, now: Moment) -> bool {
        locked(&self.0).get(session).is_some_and(|until| *until > now)
    }

    /// It was seen alive, and need not be looked at before that.
    pub(crate) fn note(&self, session: &str, until: Moment) {
        let mut all = locked(&self.0);
        if all.len() >= MOST && !all.contains_key(session) {
            all.clear();
        }
        all.insert(session.to_owned(), until);
    }

    /// It may be gone.
    pub(crate) fn forget(&self, session: &str) {
        locked(&self.0).remove(session);
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<HashMap<Name, Kept>>);

impl Known {
    /// What is known, if it is worth a guess and of use.
    pub(crate) fn guess(
        &self,
        name: &Name,
        guess: Guess,
        is_of_use: impl Fn(&Queue) -> bool,
    ) -> Option<Seen> {
        let all = locked(&self.0);
        let kept = all.get(name).filter(|kept| kept.is_worth[guess as usize])?;
        kept.seen.clone().filter(|seen| is_of_use(&seen.queue))
    }

    /// This was written.
    pub(crate) fn keep(&self, name: &Name, seen: Seen) {
        let seen = Some(seen).filter(|seen| seen.queue.entries().len() <= LONGEST);
        let mut all = locked(&self.0);
        if all.len() >= MOST && !all.contains_key(name) {
            all.clear();
        }
        let kept = all.entry(name.clone()).or_insert_with(Kept::new);
        kept.seen = seen;
    }

    /// A guess was wrong.
    pub(crate) fn was_wrong(&self, name: &Name, guess: Guess) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            kept.is_worth[guess as usize] = false;
        }
    }

    /// Somebody wants it in vain: until then others go first, for about so long.
    pub(crate) fn knocked(&self, name: &Name, until: Moment, pause: Duration) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            kept.is_worth[Guess::Free as usize] = false;
            kept.polite = (until, pause);
        }
    }

    /// How long others go first, if they do.
    pub(crate) fn others_first(&self, name: &Name, now: Moment) -> Option<Duration> {
        let (until, pause) = locked(&self.0).get(name)?.polite;
        (until > now).then_some(pause)
    }

    /// What is there now: whether a guess would have been right.
    pub(crate) fn looked(&self, name: &Name, guess: Guess, now: &Seen) {
        if let Some(kept) = locked(&self.0).get_mut(name) {
            let ours = kept.seen.as_ref().and_then(|seen| seen.version.as_ref());
            kept.is_worth[guess as usize] |= ours.is_some() && ours == now.version.as_ref();
        }
    }
}
