//! The ids of a client's claims, taken from the system's random source many at once: asking it costs as
//! much as half of all else that a free lock in memory costs.
//!
//! # Why no id is drawn twice
//! Whoever draws an id takes it out of what was kept, under a mutex. What is left could be drawn a second
//! time only where this memory is there twice:
//! - *A fork.* What is kept belongs to one client, and a client draws only in the process that it was
//!   made in: [`Core::draw`](super::core::Core::draw) looks which one this is, and nothing of anybody
//!   else's runs between that look and the draw. A child makes a client of its own, which has drawn nothing.
//! - *A machine that was copied while it ran* (a snapshot that is started twice). Nobody can tell the copies
//!   that they are two, so what was kept is not all of an id: the nanosecond of the draw is mixed in. Of two copies
//!   that go on, both would have to draw the same number in the same nanosecond. What is random stays so,
//!   whatever it is combined with in this way.

use std::fmt;
use std::sync::Mutex;

use crate::base::clock::Moment;
use crate::base::locked::locked;
use crate::base::world;
use crate::words::claim::{ClaimId, fill};
use crate::words::error::Result;

/// How many are taken from the system at once: two lines of a page, which it makes in one go.
const MANY: usize = 32;

/// Random ids that were not used yet.
#[derive(Default)]
pub(super) struct Ids {
    unused: Mutex<Vec<u128>>,
}

impl fmt::Debug for Ids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ids(…)")
    }
}

impl Ids {
    /// The next one.
    pub(super) fn draw(&self, now: Moment) -> Result<ClaimId> {
        if let Some(drawn) = world::chance() {
            return Ok(ClaimId::from_u128(drawn));
        }
        let drawn = self.take()?;
        Ok(ClaimId::from_u128(drawn ^ u128::from(now.as_nanos())))
    }

    fn take(&self) -> Result<u128> {
        let mut unused = locked(&self.unused);
        if let Some(drawn) = unused.pop() {
            return Ok(drawn);
        }
        let mut bytes = [[0; 16]; MANY];
        fill(bytes.as_flattened_mut())?;
        let [drawn, others @ ..] = bytes.map(u128::from_le_bytes);
        unused.extend(others);
        Ok(drawn)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn s91_no_id_is_drawn_twice() {
        let (ids, others) = (Ids::default(), Ids::default());
        let now = Moment::from_nanos(7);
        let draw = |n: usize| if n.is_multiple_of(2) { ids.draw(now) } else { others.draw(now) };
        let drawn: HashSet<u128> = (0..10 * MANY).map(|n| draw(n).unwrap().as_u128()).collect();
        assert_eq!(drawn.len(), 10 * MANY);
        let zeroes: u32 = drawn.iter().map(|id| id.count_zeros()).sum();
        let bits = 128 * 10 * MANY as u32;
        assert!(zeroes.abs_diff(bits / 2) < bits / 20, "{zeroes} of {bits} are 0");
    }

    /// What a copy of a running machine has: the same memory, and another moment.
    #[test]
    fn copies_of_what_was_kept_draw_other_ids() {
        let ids = Ids::default();
        ids.draw(Moment::from_nanos(1)).unwrap();
        let copy = Ids { unused: Mutex::new(locked(&ids.unused).clone()) };
        let (ours, theirs) =
            (ids.draw(Moment::from_nanos(2)).unwrap(), copy.draw(Moment::from_nanos(3)).unwrap());
        assert_ne!(ours, theirs);
    }
}
