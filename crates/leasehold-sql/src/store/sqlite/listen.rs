//! Listens at this client's notification FIFO, and polls for grants that were not notified.
//!
//! Each client has one task for all its waiters. While grants are notified, it polls rarely. The
//! pauses grow with the time that a claim has waited, up to one second. The first grant that a poll
//! finds shows that notifications do not work: the granting client could not send them, or is an
//! old version that does not. From then on the task polls as often as a client without a FIFO,
//! until a notification arrives.
//!
//! The FIFO is created when the first claim waits, or when the caller wants to be notified of
//! evictions. Grants before that are found by the first polls. The FIFO is removed when the client
//! disconnects. It is created again if a claim waits after that.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::notify_fifo::{Notifications, NotifyFifo, NotifyFifos};
use crate::store::background::POLL;
use crate::store::shared::Shared;
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Token};

/// The longest pause between two polls while grants are notified.
const SELDOM: Duration = Duration::from_secs(1);

impl Shared {
    /// Notifies this client's waiters of their grants. Never returns.
    pub(in crate::store) async fn listen(self: Arc<Self>, notify_fifos: Arc<NotifyFifos>) {
        let mut fifo: Option<NotifyFifo> = None;
        let mut pauses = PollPauses { pause: POLL[0], is_notified: true };
        let mut next = pin!(sleep(Duration::ZERO));
        // The checks below are not made after each notification, because they take time
        // proportional to the number of waiters.
        let mut is_time = true;
        let mut nobody_waited = true;
        let mut wants_evictions = self.wants_evictions.subscribe();
        loop {
            let nobody_waits = is_time && self.waiters.count() == 0;
            let needs_fifo = is_time && (*wants_evictions.borrow_and_update() || !nobody_waits);
            if needs_fifo && !fifo.as_ref().is_some_and(NotifyFifo::is_in_place) {
                // Drop the old FIFO first, because that also removes the file with its name.
                drop(fifo.take());
                fifo = self.create_fifo(&notify_fifos);
                pauses.is_notified &= fifo.is_some();
            }
            if nobody_waits {
                nobody_waited = true;
                tokio::select! {
                    // The wake-up may be older than the last count of waiters.
                    () = self.waiters.more() => {}
                    _ = wants_evictions.changed() => {}
                    found = next_notifications(&mut fifo) => drop(self.deliver(found).await),
                }
                continue;
            }
            if std::mem::take(&mut nobody_waited) {
                pauses.begin();
                next.as_mut().reset(Instant::now() + pauses.pause);
            }
            tokio::select! {
                _ = wants_evictions.changed() => {}
                found = next_notifications(&mut fifo) => {
                    pauses.is_notified |= self.deliver(found).await;
                    is_time = !pauses.is_notified;
                }
                () = &mut next => {
                    let unnotified = self.find_granted().await;
                    pauses.polled(unnotified);
                    next.as_mut().reset(Instant::now() + pauses.pause);
                    is_time = true;
                }
            }
        }
    }

    /// Notifies another client that one of its claims was granted.
    pub(in crate::store) fn notify_grant(&self, session: &str, id: ClaimId, token: Token) {
        if let Some(notify_fifos) = self.notify_fifos.as_ref().filter(|_| session != self.session) {
            notify_fifos.notify(session, id, token);
        }
    }

    /// Notifies the clients of these claims that the claims were evicted. The message is only a
    /// hint. If it is lost, the holder finds out at its next renewal.
    pub(in crate::store) async fn notify_evicted(&self, evicted: Vec<ClaimId>) {
        let Some(notify_fifos) = self.notify_fifos.clone() else { return };
        // On a separate thread, because the directory may be large.
        let _ = tokio::task::spawn_blocking(move || notify_fifos.notify_evicted(&evicted)).await;
    }

    fn create_fifo(&self, notify_fifos: &Arc<NotifyFifos>) -> Option<NotifyFifo> {
        let fifo = notify_fifos.create(&self.session).ok()?;
        let notify_fifos = notify_fifos.clone();
        // On a separate thread, because the directory may be large. The result is not awaited.
        drop(tokio::task::spawn_blocking(move || notify_fifos.sweep()));
        Some(fifo)
    }

    /// Passes notifications on to the waiters. Returns whether any claim was granted.
    async fn deliver(&self, found: Notifications) -> bool {
        for (id, token) in &found.granted {
            self.waiters.notify(*id, Signal::Granted(*token));
        }
        found.evicted.iter().for_each(|id| self.listeners.ask(*id));
        if found.is_full {
            self.find_granted().await;
        }
        !found.granted.is_empty()
    }

    /// Polls which of our waiters hold. Returns whether any of them had not been notified.
    async fn find_granted(&self) -> bool {
        if self.waiters.count() == 0 {
            return false;
        }
        let hold = self.who_holds().await.unwrap_or_default();
        let mut unnotified = false;
        for (id, token) in hold {
            unnotified |= self.waiters.waiting(id).is_some();
            self.waiters.notify(id, Signal::Granted(token));
        }
        unnotified
    }
}

/// Returns the next notifications. Sets `fifo` to `None` if reading fails. Without a FIFO, never
/// completes.
async fn next_notifications(fifo: &mut Option<NotifyFifo>) -> Notifications {
    if let Some(created) = fifo {
        if let Ok(found) = created.next().await {
            return found;
        }
        *fifo = None;
    }
    pending().await
}

/// The schedule of polls.
struct PollPauses {
    pause: Duration,
    /// Whether grants are notified, as far as this client knows.
    is_notified: bool,
}

impl PollPauses {
    /// Adjusts the pause when a claim waits and none did before.
    fn begin(&mut self) {
        if !self.is_notified {
            self.pause = POLL[0];
        }
    }

    fn polled(&mut self, unnotified: bool) {
        self.is_notified &= !unnotified;
        let longest = if self.is_notified { SELDOM } else { POLL[1] };
        self.pause = if unnotified { POLL[0] } else { (self.pause * 3 / 2).min(longest) };
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::runtime::Handle;

    use super::*;
    use crate::store::SqlStore;
    use leasehold_core::store::{Joined, Mode, Store};
    use leasehold_core::{Claim, Kind, Name};

    async fn open(directory: &Path) -> Arc<SqlStore> {
        let url = format!("sqlite:{}", directory.join("locks.db").display());
        SqlStore::open(&url, &Handle::current()).await.unwrap()
    }

    fn claim(kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new("door").unwrap(), kind, weight, capacity).unwrap()
    }

    async fn waits(store: &SqlStore, claim: &Claim) -> Token {
        match store.join(claim, Mode::Wait).await.unwrap() {
            Joined::Waiting(place) => place.token.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    async fn news(store: &SqlStore, claim: &Claim) -> Signal {
        let signal = tokio::time::timeout(Duration::from_secs(30), store.changed(claim)).await;
        signal.expect("no notification arrived").unwrap()
    }

    // R11
    /// No task polls in this test, so only notifications are found.
    #[tokio::test]
    async fn release_notifies_exactly_the_waiters_that_it_grants() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (open(directory.path()).await, open(directory.path()).await);
        other.tasks.iter().for_each(tokio::task::AbortHandle::abort);
        let shared = &other.shared;
        let mut fifo = shared.notify_fifos.as_ref().unwrap().create(&shared.session).unwrap();
        let writer = claim(Kind::RwLock, 8, 8);
        one.join(&writer, Mode::Try).await.unwrap();
        let readers = [claim(Kind::RwLock, 1, 8), claim(Kind::RwLock, 1, 8)];
        let last = claim(Kind::RwLock, 8, 8);
        let mut expected = Vec::new();
        for reader in &readers {
            expected.push((reader.id, waits(&other, reader).await));
        }
        waits(&other, &last).await;
        assert!(one.leave(&writer, None).await.unwrap());
        let mut found = Vec::new();
        while let Ok(more) = tokio::time::timeout(Duration::from_millis(200), fifo.next()).await {
            found.extend(more.unwrap().granted);
        }
        assert_eq!(found, expected);
    }

    // P6
    #[tokio::test]
    async fn grant_is_found_without_a_notification_and_fifo_is_recreated() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (open(directory.path()).await, open(directory.path()).await);
        let fifo = |store: &SqlStore| {
            let id = store.shared.session.rsplit_once('_').unwrap().1.to_owned();
            directory.path().join(format!("locks.db-bell-{id}"))
        };
        for _ in 0..3 {
            let (held, waiter) = (claim(Kind::Mutex, 1, 1), claim(Kind::Mutex, 1, 1));
            one.join(&held, Mode::Try).await.unwrap();
            let token = waits(&other, &waiter).await;
            while !fifo(&other).exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            std::fs::remove_file(fifo(&other)).unwrap();
            one.leave(&held, None).await.unwrap();
            assert_eq!(news(&other, &waiter).await, Signal::Granted(token));
            other.leave(&waiter, None).await.unwrap();
        }
        other.disconnect().await;
        assert!(!fifo(&other).exists() && !fifo(&one).exists());
    }

    #[test]
    fn client_polls_rarely_only_while_notifications_arrive() {
        let mut pauses = PollPauses { pause: POLL[0], is_notified: true };
        let mut waited = Duration::ZERO;
        for _ in 0..30 {
            // A grant that is not notified is found within half of the time that the claim has
            // already waited.
            assert!(
                pauses.pause <= POLL[0].max(waited / 2 + POLL[0]),
                "{waited:?}: {:?}",
                pauses.pause
            );
            waited += pauses.pause;
            pauses.polled(false);
        }
        assert_eq!(pauses.pause, SELDOM);
        pauses.begin();
        assert_eq!(pauses.pause, SELDOM);
        pauses.polled(true);
        assert_eq!(pauses.pause, POLL[0]);
        (0..30).for_each(|_| pauses.polled(false));
        assert_eq!(pauses.pause, POLL[1]);
        pauses.begin();
        assert_eq!(pauses.pause, POLL[0]);
    }
}
