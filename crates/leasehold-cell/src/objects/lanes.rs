//! Limits the number of concurrent requests of a client, and gives some of them priority.
//!
//! The requests of an object store do not share a connection. Each one needs a socket and a part of
//! the rate that the store allows, so their number is limited. Otherwise a release of thousands of
//! locks, or the cleanup after an outage, would use all sockets of the program.
//!
//! - *The renewal of the session* waits for nothing. There is only one such renewal at a time, and
//!   all holds depend on it.
//! - *Renewals of claims* have a lane of their own, so they never wait for joins, releases and
//!   cleanup.
//! - *An object whose last read hung* shares a narrow lane with others like it until a read of it
//!   succeeds. So such objects cannot fill the lane of the renewals, however many there are. They
//!   are read in a random order each time, so an object that can be read again is found even if
//!   others still hang.
//! - *The time limit of a request starts at its turn*. A request whose turn does not come within
//!   its time limit is reported as an outage.

use std::collections::HashSet;
use std::sync::Mutex;

use leasehold_core::kit::locked;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of concurrent requests in each lane.
const ORDINARY: usize = 48;
const RENEWALS: usize = 96;
const HUNG: usize = 32;
/// Maximum number of objects that are remembered as hung.
const MOST: usize = 4_096;

/// The purpose of a request, which determines its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Renewal of the session, which is not limited.
    Free,
    Ordinary,
    Renewal,
    /// Renewal of a claim whose object hung.
    Hung,
}

tokio::task_local! {
    /// The lane of requests that this task sends.
    pub(super) static LANE: Lane;
}

/// The lanes of one client. See the module's documentation.
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
    /// Returns the lane for a renewal that reads the object `key`.
    pub(super) fn of(&self, key: &str) -> Lane {
        if locked(&self.hanging).contains(key) { Lane::Hung } else { Lane::Renewal }
    }

    /// Records whether the last read of the object `key` hung.
    pub(super) fn note(&self, key: &str, hung: bool) {
        let mut hanging = locked(&self.hanging);
        if !hung {
            hanging.remove(key);
        } else if hanging.len() < MOST {
            hanging.insert(key.to_owned());
        }
    }

    /// Waits for the turn of a request of this task. Returns `None` if the lane is not limited.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        let lane = LANE.try_with(|lane| *lane).unwrap_or(Lane::Ordinary);
        let semaphore = match lane {
            Lane::Free => return None,
            Lane::Ordinary => &self.ordinary,
            Lane::Renewal => &self.renewals,
            Lane::Hung => &self.hung,
        };
        // The semaphore is never closed.
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
    fn renewals_never_wait_for_other_or_hanging_requests() {
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
        assert!(take(lanes.of("c")), "a renewal has to wait");
        assert!(take(Lane::Free), "the session's request has to wait");
        lanes.note("b", false);
        assert_eq!(lanes.of("b"), Lane::Renewal);
        assert!(!is_done(LANE.scope(Lane::Ordinary, lanes.turn())));
    }
}
