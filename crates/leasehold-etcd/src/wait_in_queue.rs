//! Waiting: each waiter has a task that watches only what blocks it.
//!
//! **Near the front of a mutex**, all claims ahead block it. The deletions under the lock's name
//! and the result of the joining transaction show when it is granted, without another read
//! (`etcd/predecessors.rs`). **Farther back**, a waiter watches one claim several positions ahead.
//! So each release wakes few waiters, and all of them are near the front in time.
//!
//! **Shared locks.** Watching one claim ahead would miss notifications, because that claim may be
//! granted and stay. So the first waiter that does not fit watches all deletions under the lock's
//! name. When it is granted, it notifies others by writing their keys: the claims that now fit, and
//! the next claim that does not. All other waiters watch their own key, and the claim ahead of them
//! in case it crashes before it notifies them. The last claim that was notified was the first that
//! did not fit. If it does fit when it polls, a claim has left that no waiter was watching, so it
//! notifies others in turn. A release thus wakes the claims that now fit and one more, however long
//! the queue is.
//!
//! **No notification is lost.** A watch begins at the current revision, and the client reads the
//! queue after the watch is confirmed. (An idle watch that began before the claim's entry was
//! created already has all events.) Except near the front of a mutex, the client also reads the
//! queue after each event. The member that sent the event serves that read from its own memory, if
//! it has applied the event. The read also shows the waiter's own key, so a waiter whose lease has
//! expired is not reported as granted (scenario 80). If the task fails or another client crashes
//! before it notifies, the next heartbeat polls.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::fault::Failure;
use super::leases::delay;
use super::predecessors::{NEAR, PredecessorState, Predecessors};
use super::proto::{KeyValue, Op, RangeRequest, TxnRequest};
use super::queue::{Entry, Queue, end_of, is_place};
use super::requests::{Found, OPERATIONS, get, op, range, still, touch, youngest};
use super::waiters::Waiter;
use super::watch::Watched;
use leasehold_core::store::Signal;
use leasehold_core::{Claim, Kind, Token};

/// The first and the longest pause after a failed watch.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// The result of a read of the queue.
#[derive(Debug)]
enum QueueState {
    /// The claim is granted. For a shared lock, with the whole queue.
    Granted(Option<Queue>),
    /// The claim has lost its entry.
    Gone,
    /// The claim waits for one of these events.
    Blocked(Vec<Watched>),
    /// In a mutex: few claims are ahead, and these are all of them.
    Near(Predecessors),
}

/// The keys ahead in a mutex, the nearest last, as of a revision. The list is complete or has more
/// than [`NEAR`] keys.
#[derive(Clone, Debug)]
pub(super) struct Ahead {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) revision: i64,
}

/// Returns whether the claim is a writer. It is granted alone, but would make room if it became a
/// reader.
fn is_a_writer(entry: &Entry) -> bool {
    entry.kind == Kind::RwLock && entry.weight == entry.capacity && !entry.departed
}

/// The end of a wait.
enum WaitEnd {
    Granted,
    Gone,
}

impl Shared {
    /// Starts a task that watches for a waiting claim, unless there is one. In a mutex, the joining
    /// transaction may have returned the keys ahead, which replace the first read.
    pub(super) fn watch_for(self: &Arc<Self>, claim: &Claim, token: Token, ahead: Option<Ahead>) {
        let Some(waiter) = self.waiters.enlist(claim.id, token) else { return };
        let waiting = self.clone().wait_in_queue(claim.clone(), waiter.clone(), ahead);
        waiter.watched_by(self.client.runtime().spawn(waiting).abort_handle());
    }

    async fn wait_in_queue(
        self: Arc<Self>,
        claim: Claim,
        waiter: Arc<Waiter>,
        mut ahead: Option<Ahead>,
    ) {
        let mut pause = PAUSES[0];
        loop {
            match self.wait(&claim, &waiter, ahead.take()).await {
                Ok(WaitEnd::Granted) => {
                    let token = waiter.token;
                    self.claims.holds(claim.id, token);
                    let long = self.claims.get(claim.id);
                    // A pushed grant counts as valid for a waiter lease, so etcd must have granted
                    // at least that time.
                    self.claims.pushed(&claim, self.leases.now());
                    let lasts = claim.waiter_lease.saturating_add(delay(&claim));
                    let enough = long.is_some_and(|k| k.lease.granted >= lasts);
                    waiter.notify(if enough { Signal::Granted(token) } else { Signal::Ask });
                    return;
                }
                Ok(WaitEnd::Gone) => {
                    waiter.notify(Signal::Ask);
                    return;
                }
                Err(_) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES[1]);
                }
            }
        }
    }

    /// Waits until the claim is granted or gone, or until watching fails.
    async fn wait(
        &self,
        claim: &Claim,
        waiter: &Waiter,
        ahead: Option<Ahead>,
    ) -> Result<WaitEnd, Failure> {
        let mut state = match ahead {
            Some(ahead) => self.state_behind(claim, ahead),
            None => self.read_state(claim, waiter.token, None).await?,
        };
        let mut notified = false;
        loop {
            state = match state {
                QueueState::Gone => return Ok(WaitEnd::Gone),
                QueueState::Granted(queue) => {
                    let last = |queue: &Queue| queue.is_last_written(&self.key(claim));
                    if let Some(queue) = queue.filter(|queue| !notified || last(queue)) {
                        self.notify_others(claim, queue);
                    }
                    return Ok(WaitEnd::Granted);
                }
                QueueState::Near(predecessors) => {
                    self.follow(claim, waiter.token, predecessors).await?
                }
                QueueState::Blocked(blocked) => {
                    self.watch(claim, waiter, blocked, &mut notified).await?
                }
            };
        }
    }

    /// Follows the deletions, near the front of a mutex, until they decide the claim's state.
    async fn follow(
        &self,
        claim: &Claim,
        token: Token,
        mut predecessors: Predecessors,
    ) -> Result<QueueState, Failure> {
        let watching = self.watches.watch_deletions(&self.prefix(&claim.name)).await?;
        Ok(match watching.until_deletions(|deletions| predecessors.apply(deletions)).await? {
            PredecessorState::NoneAhead => QueueState::Granted(None),
            PredecessorState::OwnDeleted => QueueState::Gone,
            PredecessorState::Unknown => self.read_state(claim, token, None).await?,
        })
    }

    /// Watches what blocks the claim until something else blocks it or nothing does. `notified` is
    /// set if the last event was that another client wrote the claim's key.
    async fn watch(
        &self,
        claim: &Claim,
        waiter: &Waiter,
        blocked: Vec<Watched>,
        notified: &mut bool,
    ) -> Result<QueueState, Failure> {
        // All claims ahead existed when this entry was created, so an idle watch from before then
        // has all events.
        let made = i64::try_from(waiter.token.get()).unwrap_or(0);
        let (watching, mut state) = match self.watches.idle_since(&blocked, made) {
            Some(watching) => (watching, QueueState::Blocked(blocked.clone())),
            None => {
                let watching = self.watches.watch(&blocked).await?;
                watching.confirmed().await?;
                (watching, self.reread_state(claim, waiter.token, blocked.clone()).await?)
            }
        };
        *notified = false;
        while matches!(&state, QueueState::Blocked(now) if *now == blocked) {
            let seen = tokio::select! {
                latest = watching.event() => {
                    watching.clear();
                    let latest = latest?;
                    *notified = latest.written && !latest.deleted;
                    Some(latest.revision)
                }
                () = waiter.reread_requested() => {
                    *notified = false;
                    None
                }
            };
            state = self.read_state(claim, waiter.token, seen).await?;
        }
        self.watches.put_back(&blocked, watching);
        Ok(state)
    }

    /// Reads what blocks the claim. With `seen`, the read may be served by the member that reported
    /// that revision.
    async fn read_state(
        &self,
        claim: &Claim,
        token: Token,
        seen: Option<i64>,
    ) -> Result<QueueState, Failure> {
        let prefix = self.prefix(&claim.name);
        let end = end_of(&prefix);
        if claim.kind == Kind::Mutex {
            // The claim's own key, and one key more than count as near.
            let some = i64::try_from(NEAR + 2).unwrap_or(i64::MAX);
            let some = youngest(prefix.clone(), end.clone(), token.get(), some);
            let found = self.read(some, seen).await?;
            if found.kvs.iter().all(|kv| is_place(&prefix, kv)) {
                return Ok(self.state_of_some(claim, token, found));
            }
        }
        let found = self.read(range(prefix.clone(), end.clone()), seen).await?;
        let queue = Queue::of(&prefix, &found.kvs);
        let own = self.key(claim);
        let at = queue.position(&own);
        let Some(at) = at.filter(|at| queue.entries[*at].token == token) else {
            return Ok(QueueState::Gone);
        };
        if at < queue.granted {
            return Ok(QueueState::Granted((claim.kind != Kind::Mutex).then_some(queue)));
        }
        let before = at.checked_sub(1).and_then(|at| queue.entries.get(at));
        Ok(QueueState::Blocked(match before {
            Some(before) if claim.kind == Kind::Mutex => {
                vec![Watched::Deletion(before.key.clone())]
            }
            Some(before) if at > queue.granted => {
                vec![Watched::Key(own), Watched::Deletion(before.key.clone())]
            }
            // A downgrade deletes no key. It writes the keys of the claims that are granted, so the
            // waiter watches its own key too.
            Some(before) if is_a_writer(before) => {
                vec![Watched::Key(own), Watched::Deletions(prefix, end)]
            }
            _ => vec![Watched::Deletions(prefix, end)],
        }))
    }

    /// Reads the queue after a watch was confirmed. In a mutex, the claim ahead is usually still
    /// there, which a read of two keys shows. To find the claims ahead, etcd would scan all keys.
    async fn reread_state(
        &self,
        claim: &Claim,
        token: Token,
        blocked: Vec<Watched>,
    ) -> Result<QueueState, Failure> {
        if let (Kind::Mutex, [Watched::Deletion(before)]) = (claim.kind, &blocked[..]) {
            let only = |key: &[u8]| RangeRequest { keys_only: true, ..get(key.to_vec()) };
            let two = self.client.ranges(vec![only(&self.key(claim)), only(before)]).await?;
            let is_own = |kv: &KeyValue| u64::try_from(kv.create_revision) == Ok(token.get());
            let first = |at: usize| two.get(at).and_then(|found: &Found| found.kvs.first());
            // An entry that was deleted and created again comes after this one.
            let is_before = |kv: &KeyValue| {
                u64::try_from(kv.create_revision).is_ok_and(|made| made < token.get())
            };
            if first(0).is_some_and(is_own) && first(1).is_some_and(is_before) {
                return Ok(QueueState::Blocked(blocked));
            }
        }
        self.read_state(claim, token, None).await
    }

    /// Evaluates a read of the claim's own key and the keys ahead of it, in a mutex.
    fn state_of_some(&self, claim: &Claim, token: Token, found: Found) -> QueueState {
        let mut keys: Vec<_> =
            found.kvs.into_iter().map(|kv| (kv.key, kv.create_revision)).collect();
        // The youngest came first.
        keys.reverse();
        let is_ours = |(key, made): (Vec<u8>, i64)| {
            key == self.key(claim) && u64::try_from(made) == Ok(token.get())
        };
        if !keys.pop().is_some_and(is_ours) {
            return QueueState::Gone;
        }
        let keys = keys.into_iter().map(|(key, _)| key).collect();
        self.state_behind(claim, Ahead { keys, revision: found.revision })
    }

    /// Returns what blocks a claim for a mutex. Only the claims ahead do.
    fn state_behind(&self, claim: &Claim, Ahead { keys, revision }: Ahead) -> QueueState {
        let near = keys.len() <= NEAR;
        let nearest = if near { 1 } else { NEAR / 2 };
        let Some(before) = keys.len().checked_sub(nearest).and_then(|at| keys.get(at)).cloned()
        else {
            return QueueState::Granted(None);
        };
        self.claims.note(claim.id, |known| known.behind = Some((before.clone(), known.ahead)));
        match near {
            true => QueueState::Near(Predecessors::new(self.key(claim), keys, revision)),
            false => QueueState::Blocked(vec![Watched::Deletion(before)]),
        }
    }

    /// Reads a range as of the revision `seen` or later.
    async fn read(&self, wanted: RangeRequest, seen: Option<i64>) -> Result<Found, Failure> {
        if let Some(seen) = seen {
            let nearby = RangeRequest { serializable: true, ..wanted.clone() };
            let found = self.client.range(nearby).await?;
            if found.revision >= seen {
                return Ok(found);
            }
        }
        self.client.range(wanted).await
    }

    /// Notifies the claims after this one that are now granted, and the first one that is not.
    pub(super) fn notify_others(&self, claim: &Claim, queue: Queue) {
        let Some(at) = queue.position(&self.key(claim)) else { return };
        let notified = queue.entries.iter().take(queue.granted + 1).skip(at + 1);
        let writes: Vec<TxnRequest> = notified
            .filter(|entry| !entry.departed)
            .map(|entry| TxnRequest {
                compare: vec![still(entry.key.clone(), entry.token.get())],
                success: vec![touch(entry.key.clone())],
                failure: Vec::new(),
            })
            .collect();
        let client = self.client.clone();
        // The task runs even if this one ends. If it fails, the other claims are granted at their
        // next heartbeats.
        self.client.runtime().spawn(async move {
            for some in writes.chunks(OPERATIONS) {
                let success = some.iter().map(|t| op(Op::Txn(t.clone()))).collect();
                let txn = TxnRequest { compare: Vec::new(), success, failure: Vec::new() };
                if client.txn(txn).await.is_err() {
                    return;
                }
            }
        });
    }
}
