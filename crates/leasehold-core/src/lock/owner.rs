//! Re-entrancy, with an explicit owner.
//!
//! Threads and tasks cannot identify an owner in async code: a task moves between threads, and
//! several tasks may do one job. So the owner is a value. A lock that the owner already holds is
//! returned without contacting the store. All nested guards share one claim, one lease and one
//! token, and the last of them releases the lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::hold::{Hold, OwnedClaim};
use super::wait::Wait;
use crate::client::core::Core;
use crate::types::answer::mismatch;
use crate::types::claim::{Claim, Kind};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::Name;
use crate::util::locked::locked;

/// An owner that can re-acquire a lock that it already holds. Clones represent the same owner.
///
/// Pass it to [`Mutex::owner`](crate::Mutex::owner). Without an owner, a task that locks the same
/// name twice deadlocks.
///
/// ```
/// # use leasehold::{Client, Owner};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let locks = leasehold::connect("memory:").await?;
/// let me = Owner::new();
/// let outer = locks.mutex("account:7").owner(&me).lock().await?;
/// let inner = locks.mutex("account:7").owner(&me).lock().await?; // immediately, without I/O
/// assert_eq!(inner.token(), outer.token());
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Owner {
    slots: Arc<Mutex<HashMap<Key, Arc<Slot>>>>,
}

/// The parts of a request that matter for a hold that the owner already has.
pub(crate) struct HoldRequest<'a> {
    pub(crate) core: &'a Arc<Core>,
    pub(crate) name: &'a Name,
    pub(crate) kind: Kind,
    pub(crate) capacity: u32,
    pub(crate) weight: u32,
    pub(crate) min_validity: Duration,
}

/// The client, by address, and the name of the lock.
type Key = (usize, Name);

#[derive(Debug, Default)]
struct Slot {
    /// Locked while one task of the owner acquires the lock, so that other tasks wait for the
    /// outcome.
    gate: tokio::sync::Mutex<()>,
    hold: Mutex<Weak<OwnedClaim>>,
}

impl Owner {
    /// Creates an owner that is different from all others.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let owner = leasehold::Owner::new();
    /// let lock = locks.mutex("a").owner(&owner);
    /// let (_outer, _inner) = (lock.lock().await?, lock.lock().await?); // not a deadlock
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns another guard if the owner holds the lock. Otherwise acquires it with `take`, in the
    /// time that is left.
    pub(crate) async fn acquire<F: Future<Output = Result<Hold>>>(
        &self,
        request: &HoldRequest<'_>,
        wait: Wait,
        take: impl FnOnce(Wait) -> F,
    ) -> Result<Hold> {
        let slot = self.slot(request);
        if let Some(guard) = slot.reenter(request)? {
            return Ok(guard);
        }
        let core = request.core;
        let started = core.clock.now();
        let _gate = match wait {
            Wait::Forever => slot.gate.lock().await,
            Wait::Try => slot.gate.try_lock().map_err(|_| {
                let what = "another task with the same owner is acquiring this lock";
                Error::new(ErrorKind::Contended, what).with_hint("retry later")
            })?,
            Wait::For(limit) => {
                let gate = core.background.within(|| limit, slot.gate.lock()).await;
                gate.ok_or_else(|| {
                    let what = format!(
                        "another task with the same owner has been acquiring this lock for {limit:?}"
                    );
                    Error::new(ErrorKind::Timeout, what)
                })?
            }
        };
        if let Some(guard) = slot.reenter(request)? {
            return Ok(guard);
        }
        let wait = match wait {
            Wait::For(d) => Wait::For(d.saturating_sub(core.clock.now().since(started))),
            other => other,
        };
        let guard = take(wait).await?;
        slot.remember(guard.owned());
        Ok(guard)
    }

    fn slot(&self, request: &HoldRequest<'_>) -> Arc<Slot> {
        let mut slots = locked(&self.slots);
        if slots.len() >= 64 && slots.len().is_power_of_two() {
            slots.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.hold().is_some());
        }
        slots.entry((Arc::as_ptr(request.core) as usize, request.name.clone())).or_default().clone()
    }
}

impl Slot {
    fn hold(&self) -> Option<Arc<OwnedClaim>> {
        locked(&self.hold).upgrade()
    }

    fn remember(&self, hold: &Arc<OwnedClaim>) {
        *locked(&self.hold) = Arc::downgrade(hold);
    }

    /// Returns another guard of the owner's hold, or `None` if the owner has no hold or has lost
    /// it.
    fn reenter(&self, request: &HoldRequest<'_>) -> Result<Option<Hold>> {
        let Some(hold) = self.hold().filter(|h| h.lease().is_held()) else { return Ok(None) };
        let held = &hold.lease().claim;
        if held.kind != request.kind || held.capacity != request.capacity {
            return Err(mismatch(
                &Claim { kind: request.kind, capacity: request.capacity, ..held.clone() },
                held.kind,
                held.capacity,
            ));
        }
        if held.kind == Kind::RwLock && request.weight > hold.lease().weight.now() {
            let what = "this owner holds the lock for reading, so acquiring it for writing would be a \
                        deadlock";
            let hint = "release the read lock first, or upgrade it with try_upgrade()";
            return Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint));
        }
        let (left, least) = (hold.lease().remaining(), request.min_validity);
        if left < least {
            let what = format!(
                "this owner holds the lock, but only {left:?} of its lease is left (required: {least:?})"
            );
            let hint = "wait for a renewal, or release the lock first";
            return Err(Error::new(ErrorKind::AtRisk, what).with_hint(hint));
        }
        Ok(Some(Hold::new(hold)))
    }
}

/// The builder method of locks that can be re-entered.
macro_rules! owner_method {
    () => {
        /// Sets the owner of the lock. While the owner holds the lock, the owner can acquire it
        /// again immediately and without I/O.
        pub fn owner(mut self, owner: &crate::Owner) -> Self {
            self.handle.owner = Some(owner.clone());
            self
        }
    };
}
pub(crate) use owner_method;
