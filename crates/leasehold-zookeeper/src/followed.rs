//! The queues that this client follows: what is known of each, and who uses it.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::claims::Open;
use super::picture::Picture;

/// How long news of what was answered already may take. It comes before the answer; should it not come at
/// all, the queue is listed.
const LATE: Duration = Duration::from_secs(1);

/// One queue that is followed.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) session: i64,
    /// `None` until it is listed, and while the connection is broken.
    picture: Mutex<Option<Picture>>,
    changed: Notify,
    /// Those who wait for their turn in it have this too.
    pub(super) open: Arc<Open>,
    used: AtomicBool,
}

impl Followed {
    /// What is known. Who holds this may ask for claims, and not the other way round.
    pub(super) fn picture(&self) -> MutexGuard<'_, Option<Picture>> {
        // No code that can panic runs between two consistent states.
        locked(&self.picture)
    }

    /// Something has changed in the picture that was locked.
    pub(super) fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until everybody up to this number is known; `false` if that is not to be had.
    pub(super) async fn knows(&self, sequence: i64) -> bool {
        self.used.store(true, Relaxed);
        let is_known = || self.picture().as_ref().is_some_and(|picture| picture.knows(sequence));
        if is_known() {
            return true;
        }
        let known = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                if is_known() {
                    return true;
                }
                if !self.open.is_open() {
                    return false;
                }
                changed.await;
            }
        };
        timeout(LATE, known).await.unwrap_or(false)
    }

    /// Whether somebody waits in it, or has joined since this was asked last.
    pub(super) fn is_used(&self) -> bool {
        // We have one.
        self.used.swap(false, Relaxed) || Arc::strong_count(&self.open) > 1
    }
}

/// All of them, by the lock's node.
#[derive(Debug, Default)]
pub(super) struct Follows(Mutex<HashMap<String, Arc<Followed>>>);

impl Follows {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Followed>>> {
        locked(&self.0)
    }

    /// The queue of this lock, if it is followed in this session.
    pub(super) fn of(&self, session: i64, lock: &str) -> Option<Arc<Followed>> {
        self.all().get(lock).filter(|followed| followed.session == session).cloned()
    }

    /// The same, with `true` if it is to be followed from now on.
    pub(super) fn begin(&self, session: i64, lock: &str) -> (Arc<Followed>, bool) {
        let mut all = self.all();
        if let Some(followed) = all.get(lock).filter(|followed| followed.session == session) {
            return (followed.clone(), false);
        }
        let followed = Arc::new(Followed {
            session,
            picture: Mutex::default(),
            changed: Notify::new(),
            open: Arc::default(),
            used: AtomicBool::new(true),
        });
        all.insert(lock.to_owned(), followed.clone());
        (followed, true)
    }

    /// It is followed no longer: nobody joins in it from here on.
    pub(super) fn end(&self, lock: &str, followed: &Arc<Followed>) {
        let mut all = self.all();
        if all.get(lock).is_some_and(|is| Arc::ptr_eq(is, followed)) {
            all.remove(lock);
        }
        drop(all);
        let mut picture = followed.picture();
        *picture = None;
        followed.open.close();
        drop(picture);
        followed.tell();
    }
}
