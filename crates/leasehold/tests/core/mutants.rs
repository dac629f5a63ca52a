//! The conformance suite against faulty stores. Each store has one small mistake, and the case that
//! is listed beside the mistake must detect it. The same case passes on the same store without that
//! mistake.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use leasehold::conformance::{cases, run};
use leasehold::store::queue::{Entry, Queue, StoreTime};
use leasehold::store::{
    Claim, ClaimId, ClaimState, Converted, Evict, Joined, LockInfo, MemoryStore, Mode, Renew,
    Renewal, Signal, Store, StoreInfo, Wakeup,
};
use leasehold::{Builder, Error, ErrorKind, Holder, Kind, Name, Result, Token};
use serde_json::Value;
use tokio::sync::Notify;

macro_rules! mutants {
    ($($(#[doc = $doc:literal])+ $wrong:ident => $case:ident,)+) => {
        /// The mistake of a store.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(clippy::enum_variant_names, reason = "some names of mistakes begin with `Wrong`")]
        enum Wrong {
            $($(#[doc = $doc])+ $wrong,)+
        }

        /// Each mistake, and the case that detects it.
        const MUTANTS: &[(Wrong, &str, fn(Arc<Mutant>))] =
            &[$((Wrong::$wrong, stringify!($case), |store| passes(store, cases::$case)),)+];
    };
}

mutants! {
    // Holders.
    /// Occasionally, two claims hold a mutex.
    TwoHold => one_holder_at_a_time,
    /// A writer is granted while readers hold the lock, if there are no other waiters.
    WriterBesideReaders => readers_share_and_writers_do_not,
    /// A reader does not wait for readers, even if a writer is ahead of it in the queue.
    ReadersOvertake => a_writer_is_not_starved,
    /// There is one permit too many.
    OnePermitMore => permits_never_exceed_the_capacity,
    /// A claim for few permits is granted before an earlier claim for many.
    SmallOvertakes => store_behaves_like_the_reference_queue,
    /// The last waiter is granted first.
    LastComeFirstServed => first_come_first_served,
    /// The reported number of claims ahead is one too large.
    OneMoreAhead => store_behaves_like_the_reference_queue,
    /// A claim that only tries stays in the queue.
    TryStands => store_behaves_like_the_reference_queue,
    /// A holder that tries again gets the result that the lock is busy.
    TryRefusesItsOwn => store_behaves_like_the_reference_queue,
    /// A waiter that polls is moved to the end of the queue.
    AskingAgainIsNew => repeated_acquires_of_one_claim_get_one_grant,
    /// A reader and a mutex can use the same name.
    AnyKind => using_one_name_for_two_kinds_is_a_mismatch,
    /// Two claims can use different numbers of permits.
    AnyCapacity => using_one_name_for_two_kinds_is_a_mismatch,

    // Tokens.
    /// Tokens begin again when the queue becomes empty.
    TokensBeginAnew => each_grant_has_a_higher_token,
    /// Tokens begin again after the last lease has expired.
    TokensBeginAnewAfterExpiry => each_grant_has_a_higher_token,
    /// Tokens begin again after an eviction.
    TokensBeginAnewAfterEviction => each_grant_has_a_higher_token,

    // Leases.
    /// Dead holders are not removed.
    HoldersStay => crashed_holder_is_replaced_when_its_lease_expires,
    /// Dead readers are not removed.
    ReadersStay => expired_lease_frees_every_kind_of_lock,
    /// Dead holders of permits are removed too early.
    PermitsEndEarly => expired_lease_frees_every_kind_of_lock,
    /// Leases are shorter than reported.
    LeasesEndEarly => crashed_holder_is_replaced_when_its_lease_expires,
    /// Leases are very slightly shorter than reported.
    LeasesEndALittleEarly => lease_of_a_late_grant_counts_from_before_the_request,
    /// Only the first renewal of a call has an effect, but all of them report success.
    OnlyTheFirstIsRenewed => many_held_locks_are_renewed_in_batches,
    /// Dead waiters are not removed.
    WaitersStay => crashed_waiters_cost_one_lease_in_total,
    /// A dead waiter is removed only when the lock is passed to it.
    WaitersDieOneByOne => crashed_waiters_cost_one_lease_in_total,
    /// The renewal of an unknown claim succeeds as if it held the lock.
    UnknownIsRenewed => only_the_owner_releases_or_renews,
    /// A renewal adds a claim that is gone to the queue again.
    RenewalJoins => only_the_owner_releases_or_renews,
    /// A renewal revives an expired claim if there was no other call in between.
    RenewalRevives => late_renewal_does_not_take_the_lock_from_a_waiter,

    // Leaving.
    /// The release of a claim that is not in the queue ends the hold of the first holder.
    AnybodyReleases => only_the_owner_releases_or_renews,
    /// A second release of the same claim grants one more claim.
    SecondLeaveHandsOver => repeated_release_does_not_free_the_next_hold,
    /// A release always reports success.
    LeavingAlwaysWorks => store_behaves_like_the_reference_queue,
    /// A release never reports success.
    LeavingNeverWorks => repeated_acquires_of_one_claim_get_one_grant,
    /// Waiters cannot leave the queue.
    WaitersCannotLeave => store_behaves_like_the_reference_queue,

    // Changes of the weight.
    /// A downgrade reports success, but the claim stays a writer.
    DowngradeIsForgotten => downgrade_with_a_lost_reply_takes_effect_once,
    /// A repeated downgrade does not find that the claim already is a reader.
    SecondDowngradeIsLost => downgrade_with_a_lost_reply_takes_effect_once,
    /// Any reader can become a writer.
    UpgradeAlwaysWorks => upgrade_succeeds_only_without_other_holders,
    /// A reader can become a writer only if there are no waiters.
    UpgradeMindsWhoWaits => upgrade_succeeds_only_without_other_holders,

    // Cooldowns.
    /// A mutex has no cooldown after a release.
    MutexIsNotKept => min_hold_keeps_a_released_lock_unavailable,
    /// Permits have no cooldown after a release.
    PermitsAreNotKept => min_hold_keeps_every_kind_of_lock_unavailable,
    /// Readers have no cooldown after a release.
    ReadersAreNotKept => min_hold_keeps_every_kind_of_lock_unavailable,
    /// A second release ends the cooldown.
    SecondLeaveOpens => min_hold_keeps_every_kind_of_lock_unavailable,
    /// An eviction does not end the cooldown.
    EvictionLeavesTheKept => min_hold_keeps_every_kind_of_lock_unavailable,
    /// A mutex has no cooldown after a lease has expired.
    MutexHasNoDelay => lock_delay_follows_only_an_unclean_end,
    /// Permits have no cooldown after a lease has expired.
    PermitsHaveNoDelay => lock_delay_blocks_every_kind_of_lock,
    /// Readers have no cooldown after a lease has expired.
    ReadersHaveNoDelay => lock_delay_blocks_every_kind_of_lock,
    /// The cooldown of one permit makes the whole lock unavailable.
    DelayClosesAll => lock_delay_blocks_every_kind_of_lock,
    /// A late release ends the cooldown.
    LateLeaveOpens => late_release_does_not_shorten_the_lock_delay,
    /// There is a cooldown after a clean end too.
    DelayAfterRelease => lock_delay_follows_only_an_unclean_end,

    // Notifications.
    /// The first waiter to be notified is not notified.
    FirstWakeUpIsLost => waiter_is_notified_without_a_heartbeat,
    /// A notification is lost if it is sent before the waiter listens.
    EarlyNewsIsLost => waiter_is_notified_without_a_heartbeat,
    /// A waiter that stopped listening is not notified any more.
    DroppedNewsIsLost => waiter_is_notified_without_a_heartbeat,
    /// Every waiter is notified that it holds the lock.
    AllAreTold => waiter_is_notified_without_a_heartbeat,
    /// A waiter is notified with the token of another claim.
    WrongTokenIsTold => waiter_is_notified_without_a_heartbeat,

    // Calls for operators.
    /// A waiter cannot be evicted.
    WaitersAreNotEvicted => operator_evicts_a_waiter_by_its_token,
    /// A holder is evicted instead of a waiter.
    HolderIsEvictedInstead => operator_evicts_a_waiter_by_its_token,
    /// The claims after the one with the token are evicted too.
    AllBehindAreEvicted => operator_evicts_a_waiter_by_its_token,
    /// The label of a holder is lost.
    LabelsAreForgotten => operator_sees_holders_and_waiters_and_evicts,
    /// Only one of several holders is shown.
    OneHolderIsShown => holders_query_matches_the_full_queue,
    /// `%` and `_` in a prefix are treated as wildcards.
    ListTakesPatterns => list_filters_by_prefix_and_is_sorted,
    /// `*` and `?` in a prefix are treated as wildcards.
    ListTakesStars => list_filters_by_prefix_and_is_sorted,
    /// The list contains names that have the prefix anywhere.
    ListTakesParts => list_filters_by_prefix_and_is_sorted,
    /// The list ignores the case of letters.
    ListIgnoresCase => list_filters_by_prefix_and_is_sorted,
    /// The list is sorted by age instead of by name.
    ListIsByAge => list_filters_by_prefix_and_is_sorted,
    /// The list contains locks that are not in use any more.
    ListShowsTheFree => list_filters_by_prefix_and_is_sorted,
    /// Two names that differ only in case are one lock.
    NamesIgnoreCase => hostile_names_are_distinct_ordinary_locks,
    /// Blanks at the end of a name are ignored.
    NamesAreTrimmed => hostile_names_are_distinct_ordinary_locks,
}

/// A store that makes one mistake, or none.
#[derive(Debug)]
struct Mutant {
    wrong: Option<Wrong>,
    /// The information about the store, which claims all guarantees.
    info: StoreInfo,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    locks: BTreeMap<Name, Lock>,
    last_token: u64,
    joined: usize,
    /// The names, in the order in which they were first used.
    names: Vec<Name>,
}

#[derive(Debug)]
struct Lock {
    queue: Queue,
    waiters: HashMap<ClaimId, Arc<Waiter>>,
}

#[derive(Debug, Default)]
struct Waiter {
    lease: Duration,
    news: Mutex<News>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct News {
    granted: Option<Token>,
    listened: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mutant {
    fn new(wrong: Option<Wrong>) -> Arc<Self> {
        let mut everything = MemoryStore::new().info().guarantees.clone();
        // It sends no hints.
        (everything.evicted, everything.followed) = (Wakeup::Poll, Wakeup::Poll);
        let info = StoreInfo::new("mutant:", everything).local();
        let began = Instant::now() - Duration::from_secs(1);
        Arc::new(Self { wrong, info, began, state: Mutex::default() })
    }

    fn is(&self, wrong: Wrong) -> bool {
        self.wrong == Some(wrong)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap()
    }

    /// Returns the stamp for tokens. Mistakes in a counter are detected without a clock.
    fn stamp(&self) -> u64 {
        use Wrong::{TokensBeginAnew, TokensBeginAnewAfterEviction, TokensBeginAnewAfterExpiry};
        match self.wrong {
            Some(TokensBeginAnew | TokensBeginAnewAfterEviction | TokensBeginAnewAfterExpiry) => 1,
            _ => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                u64::try_from(since.as_micros()).unwrap()
            }
        }
    }

    /// Returns the name under which the lock is kept.
    fn key(&self, name: &Name) -> Name {
        let kept = match self.wrong {
            Some(Wrong::NamesIgnoreCase) => name.as_str().to_lowercase(),
            Some(Wrong::NamesAreTrimmed) => name.as_str().trim_end().to_owned(),
            _ => return name.clone(),
        };
        Name::new(kept).unwrap()
    }

    /// Runs `work` on the lock of `name` if it is in use.
    fn with<T>(
        &self,
        state: &mut State,
        name: &Name,
        work: impl FnOnce(&mut Lock) -> T,
    ) -> Option<T> {
        let name = self.key(name);
        let lock = state.locks.get_mut(&name)?;
        if self.is(Wrong::TokensBeginAnewAfterExpiry) {
            let was_used = !lock.queue.is_empty();
            lock.queue.settle(self.now());
            if was_used && lock.queue.is_empty() {
                lock.queue = Queue::new(lock.queue.kind(), lock.queue.capacity(), true);
                state.last_token = 0;
            }
        }
        let done = work(lock);
        self.notify(lock);
        if lock.queue.is_empty() {
            state.last_token = match self.is(Wrong::TokensBeginAnew) {
                true => 0,
                false => state.last_token.max(lock.queue.last_token()),
            };
            state.locks.remove(&name);
        }
        Some(done)
    }

    /// Notifies the claims that were granted.
    fn notify(&self, lock: &mut Lock) {
        let fresh = lock.queue.take_fresh_grants();
        for id in &fresh {
            let (Some(token), Some(waiter)) = (token_of(&lock.queue, *id), lock.waiters.get(id))
            else {
                continue;
            };
            if self.is(Wrong::WaitersDieOneByOne) {
                let expires = self.now() + u64::try_from(waiter.lease.as_micros()).unwrap();
                edit(&mut lock.queue, |entries| {
                    for entry in entries.iter_mut().filter(|e| e["id"] == id.to_hex()) {
                        entry["expires"] = expires.into();
                    }
                });
            }
            let mut notified = locked(&waiter.news);
            notified.granted = match self.wrong {
                Some(Wrong::FirstWakeUpIsLost) => continue,
                Some(Wrong::EarlyNewsIsLost) if !notified.listened => continue,
                Some(Wrong::WrongTokenIsTold) => Token::new(token.get() + 1),
                _ => Some(token),
            };
            waiter.wake.notify_one();
        }
        if self.is(Wrong::AllAreTold) {
            for (id, waiter) in &lock.waiters {
                locked(&waiter.news).granted = token_of(&lock.queue, *id);
                waiter.wake.notify_one();
            }
        }
    }

    /// Returns the claim as the store misinterprets it.
    fn misread(&self, claim: &Claim, queue: &Queue) -> Claim {
        let mut claim = claim.clone();
        let (semaphore, reader) = (claim.kind == Kind::Semaphore, is_reader(&claim));
        let hour = Duration::from_secs(3_600);
        match self.wrong {
            Some(Wrong::HoldersStay) => claim.lease = hour,
            Some(Wrong::ReadersStay) if reader => claim.lease = hour,
            Some(Wrong::PermitsEndEarly) if semaphore => claim.lease = claim.lease * 4 / 5,
            Some(Wrong::LeasesEndEarly) => claim.lease = claim.lease * 4 / 5,
            Some(Wrong::LeasesEndALittleEarly) => claim.lease = claim.lease * 97 / 100,
            Some(Wrong::WaitersStay | Wrong::WaitersDieOneByOne) => claim.waiter_lease = hour,
            Some(Wrong::MutexHasNoDelay) if claim.kind == Kind::Mutex => {
                claim.lock_delay = Duration::ZERO;
            }
            Some(Wrong::PermitsHaveNoDelay) if semaphore => claim.lock_delay = Duration::ZERO,
            Some(Wrong::ReadersHaveNoDelay) if reader => claim.lock_delay = Duration::ZERO,
            Some(Wrong::AnyKind) if !queue.is_empty() && queue.kind() != claim.kind => {
                (claim.kind, claim.capacity) = (queue.kind(), queue.capacity());
                claim.weight = claim.weight.min(claim.capacity);
            }
            Some(Wrong::AnyCapacity) if !queue.is_empty() && queue.kind() == claim.kind => {
                claim.capacity = queue.capacity();
            }
            Some(Wrong::LabelsAreForgotten) => {
                let mut holder = Holder::clone(&claim.holder);
                holder.label.clear();
                claim.holder = Arc::new(holder);
            }
            _ => {}
        }
        claim
    }

    fn join_here(&self, lock: &mut Lock, asked: &Claim, mode: Mode, nth: usize) -> Result<Joined> {
        let at = StoreTime { now: self.now(), stamp: self.stamp() };
        let queue = &mut lock.queue;
        queue.settle(at.now);
        let departed = queue.entries().any(|e| e.state == ClaimState::Cooldown);
        if self.is(Wrong::DelayClosesAll) && departed {
            let capacity = queue.capacity();
            edit(queue, |entries| entries[0]["weight"] = capacity.into());
        }
        let claim = self.misread(asked, queue);
        let is_here = queue.position(claim.id).is_some();
        match self.wrong {
            Some(Wrong::AskingAgainIsNew) if is_here => {
                queue.leave(claim.id, None, at.now);
            }
            Some(Wrong::TryRefusesItsOwn) if is_here && mode == Mode::Try => {
                return Ok(Joined::Busy { holders: Vec::new() });
            }
            _ => {}
        }
        let stands = if self.is(Wrong::TryStands) { Mode::Wait } else { mode };
        let join = |queue: &mut Queue, mode| {
            let same = |m| Error::new(ErrorKind::Mismatch, format!("{m:?}"));
            queue.join(&claim, mode, at, "").map_err(same)
        };
        let mut joined = join(queue, stands)?;
        if matches!(joined, Joined::Waiting(_)) {
            let waiter = Waiter { lease: asked.waiter_lease, ..Waiter::default() };
            lock.waiters.entry(claim.id).or_insert_with(|| Arc::new(waiter));
            if self.lets_in(queue, &claim, at.now, is_here, nth) {
                joined = join(queue, mode)?;
            }
        }
        Ok(match joined {
            Joined::Waiting(_) if mode == Mode::Try && !is_here => {
                Joined::Busy { holders: Vec::new() }
            }
            Joined::Waiting(mut place) if self.is(Wrong::OneMoreAhead) => {
                place.ahead += 1;
                Joined::Waiting(place)
            }
            // Reports the requested lease, although the mistake may have changed it.
            Joined::Holding { token, remaining: Some(_) } if !is_here => {
                Joined::Holding { token, remaining: Some(asked.lease) }
            }
            joined => joined,
        })
    }

    /// Changes the order, or grants one claim too many. Returns whether it did.
    fn lets_in(&self, queue: &mut Queue, claim: &Claim, now: u64, again: bool, nth: usize) -> bool {
        let (kind, capacity) = (queue.kind(), queue.capacity());
        let held: Vec<Entry> =
            queue.entries().filter(|e| e.state != ClaimState::Waiting).cloned().collect();
        let sum: u32 = held.iter().map(|e| e.weight).sum();
        let waits = queue.entries().len() - held.len();
        let more = match self.wrong {
            Some(Wrong::TwoHold) if kind == Kind::Mutex && nth.is_multiple_of(8) => 2,
            Some(Wrong::WriterBesideReaders)
                if kind == Kind::RwLock && waits == 1 && held.iter().all(|e| e.weight == 1) =>
            {
                capacity * 2
            }
            Some(Wrong::OnePermitMore) if kind == Kind::Semaphore => capacity + 1,
            _ => 0,
        };
        if more > 0 {
            queue.resize(more, now);
            queue.resize(capacity, now);
            return true;
        }
        let to_front = match self.wrong {
            Some(Wrong::LastComeFirstServed) => true,
            Some(Wrong::ReadersOvertake) => is_reader(claim) && sum < capacity,
            Some(Wrong::SmallOvertakes) => {
                claim.kind == Kind::Semaphore && sum + claim.weight <= capacity
            }
            _ => false,
        };
        if to_front && !again {
            edit(queue, |entries| {
                let last = entries.pop().unwrap();
                entries.insert(held.len(), last);
            });
            queue.settle(now);
        }
        to_front && !again
    }

    fn renew_here(&self, lock: &mut Lock, renew: &Renew, nth: usize) -> Renewal {
        let (now, claim) = (self.now(), &renew.claim);
        let queue = &mut lock.queue;
        if self.is(Wrong::RenewalRevives) {
            let expires = now + u64::try_from(renew.lease.as_micros()).unwrap();
            let ended = queue.entries().any(|e| e.id == claim.id && e.expires <= Some(now));
            if ended {
                edit(queue, |entries| {
                    for entry in entries.iter_mut().filter(|e| e["id"] == claim.id.to_hex()) {
                        entry["expires"] = expires.into();
                    }
                });
            }
        }
        let lease = match self.wrong {
            Some(Wrong::OnlyTheFirstIsRenewed) if nth > 0 => Duration::ZERO,
            Some(Wrong::HoldersStay) => Duration::from_secs(3_600),
            _ => renew.lease,
        };
        let known = self.misread(claim, queue);
        let renewed = queue.renew(&known, lease, now);
        let front = queue.entries().next().map(|e| e.token);
        match renewed {
            Renewal::Lost if self.is(Wrong::UnknownIsRenewed) => {
                let token = front.unwrap_or(Token::new(1).unwrap());
                Renewal::Holding { token, remaining: Some(renew.lease) }
            }
            Renewal::Holding { token, .. } => {
                Renewal::Holding { token, remaining: Some(renew.lease) }
            }
            Renewal::Waiting(mut place) if self.is(Wrong::OneMoreAhead) => {
                place.ahead += 1;
                Renewal::Waiting(place)
            }
            other => other,
        }
    }

    fn leave_here(&self, lock: &mut Lock, claim: &Claim, keep: Option<Duration>) -> bool {
        let now = self.now();
        let queue = &mut lock.queue;
        queue.settle(now);
        let claim_state = queue.entries().find(|e| e.id == claim.id).map(|e| e.state);
        let mut keep = keep;
        match self.wrong {
            Some(Wrong::AnybodyReleases) if claim_state.is_none() => {
                let front = queue.entries().next().map(|e| e.id);
                front.map(|front| queue.leave(front, None, now));
            }
            Some(Wrong::SecondLeaveHandsOver) if claim_state.is_none() => {
                let capacity = queue.capacity();
                queue.resize(capacity * 2, now);
                queue.resize(capacity, now);
            }
            Some(Wrong::WaitersCannotLeave) if claim_state == Some(ClaimState::Waiting) => {
                return true;
            }
            Some(Wrong::MutexIsNotKept) if claim.kind == Kind::Mutex => keep = None,
            Some(Wrong::PermitsAreNotKept) if claim.kind == Kind::Semaphore => keep = None,
            Some(Wrong::ReadersAreNotKept) if is_reader(claim) => keep = None,
            Some(Wrong::SecondLeaveOpens | Wrong::LateLeaveOpens)
                if claim_state == Some(ClaimState::Cooldown) =>
            {
                queue.retain(now, |e| e.id != claim.id);
                return true;
            }
            Some(Wrong::DelayAfterRelease) if !claim.lock_delay.is_zero() => {
                keep = Some(claim.lock_delay);
            }
            _ => {}
        }
        lock.waiters.remove(&claim.id);
        queue.leave(claim.id, keep, now)
    }

    fn convert_here(&self, lock: &mut Lock, claim: &Claim, now: u64) -> Converted {
        let queue = &mut lock.queue;
        queue.settle(now);
        let waits = queue.entries().any(|e| e.state == ClaimState::Waiting);
        let own = queue.entries().find(|e| e.id == claim.id).map(|e| (e.token, e.weight));
        let Some((token, weight)) = own else { return Converted::Lost };
        match self.wrong {
            Some(Wrong::DowngradeIsForgotten) if claim.weight < weight => Converted::Done { token },
            Some(Wrong::SecondDowngradeIsLost) if claim.weight == weight => Converted::Lost,
            Some(Wrong::UpgradeMindsWhoWaits) if claim.weight > weight && waits => Converted::Busy,
            Some(Wrong::UpgradeAlwaysWorks) => match queue.convert(claim, now) {
                Converted::Busy => Converted::Done { token },
                other => other,
            },
            _ => queue.convert(claim, now),
        }
    }

    fn evict_here(&self, lock: &mut Lock, which: Evict) -> usize {
        let now = self.now();
        let queue = &mut lock.queue;
        queue.settle(now);
        let claim_state = |token| queue.entries().find(|e| e.token == token).map(|e| e.state);
        let waits = match which {
            Evict::Token(token) => claim_state(token) == Some(ClaimState::Waiting),
            Evict::Holders => false,
        };
        let departed = queue.entries().any(|e| e.state == ClaimState::Cooldown);
        match (self.wrong, which) {
            (Some(Wrong::WaitersAreNotEvicted), _) if waits => 0,
            (Some(Wrong::HolderIsEvictedInstead), _) if waits => {
                queue.evict(Evict::Holders, now).len()
            }
            (Some(Wrong::AllBehindAreEvicted), Evict::Token(token)) if waits => {
                queue.retain(now, |e| e.token < token);
                1
            }
            (Some(Wrong::EvictionLeavesTheKept), Evict::Holders) if departed => 0,
            _ => queue.evict(which, now).len(),
        }
    }

    fn lists(&self, name: &str, prefix: &str) -> bool {
        match self.wrong {
            Some(Wrong::ListTakesPatterns) => begins_like(name, prefix, '%', '_'),
            Some(Wrong::ListTakesStars) => begins_like(name, prefix, '*', '?'),
            Some(Wrong::ListTakesParts) => name.contains(prefix),
            Some(Wrong::ListIgnoresCase) => name.to_lowercase().starts_with(&prefix.to_lowercase()),
            _ => name.starts_with(prefix),
        }
    }
}

#[async_trait]
impl Store for Mutant {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let mut state = locked(&self.state);
        let key = self.key(&claim.name);
        state.joined += 1;
        let (nth, last) = (state.joined, state.last_token);
        if !state.names.contains(&key) {
            state.names.push(key.clone());
        }
        state.locks.entry(key).or_insert_with(|| {
            let mut queue = Queue::new(claim.kind, claim.capacity, true);
            queue.raise_last_token(last);
            Lock { queue, waiters: HashMap::new() }
        });
        let joined =
            self.with(&mut state, &claim.name, |lock| self.join_here(lock, claim, mode, nth));
        joined.unwrap()
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut answers = Vec::new();
        for (nth, renew) in renewals.iter().enumerate() {
            let renewed = self.with(&mut locked(&self.state), &renew.claim.name, |lock| {
                self.renew_here(lock, renew, nth)
            });
            let mut answer = renewed.unwrap_or(Renewal::Lost);
            if self.is(Wrong::RenewalJoins) && matches!(answer, Renewal::Lost) {
                let joined = self.join(&renew.claim, Mode::Try).await?;
                if let Joined::Holding { token, remaining } = joined {
                    answer = Renewal::Holding { token, remaining };
                }
            }
            answers.push(answer);
        }
        Ok(answers)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let mut state = locked(&self.state);
        let left = self.with(&mut state, &claim.name, |l| self.leave_here(l, claim, keep));
        Ok(match self.wrong {
            Some(Wrong::LeavingAlwaysWorks) => true,
            Some(Wrong::LeavingNeverWorks) => false,
            _ => left.unwrap_or(false),
        })
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let (mut state, now) = (locked(&self.state), self.now());
        let converted =
            self.with(&mut state, &claim.name, |lock| self.convert_here(lock, claim, now));
        Ok(converted.unwrap_or(Converted::Lost))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let key = self.key(&claim.name);
        let find = |state: &State| state.locks.get(&key)?.waiters.get(&claim.id).cloned();
        let Some(waiter) = find(&locked(&self.state)) else { return Ok(Signal::Ask) };
        let listened = std::mem::replace(&mut locked(&waiter.news).listened, true);
        if self.is(Wrong::DroppedNewsIsLost) && listened {
            std::future::pending::<()>().await;
        }
        loop {
            let granted = locked(&waiter.news).granted;
            if let Some(token) = granted {
                return Ok(Signal::Granted(token));
            }
            waiter.wake.notified().await;
        }
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let (mut state, now) = (locked(&self.state), self.now());
        self.with(&mut state, name, |lock| lock.queue.settle(now));
        Ok(state.locks.get(&self.key(name)).map(|lock| describe(name, &lock.queue, now)))
    }

    async fn holders(&self, name: &Name, _: Option<Token>) -> Result<Option<LockInfo>> {
        let mut info = self.read(name).await?;
        if self.is(Wrong::OneHolderIsShown) {
            info.iter_mut().for_each(|info| info.claims.truncate(1));
        }
        Ok(info)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let (mut state, now) = (locked(&self.state), self.now());
        let mut names = state.names.clone();
        if !self.is(Wrong::ListIsByAge) {
            names.sort();
        }
        names.retain(|name| self.lists(name.as_str(), prefix));
        let mut shown = Vec::new();
        for name in names {
            self.with(&mut state, &name, |lock| lock.queue.settle(now));
            match state.locks.get(&name) {
                Some(lock) => shown.push(describe(&name, &lock.queue, now)),
                None if self.is(Wrong::ListShowsTheFree) => {
                    shown.push(LockInfo::new(name, Kind::Mutex, 1, Vec::new()));
                }
                None => {}
            }
        }
        Ok(shown)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut state = locked(&self.state);
        let evicted = self.with(&mut state, name, |lock| {
            let evicted = self.evict_here(lock, which);
            if self.is(Wrong::TokensBeginAnewAfterEviction) && lock.queue.is_empty() {
                lock.queue = Queue::new(lock.queue.kind(), lock.queue.capacity(), true);
                return (evicted, true);
            }
            (evicted, false)
        });
        let (evicted, anew) = evicted.unwrap_or_default();
        if anew {
            state.last_token = 0;
        }
        Ok(evicted)
    }
}

fn describe(name: &Name, queue: &Queue, now: u64) -> LockInfo {
    LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now))
}

fn is_reader(claim: &Claim) -> bool {
    claim.kind == Kind::RwLock && claim.weight == 1
}

fn token_of(queue: &Queue, id: ClaimId) -> Option<Token> {
    queue.entries().find(|e| e.id == id).map(|e| e.token)
}

/// Makes a change that no call can make, in the serialized form of the queue.
fn edit(queue: &mut Queue, change: impl FnOnce(&mut Vec<Value>)) {
    let mut written = serde_json::to_value(&*queue).unwrap();
    change(written["entries"].as_array_mut().unwrap());
    *queue = serde_json::from_value(written).unwrap();
}

/// Returns whether the beginning of `name` matches the pattern.
fn begins_like(name: &str, pattern: &str, many: char, one: char) -> bool {
    let Some(first) = pattern.chars().next() else { return true };
    let rest = &pattern[first.len_utf8()..];
    let mut ends = name.char_indices().map(|(i, _)| i).chain([name.len()]);
    if first == many {
        return ends.any(|end| begins_like(&name[end..], rest, many, one));
    }
    match name.chars().next() {
        Some(c) if c == first || first == one => {
            begins_like(&name[c.len_utf8()..], rest, many, one)
        }
        _ => false,
    }
}

/// Runs a case on a store, and panics if the case does.
fn passes(store: Arc<Mutant>, case: impl AsyncFnOnce(&leasehold::conformance::Subject)) {
    let connect = move || {
        let store = store.clone();
        async move { Builder::default().store(store).unwrap() }
    };
    run(false, connect, case);
}

/// The number of cases that run at the same time. They wait most of the time.
const AT_ONCE: usize = 12;

/// A mistake, or none, and the case to run on a store with it.
type Job = (Option<Wrong>, fn(Arc<Mutant>));

/// Runs each job, and returns the panic messages of those that panicked.
fn panics(jobs: &[Job]) -> Vec<Option<String>> {
    let next = AtomicUsize::new(0);
    let messages = Mutex::new(vec![None; jobs.len()]);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::SeqCst);
                    let Some(&(wrong, case)) = jobs.get(i) else { return };
                    let ran = std::panic::catch_unwind(|| case(Mutant::new(wrong)));
                    locked(&messages)[i] = ran.err().map(|panic| words(&*panic));
                }
            });
        }
    });
    messages.into_inner().unwrap()
}

fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "a panic without a text".to_owned())
}

#[test]
fn each_faulty_store_fails_its_conformance_case() {
    let jobs: Vec<_> = MUTANTS.iter().map(|&(wrong, _, case)| (Some(wrong), case)).collect();
    let mut missed = Vec::new();
    for (message, (wrong, case, _)) in panics(&jobs).into_iter().zip(MUTANTS) {
        match message {
            // A case that does not end has not detected the mistake.
            Some(message) if !message.contains("the case was not done") => {
                println!("{wrong:?} fails {case}: {message}");
            }
            other => missed.push((wrong, case, other)),
        }
    }
    assert!(missed.is_empty(), "no case failed for these mistakes: {missed:#?}");
}

#[test]
fn same_cases_pass_on_the_correct_store() {
    let mut cases: Vec<_> = MUTANTS.iter().map(|&(_, case, run)| (case, run)).collect();
    cases.sort_by_key(|(case, _)| *case);
    cases.dedup_by_key(|(case, _)| *case);
    let jobs: Vec<_> = cases.iter().map(|&(_, case)| (None, case)).collect();
    let failed: Vec<_> = panics(&jobs)
        .into_iter()
        .zip(&cases)
        .filter_map(|(message, (case, _))| Some((case, message?)))
        .collect();
    assert!(failed.is_empty(), "these cases fail without the mistake: {failed:#?}");
}
