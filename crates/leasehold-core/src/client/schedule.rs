//! When each claim of a client is next looked at, and when something is sent for it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use super::waiting::Waiting;
use crate::base::clock::Moment;
use crate::words::claim::{Claim, ClaimId};

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

    /// The lease whose rhythm it follows.
    pub(super) fn period(&self) -> Duration {
        match self {
            Self::Lease(lease) => lease.claim.lease,
            Self::Waiting(waiting) => waiting.claim.waiter_lease,
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
}

#[derive(Debug, Default)]
pub(super) struct Schedule {
    pub(super) entries: HashMap<ClaimId, Entry>,
    pub(super) due: BTreeSet<(Moment, ClaimId)>,
    /// When the task looks next.
    pub(super) planned: Option<Moment>,
}

impl Schedule {
    pub(super) fn put(&mut self, entry: Entry) {
        let id = entry.kept.claim().id;
        let due = entry.due;
        if let Some(old) = self.entries.insert(id, entry) {
            self.due.remove(&(old.due, id));
        }
        self.due.insert((due, id));
    }

    pub(super) fn take(&mut self, id: ClaimId) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.due.remove(&(entry.due, id));
        Some(entry)
    }

    /// As [`take`](Self::take), but only what an answer is about: while a waiter's heartbeat was
    /// under way, its claim may have become a hold.
    pub(super) fn take_same(&mut self, kept: &Tracked) -> Option<Entry> {
        let id = kept.claim().id;
        if self.entries.get(&id)?.kept.is(kept) { self.take(id) } else { None }
    }

    pub(super) fn take_due(&mut self, now: Moment) -> Option<Entry> {
        let &(due, id) = self.due.first()?;
        if due > now { None } else { self.take(id) }
    }
}
