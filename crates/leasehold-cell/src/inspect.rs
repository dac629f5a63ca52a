//! For people: what stands in queues, and who is taken out of them.

use std::collections::HashSet;

use leasehold_core::queue::{Entry, Queue};
use leasehold_core::store::{Evict, LockInfo};
use leasehold_core::{ClaimId, Name, Result};

use crate::cells::{Answer, Request};
use crate::known::Seen;
use crate::shared::{About, Proof, Shared, Turn};
use crate::text;

/// How many queues are asked for at once.
const AT_ONCE: usize = 256;

impl Shared {
    pub(crate) async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let mut seen = self.look(name).await?;
        self.settle(&mut seen.queue, Proof::Shown).await?;
        Ok(self.shown(name, &seen.queue))
    }

    /// `None` if nobody stands there.
    fn shown(&self, name: &Name, queue: &Queue) -> Option<LockInfo> {
        let mut claims = queue.claims(self.time().now);
        let now = self.clock.now();
        let certain = self.sessions.current().map(|session| session.certain());
        // How long others' last is known to them alone.
        for (claim, entry) in claims.iter_mut().zip(queue.entries()) {
            let ours = self.claims.standing(entry.id, now).is_some();
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
        // A name that can be told from its key is not asked for in vain.
        keys.retain(|key| {
            self.keys.name_of(key).is_none_or(|name| name.as_str().starts_with(prefix))
        });
        // Each session is looked at once for the whole list.
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
        let none: Option<Seen> = None;
        let mut first: Option<Vec<Entry>> = None;
        let evict = |queue: &mut Queue| {
            let Some(evicted) = first.clone() else {
                let evicted = queue.evict(which, self.time().now);
                if evicted.is_empty() {
                    return Turn::Told(evicted);
                }
                first = Some(evicted.clone());
                return Turn::Write(evicted);
            };
            // What was refused may be done. No other claims are evicted than those of the first look: whoever holds
            // now may hold because of it.
            let is_meant = |entry: &Entry| evicted.iter().any(|first| first.id == entry.id);
            if !queue.entries().any(is_meant) {
                return Turn::Told(evicted);
            }
            queue.retain(self.time().now, |entry| !is_meant(entry));
            Turn::Write(evicted)
        };
        let evicted = self.change(name, About::Nobody, none, evict).await?;
        for entry in &evicted {
            self.tell_evicted(entry.id, &entry.session).await;
        }
        if !evicted.is_empty() && self.cells.bells().is_some() {
            // What was said went out before this is answered: whoever evicts may end as soon as we return.
            let _ = self.look(name).await;
        }
        Ok(evicted.len())
    }

    /// Tells its client that this claim is gone. A hint: unheard, the next renewal finds out.
    async fn tell_evicted(&self, id: ClaimId, session: &str) {
        if self.sessions.current().is_some_and(|ours| ours.id == session) {
            self.ears.ask(id);
        } else if let Some(bells) = self.cells.bells() {
            bells.ring(session, text::evicted(id)).await;
        }
    }
}
