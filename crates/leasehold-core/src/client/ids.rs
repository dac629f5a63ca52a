//! Random IDs for a client's claims, read from the system's random source in batches. One read of
//! that source costs half as much as everything else in acquiring a free lock in memory.
//!
//! # Why no ID is drawn twice
//! Drawing an ID removes it from the kept batch, under a mutex. A kept ID could be drawn a second
//! time only if this memory exists twice:
//!
//! - *After a fork.* The batch belongs to one client, and a client draws only in the process that
//!   created it. [`Core::draw`](super::core::Core::draw) checks the process, and no other code runs
//!   between that check and the draw. A child process creates its own client, which has drawn
//!   nothing.
//! - *On a copy of a running machine* (a snapshot that is started twice). The copies cannot detect
//!   each other. So a kept number is not the whole ID: the time of the draw in nanoseconds is mixed
//!   in. Two copies would have to draw the same number in the same nanosecond. Mixing in the time
//!   does not make a random number less random.

use std::fmt;
use std::sync::Mutex;

use crate::types::claim::{ClaimId, fill};
use crate::types::error::Result;
use crate::util::clock::Moment;
use crate::util::locked::locked;
use crate::util::world;

/// The number of IDs that are read from the system at once: 512 bytes, which the system generates
/// in one step.
const MANY: usize = 32;

/// Random numbers that are not used yet.
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
    /// Draws the next ID.
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

    // S91
    #[test]
    fn no_id_is_drawn_twice() {
        let (ids, others) = (Ids::default(), Ids::default());
        let now = Moment::from_nanos(7);
        let draw = |n: usize| if n.is_multiple_of(2) { ids.draw(now) } else { others.draw(now) };
        let drawn: HashSet<u128> = (0..10 * MANY).map(|n| draw(n).unwrap().as_u128()).collect();
        assert_eq!(drawn.len(), 10 * MANY);
        let zeroes: u32 = drawn.iter().map(|id| id.count_zeros()).sum();
        let bits = 128 * 10 * MANY as u32;
        assert!(zeroes.abs_diff(bits / 2) < bits / 20, "{zeroes} of {bits} are 0");
    }

    /// A copy of a running machine has the same memory, but draws at another time.
    #[test]
    fn copy_of_an_id_batch_draws_different_ids() {
        let ids = Ids::default();
        ids.draw(Moment::from_nanos(1)).unwrap();
        let copy = Ids { unused: Mutex::new(locked(&ids.unused).clone()) };
        let (ours, theirs) =
            (ids.draw(Moment::from_nanos(2)).unwrap(), copy.draw(Moment::from_nanos(3)).unwrap());
        assert_ne!(ours, theirs);
    }
}
