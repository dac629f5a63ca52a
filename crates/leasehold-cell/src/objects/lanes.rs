//! How many requests of one client are under way at once, and which go first.
//!
//! An object store has no connection that requests share: each has one of its own, which is a socket, and a part of the
//! rate that the store grants. So they are bounded. A release of thousands of locks, or the cleanup after an outage,
//! would otherwise take all sockets of the program.
//!
//! - *The touch of the session* waits for nothing: there is one at a time, and all holds depend on it.
//! - *Renewals* have a lane of their own, so that they never wait behind joins, releases and cleanup.
//! - *An object that hung* when it was last looked at has to share a narrow lane with others like it, until it answers.
//!   So objects that hang cannot fill the lane of the renewals, however many there are. They come in an order by
//!   chance each time, so that one that answers again is found though others go on hanging.
//! - *A request's time begins with its turn*. A turn that does not come within that time is told as an outage.

use std::collections::HashSet;
use std::sync::Mutex;

use leasehold_core::kit::locked;
use tokio::sync::{Semaphore, SemaphorePermit};

/// How many requests are under way in each lane.
const ORDINARY: usize = 48;
const RENEWALS: usize = 96;
const HUNG: usize = 32;
/// So many objects that hung are kept in mind.
const MOST: usize = 4_096;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// The session: at once.
    Free,
    Ordinary,
    Renewal,
    /// The renewal of what hung.
    Hung,
}

tokio::task_local! {
    /// The lane of the requests that are sent by this task.
    pub(super) static LANE: Lane;
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Lanes {
    ordinary: Semaphore,
    renewals: Semaphore,
    hung: Semaphore,
    hanging: Mutex<HashSet<String>>,
}

impl Default for Lanes {
    fn default() -> Self {
        let [ordinary, renewals, hung] = [ORDINARY, RENEWALS, HUNG].map(Semaphore::new);
        Self { ordinary, renewals, hung, hanging: Mutex::default() }
    }
}

impl Lanes {
    /// The lane of a renewal that looks at this object.
    pub(super) fn of(&self, key: &str) -> Lane {
        if locked(&self.hanging).contains(key) { Lane::Hung } else { Lane::Renewal }
    }

    /// Whether this object hung.
    pub(super) fn note(&self, key: &str, hung: bool) {
        let mut hanging = locked(&self.hanging);
        if !hung {
            hanging.remove(key);
        } else if hanging.len() < MOST {
            hanging.insert(key.to_owned());
        }
    }

    /// Waits for the turn of a request of this task. `None`: it needs none.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        let lane = LANE.try_with(|lane| *lane).unwrap_or(Lane::Ordinary);
        let semaphore = match lane {
            Lane::Free => return None,
            Lane::Ordinary => &self.ordinary,
            Lane::Renewal => &self.renewals,
            Lane::Hung => &self.hung,
        };
        // Never closed.
        semaphore.acquire().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_done<T>(work: impl Future<Output = T>) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(work).poll(&mut context).is_ready()
    }

    #[test]
    fn renewals_never_wait_behind_anything_else_nor_behind_what_hangs() {
        let lanes = Lanes::default();
        let mut turns = Vec::new();
        let mut take = |lane: Lane| {
            let turn = lanes.turn();
            let mut turn = Box::pin(LANE.scope(lane, turn));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            match turn.as_mut().poll(&mut context) {
                std::task::Poll::Ready(permit) => turns.push(permit),
                std::task::Poll::Pending => return false,
            }
            true
        };
        while take(Lane::Ordinary) {}
        for hung in ["a", "b"] {
            assert_eq!(lanes.of(hung), Lane::Renewal);
            lanes.note(hung, true);
        }
        while take(lanes.of("a")) {}
        assert!(!take(lanes.of("b")));
        assert!(take(lanes.of("c")), "a renewal waits");
        assert!(take(Lane::Free), "the session waits");
        lanes.note("b", false);
        assert_eq!(lanes.of("b"), Lane::Renewal);
        assert!(!is_done(LANE.scope(Lane::Ordinary, lanes.turn())));
    }
}
