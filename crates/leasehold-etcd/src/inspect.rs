//! Inspection and eviction for operators.
//!
//! An eviction deletes only keys that are certainly entries in a lock's queue. Other keys that
//! block the lock belong to another program. The error names them.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use super::client::Client;
use super::fault::Failure;
use super::proto::{LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RangeRequest, TxnRequest};
use super::queue::{Entry, Queue, end_of, is_place, name_of};
use super::requests::{OPERATIONS, delete, oldest, range, still};
use leasehold_core::kit::LISTED_HOLDERS;
use leasehold_core::store::{ClaimState, Evict, LockInfo};
use leasehold_core::{Error, ErrorKind, Name, Token};

/// Maximum number of keys per read.
const PAGE: i64 = 10_000;
/// Maximum number of leases that are queried at the same time.
const AT_ONCE: usize = 128;
/// How often an eviction is retried if other clients change the queue.
const TRIES: u32 = 100;

impl Shared {
    /// Implements [`Store::read`](leasehold_core::store::Store::read).
    pub(super) async fn show(self: &Arc<Self>, name: &Name) -> Result<Option<LockInfo>, Failure> {
        self.show_if(name, |_| true).await
    }

    async fn show_if(
        self: &Arc<Self>,
        name: &Name,
        wanted: impl FnOnce(&Queue) -> bool,
    ) -> Result<Option<LockInfo>, Failure> {
        let mut queue = self.queue(name).await?;
        let Some((kind, capacity)) = queue.kind().filter(|_| wanted(&queue)) else {
            return Ok(None);
        };
        let all: Vec<usize> = (0..queue.entries.len()).collect();
        let mut remaining = self.remaining(&queue, &all).await?;
        for (at, left) in remaining.iter_mut().enumerate() {
            queue.tell_delay(at, left);
        }
        let claims = queue.claims(&remaining);
        Ok(Some(LockInfo::new(name.clone(), kind, capacity, claims)))
    }

    /// Implements [`Store::holders`](leasehold_core::store::Store::holders). Reads the oldest
    /// entries, and the lease of each holder. The cost does not grow with the queue, because many
    /// waiters call this function.
    ///
    /// Which of the oldest entries are holders does not depend on the entries after them.
    pub(super) async fn show_holders(
        self: &Arc<Self>,
        name: &Name,
        token: Option<Token>,
    ) -> Result<Option<LockInfo>, Failure> {
        let mut queue = self.oldest(name).await?;
        let holds = |queue: &Queue, at| queue.state_at(at) != ClaimState::Waiting;
        let has = |queue: &Queue, token| {
            let at = queue.entries.iter().position(|entry| entry.token == token);
            at.is_some_and(|at| holds(queue, at))
        };
        if token.is_some_and(|token| !has(&queue, token)) {
            // The token may belong to one of very many holders.
            queue = self.queue(name).await?;
        }
        let Some((kind, capacity)) = queue.kind() else { return Ok(None) };
        let wanted = |queue: &Queue, at: usize| {
            let entry = queue.entries.get(at);
            holds(queue, at) && token.is_none_or(|token| entry.is_some_and(|e| e.token == token))
        };
        let asked: Vec<usize> = (0..queue.entries.len()).filter(|at| wanted(&queue, *at)).collect();
        let mut remaining = self.remaining(&queue, &asked).await?;
        for at in &asked {
            if let Some(left) = remaining.get_mut(*at) {
                queue.tell_delay(*at, left);
            }
        }
        let claims = queue.claims(&remaining).into_iter().enumerate();
        let claims = claims.filter(|(at, _)| asked.contains(at)).map(|(_, claim)| claim).collect();
        Ok(Some(LockInfo::new(name.clone(), kind, capacity, claims)))
    }

    /// Returns the first entries of a queue, at least as many as a list of holders contains.
    async fn oldest(&self, name: &Name) -> Result<Queue, Failure> {
        let prefix = self.prefix(name);
        let most = i64::try_from(LISTED_HOLDERS).unwrap_or(i64::MAX);
        let found = self.client.range(oldest(prefix.clone(), end_of(&prefix), most)).await?;
        let is_cut = found.count > found.kvs.len();
        // The page may contain keys that are not entries of this lock, and so miss entries that
        // are.
        if is_cut && !found.kvs.iter().all(|kv| is_place(&prefix, kv)) {
            return self.queue(name).await;
        }
        Ok(Queue::of(&prefix, &found.kvs))
    }

    async fn queue(&self, name: &Name) -> Result<Queue, Failure> {
        let prefix = self.prefix(name);
        let found = self.client.range(range(prefix.clone(), end_of(&prefix))).await?;
        Ok(Queue::of(&prefix, &found.kvs))
    }

    /// Returns the remaining time of the leases of these entries, in whole seconds, rounded down.
    /// The result is indexed by entry.
    async fn remaining(
        self: &Arc<Self>,
        queue: &Queue,
        of: &[usize],
    ) -> Result<Vec<Option<Duration>>, Failure> {
        let mut all = vec![None; queue.entries.len()];
        let mut asking = JoinSet::new();
        let mut entries = of.iter().filter_map(|at| Some((*at, queue.entries.get(*at)?.lease)));
        loop {
            while asking.len() < AT_ONCE
                && let Some((at, id)) = entries.next()
            {
                let client = self.client.clone();
                let ask = async move { (at, client.left_of(id).await) };
                asking.spawn_on(ask, self.client.runtime());
            }
            let Some(asked) = asking.join_next().await else { return Ok(all) };
            let Ok((at, answered)) = asked else { continue };
            let left = answered?;
            if let Some(slot) = all.get_mut(at) {
                *slot = left;
            }
        }
    }

    /// Implements [`Store::list`](leasehold_core::store::Store::list). Reads all keys with this
    /// prefix, in pages and without their values, because a shared etcd may hold much other data.
    /// Then reads each queue that these keys may belong to.
    pub(super) async fn list(self: &Arc<Self>, beginning: &str) -> Result<Vec<LockInfo>, Failure> {
        let all = format!("{}{beginning}", self.namespace).into_bytes();
        let end = end_of(&all);
        // etcd does not accept an empty key. The smallest key is one zero byte.
        let mut from = if all.is_empty() { vec![0] } else { all };
        let mut names: Vec<Name> = Vec::new();
        loop {
            let keys = range(from.clone(), end.clone());
            let page = RangeRequest { limit: PAGE, keys_only: true, ..keys };
            let found = self.client.range(page).await?;
            let names_here = found.kvs.iter().filter_map(|kv| name_of(&self.namespace, kv));
            // A name that is not a valid lock name belongs to another program.
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
        // A key may begin with the prefix although its lock's name does not.
        for name in names.iter().filter(|name| name.as_str().starts_with(beginning)) {
            shown
                .extend(self.show_if(name, |queue| queue.entries.iter().any(|e| e.certain)).await?);
        }
        Ok(shown)
    }

    /// Implements [`Store::evict`](leasehold_core::store::Store::evict).
    pub(super) async fn evict(&self, name: &Name, which: Evict) -> Result<usize, Failure> {
        for _ in 0..TRIES {
            let queue = self.queue(name).await?;
            let gone = queue.entries.iter().enumerate().filter(|(at, entry)| match which {
                Evict::Token(token) => entry.token == token,
                Evict::Holders => queue.state_at(*at) != ClaimState::Waiting,
            });
            let (gone, left): (Vec<_>, Vec<_>) =
                gone.map(|(_, entry)| entry).partition(|entry| entry.certain);
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
                    let ids: Vec<_> = some.iter().filter_map(|entry| entry.claim).collect();
                    self.announce_evictions(&ids).await;
                } else if done.repeated {
                    let what = "the reply was lost, so it is unknown whether claims were evicted";
                    let hint = "run `leasehold show NAME` before you retry";
                    let error = Error::new(ErrorKind::Unreachable, what).with_hint(hint);
                    return Err(Failure::Passing(error));
                }
            }
            // Some of the claims may have left in the meantime. Other claims may be holders now, so
            // the eviction is not repeated.
            if removed == gone.len() || removed > 0 {
                return match left.first() {
                    Some(first) => Err(Failure::Final(left_alone(removed, first, left.len()))),
                    None => Ok(removed),
                };
            }
        }
        let what = "the queue kept changing during the operation";
        Err(Failure::Passing(Error::new(ErrorKind::Unreachable, what).with_hint("retry")))
    }
}

impl Client {
    /// Returns the remaining time of a lease, in whole seconds, rounded down. Returns `None` if it
    /// has expired.
    pub(super) async fn left_of(&self, id: i64) -> Result<Option<Duration>, Failure> {
        let path = "/etcdserverpb.Lease/LeaseTimeToLive";
        let request = LeaseTimeToLiveRequest { id };
        match self.call::<_, LeaseTimeToLiveResponse>(path, request).await {
            Ok(answered) => Ok(u64::try_from(answered.answer.ttl).ok().map(Duration::from_secs)),
            // The lease has just expired.
            Err(Failure::NoLease) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Returns the error for keys that only their owner may delete.
fn left_alone(removed: usize, first: &Entry, count: usize) -> Error {
    let key: String = String::from_utf8_lossy(&first.key).chars().take(120).collect();
    let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    let what = format!(
        "evicted {removed}, but kept {key:?}{more}: the key blocks this lock, but it was not \
         created by a lock and may belong to another program"
    );
    let hint = format!("use another lock name, or delete the key: `etcdctl del {key:?}`");
    Error::new(ErrorKind::Unsupported, what).with_hint(hint)
}
