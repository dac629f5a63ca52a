//! Leases for a store that has none.
//!
//! Holds of a `file:` store end with the process that made them. Here that is the server, not its
//! client. So the server itself ends claims that were not renewed in time, by its own clock.
//!
//! **A claim is removed from the store before another one can be granted**, so it is harmless if
//! the server ends a lease late. A client counts its lease from before it sent the request, so its
//! lease ends first.
//!
//! **No call of a claim runs while the claim is being ended.** Otherwise a `join` could be answered
//! "held" just before the removal takes effect. A claim is not ended while a call of it runs. While
//! it is being ended, a renewal is answered "lost", and a `join` fails and may be repeated. A
//! release still reaches the store, which is harmless because it is idempotent.
//!
//! **A lost reply leaves nothing behind.** A claim is noted before its `join` is sent. If the call
//! is dropped or fails, the claim expires like any other.
//!
//! If the server crashes, the kernel frees all locks immediately, while clients still rely on their
//! leases. They find out at their next renewal, so tokens must be checked ([`Survival::Fenced`]).

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::locked;
use leasehold_core::store::{
    ClockModel, Converted, Durability, Evict, EvictionListener, Follow, Joined, Liveness, LockInfo,
    Mode, Queues, Renew, Renewal, Signal, Store, StoreInfo, Survival,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result, Token};
use tokio::time::Instant;

/// The interval between checks of the leases.
const EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Leased {
    inner: Arc<dyn Store>,
    info: StoreInfo,
    claims: Arc<Claims>,
}

#[derive(Debug, Default)]
struct Claims(Mutex<HashMap<ClaimId, Kept>>);

#[derive(Debug)]
struct Kept {
    claim: Claim,
    until: Instant,
    /// The number of calls of this claim that are running.
    calls: usize,
    /// Whether the claim has expired and is being removed.
    is_ending: bool,
}

/// A running call of a claim.
struct Running {
    claims: Arc<Claims>,
    id: ClaimId,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(kept) = locked(&self.claims.0).get_mut(&self.id) {
            kept.calls -= 1;
        }
    }
}

/// Adds leases to a store that has none. Returns any other store unchanged.
pub(crate) fn leased(store: Arc<dyn Store>) -> Arc<dyn Store> {
    if store.guarantees().has_leases() {
        return store;
    }
    let mut info = store.info().clone();
    let promised = &mut info.guarantees;
    promised.liveness = Liveness::Lease;
    promised.clock = ClockModel::Monotonic;
    promised.grant = Durability::Process;
    promised.lock_delay = false;
    promised.on_pause = Survival::Fenced;
    promised.on_store_crash = Survival::Fenced;
    promised.on_partition = Survival::Fenced;
    promised.recovery += EVERY;
    promised.recovery_leases = 1;
    let note =
        "the server keeps the leases: all holds end with it, and only one server can be used";
    promised.notes.to_mut().push(Cow::Borrowed(note));
    info.is_local = false;
    let claims = Arc::<Claims>::default();
    tokio::spawn(reap(Arc::downgrade(&store), Arc::downgrade(&claims)));
    Arc::new(Leased { inner: store, info, claims })
}

/// Removes claims whose leases have ended.
async fn reap(store: Weak<dyn Store>, claims: Weak<Claims>) {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let (Some(store), Some(claims)) = (store.upgrade(), claims.upgrade()) else { return };
        for claim in claims.expired(Instant::now()) {
            let keep = Some(claim.lock_delay).filter(|delay| !delay.is_zero());
            // If it fails, the claim stays marked, and is removed at a later tick.
            if store.leave(&claim, keep).await.is_ok() {
                locked(&claims.0).remove(&claim.id);
            }
        }
    }
}

impl Claims {
    /// Marks the claims that have expired, and returns all marked claims.
    fn expired(&self, now: Instant) -> Vec<Claim> {
        let mut all = locked(&self.0);
        for kept in all.values_mut() {
            kept.is_ending |= kept.calls == 0 && kept.until <= now;
        }
        all.values().filter(|kept| kept.is_ending).map(|kept| kept.claim.clone()).collect()
    }

    /// Begins a call of a known claim. Returns `None` if the claim is unknown or is being ended.
    fn run(self: &Arc<Self>, id: ClaimId) -> Option<Running> {
        let mut all = locked(&self.0);
        let kept = all.get_mut(&id).filter(|kept| !kept.is_ending)?;
        kept.calls += 1;
        Some(Running { claims: self.clone(), id })
    }

    /// Begins a `join`. Returns `None` if the claim is being ended.
    fn join(self: &Arc<Self>, claim: &Claim) -> Option<Running> {
        let until = Instant::now() + claim.waiter_lease.max(claim.lease);
        let new = || Kept { claim: claim.clone(), until, calls: 0, is_ending: false };
        locked(&self.0).entry(claim.id).or_insert_with(new);
        self.run(claim.id)
    }

    fn extend(&self, id: ClaimId, time: Duration) {
        if let Some(kept) = locked(&self.0).get_mut(&id) {
            kept.until = Instant::now() + time;
        }
    }

    /// Removes a claim that is not in the store any more. Keeps it if another call of the claim is
    /// running, because that call may add the claim to the store again.
    fn forget(&self, running: &Running) {
        let mut all = locked(&self.0);
        if all.get(&running.id).is_some_and(|kept| kept.calls == 1) {
            all.remove(&running.id);
        }
    }
}

impl Leased {
    async fn renew_one(&self, renew: &Renew) -> Result<Renewal> {
        let id = renew.claim.id;
        let Some(running) = self.claims.run(id) else { return Ok(Renewal::Lost) };
        let mut renewals = self.inner.renew(std::slice::from_ref(renew)).await?;
        let Some(renewal) = renewals.pop() else {
            return Err(Error::new(ErrorKind::Unreachable, "the store returned no result"));
        };
        Ok(match renewal {
            Renewal::Holding { token, .. } => {
                self.claims.extend(id, renew.lease);
                Renewal::Holding { token, remaining: Some(renew.lease) }
            }
            Renewal::Waiting(place) => {
                self.claims.extend(id, renew.claim.waiter_lease);
                Renewal::Waiting(place)
            }
            Renewal::Lost => {
                self.claims.forget(&running);
                Renewal::Lost
            }
            unknown @ Renewal::Unknown { .. } => unknown,
        })
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Leased {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let Some(running) = self.claims.join(claim) else {
            let what = "the lease of this claim has just expired";
            return Err(Error::new(ErrorKind::Unreachable, what).with_hint("retry"));
        };
        let joined = self.inner.join(claim, mode).await?;
        Ok(match joined {
            Joined::Holding { token, .. } => {
                self.claims.extend(claim.id, claim.lease);
                Joined::Holding { token, remaining: Some(claim.lease) }
            }
            Joined::Waiting(place) => {
                self.claims.extend(claim.id, claim.waiter_lease);
                Joined::Waiting(place)
            }
            busy @ Joined::Busy { .. } => {
                self.claims.forget(&running);
                busy
            }
        })
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut results = Vec::with_capacity(renewals.len());
        for renew in renewals {
            let renewed = self.renew_one(renew).await;
            results.push(renewed.unwrap_or_else(|error| Renewal::unknown(&error)));
        }
        Ok(results)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let running = self.claims.run(claim.id);
        let left = self.inner.leave(claim, keep).await?;
        if let Some(running) = running {
            self.claims.forget(&running);
        }
        Ok(left)
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let Some(_running) = self.claims.run(claim.id) else { return Ok(Converted::Lost) };
        self.inner.convert(claim).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        // A pushed grant has no lease that the client knows of, so the client polls.
        self.inner.changed(claim).await.map(|_| Signal::Ask)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.inner.read(name).await
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        self.inner.holders(name, token).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.inner.list(prefix).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.inner.evict(name, which).await
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inner.on_eviction(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.inner.follow(queues).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.diagnose().await
    }

    async fn disconnect(&self) {
        self.inner.disconnect().await;
    }

    fn longest_lease(&self) -> Duration {
        self.inner.longest_lease()
    }

    fn shard(&self, name: &Name) -> u64 {
        self.inner.shard(name)
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.inner.confirmed(claim)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<leasehold_core::store::Ownership>> {
        self.inner.ownership(claim)
    }

    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        // A child process of the server must not keep the clients' locks.
        None
    }
}
