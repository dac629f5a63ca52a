//! Limits how many connections the joins of one lock use at a time.
//!
//! A join may wait for seconds for its lock's row, because another transaction has locked it. The
//! joins of other locks must find a connection in the meantime. The joins of one lock gain little
//! from more connections, because they wait for each other at the row.
//!
//! Two, because one connection may be dead without being closed. Releases are not limited: joins
//! leave a connection for them, and a repeated release must not wait for one that was sent on a
//! dead connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use leasehold_core::Name;
use leasehold_core::kit::locked;

/// The turns of the joins.
#[derive(Debug)]
pub(super) struct LockTurns {
    /// The number of joins of one lock that may use a connection at a time.
    each: usize,
    /// The locks that are being joined, with the number of joins.
    all: Mutex<HashMap<Name, (usize, Arc<Semaphore>)>>,
}

/// The turn of one join, until it is dropped.
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
            let (joins, semaphore) = all.entry(name.clone()).or_insert_with(new);
            *joins += 1;
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
        if let Some((joins, _)) = all.get_mut(self.name) {
            *joins -= 1;
            if *joins == 0 {
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
    fn joins_of_one_lock_wait_for_each_other_only() {
        let turns = LockTurns::new(2);
        let [a, b] = ["a", "b"].map(|name| Name::new(name).unwrap());
        let first = now(turns.take(&a)).unwrap();
        let second = now(turns.take(&a)).unwrap();
        assert!(now(turns.take(&a)).is_none(), "a third join has a turn");
        let other = now(turns.take(&b)).unwrap();
        drop(first);
        let third = now(turns.take(&a)).unwrap();
        drop((second, third, other));
        assert!(locked(&turns.all).is_empty(), "unused locks are kept");
    }
}
