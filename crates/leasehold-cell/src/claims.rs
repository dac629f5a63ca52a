//! The claims of this client: until when each is valid without a renewal, and what is unknown about
//! it.
//!
//! In the cells, a claim lives as long as its client's session. The end of its *lease* is enforced
//! here, while the client lives. A claim that was not renewed in time is given up: from then on no
//! call reports it as valid, and a background task removes it from its queue (`leave.rs`).
//!
//! Calls that change the same claim run one after the other, because each needs the claim's *gate*.
//! So a `leave` that follows a dropped `join` waits until the `join` is done or dropped, and knows
//! which of its requests were sent.
//!
//! A claim may end during a slow `join`. The claim is then given up, and its removal waits for the
//! gate. So the result of that request is not reported, and the `join` requests the claim again.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::{Inbox, locked};
use leasehold_core::store::Signal;
use leasehold_core::{Claim, ClaimId, Moment, Name};
use tokio::sync::{Notify, OwnedMutexGuard};

use crate::cells::Version;

/// The state of a claim.
#[derive(Debug)]
struct ClaimRecord {
    name: Name,
    gate: Arc<tokio::sync::Mutex<()>>,
    /// The session that the claim belongs to, if the claim was seen in its queue.
    session: Option<String>,
    /// When the claim is given up unless it is renewed.
    ends: Moment,
    is_given_up: bool,
    /// Whether a write that adds the claim to its queue was sent and its result is unknown.
    is_doubtful: bool,
    /// Whether a write that removes the claim from its queue was sent and may have taken effect.
    is_leaving: bool,
    /// The number of claims ahead, and the pause before the next poll.
    waits: Option<(usize, Duration)>,
    /// The version of the queue, and when that version was first seen or the queue's lifetime was
    /// last extended.
    queue: Option<(Version, Moment)>,
    inbox: Arc<Inbox>,
}

/// All claims of this client.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    all: Mutex<BTreeMap<ClaimId, ClaimRecord>>,
    /// When the reaper next checks for ended claims, in nanoseconds of the boot clock.
    planned: AtomicU64,
    /// Notified when a claim ends before `planned`.
    pub(crate) sooner: Notify,
}

/// The right to change a claim. Only one task has it at a time.
pub(crate) type Gate = OwnedMutexGuard<()>;

impl Claims {
    /// Registers the claim with this end, unless it is already registered, and waits for its gate.
    pub(crate) async fn enter(&self, claim: &Claim, ends: Moment) -> Gate {
        loop {
            let gate = self.gate_of(claim, ends);
            let entered = gate.clone().lock_owned().await;
            // The previous owner of the gate may have forgotten the claim.
            if self.is_gate(claim.id, &gate) {
                return entered;
            }
        }
    }

    /// Waits for the gate of a registered claim. Returns `None` if the claim was forgotten.
    pub(crate) async fn enter_known(&self, id: ClaimId) -> Option<Gate> {
        loop {
            let gate = self.gate(id)?;
            let entered = gate.clone().lock_owned().await;
            if self.is_gate(id, &gate) {
                return Some(entered);
            }
        }
    }

    /// Returns whether this is the claim's current gate. Returns `false` if the claim was
    /// forgotten, and perhaps requested again.
    fn is_gate(&self, id: ClaimId, gate: &Arc<tokio::sync::Mutex<()>>) -> bool {
        self.gate(id).is_some_and(|now| Arc::ptr_eq(&now, gate))
    }

    fn gate(&self, id: ClaimId) -> Option<Arc<tokio::sync::Mutex<()>>> {
        self.with(id, |kept| kept.gate.clone())
    }

    fn gate_of(&self, claim: &Claim, ends: Moment) -> Arc<tokio::sync::Mutex<()>> {
        let gate = {
            let mut all = locked(&self.all);
            let kept = all.entry(claim.id).or_insert_with(|| ClaimRecord {
                name: claim.name.clone(),
                gate: Arc::default(),
                session: None,
                ends,
                is_given_up: false,
                is_doubtful: false,
                is_leaving: false,
                waits: None,
                queue: None,
                inbox: Arc::default(),
            });
            kept.gate.clone()
        };
        self.plan(ends);
        gate
    }

    fn plan(&self, ends: Moment) {
        if ends.as_nanos() < self.planned.load(Relaxed) {
            self.sooner.notify_one();
        }
    }

    fn with<T>(&self, id: ClaimId, work: impl FnOnce(&mut ClaimRecord) -> T) -> Option<T> {
        locked(&self.all).get_mut(&id).map(work)
    }

    /// Returns whether the claim was given up, and may still be in its queue.
    pub(crate) fn is_given_up(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_given_up).unwrap_or(false)
    }

    /// Records that the claim is in its queue under this session, until `ends` at least. Returns
    /// `false` if the claim was given up in the meantime.
    pub(crate) fn stands(
        &self,
        id: ClaimId,
        session: &str,
        ends: Moment,
        ahead: Option<usize>,
    ) -> bool {
        let stands = self.with(id, |kept| {
            if kept.is_given_up {
                return false;
            }
            kept.session = Some(session.to_owned());
            kept.ends = kept.ends.max(ends);
            kept.is_doubtful = false;
            match (ahead, &kept.waits) {
                (None, _) => kept.waits = None,
                (Some(ahead), Some((before, _))) if *before == ahead => {}
                (Some(ahead), _) => kept.waits = Some((ahead, Duration::ZERO)),
            }
            true
        });
        stands.unwrap_or(false)
    }

    /// Returns the session of a claim that was not given up and has not ended.
    pub(crate) fn session_of(&self, id: ClaimId, now: Moment) -> Option<String> {
        let session = self.with(id, |kept| {
            let is_good = !kept.is_given_up && kept.ends > now;
            kept.session.clone().filter(|_| is_good)
        });
        session.flatten()
    }

    /// Returns the current or former session of the claim.
    pub(crate) fn session(&self, id: ClaimId) -> Option<String> {
        self.with(id, |kept| kept.session.clone()).flatten()
    }

    /// Returns whether no claim is registered: none is in a queue, requested, or waiting for its
    /// removal.
    pub(crate) fn is_empty(&self) -> bool {
        locked(&self.all).is_empty()
    }

    /// Returns whether there is a claim that was not given up and has not ended.
    pub(crate) fn any_stands(&self, now: Moment) -> bool {
        locked(&self.all).values().any(|kept| !kept.is_given_up && kept.ends > now)
    }

    /// Extends the claim unless it has ended, and returns its new end.
    pub(crate) fn extend(&self, id: ClaimId, now: Moment, lease: Duration) -> Option<Moment> {
        let extended = self.with(id, |kept| {
            if kept.is_given_up || kept.ends <= now {
                return None;
            }
            kept.ends = kept.ends.max(now.plus(lease));
            Some(kept.ends)
        });
        extended.flatten()
    }

    /// Returns the end of the claim.
    pub(crate) fn ends(&self, id: ClaimId) -> Option<Moment> {
        self.with(id, |kept| kept.ends)
    }

    /// Records that the next request writes the claim into its queue.
    pub(crate) fn doubt(&self, id: ClaimId) {
        self.with(id, |kept| kept.is_doubtful = true);
    }

    /// Records that it is known whether the claim is in its queue, because a reply has arrived.
    pub(crate) fn is_certain(&self, id: ClaimId) {
        self.with(id, |kept| kept.is_doubtful = false);
    }

    /// Returns whether a write that is still under way may add the claim to its queue.
    pub(crate) fn is_doubtful(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_doubtful).unwrap_or(false)
    }

    /// Records that the next request removes the claim, or, if `is_leaving` is `false`, that the
    /// last one had no effect.
    pub(crate) fn leaves(&self, id: ClaimId, is_leaving: bool) {
        self.with(id, |kept| kept.is_leaving = is_leaving);
    }

    /// Returns whether a request that removes the claim was sent.
    pub(crate) fn is_leaving(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_leaving).unwrap_or(false)
    }

    /// Returns the claim's inbox.
    pub(crate) fn inbox(&self, id: ClaimId) -> Option<Arc<Inbox>> {
        self.with(id, |kept| kept.inbox.clone())
    }

    /// Sends a signal to the claim's inbox.
    pub(crate) fn notify(&self, id: ClaimId, signal: Signal) {
        self.with(id, |kept| kept.inbox.notify(signal));
    }

    /// Makes all waiters poll, because a message may have been lost.
    pub(crate) fn ask_all(&self) {
        locked(&self.all).values().for_each(|kept| kept.inbox.notify(Signal::Ask));
    }

    /// Forgets the claim. The caller has its gate, so a task that waits for the gate starts again.
    pub(crate) fn forget(&self, id: ClaimId) {
        locked(&self.all).remove(&id);
    }

    /// Returns the number of claims ahead at the last poll, and the last pause.
    pub(crate) fn waits(&self, id: ClaimId) -> Option<(usize, Duration)> {
        self.with(id, |kept| kept.waits.filter(|_| !kept.is_given_up)).flatten()
    }

    /// Records the version of the claim's queue. Returns whether the queue has had this version for
    /// longer than `longest`, so that its lifetime must be extended. If so, the time starts again.
    pub(crate) fn is_old(
        &self,
        id: ClaimId,
        version: &Version,
        now: Moment,
        longest: Duration,
    ) -> bool {
        let is_old = self.with(id, |kept| match &mut kept.queue {
            Some((known, since)) if known == version => {
                let is_old = now.since(*since) >= longest;
                if is_old {
                    *since = now;
                }
                is_old
            }
            other => {
                *other = Some((version.clone(), now));
                false
            }
        });
        is_old.unwrap_or(false)
    }

    /// Records the pause before the next poll.
    pub(crate) fn pauses(&self, id: ClaimId, pause: Duration) {
        self.with(id, |kept| {
            if let Some((_, last)) = &mut kept.waits {
                *last = pause;
            }
        });
    }

    /// Gives up the claims that have ended. Returns them, and when the next claim ends.
    pub(crate) fn give_up(&self, now: Moment) -> (Vec<(ClaimId, Name)>, Moment) {
        let mut all = locked(&self.all);
        let mut over = Vec::new();
        let mut next = Moment::NEVER;
        for (id, kept) in all.iter_mut().filter(|(_, kept)| !kept.is_given_up) {
            if kept.ends <= now {
                kept.is_given_up = true;
                over.push((*id, kept.name.clone()));
            } else {
                next = next.min(kept.ends);
            }
        }
        self.planned.store(next.as_nanos(), Relaxed);
        (over, next)
    }

    /// Registers a previously abandoned claim again, because it has been requested again. The claim
    /// gets a new queue position.
    pub(crate) fn begin_anew(&self, id: ClaimId, ends: Moment) {
        self.with(id, |kept| {
            (kept.session, kept.waits) = (None, None);
            (kept.is_given_up, kept.is_doubtful, kept.is_leaving) = (false, false, false);
            kept.inbox.clear();
            kept.ends = ends;
        });
        self.plan(ends);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use leasehold_core::Kind;

    use super::*;

    fn claim() -> Claim {
        Claim::new(Name::new("a").unwrap(), Kind::Mutex, 1, 1).unwrap()
    }

    /// Returns whether the future is ready.
    fn is_done<T>(work: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        work.poll(&mut context).is_ready()
    }

    /// The lifetime of a queue that does not change for weeks is extended once per day, according
    /// to the age of its version.
    #[tokio::test]
    async fn unchanged_queue_is_extended_once_per_day() {
        let (claims, claim) = (Claims::default(), claim());
        let _gate = claims.enter(&claim, Moment::NEVER).await;
        let version = |n: u32| Version(n.to_string());
        let at = |hours: u64| Moment::from_nanos(1 + hours * 3_600_000_000_000);
        let day = Duration::from_secs(86_400);
        let is_old = |n, hours| claims.is_old(claim.id, &version(n), at(hours), day);
        assert!(!is_old(1, 0) && !is_old(1, 23));
        assert!(is_old(1, 24), "the queue would expire");
        assert!(!is_old(1, 25) && !is_old(1, 47) && is_old(1, 48));
        assert!(!is_old(2, 60) && !is_old(2, 83) && is_old(2, 84));
    }

    /// A task that waited for the gate of a forgotten claim must not write at the same time as the
    /// task that requested the claim again.
    #[tokio::test]
    async fn waiter_of_forgotten_gate_waits_for_the_new_gate() {
        let (claims, claim) = (Claims::default(), claim());
        let first = claims.enter(&claim, Moment::NEVER).await;
        let mut reaps = pin!(claims.enter_known(claim.id));
        assert!(!is_done(reaps.as_mut()));
        claims.forget(claim.id);
        let second = claims.enter(&claim, Moment::NEVER).await;
        drop(first);
        assert!(!is_done(reaps.as_mut()), "two tasks write at the same time");
        drop(second);
        assert!(reaps.await.is_some());
    }

    #[tokio::test]
    async fn waiter_of_forgotten_gate_returns_if_there_is_no_new_gate() {
        let (claims, claim) = (Claims::default(), claim());
        let first = claims.enter(&claim, Moment::NEVER).await;
        let mut reaps = pin!(claims.enter_known(claim.id));
        assert!(!is_done(reaps.as_mut()));
        claims.forget(claim.id);
        drop(first);
        assert!(reaps.await.is_none());
    }
}
