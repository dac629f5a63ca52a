//! What etcd tells unasked: who was evicted, and what stirs in queues that are followed.
//!
//! - *Who was evicted*: whoever evicts writes the claims' ids into a key, with digits by chance, of a range that all
//!   clients watch, and deletes it again: a key of ours for certain, beside whatever others keep there. A watch on
//!   each key that is held would cost each lock two messages, and this one costs
//!   nobody anything until somebody is evicted. It is a hint, so both may fail: then the next renewal finds out.
//! - *What stirs*: one watch on the keys of the queues, from the present. Whoever follows looks after it was
//!   confirmed. A lease that runs out is a deletion, and is told.
//!
//! *A watch ends* (its connection, its member): it begins anew, and whoever follows looks then. *It is dropped*: its
//! task ends, and cancels it. No watch is begun that is not permitted, which etcd answers by ending all of a stream:
//! what it watches is read before.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::ask::{delete, put, range};
use super::fault::Failure;
use super::proto::{RangeRequest, TxnRequest};
use super::queue::{end_of, notices};
use super::watch::{Watched, Watching};
use leasehold_core::ClaimId;
use leasehold_core::kit::Ends;
use leasehold_core::store::{Ears, Follow, Queues, Stirrer};

/// How long it pauses before a watch is begun anew.
const PAUSE: Duration = Duration::from_millis(250);
/// And where we have lost the right to it.
const REFUSED: Duration = Duration::from_secs(60);

impl Shared {
    /// Tells all clients that these were evicted. A hint, so nobody hears of a failure.
    pub(super) async fn tell_evicted(&self, ids: &[ClaimId]) {
        if ids.is_empty() {
            return;
        }
        let Ok(notice) = ClaimId::random() else { return };
        let (mut key, _) = notices(&self.namespace);
        key.extend_from_slice(notice.to_hex().as_bytes());
        let ids: Vec<String> = ids.iter().map(|id| id.to_hex()).collect();
        let said = put(key.clone(), ids.join(" ").into_bytes(), 0);
        // One after the other: a transaction writes a key once.
        for step in [said, delete(key)] {
            let txn = TxnRequest { success: vec![step], ..TxnRequest::default() };
            if self.client.txn(txn).await.is_err() {
                return;
            }
        }
    }

    /// Tells `ears` who was evicted, until it is dropped.
    pub(super) fn hear(self: &Arc<Self>, ears: Arc<Ears>) -> Ends {
        let shared = self.clone();
        let hearing = self.client.runtime().spawn(async move {
            loop {
                let (from, end) = notices(&shared.namespace);
                let pause = match shared.lets_us_watch(from.clone(), end.clone()).await {
                    Err(Failure::Final(_)) => REFUSED,
                    Err(_) => PAUSE,
                    Ok(()) => {
                        if let Ok(watching) = shared.watches.saying(from, end).await {
                            while let Ok(said) = watching.said().await {
                                said.iter().flat_map(|said| ids(said)).for_each(|id| ears.ask(id));
                            }
                        }
                        PAUSE
                    }
                };
                tokio::time::sleep(pause).await;
            }
        });
        Ends::new(&hearing)
    }

    /// Whether we may read what we would watch.
    async fn lets_us_watch(&self, key: Vec<u8>, range_end: Vec<u8>) -> Result<(), Failure> {
        let one = RangeRequest { limit: 1, keys_only: true, ..range(key, range_end) };
        self.client.range(one).await.map(drop)
    }

    /// [`Store::follow`](leasehold_core::store::Store::follow).
    pub(super) async fn follow_all(self: &Arc<Self>, queues: &Queues) -> Result<Follow, Failure> {
        let from = match queues {
            Queues::Of(name) => self.prefix(name),
            Queues::All(prefix) => format!("{}{prefix}", self.namespace).into_bytes(),
        };
        let end = end_of(&from);
        // An empty key is none in etcd: the least is one zero byte.
        let from = if from.is_empty() { vec![0] } else { from };
        self.lets_us_watch(from.clone(), end.clone()).await?;
        let all = [Watched::All(from, end)];
        let watching = self.watches.watch(&all).await?;
        watching.confirmed().await?;
        let (follow, stirrer) = Follow::new();
        let following = self.client.runtime().spawn(self.clone().go_on(all, watching, stirrer));
        Ok(follow.keeping(Ends::new(&following)))
    }

    async fn go_on(self: Arc<Self>, all: [Watched; 1], mut watching: Watching, stirrer: Stirrer) {
        loop {
            while watching.happened().await.is_ok() {
                // What happens from here on is told again.
                watching.clear();
                if !stirrer.stir() {
                    return;
                }
            }
            tokio::time::sleep(PAUSE).await;
            let [Watched::All(from, end)] = &all else { return };
            if self.lets_us_watch(from.clone(), end.clone()).await.is_err() {
                continue;
            }
            let Ok(anew) = self.watches.watch(&all).await else { continue };
            if anew.confirmed().await.is_ok() {
                watching = anew;
                stirrer.stir();
            }
        }
    }
}

/// The ids in what was said.
fn ids(said: &[u8]) -> Vec<ClaimId> {
    let said = std::str::from_utf8(said).unwrap_or_default();
    said.split(' ').filter_map(ClaimId::from_hex).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rubbish_is_nobody() {
        let id = ClaimId::random().unwrap();
        assert_eq!(ids(format!("x {} {{}}", id.to_hex()).as_bytes()), [id]);
        assert_eq!(ids(b"\xff\xfe"), []);
        assert_eq!(ids(b""), []);
    }
}
