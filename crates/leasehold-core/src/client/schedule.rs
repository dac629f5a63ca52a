//! Records when each claim of a client is next due, and when its next request is to be sent.
//!
//! # What is kept, and why it is cheap
//! There are two maps. The first has every claim by ID. The second has, for each time, the IDs that
//! are due at that time. The times of regular requests are on a grid, so there are only a few,
//! however many claims there are. Claims that were added one after another are also processed one
//! after another, so 100,000 holds are renewed in their order in memory.
//!
//! Most holds end before they are due. So a forgotten claim is removed from the first map only. Its
//! ID stays in the second map, as does the old entry of a claim whose time has changed. An entry of
//! the second map counts only if the first map confirms it.
//!
//! When the second map has more than twice as many IDs as there are claims (plus [`STALE`]), it is
//! rebuilt from the entries that count. So it never stays large, and the cost of a rebuild is
//! spread over the calls of [`put`](Schedule::put). A claim whose ID is in the second map twice
//! with the same time is processed twice. The second time, its request has already been sent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use super::waiting::Waiting;
use crate::types::claim::{Claim, ClaimId, IdMap};
use crate::util::clock::Moment;

#[derive(Clone, Debug)]
pub(super) enum Tracked {
    Lease(Arc<Lease>),
    Waiting(Arc<Waiting>),
}

impl Tracked {
    pub(super) fn claim(&self) -> &Claim {
        match self {
            Self::Lease(lease) => &lease.claim,
            Self::Waiting(waiting) => &waiting.claim,
        }
    }

    /// Returns the claim as the store has it.
    pub(super) fn claim_now(&self) -> Claim {
        match self {
            Self::Lease(lease) => lease.claim_now().into_owned(),
            Self::Waiting(waiting) => waiting.claim.clone(),
        }
    }

    /// Returns the lease that determines how often requests are sent.
    pub(super) fn period(&self) -> Duration {
        match self {
            Self::Lease(lease) => lease.claim.lease,
            Self::Waiting(waiting) => waiting.claim.waiter_lease,
        }
    }

    /// Returns whether requests are sent regularly.
    pub(super) fn wants_renewal(&self) -> bool {
        match self {
            Self::Lease(lease) => lease.wants_renewal(),
            Self::Waiting(_) => true,
        }
    }

    /// Returns when the claim is next due, if its next request is to be sent at `send`.
    pub(super) fn next_due(&self, send: Moment, now: Moment) -> Moment {
        match self {
            Self::Lease(lease) => send.min(lease.next_change(now)),
            Self::Waiting(_) => send,
        }
    }

    /// Returns whether both are the same wait or the same hold. The wait and the hold of one claim
    /// are different.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Lease(a), Self::Lease(b)) => Arc::ptr_eq(a, b),
            (Self::Waiting(a), Self::Waiting(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) kept: Tracked,
    pub(super) due: Moment,
    /// The time of the next request, or [`Moment::NEVER`] while a request is in flight.
    pub(super) send: Moment,
    /// Whether the claim is to be polled immediately. A request that is already in flight does not
    /// count, because it may have been sent too early.
    pub(super) hurried: bool,
}

impl Entry {
    pub(super) fn new(kept: Tracked, due: Moment, send: Moment) -> Self {
        Self { kept, due, send, hurried: false }
    }
}

/// The minimum number of outdated IDs before a rebuild.
const STALE: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Schedule {
    entries: IdMap<Entry>,
    /// Every entry at its `due`, and outdated IDs.
    due: BTreeMap<Moment, Vec<ClaimId>>,
    /// The number of IDs in `due`.
    noted: usize,
    /// The time of the renewer's next round, if it is planned.
    pub(super) planned: Option<Moment>,
}

impl Schedule {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    pub(super) fn put(&mut self, entry: Entry) {
        let id = entry.kept.claim().id;
        let due = entry.due;
        self.entries.insert(id, entry);
        self.note(id, due);
    }

    /// Records in `due` when an entry is due.
    fn note(&mut self, id: ClaimId, due: Moment) {
        if self.noted > 2 * self.entries.len() + STALE {
            self.sweep();
        } else {
            self.due.entry(due).or_default().push(id);
            self.noted += 1;
        }
    }

    /// Rebuilds `due` from the current entries.
    fn sweep(&mut self) {
        self.due.clear();
        for (id, entry) in &self.entries {
            self.due.entry(entry.due).or_default().push(*id);
        }
        self.noted = self.entries.len();
        let room = 4 * self.entries.len() + STALE;
        if self.entries.capacity() > room {
            self.entries.shrink_to(room / 2);
        }
    }

    pub(super) fn take(&mut self, id: ClaimId) -> Option<Entry> {
        self.entries.remove(&id)
    }

    /// Removes an entry like [`take`](Self::take), but only if it is still the same wait or hold.
    /// While a waiter's heartbeat was in flight, its claim may have become a hold.
    pub(super) fn take_same(&mut self, kept: &Tracked) -> Option<Entry> {
        let id = kept.claim().id;
        if self.entries.get(&id)?.kept.is(kept) { self.take(id) } else { None }
    }

    /// Sets when the next request for this claim is sent and when the claim is next due, or both to
    /// now if the claim is [hurried](Self::hurry). Returns `false` if the claim was removed.
    pub(super) fn plan(&mut self, kept: &Tracked, send: Moment, due: Moment, now: Moment) -> bool {
        let id = kept.claim().id;
        let Some(entry) = self.entries.get_mut(&id).filter(|e| e.kept.is(kept)) else {
            return false;
        };
        // The claim was hurried after the answered request had been sent, so it is polled again.
        let (send, due) = if entry.hurried { (now.min(send), now.min(due)) } else { (send, due) };
        (entry.send, entry.due) = (send, due);
        self.note(id, due);
        true
    }

    /// Makes a request for this claim due now, or as soon as the request in flight is answered.
    /// Returns whether it is due now.
    pub(super) fn hurry(&mut self, id: ClaimId, now: Moment) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        entry.hurried = true;
        // `NEVER` means a request in flight, except for a claim for which no request is ever sent.
        if entry.send == Moment::NEVER && entry.kept.wants_renewal() {
            return false;
        }
        (entry.send, entry.due) = (now, now);
        self.note(id, now);
        true
    }

    /// Returns the first time at which a claim is due.
    pub(super) fn first_due(&mut self) -> Option<Moment> {
        loop {
            let mut first = self.due.first_entry()?;
            let due = *first.key();
            let counts = |id| self.entries.get(id).is_some_and(|entry| entry.due == due);
            match first.get().last() {
                Some(id) if counts(id) => return Some(due),
                Some(_) => {
                    first.get_mut().pop();
                    self.noted -= 1;
                }
                None => {
                    first.remove();
                }
            }
        }
    }

    /// Processes one claim that is due by now, and returns whether there was one. `check` returns
    /// when the claim is due again, or `None` to remove it.
    pub(super) fn check_next(
        &mut self,
        now: Moment,
        check: impl FnOnce(&mut Entry) -> Option<Moment>,
    ) -> bool {
        let due = self.first_due().filter(|due| *due <= now);
        let Some(ids) = due.and_then(|due| self.due.get_mut(&due)) else { return false };
        let Some(id) = ids.pop() else { return false };
        self.noted -= 1;
        let again = self.entries.get_mut(&id).and_then(|entry| {
            let due = check(entry)?;
            entry.due = due;
            Some(due)
        });
        match again {
            Some(due) => self.note(id, due),
            None => drop(self.take(id)),
        }
        true
    }

    /// Removes all entries, and returns them sorted by ID.
    pub(super) fn take_all(&mut self) -> Vec<Entry> {
        self.due.clear();
        self.noted = 0;
        let mut all: Vec<Entry> = self.entries.drain().map(|(_, entry)| entry).collect();
        all.sort_unstable_by_key(|entry| entry.kept.claim().id);
        all
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::types::answer::Place;
    use crate::types::claim::Kind;
    use crate::types::name::Name;

    fn entry(id: u128, due: u64) -> Entry {
        // Millions of entries are made, and a new claim draws a random ID.
        static CLAIM: LazyLock<Claim> =
            LazyLock::new(|| Claim::new(Name::new("a").unwrap(), Kind::Mutex, 1, 1).unwrap());
        let claim = Claim { id: ClaimId::from_u128(id), ..CLAIM.clone() };
        let place = Place { ahead: 1, head_remaining: None, token: None };
        let due = Moment::from_nanos(due);
        let kept = Tracked::Waiting(Waiting::new(claim, due, place));
        Entry::new(kept, due, due)
    }

    #[test]
    fn removed_claims_do_not_accumulate() {
        let mut schedule = Schedule::default();
        schedule.put(entry(0, 5));
        let id = ClaimId::from_u128;
        for n in 1..10_000 {
            schedule.put(entry(n, 7));
            schedule.take(id(n)).unwrap();
        }
        let noted = |schedule: &Schedule| schedule.due.values().map(Vec::len).sum::<usize>();
        assert!(noted(&schedule) <= STALE + 5, "{} times are kept for one claim", noted(&schedule));
        assert_eq!(schedule.first_due(), Some(Moment::from_nanos(5)));
        (1..5_000).for_each(|n| schedule.put(entry(n, 7)));
        (1..5_000).for_each(|n| drop(schedule.take(id(n))));
        for n in 1..20_000 {
            schedule.put(entry(n, 7));
            schedule.take(id(n)).unwrap();
        }
        assert_eq!(noted(&schedule), schedule.noted);
        assert!(schedule.noted < 1_000, "{}", schedule.noted);
        assert!(schedule.entries.capacity() < 1_000, "{}", schedule.entries.capacity());
    }

    #[test]
    fn claim_hurried_during_a_request_is_requested_again() {
        let (id, at) = (ClaimId::from_u128(1), Moment::from_nanos);
        let mut schedule = Schedule::default();
        schedule.put(entry(1, 9));
        assert!(!schedule.hurry(ClaimId::from_u128(2), at(3)), "an unknown claim was hurried");
        assert!(schedule.hurry(id, at(3)));
        assert_eq!(schedule.first_due(), Some(at(3)));
        let kept = schedule.entries[&id].kept.clone();
        // A request is sent, and the claim is hurried again before the result.
        assert!(schedule.check_next(at(3), |entry| {
            (entry.send, entry.hurried) = (Moment::NEVER, false);
            Some(at(50))
        }));
        assert!(!schedule.hurry(id, at(4)));
        assert!(schedule.plan(&kept, at(20), at(20), at(5)));
        assert_eq!((schedule.entries[&id].send, schedule.first_due()), (at(5), Some(at(5))));
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        /// The model searches all entries in each step.
        #[test]
        fn only_due_claims_are_visited_in_time_order(
            steps in prop::collection::vec((0_u8..5, 0_u128..5, 0_u64..9), 1..300),
        ) {
            let (mut schedule, mut plain) = (Schedule::default(), BTreeMap::new());
            for (what, id, time) in steps {
                let moment = Moment::from_nanos(time);
                match what {
                    0 | 1 => {
                        schedule.put(entry(id, time));
                        plain.insert(id, time);
                    }
                    2 => {
                        let taken = schedule.take(ClaimId::from_u128(id)).is_some();
                        prop_assert_eq!(taken, plain.remove(&id).is_some());
                    }
                    3 => {
                        let kept = schedule.entries.get(&ClaimId::from_u128(id));
                        let Some(kept) = kept.map(|entry| entry.kept.clone()) else { continue };
                        prop_assert!(schedule.plan(&kept, Moment::NEVER, moment, moment));
                        plain.insert(id, time);
                    }
                    _ => {
                        let first = plain.values().copied().min().filter(|due| *due <= time);
                        let mut seen = None;
                        let again = |due: Moment| due.as_nanos().is_multiple_of(2);
                        let checked = schedule.check_next(moment, |entry| {
                            seen = Some((entry.kept.claim().id.as_u128(), entry.due));
                            again(entry.due).then_some(moment)
                        });
                        prop_assert_eq!(checked, first.is_some());
                        prop_assert_eq!(seen.map(|(_, due)| due.as_nanos()), first);
                        if let Some((id, due)) = seen {
                            let kept = plain.remove(&id);
                            prop_assert_eq!(kept, first);
                            if again(due) {
                                plain.insert(id, time);
                            }
                        }
                    }
                }
                let first = plain.values().min().map(|due| Moment::from_nanos(*due));
                prop_assert_eq!(schedule.first_due(), first);
                let noted: usize = schedule.due.values().map(Vec::len).sum();
                prop_assert_eq!(schedule.noted, noted);
            }
        }
    }
}
