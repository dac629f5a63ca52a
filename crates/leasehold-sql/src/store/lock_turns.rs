//! Limits how many connections the calls for one lock use at a time.
//!
//! A call may wait for seconds for its lock's row, because another transaction has locked it. The
//! calls for other locks must find a connection in the meantime. Calls for one lock gain little
//! from more connections, because they wait for each other at the row.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use leasehold_core::Name;
use leasehold_core::kit::locked;

/// The turns of the calls of one kind.
#[derive(Debug)]
pub(super) struct LockTurns {
    /// The number of calls for one lock that may use a connection at a time.
    each: usize,
    /// The locks that are in use, with the number of their calls.
    all: Mutex<HashMap<Name, (usize, Arc<Semaphore>)>>,
}

/// The turn of one call, until it is dropped.
#[derive(Debug)]
pub(super) struct LockTurn<'a> {
    turns: &'a LockTurns,
    name: &'a Name,
    permit: Option<OwnedSemaphorePermit>,
}

impl LockTurns {
    pub(super) fn new(each: usize) -> Self {
        Self { each, all: Mutex::default() }
    }

    /// Waits for a turn of this lock.
    pub(super) async fn take<'a>(&'a self, name: &'a Name) -> LockTurn<'a> {
        let semaphore = {
            let mut all = locked(&self.all);
            let new = || (0, Arc::new(Semaphore::new(self.each)));
            let (calls, semaphore) = all.entry(name.clone()).or_insert_with(new);
            *calls += 1;
            semaphore.clone()
        };
        // Counted from here on, even if this future is dropped while it waits.
        let mut turn = LockTurn { turns: self, name, permit: None };
        turn.permit = semaphore.acquire_owned().await.ok();
        turn
    }
}

impl Drop for LockTurn<'_> {
    fn drop(&mut self) {
        self.permit = None;
        let mut all = locked(&self.turns.all);
        if let Some((calls, _)) = all.get_mut(self.name) {
            *calls -= 1;
            if *calls == 0 {
                all.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[test]
    fn calls_of_one_lock_wait_for_each_other_only() {
        let turns = LockTurns::new(2);
        let [a, b] = ["a", "b"].map(|name| Name::new(name).unwrap());
        let first = now(turns.take(&a)).unwrap();
        let second = now(turns.take(&a)).unwrap();
        assert!(now(turns.take(&a)).is_none(), "a third call has a turn");
        let other = now(turns.take(&b)).unwrap();
        drop(first);
        let third = now(turns.take(&a)).unwrap();
        drop((second, third, other));
        assert!(locked(&turns.all).is_empty(), "unused locks are kept");
    }
}
