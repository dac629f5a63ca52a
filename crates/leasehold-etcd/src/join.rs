//! Adds a claim to the queue of its lock, with one transaction.
//!
//! **The transaction.** A try creates the claim's key if the queue is empty. A claim that may wait
//! also creates it if all claims in the queue agree about the kind of lock, and reads these claims
//! in the same transaction. That transaction is large, because it contains the value twice. If the
//! lock was free the last time ([`ContentionHints`](super::contention_hints::ContentionHints)), a
//! small transaction is sent first, and the large one only if the small one found other claims.
//! Each is atomic, and the large one does not rely on the result of the small one. The order of the
//! queue is the order of create revisions, which is etcd's own order of transactions. The revision
//! is the token.
//!
//! **Reading first.** The client reads the queue first for tries at a shared lock, and for ranges
//! that contain keys of other locks. (The keys of a lock `a/b` lie in the range of `a`.) It then
//! joins under the condition that no key has been created in the range since the read. Its decision
//! is then still valid, because claims that leave only make room.
//!
//! A try also reads first if the lock was taken the last time, or if the client has no idle lease
//! for it. If the try is unsuccessful, it has written nothing, not even to etcd's log. If it is
//! successful, its write is conditional on the read, as above.
//!
//! **Repeated calls.** A repeated `join` finds its key, and renews the lease that the key is
//! attached to.

use super::Shared;
use super::claims::EndedClaim;
use super::fault::{Failure, unreachable};
use super::leases::{Lease, delay, seconds};
use super::proto::{
    Done, KeyValue, Op, RangeRequest, RequestOp, ResponseOp, TxnRequest, TxnResponse,
};
use super::queue::{Queue, agree, end_of, is_departed, value};
use super::requests::{
    absent, get, none_since, oldest, op, out_of_step, put, range, ranged, revision_of,
};
use super::wait_in_queue::Ahead;
use leasehold_core::store::{Joined, Mode, Place, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Kind, Moment, Token};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of entries that a joining transaction returns.
const FRONT: i64 = 16;
/// The same limit if the transaction returns only keys.
const KEYS: i64 = 64;
/// How often a join that reads first is retried if other clients change the queue.
const TRIES: u32 = 100;
/// How often a join is retried because its lease expired before a key was attached to it.
const LEASES: u32 = 3;

/// The result of a joining transaction.
struct Shown {
    /// Whether this transaction created the claim's key.
    made: bool,
    own: Option<KeyValue>,
    front: Queue,
    /// The number of keys in the range.
    count: usize,
    /// Whether `front` is the whole queue.
    complete: bool,
    /// The revision of the transaction.
    revision: i64,
}

/// A whole queue, as of a revision.
struct Seen {
    queue: Queue,
    revision: i64,
}

/// A claim that is joining, and the call that adds it.
struct Going<'a> {
    claim: &'a Claim,
    mode: Mode,
    key: Vec<u8>,
    prefix: Vec<u8>,
    lease: Lease,
    /// When the call began.
    called: Moment,
    /// When the request that granted or renewed the lease was sent.
    begun: Moment,
}

impl Going<'_> {
    /// Returns a transaction that creates the claim's key if the queue is empty, and executes
    /// `failure` otherwise.
    fn if_free(&self, failure: Vec<RequestOp>) -> TxnRequest {
        let compare = vec![absent(self.prefix.clone(), self.end())];
        TxnRequest { compare, success: vec![self.put()], failure }
    }

    fn own_and_front(&self) -> Vec<RequestOp> {
        let own = op(Op::Range(get(self.key.clone())));
        let front = op(Op::Range(oldest(self.prefix.clone(), self.end(), FRONT)));
        vec![own, front]
    }

    /// Returns a transaction that creates the claim's key if the queue is empty, and otherwise
    /// continues as [`behind_others`](Self::behind_others). In this order, a free lock costs etcd
    /// only one scan of the lock's keys. That scan includes the keys that were deleted since the
    /// last compaction.
    fn if_free_or_behind_others(&self) -> TxnRequest {
        self.if_free(vec![op(Op::Txn(self.behind_others()))])
    }

    /// Returns a transaction that creates the claim's key if all claims in the queue agree about
    /// the kind of lock. Otherwise it reads the claim's own key and the oldest ones.
    ///
    /// (For etcd, a comparison of values is false if the range is empty, so the queue must not be
    /// empty.) To find the oldest keys, etcd would scan all of them. So a claim that has created
    /// its key reads a limited number of keys in any order. In a short queue, these are all keys.
    fn behind_others(&self) -> TxnRequest {
        let mut compare = vec![absent(self.key.clone(), Vec::new())];
        compare.extend(agree(self.claim, &self.prefix));
        // All claims for a mutex have the same weight, so the values add no information.
        let keys_only = self.claim.capacity == 1;
        let some = range(self.prefix.clone(), self.end());
        let limit = if keys_only { KEYS } else { FRONT };
        let some = op(Op::Range(RangeRequest { limit, keys_only, ..some }));
        TxnRequest { compare, success: vec![self.put(), some], failure: self.own_and_front() }
    }

    fn put(&self) -> RequestOp {
        put(self.key.clone(), value(self.claim, false), self.lease.id)
    }

    /// Returns the claim's key as this revision created it.
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

    /// Returns the remaining time of the lease, without the lock delay.
    fn left(&self) -> Duration {
        self.lease.ends.minus(delay(self.claim)).since(self.begun).min(self.claim.lease)
    }
}

impl Shared {
    /// Implements [`Store::join`](leasehold_core::store::Store::join).
    pub(super) async fn join(
        self: &Arc<Self>,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Joined, Failure> {
        let called = self.leases.now();
        if self.claims.is_in_delay(claim, called) {
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let _permit = self.join_limiter.acquire(&claim.name).await;
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
                // The lease expired while it was idle, or an operator revoked it. Nothing was
                // written.
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
                // The claim may have an entry, which ends with its lease.
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

    /// Forgets a claim that has no entry.
    pub(super) fn clear(&self, claim: &Claim) {
        self.waiters.dismiss(claim.id);
        match self.claims.forget(claim.id) {
            Some(EndedClaim { lease, clean: true }) => self.leases.put_back(lease),
            Some(EndedClaim { lease, clean: false }) => self.leases.revoke_later(lease.id),
            None => {}
        }
    }

    /// Forgets a claim and revokes its lease, which also ends any entry that the claim may have.
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

    /// Returns whether a try reads first. A try that will probably fail should write nothing, not
    /// even a lease.
    fn looks_first(&self, claim: &Claim) -> bool {
        let has_lease = claim.lock_delay.is_zero() && self.leases.has(seconds(claim.lease));
        self.claims.get(claim.id).is_none()
            && (!has_lease || self.contention_hints.was(&claim.name))
    }

    /// Reads the queue before a try has a lease. Returns `Break` if the try cannot be successful.
    async fn look_before_trying(
        &self,
        claim: &Claim,
    ) -> Result<ControlFlow<Joined, Option<Seen>>, Failure> {
        let prefix = self.prefix(&claim.name);
        let found = self.client.range(oldest(prefix.clone(), end_of(&prefix), FRONT)).await?;
        let complete = found.kvs.len() == found.count;
        let seen = Seen { queue: Queue::of(&prefix, &found.kvs), revision: found.revision };
        self.contention_hints.note(&claim.name, !found.kvs.is_empty());
        Ok(match in_vain(claim, &seen.queue, complete)? {
            Some(busy) => ControlFlow::Break(busy),
            None => ControlFlow::Continue(complete.then_some(seen)),
        })
    }

    /// Executes a try with one transaction.
    async fn try_once(self: &Arc<Self>, mut going: Going<'_>) -> Result<Joined, Failure> {
        let claim = going.claim;
        let answer = self.send_place(claim, going.if_free(going.own_and_front())).await?;
        let revision = revision_of(&answer);
        self.contention_hints.note(&claim.name, !answer.succeeded);
        if answer.succeeded {
            return Ok(self.holding(&going, token_of(revision)?));
        }
        let shown = shown(&going, false, revision, answer.responses)?;
        if shown.own.is_some() {
            return self.existing_claim(&mut going, shown).await;
        }
        match in_vain(claim, &shown.front, shown.complete)? {
            Some(busy) => Ok(busy),
            None => {
                let seen = Seen { queue: shown.front, revision };
                self.join_slowly(going, shown.complete.then_some(seen)).await
            }
        }
    }

    /// Executes a join that may wait, with one transaction. Sends two transactions if the lock is
    /// taken but was free the last time.
    async fn wait_once(self: &Arc<Self>, mut going: Going<'_>) -> Result<Joined, Failure> {
        let name = &going.claim.name;
        let mut all = self.contention_hints.was(name);
        let answer = loop {
            let txn =
                if all { going.if_free_or_behind_others() } else { going.if_free(Vec::new()) };
            let answer = self.send_place(going.claim, txn).await?;
            self.contention_hints.note(name, !answer.succeeded);
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
            Some(_) => self.existing_claim(&mut going, shown).await,
            None => self.join_slowly(going, None).await,
        }
    }

    /// Sends a transaction that may create an entry.
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

    /// Returns the claim's lease, or gets one for it.
    async fn lease_of(&self, claim: &Claim) -> Result<Lease, Failure> {
        if let Some(known) = self.claims.get(claim.id) {
            return Ok(known.lease);
        }
        let asked = seconds(claim.lease.saturating_add(delay(claim)));
        // An idle lease may have little left beyond the lock delay, so it is not used here.
        let lease = match claim.lock_delay.is_zero() {
            true => self.leases.get(asked).await?,
            false => self.leases.grant(asked).await?,
        };
        let its = self.claims.enter(claim.id, lease, self.leases.now());
        if its.id != lease.id {
            // Another call for the same claim was faster.
            self.leases.put_back(lease);
        }
        Ok(its)
    }

    /// Returns the result for a claim whose key exists.
    async fn existing_claim(
        self: &Arc<Self>,
        going: &mut Going<'_>,
        shown: Shown,
    ) -> Result<Joined, Failure> {
        let Some(own) = &shown.own else { return Err(out_of_step()) };
        let token = token_of(own.create_revision)?;
        let claim = going.claim;
        if is_departed(own) {
            // The key stays, so no other claim may use its lease.
            self.abandon(claim);
            return Ok(Joined::Busy { holders: shown.front.holders() });
        }
        // This is recorded first, so that a release ends this entry and no later one on the same
        // lease.
        self.claims.note(claim.id, |known| known.token = Some(token));
        if !shown.made {
            self.beat(going, own.lease).await?;
        }
        // In a long queue for a mutex, it is enough to know that other claims are ahead, and how
        // many.
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
        // A pushed grant must not be considered valid for longer than the lease lasts.
        if going.left() < claim.waiter_lease {
            self.beat(going, own.lease).await?;
        }
        self.claims.note(claim.id, |known| {
            // An earlier entry that was removed does not affect this one.
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

    /// Renews the lease that the claim's key is attached to.
    async fn beat(&self, going: &mut Going<'_>, lease: i64) -> Result<(), Failure> {
        let Some(alive) = self.keep_alives.ask(lease).await? else { return Err(gone()) };
        going.begun = alive.from;
        going.lease =
            Lease { id: lease, granted: alive.granted, ends: alive.ends(), ..going.lease };
        let its = going.lease;
        self.claims.note(going.claim.id, |known| known.lease = its);
        Ok(())
    }

    /// Reads the queue, decides, and joins if no key was created since. `seen` may replace the
    /// first read.
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
                        return self.existing_claim(&mut going, shown).await;
                    }
                    Seen { queue, revision }
                }
            };
            // All claims are checked, not only the first, because a waiter of another client may be
            // the next holder.
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
            // The queue is read again for the claim's position, because claims ahead may have left.
            let (own, front, count) = (Some(own), Queue::default(), 0);
            let shown = Shown { made: true, own, front, count, complete: false, revision };
            return self.existing_claim(&mut going, shown).await;
        }
        let what = "other clients kept joining the queue during the operation";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what).with_hint("retry")))
    }
}

/// Returns the error for a key that existed a moment ago and whose lease has expired.
fn gone() -> Failure {
    Failure::Passing(unreachable("the claim's lease has just expired".into()))
}

/// Returns the result of an unsuccessful try, if this front of the queue is enough to decide it.
fn in_vain(claim: &Claim, front: &Queue, complete: bool) -> Result<Option<Joined>, Failure> {
    if let Some((kind, capacity)) = front.disagrees(claim) {
        return Err(Failure::Final(mismatch(claim, kind, capacity)));
    }
    // A shared lock may have a claim of another client beyond the front, which disagrees.
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

/// Returns the content of a reply for a queue that was not empty. `made` means that this
/// transaction created the claim's key.
fn shown(
    going: &Going<'_>,
    made: bool,
    revision: i64,
    responses: Vec<ResponseOp>,
) -> Result<Shown, Failure> {
    let mut responses = responses.into_iter();
    let first = responses.next();
    let own = match made {
        // The reply to the put contains nothing else.
        true => Some(going.made(revision)),
        false => ranged(first)?.kvs.into_iter().next(),
    };
    let some = ranged(responses.next())?;
    let front = Queue::of(&going.prefix, &some.kvs);
    let complete = some.kvs.len() == some.count;
    Ok(Shown { made, own, front, count: some.count, complete, revision })
}
