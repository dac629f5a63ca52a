//! A writer becomes a reader: its key is written anew, in its place, by one transaction, if nobody has written it since
//! it was read (a release that keeps the lock taken does).
//!
//! Who looks takes the weight from the key's value, so older clients grant by it as we do. Who joins by what it read
//! before is right all the same: as when somebody leaves, there is only more room. Whoever fits now is told, as by
//! any other who leaves room (`etcd/stand.rs`); older clients that are the first to wait find out at their next
//! heartbeat.
//!
//! *A reader does not become a writer here*: one who tries decides by what it has read, on the condition that no key
//! was made since (`etcd/join.rs`). A reader's key that became heavier meanwhile is not one that was made.

use std::sync::Arc;

use super::Shared;
use super::ask::{op, range, ranged, still, unwritten_since, write};
use super::fault::Failure;
use super::proto::{Op, TxnRequest};
use super::queue::{Queue, end_of, reweighed};
use leasehold_core::store::{Reweighed, Standing, cannot_reweigh};
use leasehold_core::{Claim, Error, ErrorKind};

/// How often others may get in the way: whoever is told something has its key written.
const TRIES: u32 = 100;

impl Shared {
    /// [`Store::reweigh`](leasehold_core::store::Store::reweigh).
    pub(super) async fn reweigh(self: &Arc<Self>, claim: &Claim) -> Result<Reweighed, Failure> {
        let (prefix, known) = (self.prefix(&claim.name), self.claims.get(claim.id));
        let all = range(prefix.clone(), end_of(&prefix));
        for _ in 0..TRIES {
            if self.claims.is_in_delay(claim, self.leases.now()) {
                return Ok(Reweighed::Lost);
            }
            let found = self.client.range(all.clone()).await?;
            let queue = Queue::of(&prefix, &found.kvs);
            let Some(at) = queue.find(claim.id) else { return Ok(Reweighed::Lost) };
            let own = &queue.entries[at];
            let is_another = known.as_ref().and_then(|k| k.token).is_some_and(|t| t != own.token);
            if queue.standing(at) != Standing::Holding || is_another {
                return Ok(Reweighed::Lost);
            }
            let done = Reweighed::Done { token: own.token };
            if own.weight == claim.weight {
                return Ok(done);
            }
            if claim.weight > own.weight {
                return Err(Failure::Final(cannot_reweigh(claim)));
            }
            let value = found.kvs.iter().find(|kv| kv.key == own.key);
            let Some(value) = value.and_then(|kv| reweighed(&kv.value, claim.weight)) else {
                let what = "the key of this claim has an unexpected format";
                let error = Error::new(ErrorKind::Corrupt, what);
                return Err(Failure::Final(error.with_hint("report this as a bug")));
            };
            let compare = vec![
                still(own.key.clone(), own.token.get()),
                unwritten_since(own.key.clone(), own.written),
            ];
            let success = vec![write(own.key.clone(), value), op(Op::Range(all.clone()))];
            let txn = TxnRequest { compare, success, failure: Vec::new() };
            let answer = self.client.txn(txn).await?.answer;
            if answer.succeeded {
                let now = ranged(answer.responses.into_iter().nth(1))?;
                self.tell_others(claim, Queue::of(&prefix, &now.kvs));
                return Ok(done);
            }
        }
        let what = "the queue kept changing during the operation";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what).with_hint("retry")))
    }
}
