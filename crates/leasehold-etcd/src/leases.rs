//! Leases: one per claim, reused for the next claim if the last claim was released cleanly.
//!
//! Granting and revoking a lease are writes, as expensive as acquiring a lock. So a lease whose
//! claim was released stays idle and is renewed, until another claim of this client needs one of
//! the same length. Then acquiring a free lock takes one transaction, and releasing it another.
//!
//! **A lease is never reused while a request that was sent with it may still be under way.** A
//! `join` that was delayed in the network would create an entry that the next claim's renewals keep
//! alive forever. If there is any doubt, the lease is revoked. etcd then refuses late requests.
//!
//! **Clock.** A lease ends here when the time that etcd granted is over, counted from before the
//! last renewal was sent. Idle leases are renewed often, so that little of a lease has passed when
//! a claim gets it.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::client::{Answered, Client};
use super::fault::Failure;
use super::keepalive::KeepAlives;
use super::proto::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest, LeaseRevokeResponse,
};
use leasehold_core::{Claim, Clock, Error, ErrorKind, Moment};

/// Maximum number of idle leases.
const MAX_IDLE: usize = 64;
/// How long a lease is idle before it is revoked.
const IDLE_FOR: Duration = Duration::from_secs(30);
/// The longest lease that is kept idle. What a crashed client leaves behind should expire soon.
const LONGEST_IDLE: Duration = Duration::from_secs(60);

/// A lease, as this client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) id: i64,
    /// The requested time, in seconds.
    pub(super) asked: i64,
    /// The time that etcd granted, which may be longer.
    pub(super) granted: Duration,
    /// The time until which the lease is certain to exist.
    pub(super) ends: Moment,
}

#[derive(Debug)]
pub(super) struct Leases {
    client: Arc<Client>,
    keep_alives: Arc<KeepAlives>,
    clock: Clock,
    idle: Mutex<HashMap<i64, Vec<Idle>>>,
    /// Wakes the task that tends idle leases.
    wake: Notify,
    /// Whether a lease was needed before, so that keeping one ready is worthwhile.
    wanted: AtomicBool,
    granting: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    lease: Lease,
    since: Moment,
}

/// Returns the length of `lease` in whole seconds, as etcd counts them.
pub(super) fn seconds(lease: Duration) -> i64 {
    let whole = lease.as_secs().saturating_add(u64::from(lease.subsec_nanos() > 0));
    i64::try_from(whole.max(1)).unwrap_or(i64::MAX)
}

/// Returns how much longer than the claim's lease its etcd lease is. That is the lock delay, in
/// whole seconds.
pub(super) fn delay(claim: &Claim) -> Duration {
    if claim.lock_delay.is_zero() {
        return Duration::ZERO;
    }
    Duration::from_secs(u64::try_from(seconds(claim.lock_delay)).unwrap_or(0))
}

impl Idle {
    /// Returns whether nearly the whole time is left.
    fn is_fresh(&self, now: Moment) -> bool {
        self.lease.ends.since(now) >= self.lease.granted * 5 / 6
    }
}

impl Leases {
    pub(super) fn new(client: Arc<Client>, keep_alives: Arc<KeepAlives>) -> Self {
        Self {
            client,
            keep_alives,
            clock: Clock::default(),
            idle: Mutex::default(),
            wake: Notify::new(),
            wanted: AtomicBool::new(false),
            granting: AtomicBool::new(false),
        }
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<i64, Vec<Idle>>> {
        // No code that can panic runs between two consistent states.
        locked(&self.idle)
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns a lease of this length with nearly its whole time left, either an idle or a new one.
    pub(super) async fn get(self: &Arc<Self>, asked: i64) -> Result<Lease, Failure> {
        match self.take(asked) {
            Some(lease) => Ok(lease),
            None => self.grant(asked).await,
        }
    }

    /// Returns whether there is an idle lease that a claim can use.
    pub(super) fn has(&self, asked: i64) -> bool {
        let now = self.now();
        self.idle().get(&asked).is_some_and(|all| all.iter().any(|idle| idle.is_fresh(now)))
    }

    fn take(&self, asked: i64) -> Option<Lease> {
        let now = self.now();
        let mut idle = self.idle();
        let all = idle.get_mut(&asked)?;
        let found = all.iter().rposition(|idle| idle.is_fresh(now))?;
        Some(all.swap_remove(found).lease)
    }

    /// Keeps one more lease ready for the next claim, because a claim has created its entry with a
    /// lease of this length. Does so only from the second call on, so that a single unsuccessful
    /// try writes nothing.
    pub(super) fn keep_ready(self: &Arc<Self>, asked: i64) {
        let none = self.idle().get(&asked).is_none_or(Vec::is_empty);
        if none && self.wanted.swap(true, Ordering::Relaxed) {
            self.prepare(asked);
        }
    }

    /// Grants one more lease, for the claim after this one.
    fn prepare(self: &Arc<Self>, asked: i64) {
        if !poolable(asked) || self.granting.swap(true, Ordering::Relaxed) {
            return;
        }
        let leases = Arc::downgrade(self);
        self.client.runtime().spawn(async move {
            let Some(leases) = leases.upgrade() else { return };
            let granted = leases.grant(asked).await;
            leases.granting.store(false, Ordering::Relaxed);
            // A failure is not reported here, because the next claim that needs a lease gets the
            // error.
            if let Ok(lease) = granted {
                leases.put_back(lease);
            }
        });
    }

    /// Grants a new lease.
    pub(super) async fn grant(&self, asked: i64) -> Result<Lease, Failure> {
        let sent = self.now();
        let request = LeaseGrantRequest { ttl: asked };
        let path = "/etcdserverpb.Lease/LeaseGrant";
        // If the request is executed twice, the first lease expires on its own.
        let Answered { answer, .. } =
            self.client.call::<_, LeaseGrantResponse>(path, request).await?;
        let granted = u64::try_from(answer.ttl).ok().filter(|ttl| *ttl > 0);
        let (Some(granted), true) = (granted, answer.error.is_empty()) else {
            let why: String = answer.error.chars().filter(|c| !c.is_control()).take(200).collect();
            let what = format!("etcd rejected a lease of {asked} s");
            return Err(Error::new(ErrorKind::Config, what).with_source(why).into());
        };
        let granted = Duration::from_secs(granted);
        Ok(Lease { id: answer.id, asked, granted, ends: sent.plus(granted) })
    }

    /// Returns a lease to the pool. No key may be attached to it, and no request in flight may
    /// attach one.
    pub(super) fn put_back(self: &Arc<Self>, lease: Lease) {
        let now = self.now();
        let mut idle = self.idle();
        let count: usize = idle.values().map(Vec::len).sum();
        if count >= MAX_IDLE || !poolable(lease.asked) || lease.ends <= now {
            drop(idle);
            self.revoke_later(lease.id);
            return;
        }
        idle.entry(lease.asked).or_default().push(Idle { lease, since: now });
        drop(idle);
        if count == 0 {
            self.wake.notify_one();
        }
    }

    /// Revokes a lease, which also deletes the keys that are attached to it.
    pub(super) async fn revoke(&self, id: i64) -> Result<(), Failure> {
        let path = "/etcdserverpb.Lease/LeaseRevoke";
        let request = LeaseRevokeRequest { id };
        match self.client.call::<_, LeaseRevokeResponse>(path, request).await {
            Ok(_) | Err(Failure::NoLease) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Revokes a lease in the background, as [`revoke`](Self::revoke). If that fails, the lease
    /// expires.
    pub(super) fn revoke_later(self: &Arc<Self>, id: i64) {
        let leases = self.clone();
        self.client.runtime().spawn(async move { leases.revoke(id).await.is_ok() });
    }

    /// Revokes the idle leases.
    pub(super) async fn disconnect(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for idle in idle.into_values().flatten() {
            // A lease that cannot be revoked expires.
            let _ = self.revoke(idle.lease.id).await;
        }
    }

    /// Renews the idle leases, and revokes those that have been unused for too long. Runs as a
    /// task.
    pub(super) async fn tend(self: Arc<Self>) {
        loop {
            let Some(pause) = self.next_look() else {
                self.wake.notified().await;
                continue;
            };
            tokio::time::sleep(pause).await;
            let (stale, unwanted) = self.due();
            for lease in unwanted {
                self.revoke_later(lease.id);
            }
            for lease in stale {
                self.refresh(lease).await;
            }
        }
    }

    /// Returns the time until the next check of the idle leases, if there are any.
    fn next_look(&self) -> Option<Duration> {
        let idle = self.idle();
        let shortest = idle.values().flatten().map(|i| i.lease.granted).min()?;
        Some(shortest / 24)
    }

    /// Returns the idle leases to renew, and those to revoke, which it removes.
    fn due(&self) -> (Vec<Lease>, Vec<Lease>) {
        let now = self.now();
        let (mut stale, mut unwanted) = (Vec::new(), Vec::new());
        self.idle().retain(|_, all| {
            all.retain(|i| {
                let wanted = now.since(i.since) < IDLE_FOR && i.lease.ends > now;
                if !wanted {
                    unwanted.push(i.lease);
                } else if i.lease.ends.since(now) < i.lease.granted * 11 / 12 {
                    stale.push(i.lease);
                }
                wanted
            });
            !all.is_empty()
        });
        (stale, unwanted)
    }

    async fn refresh(&self, lease: Lease) {
        let answer = self.keep_alives.ask(lease.id).await;
        let mut idle = self.idle();
        let Some(all) = idle.get_mut(&lease.asked) else { return };
        let Some(at) = all.iter().position(|i| i.lease.id == lease.id) else { return };
        match answer {
            Ok(Some(alive)) => {
                all[at].lease.ends = all[at].lease.ends.max(alive.ends());
            }
            Ok(None) => {
                all.swap_remove(at);
            }
            // The renewal is tried again. Until then the lease becomes stale, and is not used.
            // Later it is revoked.
            Err(_) => {}
        }
    }
}

fn poolable(asked: i64) -> bool {
    u64::try_from(asked).is_ok_and(|s| s <= LONGEST_IDLE.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    // S83
    #[test]
    fn lease_seconds_are_rounded_up() {
        let seconds = |millis| seconds(Duration::from_millis(millis));
        assert_eq!((seconds(1), seconds(1_000), seconds(1_001), seconds(0)), (1, 1, 2, 1));
        assert_eq!(super::seconds(Duration::MAX), i64::MAX);
    }
}
