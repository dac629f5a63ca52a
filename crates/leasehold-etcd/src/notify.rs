//! Watches that notify this client of evictions, and of changes in queues that it follows.
//!
//! - *Evictions*: a client that evicts claims writes their IDs into a key with random digits, and
//!   deletes the key again. The key lies in a range that all clients watch. Only leasehold uses
//!   this range, even if other programs store keys in the same cluster. A watch on each held key
//!   would cost two messages per lock. This watch costs nothing until a claim is evicted. The
//!   notification is a hint, so writing and reading it may fail. Then the holder finds out at its
//!   next renewal.
//! - *Changes in queues*: one watch on the keys of the queues, from the current revision. A
//!   follower polls after the watch is confirmed. A lease that expires causes a deletion, which is
//!   reported.
//!
//! **If a watch ends** with its connection or its member, it is created again, and followers then
//! poll. **If it is dropped,** its task ends and cancels it. The client reads the range before it
//! watches it, because etcd ends the whole stream if a watch is not permitted.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::fault::Failure;
use super::proto::{RangeRequest, TxnRequest};
use super::queue::{end_of, notices};
use super::requests::{delete, put, range};
use super::watch::{Watched, Watching};
use leasehold_core::ClaimId;
use leasehold_core::kit::Ends;
use leasehold_core::store::{EvictionListeners, Follow, Notifier, Queues};

/// Pause before a watch is created again.
const PAUSE: Duration = Duration::from_millis(250);
/// Pause if this client has no permission to watch any more.
const REFUSED: Duration = Duration::from_secs(60);

impl Shared {
    /// Notifies all clients that these claims were evicted. The notification is a hint, so failures
    /// are ignored.
    pub(super) async fn announce_evictions(&self, ids: &[ClaimId]) {
        if ids.is_empty() {
            return;
        }
        let Ok(notice) = ClaimId::random() else { return };
        let (mut key, _) = notices(&self.namespace);
        key.extend_from_slice(notice.to_hex().as_bytes());
        let ids: Vec<String> = ids.iter().map(|id| id.to_hex()).collect();
        let write = put(key.clone(), ids.join(" ").into_bytes(), 0);
        // These are two transactions, because one transaction may write a key only once.
        for step in [write, delete(key)] {
            let txn = TxnRequest { success: vec![step], ..TxnRequest::default() };
            if self.client.txn(txn).await.is_err() {
                return;
            }
        }
    }

    /// Notifies `listeners` of evictions until the returned handle is dropped.
    pub(super) fn listen_for_evictions(
        self: &Arc<Self>,
        listeners: Arc<EvictionListeners>,
    ) -> Ends {
        let shared = self.clone();
        let listening = self.client.runtime().spawn(async move {
            loop {
                let (from, end) = notices(&shared.namespace);
                let pause = match shared.lets_us_watch(from.clone(), end.clone()).await {
                    Err(Failure::Final(_)) => REFUSED,
                    Err(_) => PAUSE,
                    Ok(()) => {
                        if let Ok(watching) = shared.watches.watch_values(from, end).await {
                            while let Ok(notices) = watching.written_values().await {
                                let evicted = notices.iter().flat_map(|notice| ids(notice));
                                evicted.for_each(|id| listeners.ask(id));
                            }
                        }
                        PAUSE
                    }
                };
                tokio::time::sleep(pause).await;
            }
        });
        Ends::new(&listening)
    }

    /// Checks that this user may read the range that is to be watched.
    async fn lets_us_watch(&self, key: Vec<u8>, range_end: Vec<u8>) -> Result<(), Failure> {
        let one = RangeRequest { limit: 1, keys_only: true, ..range(key, range_end) };
        self.client.range(one).await.map(drop)
    }

    /// Implements [`Store::follow`](leasehold_core::store::Store::follow).
    pub(super) async fn follow_all(self: &Arc<Self>, queues: &Queues) -> Result<Follow, Failure> {
        let from = match queues {
            Queues::Of(name) => self.prefix(name),
            Queues::All(prefix) => format!("{}{prefix}", self.namespace).into_bytes(),
        };
        let end = end_of(&from);
        // etcd does not accept an empty key. The smallest key is one zero byte.
        let from = if from.is_empty() { vec![0] } else { from };
        self.lets_us_watch(from.clone(), end.clone()).await?;
        let all = [Watched::All(from, end)];
        let watching = self.watches.watch(&all).await?;
        watching.confirmed().await?;
        let (follow, notifier) = Follow::new();
        let following = self.clone().report_changes(all, watching, notifier);
        let following = self.client.runtime().spawn(following);
        Ok(follow.keeping(Ends::new(&following)))
    }

    async fn report_changes(
        self: Arc<Self>,
        all: [Watched; 1],
        mut watching: Watching,
        notifier: Notifier,
    ) {
        loop {
            while watching.event().await.is_ok() {
                // From here on, the next event wakes this task again.
                watching.clear();
                if !notifier.notify() {
                    return;
                }
            }
            tokio::time::sleep(PAUSE).await;
            let [Watched::All(from, end)] = &all else { return };
            if self.lets_us_watch(from.clone(), end.clone()).await.is_err() {
                continue;
            }
            let Ok(renewed) = self.watches.watch(&all).await else { continue };
            if renewed.confirmed().await.is_ok() {
                watching = renewed;
                notifier.notify();
            }
        }
    }
}

/// Returns the claim IDs in a notice.
fn ids(notice: &[u8]) -> Vec<ClaimId> {
    let text = std::str::from_utf8(notice).unwrap_or_default();
    text.split(' ').filter_map(ClaimId::from_hex).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_parts_of_a_notice_are_ignored() {
        let id = ClaimId::random().unwrap();
        assert_eq!(ids(format!("x {} {{}}", id.to_hex()).as_bytes()), [id]);
        assert_eq!(ids(b"\xff\xfe"), []);
        assert_eq!(ids(b""), []);
    }
}
