//! The claims of this client: where each stands, how long it may stand unrenewed, and what it was
//! told.
//!
//! Calls about one claim go one after the other (its *gate*): a `leave` that follows a dropped `join`
//! waits until that one is done, and finds what it made. What expires is given up at once, for all
//! that is told of it, but its node is deleted in its turn too: two calls that did not wait for each
//! other could make two nodes of one claim. What a claim is told is kept until it
//! leaves, so that nothing is lost between the answer "waiting" and `changed`.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::task::AbortHandle;

use super::watch::OwnWatch;
use leasehold_core::store::{Mode, Place, Signal};
use leasehold_core::{Claim, ClaimId, Moment, Token};

/// Where a claim's node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// The session that made the node, and with which it goes.
    pub(super) session: i64,
    /// The lock's node.
    pub(super) lock: String,
    /// The name of its own node there.
    pub(super) node: String,
    pub(super) token: Token,
    pub(super) sequence: i64,
}

impl Standing {
    /// The whole path of its node.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.lock, self.node)
    }
}

/// The task that notifies a waiting claim of its turn. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Listening(pub(super) AbortHandle);

impl Listening {
    fn is_open(&self) -> bool {
        !self.0.is_finished()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is known of a claim.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// Nothing was sent for it.
    New,
    /// Its node was asked for under this lock's node, and may be there.
    Asked { lock: String },
    /// It has a node.
    Standing(Standing),
}

#[derive(Debug)]
struct Kept {
    gate: Arc<tokio::sync::Mutex<()>>,
    stage: Stage,
    /// Unless it is renewed, its node is deleted then.
    expires: Moment,
    /// It has expired, and its node is to be deleted.
    given_up: bool,
    /// It was to hold at once or not at all.
    trying: bool,
    holding: bool,
    /// How many were before it when that was last looked at.
    ahead: usize,
    /// What the lock's node was when a heartbeat listed its queue last: when it was made, and how
    /// often its children had changed.
    listed: Option<(i64, i32)>,
    /// For how long it was last known to wait: what a pushed grant is taken for.
    waits_until: Moment,
    told: Option<Signal>,
    wake: Arc<Notify>,
    /// Listens for what stands in its way.
    listening: Option<Listening>,
    /// A holder's watch on its own child.
    own_watch: Option<OwnWatch>,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            gate: Arc::default(),
            stage: Stage::New,
            expires: Moment::NEVER,
            given_up: false,
            trying: false,
            holding: false,
            ahead: 0,
            listed: None,
            waits_until: Moment::from_nanos(0),
            told: None,
            wake: Arc::default(),
            listening: None,
            own_watch: None,
        }
    }
}

impl Kept {
    fn give_up(&mut self) {
        self.expires = Moment::NEVER;
        self.given_up = true;
        self.listening = None;
        self.told = Some(Signal::Ask);
        self.wake.notify_one();
    }

    /// It was granted; `certain` is how long its session lives. It is told so if that covers what a
    /// pushed grant is taken for, a waiter's lease from the last answer; else it is told to ask.
    fn grant(&mut self, certain: Moment) {
        self.holding = true;
        if let Stage::Standing(standing) = &self.stage {
            self.told = Some(match self.waits_until <= certain {
                true => Signal::Granted(standing.token),
                false => Signal::Ask,
            });
        }
        self.wake.notify_one();
    }
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    all: Mutex<Ledger>,
    /// Something expires before the reaper would look.
    sooner: Notify,
}

#[derive(Debug)]
struct Ledger {
    claims: HashMap<ClaimId, Kept>,
    /// When the reaper looks next.
    planned: Moment,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { claims: HashMap::new(), planned: Moment::NEVER }
    }
}

/// How a claim that stands is known to stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    Holding(Token),
    Waiting(Place),
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // No code that can panic runs between two consistent states.
        locked(&self.all)
    }

    fn with<T>(&self, id: ClaimId, work: impl FnOnce(&mut Kept) -> T) -> Option<T> {
        self.lock().claims.get_mut(&id).map(work)
    }

    /// As [`with`](Self::with), for a claim that was not given up.
    fn alive<T>(&self, id: ClaimId, work: impl FnOnce(&mut Kept) -> T) -> Option<T> {
        self.lock().claims.get_mut(&id).filter(|kept| !kept.given_up).map(work)
    }

    /// Waits for this claim's turn. The claim is known from here on, until it is removed.
    pub(super) async fn enter(&self, id: ClaimId) -> OwnedMutexGuard<()> {
        loop {
            let gate = self.lock().claims.entry(id).or_default().gate.clone();
            let turn = gate.clone().lock_owned().await;
            // Who was before us may have removed it.
            if self.with(id, |kept| Arc::ptr_eq(&kept.gate, &gate)) == Some(true) {
                return turn;
            }
        }
    }

    pub(super) fn stage(&self, id: ClaimId) -> Stage {
        self.with(id, |kept| kept.stage.clone()).unwrap_or(Stage::New)
    }

    fn expire_at(&self, mut ledger: MutexGuard<'_, Ledger>, id: ClaimId, expires: Moment) {
        if let Some(kept) = ledger.claims.get_mut(&id) {
            kept.expires = expires;
        }
        if expires < ledger.planned {
            ledger.planned = expires;
            drop(ledger);
            self.sooner.notify_one();
        }
    }

    /// What was known of it is not true any more.
    pub(super) fn begin_anew(&self, id: ClaimId) {
        self.with(id, |kept| {
            let gate = kept.gate.clone();
            *kept = Kept::default();
            kept.gate = gate;
        });
    }

    /// Its node is about to be asked for.
    pub(super) fn asked(&self, claim: &Claim, mode: Mode, lock: &str, now: Moment) {
        let mut ledger = self.lock();
        if let Some(kept) = ledger.claims.get_mut(&claim.id) {
            kept.stage = Stage::Asked { lock: lock.to_owned() };
            kept.trying = mode == Mode::Try;
        }
        self.expire_at(ledger, claim.id, now.plus(claim.lease));
    }

    /// Its node is there. `false`: it was given up meanwhile.
    pub(super) fn stands(&self, id: ClaimId, standing: Standing) -> bool {
        self.alive(id, |kept| kept.stage = Stage::Standing(standing)).is_some()
    }

    /// It holds, until `expires` unless it is renewed. `false`: it was given up meanwhile.
    pub(super) fn holds(&self, id: ClaimId, expires: Moment) -> bool {
        let mut ledger = self.lock();
        let kept = ledger.claims.get_mut(&id).filter(|kept| !kept.given_up);
        let Some(kept) = kept else { return false };
        kept.holding = true;
        kept.listening = None;
        // Never shortened: a late duplicate must not take back what was told.
        let expires =
            if kept.expires == Moment::NEVER { expires } else { expires.max(kept.expires) };
        self.expire_at(ledger, id, expires);
        true
    }

    /// It waits. `false`: it was given up meanwhile.
    pub(super) fn waits(&self, claim: &Claim, ahead: usize, beat: Moment) -> bool {
        let mut ledger = self.lock();
        let kept = ledger.claims.get_mut(&claim.id).filter(|kept| !kept.given_up);
        let Some(kept) = kept else { return false };
        (kept.ahead, kept.waits_until) = (ahead, beat.plus(claim.waiter_lease));
        self.expire_at(ledger, claim.id, beat.plus(claim.waiter_lease));
        true
    }

    /// Its queue was listed at a heartbeat.
    pub(super) fn listed(&self, id: ClaimId, version: (i64, i32)) {
        self.with(id, |kept| kept.listed = Some(version));
    }

    /// Whether a heartbeat need not list its queue: it is watched who is in the way, and nobody has come
    /// or gone.
    pub(super) fn may_rest(&self, id: ClaimId, version: (i64, i32)) -> bool {
        let is_open = |kept: &mut Kept| kept.listening.as_ref().is_some_and(Listening::is_open);
        self.with(id, |kept| is_open(kept) && kept.listed == Some(version)).unwrap_or(false)
    }

    /// How many are before it has changed. Never to more: then somebody has looked later.
    pub(super) fn stands_behind(&self, id: ClaimId, ahead: usize) {
        self.with(id, |kept| kept.ahead = kept.ahead.min(ahead));
    }

    /// How it stands, if it has a node.
    pub(super) fn known(&self, id: ClaimId) -> Option<(Standing, Known)> {
        let ledger = self.lock();
        let kept = ledger.claims.get(&id).filter(|kept| !kept.given_up)?;
        let Stage::Standing(standing) = &kept.stage else { return None };
        let token = standing.token;
        let known = match kept.holding {
            true => Known::Holding(token),
            false => Known::Waiting(Place {
                ahead: kept.ahead,
                head_remaining: None,
                token: Some(token),
            }),
        };
        Some((standing.clone(), known))
    }

    /// What is left of the lease of a claim of ours, for people.
    pub(super) fn remaining(&self, id: ClaimId, now: Moment) -> Option<Duration> {
        let expires = self.with(id, |kept| kept.expires)?;
        (expires != Moment::NEVER).then(|| expires.since(now))
    }

    /// Whether it was to hold at once or not at all.
    pub(super) fn is_trying(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.trying).unwrap_or(false)
    }

    /// Takes over what listens for it. Given up meanwhile, nobody is there to be told.
    pub(super) fn listens(&self, id: ClaimId, listening: Listening) {
        self.alive(id, |kept| kept.listening = Some(listening));
    }

    pub(super) fn is_listening(&self, id: ClaimId) -> bool {
        let is_open = |kept: &mut Kept| kept.listening.as_ref().is_some_and(Listening::is_open);
        self.with(id, is_open).unwrap_or(false)
    }

    /// It was granted; `certain` is how long its session lives.
    pub(super) fn granted(&self, id: ClaimId, certain: Moment, own_watch: Option<OwnWatch>) {
        self.alive(id, |kept| {
            kept.own_watch = own_watch;
            kept.grant(certain);
        });
    }

    pub(super) fn tell_to_ask(&self, id: ClaimId) {
        let wake = self.with(id, |kept| {
            kept.told.get_or_insert(Signal::Ask);
            kept.wake.clone()
        });
        if let Some(wake) = wake {
            wake.notify_one();
        }
    }

    /// The next news of a claim; at once for one that is not here.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        loop {
            let told = self.with(id, |kept| {
                let told = kept.told;
                // A grant is told as often as it is asked for.
                if told == Some(Signal::Ask) {
                    kept.told = None;
                }
                (told, kept.wake.clone())
            });
            let wake = match told {
                None => return Signal::Ask,
                Some((Some(signal), _)) => return signal,
                Some((None, wake)) => wake,
            };
            wake.notified().await;
        }
    }

    /// Forgets a claim; whoever listened for it ends.
    pub(super) fn remove(&self, id: ClaimId) {
        let removed = self.lock().claims.remove(&id);
        // Whoever still waits for news finds that there are none.
        if let Some(kept) = removed {
            kept.wake.notify_waiters();
        }
    }

    /// Gives up what nobody has renewed in time, and tells what that is.
    pub(super) fn expired(&self, now: Moment) -> Vec<ClaimId> {
        let mut ledger = self.lock();
        let mut expired = Vec::new();
        let mut next = Moment::NEVER;
        for (id, kept) in &mut ledger.claims {
            if kept.expires > now {
                next = next.min(kept.expires);
                continue;
            }
            kept.give_up();
            expired.push(*id);
        }
        ledger.planned = next;
        expired
    }

    /// Gives up a claim that waits; `false` for any other.
    pub(super) fn refuse(&self, id: ClaimId) -> bool {
        self.alive(id, |kept| {
            let waits = !kept.holding;
            if waits {
                kept.give_up();
            }
            waits
        })
        .unwrap_or(false)
    }

    /// Whether it was given up and its node may still be there.
    pub(super) fn is_given_up(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.given_up).unwrap_or(false)
    }

    /// Waits until it is worth to look for what expired.
    pub(super) async fn something_expires(&self, now: Moment) {
        let planned = self.lock().planned;
        let pause = planned.since(now).min(Duration::from_secs(3_600));
        tokio::select! {
            () = self.sooner.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
