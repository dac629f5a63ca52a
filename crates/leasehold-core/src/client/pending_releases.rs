//! The holds that this client is releasing in the background.
//!
//! A dropped guard is released in the background. The next acquisition of the same lock through the
//! same client could meet that old hold: a `try_lock` would fail, and a `lock` would queue
//! unnecessarily. So an acquisition first waits for the releases that began *before* it, and for no
//! others. A client that drops guards all the time therefore delays no acquisition forever.
//!
//! Correctness does not depend on this wait. After [`PATIENCE`] the request is sent anyway, and the
//! store decides.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::types::claim::{Claim, ClaimId};
use crate::types::name::Name;
use crate::util::locked::locked;

/// The longest wait for a release. After that time, something else is slowing down the store.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// The releases of one name, in the order in which they began. Each has a semaphore without
/// permits, which is closed when the release is done.
type Completions = Vec<(ClaimId, Arc<Semaphore>)>;

#[derive(Debug, Default)]
pub(crate) struct PendingReleases {
    /// The number of releases in progress, for a check without the mutex.
    count: AtomicUsize,
    holds: Mutex<HashMap<Name, Completions>>,
}

/// One release in progress. Dropping it marks the release as done or given up.
pub(crate) struct PendingRelease {
    all: Arc<PendingReleases>,
    name: Name,
    id: ClaimId,
    done: Arc<Semaphore>,
}

impl PendingReleases {
    /// Registers the release of this claim. It ends when the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>, claim: &Claim) -> PendingRelease {
        let (name, id, done) = (claim.name.clone(), claim.id, Arc::new(Semaphore::new(0)));
        locked(&self.holds).entry(name.clone()).or_default().push((id, done.clone()));
        self.count.fetch_add(1, Ordering::SeqCst);
        PendingRelease { all: self.clone(), name, id, done }
    }

    pub(crate) fn has_any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Waits for all releases of this name that are in progress now.
    pub(crate) async fn completed(&self, name: &Name) {
        let of_name = locked(&self.holds).get(name).cloned().unwrap_or_default();
        for (_, done) in of_name {
            let _ = done.acquire().await;
        }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        let mut holds = locked(&self.all.holds);
        if let Some(of_name) = holds.get_mut(&self.name) {
            of_name.retain(|(id, _)| *id != self.id);
            if of_name.is_empty() {
                holds.remove(&self.name);
            }
        }
        drop(holds);
        self.all.count.fetch_sub(1, Ordering::SeqCst);
        self.done.close();
    }
}
