//! Leases: one for each claim, kept for the next claim when the last one left cleanly.
//!
//! Granting a lease and ending one are writes, as expensive as taking a lock. So a lease whose claim
//! has left lies idle, kept alive, until another claim of this client wants one for as many seconds:
//! taking a lock that is free is then one transaction, and releasing it another.
//!
//! *A lease is never handed on while anything sent with it may still be under way*: a `join` that the
//! network held back would make a place that the next claim's renewals keep alive for ever. A lease
//! that is in any such doubt is revoked, after which etcd refuses what comes too late.
//!
//! *Whose clock*: a lease ends here when what etcd granted is over, counted from before the request
//! was sent that last renewed it. Idle leases are renewed often enough that little of one is spent
//! when it is taken.

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

/// How many leases lie idle at most.
const MAX_IDLE: usize = 64;
/// How long one lies idle before it is given back.
const IDLE_FOR: Duration = Duration::from_secs(30);
/// Longer leases do not lie idle: what a dead client leaves behind is gone soon.
const LONGEST_IDLE: Duration = Duration::from_secs(60);

/// A lease as we know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) id: i64,
    /// What was asked for, in seconds.
    pub(super) asked: i64,
    /// What etcd granted, which may be more.
    pub(super) granted: Duration,
    /// Until when it is certain.
    pub(super) ends: Moment,
}

#[derive(Debug)]
pub(super) struct Leases {
    client: Arc<Client>,
    keep_alives: Arc<KeepAlives>,
    clock: Clock,
    idle: Mutex<HashMap<i64, Vec<Idle>>>,
    /// Something lies idle.
    wake: Notify,
    /// A lease was wanted before, so that it is worth to have one ready.
    wanted: AtomicBool,
    granting: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    lease: Lease,
    since: Moment,
}

/// What `lease` is in the seconds that etcd counts in.
pub(super) fn seconds(lease: Duration) -> i64 {
    let whole = lease.as_secs().saturating_add(u64::from(lease.subsec_nanos() > 0));
    i64::try_from(whole.max(1)).unwrap_or(i64::MAX)
}

/// How much longer than a claim's own the lease is that its key hangs on: its lock-delay, in the seconds
/// that etcd counts in.
pub(super) fn delay(claim: &Claim) -> Duration {
    if claim.lock_delay.is_zero() {
        return Duration::ZERO;
    }
    Duration::from_secs(u64::try_from(seconds(claim.lock_delay)).unwrap_or(0))
}

impl Idle {
    /// Nearly all of it is left.
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

    /// A lease of so many seconds, nearly all of which are left: an idle one, or a new one.
    pub(super) async fn get(self: &Arc<Self>, asked: i64) -> Result<Lease, Failure> {
        match self.take(asked) {
            Some(lease) => Ok(lease),
            None => self.grant(asked).await,
        }
    }

    /// Whether an idle lease is there that is good for a claim.
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

    /// A claim has its place on a lease of so many seconds: has one more lie ready for the next, from the
    /// second time on. (Not before: one that tries in vain writes nothing.)
    pub(super) fn keep_ready(self: &Arc<Self>, asked: i64) {
        let none = self.idle().get(&asked).is_none_or(Vec::is_empty);
        if none && self.wanted.swap(true, Ordering::Relaxed) {
            self.prepare(asked);
        }
    }

    /// Has one more lie ready, for the claim after this one.
    fn prepare(self: &Arc<Self>, asked: i64) {
        if !poolable(asked) || self.granting.swap(true, Ordering::Relaxed) {
            return;
        }
        let leases = Arc::downgrade(self);
        self.client.runtime().spawn(async move {
            let Some(leases) = leases.upgrade() else { return };
            let granted = leases.grant(asked).await;
            leases.granting.store(false, Ordering::Relaxed);
            // Whoever needs one and finds none is told then what is wrong.
            if let Ok(lease) = granted {
                leases.put_back(lease);
            }
        });
    }

    /// A new lease.
    pub(super) async fn grant(&self, asked: i64) -> Result<Lease, Failure> {
        let sent = self.now();
        let request = LeaseGrantRequest { ttl: asked };
        let path = "/etcdserverpb.Lease/LeaseGrant";
        // Sent twice, the first lease lapses by itself.
        let Answered { answer, .. } =
            self.client.call::<_, LeaseGrantResponse>(path, request).await?;
        let granted = u64::try_from(answer.ttl).ok().filter(|ttl| *ttl > 0);
        let (Some(granted), true) = (granted, answer.error.is_empty()) else {
            let why: String = answer.error.chars().filter(|c| !c.is_control()).take(200).collect();
            let what = format!("etcd rejected a lease of {asked} s");
            return Err(Error::new(ErrorKind::Config, what).because(why).into());
        };
        let granted = Duration::from_secs(granted);
        Ok(Lease { id: answer.id, asked, granted, ends: sent.plus(granted) })
    }

    /// Takes back a lease that no key is attached to and that nothing under way will attach one to.
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

    /// Ends a lease, and with it whatever key is attached to it.
    pub(super) async fn revoke(&self, id: i64) -> Result<(), Failure> {
        let path = "/etcdserverpb.Lease/LeaseRevoke";
        let request = LeaseRevokeRequest { id };
        match self.client.call::<_, LeaseRevokeResponse>(path, request).await {
            Ok(_) | Err(Failure::NoLease) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// As [`revoke`](Self::revoke), without anybody who waits for it. If it fails, the lease lapses.
    pub(super) fn revoke_later(self: &Arc<Self>, id: i64) {
        let leases = self.clone();
        self.client.runtime().spawn(async move { leases.revoke(id).await.is_ok() });
    }

    /// Gives back what lies idle.
    pub(super) async fn disconnect(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for idle in idle.into_values().flatten() {
            // One that is left lapses.
            let _ = self.revoke(idle.lease.id).await;
        }
    }

    /// The task that renews what lies idle, and gives back what nobody wanted for long.
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

    /// When to look again, as long as anything lies idle.
    fn next_look(&self) -> Option<Duration> {
        let idle = self.idle();
        let shortest = idle.values().flatten().map(|i| i.lease.granted).min()?;
        Some(shortest / 24)
    }

    /// What is to be renewed, and what to be given back, which lies idle no more.
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
            // It is tried again; grown stale it is not taken, and grown old it is given back.
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

    #[test]
    fn s83_seconds_are_never_fewer_than_asked() {
        let seconds = |millis| seconds(Duration::from_millis(millis));
        assert_eq!((seconds(1), seconds(1_000), seconds(1_001), seconds(0)), (1, 1, 2, 1));
        assert_eq!(super::seconds(Duration::MAX), i64::MAX);
    }
}
