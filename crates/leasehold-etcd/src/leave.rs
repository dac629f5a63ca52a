//! Leaving: the claim's key is deleted if it is still the one that was made for it; one transaction.
//! Whoever waits for it watches that key.
//!
//! A lock that stays taken after its release (`at_least`) is a key that was moved to a lease of its
//! own, which nobody renews. It is the same key, so it keeps its place; its value says that its holder
//! has departed.
//!
//! *The lock-delay* of an unclean end is the last part of the lease, which is longer by as much. A holder
//! whose own part is over by its own clock has lost the lock: it may neither renew nor leave any more, and
//! its key goes with the lease ([`Claims::is_in_delay`](super::claims::Claims::is_in_delay)). A request that
//! it sent before and that comes late makes the delay longer, or was the clean end of a holder that had
//! stopped by then.
//!
//! The lease goes back to those that lie idle, and the next claim on it makes the same key again. If
//! anything sent with it may still be under way, it is revoked before the answer: then nothing that comes
//! late can make a place any more. A `leave` that comes late finds the revision changed.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::ask::{Found, delete, get, hangs_on, op, put, range, ranged, still};
use super::claims::{Known, Remains};
use super::fault::Failure;
use super::leases::seconds;
use super::proto::{Compare, Op, RequestOp, TxnRequest};
use super::queue::{Entry, Queue, end_of, value};
use leasehold_core::Claim;

/// How often a key may change between a look at it and its deletion.
const TRIES: u32 = 10;

/// What became of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// We have just ended it.
    Now,
    /// It had ended before, or nobody knows.
    Before,
    WasNotThere,
}

impl Ended {
    fn was_there(self) -> bool {
        self != Self::WasNotThere
    }
}

/// A place that is to end.
struct Leaving<'a> {
    claim: &'a Claim,
    key: Vec<u8>,
    /// What is true of it as long as it is as we know it.
    known: Vec<Compare>,
}

impl Shared {
    /// [`Store::leave`](leasehold_core::store::Store::leave).
    pub(super) async fn leave(
        self: &Arc<Self>,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<bool, Failure> {
        self.waiters.dismiss(claim.id);
        if self.claims.is_in_delay(claim, self.leases.now()) {
            return Ok(false);
        }
        let keep = keep.filter(|keep| !keep.is_zero());
        let (leaving, holds) = match self.claims.get(claim.id) {
            Some(Known { lease, token, holds, .. }) => {
                if token.is_none() {
                    // What we send may come late and end whatever hangs on the lease by then.
                    let _never_answered = self.claims.ask(claim.id);
                }
                let key = self.key_on(&claim.name, lease.id);
                let made = token.map(|token| still(key.clone(), token.get()));
                let known = [hangs_on(key.clone(), lease.id)].into_iter().chain(made).collect();
                (Leaving { claim, key, known }, holds)
            }
            None => match self.place_of(claim).await? {
                Some((key, holds)) => (Leaving { claim, key, known: Vec::new() }, holds),
                None => return Ok(false),
            },
        };
        // A waiter leaves nothing behind.
        let ended = match keep.filter(|_| holds) {
            None => self.end(&leaving, &delete(leaving.key.clone())).await?,
            Some(keep) => self.depart(&leaving, keep).await?,
        };
        let departs = keep.is_some() && holds;
        Ok(match self.claims.forget(claim.id) {
            None => ended.was_there(),
            Some(Remains { lease, clean: true }) => {
                // A key that is not known to be away may not be made again.
                match ended == Ended::Now && !departs {
                    true => self.leases.put_back(lease),
                    false => self.leases.revoke_later(lease.id),
                }
                ended.was_there()
            }
            Some(Remains { lease, clean: false }) => {
                self.leases.revoke(lease.id).await?;
                // What was not there may have come just before the lease was ended.
                true
            }
        })
    }

    /// Has the place stay for so long though its holder has departed.
    async fn depart(
        self: &Arc<Self>,
        leaving: &Leaving<'_>,
        keep: Duration,
    ) -> Result<Ended, Failure> {
        let kept = self.leases.grant(seconds(keep)).await?;
        let depart = put(leaving.key.clone(), value(leaving.claim, true), kept.id);
        let ended = self.end(leaving, &depart).await?;
        // If it was done before, then perhaps by an earlier sending of this.
        if ended == Ended::WasNotThere {
            self.leases.revoke_later(kept.id);
        }
        Ok(ended)
    }

    /// Ends a claim's place, unless its holder has departed already.
    async fn end(&self, leaving: &Leaving<'_>, end: &RequestOp) -> Result<Ended, Failure> {
        if !leaving.known.is_empty()
            && let Some(ended) = self.end_if(leaving, leaving.known.clone(), end).await?
        {
            return Ok(ended);
        }
        for _ in 0..TRIES {
            let found = self.client.range(get(leaving.key.clone())).await?;
            let Some(entry) = self.entry(leaving, &found) else { return Ok(Ended::WasNotThere) };
            if entry.departed {
                return Ok(Ended::Before);
            }
            let condition = still(entry.key, entry.token.get());
            if let Some(ended) = self.end_if(leaving, vec![condition], end).await? {
                return Ok(ended);
            }
        }
        Ok(Ended::Before)
    }

    /// Ends a place under a condition; `None` if there is one and the condition is not met.
    async fn end_if(
        &self,
        leaving: &Leaving<'_>,
        compare: Vec<Compare>,
        end: &RequestOp,
    ) -> Result<Option<Ended>, Failure> {
        let success = vec![end.clone()];
        let failure = vec![op(Op::Range(get(leaving.key.clone())))];
        let answered = self.client.txn(TxnRequest { compare, success, failure }).await?;
        if answered.answer.succeeded {
            return Ok(Some(Ended::Now));
        }
        let found = ranged(answered.answer.responses.into_iter().next())?;
        Ok(match (self.entry(leaving, &found), answered.repeated) {
            (None, false) => Some(Ended::WasNotThere),
            // An earlier sending may have ended it.
            (None, true) => Some(Ended::Before),
            (Some(_), _) => None,
        })
    }

    /// The claim's own place: another one of this client's may have the key by now.
    fn entry(&self, leaving: &Leaving<'_>, found: &Found) -> Option<Entry> {
        let queue = Queue::of(&self.prefix(&leaving.claim.name), &found.kvs);
        let at = queue.find(leaving.claim.id)?;
        queue.entries.into_iter().nth(at)
    }

    /// The key of a claim of which we know nothing, and whether it holds. One whose lock-delay has begun is
    /// nobody's any more.
    async fn place_of(&self, claim: &Claim) -> Result<Option<(Vec<u8>, bool)>, Failure> {
        let prefix = self.prefix(&claim.name);
        let end = end_of(&prefix);
        let found = self.client.range(range(prefix.clone(), end)).await?;
        let queue = Queue::of(&prefix, &found.kvs);
        let Some(at) = queue.find(claim.id) else { return Ok(None) };
        let Some(entry) = queue.entries.get(at) else { return Ok(None) };
        let holds = at < queue.granted;
        if holds && !entry.delay.is_zero() && !entry.departed {
            let left = self.client.left_of(entry.lease).await?;
            if left.is_none_or(|left| left < entry.delay) {
                return Ok(None);
            }
        }
        Ok(Some((entry.key.clone(), holds)))
    }
}
