//! Renewals and heartbeats: a keep-alive for each lease, and a look at each key.
//!
//! The two go out together. A claim is told that it holds, or waits, only if both its lease was
//! renewed and its key is still the same: a lease can outlive its key (a person deleted it), and
//! nobody else would notice. How long it lasts counts from before the keep-alive was sent, and is
//! what etcd granted, if that is less than what was asked for (scenario 83).
//!
//! One key is looked at for a holder. Waiters share one look at the queue for each lock; one that
//! stands far back in a long queue looks only at its own key and at the one before it.

use std::collections::HashMap;

use super::Shared;
use super::ask::{Found, get, range};
use super::claims::Known;
use super::fault::Failure;
use super::keepalive::Pending;
use super::leases::delay;
use super::proto::RangeRequest;
use super::queue::{Queue, end_of};
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{Claim, Kind, Moment, Name, Token};

/// From how far back a waiter does not look at the whole queue each time.
const FAR: usize = 64;
/// How many of this client's waiters on one lock look at the whole queue together.
const TOGETHER: usize = 8;

/// Where the answer about a claim is, among those to many ranges.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// Its own key.
    Own(usize),
    /// Its own key, and the one before it just after.
    Pair(usize),
    /// The whole queue.
    Queue(usize),
}

/// How a claim stands.
enum Stands {
    Holds { token: Token, lease: i64 },
    Waits { place: Place, lease: i64, first: bool },
    Gone,
}

impl Shared {
    /// [`Store::renew`](leasehold_core::store::Store::renew).
    pub(super) async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>, Failure> {
        let begun = self.leases.now();
        let mut beats = Vec::with_capacity(renewals.len());
        for Renew { claim, .. } in renewals {
            beats.push(match self.claims.get(claim.id) {
                // What is sent now would only make the lock-delay longer.
                Some(_) if self.claims.is_in_delay(claim, begun) => None,
                Some(known) => Some((known.lease.id, self.keep_alives.send(known.lease.id).await?)),
                None => None,
            });
        }
        let (ranges, looks) = self.looks(renewals);
        let found = self.client.ranges(ranges).await?;
        let mut queues = HashMap::new();
        let mut answers = Vec::with_capacity(renewals.len());
        for ((renew, beat), look) in renewals.iter().zip(beats).zip(looks) {
            let stands = self.stands(&renew.claim, look, &found, &mut queues);
            // What was answered of some is not lost with the others.
            answers.push(match self.answer(renew, begun, beat, stands).await {
                Err(Failure::Passing(error) | Failure::Slow(error)) if renewals.len() > 1 => {
                    Renewal::unknown(&error)
                }
                answer => answer?,
            });
        }
        Ok(answers)
    }

    /// What has to be looked at, and where each claim's answer will be.
    fn looks(&self, renewals: &[Renew]) -> (Vec<RangeRequest>, Vec<Look>) {
        let mut waiting: HashMap<&Name, usize> = HashMap::new();
        for Renew { claim, .. } in renewals {
            *waiting.entry(&claim.name).or_default() += 1;
        }
        let mut ranges = Vec::new();
        let mut shared: HashMap<(&Name, bool), usize> = HashMap::new();
        let look = |Renew { claim, .. }: &'_ Renew| -> Option<Look> {
            let known = self.claims.get(claim.id)?;
            let at = ranges.len();
            if known.holds {
                ranges.push(RangeRequest { keys_only: true, ..get(self.key(claim)) });
                return Some(Look::Own(at));
            }
            let (before, _) = known.behind.filter(|(_, ahead)| *ahead > FAR)?;
            if waiting.get(&claim.name).is_some_and(|n| *n >= TOGETHER) {
                return None;
            }
            ranges.push(RangeRequest { keys_only: true, ..get(self.key(claim)) });
            ranges.push(RangeRequest { keys_only: true, ..get(before) });
            Some(Look::Pair(at))
        };
        let mut alone: Vec<Option<Look>> = renewals.iter().map(look).collect();
        let mut looks = Vec::with_capacity(renewals.len());
        for (Renew { claim, .. }, alone) in renewals.iter().zip(alone.drain(..)) {
            looks.push(alone.unwrap_or_else(|| {
                // In a mutex all weigh the same; only of a claim that somebody else made for us we
                // must see whether it has departed.
                let keys_only = claim.kind == Kind::Mutex && self.claims.get(claim.id).is_some();
                let at = *shared.entry((&claim.name, keys_only)).or_insert_with(|| {
                    let prefix = self.prefix(&claim.name);
                    let all = range(prefix.clone(), end_of(&prefix));
                    ranges.push(RangeRequest { keys_only, ..all });
                    ranges.len() - 1
                });
                Look::Queue(at)
            }));
        }
        (ranges, looks)
    }

    fn stands(
        &self,
        claim: &Claim,
        look: Look,
        found: &[Found],
        queues: &mut HashMap<usize, Queue>,
    ) -> Stands {
        let known = self.claims.get(claim.id);
        let first = |at: usize| found.get(at).and_then(|f| f.kvs.first());
        // Another revision: a late duplicate of the join has made another place, or another claim
        // has the lease by now.
        let is_its = |made: Token| {
            known.as_ref().and_then(|known| known.token).is_none_or(|told| told == made)
        };
        let own = |at: usize| {
            let kv = first(at)?;
            let made = u64::try_from(kv.create_revision).ok().and_then(Token::new)?;
            is_its(made).then_some((made, kv))
        };
        match look {
            Look::Own(at) => match (own(at), &known) {
                (Some((token, kv)), Some(_)) => Stands::Holds { token, lease: kv.lease },
                _ => Stands::Gone,
            },
            Look::Pair(at) => {
                let Some((token, kv)) = own(at) else { return Stands::Gone };
                let ahead = known.as_ref().map_or(0, |known| known.ahead);
                // Left and made again, it is behind.
                if first(at + 1).is_none_or(|before| before.create_revision > kv.create_revision) {
                    // It learns its true place next time.
                    self.claims.note(claim.id, |known| known.behind = None);
                }
                let place = Place { ahead, head_remaining: None, token: Some(token) };
                Stands::Waits { place, lease: kv.lease, first: false }
            }
            Look::Queue(at) => {
                let queue = queues.entry(at).or_insert_with(|| {
                    let kvs = found.get(at).map(|f| f.kvs.as_slice()).unwrap_or_default();
                    Queue::of(&self.prefix(&claim.name), kvs)
                });
                self.stands_in(queue, claim, known.as_ref(), is_its)
            }
        }
    }

    /// How a claim stands in a queue that was read whole.
    fn stands_in(
        &self,
        queue: &Queue,
        claim: &Claim,
        known: Option<&Known>,
        is_its: impl Fn(Token) -> bool,
    ) -> Stands {
        let place = match known {
            Some(known) => queue.position(&self.key_on(&claim.name, known.lease.id)),
            None => queue.find(claim.id),
        };
        let Some(place) = place else { return Stands::Gone };
        let entry = queue.entries.get(place).filter(|e| !e.departed && is_its(e.token));
        let Some(entry) = entry else { return Stands::Gone };
        let (token, lease) = (entry.token, entry.lease);
        if place < queue.granted {
            return Stands::Holds { token, lease };
        }
        self.claims.note(claim.id, |known| {
            known.ahead = place;
            if let Some((_, ahead)) = &mut known.behind {
                *ahead = place;
            }
        });
        let first = place == queue.granted && claim.kind != Kind::Mutex;
        let place = Place { ahead: place, head_remaining: None, token: Some(token) };
        Stands::Waits { place, lease, first }
    }

    async fn answer(
        &self,
        renew: &Renew,
        begun: Moment,
        beat: Option<(i64, Pending)>,
        stands: Stands,
    ) -> Result<Renewal, Failure> {
        let Renew { claim, lease: asked } = renew;
        if self.claims.is_in_delay(claim, begun) {
            return Ok(Renewal::Lost);
        }
        let its = match &stands {
            Stands::Gone => return Ok(self.lost(claim)),
            Stands::Holds { lease, .. } | Stands::Waits { lease, .. } => *lease,
        };
        let mut alive = match beat {
            Some((lease, pending)) if lease == its => self.keep_alives.answer(pending).await?,
            // Its key hangs on a lease that another client of ours got for it.
            _ => self.keep_alives.ask(its).await?,
        };
        // An answer that was on its way already may leave less than a place is believed to be good for.
        let waits = matches!(stands, Stands::Waits { .. });
        let delay = delay(claim);
        let enough = begun.plus(claim.waiter_lease).plus(delay);
        if waits && alive.is_some_and(|alive| alive.ends() < enough) {
            alive = self.keep_alives.ask(its).await?;
        }
        let Some(alive) = alive else { return Ok(self.lost(claim)) };
        // The answer came after its time was over: its holder has lost it, and must not have it again.
        if self.claims.is_in_delay(claim, self.leases.now()) {
            return Ok(Renewal::Lost);
        }
        self.claims.renewed(claim.id, its, alive.ends());
        Ok(match stands {
            Stands::Holds { token, .. } => {
                self.claims.holds(claim.id, token);
                // The caller counts from before we began.
                let left = alive.ends().minus(delay).since(begun).min(*asked);
                self.claims.holds_for(claim, begun, left);
                Renewal::Holding { token, remaining: Some(left) }
            }
            Stands::Waits { place, first, .. } => {
                self.claims.holds_for(claim, begun, claim.waiter_lease);
                if first {
                    // The first that does not fit watches those who hold; does it know?
                    self.waiters.look(claim.id);
                }
                Renewal::Waiting(place)
            }
            Stands::Gone => Renewal::Lost,
        })
    }

    /// The claim has no place any more; its lease is not used again.
    fn lost(&self, claim: &Claim) -> Renewal {
        self.abandon(claim);
        Renewal::Lost
    }
}
