//! Waiting: each waiter has a task that watches what blocks it, and nothing else.
//!
//! *In a mutex, near the front*, that is everybody before it: all deletions under the lock's name, and what the
//! joining transaction has shown, tell without a reading when it holds (`etcd/front.rs`). *Farther back* it is
//! one claim some places before it, so that each release wakes few, and all are near in time.
//! Where *several hold at once*, watching one before would miss wake-ups: it may be granted and stay. There the first
//! that does not fit watches all who were before it (the deletions under the lock's name), and
//! whoever finds itself granted in that way tells the others: it writes the keys of those who now fit
//! as well, and of the one who is now the first that does not. These others watch their own keys, and
//! the one before them in case it dies before it tells them. The last of those who were told was the
//! first that did not fit; if it fits by the time that it looks, somebody has left whom nobody watched
//! just then, and so it tells others in turn. So a release wakes those who now fit and
//! one more, however many wait.
//!
//! *Nothing is lost*: a watch begins at the present, and the queue is read after it was confirmed (or it lay
//! idle and began before our place was made: then it tells all that is to be known) and, but near the front
//! of a mutex, after each thing that it tells. The reading after an event is served by the member that told
//! it, from its own memory, if that has the event in it; it shows the waiter's own key (scenario 80: a waiter
//! whose lease ended in the queue is not told that it holds). If the task is cut off, or somebody died before
//! telling, the heartbeat asks.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::ask::{Found, OPERATIONS, get, op, range, still, touch, youngest};
use super::fault::Failure;
use super::front::{Decided, Front, NEAR};
use super::leases::delay;
use super::proto::{KeyValue, Op, RangeRequest, TxnRequest};
use super::queue::{Entry, Queue, end_of, is_place};
use super::waiters::Waiter;
use super::watch::Watched;
use leasehold_core::store::Signal;
use leasehold_core::{Claim, Kind, Token};

/// The pauses after watching failed.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// What a look at the queue showed.
#[derive(Debug)]
enum Sight {
    /// We hold; where several hold at once, with the whole queue.
    Granted(Option<Queue>),
    /// Not ours any more.
    Gone,
    /// We wait for this.
    Blocked(Vec<Watched>),
    /// In a mutex: these are before us, and few.
    Near(Front),
}

/// The keys before ours in a mutex, the nearest last, as of a revision: all, or more than are [`NEAR`].
#[derive(Clone, Debug)]
pub(super) struct Ahead {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) revision: i64,
}

/// Whether it holds alone where others could hold beside it if it were lighter.
fn is_a_writer(entry: &Entry) -> bool {
    entry.kind == Kind::RwLock && entry.weight == entry.capacity && !entry.departed
}

/// The end of a wait.
enum Turn {
    Granted,
    Gone,
}

impl Shared {
    /// Has a task watch for a claim that waits, unless one does. In a mutex, the joining transaction may
    /// have shown who is before it: then the first look is one that is made already.
    pub(super) fn watch_for(self: &Arc<Self>, claim: &Claim, token: Token, ahead: Option<Ahead>) {
        let Some(waiter) = self.waiters.enlist(claim.id, token) else { return };
        let standing = self.clone().stand(claim.clone(), waiter.clone(), ahead);
        waiter.watched_by(self.client.runtime().spawn(standing).abort_handle());
    }

    async fn stand(self: Arc<Self>, claim: Claim, waiter: Arc<Waiter>, mut ahead: Option<Ahead>) {
        let mut pause = PAUSES[0];
        loop {
            match self.wait(&claim, &waiter, ahead.take()).await {
                Ok(Turn::Granted) => {
                    let token = waiter.token;
                    self.claims.holds(claim.id, token);
                    let long = self.claims.get(claim.id);
                    // A pushed grant is believed for a waiter's lease: etcd must have granted that.
                    self.claims.pushed(&claim, self.leases.now());
                    let lasts = claim.waiter_lease.saturating_add(delay(&claim));
                    let enough = long.is_some_and(|k| k.lease.granted >= lasts);
                    waiter.tell(if enough { Signal::Granted(token) } else { Signal::Ask });
                    return;
                }
                Ok(Turn::Gone) => {
                    waiter.tell(Signal::Ask);
                    return;
                }
                Err(_) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES[1]);
                }
            }
        }
    }

    /// Waits until it is our turn, or until watching fails.
    async fn wait(
        &self,
        claim: &Claim,
        waiter: &Waiter,
        ahead: Option<Ahead>,
    ) -> Result<Turn, Failure> {
        let mut sight = match ahead {
            Some(ahead) => self.behind(claim, ahead),
            None => self.look(claim, waiter.token, None).await?,
        };
        let mut told = false;
        loop {
            sight = match sight {
                Sight::Gone => return Ok(Turn::Gone),
                Sight::Granted(queue) => {
                    let last = |queue: &Queue| queue.is_last_written(&self.key(claim));
                    if let Some(queue) = queue.filter(|queue| !told || last(queue)) {
                        self.tell_others(claim, queue);
                    }
                    return Ok(Turn::Granted);
                }
                Sight::Near(front) => self.follow(claim, waiter.token, front).await?,
                Sight::Blocked(blocked) => self.watch(claim, waiter, blocked, &mut told).await?,
            };
        }
    }

    /// Near the front of a mutex: follows who leaves until that decides.
    async fn follow(
        &self,
        claim: &Claim,
        token: Token,
        mut front: Front,
    ) -> Result<Sight, Failure> {
        let departures = self.watches.departures(&self.prefix(&claim.name)).await?;
        Ok(match departures.departed(|departures| front.take_in(departures)).await? {
            Decided::First => Sight::Granted(None),
            Decided::Gone => Sight::Gone,
            Decided::Unknown => self.look(claim, token, None).await?,
        })
    }

    /// Watches what blocks the claim until something else does; `told`: the last that happened was that
    /// somebody wrote our key.
    async fn watch(
        &self,
        claim: &Claim,
        waiter: &Waiter,
        blocked: Vec<Watched>,
        told: &mut bool,
    ) -> Result<Sight, Failure> {
        // Who is before us was there when our place was made, or we had not seen them.
        let made = i64::try_from(waiter.token.get()).unwrap_or(0);
        let (watching, mut sight) = match self.watches.idle_since(&blocked, made) {
            Some(watching) => (watching, Sight::Blocked(blocked.clone())),
            None => {
                let watching = self.watches.watch(&blocked).await?;
                watching.confirmed().await?;
                (watching, self.look_again(claim, waiter.token, blocked.clone()).await?)
            }
        };
        *told = false;
        while matches!(&sight, Sight::Blocked(now) if *now == blocked) {
            let seen = tokio::select! {
                latest = watching.happened() => {
                    watching.clear();
                    let latest = latest?;
                    *told = latest.written && !latest.deleted;
                    Some(latest.revision)
                }
                () = waiter.wanted() => {
                    *told = false;
                    None
                }
            };
            sight = self.look(claim, waiter.token, seen).await?;
        }
        self.watches.put_back(&blocked, watching);
        Ok(sight)
    }

    /// Reads what blocks the claim; with `seen`, from the member that told of that revision.
    async fn look(&self, claim: &Claim, token: Token, seen: Option<i64>) -> Result<Sight, Failure> {
        let prefix = self.prefix(&claim.name);
        let end = end_of(&prefix);
        if claim.kind == Kind::Mutex {
            // Ours, and one more than are near.
            let some = i64::try_from(NEAR + 2).unwrap_or(i64::MAX);
            let some = youngest(prefix.clone(), end.clone(), token.get(), some);
            let found = self.read(some, seen).await?;
            if found.kvs.iter().all(|kv| is_place(&prefix, kv)) {
                return Ok(self.sight_of_some(claim, token, found));
            }
        }
        let found = self.read(range(prefix.clone(), end.clone()), seen).await?;
        let queue = Queue::of(&prefix, &found.kvs);
        let own = self.key(claim);
        let at = queue.position(&own);
        let Some(at) = at.filter(|at| queue.entries[*at].token == token) else {
            return Ok(Sight::Gone);
        };
        if at < queue.granted {
            return Ok(Sight::Granted((claim.kind != Kind::Mutex).then_some(queue)));
        }
        let before = at.checked_sub(1).and_then(|at| queue.entries.get(at));
        Ok(Sight::Blocked(match before {
            Some(before) if claim.kind == Kind::Mutex => {
                vec![Watched::Deletion(before.key.clone())]
            }
            Some(before) if at > queue.granted => {
                vec![Watched::Key(own), Watched::Deletion(before.key.clone())]
            }
            // Nobody leaves where a writer becomes a reader: it writes the key of who is let in.
            Some(before) if is_a_writer(before) => {
                vec![Watched::Key(own), Watched::Deletions(prefix, end)]
            }
            _ => vec![Watched::Deletions(prefix, end)],
        }))
    }

    /// What a look shows after a watch was confirmed. In a mutex, whoever is before us is still there
    /// most times, and two keys tell that; to find who is before us, etcd looks at all.
    async fn look_again(
        &self,
        claim: &Claim,
        token: Token,
        blocked: Vec<Watched>,
    ) -> Result<Sight, Failure> {
        if let (Kind::Mutex, [Watched::Deletion(before)]) = (claim.kind, &blocked[..]) {
            let only = |key: &[u8]| RangeRequest { keys_only: true, ..get(key.to_vec()) };
            let two = self.client.ranges(vec![only(&self.key(claim)), only(before)]).await?;
            let is_own = |kv: &KeyValue| u64::try_from(kv.create_revision) == Ok(token.get());
            let first = |at: usize| two.get(at).and_then(|found: &Found| found.kvs.first());
            // A place that was left and made again is behind us.
            let is_before = |kv: &KeyValue| {
                u64::try_from(kv.create_revision).is_ok_and(|made| made < token.get())
            };
            if first(0).is_some_and(is_own) && first(1).is_some_and(is_before) {
                return Ok(Sight::Blocked(blocked));
            }
        }
        self.look(claim, token, None).await
    }

    /// In a mutex: our own key, and those before it.
    fn sight_of_some(&self, claim: &Claim, token: Token, found: Found) -> Sight {
        let mut keys: Vec<_> =
            found.kvs.into_iter().map(|kv| (kv.key, kv.create_revision)).collect();
        // The youngest came first.
        keys.reverse();
        let is_ours = |(key, made): (Vec<u8>, i64)| {
            key == self.key(claim) && u64::try_from(made) == Ok(token.get())
        };
        if !keys.pop().is_some_and(is_ours) {
            return Sight::Gone;
        }
        let keys = keys.into_iter().map(|(key, _)| key).collect();
        self.behind(claim, Ahead { keys, revision: found.revision })
    }

    /// In a mutex: who is before us is in the way, and nobody else.
    fn behind(&self, claim: &Claim, Ahead { keys, revision }: Ahead) -> Sight {
        let near = keys.len() <= NEAR;
        let nearest = if near { 1 } else { NEAR / 2 };
        let Some(before) = keys.len().checked_sub(nearest).and_then(|at| keys.get(at)).cloned()
        else {
            return Sight::Granted(None);
        };
        self.claims.note(claim.id, |known| known.behind = Some((before.clone(), known.ahead)));
        match near {
            true => Sight::Near(Front::new(self.key(claim), keys, revision)),
            false => Sight::Blocked(vec![Watched::Deletion(before)]),
        }
    }

    /// A reading that has in it what was seen.
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

    /// Wakes those behind us who hold now, and the first who does not.
    pub(super) fn tell_others(&self, claim: &Claim, queue: Queue) {
        let Some(at) = queue.position(&self.key(claim)) else { return };
        let told = queue.entries.iter().take(queue.granted + 1).skip(at + 1);
        let told: Vec<TxnRequest> = told
            .filter(|entry| !entry.departed)
            .map(|entry| TxnRequest {
                compare: vec![still(entry.key.clone(), entry.token.get())],
                success: vec![touch(entry.key.clone())],
                failure: Vec::new(),
            })
            .collect();
        let client = self.client.clone();
        // Whatever becomes of us. If it fails, their heartbeats ask.
        self.client.runtime().spawn(async move {
            for some in told.chunks(OPERATIONS) {
                let success = some.iter().map(|t| op(Op::Txn(t.clone()))).collect();
                let txn = TxnRequest { compare: Vec::new(), success, failure: Vec::new() };
                if client.txn(txn).await.is_err() {
                    return;
                }
            }
        });
    }
}
