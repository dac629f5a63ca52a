//! Downgrades a writer to a reader. One transaction rewrites its key, which keeps its position, if
//! no other client has written the key since it was read. (A release with a cooldown also writes
//! the key.)
//!
//! Clients that read the queue take the weight from the key's value, and so do older versions. A
//! client that joins based on an earlier read still decides correctly, because there is only more
//! room, as after a release. The claims that now fit are notified as after any release
//! (`etcd/wait_in_queue.rs`). If the first waiter belongs to an older client, that client finds out
//! at its next heartbeat.
//!
//! **Upgrades are not supported.** A try decides by the queue that it read, under the condition
//! that no key was created since (`etcd/join.rs`). A reader's key that became heavier in the
//! meantime was not created, so the condition would not detect it.

use std::sync::Arc;

use super::Shared;
use super::fault::Failure;
use super::proto::{Op, TxnRequest};
use super::queue::{Queue, converted, end_of};
use super::requests::{op, range, ranged, still, unwritten_since, write};
use leasehold_core::store::{ClaimState, Converted, cannot_convert};
use leasehold_core::{Claim, Error, ErrorKind};

/// How often the downgrade is retried if other clients write the key. Each notification writes a
/// key.
const TRIES: u32 = 100;

impl Shared {
    /// Implements [`Store::convert`](leasehold_core::store::Store::convert).
    pub(super) async fn convert(self: &Arc<Self>, claim: &Claim) -> Result<Converted, Failure> {
        let (prefix, known) = (self.prefix(&claim.name), self.claims.get(claim.id));
        let all = range(prefix.clone(), end_of(&prefix));
        for _ in 0..TRIES {
            if self.claims.is_in_delay(claim, self.leases.now()) {
                return Ok(Converted::Lost);
            }
            let found = self.client.range(all.clone()).await?;
            let queue = Queue::of(&prefix, &found.kvs);
            let Some(at) = queue.find(claim.id) else { return Ok(Converted::Lost) };
            let own = &queue.entries[at];
            let is_another = known.as_ref().and_then(|k| k.token).is_some_and(|t| t != own.token);
            if queue.state_at(at) != ClaimState::Holding || is_another {
                return Ok(Converted::Lost);
            }
            let done = Converted::Done { token: own.token };
            if own.weight == claim.weight {
                return Ok(done);
            }
            if claim.weight > own.weight {
                return Err(Failure::Final(cannot_convert(claim)));
            }
            let value = found.kvs.iter().find(|kv| kv.key == own.key);
            let Some(value) = value.and_then(|kv| converted(&kv.value, claim.weight)) else {
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
                self.notify_others(claim, Queue::of(&prefix, &now.kvs));
                return Ok(done);
            }
        }
        let what = "the queue kept changing during the operation";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what).with_hint("retry")))
    }
}
