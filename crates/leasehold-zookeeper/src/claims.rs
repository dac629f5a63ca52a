//! The claims of this client: the node of each, when it expires without renewal, and its
//! notifications.
//!
//! Calls about the same claim run one after the other, because each enters the claim's *gate*. A
//! `leave` that follows a dropped `join` waits until the `join` is done, and finds the node that
//! the `join` created. A claim that expires counts as ended immediately, but the deletion of its
//! node also waits for the gate. Without the gate, two calls could create two nodes for one claim.
//! The notifications of a claim are kept until it is removed, so that none is lost between the
//! result "waiting" and `changed`.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::task::AbortHandle;

use super::watch::OwnWatch;
use leasehold_core::store::{Mode, Place, Signal};
use leasehold_core::{Claim, ClaimId, Moment, Token};

/// The node of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimNode {
    /// The session that created the node. The node is deleted when the session ends.
    pub(super) session: i64,
    /// The lock's node.
    pub(super) lock: String,
    /// The name of the claim's own node below the lock's node.
    pub(super) node: String,
    pub(super) token: Token,
    pub(super) sequence: i64,
}

impl ClaimNode {
    /// Returns the full path of the claim's node.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.lock, self.node)
    }
}

/// Handle of the task that notifies a waiting claim of its turn. Dropping the handle aborts the
/// task.
#[derive(Debug)]
pub(super) struct WatchTask(pub(super) AbortHandle);

impl WatchTask {
    fn is_open(&self) -> bool {
        !self.0.is_finished()
    }
}

impl Drop for WatchTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The state of a claim.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// No request was sent for the claim.
    New,
    /// The creation of the claim's node below the node `lock` was requested, so the claim's node
    /// may exist.
    Requested { lock: String },
    /// The claim has a node.
    Created(ClaimNode),
}

#[derive(Debug)]
struct ClaimRecord {
    gate: Arc<tokio::sync::Mutex<()>>,
    stage: Stage,
    /// When the claim's node is deleted, unless the claim is renewed.
    expires: Moment,
    /// Whether the claim has expired and its node is to be deleted.
    given_up: bool,
    /// Whether the claim must be granted immediately or not at all.
    trying: bool,
    holding: bool,
    /// How many claims were ahead of this one at the last read.
    ahead: usize,
    /// The version of the lock's node when a heartbeat last listed its queue: when the node was
    /// created, and how often its children had changed.
    listed: Option<(i64, i32)>,
    /// When the waiter lease, counted from the last heartbeat, ends. A pushed grant counts as valid
    /// until then.
    waits_until: Moment,
    signal: Option<Signal>,
    wake: Arc<Notify>,
    /// The task that watches the claims that block this one.
    watch_task: Option<WatchTask>,
    /// A holder's watch on its own child.
    own_watch: Option<OwnWatch>,
}

impl Default for ClaimRecord {
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
            signal: None,
            wake: Arc::default(),
            watch_task: None,
            own_watch: None,
        }
    }
}

impl ClaimRecord {
    fn give_up(&mut self) {
        self.expires = Moment::NEVER;
        self.given_up = true;
        self.watch_task = None;
        self.signal = Some(Signal::Ask);
        self.wake.notify_one();
    }

    /// Records a grant. `certain` is the time until which the session certainly lives. If that
    /// covers the time for which a pushed grant counts as valid (`waits_until`), the grant is
    /// reported. Otherwise the claim is notified to poll.
    fn grant(&mut self, certain: Moment) {
        self.holding = true;
        if let Stage::Created(claim_node) = &self.stage {
            self.signal = Some(match self.waits_until <= certain {
                true => Signal::Granted(claim_node.token),
                false => Signal::Ask,
            });
        }
        self.wake.notify_one();
    }
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    all: Mutex<Ledger>,
    /// Notified if a claim expires before the reaper's next check.
    sooner: Notify,
}

#[derive(Debug)]
struct Ledger {
    claims: HashMap<ClaimId, ClaimRecord>,
    /// When the reaper checks next.
    planned: Moment,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { claims: HashMap::new(), planned: Moment::NEVER }
    }
}

/// The state of a claim that has a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    Holding(Token),
    Waiting(Place),
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // No code that can panic runs between two consistent states.
        locked(&self.all)
    }

    fn with<T>(&self, id: ClaimId, work: impl FnOnce(&mut ClaimRecord) -> T) -> Option<T> {
        self.lock().claims.get_mut(&id).map(work)
    }

    /// Like [`with`](Self::with), for a claim that was not given up.
    fn alive<T>(&self, id: ClaimId, work: impl FnOnce(&mut ClaimRecord) -> T) -> Option<T> {
        self.lock().claims.get_mut(&id).filter(|kept| !kept.given_up).map(work)
    }

    /// Waits for the claim's gate. From here on the claim is known until it is removed.
    pub(super) async fn enter(&self, id: ClaimId) -> OwnedMutexGuard<()> {
        loop {
            let gate = self.lock().claims.entry(id).or_default().gate.clone();
            let turn = gate.clone().lock_owned().await;
            // The call before this one may have removed the claim.
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

    /// Resets the state of a claim after the state has become outdated.
    pub(super) fn begin_anew(&self, id: ClaimId) {
        self.with(id, |kept| {
            let gate = kept.gate.clone();
            *kept = ClaimRecord::default();
            kept.gate = gate;
        });
    }

    /// Records that the creation of the claim's node is about to be requested.
    pub(super) fn creation_requested(&self, claim: &Claim, mode: Mode, lock: &str, now: Moment) {
        let mut ledger = self.lock();
        if let Some(kept) = ledger.claims.get_mut(&claim.id) {
            kept.stage = Stage::Requested { lock: lock.to_owned() };
            kept.trying = mode == Mode::Try;
        }
        self.expire_at(ledger, claim.id, now.plus(claim.lease));
    }

    /// Records that the claim's node exists. Returns `false` if the claim was given up in the
    /// meantime.
    pub(super) fn created(&self, id: ClaimId, claim_node: ClaimNode) -> bool {
        self.alive(id, |kept| kept.stage = Stage::Created(claim_node)).is_some()
    }

    /// Records that the claim is a holder, until `expires` unless it is renewed. Returns `false` if
    /// it was given up in the meantime.
    pub(super) fn holds(&self, id: ClaimId, expires: Moment) -> bool {
        let mut ledger = self.lock();
        let kept = ledger.claims.get_mut(&id).filter(|kept| !kept.given_up);
        let Some(kept) = kept else { return false };
        kept.holding = true;
        kept.watch_task = None;
        // The time is never shortened, because a late duplicate must not take back what was
        // reported.
        let expires =
            if kept.expires == Moment::NEVER { expires } else { expires.max(kept.expires) };
        self.expire_at(ledger, id, expires);
        true
    }

    /// Records that the claim waits. Returns `false` if it was given up in the meantime.
    pub(super) fn waits(&self, claim: &Claim, ahead: usize, beat: Moment) -> bool {
        let mut ledger = self.lock();
        let kept = ledger.claims.get_mut(&claim.id).filter(|kept| !kept.given_up);
        let Some(kept) = kept else { return false };
        (kept.ahead, kept.waits_until) = (ahead, beat.plus(claim.waiter_lease));
        self.expire_at(ledger, claim.id, beat.plus(claim.waiter_lease));
        true
    }

    /// Records the version of the queue that a heartbeat has listed.
    pub(super) fn listed(&self, id: ClaimId, version: (i64, i32)) {
        self.with(id, |kept| kept.listed = Some(version));
    }

    /// Returns whether a heartbeat need not list the queue. It need not if a task watches the
    /// claims that block this one, and no claim was added or removed.
    pub(super) fn may_rest(&self, id: ClaimId, version: (i64, i32)) -> bool {
        let is_open =
            |kept: &mut ClaimRecord| kept.watch_task.as_ref().is_some_and(WatchTask::is_open);
        self.with(id, |kept| is_open(kept) && kept.listed == Some(version)).unwrap_or(false)
    }

    /// Records a smaller number of claims ahead. A larger number is ignored, because it comes from
    /// an older read.
    pub(super) fn set_ahead(&self, id: ClaimId, ahead: usize) {
        self.with(id, |kept| kept.ahead = kept.ahead.min(ahead));
    }

    /// Returns the state of a claim, if it has a node.
    pub(super) fn known(&self, id: ClaimId) -> Option<(ClaimNode, NodeState)> {
        let ledger = self.lock();
        let kept = ledger.claims.get(&id).filter(|kept| !kept.given_up)?;
        let Stage::Created(claim_node) = &kept.stage else { return None };
        let token = claim_node.token;
        let known = match kept.holding {
            true => NodeState::Holding(token),
            false => NodeState::Waiting(Place {
                ahead: kept.ahead,
                head_remaining: None,
                token: Some(token),
            }),
        };
        Some((claim_node.clone(), known))
    }

    /// Returns the remaining time of a claim of this client, for display.
    pub(super) fn remaining(&self, id: ClaimId, now: Moment) -> Option<Duration> {
        let expires = self.with(id, |kept| kept.expires)?;
        (expires != Moment::NEVER).then(|| expires.since(now))
    }

    /// Returns whether the claim must be granted immediately or not at all.
    pub(super) fn is_trying(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.trying).unwrap_or(false)
    }

    /// Stores the task that watches for the claim. If the claim was given up in the meantime, the
    /// task is aborted.
    pub(super) fn set_watch_task(&self, id: ClaimId, watch_task: WatchTask) {
        self.alive(id, |kept| kept.watch_task = Some(watch_task));
    }

    pub(super) fn is_watching(&self, id: ClaimId) -> bool {
        let is_open =
            |kept: &mut ClaimRecord| kept.watch_task.as_ref().is_some_and(WatchTask::is_open);
        self.with(id, is_open).unwrap_or(false)
    }

    /// Records a grant. `certain` is the time until which the session certainly lives.
    pub(super) fn granted(&self, id: ClaimId, certain: Moment, own_watch: Option<OwnWatch>) {
        self.alive(id, |kept| {
            kept.own_watch = own_watch;
            kept.grant(certain);
        });
    }

    pub(super) fn notify_to_poll(&self, id: ClaimId) {
        let wake = self.with(id, |kept| {
            kept.signal.get_or_insert(Signal::Ask);
            kept.wake.clone()
        });
        if let Some(wake) = wake {
            wake.notify_one();
        }
    }

    /// Waits for the next notification of a claim. Returns immediately for an unknown claim.
    pub(super) async fn news(&self, id: ClaimId) -> Signal {
        loop {
            let signal = self.with(id, |kept| {
                let signal = kept.signal;
                // A grant is reported to every call.
                if signal == Some(Signal::Ask) {
                    kept.signal = None;
                }
                (signal, kept.wake.clone())
            });
            let wake = match signal {
                None => return Signal::Ask,
                Some((Some(signal), _)) => return signal,
                Some((None, wake)) => wake,
            };
            wake.notified().await;
        }
    }

    /// Forgets a claim, and ends the task that watches for it.
    pub(super) fn remove(&self, id: ClaimId) {
        let removed = self.lock().claims.remove(&id);
        // Tasks that still wait for a notification find out that the claim is gone.
        if let Some(kept) = removed {
            kept.wake.notify_waiters();
        }
    }

    /// Gives up the claims that were not renewed in time, and returns their IDs.
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

    /// Gives up a claim that waits. Returns `false` for any other claim.
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

    /// Returns whether the claim was given up and its node may still exist.
    pub(super) fn is_given_up(&self, id: ClaimId) -> bool {
        self.with(id, |kept| kept.given_up).unwrap_or(false)
    }

    /// Waits until it is time to check for expired claims.
    pub(super) async fn something_expires(&self, now: Moment) {
        let planned = self.lock().planned;
        let pause = planned.since(now).min(Duration::from_secs(3_600));
        tokio::select! {
            () = self.sooner.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
