//! The conformance suite against wrong stores: each is wrong in one small way, and the case that is
//! named beside it must find it out. The same case passes on the same store without that mistake.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use leasehold::conformance::{cases, run};
use leasehold::queue::{Entry, Queue, StoreTime};
use leasehold::store::{
    Evict, Joined, LockInfo, MemoryStore, Mode, Renew, Renewal, Reweighed, Signal, Standing, Store,
    StoreInfo, Wakeup,
};
use leasehold::{Builder, Claim, ClaimId, Error, ErrorKind, Holder, Kind, Name, Result, Token};
use serde_json::Value;
use tokio::sync::Notify;

macro_rules! mutants {
    ($($(#[doc = $doc:literal])+ $wrong:ident => $case:ident,)+) => {
        /// What is wrong with a store.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(clippy::enum_variant_names, reason = "all are wrong; some are `Wrong…` besides")]
        enum Wrong {
            $($(#[doc = $doc])+ $wrong,)+
        }

        /// Each mistake, and the case that finds it out.
        const MUTANTS: &[(Wrong, &str, fn(Arc<Mutant>))] =
            &[$((Wrong::$wrong, stringify!($case), |store| passes(store, cases::$case)),)+];
    };
}

mutants! {
    // Who holds.
    /// Now and then two hold a mutex.
    TwoHold => p1_one_holder_at_a_time,
    /// A writer comes in beside readers, if they are the only ones.
    WriterBesideReaders => p1_readers_share_and_writers_do_not,
    /// Readers do not wait for readers, even if a writer stands between them.
    ReadersOvertake => s17_a_writer_is_not_starved,
    /// There is one permit more than there should be.
    OnePermitMore => p1_permits_never_exceed_the_capacity,
    /// Who wants little is let in before who wants much.
    SmallOvertakes => the_queue_is_the_reference_queue,
    /// The last who came is the first who is served.
    LastComeFirstServed => p4_first_come_first_served,
    /// One more is said to be ahead.
    OneMoreAhead => the_queue_is_the_reference_queue,
    /// Who only tries is left standing in the queue.
    TryStands => the_queue_is_the_reference_queue,
    /// Who holds already, and tries, is told that it is taken.
    TryRefusesItsOwn => the_queue_is_the_reference_queue,
    /// Who asks again is put at the end of the queue.
    AskingAgainIsNew => p8_one_claim_one_grant,
    /// A reader and a mutex may have the same name.
    AnyKind => s16_two_kinds_of_one_name_are_a_mismatch,
    /// Two may believe in different numbers of permits.
    AnyCapacity => s16_two_kinds_of_one_name_are_a_mismatch,

    // Tokens.
    /// They begin anew once nobody is left.
    TokensBeginAnew => p3_tokens_rise,
    /// They begin anew after the last one's lease ended.
    TokensBeginAnewAfterExpiry => p3_tokens_rise,
    /// They begin anew after an eviction.
    TokensBeginAnewAfterEviction => p3_tokens_rise,

    // Leases.
    /// Dead holders stay.
    HoldersStay => p5_a_dead_holder_is_replaced,
    /// Dead readers stay.
    ReadersStay => p5_every_kind_is_freed_by_its_lease,
    /// Permits of the dead come back early.
    PermitsEndEarly => p5_every_kind_is_freed_by_its_lease,
    /// Leases are shorter than is told.
    LeasesEndEarly => p5_a_dead_holder_is_replaced,
    /// By very little.
    LeasesEndALittleEarly => s01_a_late_grant_counts_from_before_sending,
    /// The first renewal of a call counts, and all are told that theirs does.
    OnlyTheFirstIsRenewed => s92_many_held_locks_are_renewed_in_batches,
    /// Dead waiters stay.
    WaitersStay => s18_five_dead_waiters_cost_one_bound,
    /// A dead waiter is found out when its turn comes, and not before.
    WaitersDieOneByOne => s18_five_dead_waiters_cost_one_bound,
    /// What is unknown is renewed, as if it held.
    UnknownIsRenewed => p7_only_the_owner_releases_or_renews,
    /// What is gone comes back by a renewal.
    RenewalJoins => p7_only_the_owner_releases_or_renews,
    /// What has ended goes on by a renewal if nobody has asked for anything in between.
    RenewalRevives => s02_a_late_renewal_takes_nothing_from_who_waits,

    // Leaving.
    /// Who is not in the queue ends the hold of who is in front.
    AnybodyReleases => p7_only_the_owner_releases_or_renews,
    /// Who leaves for the second time lets one more in.
    SecondLeaveHandsOver => s07_a_second_leave_hands_over_nothing,
    /// Leaving is always said to have worked.
    LeavingAlwaysWorks => the_queue_is_the_reference_queue,
    /// Leaving is never said to have worked.
    LeavingNeverWorks => p8_one_claim_one_grant,
    /// Waiters cannot leave.
    WaitersCannotLeave => the_queue_is_the_reference_queue,

    // Lighter and heavier.
    /// A writer is told that it is a reader, and goes on as a writer.
    DowngradeIsForgotten => a_lost_reply_of_a_downgrade_is_recognised,
    /// What was done already is not found done.
    SecondDowngradeIsLost => a_lost_reply_of_a_downgrade_is_recognised,
    /// Any reader becomes a writer.
    UpgradeAlwaysWorks => a_reader_becomes_a_writer_only_if_nobody_else_holds,
    /// A reader becomes a writer only if nobody waits.
    UpgradeMindsWhoWaits => a_reader_becomes_a_writer_only_if_nobody_else_holds,

    // What is kept closed.
    /// A mutex is not, after a release.
    MutexIsNotKept => at_least_keeps_the_lock_taken,
    /// Permits are not, after a release.
    PermitsAreNotKept => at_least_keeps_every_kind_taken,
    /// Readers' places are not, after a release.
    ReadersAreNotKept => at_least_keeps_every_kind_taken,
    /// A second release opens it.
    SecondLeaveOpens => at_least_keeps_every_kind_taken,
    /// A person cannot open it.
    EvictionLeavesTheKept => at_least_keeps_every_kind_taken,
    /// A mutex is not, after a lease has ended.
    MutexHasNoDelay => s15_lock_delay_after_an_unclean_end_only,
    /// Permits are not, after a lease has ended.
    PermitsHaveNoDelay => s15_every_kind_stays_closed_for_the_delay,
    /// Readers' places are not, after a lease has ended.
    ReadersHaveNoDelay => s15_every_kind_stays_closed_for_the_delay,
    /// The whole lock is closed, where one permit is to be kept.
    DelayClosesAll => s15_every_kind_stays_closed_for_the_delay,
    /// A late release opens it.
    LateLeaveOpens => s15_a_late_leave_does_not_shorten_the_delay,
    /// It is, after a clean end as well.
    DelayAfterRelease => s15_lock_delay_after_an_unclean_end_only,

    // News.
    /// The first who is to be woken sleeps on.
    FirstWakeUpIsLost => p6_who_waits_is_told_without_a_heartbeat,
    /// What comes before somebody listens is lost.
    EarlyNewsIsLost => p6_who_waits_is_told_without_a_heartbeat,
    /// Who stopped listening is not told any more.
    DroppedNewsIsLost => p6_who_waits_is_told_without_a_heartbeat,
    /// Whoever waits is told that it holds.
    AllAreTold => p6_who_waits_is_told_without_a_heartbeat,
    /// One is told of another's token.
    WrongTokenIsTold => p6_who_waits_is_told_without_a_heartbeat,

    // What people ask.
    /// Nobody can remove a waiter.
    WaitersAreNotEvicted => people_evict_a_waiter_by_its_token,
    /// Instead of a waiter its holder is removed.
    HolderIsEvictedInstead => people_evict_a_waiter_by_its_token,
    /// Whoever stands behind the one with the token is removed too.
    AllBehindAreEvicted => people_evict_a_waiter_by_its_token,
    /// Nobody is told what a holder says of itself.
    LabelsAreForgotten => people_see_and_evict,
    /// Of several holders one is shown.
    OneHolderIsShown => holders_are_those_that_the_whole_queue_shows,
    /// `%` and `_` in a prefix stand for others.
    ListTakesPatterns => list_is_by_prefix_and_in_order,
    /// `*` and `?` in a prefix stand for others.
    ListTakesStars => list_is_by_prefix_and_in_order,
    /// What is asked for may stand anywhere in the name.
    ListTakesParts => list_is_by_prefix_and_in_order,
    /// Capitals are taken for small letters.
    ListIgnoresCase => list_is_by_prefix_and_in_order,
    /// The first that was made is the first in the list.
    ListIsByAge => list_is_by_prefix_and_in_order,
    /// What is not in use any more stays in the list.
    ListShowsTheFree => list_is_by_prefix_and_in_order,
    /// Two names that differ in their case are one lock.
    NamesIgnoreCase => s90_hostile_names_are_only_names,
    /// Blanks at the end of a name do not count.
    NamesAreTrimmed => s90_hostile_names_are_only_names,
}

/// A store that makes one mistake, or none.
#[derive(Debug)]
struct Mutant {
    wrong: Option<Wrong>,
    /// What it claims: everything.
    info: StoreInfo,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    locks: BTreeMap<Name, Lock>,
    last_token: u64,
    joined: usize,
    /// In the order in which they were used first.
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
    told: Mutex<Told>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Told {
    granted: Option<Token>,
    listened: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mutant {
    fn new(wrong: Option<Wrong>) -> Arc<Self> {
        let mut everything = MemoryStore::new().info().guarantees.clone();
        // It gives no hints.
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

    /// Where tokens are drawn from. Those who rely on a counter are found out without a clock.
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

    /// Under which name the lock is kept.
    fn key(&self, name: &Name) -> Name {
        let kept = match self.wrong {
            Some(Wrong::NamesIgnoreCase) => name.as_str().to_lowercase(),
            Some(Wrong::NamesAreTrimmed) => name.as_str().trim_end().to_owned(),
            _ => return name.clone(),
        };
        Name::new(kept).unwrap()
    }

    /// Works on the lock of `name` if it is in use.
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
        self.tell(lock);
        if lock.queue.is_empty() {
            state.last_token = match self.is(Wrong::TokensBeginAnew) {
                true => 0,
                false => state.last_token.max(lock.queue.last_token()),
            };
            state.locks.remove(&name);
        }
        Some(done)
    }

    /// Tells those that were granted something.
    fn tell(&self, lock: &mut Lock) {
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
            let mut told = locked(&waiter.told);
            told.granted = match self.wrong {
                Some(Wrong::FirstWakeUpIsLost) => continue,
                Some(Wrong::EarlyNewsIsLost) if !told.listened => continue,
                Some(Wrong::WrongTokenIsTold) => Token::new(token.get() + 1),
                _ => Some(token),
            };
            waiter.wake.notify_one();
        }
        if self.is(Wrong::AllAreTold) {
            for (id, waiter) in &lock.waiters {
                locked(&waiter.told).granted = token_of(&lock.queue, *id);
                waiter.wake.notify_one();
            }
        }
    }

    /// What the store takes the claim for.
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
        let departed = queue.entries().any(|e| e.standing == Standing::Departed);
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
            // Told as it was asked for.
            Joined::Holding { token, remaining: Some(_) } if !is_here => {
                Joined::Holding { token, remaining: Some(asked.lease) }
            }
            joined => joined,
        })
    }

    /// Changes the order, or lets one more in. Tells whether it did.
    fn lets_in(&self, queue: &mut Queue, claim: &Claim, now: u64, again: bool, nth: usize) -> bool {
        let (kind, capacity) = (queue.kind(), queue.capacity());
        let held: Vec<Entry> =
            queue.entries().filter(|e| e.standing != Standing::Waiting).cloned().collect();
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
        let standing = queue.entries().find(|e| e.id == claim.id).map(|e| e.standing);
        let mut keep = keep;
        match self.wrong {
            Some(Wrong::AnybodyReleases) if standing.is_none() => {
                let front = queue.entries().next().map(|e| e.id);
                front.map(|front| queue.leave(front, None, now));
            }
            Some(Wrong::SecondLeaveHandsOver) if standing.is_none() => {
                let capacity = queue.capacity();
                queue.resize(capacity * 2, now);
                queue.resize(capacity, now);
            }
            Some(Wrong::WaitersCannotLeave) if standing == Some(Standing::Waiting) => return true,
            Some(Wrong::MutexIsNotKept) if claim.kind == Kind::Mutex => keep = None,
            Some(Wrong::PermitsAreNotKept) if claim.kind == Kind::Semaphore => keep = None,
            Some(Wrong::ReadersAreNotKept) if is_reader(claim) => keep = None,
            Some(Wrong::SecondLeaveOpens | Wrong::LateLeaveOpens)
                if standing == Some(Standing::Departed) =>
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

    fn reweigh_here(&self, lock: &mut Lock, claim: &Claim, now: u64) -> Reweighed {
        let queue = &mut lock.queue;
        queue.settle(now);
        let waits = queue.entries().any(|e| e.standing == Standing::Waiting);
        let own = queue.entries().find(|e| e.id == claim.id).map(|e| (e.token, e.weight));
        let Some((token, weight)) = own else { return Reweighed::Lost };
        match self.wrong {
            Some(Wrong::DowngradeIsForgotten) if claim.weight < weight => Reweighed::Done { token },
            Some(Wrong::SecondDowngradeIsLost) if claim.weight == weight => Reweighed::Lost,
            Some(Wrong::UpgradeMindsWhoWaits) if claim.weight > weight && waits => Reweighed::Busy,
            Some(Wrong::UpgradeAlwaysWorks) => match queue.reweigh(claim, now) {
                Reweighed::Busy => Reweighed::Done { token },
                other => other,
            },
            _ => queue.reweigh(claim, now),
        }
    }

    fn evict_here(&self, lock: &mut Lock, which: Evict) -> usize {
        let now = self.now();
        let queue = &mut lock.queue;
        queue.settle(now);
        let standing = |token| queue.entries().find(|e| e.token == token).map(|e| e.standing);
        let waits = match which {
            Evict::Token(token) => standing(token) == Some(Standing::Waiting),
            Evict::Holders => false,
        };
        let departed = queue.entries().any(|e| e.standing == Standing::Departed);
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

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        let (mut state, now) = (locked(&self.state), self.now());
        let reweighed =
            self.with(&mut state, &claim.name, |lock| self.reweigh_here(lock, claim, now));
        Ok(reweighed.unwrap_or(Reweighed::Lost))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let key = self.key(&claim.name);
        let find = |state: &State| state.locks.get(&key)?.waiters.get(&claim.id).cloned();
        let Some(waiter) = find(&locked(&self.state)) else { return Ok(Signal::Ask) };
        let listened = std::mem::replace(&mut locked(&waiter.told).listened, true);
        if self.is(Wrong::DroppedNewsIsLost) && listened {
            std::future::pending::<()>().await;
        }
        loop {
            let granted = locked(&waiter.told).granted;
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

/// Changes what no call would change: the queue as it is written down.
fn edit(queue: &mut Queue, change: impl FnOnce(&mut Vec<Value>)) {
    let mut written = serde_json::to_value(&*queue).unwrap();
    change(written["entries"].as_array_mut().unwrap());
    *queue = serde_json::from_value(written).unwrap();
}

/// Whether a name begins with what the pattern matches.
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

/// Runs a case on a store; panics as the case does.
fn passes(store: Arc<Mutant>, case: impl AsyncFnOnce(&leasehold::conformance::Subject)) {
    let connect = move || {
        let store = store.clone();
        async move { Builder::default().store(store).unwrap() }
    };
    run(false, connect, case);
}

/// How many cases run at once: they wait most of the time.
const AT_ONCE: usize = 12;

/// A store with this mistake, or with none, and what is done with it.
type Job = (Option<Wrong>, fn(Arc<Mutant>));

/// Runs each job and tells which of them panicked, and with which words.
fn panics(jobs: &[Job]) -> Vec<Option<String>> {
    let next = AtomicUsize::new(0);
    let said = Mutex::new(vec![None; jobs.len()]);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::SeqCst);
                    let Some(&(wrong, case)) = jobs.get(i) else { return };
                    let ran = std::panic::catch_unwind(|| case(Mutant::new(wrong)));
                    locked(&said)[i] = ran.err().map(|panic| words(&*panic));
                }
            });
        }
    });
    said.into_inner().unwrap()
}

fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "no words".to_owned())
}

#[test]
fn each_wrong_store_fails_the_case_that_is_named_beside_it() {
    let jobs: Vec<_> = MUTANTS.iter().map(|&(wrong, _, case)| (Some(wrong), case)).collect();
    let mut missed = Vec::new();
    for (said, (wrong, case, _)) in panics(&jobs).into_iter().zip(MUTANTS) {
        match said {
            // That a case does not end is no finding of its own.
            Some(said) if !said.contains("the case was not done") => {
                println!("{wrong:?} fails {case}: {said}");
            }
            other => missed.push((wrong, case, other)),
        }
    }
    assert!(missed.is_empty(), "not found out: {missed:#?}");
}

#[test]
fn the_same_cases_pass_on_the_store_without_a_mistake() {
    let mut cases: Vec<_> = MUTANTS.iter().map(|&(_, case, run)| (case, run)).collect();
    cases.sort_by_key(|(case, _)| *case);
    cases.dedup_by_key(|(case, _)| *case);
    let jobs: Vec<_> = cases.iter().map(|&(_, case)| (None, case)).collect();
    let failed: Vec<_> = panics(&jobs)
        .into_iter()
        .zip(&cases)
        .filter_map(|(said, (case, _))| Some((case, said?)))
        .collect();
    assert!(failed.is_empty(), "not for their mistakes: {failed:#?}");
}
