//! Joining: one transaction.
//!
//! One who tries makes its key if nobody is there. One who waits makes it also if all that are there are
//! claims for the same kind of lock, and sees in the same transaction who they are. That one is large (the
//! value stands in it twice), so where the lock was free the last time
//! ([`Contended`](super::contended::Contended)) it is sent only after the small one found that others are
//! there: each is atomic, and what the first found decides nothing. Order in the queue is the order of create
//! revisions, which is etcd's own order of transactions; the revision is the token.
//!
//! One who tries at a lock that is shared, and everybody where keys lie in the lock's range that are
//! not its own (those of a lock `a/b` in that of `a`), reads the queue and then joins under the
//! condition that nothing has been made there since: what was decided about the queue is still true
//! then, since leaving only makes room.
//!
//! One who tries where the lock was taken the last time, or for whom there is no lease yet, reads first: in
//! vain, it has written nothing, not even to etcd's log. What it read is a condition of what it
//! then writes, as above.
//!
//! A repeated `join` finds its key, and keeps the lease alive that the key hangs on.

use super::Shared;
use super::ask::{
    absent, get, none_since, oldest, op, out_of_step, put, range, ranged, revision_of,
};
use super::claims::Remains;
use super::fault::{Failure, unreachable};
use super::leases::{Lease, delay, seconds};
use super::proto::{
    Done, KeyValue, Op, RangeRequest, RequestOp, ResponseOp, TxnRequest, TxnResponse,
};
use super::queue::{Queue, agree, end_of, is_departed, value};
use super::stand::Ahead;
use leasehold_core::store::{Joined, Mode, Place, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Kind, Moment, Token};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

/// How many of the front a joining transaction shows.
const FRONT: i64 = 16;
/// How many it shows where they are keys only.
const KEYS: i64 = 64;
/// How often others may get in the way of one who joins slowly.
const TRIES: u32 = 100;
/// How often a lease may end before anything hangs on it.
const LEASES: u32 = 3;

/// What a transaction of ours showed.
struct Shown {
    /// It made our key just now.
    made: bool,
    own: Option<KeyValue>,
    front: Queue,
    /// How many keys there are.
    count: usize,
    /// Whether the front is all of it.
    complete: bool,
    /// At which revision.
    revision: i64,
}

/// A whole queue, as it was at a revision.
struct Seen {
    queue: Queue,
    revision: i64,
}

/// A claim as it is sent.
struct Going<'a> {
    claim: &'a Claim,
    mode: Mode,
    key: Vec<u8>,
    prefix: Vec<u8>,
    lease: Lease,
    /// When the call began.
    called: Moment,
    /// When we began that gave it its lease, or kept it.
    begun: Moment,
}

impl Going<'_> {
    /// Makes the claim's key if nobody is there; else does this.
    fn if_free(&self, failure: Vec<RequestOp>) -> TxnRequest {
        let compare = vec![absent(self.prefix.clone(), self.end())];
        TxnRequest { compare, success: vec![self.put()], failure }
    }

    fn own_and_front(&self) -> Vec<RequestOp> {
        let own = op(Op::Range(get(self.key.clone())));
        let front = op(Op::Range(oldest(self.prefix.clone(), self.end(), FRONT)));
        vec![own, front]
    }

    /// Makes the claim's key if nobody is there, else as [`behind_others`](Self::behind_others). In this
    /// order a free lock costs etcd one look at the lock's keys: among them are those that were deleted
    /// since it last compacted.
    fn if_free_or_behind_others(&self) -> TxnRequest {
        self.if_free(vec![op(Op::Txn(self.behind_others()))])
    }

    /// Makes the claim's key if others are there and all agree what the lock is; else shows its own key
    /// and the oldest. (Where nobody is, etcd takes no value for agreeing.) To find the
    /// oldest, etcd looks at all: one who has made its key sees some of the queue, which is all of it
    /// where few are.
    fn behind_others(&self) -> TxnRequest {
        let mut compare = vec![absent(self.key.clone(), Vec::new())];
        compare.extend(agree(self.claim, &self.prefix));
        // In a mutex all weigh the same, and values say nothing more.
        let keys_only = self.claim.capacity == 1;
        let some = range(self.prefix.clone(), self.end());
        let limit = if keys_only { KEYS } else { FRONT };
        let some = op(Op::Range(RangeRequest { limit, keys_only, ..some }));
        TxnRequest { compare, success: vec![self.put(), some], failure: self.own_and_front() }
    }

    fn put(&self) -> RequestOp {
        put(self.key.clone(), value(self.claim, false), self.lease.id)
    }

    /// Our key, as it was made at this revision.
    fn made(&self, revision: i64) -> KeyValue {
        KeyValue {
            key: self.key.clone(),
            create_revision: revision,
            mod_revision: revision,
            value: Vec::new(),
            lease: self.lease.id,
        }
    }

    fn end(&self) -> Vec<u8> {
        end_of(&self.prefix)
    }

    /// How long the lease lasts without the lock-delay.
    fn left(&self) -> Duration {
        self.lease.ends.minus(delay(self.claim)).since(self.begun).min(self.claim.lease)
    }
}

impl Shared {
    /// [`Store::join`](leasehold_core::store::Store::join).
    pub(super) async fn join(
        self: &Arc<Self>,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Joined, Failure> {
        let called = self.leases.now();
        if self.claims.is_in_delay(claim, called) {
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let _turn = self.turns.turn(&claim.name).await;
        let mut tries = 0;
        loop {
            tries += 1;
            let joined = self.join_once(claim, mode, called).await;
            match joined {
                Ok(Joined::Holding { .. } | Joined::Waiting(_)) => {
                    if claim.lock_delay.is_zero() {
                        self.leases.keep_ready(seconds(claim.lease));
                    }
                    return joined;
                }
                // Ended while it lay idle, or taken away by a person: nothing was done.
                Err(Failure::NoLease) if tries < LEASES => {
                    self.claims.forget(claim.id);
                }
                Ok(Joined::Busy { .. }) => {
                    self.clear(claim);
                    return joined;
                }
                Err(Failure::Final(ref error)) if error.kind() == ErrorKind::Mismatch => {
                    self.clear(claim);
                    return joined;
                }
                // Perhaps it has a place: with its lease, that ends.
                Err(Failure::Final(_) | Failure::Token(_)) => {
                    self.abandon(claim);
                    return joined;
                }
                joined => return joined,
            }
        }
    }

    fn holding(&self, going: &Going<'_>, token: Token) -> Joined {
        let left = going.left();
        self.claims.holds(going.claim.id, token);
        self.claims.holds_for(going.claim, going.called, left);
        Joined::Holding { token, remaining: Some(left) }
    }

    /// Forgets a claim that has no place.
    pub(super) fn clear(&self, claim: &Claim) {
        self.waiters.dismiss(claim.id);
        match self.claims.forget(claim.id) {
            Some(Remains { lease, clean: true }) => self.leases.put_back(lease),
            Some(Remains { lease, clean: false }) => self.leases.revoke_later(lease.id),
            None => {}
        }
    }

    /// Forgets a claim and ends its lease, and with it whatever place it may have.
    pub(super) fn abandon(&self, claim: &Claim) {
        self.waiters.dismiss(claim.id);
        if let Some(remains) = self.claims.forget(claim.id) {
            self.leases.revoke_later(remains.lease.id);
        }
    }

    async fn join_once(
        self: &Arc<Self>,
        claim: &Claim,
        mode: Mode,
        called: Moment,
    ) -> Result<Joined, Failure> {
        let seen = match mode {
            Mode::Try if self.looks_first(claim) => match self.look_before_trying(claim).await? {
                ControlFlow::Break(busy) => return Ok(busy),
                ControlFlow::Continue(seen) => Some(seen),
            },
            _ => None,
        };
        let lease = self.lease_of(claim).await?;
        let begun = self.leases.now();
        let (key, prefix) = (self.key_on(&claim.name, lease.id), self.prefix(&claim.name));
        let going = Going { claim, mode, key, prefix, lease, called, begun };
        match (mode, seen) {
            (Mode::Try, Some(seen)) => self.join_slowly(going, seen).await,
            (Mode::Try, None) => self.try_once(going).await,
            (Mode::Wait, _) => self.wait_once(going).await,
        }
    }

    /// Whether one who tries reads first: what is likely to be in vain shall write nothing, not even a
    /// lease.
    fn looks_first(&self, claim: &Claim) -> bool {
        let has_lease = claim.lock_delay.is_zero() && self.leases.has(seconds(claim.lease));
        self.claims.get(claim.id).is_none() && (!has_lease || self.contended.was(&claim.name))
    }

    /// What one who tries sees of the lock before it has a lease; breaks where it is in vain.
    async fn look_before_trying(
        &self,
        claim: &Claim,
    ) -> Result<ControlFlow<Joined, Option<Seen>>, Failure> {
        let prefix = self.prefix(&claim.name);
        let found = self.client.range(oldest(prefix.clone(), end_of(&prefix), FRONT)).await?;
        let complete = found.kvs.len() == found.count;
        let seen = Seen { queue: Queue::of(&prefix, &found.kvs), revision: found.revision };
        self.contended.note(&claim.name, !found.kvs.is_empty());
        Ok(match in_vain(claim, &seen.queue, complete)? {
            Some(busy) => ControlFlow::Break(busy),
            None => ControlFlow::Continue(complete.then_some(seen)),
        })
    }

    /// One transaction of one who tries.
    async fn try_once(self: &Arc<Self>, mut going: Going<'_>) -> Result<Joined, Failure> {
        let claim = going.claim;
        let answer = self.send_place(claim, going.if_free(going.own_and_front())).await?;
        let revision = revision_of(&answer);
        self.contended.note(&claim.name, !answer.succeeded);
        if answer.succeeded {
            return Ok(self.holding(&going, token_of(revision)?));
        }
        let shown = shown(&going, false, revision, answer.responses)?;
        if shown.own.is_some() {
            return self.standing(&mut going, shown).await;
        }
        match in_vain(claim, &shown.front, shown.complete)? {
            Some(busy) => Ok(busy),
            None => {
                let seen = Seen { queue: shown.front, revision };
                self.join_slowly(going, shown.complete.then_some(seen)).await
            }
        }
    }

    /// One transaction of one who waits; two, where the lock is taken that was free the last time.
    async fn wait_once(self: &Arc<Self>, mut going: Going<'_>) -> Result<Joined, Failure> {
        let name = &going.claim.name;
        let mut all = self.contended.was(name);
        let answer = loop {
            let txn =
                if all { going.if_free_or_behind_others() } else { going.if_free(Vec::new()) };
            let answer = self.send_place(going.claim, txn).await?;
            self.contended.note(name, !answer.succeeded);
            if answer.succeeded {
                return Ok(self.holding(&going, token_of(revision_of(&answer))?));
            }
            if std::mem::replace(&mut all, true) {
                break answer;
            }
        };
        let revision = revision_of(&answer);
        let nested = nested(answer)?;
        let shown = shown(&going, nested.succeeded, revision, nested.responses)?;
        match shown.own {
            Some(_) => self.standing(&mut going, shown).await,
            None => self.join_slowly(going, None).await,
        }
    }

    /// Sends what makes a place.
    async fn send_place(&self, claim: &Claim, txn: TxnRequest) -> Result<TxnResponse, Failure> {
        let asked = self.claims.ask(claim.id);
        match self.client.txn(txn).await {
            Ok(answered) => {
                if !answered.repeated {
                    asked.answered();
                }
                Ok(answered.answer)
            }
            Err(failure @ (Failure::NoLease | Failure::Final(_) | Failure::Token(_))) => {
                asked.answered();
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// The claim's lease, or a fresh one for it.
    async fn lease_of(&self, claim: &Claim) -> Result<Lease, Failure> {
        if let Some(known) = self.claims.get(claim.id) {
            return Ok(known.lease);
        }
        let asked = seconds(claim.lease.saturating_add(delay(claim)));
        // Of one that has lain idle, the lock-delay may be all that is left.
        let lease = match claim.lock_delay.is_zero() {
            true => self.leases.get(asked).await?,
            false => self.leases.grant(asked).await?,
        };
        let its = self.claims.enter(claim.id, lease, self.leases.now());
        if its.id != lease.id {
            // A duplicate of this call was faster.
            self.leases.put_back(lease);
        }
        Ok(its)
    }

    /// What a claim is told whose key is there.
    async fn standing(
        self: &Arc<Self>,
        going: &mut Going<'_>,
        shown: Shown,
    ) -> Result<Joined, Failure> {
        let Some(own) = &shown.own else { return Err(out_of_step()) };
        let token = token_of(own.create_revision)?;
        let claim = going.claim;
        if is_departed(own) {
            // Its key stays, so no other claim may have its lease.
            self.abandon(claim);
            return Ok(Joined::Busy { holders: shown.front.holders() });
        }
        // At once: whoever leaves ends this place, and no later one on the same lease.
        self.claims.note(claim.id, |known| known.token = Some(token));
        if !shown.made {
            self.beat(going, own.lease).await?;
        }
        // Of a long queue for a mutex, it is enough to know that others came before and how many.
        let others = shown.front.entries.iter().any(|e| e.key != going.key);
        let far = shown.made && claim.capacity == 1 && others;
        let (queue, at, revision) = match (shown.front.position(&going.key), shown.complete, far) {
            (Some(at), true, _) => (shown.front, at, shown.revision),
            (_, false, true) => (Queue::default(), shown.count.saturating_sub(1), shown.revision),
            _ => {
                let found = self.client.range(range(going.prefix.clone(), going.end())).await?;
                let queue = Queue::of(&going.prefix, &found.kvs);
                match queue.position(&going.key) {
                    Some(at) => (queue, at, found.revision),
                    None => return Err(gone()),
                }
            }
        };
        if at < queue.granted {
            return Ok(self.holding(going, token));
        }
        // Nobody may believe in a pushed grant for longer than the lease lasts.
        if going.left() < claim.waiter_lease {
            self.beat(going, own.lease).await?;
        }
        self.claims.note(claim.id, |known| {
            // A place that it had before, and that was taken away, says nothing of this one.
            (known.holds, known.behind, known.ahead) = (false, None, at);
        });
        self.claims.holds_for(claim, going.called, claim.waiter_lease);
        let before = queue.entries.get(..at).filter(|_| claim.kind == Kind::Mutex && !queue.mixed);
        let ahead = before.map(|before| {
            let keys = before.iter().map(|entry| entry.key.clone()).collect();
            Ahead { keys, revision }
        });
        self.watch_for(claim, token, ahead);
        Ok(Joined::Waiting(Place { ahead: at, head_remaining: None, token: Some(token) }))
    }

    /// Keeps the lease alive that the claim's key hangs on.
    async fn beat(&self, going: &mut Going<'_>, lease: i64) -> Result<(), Failure> {
        let Some(alive) = self.keep_alives.ask(lease).await? else { return Err(gone()) };
        going.begun = alive.from;
        going.lease =
            Lease { id: lease, granted: alive.granted, ends: alive.ends(), ..going.lease };
        let its = going.lease;
        self.claims.note(going.claim.id, |known| known.lease = its);
        Ok(())
    }

    /// Reads, decides, and joins if nobody came since. What was seen before may serve as the first reading.
    async fn join_slowly(
        self: &Arc<Self>,
        mut going: Going<'_>,
        mut seen: Option<Seen>,
    ) -> Result<Joined, Failure> {
        let claim = going.claim;
        for _ in 0..TRIES {
            let Seen { queue: front, revision } = match seen.take() {
                Some(seen) => seen,
                None => {
                    let found = self.client.range(range(going.prefix.clone(), going.end())).await?;
                    let queue = Queue::of(&going.prefix, &found.kvs);
                    let revision = found.revision;
                    if let Some(own) = found.kvs.iter().find(|kv| kv.key == going.key).cloned() {
                        let (own, count) = (Some(own), found.count);
                        let (made, complete, front) = (false, true, queue);
                        let shown = Shown { made, own, front, count, complete, revision };
                        return self.standing(&mut going, shown).await;
                    }
                    Seen { queue, revision }
                }
            };
            // Of all, not of the first alone: one who waits with another client comes next.
            if let Some((kind, capacity)) = front.disagrees(claim) {
                return Err(Failure::Final(mismatch(claim, kind, capacity)));
            }
            let fits = front.fits(claim);
            if !fits && going.mode == Mode::Try {
                return Ok(Joined::Busy { holders: front.holders() });
            }
            going.begun = self.leases.now();
            let txn = TxnRequest {
                compare: vec![none_since(going.prefix.clone(), going.end(), revision)],
                success: vec![going.put()],
                failure: Vec::new(),
            };
            let answer = self.send_place(claim, txn).await?;
            if !answer.succeeded {
                continue;
            }
            let revision = revision_of(&answer);
            let token = token_of(revision)?;
            if fits {
                return Ok(self.holding(&going, token));
            }
            let own = going.made(revision);
            // It is read anew where it stands: who was there may have left.
            let (own, front, count) = (Some(own), Queue::default(), 0);
            let shown = Shown { made: true, own, front, count, complete: false, revision };
            return self.standing(&mut going, shown).await;
        }
        let what = "other clients kept joining the queue during the operation";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what).with_hint("retry")))
    }
}

/// The key was there a moment ago, and its lease has ended.
fn gone() -> Failure {
    Failure::Passing(unreachable("the claim's lease has just expired".into()))
}

/// What one is told who tries in vain, where this front of the queue tells as much.
fn in_vain(claim: &Claim, front: &Queue, complete: bool) -> Result<Option<Joined>, Failure> {
    if let Some((kind, capacity)) = front.disagrees(claim) {
        return Err(Failure::Final(mismatch(claim, kind, capacity)));
    }
    // Where several hold at once, another client may stand behind all that are seen, and disagree.
    let enough = complete || claim.kind == Kind::Mutex;
    Ok((enough && !front.fits(claim)).then(|| Joined::Busy { holders: front.holders() }))
}

fn token_of(revision: i64) -> Result<Token, Failure> {
    u64::try_from(revision).ok().and_then(Token::new).ok_or_else(out_of_step)
}

fn nested(answer: TxnResponse) -> Result<TxnResponse, Failure> {
    match answer.responses.into_iter().next().and_then(|r| r.done) {
        Some(Done::Txn(nested)) => Ok(nested),
        _ => Err(out_of_step()),
    }
}

/// What came back where the queue was not empty; `made`: our key was made just now.
fn shown(
    going: &Going<'_>,
    made: bool,
    revision: i64,
    responses: Vec<ResponseOp>,
) -> Result<Shown, Failure> {
    let mut responses = responses.into_iter();
    let first = responses.next();
    let own = match made {
        // The answer to the put says nothing more.
        true => Some(going.made(revision)),
        false => ranged(first)?.kvs.into_iter().next(),
    };
    let some = ranged(responses.next())?;
    let front = Queue::of(&going.prefix, &some.kvs);
    let complete = some.kvs.len() == some.count;
    Ok(Shown { made, own, front, count: some.count, complete, revision })
}
