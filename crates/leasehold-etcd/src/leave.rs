//! Removes a claim: one transaction deletes its key if it is still the one that was created for it.
//! Waiters behind the claim watch that key.
//!
//! **Cooldown.** If the lock stays unavailable after its release (`min_hold`), the key is moved to
//! a lease of its own, which no client renews. It is the same key, so it keeps its position. Its
//! value records that the holder has released the lock.
//!
//! **The lock delay** after an unclean end is the last part of the lease, which is longer by that
//! delay. A holder whose own part has ended, according to its own clock, has lost the lock. It may
//! neither renew nor leave any more, and its key is deleted when the lease expires
//! ([`Claims::is_in_delay`](super::claims::Claims::is_in_delay)). If a request that it sent earlier
//! arrives late, it either extends the delay, or is the clean release by a holder that had stopped
//! by then.
//!
//! **Late requests.** After a release, the lease becomes idle again, and the next claim that uses
//! it creates the same key again. If any request that was sent with it may still be under way, the
//! lease is revoked before this call returns. Then a late request cannot create an entry any more.
//! A late `leave` finds that the revision has changed.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::claims::{ClaimRecord, EndedClaim};
use super::fault::Failure;
use super::leases::seconds;
use super::proto::{Compare, Op, RequestOp, TxnRequest};
use super::queue::{Entry, Queue, end_of, value};
use super::requests::{Found, delete, get, hangs_on, op, put, range, ranged, still};
use leasehold_core::Claim;

/// How often a key may change between a read and its deletion.
const TRIES: u32 = 10;

/// How an entry ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// This call has ended the entry.
    Now,
    /// The entry had ended before this call, or it is unknown which call ended it.
    Before,
    WasNotThere,
}

impl Ended {
    fn was_there(self) -> bool {
        self != Self::WasNotThere
    }
}

/// An entry that is about to end.
struct Leaving<'a> {
    claim: &'a Claim,
    key: Vec<u8>,
    /// Conditions that hold as long as the entry is as this client knows it.
    known: Vec<Compare>,
}

impl Shared {
    /// Implements [`Store::leave`](leasehold_core::store::Store::leave).
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
            Some(ClaimRecord { lease, token, holds, .. }) => {
                if token.is_none() {
                    // The request may arrive late and end whatever entry is attached to the lease
                    // by then.
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
        // A waiter has no cooldown.
        let ended = match keep.filter(|_| holds) {
            None => self.end(&leaving, &delete(leaving.key.clone())).await?,
            Some(keep) => self.depart(&leaving, keep).await?,
        };
        let departs = keep.is_some() && holds;
        Ok(match self.claims.forget(claim.id) {
            None => ended.was_there(),
            Some(EndedClaim { lease, clean: true }) => {
                // If it is not certain that the key is deleted, the lease must not create the same
                // key again.
                match ended == Ended::Now && !departs {
                    true => self.leases.put_back(lease),
                    false => self.leases.revoke_later(lease.id),
                }
                ended.was_there()
            }
            Some(EndedClaim { lease, clean: false }) => {
                self.leases.revoke(lease.id).await?;
                // The key may have been created just before the lease was revoked.
                true
            }
        })
    }

    /// Keeps the entry for the time `keep` after its holder has released the lock.
    async fn depart(
        self: &Arc<Self>,
        leaving: &Leaving<'_>,
        keep: Duration,
    ) -> Result<Ended, Failure> {
        let kept = self.leases.grant(seconds(keep)).await?;
        let depart = put(leaving.key.clone(), value(leaving.claim, true), kept.id);
        let ended = self.end(leaving, &depart).await?;
        // In the case `Before`, an earlier attempt of this request may have used the lease.
        if ended == Ended::WasNotThere {
            self.leases.revoke_later(kept.id);
        }
        Ok(ended)
    }

    /// Ends a claim's entry, unless it is already in cooldown.
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

    /// Ends an entry under a condition. Returns `None` if the entry exists but the condition is
    /// false.
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
            // An earlier attempt may have ended the entry.
            (None, true) => Some(Ended::Before),
            (Some(_), _) => None,
        })
    }

    /// Returns the claim's own entry. Another claim of this client may have the key by now.
    fn entry(&self, leaving: &Leaving<'_>, found: &Found) -> Option<Entry> {
        let queue = Queue::of(&self.prefix(&leaving.claim.name), &found.kvs);
        let at = queue.find(leaving.claim.id)?;
        queue.entries.into_iter().nth(at)
    }

    /// Returns the key of a claim that this client does not know, and whether the claim is a
    /// holder. A claim whose lock delay has begun cannot be removed any more.
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
