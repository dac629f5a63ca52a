//! What one waiting claim watches: its own child, and as many of those before it as must go first.

use std::future::{poll_fn, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use zookeeper_client::{EventType, OneshotWatcher, WatchedEvent};

use super::node::{Blocker, Stand};

/// What becomes of a claim that listens.
pub(super) enum Heard {
    /// So much has left that the claim fits.
    Free,
    /// What is still watched leaves room enough by now: one more must be.
    Lacking,
    /// Something else happened to its own child.
    Changed,
    /// Its own child was deleted, or the session is over.
    Over,
}

pub(super) type Event = Pin<Box<dyn Future<Output = WatchedEvent> + Send>>;

/// What is watched of one node.
pub(super) fn event(watcher: OneshotWatcher) -> Event {
    Box::pin(watcher.changed())
}

/// The watch on a holder's own child, from the time when it waited. The driver sends a request when
/// a watch is dropped before its node is deleted, so the claim keeps this until then.
pub(super) struct OwnWatch(#[expect(dead_code, reason = "it is kept, not read")] pub(super) Event);

impl std::fmt::Debug for OwnWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnWatch").finish_non_exhaustive()
    }
}

/// What a waiting claim watches.
pub(super) struct Watches {
    /// `None` once it has told.
    own: Option<Event>,
    others: Vec<(Blocker, Event)>,
    /// The next that can be watched when one of the others has left, nearest last.
    spare: Vec<Blocker>,
    /// How many were before it in the listing by which they were chosen, less those of them that left.
    pub(super) ahead: usize,
    /// By how much more than there is room for they weigh. Only what leaves of those that are watched, or
    /// were to be, is taken off: other listings, which heartbeats look at, lack by then some whose
    /// departure is news here still, and those would be taken off twice.
    excess: u64,
    /// How much may be before it when it holds.
    room: u64,
}

impl Watches {
    /// Watches nobody yet but its own child.
    pub(super) fn new(own: Event, stand: Stand) -> Self {
        let Stand { ahead, excess, room, mut spare, .. } = stand;
        spare.reverse();
        Self { own: Some(own), others: Vec::new(), spare, ahead, excess, room }
    }

    pub(super) fn watch(&mut self, blocker: Blocker, event: Event) {
        self.others.push((blocker, event));
    }

    /// The watch on the claim's own child.
    pub(super) fn into_own(self) -> Option<Event> {
        self.own
    }

    /// What is still watched, to be watched on.
    pub(super) fn take(self) -> (Option<Event>, Vec<(Blocker, Event)>) {
        (self.own, self.others)
    }

    /// Who is to be watched next, as long as those who are watched leave room enough.
    pub(super) fn lacks(&mut self) -> Lacks {
        let watched: u64 = self.others.iter().map(|(b, _)| u64::from(b.weight)).sum();
        if watched > self.room {
            return Lacks::Nobody;
        }
        // With none left to watch and more ahead than are known, those that are known have most
        // likely left before: of a mutex, the predecessor leaves when it has held, and so after all
        // others.
        if self.others.is_empty() && self.ahead > self.spare.len() {
            return Lacks::Unknown;
        }
        self.spare.pop().map_or(Lacks::Unknown, Lacks::One)
    }

    /// One of those has left, or was gone already; tells whether the claim fits by that.
    pub(super) fn left(&mut self, weight: u32) -> bool {
        self.ahead = self.ahead.saturating_sub(1);
        self.excess = self.excess.saturating_sub(u64::from(weight));
        self.excess == 0
    }

    /// The next event. Those of one's own child come first, so that nobody who was evicted takes the
    /// departure of another for its turn.
    pub(super) async fn next(&mut self) -> Heard {
        let (other, event_type) = poll_fn(|cx| {
            let own = &mut self.own;
            let mut poll_own = |cx: &mut Context<'_>| {
                own.as_mut().map_or(Poll::Pending, |own| own.as_mut().poll(cx))
            };
            if let Poll::Ready(event) = poll_own(cx) {
                return Poll::Ready((None, event.event_type));
            }
            for (i, (_, other)) in self.others.iter_mut().enumerate() {
                let Poll::Ready(event) = other.as_mut().poll(cx) else { continue };
                // Both may have come since the own child was looked at, and then its event came
                // first.
                if let Poll::Ready(first) = poll_own(cx) {
                    *other = Box::pin(ready(event));
                    return Poll::Ready((None, first.event_type));
                }
                return Poll::Ready((Some(i), event.event_type));
            }
            Poll::Pending
        })
        .await;
        let other = other.map(|i| self.others.swap_remove(i).0);
        match (other, event_type) {
            (_, EventType::Session) | (None, EventType::NodeDeleted) => Heard::Over,
            (None, _) => {
                self.own = None;
                Heard::Changed
            }
            (Some(gone), EventType::NodeDeleted) if self.left(gone.weight) => Heard::Free,
            (Some(_), EventType::NodeDeleted) => Heard::Lacking,
            // Somebody has written to it: it stands where it stood.
            (Some(changed), _) => {
                self.spare.push(changed);
                Heard::Lacking
            }
        }
    }
}

/// Who is to be watched next.
pub(super) enum Lacks {
    /// Enough are.
    Nobody,
    One(Blocker),
    /// Of those whom we know nobody is left: the queue must be looked at.
    Unknown,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::node::{Children, Naming, prefix};
    use super::*;
    use leasehold_core::Name;
    use leasehold_core::{Claim, Kind};

    fn never() -> Event {
        Box::pin(std::future::pending())
    }

    /// The own child is deleted, and then the predecessor, between two looks at the events.
    #[test]
    fn an_evicted_waiter_does_not_take_a_departure_for_its_turn() {
        let deleted = || WatchedEvent::new(EventType::NodeDeleted, "/n");
        let mut looks = 0;
        let own = poll_fn(move |_| {
            looks += 1;
            if looks == 1 { Poll::Pending } else { Poll::Ready(deleted()) }
        });
        let (blockers, spare) = (Vec::new(), Vec::new());
        let stand = Stand { ahead: 1, excess: 1, room: 0, blockers, spare };
        let mut watches = Watches::new(Box::pin(own), stand);
        let predecessor = Blocker { name: "p".into(), weight: 1 };
        watches.watch(predecessor, Box::pin(ready(deleted())));
        let heard = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let heard = heard.block_on(watches.next());
        assert!(matches!(heard, Heard::Over), "it was let in");
    }

    proptest! {
        /// Whoever leaves in whatever order, and whenever it is heard of: nobody who waits is told that
        /// it fits before it does, and while it does not fit those whom it watches are in its way.
        #[test]
        fn f45_one_departure_costs_one_more_watch(
            weights in proptest::collection::vec(1_u32..=6, 2..14),
            extra in 0_u32..3,
            order in proptest::collection::vec(any::<proptest::sample::Index>(), 1..14),
        ) {
            let capacity = 6 + extra;
            let name = Name::new("n").unwrap();
            let names: Vec<String> = weights.iter().zip(0..).map(|(&w, n)| {
                let claim = Claim::new(name.clone(), Kind::Semaphore, w, capacity).unwrap();
                format!("{}{n:010}", prefix(Naming::Curator, &claim))
            }).collect();
            let own = names.last().unwrap().clone();
            let mut there = names;
            let look = |there: &[String]| {
                Children::order(Naming::Curator, there.to_vec()).unwrap().stand(&own).unwrap()
            };
            let mut stand = look(&there);
            prop_assume!(!stand.blockers.is_empty());
            let first = std::mem::take(&mut stand.blockers);
            let mut watches = Watches::new(never(), stand);
            first.into_iter().for_each(|blocker| watches.watch(blocker, never()));
            for next in order {
                let before: Vec<String> = there.iter().filter(|n| **n != own).cloned().collect();
                if before.is_empty() {
                    break;
                }
                let leaves = next.get(&before).clone();
                there.retain(|n| *n != leaves);
                let fits = look(&there).blockers.is_empty();
                let Some(i) = watches.others.iter().position(|(b, _)| b.name == leaves) else {
                    prop_assert!(!fits, "it fits, and hears nothing of it");
                    continue;
                };
                let gone = watches.others.swap_remove(i).0;
                let mut free = watches.left(gone.weight);
                while !free {
                    match watches.lacks() {
                        Lacks::Nobody => break,
                        Lacks::One(one) if there.contains(&one.name) => watches.watch(one, never()),
                        Lacks::One(gone) => free = watches.left(gone.weight),
                        Lacks::Unknown => {
                            let mut stand = look(&there);
                            free = stand.blockers.is_empty();
                            let chosen = std::mem::take(&mut stand.blockers);
                            watches = Watches::new(never(), stand);
                            chosen.into_iter().for_each(|one| watches.watch(one, never()));
                            break;
                        }
                    }
                }
                prop_assert_eq!(free, fits);
                if free {
                    break;
                }
            }
        }
    }
}
