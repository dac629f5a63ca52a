//! Renewals and heartbeats: a keep-alive for each lease, and a read of each key.
//!
//! Both are sent at the same time. A claim is reported as a holder or a waiter only if its lease
//! was renewed and its key is still the same. A lease can outlive its key, for example if an
//! operator deleted the key, and no other check would notice. The remaining time is counted from
//! before the keep-alive was sent. It is the smaller of the granted and the requested time
//! (scenario 83).
//!
//! For a holder, the client reads one key. The waiters on one lock share one read of its queue. A
//! waiter far back in a long queue reads only its own key and the key ahead of it.

use std::collections::HashMap;

use super::Shared;
use super::claims::ClaimRecord;
use super::fault::Failure;
use super::keepalive::Pending;
use super::leases::delay;
use super::proto::RangeRequest;
use super::queue::{Queue, end_of};
use super::requests::{Found, get, range};
use leasehold_core::store::{Place, Renew, Renewal};
use leasehold_core::{Claim, Kind, Moment, Name, Token};

/// Number of claims ahead from which a waiter does not read the whole queue each time.
const FAR: usize = 64;
/// Number of this client's claims on one lock from which its waiters read the whole queue together.
const TOGETHER: usize = 8;

/// The part of the replies that contains the state of a claim. The indexes refer to the list of
/// ranges.
#[derive(Clone, Copy, Debug)]
enum ReplyPart {
    /// The claim's own key.
    Own(usize),
    /// The claim's own key, followed by the key ahead of it.
    Pair(usize),
    /// The whole queue.
    Queue(usize),
}

/// The state of a claim.
enum EntryState {
    Holds { token: Token, lease: i64 },
    Waits { place: Place, lease: i64, first: bool },
    Gone,
}

impl Shared {
    /// Implements [`Store::renew`](leasehold_core::store::Store::renew).
    pub(super) async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>, Failure> {
        let begun = self.leases.now();
        let mut beats = Vec::with_capacity(renewals.len());
        for Renew { claim, .. } in renewals {
            beats.push(match self.claims.get(claim.id) {
                // A keep-alive that is sent now would only extend the lock delay.
                Some(_) if self.claims.is_in_delay(claim, begun) => None,
                Some(known) => Some((known.lease.id, self.keep_alives.send(known.lease.id).await?)),
                None => None,
            });
        }
        let (ranges, parts) = self.reply_parts(renewals);
        let found = self.client.ranges(ranges).await?;
        let mut queues = HashMap::new();
        let mut answers = Vec::with_capacity(renewals.len());
        for ((renew, beat), part) in renewals.iter().zip(beats).zip(parts) {
            let state = self.entry_state(&renew.claim, part, &found, &mut queues);
            // If some claims fail, the results of the others are still returned.
            answers.push(match self.answer(renew, begun, beat, state).await {
                Err(Failure::Passing(error) | Failure::Slow(error)) if renewals.len() > 1 => {
                    Renewal::unknown(&error)
                }
                answer => answer?,
            });
        }
        Ok(answers)
    }

    /// Returns the ranges to read, and where each claim's state will be in the replies.
    fn reply_parts(&self, renewals: &[Renew]) -> (Vec<RangeRequest>, Vec<ReplyPart>) {
        let mut waiting: HashMap<&Name, usize> = HashMap::new();
        for Renew { claim, .. } in renewals {
            *waiting.entry(&claim.name).or_default() += 1;
        }
        let mut ranges = Vec::new();
        let mut shared: HashMap<(&Name, bool), usize> = HashMap::new();
        let part = |Renew { claim, .. }: &'_ Renew| -> Option<ReplyPart> {
            let known = self.claims.get(claim.id)?;
            let at = ranges.len();
            if known.holds {
                ranges.push(RangeRequest { keys_only: true, ..get(self.key(claim)) });
                return Some(ReplyPart::Own(at));
            }
            let (before, _) = known.behind.filter(|(_, ahead)| *ahead > FAR)?;
            if waiting.get(&claim.name).is_some_and(|n| *n >= TOGETHER) {
                return None;
            }
            ranges.push(RangeRequest { keys_only: true, ..get(self.key(claim)) });
            ranges.push(RangeRequest { keys_only: true, ..get(before) });
            Some(ReplyPart::Pair(at))
        };
        let mut alone: Vec<Option<ReplyPart>> = renewals.iter().map(part).collect();
        let mut parts = Vec::with_capacity(renewals.len());
        for (Renew { claim, .. }, alone) in renewals.iter().zip(alone.drain(..)) {
            parts.push(alone.unwrap_or_else(|| {
                // All claims for a mutex have the same weight, so the keys are enough. The value is
                // needed only for a claim that another client created, because it shows whether the
                // claim is in cooldown.
                let keys_only = claim.kind == Kind::Mutex && self.claims.get(claim.id).is_some();
                let at = *shared.entry((&claim.name, keys_only)).or_insert_with(|| {
                    let prefix = self.prefix(&claim.name);
                    let all = range(prefix.clone(), end_of(&prefix));
                    ranges.push(RangeRequest { keys_only, ..all });
                    ranges.len() - 1
                });
                ReplyPart::Queue(at)
            }));
        }
        (ranges, parts)
    }

    fn entry_state(
        &self,
        claim: &Claim,
        part: ReplyPart,
        found: &[Found],
        queues: &mut HashMap<usize, Queue>,
    ) -> EntryState {
        let known = self.claims.get(claim.id);
        let first = |at: usize| found.get(at).and_then(|f| f.kvs.first());
        // A key with another create revision is another entry. Either a late duplicate of the join
        // created it, or another claim uses the lease by now.
        let is_its = |made: Token| {
            known.as_ref().and_then(|known| known.token).is_none_or(|token| token == made)
        };
        let own = |at: usize| {
            let kv = first(at)?;
            let made = u64::try_from(kv.create_revision).ok().and_then(Token::new)?;
            is_its(made).then_some((made, kv))
        };
        match part {
            ReplyPart::Own(at) => match (own(at), &known) {
                (Some((token, kv)), Some(_)) => EntryState::Holds { token, lease: kv.lease },
                _ => EntryState::Gone,
            },
            ReplyPart::Pair(at) => {
                let Some((token, kv)) = own(at) else { return EntryState::Gone };
                let ahead = known.as_ref().map_or(0, |known| known.ahead);
                // If the key ahead was deleted and created again, it comes after this one now.
                if first(at + 1).is_none_or(|before| before.create_revision > kv.create_revision) {
                    // The next renewal reads the whole queue and finds the position.
                    self.claims.note(claim.id, |known| known.behind = None);
                }
                let place = Place { ahead, head_remaining: None, token: Some(token) };
                EntryState::Waits { place, lease: kv.lease, first: false }
            }
            ReplyPart::Queue(at) => {
                let queue = queues.entry(at).or_insert_with(|| {
                    let kvs = found.get(at).map(|f| f.kvs.as_slice()).unwrap_or_default();
                    Queue::of(&self.prefix(&claim.name), kvs)
                });
                self.entry_state_in(queue, claim, known.as_ref(), is_its)
            }
        }
    }

    /// Returns the state of a claim in a queue that was read as a whole.
    fn entry_state_in(
        &self,
        queue: &Queue,
        claim: &Claim,
        known: Option<&ClaimRecord>,
        is_its: impl Fn(Token) -> bool,
    ) -> EntryState {
        let place = match known {
            Some(known) => queue.position(&self.key_on(&claim.name, known.lease.id)),
            None => queue.find(claim.id),
        };
        let Some(place) = place else { return EntryState::Gone };
        let entry = queue.entries.get(place).filter(|e| !e.departed && is_its(e.token));
        let Some(entry) = entry else { return EntryState::Gone };
        let (token, lease) = (entry.token, entry.lease);
        if place < queue.granted {
            return EntryState::Holds { token, lease };
        }
        self.claims.note(claim.id, |known| {
            known.ahead = place;
            if let Some((_, ahead)) = &mut known.behind {
                *ahead = place;
            }
        });
        let first = place == queue.granted && claim.kind != Kind::Mutex;
        let place = Place { ahead: place, head_remaining: None, token: Some(token) };
        EntryState::Waits { place, lease, first }
    }

    async fn answer(
        &self,
        renew: &Renew,
        begun: Moment,
        beat: Option<(i64, Pending)>,
        state: EntryState,
    ) -> Result<Renewal, Failure> {
        let Renew { claim, lease: asked } = renew;
        if self.claims.is_in_delay(claim, begun) {
            return Ok(Renewal::Lost);
        }
        let its = match &state {
            EntryState::Gone => return Ok(self.lost(claim)),
            EntryState::Holds { lease, .. } | EntryState::Waits { lease, .. } => *lease,
        };
        let mut alive = match beat {
            Some((lease, pending)) if lease == its => self.keep_alives.answer(pending).await?,
            // The key is attached to a lease that another client got for the claim.
            _ => self.keep_alives.ask(its).await?,
        };
        // A reply that was already on its way may leave less time than the entry is assumed to be
        // valid.
        let waits = matches!(state, EntryState::Waits { .. });
        let delay = delay(claim);
        let enough = begun.plus(claim.waiter_lease).plus(delay);
        if waits && alive.is_some_and(|alive| alive.ends() < enough) {
            alive = self.keep_alives.ask(its).await?;
        }
        let Some(alive) = alive else { return Ok(self.lost(claim)) };
        // The reply arrived after the holder's time was over. The holder has lost the lock and must
        // not become its holder again.
        if self.claims.is_in_delay(claim, self.leases.now()) {
            return Ok(Renewal::Lost);
        }
        self.claims.renewed(claim.id, its, alive.ends());
        Ok(match state {
            EntryState::Holds { token, .. } => {
                self.claims.holds(claim.id, token);
                // The caller counts the remaining time from before this call began.
                let left = alive.ends().minus(delay).since(begun).min(*asked);
                self.claims.holds_for(claim, begun, left);
                Renewal::Holding { token, remaining: Some(left) }
            }
            EntryState::Waits { place, first, .. } => {
                self.claims.holds_for(claim, begun, claim.waiter_lease);
                if first {
                    // The first claim that does not fit watches the holders. Its task may not know
                    // yet that it is the first.
                    self.waiters.reread(claim.id);
                }
                Renewal::Waiting(place)
            }
            EntryState::Gone => Renewal::Lost,
        })
    }

    /// Handles a claim that has no entry any more. Its lease is not reused.
    fn lost(&self, claim: &Claim) -> Renewal {
        self.abandon(claim);
        Renewal::Lost
    }
}
