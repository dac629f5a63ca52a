//! Joining: one transaction.
//!
//! *If nobody is there*, the claim's key is made and it holds: that is the whole of it. *Else*, in
//! the same transaction, one that waits makes its key behind those that are there, if all of them are
//! claims for the same kind of lock; and both see the front of the queue. Order in the queue is the
//! order of create revisions, which is etcd's own order of transactions; the revision is the token.
//!
//! One who tries at a lock that is shared, and everybody where keys lie in the lock's range that are
//! not its own (those of a lock `a/b` in that of `a`), reads the queue and then joins under the
//! condition that nothing has been made there since: what was decided about the queue is still true
//! then, since leaving only makes room.
//!
//! A repeated `join` finds its key, and keeps the lease alive that the key hangs on.

use super::Shared;
use super::ask::{
    absent, get, none_since, oldest, op, out_of_step, put, range, ranged, revision_of,
};
use super::claims::Remains;
use super::fault::{Failure, unreachable};
use super::leases::{Lease, seconds};
use super::proto::{Done, KeyValue, Op, RequestOp, TxnRequest, TxnResponse};
use super::queue::{Queue, agree, end_of, value};
use crate::claim::{Claim, Token};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::store::{Joined, Mode, Place, mismatch};
use std::sync::Arc;

/// How many of the front a joining transaction shows.
const FRONT: i64 = 16;
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
}

/// A claim as it is sent.
struct Going<'a> {
    claim: &'a Claim,
    mode: Mode,
    key: Vec<u8>,
    prefix: Vec<u8>,
    lease: Lease,
    /// When we began.
    begun: Moment,
}

impl Going<'_> {
    fn put(&self) -> RequestOp {
        put(self.key.clone(), value(self.claim, false), self.lease.id)
    }

    fn end(&self) -> Vec<u8> {
        end_of(&self.prefix)
    }

    fn holding(&self, token: Token) -> Joined {
        let left = self.lease.ends.since(self.begun);
        Joined::Holding { token, remaining: Some(left.min(self.claim.lease)) }
    }
}

impl Shared {
    /// [`Store::join`](crate::store::Store::join).
    pub(super) async fn join(
        self: &Arc<Self>,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Joined, Failure> {
        let mut tries = 0;
        loop {
            tries += 1;
            let joined = self.join_once(claim, mode).await;
            match joined {
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
                joined => return joined,
            }
        }
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

    async fn join_once(self: &Arc<Self>, claim: &Claim, mode: Mode) -> Result<Joined, Failure> {
        let lease = self.lease_of(claim).await?;
        let begun = self.leases.now();
        let (key, prefix) = (self.key(claim), self.prefix(&claim.name));
        let mut going = Going { claim, mode, key, prefix, lease, begun };
        let (key, end) = (going.key.clone(), going.end());
        let mut otherwise = Vec::new();
        if mode == Mode::Wait {
            let mut compare = vec![absent(key.clone(), Vec::new())];
            compare.extend(agree(claim, &going.prefix));
            let behind = TxnRequest { compare, success: vec![going.put()], failure: Vec::new() };
            otherwise.push(op(Op::Txn(behind)));
        }
        otherwise.push(op(Op::Range(get(key))));
        otherwise.push(op(Op::Range(oldest(going.prefix.clone(), end.clone(), FRONT))));
        let txn = TxnRequest {
            compare: vec![absent(going.prefix.clone(), end)],
            success: vec![going.put()],
            failure: otherwise,
        };
        let answer = self.send_place(claim, txn).await?;
        if answer.succeeded {
            let token = token_of(revision_of(&answer))?;
            self.claims.note(claim.id, |known| known.holds = Some(token));
            return Ok(going.holding(token));
        }
        let shown = shown(&going, answer)?;
        match shown.own {
            Some(_) => self.standing(&mut going, shown).await,
            None => self.join_slowly(going).await,
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
        let asked = seconds(claim.lease.saturating_add(claim.lock_delay));
        let lease = self.leases.get(asked).await?;
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
        if !shown.made {
            self.beat(going, own.lease).await?;
        }
        // Behind the front of a mutex, it is enough to know how many are there.
        let far = shown.made && claim.capacity == 1 && !shown.front.entries.is_empty();
        let (queue, at) = match (shown.front.position(&going.key), shown.complete, far) {
            (Some(at), _, _) => (shown.front, at),
            (None, false, true) => (shown.front, shown.count.saturating_sub(1)),
            _ => {
                let found = self.client.range(range(going.prefix.clone(), going.end())).await?;
                let queue = Queue::of(&going.prefix, &found.kvs);
                match queue.position(&going.key) {
                    Some(at) => (queue, at),
                    None => return Err(gone()),
                }
            }
        };
        if queue.entries.get(at).is_some_and(|e| e.departed) {
            return Ok(Joined::Busy { holders: queue.holders() });
        }
        if at < queue.granted {
            self.claims.note(claim.id, |known| known.holds = Some(token));
            return Ok(going.holding(token));
        }
        // Nobody may believe in a pushed grant for longer than the lease lasts.
        if going.lease.ends.since(going.begun) < claim.waiter_lease {
            self.beat(going, own.lease).await?;
        }
        self.claims.note(claim.id, |known| known.ahead = at);
        self.watch_for(claim, token);
        Ok(Joined::Waiting(Place { ahead: at, head_remaining: None, token: Some(token) }))
    }

    /// Keeps the lease alive that the claim's key hangs on.
    async fn beat(&self, going: &mut Going<'_>, lease: i64) -> Result<(), Failure> {
        let sent = self.leases.now();
        let Some(granted) = self.keep_alives.ask(lease).await? else { return Err(gone()) };
        let ends = sent.plus(granted);
        going.begun = sent;
        going.lease = Lease { id: lease, granted, ends, ..going.lease };
        let its = going.lease;
        self.claims.note(going.claim.id, |known| known.lease = its);
        Ok(())
    }

    /// Reads, decides, and joins if nobody came since.
    async fn join_slowly(self: &Arc<Self>, mut going: Going<'_>) -> Result<Joined, Failure> {
        let claim = going.claim;
        for _ in 0..TRIES {
            let found = self.client.range(range(going.prefix.clone(), going.end())).await?;
            let front = Queue::of(&going.prefix, &found.kvs);
            if let Some(own) = found.kvs.iter().find(|kv| kv.key == going.key).cloned() {
                let count = found.count;
                let shown = Shown { made: false, own: Some(own), front, count, complete: true };
                return self.standing(&mut going, shown).await;
            }
            if let Some((kind, capacity)) = front.kind()
                && (kind, capacity) != (claim.kind, claim.capacity)
            {
                return Err(Failure::Final(mismatch(claim, kind, capacity)));
            }
            let fits = front.fits(claim);
            if !fits && going.mode == Mode::Try {
                return Ok(Joined::Busy { holders: front.holders() });
            }
            going.begun = self.leases.now();
            let txn = TxnRequest {
                compare: vec![none_since(going.prefix.clone(), going.end(), found.revision)],
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
                self.claims.note(claim.id, |known| known.holds = Some(token));
                return Ok(going.holding(token));
            }
            let own = KeyValue {
                key: going.key.clone(),
                create_revision: revision,
                mod_revision: revision,
                value: Vec::new(),
                lease: going.lease.id,
            };
            // It is read anew where it stands: who was there may have left.
            let (count, front) = (found.count, Queue::default());
            let shown = Shown { made: true, own: Some(own), front, count, complete: false };
            return self.standing(&mut going, shown).await;
        }
        let what = "others join this lock all the time and get in the way: try again";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what)))
    }
}

/// The key was there a moment ago, and its lease has ended.
fn gone() -> Failure {
    Failure::Passing(unreachable("the claim's lease has just ended".into()))
}

fn token_of(revision: i64) -> Result<Token, Failure> {
    u64::try_from(revision).ok().and_then(Token::new).ok_or_else(out_of_step)
}

fn shown(going: &Going<'_>, answer: TxnResponse) -> Result<Shown, Failure> {
    let mut responses = answer.responses.into_iter();
    let made = going.mode == Mode::Wait
        && match responses.next().and_then(|r| r.done) {
            Some(Done::Txn(nested)) => nested.succeeded,
            _ => return Err(out_of_step()),
        };
    let own = ranged(responses.next())?.kvs.into_iter().next();
    let all = ranged(responses.next())?;
    let front = Queue::of(&going.prefix, &all.kvs);
    let complete = all.kvs.len() == all.count;
    Ok(Shown { made, own, front, count: all.count, complete })
}
