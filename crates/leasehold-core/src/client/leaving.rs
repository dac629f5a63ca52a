//! The holds that this client gives back behind its callers' backs.
//!
//! A guard that is dropped is released in the background. Whoever takes the same lock next through the same
//! client would find itself in its way: a `try_lock` would be refused, and a `lock` stand in the queue for nothing.
//! So it waits for the answer to what was dropped *before* it came, and to nothing else: a client that drops
//! guards all the time keeps nobody waiting. Nothing depends on it: after a while it is asked all the same, and
//! then the store says who holds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::base::locked::locked;
use crate::words::claim::{Claim, ClaimId};
use crate::words::name::Name;

/// How long an answer is waited for: then it is not this that makes the store slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Of one name, in the order in which they were dropped: a semaphore without permits, which is closed when it
/// is answered.
type Answers = Vec<(ClaimId, Arc<Semaphore>)>;

#[derive(Debug, Default)]
pub(crate) struct Leaving {
    /// How many there are, for those who have no time to look.
    count: AtomicUsize,
    holds: Mutex<HashMap<Name, Answers>>,
}

/// One of them, until it is answered or given up.
pub(crate) struct Left {
    leaving: Arc<Leaving>,
    name: Name,
    id: ClaimId,
    answer: Arc<Semaphore>,
}

impl Leaving {
    /// This one is being given back until what is returned is dropped.
    pub(crate) fn begin(self: &Arc<Self>, claim: &Claim) -> Left {
        let (name, id, answer) = (claim.name.clone(), claim.id, Arc::new(Semaphore::new(0)));
        locked(&self.holds).entry(name.clone()).or_default().push((id, answer.clone()));
        self.count.fetch_add(1, Ordering::SeqCst);
        Left { leaving: self.clone(), name, id, answer }
    }

    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Waits for all of this name that are under way now.
    pub(crate) async fn answered(&self, name: &Name) {
        let of_name = locked(&self.holds).get(name).cloned().unwrap_or_default();
        for (_, answer) in of_name {
            let _ = answer.acquire().await;
        }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let mut holds = locked(&self.leaving.holds);
        if let Some(of_name) = holds.get_mut(&self.name) {
            of_name.retain(|(id, _)| *id != self.id);
            if of_name.is_empty() {
                holds.remove(&self.name);
            }
        }
        drop(holds);
        self.leaving.count.fetch_sub(1, Ordering::SeqCst);
        self.answer.close();
    }
}
