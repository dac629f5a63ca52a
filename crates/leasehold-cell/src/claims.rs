//! The claims of this client: until when each may stand unrenewed, and what is not known of it.
//!
//! In the cells a claim lives as long as its client's session. That it ends with its *lease* is this
//! book's doing, while the client lives: what was not renewed in time is given up at once, for all that is
//! told of it, and then taken out of its queue (`leave.rs`).
//!
//! Calls about one claim that write go one after the other (its *gate*): a `leave` that follows a dropped
//! `join` waits until that one is done or dropped, and finds what it left.
//!
//! A claim may end while a `join` of it is under way that takes long. Then it is given up, and whoever takes it out
//! waits for its turn: so what that `join` finds is told to nobody, and asked for anew.

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

/// What is known of a claim.
#[derive(Debug)]
struct Kept {
    name: Name,
    gate: Arc<tokio::sync::Mutex<()>>,
    /// The session that it stands under, if it was seen standing.
    session: Option<String>,
    /// Unless it is renewed, it is given up then.
    ends: Moment,
    is_given_up: bool,
    /// It was written into a queue, and whether that was done is not known.
    is_doubtful: bool,
    /// It was taken out, and whether that was done is not known.
    is_leaving: bool,
    /// How many were before it, and how long to wait until the next look.
    waits: Option<(usize, Duration)>,
    /// Its queue's version, and when it was first seen or the queue was last prolonged.
    queue: Option<(Version, Moment)>,
    inbox: Arc<Inbox>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    all: Mutex<BTreeMap<ClaimId, Kept>>,
    /// When the reaper looks next, in nanoseconds of the boot clock.
    planned: AtomicU64,
    /// Something ends before that.
    pub(crate) sooner: Notify,
}

/// Whoever has this is the only one that writes about its claim.
pub(crate) type Gate = OwnedMutexGuard<()>;

impl Claims {
    /// Waits for the claim's turn. It is known from then on, for as long at least.
    pub(crate) async fn enter(&self, claim: &Claim, ends: Moment) -> Gate {
        loop {
            let gate = self.gate_of(claim, ends);
            let entered = gate.clone().lock_owned().await;
            // Or it was forgotten by whoever had its turn before.
            if self.is_gate(claim.id, &gate) {
                return entered;
            }
        }
    }

    /// Waits for the turn of a claim that is known. `None`: nothing of it is left.
    pub(crate) async fn enter_known(&self, id: ClaimId) -> Option<Gate> {
        loop {
            let gate = self.gate(id)?;
            let entered = gate.clone().lock_owned().await;
            if self.is_gate(id, &gate) {
                return Some(entered);
            }
        }
    }

    /// Whether this is the claim's gate: not if it was forgotten, and then perhaps asked for anew.
    fn is_gate(&self, id: ClaimId, gate: &Arc<tokio::sync::Mutex<()>>) -> bool {
        self.gate(id).is_some_and(|now| Arc::ptr_eq(&now, gate))
    }

    fn gate(&self, id: ClaimId) -> Option<Arc<tokio::sync::Mutex<()>>> {
        self.with(id, |kept| kept.gate.clone())
    }

    fn gate_of(&self, claim: &Claim, ends: Moment) -> Arc<tokio::sync::Mutex<()>> {
        let gate = {
            let mut all = locked(&self.all);
            let kept = all.entry(claim.id).or_insert_with(|| Kept {
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

    fn with<T>(&self, id: ClaimId, work: impl FnOnce(&mut Kept) -> T) -> Option<T> {
        locked(&self.all).get_mut(&id).map(work)
    }

    /// Whether it was given up, and may still stand in its queue.
    pub(crate) fn is_given_up(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_given_up).unwrap_or(false)
    }

    /// It stands under this session, until then at least. Whether it does: not if it was given up meanwhile.
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

    /// The session that it stands under, if it was not given up and has not ended.
    pub(crate) fn standing(&self, id: ClaimId, now: Moment) -> Option<String> {
        let session = self.with(id, |kept| {
            let is_good = !kept.is_given_up && kept.ends > now;
            kept.session.clone().filter(|_| is_good)
        });
        session.flatten()
    }

    /// The session that it stands under, or stood under.
    pub(crate) fn session(&self, id: ClaimId) -> Option<String> {
        self.with(id, |kept| kept.session.clone()).flatten()
    }

    /// Whether nothing is known of any: nothing stands, and nothing is asked for or owed.
    pub(crate) fn is_empty(&self) -> bool {
        locked(&self.all).is_empty()
    }

    /// Whether there is one that was not given up and has not ended.
    pub(crate) fn any_stands(&self, now: Moment) -> bool {
        locked(&self.all).values().any(|kept| !kept.is_given_up && kept.ends > now)
    }

    /// Extends it, unless it is over by now. Until when it stands.
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

    /// Until when it stands.
    pub(crate) fn ends(&self, id: ClaimId) -> Option<Moment> {
        self.with(id, |kept| kept.ends)
    }

    /// What is about to be sent writes it into its queue.
    pub(crate) fn doubt(&self, id: ClaimId) {
        self.with(id, |kept| kept.is_doubtful = true);
    }

    /// It was answered: what is in the queue is known.
    pub(crate) fn is_certain(&self, id: ClaimId) {
        self.with(id, |kept| kept.is_doubtful = false);
    }

    /// Whether it may yet come into its queue.
    pub(crate) fn is_doubtful(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_doubtful).unwrap_or(false)
    }

    /// What is about to be sent takes it out; or what was sent came to nothing.
    pub(crate) fn leaves(&self, id: ClaimId, is_leaving: bool) {
        self.with(id, |kept| kept.is_leaving = is_leaving);
    }

    /// Whether something was sent that takes it out.
    pub(crate) fn is_leaving(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.is_leaving).unwrap_or(false)
    }

    /// What it is told.
    pub(crate) fn inbox(&self, id: ClaimId) -> Option<Arc<Inbox>> {
        self.with(id, |kept| kept.inbox.clone())
    }

    /// Tells it.
    pub(crate) fn tell(&self, id: ClaimId, signal: Signal) {
        self.with(id, |kept| kept.inbox.tell(signal));
    }

    /// Lets all of them look: something may have been missed.
    pub(crate) fn ask_all(&self) {
        locked(&self.all).values().for_each(|kept| kept.inbox.tell(Signal::Ask));
    }

    /// Nothing of it is left. With its gate in hand: who waits for that begins anew.
    pub(crate) fn forget(&self, id: ClaimId) {
        locked(&self.all).remove(&id);
    }

    /// How many were before it when it was last looked at, and how long it has waited since the last look.
    pub(crate) fn waits(&self, id: ClaimId) -> Option<(usize, Duration)> {
        self.with(id, |kept| kept.waits.filter(|_| !kept.is_given_up)).flatten()
    }

    /// This is its queue's version now. Whether it has been so for longer than this, so that the queue is to be
    /// prolonged: from then on its time begins anew.
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

    /// How long to wait before the next look.
    pub(crate) fn pauses(&self, id: ClaimId, pause: Duration) {
        self.with(id, |kept| {
            if let Some((_, last)) = &mut kept.waits {
                *last = pause;
            }
        });
    }

    /// Gives up what has ended; tells what that is, and when something ends next.
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

    /// It was given up, and is asked for again: a new place.
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

    /// Whether it is done by now.
    fn is_done<T>(work: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        work.poll(&mut context).is_ready()
    }

    /// A queue that is held for weeks without a change is prolonged once a day, by each version's age.
    #[tokio::test]
    async fn a_queue_that_does_not_change_is_prolonged_once_in_a_while() {
        let (claims, claim) = (Claims::default(), claim());
        let _gate = claims.enter(&claim, Moment::NEVER).await;
        let version = |n: u32| Version(n.to_string());
        let at = |hours: u64| Moment::from_nanos(1 + hours * 3_600_000_000_000);
        let day = Duration::from_secs(86_400);
        let is_old = |n, hours| claims.is_old(claim.id, &version(n), at(hours), day);
        assert!(!is_old(1, 0) && !is_old(1, 23));
        assert!(is_old(1, 24), "it would end");
        assert!(!is_old(1, 25) && !is_old(1, 47) && is_old(1, 48));
        assert!(!is_old(2, 60) && !is_old(2, 83) && is_old(2, 84));
    }

    /// Who waited for the gate of what was forgotten must not write beside who asked for it anew.
    #[tokio::test]
    async fn who_waited_for_a_gate_that_is_no_more_waits_for_the_next() {
        let (claims, claim) = (Claims::default(), claim());
        let first = claims.enter(&claim, Moment::NEVER).await;
        let mut reaps = pin!(claims.enter_known(claim.id));
        assert!(!is_done(reaps.as_mut()));
        claims.forget(claim.id);
        let second = claims.enter(&claim, Moment::NEVER).await;
        drop(first);
        assert!(!is_done(reaps.as_mut()), "both write");
        drop(second);
        assert!(reaps.await.is_some());
    }

    #[tokio::test]
    async fn who_waited_for_a_gate_that_is_no_more_ends_if_there_is_no_other() {
        let (claims, claim) = (Claims::default(), claim());
        let first = claims.enter(&claim, Moment::NEVER).await;
        let mut reaps = pin!(claims.enter_known(claim.id));
        assert!(!is_done(reaps.as_mut()));
        claims.forget(claim.id);
        drop(first);
        assert!(reaps.await.is_none());
    }
}
