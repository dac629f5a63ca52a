//! Inspection, listing and eviction.

use std::collections::HashSet;

use leasehold_core::queue::{Entry, Queue};
use leasehold_core::store::{Evict, LockInfo};
use leasehold_core::{ClaimId, Name, Result};

use crate::cells::{Answer, Request};
use crate::last_writes::CellSnapshot;
use crate::shared::{ClaimEffect, Proof, QueueEdit, Shared};
use crate::text;

/// Maximum number of queues read in one round trip.
const AT_ONCE: usize = 256;

impl Shared {
    pub(crate) async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let mut seen = self.read_queue(name).await?;
        self.settle(&mut seen.queue, Proof::Shown).await?;
        Ok(self.shown(name, &seen.queue))
    }

    /// Returns a description of the queue, or `None` if the queue is empty.
    fn shown(&self, name: &Name, queue: &Queue) -> Option<LockInfo> {
        let mut claims = queue.claims(self.time().now);
        let now = self.clock.now();
        let certain = self.sessions.current().map(|session| session.certain());
        // Only a claim's own client knows when the claim ends.
        for (claim, entry) in claims.iter_mut().zip(queue.entries()) {
            let ours = self.claims.session_of(entry.id, now).is_some();
            let ends = self.claims.ends(entry.id).filter(|_| ours);
            claim.remaining = ends.zip(certain).map(|(ends, certain)| ends.min(certain).since(now));
        }
        let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), claims);
        (!info.claims.is_empty()).then_some(info)
    }

    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut keys = Vec::new();
        for beginning in self.keys.locks() {
            keys.extend(self.cells.keys(&beginning).await?);
        }
        keys.sort_unstable();
        keys.dedup();
        // A key whose name does not match the prefix needs no read.
        keys.retain(|key| {
            self.keys.name_of(key).is_none_or(|name| name.as_str().starts_with(prefix))
        });
        // The whole listing reads each session at most once.
        let (mut shown, mut alive) = (Vec::new(), HashSet::new());
        for some in keys.chunks(AT_ONCE) {
            let gets = some.iter().map(|key| Request::Get { key: key.clone() }).collect();
            for (key, cell) in some.iter().zip(self.cells.run(gets).await?) {
                let Answer::Found(found) = cell else { continue };
                shown.extend(self.listed(prefix, key, &found.value, &mut alive).await?);
            }
        }
        shown.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(shown)
    }

    async fn listed(
        &self,
        prefix: &str,
        key: &str,
        value: &[u8],
        alive: &mut HashSet<String>,
    ) -> Result<Option<LockInfo>> {
        match text::parsed(value) {
            Ok((name, mut queue)) if name.as_str().starts_with(prefix) => {
                self.settle_but(&mut queue, Proof::Shown, alive).await?;
                Ok(self.shown(&name, &queue))
            }
            Ok(_) => Ok(None),
            Err(error) => {
                let name = self.keys.name_of(key);
                let why = match error.hint() {
                    Some(hint) => format!("{} ({hint})", error.reason()),
                    None => error.reason(),
                };
                Ok(name.map(|name| LockInfo::unreadable(name, why)))
            }
        }
    }

    pub(crate) async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let none: Option<CellSnapshot> = None;
        let mut first: Option<Vec<Entry>> = None;
        let evict = |queue: &mut Queue| {
            let Some(evicted) = first.clone() else {
                let evicted = queue.evict(which, self.time().now);
                if evicted.is_empty() {
                    return QueueEdit::Unchanged(evicted);
                }
                first = Some(evicted.clone());
                return QueueEdit::Write(evicted);
            };
            // A refused write may still have been done, and the current holder may hold the lock as
            // a result. So only claims that the first read found are evicted.
            let is_meant = |entry: &Entry| evicted.iter().any(|first| first.id == entry.id);
            if !queue.entries().any(is_meant) {
                return QueueEdit::Unchanged(evicted);
            }
            queue.retain(self.time().now, |entry| !is_meant(entry));
            QueueEdit::Write(evicted)
        };
        let evicted = self.change(name, ClaimEffect::None, none, evict).await?;
        for entry in &evicted {
            self.tell_evicted(entry.id, &entry.session).await;
        }
        if !evicted.is_empty() && self.cells.messenger().is_some() {
            // The reply to this read shows that the messages were sent. Without it, the caller's
            // process could end before that.
            let _ = self.read_queue(name).await;
        }
        Ok(evicted.len())
    }

    /// Notifies the claim's client that the claim was evicted. If the message is lost, the client
    /// finds out at its next renewal.
    async fn tell_evicted(&self, id: ClaimId, session: &str) {
        if self.sessions.current().is_some_and(|ours| ours.id == session) {
            self.listeners.ask(id);
        } else if let Some(messenger) = self.cells.messenger() {
            messenger.send(session, text::evicted(id)).await;
        }
    }
}
