//! The lock itself: a queue of claims, and the rule that determines the holders. Pure code, without
//! I/O or clocks.
//!
//! # The rule
//! Claims are in the order in which they joined. Each has a weight, and the lock has a capacity.
//! **A claim is granted if and only if the weights up to and including its own add up to at most
//! the capacity** ([`granted`]). A mutex has capacity 1, and a semaphore with n permits has
//! capacity n. In a read-write lock, a reader has weight 1, and a writer has the whole capacity as
//! its weight.
//!
//! # Why it is right
//! - *Exclusion.* The granted claims are the longest prefix that fits, so their weights never
//!   exceed the capacity. Removing a claim only lowers the sums of the claims after it, and joining
//!   only adds at the back. So no event takes a grant away: a grant stays valid until its own claim
//!   leaves, expires or is evicted.
//! - *Fairness.* A claim after one that does not fit does not fit either. So no claim overtakes
//!   another, a writer is not starved by readers, and each claim waits only for those that joined
//!   before it.
//! - *Tokens.* Each claim draws `max(last + 1, clock, seen + 1)` as it joins. `last` is the last
//!   token of this lock, and `clock` is [`StoreTime::stamp`]. `seen` is the highest token that the
//!   client knows, for a store that has lost its data. Tokens are in the order of the queue, and so
//!   are grants. So a later grant has a larger token.
//! - *Liveness.* Every entry has an expiry, except in a store without leases. Each call
//!   [settles](Queue::settle) first: in one step, it removes what has expired and grants what now
//!   fits.
//!
//! The weight of a holder can change ([`convert`](Queue::convert)): a writer becomes a reader, or a
//! single reader becomes a writer. A lower weight lowers the sums of the claims after it, as if one
//! of them had left. A higher weight is rejected unless there is no other holder. In that case, all
//! claims after it are waiters. So neither change takes a grant away, and the position and the
//! token stay.
//!
//! A join whose reply was lost is repeated. The queue finds the claim by its ID and returns its
//! current status, so a claim has at most one entry.
//!
//! A position can outlive its holder. With a lock-delay, an expired holder becomes a *departed*
//! entry (a cooldown), and so does a released one with `keep`. It keeps its weight until the
//! cooldown ends. It is an entry like all others, so the rule needs no exception.
//!
//! Times are in microseconds. A store has two clocks ([`StoreTime`]): leases are measured with
//! `now`, and tokens start from `stamp`. `expires <= now` means expired.

mod index;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use self::index::{Found, Index};
use crate::types::answer::{ClaimInfo, ClaimState, Converted, Evict, Joined, Mode, Place, Renewal};
use crate::types::claim::{Claim, ClaimId, Kind};
use crate::types::error::HolderInfo;
use crate::types::holder::Holder;
use crate::types::token::Token;

/// Returns how many claims at the front of the queue are granted. All kinds of lock use this rule.
///
/// ```
/// use leasehold::store::queue::granted;
/// assert_eq!(granted([1, 1, 1], 1), 1); // a mutex
/// assert_eq!(granted([1, 1, 9, 1], 9), 2); // two readers; the writer waits, and so do all claims after it
/// assert_eq!(granted([2, 2, 1], 3), 1); // a semaphore: no claim overtakes another
/// ```
pub fn granted(weights: impl IntoIterator<Item = u32>, capacity: u32) -> usize {
    let mut sum = 0_u64;
    let fits = |weight: &u32| {
        sum += u64::from(*weight);
        sum <= u64::from(capacity)
    };
    weights.into_iter().take_while(fits).count()
}

/// The store's clocks, as read by one call.
#[derive(Clone, Copy, Debug)]
pub struct StoreTime {
    /// The clock for leases, in microseconds.
    pub now: u64,
    /// The clock for tokens, in microseconds since 1970. It may step, so it must not measure leases
    /// unless the store has no better clock.
    pub stamp: u64,
}

/// The error for a name that is in use as another kind of lock or with another capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The kind of the lock in use.
    pub kind: Kind,
    /// The capacity of the lock in use.
    pub capacity: u32,
}

/// One position in the queue. Unknown fields in stored text are rejected, because writing the entry
/// back would lose them.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Entry {
    /// The ID of the claim.
    pub id: ClaimId,
    /// The token, drawn when the claim joined.
    pub token: Token,
    /// How much of the lock's capacity the claim takes.
    pub weight: u32,
    /// The state of the claim.
    #[cfg_attr(feature = "serde", serde(rename = "standing"))]
    pub state: ClaimState,
    /// The time at which the claim entered this state.
    pub since: u64,
    /// The time at which the position expires unless it is renewed, or `None` if it never expires.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub expires: Option<u64>,
    /// How long the position is kept after its holder has expired.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_zero"))]
    pub lock_delay: u64,
    /// The process that made the claim, as shown to people.
    pub holder: Arc<Holder>,
    /// Additional data of the store. (In the file store, this is the session that keeps the claim
    /// alive.)
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "String::is_empty"))]
    pub session: String,
}

#[cfg(feature = "serde")]
#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde calls")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The queue of one lock.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Queue {
    kind: Kind,
    capacity: u32,
    leases: bool,
    last: u64,
    entries: VecDeque<Entry>,
    /// A time before which nothing expires, or 0 if it is not known yet.
    #[cfg_attr(feature = "serde", serde(skip))]
    next_expiry: u64,
    /// Claims that were granted while they waited, and that the store has not notified yet.
    #[cfg_attr(feature = "serde", serde(skip))]
    fresh: Vec<ClaimId>,
    #[cfg_attr(feature = "serde", serde(skip))]
    index: Index,
}

impl Queue {
    /// Creates an empty queue. With `leases: false`, only cooldowns expire, and the store
    /// [removes](Self::retain) the claims of crashed clients itself.
    pub fn new(kind: Kind, capacity: u32, leases: bool) -> Self {
        let (entries, fresh, index) = (VecDeque::new(), Vec::new(), Index::default());
        Self { kind, capacity, leases, last: 0, entries, next_expiry: 0, fresh, index }
    }

    /// Adds an index that quickly finds a claim among thousands. For a long-lived queue that is
    /// still empty.
    pub(crate) fn indexed(self) -> Self {
        Self { index: Index::kept(), ..self }
    }

    /// Frees memory if the queue has allocated space for more than `room` entries.
    pub(crate) fn shrink_to(&mut self, room: usize) {
        if self.entries.capacity() > room {
            self.entries.shrink_to(room);
            self.index.shrink(self.entries.len());
        }
    }

    /// Restores a queue with leases that a store kept: the entries in order, and the highest token
    /// drawn.
    pub fn restored(kind: Kind, capacity: u32, last: u64, entries: Vec<Entry>) -> Self {
        Self { last, entries: entries.into(), ..Self::new(kind, capacity, true) }
    }

    /// Restores a queue without leases; see [`restored`](Self::restored).
    pub fn restored_without_leases(
        kind: Kind,
        capacity: u32,
        last: u64,
        entries: Vec<Entry>,
    ) -> Self {
        Self { last, entries: entries.into(), ..Self::new(kind, capacity, false) }
    }

    /// Returns whether entries expire.
    pub fn has_leases(&self) -> bool {
        self.leases
    }

    /// Returns the kind of the lock.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the total weight that can be granted at the same time.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the highest token drawn in this queue.
    pub fn last_token(&self) -> u64 {
        self.last
    }

    /// Raises the highest token drawn, so that later tokens are above `token`.
    pub fn raise_last_token(&mut self, token: u64) {
        self.last = self.last.max(token);
    }

    /// Returns all entries, in order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &Entry> {
        self.entries.iter()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the waiters that were granted since the last call and still hold the lock, for the
    /// store to notify. A claim that was granted and removed in the same step must not be notified.
    pub fn take_fresh_grants(&mut self) -> Vec<ClaimId> {
        if self.fresh.is_empty() {
            return Vec::new();
        }
        let mut fresh = std::mem::take(&mut self.fresh);
        let holds = |id: &ClaimId| {
            self.entries.iter().any(|e| e.id == *id && e.state == ClaimState::Holding)
        };
        fresh.retain(holds);
        fresh
    }

    /// Removes what has expired and grants what now fits.
    pub fn settle(&mut self, now: u64) {
        if now >= self.next_expiry {
            self.expire(now);
        }
        self.grant(now);
    }

    fn expire(&mut self, now: u64) {
        self.entries.retain_mut(|e| {
            let Some(expires) = e.expires.filter(|&t| t <= now) else { return true };
            if e.state != ClaimState::Holding || e.lock_delay == 0 {
                return false;
            }
            let reopens = expires.saturating_add(e.lock_delay);
            e.state = ClaimState::Cooldown;
            e.since = expires;
            e.expires = Some(reopens);
            reopens > now
        });
        let expiries = self.entries.iter().filter_map(|e| e.expires);
        self.next_expiry = expiries.min().unwrap_or(u64::MAX);
    }

    /// Records that something may expire at `time`. (A renewed entry expires later than recorded.)
    fn expect_expiry(&mut self, time: Option<u64>) {
        self.next_expiry = self.next_expiry.min(time.unwrap_or(u64::MAX));
    }

    fn grant(&mut self, now: u64) {
        let fit = granted(self.entries.iter().map(|e| e.weight), self.capacity);
        let waiting = |e: &&mut Entry| e.state == ClaimState::Waiting;
        for e in self.entries.iter_mut().take(fit).filter(waiting) {
            // The waiter's expiry stays. If the waiter has just crashed, the grant lasts no longer
            // than its position would have, unless it is renewed.
            e.state = ClaimState::Holding;
            e.since = now;
            self.fresh.push(e.id);
        }
    }

    /// Implements [`Store::join`](crate::store::Store::join) on this queue. `session` is kept with
    /// the entry.
    ///
    /// # Errors
    /// [`Mismatch`] if the queue is not empty and of another kind or capacity, or if the weight is
    /// 0 or above the capacity. An empty queue takes its kind and capacity from the claim.
    pub fn join(
        &mut self,
        claim: &Claim,
        mode: Mode,
        at: StoreTime,
        session: &str,
    ) -> Result<Joined, Mismatch> {
        self.settle(at.now);
        if let Some(i) = self.position(claim.id) {
            return Ok(self.ask(i, claim, at.now));
        }
        if self.entries.is_empty() {
            (self.kind, self.capacity) = (claim.kind, claim.capacity);
        }
        let same = self.kind == claim.kind && self.capacity == claim.capacity;
        if !same || claim.weight == 0 || claim.weight > self.capacity {
            return Err(Mismatch { kind: self.kind, capacity: self.capacity });
        }
        // Counting stops at the first claim that does not fit, because thousands may wait.
        let all = self.entries.iter().map(|e| e.weight).chain([claim.weight]);
        let fits = granted(all, self.capacity) > self.entries.len();
        if !fits && mode == Mode::Try {
            return Ok(Joined::Busy { holders: self.holders(at.now) });
        }
        let token = self.next_token(at.stamp, claim.seen);
        let lease = if fits { claim.lease } else { claim.waiter_lease };
        let expires = self.leases.then(|| at.now.saturating_add(micros(lease)));
        self.expect_expiry(expires);
        self.entries.push_back(Entry {
            id: claim.id,
            token,
            weight: claim.weight,
            state: if fits { ClaimState::Holding } else { ClaimState::Waiting },
            since: at.now,
            expires,
            lock_delay: micros(claim.lock_delay),
            holder: claim.holder.clone(),
            session: session.to_owned(),
        });
        self.index.joined(self.entries.iter().map(|e| (e.id, e.token)));
        Ok(match fits {
            true => Joined::Holding { token, remaining: self.leases.then_some(lease) },
            false => Joined::Waiting(self.place(self.entries.len() - 1, at.now)),
        })
    }

    /// Answers a repeated join of a claim that is already in the queue.
    fn ask(&mut self, i: usize, claim: &Claim, now: u64) -> Joined {
        match self.beat(i, claim.lease, claim.waiter_lease, now) {
            Renewal::Holding { token, remaining } => Joined::Holding { token, remaining },
            Renewal::Waiting(place) => Joined::Waiting(place),
            // The claim has become a cooldown. (`Unknown` does not occur in a queue.)
            Renewal::Lost | Renewal::Unknown { .. } => Joined::Busy { holders: self.holders(now) },
        }
    }

    /// Implements [`Store::renew`](crate::store::Store::renew) for one claim.
    pub fn renew(&mut self, claim: &Claim, lease: Duration, now: u64) -> Renewal {
        self.settle(now);
        match self.position(claim.id) {
            Some(i) => self.beat(i, lease, claim.waiter_lease, now),
            None => Renewal::Lost,
        }
    }

    /// Returns the state of a claim without settling or extending anything, or `None` if it is not
    /// in the queue or has expired.
    pub fn peek(&self, id: ClaimId, now: u64) -> Option<Renewal> {
        let i = self.position(id)?;
        let e = self.entries.get(i).filter(|e| e.expires.is_none_or(|t| t > now))?;
        match e.state {
            ClaimState::Holding => {
                let remaining = remaining(e.expires, now);
                Some(Renewal::Holding { token: e.token, remaining })
            }
            ClaimState::Waiting => Some(Renewal::Waiting(self.place(i, now))),
            ClaimState::Cooldown => None,
        }
    }

    /// Extends entry `i`. Never shortens it, because a late duplicate must not revoke an earlier
    /// reply.
    fn beat(&mut self, i: usize, lease: Duration, waiter_lease: Duration, now: u64) -> Renewal {
        let e = &mut self.entries[i];
        let lease = match e.state {
            ClaimState::Holding => lease,
            ClaimState::Waiting => waiter_lease,
            ClaimState::Cooldown => return Renewal::Lost,
        };
        e.expires = e.expires.map(|t| t.max(now.saturating_add(micros(lease))));
        if e.state == ClaimState::Waiting {
            return Renewal::Waiting(self.place(i, now));
        }
        Renewal::Holding { token: e.token, remaining: remaining(e.expires, now) }
    }

    /// Implements [`Store::convert`](crate::store::Store::convert) on this queue.
    ///
    /// Decreasing the weight only lowers the sums of the claims after it. Increasing it is rejected
    /// unless there is no other holder. In that case, the claim alone is the granted prefix, before
    /// and after, and no grant is taken away.
    pub fn convert(&mut self, claim: &Claim, now: u64) -> Converted {
        self.settle(now);
        let holds = |&i: &usize| self.entries[i].state == ClaimState::Holding;
        let Some(i) = self.position(claim.id).filter(holds) else { return Converted::Lost };
        let (before, after) = (self.entries[i].weight, claim.weight);
        let others = |(at, e): (usize, &Entry)| at != i && e.state != ClaimState::Waiting;
        let alone = !self.entries.iter().enumerate().any(others);
        if after == 0 || after > before && !(alone && after <= self.capacity) {
            return Converted::Busy;
        }
        self.entries[i].weight = after;
        self.grant(now);
        Converted::Done { token: self.entries[i].token }
    }

    /// Implements [`Store::leave`](crate::store::Store::leave) on this queue. Returns whether the
    /// claim was in it.
    pub fn leave(&mut self, id: ClaimId, keep: Option<Duration>, now: u64) -> bool {
        self.settle(now);
        let Some(i) = self.position(id) else { return false };
        let keep = keep.filter(|k| !k.is_zero() && self.entries[i].state == ClaimState::Holding);
        match keep {
            Some(keep) => {
                let e = &mut self.entries[i];
                e.state = ClaimState::Cooldown;
                e.since = now;
                e.expires = Some(now.saturating_add(micros(keep)));
                self.expect_expiry(Some(now.saturating_add(micros(keep))));
            }
            None if self.entries[i].state == ClaimState::Cooldown => {}
            None => {
                self.entries.remove(i);
                self.grant(now);
            }
        }
        true
    }

    /// Implements [`Store::evict`](crate::store::Store::evict) on this queue. Returns the removed
    /// entries, whose clients may be notified.
    pub fn evict(&mut self, which: Evict, now: u64) -> Vec<Entry> {
        self.settle(now);
        let is_meant = |e: &Entry| match which {
            Evict::Token(token) => e.token == token,
            Evict::Holders => e.state != ClaimState::Waiting,
        };
        let (removed, stay): (Vec<Entry>, Vec<Entry>) =
            std::mem::take(&mut self.entries).into_iter().partition(is_meant);
        self.entries = stay.into();
        self.grant(now);
        removed
    }

    /// Removes entries that the store knows to be dead, and grants what now fits.
    pub fn retain(&mut self, now: u64, alive: impl FnMut(&Entry) -> bool) {
        self.entries.retain(alive);
        self.grant(now);
    }

    /// Changes the capacity. No grant is taken away: if the granted weights exceed the new
    /// capacity, no further claim is granted until enough holders have left. Waiters that can never
    /// fit are removed.
    pub fn resize(&mut self, capacity: u32, now: u64) {
        self.settle(now);
        self.capacity = capacity;
        self.entries.retain(|e| e.state != ClaimState::Waiting || e.weight <= capacity);
        self.grant(now);
    }

    /// Returns a description of each claim.
    pub fn claims(&self, now: u64) -> Vec<ClaimInfo> {
        let shown = self.entries.iter().map(|e| {
            ClaimInfo::new(
                e.state,
                Holder::clone(&e.holder),
                Some(e.token),
                e.weight,
                Duration::from_micros(now.saturating_sub(e.since)),
                remaining(e.expires, now),
            )
        });
        shown.collect()
    }

    /// Returns the position of a claim, or `None` if it is not in the queue.
    pub fn position(&self, id: ClaimId) -> Option<usize> {
        // A claim that is released is usually at the front of the queue.
        if self.entries.front().is_some_and(|e| e.id == id) {
            return Some(0);
        }
        match self.index.place_of(id) {
            Found::Nowhere => return None,
            Found::Under(token) => {
                let found = self.entries.binary_search_by_key(&token, |e| e.token).ok();
                if let Some(i) = found.filter(|&i| self.entries[i].id == id) {
                    return Some(i);
                }
            }
            Found::Unknown => {}
        }
        self.entries.iter().position(|e| e.id == id)
    }

    fn next_token(&mut self, stamp: u64, seen: u64) -> Token {
        // 63 bits of microseconds last for 292,000 years. A wrong clock or a foreign `seen` must
        // not use them up. Either can raise the tokens to half of the range at most, so 2^62 draws
        // are left.
        let floor = stamp.max(seen.saturating_add(1)).min(Token::MAX / 2);
        let next = self.last.saturating_add(1).max(floor);
        let token = Token::new(next.clamp(1, Token::MAX)).unwrap_or_else(|| unreachable!());
        self.last = token.get();
        token
    }

    fn place(&self, i: usize, now: u64) -> Place {
        let first_waiting = self.entries.iter().position(|e| e.state == ClaimState::Waiting);
        let soonest = || self.entries.iter().take(i).filter_map(|e| e.expires).min();
        let head = if first_waiting == Some(i) { soonest() } else { None };
        Place { ahead: i, head_remaining: remaining(head, now), token: Some(self.entries[i].token) }
    }

    fn holders(&self, now: u64) -> Vec<HolderInfo> {
        let held = self.entries.iter().filter(|e| e.state != ClaimState::Waiting);
        let shown = held.map(|e| {
            let since = Duration::from_micros(now.saturating_sub(e.since));
            HolderInfo::new(Holder::clone(&e.holder), e.token, since)
        });
        shown.collect()
    }
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

fn remaining(expires: Option<u64>, now: u64) -> Option<Duration> {
    expires.map(|t| Duration::from_micros(t.saturating_sub(now)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::name::Name;

    const LEASE: u64 = 15_000_000;
    const WAITER: u64 = 6_000_000;

    fn claim(kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new("q").unwrap(), kind, weight, capacity).unwrap()
    }

    fn mutex() -> Claim {
        claim(Kind::Mutex, 1, 1)
    }

    fn at(now: u64) -> StoreTime {
        StoreTime { now, stamp: 1_000 + now }
    }

    fn join(q: &mut Queue, c: &Claim, now: u64) -> Joined {
        q.join(c, Mode::Wait, at(now), "").unwrap()
    }

    fn holds(joined: &Joined) -> Token {
        match joined {
            Joined::Holding { token, .. } => *token,
            other => panic!("expected a hold, got {other:?}"),
        }
    }

    #[test]
    fn release_hands_over_in_order() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let (a, b, c) = (mutex(), mutex(), mutex());
        let first = holds(&join(&mut q, &a, 0));
        assert!(matches!(join(&mut q, &b, 1), Joined::Waiting(Place { ahead: 1, .. })));
        assert!(matches!(join(&mut q, &c, 2), Joined::Waiting(Place { ahead: 2, .. })));
        assert!(q.leave(a.id, None, 3));
        assert_eq!(q.take_fresh_grants(), [b.id]);
        let second = holds(&join(&mut q, &b, 4));
        assert!(second > first);
        assert!(!q.leave(a.id, None, 5), "a second leave must return false");
    }

    // S06
    #[test]
    fn repeated_acquire_returns_the_same_grant_and_token() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let a = mutex();
        let first = holds(&join(&mut q, &a, 0));
        assert_eq!(holds(&join(&mut q, &a, 10)), first);
        assert_eq!(holds(&q.join(&a, Mode::Try, at(20), "").unwrap()), first);
        assert_eq!(q.entries().len(), 1);
    }

    // S15
    #[test]
    fn lock_delay_follows_only_an_unclean_end() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let delayed = Claim { lock_delay: Duration::from_secs(60), ..mutex() };
        holds(&join(&mut q, &delayed, 0));
        q.leave(delayed.id, None, 1);
        holds(&join(&mut q, &Claim { id: ClaimId::random().unwrap(), ..delayed.clone() }, 2));
        // The second claim never leaves. Its lease expires at 2 + LEASE, and then the delay begins.
        let next = mutex();
        let try_at = |q: &mut Queue, now| q.join(&next, Mode::Try, at(now), "").unwrap();
        assert!(matches!(try_at(&mut q, LEASE + 2), Joined::Busy { .. }));
        assert!(matches!(try_at(&mut q, LEASE + 2 + 59_999_999), Joined::Busy { .. }));
        holds(&try_at(&mut q, LEASE + 2 + 60_000_000));
    }

    #[test]
    fn cooldown_keeps_the_lock_unavailable_until_it_ends() {
        let mut q = Queue::new(Kind::Mutex, 1, false);
        let (a, b) = (mutex(), mutex());
        holds(&join(&mut q, &a, 0));
        q.leave(a.id, Some(Duration::from_micros(50)), 10);
        q.leave(a.id, None, 20);
        let Joined::Waiting(place) = join(&mut q, &b, 30) else { panic!("free too early") };
        assert_eq!(place.head_remaining, Some(Duration::from_micros(30)));
        holds(&join(&mut q, &b, 60));
    }

    // S16
    #[test]
    fn another_kind_or_capacity_is_a_mismatch_while_in_use() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let a = claim(Kind::Semaphore, 1, 3);
        holds(&join(&mut q, &a, 0));
        let have = Err(Mismatch { kind: Kind::Semaphore, capacity: 3 });
        let join = |q: &mut Queue, c: Claim| q.join(&c, Mode::Wait, at(1), "").map(|_| ());
        assert_eq!(join(&mut q, mutex()), have);
        assert_eq!(join(&mut q, claim(Kind::Semaphore, 1, 4)), have);
        assert_eq!(join(&mut q, claim(Kind::Semaphore, 4, 3)), have);
        assert_eq!(join(&mut q, claim(Kind::Semaphore, 0, 3)), have);
        q.leave(a.id, None, 2);
        join(&mut q, mutex()).unwrap();
    }

    // S17
    #[test]
    fn a_writer_is_not_starved_by_readers() {
        let mut q = Queue::new(Kind::RwLock, 8, true);
        let reader = || claim(Kind::RwLock, 1, 8);
        let (r1, w, r2) = (reader(), claim(Kind::RwLock, 8, 8), reader());
        holds(&join(&mut q, &r1, 0));
        join(&mut q, &w, 1);
        assert!(matches!(join(&mut q, &r2, 2), Joined::Waiting(_)), "a reader overtook a writer");
        q.leave(r1.id, None, 3);
        assert_eq!(q.take_fresh_grants(), [w.id]);
        q.leave(w.id, None, 4);
        assert_eq!(q.take_fresh_grants(), [r2.id]);
    }

    // S18
    #[test]
    fn crashed_waiters_cost_one_waiter_lease_in_total() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let holder = mutex();
        join(&mut q, &holder, 0);
        let dead: Vec<_> = (0..5).map(|_| mutex()).collect();
        for c in &dead {
            join(&mut q, c, 0);
        }
        let live = mutex();
        join(&mut q, &live, 0);
        // The holder leaves immediately. The first dead waiter gets the grant, which lasts only a
        // waiter's lease.
        q.leave(holder.id, None, 1);
        assert!(matches!(q.renew(&live, live.lease, WAITER - 1), Renewal::Waiting(_)));
        assert!(matches!(q.renew(&live, live.lease, WAITER), Renewal::Holding { .. }));
    }

    #[test]
    fn waiter_granted_and_evicted_in_one_step_is_not_notified() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let (a, b, c) = (mutex(), mutex(), mutex());
        join(&mut q, &a, 0);
        join(&mut q, &b, LEASE - 1);
        join(&mut q, &c, LEASE - 1);
        // Settling grants b, and the same call then evicts it as a holder.
        let evicted = q.evict(Evict::Holders, LEASE);
        assert_eq!(evicted.iter().map(|e| e.id).collect::<Vec<_>>(), [b.id]);
        assert_eq!(q.position(b.id), None);
        assert_eq!(q.take_fresh_grants(), [c.id]);
    }

    // P3
    #[test]
    fn tokens_increase_despite_an_absurd_seen_token() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let absurd = Claim { seen: u64::MAX, ..mutex() };
        let first = holds(&join(&mut q, &absurd, 0));
        q.leave(absurd.id, None, 1);
        assert!(holds(&join(&mut q, &mutex(), 2)) > first);
    }

    #[test]
    fn only_the_head_waiter_learns_when_to_poll() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let (a, b, c) = (mutex(), mutex(), mutex());
        join(&mut q, &a, 0);
        let Joined::Waiting(head) = join(&mut q, &b, 0) else { panic!() };
        let Joined::Waiting(behind) = join(&mut q, &c, 0) else { panic!() };
        assert_eq!(head.head_remaining, Some(Duration::from_micros(LEASE)));
        assert_eq!(behind.head_remaining, None);
    }

    #[test]
    fn downgrade_grants_waiting_readers_up_to_the_next_writer() {
        let mut q = Queue::new(Kind::RwLock, 8, true);
        let rw = |weight| claim(Kind::RwLock, weight, 8);
        let (w, r1, r2, w2, r3) = (rw(8), rw(1), rw(1), rw(8), rw(1));
        let token = holds(&join(&mut q, &w, 0));
        for c in [&r1, &r2, &w2, &r3] {
            join(&mut q, c, 1);
        }
        let lighter = Claim { weight: 1, ..w.clone() };
        assert_eq!(
            q.convert(&Claim { weight: 1, ..w2.clone() }, 2),
            Converted::Lost,
            "a waiter was converted"
        );
        assert_eq!(q.convert(&lighter, 2), Converted::Done { token });
        assert_eq!(q.take_fresh_grants(), [r1.id, r2.id]);
        assert_eq!(q.convert(&lighter, 3), Converted::Done { token }, "the same request again");
        assert_eq!(
            q.convert(&w, 4),
            Converted::Busy,
            "a reader became a writer while others hold the lock"
        );
        q.leave(r1.id, None, 5);
        q.leave(r2.id, None, 5);
        // The upgrade succeeds without another holder, and the waiting writer keeps waiting.
        assert_eq!(q.convert(&w, 6), Converted::Done { token });
        assert!(q.take_fresh_grants().is_empty());
        q.leave(w.id, None, 7);
        assert_eq!(q.take_fresh_grants(), [w2.id]);
        assert_eq!(q.convert(&w, 8), Converted::Lost);
    }

    #[test]
    fn reader_cannot_upgrade_during_a_cooldown() {
        let mut q = Queue::new(Kind::RwLock, 8, true);
        let (a, b) = (claim(Kind::RwLock, 1, 8), claim(Kind::RwLock, 1, 8));
        holds(&join(&mut q, &a, 0));
        let token = holds(&join(&mut q, &b, 0));
        q.leave(a.id, Some(Duration::from_micros(10)), 1);
        let heavier = Claim { weight: 8, ..b.clone() };
        assert_eq!(q.convert(&heavier, 2), Converted::Busy);
        assert_eq!(
            q.convert(&Claim { weight: 9, ..b }, 11),
            Converted::Busy,
            "converted to more than the capacity"
        );
        assert_eq!(q.convert(&heavier, 11), Converted::Done { token });
    }

    #[test]
    fn reducing_the_capacity_revokes_no_grant() {
        let mut q = Queue::new(Kind::Semaphore, 3, true);
        let permit = |w| claim(Kind::Semaphore, w, 3);
        let held: Vec<_> = (0..3).map(|_| permit(1)).collect();
        for c in &held {
            holds(&join(&mut q, c, 0));
        }
        let (waits, too_big) = (permit(1), permit(2));
        join(&mut q, &waits, 0);
        join(&mut q, &too_big, 0);
        q.resize(1, 1);
        assert_eq!(q.position(too_big.id), None);
        q.leave(held[0].id, None, 2);
        q.leave(held[1].id, None, 3);
        assert!(q.take_fresh_grants().is_empty());
        q.leave(held[2].id, None, 4);
        assert_eq!(q.take_fresh_grants(), [waits.id]);
    }

    #[test]
    fn tokens_increase_when_the_clock_steps_back() {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let mut last = 0;
        for stamp in [1_000, 999, 5, 2_000, 2_000] {
            let c = mutex();
            let joined = q.join(&c, Mode::Wait, StoreTime { now: 0, stamp }, "").unwrap();
            let token = holds(&joined).get();
            assert!(token > last && token >= stamp);
            last = token;
            q.leave(c.id, None, 0);
        }
        let seen = Claim { seen: 9_999, ..mutex() };
        assert!(holds(&join(&mut q, &seen, 0)).get() > 9_999);
    }
}
