//! Leaving: the claim's key is deleted if it still hangs on its own lease; one transaction. Whoever
//! waits for it watches that key.
//!
//! A lock that stays taken after its release (`at_least`) is a key that was moved to a lease of its
//! own, which nobody renews. It is the same key, so it keeps its place; its value says that its holder
//! has departed.
//!
//! The lease goes back to those that lie idle, or, if anything sent with it may still be under way,
//! is revoked before the answer: then nothing that comes late can make a place any more.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::ask::{delete, get, hangs_on, op, put, range, ranged, still};
use super::claims::Remains;
use super::fault::Failure;
use super::leases::seconds;
use super::proto::{Compare, Op, RequestOp, TxnRequest};
use super::queue::{Queue, end_of, value};
use crate::claim::Claim;

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

impl Shared {
    /// [`Store::leave`](crate::store::Store::leave).
    pub(super) async fn leave(
        self: &Arc<Self>,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<bool, Failure> {
        self.waiters.dismiss(claim.id);
        let keep = keep.filter(|keep| !keep.is_zero());
        let known = self.claims.get(claim.id);
        let keep = match (keep, &known) {
            (Some(keep), Some(known)) if known.holds.is_some() => Some(keep),
            // A waiter leaves nothing behind; of a claim that is not ours we must ask.
            (Some(keep), _) if self.holds(claim).await? => Some(keep),
            _ => None,
        };
        let known = known.map(|known| known.lease.id);
        let there = match keep {
            None => self.end(claim, known, &delete(self.key(claim))).await?.was_there(),
            Some(keep) => {
                let kept = self.leases.grant(seconds(keep)).await?;
                let depart = put(self.key(claim), value(claim, true), kept.id);
                let ended = self.end(claim, known, &depart).await?;
                if ended != Ended::Now {
                    self.leases.revoke_later(kept.id);
                }
                ended.was_there()
            }
        };
        Ok(match self.claims.forget(claim.id) {
            None => there,
            Some(Remains { lease, clean: true }) => {
                match there {
                    true => self.leases.put_back(lease),
                    // Ended with its lease, as likely as not.
                    false => self.leases.revoke_later(lease.id),
                }
                there
            }
            Some(Remains { lease, clean: false }) => {
                self.leases.revoke(lease.id).await?;
                // What was not there may have come just before the lease was ended.
                true
            }
        })
    }

    /// Ends a claim's place, which hangs on the lease `known` or on one that this client does not
    /// know, unless its holder has departed already.
    async fn end(
        &self,
        claim: &Claim,
        known: Option<i64>,
        end: &RequestOp,
    ) -> Result<Ended, Failure> {
        if let Some(lease) = known
            && let Some(ended) = self.end_if(claim, hangs_on(self.key(claim), lease), end).await?
        {
            return Ok(ended);
        }
        let prefix = self.prefix(&claim.name);
        for _ in 0..TRIES {
            let found = self.client.range(get(self.key(claim))).await?;
            let queue = Queue::of(&prefix, &found.kvs);
            let Some(entry) = queue.entries.first() else { return Ok(Ended::WasNotThere) };
            if entry.departed {
                return Ok(Ended::Before);
            }
            let condition = still(self.key(claim), entry.token.get());
            if let Some(ended) = self.end_if(claim, condition, end).await? {
                return Ok(ended);
            }
        }
        Ok(Ended::Before)
    }

    /// Ends a place under a condition; `None` if there is one and the condition is not met.
    async fn end_if(
        &self,
        claim: &Claim,
        condition: Compare,
        end: &RequestOp,
    ) -> Result<Option<Ended>, Failure> {
        let txn = TxnRequest {
            compare: vec![condition],
            success: vec![end.clone()],
            failure: vec![op(Op::Range(get(self.key(claim))))],
        };
        let answered = self.client.txn(txn).await?;
        if answered.answer.succeeded {
            return Ok(Some(Ended::Now));
        }
        let found = ranged(answered.answer.responses.into_iter().next())?;
        Ok(match (found.kvs.is_empty(), answered.repeated) {
            (true, false) => Some(Ended::WasNotThere),
            // An earlier sending may have ended it.
            (true, true) => Some(Ended::Before),
            (false, _) => None,
        })
    }

    /// Whether a claim of which we know nothing holds.
    async fn holds(&self, claim: &Claim) -> Result<bool, Failure> {
        let prefix = self.prefix(&claim.name);
        let end = end_of(&prefix);
        let found = self.client.range(range(prefix.clone(), end)).await?;
        let queue = Queue::of(&prefix, &found.kvs);
        Ok(queue.position(&self.key(claim)).is_some_and(|at| at < queue.granted))
    }
}
