//! For people: what stands in the queues, and taking a lock away.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use super::ask::{OPERATIONS, delete, range, still};
use super::fault::Failure;
use super::proto::{LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RangeRequest, TxnRequest};
use super::queue::{Queue, end_of, name_of};
use crate::error::{Error, ErrorKind};
use crate::name::Name;
use crate::store::{Evict, LockInfo, Standing};

/// How many keys one reading shows.
const PAGE: i64 = 1_000;
/// How many leases are asked about at once.
const AT_ONCE: usize = 128;
/// How often others may get in the way of an eviction.
const TRIES: u32 = 100;

impl Shared {
    /// [`Store::read`](crate::store::Store::read).
    pub(super) async fn show(self: &Arc<Self>, name: &Name) -> Result<Option<LockInfo>, Failure> {
        let queue = self.queue(name).await?;
        let Some((kind, capacity)) = queue.kind() else { return Ok(None) };
        let remaining = self.remaining(&queue).await?;
        let claims = queue.claims(&remaining);
        Ok(Some(LockInfo::new(name.clone(), kind, capacity, claims)))
    }

    async fn queue(&self, name: &Name) -> Result<Queue, Failure> {
        let prefix = self.prefix(name);
        let found = self.client.range(range(prefix.clone(), end_of(&prefix))).await?;
        Ok(Queue::of(&prefix, &found.kvs))
    }

    /// What is left of each lease, rounded up to the second that etcd rounds down.
    async fn remaining(self: &Arc<Self>, queue: &Queue) -> Result<Vec<Option<Duration>>, Failure> {
        let mut all = vec![None; queue.entries.len()];
        let mut asking = JoinSet::new();
        let mut entries = queue.entries.iter().map(|e| e.lease).enumerate();
        loop {
            while asking.len() < AT_ONCE
                && let Some((at, id)) = entries.next()
            {
                let client = self.client.clone();
                let ask = async move {
                    let path = "/etcdserverpb.Lease/LeaseTimeToLive";
                    let request = LeaseTimeToLiveRequest { id };
                    let answered = client.call::<_, LeaseTimeToLiveResponse>(path, request).await;
                    (at, answered)
                };
                asking.spawn_on(ask, self.client.runtime());
            }
            let Some(asked) = asking.join_next().await else { return Ok(all) };
            let Ok((at, answered)) = asked else { continue };
            let ttl = match answered {
                Ok(answered) => answered.answer.ttl,
                // Over just now.
                Err(Failure::NoLease) => -1,
                Err(failure) => return Err(failure),
            };
            if let Some(slot) = all.get_mut(at) {
                *slot = Some(Duration::from_secs(u64::try_from(ttl + 1).unwrap_or(0)));
            }
        }
    }

    /// [`Store::list`](crate::store::Store::list): a look at all keys that begin so, and then at each
    /// queue that there is among them.
    pub(super) async fn list(self: &Arc<Self>, beginning: &str) -> Result<Vec<LockInfo>, Failure> {
        let all = format!("{}{beginning}", self.namespace).into_bytes();
        let end = end_of(&all);
        // An empty key is none in etcd: the least is one zero byte.
        let mut from = if all.is_empty() { vec![0] } else { all };
        let mut names: Vec<Name> = Vec::new();
        loop {
            let keys = range(from.clone(), end.clone());
            let page = RangeRequest { limit: PAGE, ..keys };
            let found = self.client.range(page).await?;
            let names_here = found.kvs.iter().filter_map(|kv| name_of(&self.namespace, kv));
            // What no lock of ours can be called is another's business.
            names.extend(names_here.filter_map(|name| Name::new(name).ok()));
            match found.kvs.last() {
                Some(last) if found.count > found.kvs.len() => {
                    from.clone_from(&last.key);
                    from.push(0);
                }
                _ => break,
            }
        }
        names.sort();
        names.dedup();
        let mut shown = Vec::with_capacity(names.len());
        // A key may begin with the prefix where its lock's name does not.
        for name in names.iter().filter(|name| name.as_str().starts_with(beginning)) {
            shown.extend(self.show(name).await?);
        }
        Ok(shown)
    }

    /// [`Store::evict`](crate::store::Store::evict).
    pub(super) async fn evict(&self, name: &Name, which: Evict) -> Result<usize, Failure> {
        for _ in 0..TRIES {
            let queue = self.queue(name).await?;
            let gone = queue.entries.iter().enumerate().filter(|(at, entry)| match which {
                Evict::Token(token) => entry.token == token,
                Evict::Holders => queue.standing(*at) != Standing::Waiting,
            });
            let gone: Vec<_> = gone.map(|(_, entry)| entry).collect();
            let mut removed = 0;
            for some in gone.chunks(OPERATIONS) {
                let txn = TxnRequest {
                    compare: some.iter().map(|e| still(e.key.clone(), e.token.get())).collect(),
                    success: some.iter().map(|e| delete(e.key.clone())).collect(),
                    failure: Vec::new(),
                };
                let done = self.client.txn(txn).await?;
                if done.answer.succeeded {
                    removed += some.len();
                } else if done.repeated {
                    let what =
                        "the answer was lost, and whom it evicted: look before you try again";
                    return Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what)));
                }
            }
            // Somebody left meanwhile: who holds now is another question.
            if removed == gone.len() || removed > 0 {
                return Ok(removed);
            }
        }
        let what = "the queue changes all the time: try again";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what)))
    }
}
