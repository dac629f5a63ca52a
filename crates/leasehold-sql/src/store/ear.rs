//! The connection that hears of grants, as one of the client's few: while nobody needs it for a call
//! it is listened on, and it is lent for calls meanwhile, so that a client that waits gets on with one
//! connection.
//!
//! Whoever holds the slot's lock has the connection. The listener lets go of it as soon as somebody
//! wants it, and what arrives during a call is kept by the driver until it is listened on again. A
//! borrower that does not give it back (its call failed, or was dropped halfway) has closed it: the
//! listener finds the slot empty and begins anew.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use tokio::sync::{Mutex, Notify, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use super::limits::SLOW;
use super::wire::Wire;

type Slot = Mutex<Option<Box<dyn Wire>>>;

/// The place of the connection that listens.
pub(super) struct Ear {
    slot: Arc<Slot>,
    /// Whether the slot is full, or will be when its borrower gives back what it borrowed.
    there: AtomicBool,
    /// One borrower at a time: who would have to wait for another makes a connection of its own.
    turn: Arc<Semaphore>,
    wanted: Notify,
}

impl Default for Ear {
    fn default() -> Self {
        Self {
            slot: Arc::default(),
            there: AtomicBool::new(false),
            turn: Arc::new(Semaphore::new(1)),
            wanted: Notify::new(),
        }
    }
}

/// What a borrower has besides the connection; dropped, the connection is gone.
pub(super) struct Lent {
    slot: OwnedMutexGuard<Option<Box<dyn Wire>>>,
    ear: Arc<Ear>,
    _turn: OwnedSemaphorePermit,
}

impl Lent {
    pub(super) fn give_back(mut self, wire: Box<dyn Wire>) {
        *self.slot = Some(wire);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.ear.there.store(self.slot.is_some(), Ordering::SeqCst);
    }
}

impl Ear {
    pub(super) fn is_there(&self) -> bool {
        self.there.load(Ordering::SeqCst)
    }

    /// The connection, if there is one and nobody else has borrowed it.
    pub(super) async fn borrow(self: &Arc<Self>) -> Option<(Box<dyn Wire>, Lent)> {
        if !self.is_there() {
            return None;
        }
        let turn = self.turn.clone().try_acquire_owned().ok()?;
        let slot = self.in_hand().await?;
        let mut lent = Lent { slot, ear: self.clone(), _turn: turn };
        let wire = lent.slot.take()?;
        Some((wire, lent))
    }

    /// The slot, out of the listener's hands.
    async fn in_hand(&self) -> Option<OwnedMutexGuard<Option<Box<dyn Wire>>>> {
        let mut locking = pin!(self.slot.clone().lock_owned());
        // In the queue first: who is told sooner would be back before us, and listen on.
        if let Poll::Ready(slot) = poll_fn(|cx| Poll::Ready(locking.as_mut().poll(cx))).await {
            return Some(slot);
        }
        self.wanted.notify_one();
        // It lets go at once, unless it is just asking whether the server is still there.
        tokio::time::timeout(SLOW, locking).await.ok()
    }

    /// Says goodbye on it.
    pub(super) async fn close(&self) {
        let Some(mut slot) = self.in_hand().await else { return };
        self.there.store(false, Ordering::SeqCst);
        if let Some(wire) = slot.take() {
            let _ = tokio::time::timeout(SLOW, wire.close()).await;
        }
    }

    /// From now on this is the one.
    #[cfg(feature = "postgres")]
    pub(super) async fn is_now(&self, wire: Box<dyn Wire>) {
        let mut slot = self.slot.lock().await;
        *slot = Some(wire);
        self.there.store(true, Ordering::SeqCst);
    }

    /// Says something on it; whether it was understood. If not, it is gone.
    #[cfg(feature = "postgres")]
    pub(super) async fn say(&self, sql: &str) -> bool {
        let mut slot = self.slot.lock().await;
        let Some(wire) = slot.as_mut() else { return false };
        let said = tokio::time::timeout(ANSWER, wire.raw(sql)).await;
        let is_there = matches!(said, Ok(Ok(())));
        if !is_there {
            self.there.store(false, Ordering::SeqCst);
            *slot = None;
        }
        is_there
    }

    /// Listens, until there is something to tell.
    #[cfg(feature = "postgres")]
    pub(super) async fn hear(
        &self,
        silence: impl Future<Output = ()>,
        rest: impl Future<Output = ()>,
    ) -> Heard {
        let mut slot = self.slot.lock().await;
        let Some(wire) = slot.as_mut() else { return Heard::Gone };
        tokio::select! {
            heard = wire.hear() => {
                if let Ok(Some(message)) = heard {
                    return Heard::Message(message);
                }
            }
            () = self.wanted.notified() => return Heard::Nothing,
            () = rest => return Heard::Enough,
            () = silence => {
                let asked = tokio::time::timeout(ANSWER, wire.raw("SELECT 1")).await;
                if matches!(asked, Ok(Ok(()))) {
                    return Heard::Nothing;
                }
            }
        }
        self.there.store(false, Ordering::SeqCst);
        *slot = None;
        Heard::Gone
    }
}

/// What came of listening.
#[cfg(feature = "postgres")]
pub(super) enum Heard {
    Message(String),
    Nothing,
    /// Nobody has waited for a while.
    Enough,
    /// The connection is lost: begin anew.
    Gone,
}

/// How long the server may take to say that it is still there.
#[cfg(feature = "postgres")]
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);
