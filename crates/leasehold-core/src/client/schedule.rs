//! When each claim of a client is next looked at, and when something is sent for it.
//!
//! # What is kept, and why it is cheap
//! Two maps: every claim, by its id; and the ids that are due at one time, by that time. Times are on a
//! grid, so there are few of them for however many claims, and who came one after the other is looked at
//! one after the other: a hundred thousand holds are renewed in the order in which memory has them.
//!
//! Most holds end before they are due. So a claim that is forgotten is taken out of the first map alone, and
//! its id stays in the second, as that of a claim whose time was changed: what the second says counts only
//! if the first says so now. As soon as the second has twice as many ids as there are claims, and some, it is made anew
//! of those that count; so it is never large for long, and each [`put`](Schedule::put) pays for one claim's
//! part in the next making. An id that stands there twice is looked at twice, and the second look finds nothing to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use super::waiting::Waiting;
use crate::base::clock::Moment;
use crate::words::claim::{Claim, ClaimId, IdMap};

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

    /// The claim as it stands at the store.
    pub(super) fn claim_now(&self) -> Claim {
        match self {
            Self::Lease(lease) => lease.claim_now().into_owned(),
            Self::Waiting(waiting) => waiting.claim.clone(),
        }
    }

    /// The lease whose rhythm it follows.
    pub(super) fn period(&self) -> Duration {
        match self {
            Self::Lease(lease) => lease.claim.lease,
            Self::Waiting(waiting) => waiting.claim.waiter_lease,
        }
    }

    /// Whether it is asked about again and again.
    pub(super) fn wants_renewal(&self) -> bool {
        match self {
            Self::Lease(lease) => lease.wants_renewal(),
            Self::Waiting(_) => true,
        }
    }

    /// When it is to be looked at, if its next request is to be sent at `send`.
    pub(super) fn next_look(&self, send: Moment, now: Moment) -> Moment {
        match self {
            Self::Lease(lease) => send.min(lease.next_change(now)),
            Self::Waiting(_) => send,
        }
    }

    /// Whether both are the same wait or the same hold, and not the wait and the hold of one claim.
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
    /// When the next request is to be sent; [`Moment::NEVER`] while one is under way.
    pub(super) send: Moment,
    /// It is to be asked about at once, also where a request is under way that may have come too early.
    pub(super) hurried: bool,
}

impl Entry {
    pub(super) fn new(kept: Tracked, due: Moment, send: Moment) -> Self {
        Self { kept, due, send, hurried: false }
    }
}

/// How many ids that do not count are kept at least.
const STALE: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Schedule {
    entries: IdMap<Entry>,
    /// Every entry at its `due`, and others.
    due: BTreeMap<Moment, Vec<ClaimId>>,
    /// How many ids are in `due`.
    noted: usize,
    /// When the task looks next.
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

    /// Notes when an entry is due.
    fn note(&mut self, id: ClaimId, due: Moment) {
        if self.noted > 2 * self.entries.len() + STALE {
            self.sweep();
        } else {
            self.due.entry(due).or_default().push(id);
            self.noted += 1;
        }
    }

    /// Notes all anew.
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

    /// As [`take`](Self::take), but only what an answer is about: while a waiter's heartbeat was
    /// under way, its claim may have become a hold.
    pub(super) fn take_same(&mut self, kept: &Tracked) -> Option<Entry> {
        let id = kept.claim().id;
        if self.entries.get(&id)?.kept.is(kept) { self.take(id) } else { None }
    }

    /// Sends at `send`, and looks at `due`, or both now if it is [hurried](Self::hurry); `false` if it is not
    /// kept any more.
    pub(super) fn plan(&mut self, kept: &Tracked, send: Moment, due: Moment, now: Moment) -> bool {
        let id = kept.claim().id;
        let Some(entry) = self.entries.get_mut(&id).filter(|e| e.kept.is(kept)) else {
            return false;
        };
        // Somebody wants to know of what came after the request that is answered now.
        let (send, due) = if entry.hurried { (now.min(send), now.min(due)) } else { (send, due) };
        (entry.send, entry.due) = (send, due);
        self.note(id, due);
        true
    }

    /// Has this claim asked about now, or as soon as the request is answered that is under way.
    /// Tells whether there is something to look at now.
    pub(super) fn hurry(&mut self, id: ClaimId, now: Moment) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        entry.hurried = true;
        // Where none is ever sent, none is under way.
        if entry.send == Moment::NEVER && entry.kept.wants_renewal() {
            return false;
        }
        (entry.send, entry.due) = (now, now);
        self.note(id, now);
        true
    }

    /// When the first is due.
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

    /// Looks at one that is due by now. `look` says when it is due again, or `None` to keep it no longer.
    /// Tells whether there was one.
    pub(super) fn look(
        &mut self,
        now: Moment,
        look: impl FnOnce(&mut Entry) -> Option<Moment>,
    ) -> bool {
        let due = self.first_due().filter(|due| *due <= now);
        let Some(ids) = due.and_then(|due| self.due.get_mut(&due)) else { return false };
        let Some(id) = ids.pop() else { return false };
        self.noted -= 1;
        let again = self.entries.get_mut(&id).and_then(|entry| {
            let due = look(entry)?;
            entry.due = due;
            Some(due)
        });
        match again {
            Some(due) => self.note(id, due),
            None => drop(self.take(id)),
        }
        true
    }

    /// Takes all, by their ids.
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

    use proptest::prelude::*;

    use super::*;
    use crate::words::answer::Place;
    use crate::words::claim::Kind;
    use crate::words::name::Name;

    fn entry(id: u128, due: u64) -> Entry {
        let name = Name::new("a").unwrap();
        let claim = Claim::new(name, Kind::Mutex, 1, 1).unwrap();
        let claim = Claim { id: ClaimId::from_u128(id), ..claim };
        let place = Place { ahead: 1, head_remaining: None, token: None };
        let due = Moment::from_nanos(due);
        let kept = Tracked::Waiting(Waiting::new(claim, due, place));
        Entry::new(kept, due, due)
    }

    #[test]
    fn what_is_forgotten_leaves_nothing_behind() {
        let mut schedule = Schedule::default();
        schedule.put(entry(0, 5));
        let id = ClaimId::from_u128;
        for n in 1..10_000 {
            schedule.put(entry(n, 7));
            schedule.take(id(n)).unwrap();
        }
        let noted = |schedule: &Schedule| schedule.due.values().map(Vec::len).sum::<usize>();
        assert!(noted(&schedule) <= STALE + 5, "{} times of one claim", noted(&schedule));
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
    fn what_is_hurried_while_it_is_asked_about_is_asked_about_again() {
        let (id, at) = (ClaimId::from_u128(1), Moment::from_nanos);
        let mut schedule = Schedule::default();
        schedule.put(entry(1, 9));
        assert!(!schedule.hurry(ClaimId::from_u128(2), at(3)), "nobody's");
        assert!(schedule.hurry(id, at(3)));
        assert_eq!(schedule.first_due(), Some(at(3)));
        let kept = schedule.entries[&id].kept.clone();
        // It is sent, and hurried again before it is answered.
        assert!(schedule.look(at(3), |entry| {
            (entry.send, entry.hurried) = (Moment::NEVER, false);
            Some(at(50))
        }));
        assert!(!schedule.hurry(id, at(4)));
        assert!(schedule.plan(&kept, at(20), at(20), at(5)));
        assert_eq!((schedule.entries[&id].send, schedule.first_due()), (at(5), Some(at(5))));
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        /// As it would be if all were looked through each time.
        #[test]
        fn what_is_due_is_looked_at_in_order_of_time_and_nothing_else(
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
                        let looked = schedule.look(moment, |entry| {
                            seen = Some((entry.kept.claim().id.as_u128(), entry.due));
                            again(entry.due).then_some(moment)
                        });
                        prop_assert_eq!(looked, first.is_some());
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
