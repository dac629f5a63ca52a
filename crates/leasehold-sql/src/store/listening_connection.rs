//! The connection that listens for grants and is lent for calls while it is not needed.
//!
//! A client with waiters can therefore work with one connection. The task that has locked the slot
//! has the connection. The listener unlocks the slot as soon as a call requests the connection.
//! Notifications that arrive during a call are kept by the driver until the listener continues. A
//! borrower whose call fails or is dropped closes the connection instead of returning it. The
//! listener then finds the slot empty and opens a new connection.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use tokio::sync::{Mutex, Notify, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use super::limits::SLOW;
use super::wire::Wire;

type Slot = Mutex<Option<Box<dyn Wire>>>;

/// The slot for the connection that listens.
pub(super) struct ListeningConnection {
    slot: Arc<Slot>,
    /// Whether the slot contains a connection, or will contain it when the borrower returns it.
    there: AtomicBool,
    /// A semaphore for one borrower at a time. A second caller opens its own connection instead of
    /// waiting.
    permit: Arc<Semaphore>,
    requested: Notify,
}

impl Default for ListeningConnection {
    fn default() -> Self {
        Self {
            slot: Arc::default(),
            there: AtomicBool::new(false),
            permit: Arc::new(Semaphore::new(1)),
            requested: Notify::new(),
        }
    }
}

/// A permit to return a borrowed connection. If it is dropped unused, the connection is gone.
pub(super) struct BorrowPermit {
    slot: OwnedMutexGuard<Option<Box<dyn Wire>>>,
    listening: Arc<ListeningConnection>,
    _permit: OwnedSemaphorePermit,
}

impl BorrowPermit {
    pub(super) fn give_back(mut self, wire: Box<dyn Wire>) {
        *self.slot = Some(wire);
    }
}

impl Drop for BorrowPermit {
    fn drop(&mut self) {
        self.listening.there.store(self.slot.is_some(), Ordering::SeqCst);
    }
}

impl ListeningConnection {
    pub(super) fn is_there(&self) -> bool {
        self.there.load(Ordering::SeqCst)
    }

    /// Borrows the connection, if there is one and no other call has borrowed it.
    pub(super) async fn borrow(self: &Arc<Self>) -> Option<(Box<dyn Wire>, BorrowPermit)> {
        if !self.is_there() {
            return None;
        }
        let permit = self.permit.clone().try_acquire_owned().ok()?;
        let slot = self.lock_slot().await?;
        let mut lent = BorrowPermit { slot, listening: self.clone(), _permit: permit };
        let wire = lent.slot.take()?;
        Some((wire, lent))
    }

    /// Locks the slot, and makes the listener unlock it if necessary.
    async fn lock_slot(&self) -> Option<OwnedMutexGuard<Option<Box<dyn Wire>>>> {
        let mut locking = pin!(self.slot.clone().lock_owned());
        // Enters the lock's queue before notifying the listener. Otherwise the listener could lock
        // the slot again first, and continue to listen.
        if let Poll::Ready(slot) = poll_fn(|cx| Poll::Ready(locking.as_mut().poll(cx))).await {
            return Some(slot);
        }
        self.requested.notify_one();
        // The listener unlocks immediately, unless it is just checking whether the server is
        // reachable.
        tokio::time::timeout(SLOW, locking).await.ok()
    }

    /// Closes the connection.
    pub(super) async fn close(&self) {
        let Some(mut slot) = self.lock_slot().await else { return };
        self.there.store(false, Ordering::SeqCst);
        if let Some(wire) = slot.take() {
            let _ = tokio::time::timeout(SLOW, wire.close()).await;
        }
    }

    /// Puts a connection into the slot.
    #[cfg(feature = "postgres")]
    pub(super) async fn set(&self, wire: Box<dyn Wire>) {
        let mut slot = self.slot.lock().await;
        *slot = Some(wire);
        self.there.store(true, Ordering::SeqCst);
    }

    /// Runs a statement on the connection, and returns whether it succeeded. If not, the connection
    /// is dropped.
    #[cfg(feature = "postgres")]
    pub(super) async fn run(&self, sql: &str) -> bool {
        let mut slot = self.slot.lock().await;
        let Some(wire) = slot.as_mut() else { return false };
        let done = tokio::time::timeout(ANSWER, wire.raw(sql)).await;
        let is_there = matches!(done, Ok(Ok(())));
        if !is_there {
            self.there.store(false, Ordering::SeqCst);
            *slot = None;
        }
        is_there
    }

    /// Listens until there is something to report. Checks the connection once `silence` resolves,
    /// and stops listening once `rest` resolves.
    #[cfg(feature = "postgres")]
    pub(super) async fn listen(
        &self,
        silence: impl Future<Output = ()>,
        rest: impl Future<Output = ()>,
    ) -> ListenResult {
        let mut slot = self.slot.lock().await;
        let Some(wire) = slot.as_mut() else { return ListenResult::Gone };
        tokio::select! {
            received = wire.notification() => {
                if let Ok(Some(message)) = received {
                    return ListenResult::Message(message);
                }
            }
            () = self.requested.notified() => return ListenResult::Nothing,
            () = rest => return ListenResult::Enough,
            () = silence => {
                let checked = tokio::time::timeout(ANSWER, wire.raw("SELECT 1")).await;
                if matches!(checked, Ok(Ok(()))) {
                    return ListenResult::Nothing;
                }
            }
        }
        self.there.store(false, Ordering::SeqCst);
        *slot = None;
        ListenResult::Gone
    }
}

/// The result of listening.
#[cfg(feature = "postgres")]
pub(super) enum ListenResult {
    Message(String),
    Nothing,
    /// The client has had no waiter for a while.
    Enough,
    /// The connection is lost and has to be opened again.
    Gone,
}

/// The time limit for a reply of the server to a check.
#[cfg(feature = "postgres")]
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);
