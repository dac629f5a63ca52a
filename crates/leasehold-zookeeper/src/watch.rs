//! The watches of one waiting claim: its own child, and as many of the claims ahead as must leave
//! first.

use std::future::{poll_fn, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use zookeeper_client::{EventType, OneshotWatcher, WatchedEvent};

use super::node::{Blocker, QueuePosition};

/// What a waiting claim's watches have reported.
pub(super) enum QueueEvent {
    /// Enough claims have left that the claim fits.
    Free,
    /// The claims that are still watched may no longer block the claim, so another one may have to
    /// be watched.
    NeedsWatch,
    /// Something else happened to the claim's own child.
    Changed,
    /// The claim's own child was deleted, or the session has ended.
    Over,
}

pub(super) type Event = Pin<Box<dyn Future<Output = WatchedEvent> + Send>>;

/// Returns the event of the watch on one node.
pub(super) fn event(watcher: OneshotWatcher) -> Event {
    Box::pin(watcher.changed())
}

/// The watch on a holder's own child, from the time when it waited. The driver sends a request if a
/// watch is dropped before its node is deleted, so the claim keeps the watch until then.
pub(super) struct OwnWatch(#[expect(dead_code, reason = "it is kept, not read")] pub(super) Event);

impl std::fmt::Debug for OwnWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnWatch").finish_non_exhaustive()
    }
}

/// The watches of a waiting claim.
pub(super) struct Watches {
    /// The watch on the claim's own child. `None` once it has reported an event.
    own: Option<Event>,
    others: Vec<(Blocker, Event)>,
    /// The next claims to watch when one of the others has left, the nearest last.
    spare: Vec<Blocker>,
    /// How many claims were ahead in the listing from which the watches were chosen, minus those of
    /// them that left.
    pub(super) ahead: usize,
    /// By how much the weight of the claims ahead exceeds the room. Only departures of claims that
    /// are or were to be watched are subtracted. Later listings by heartbeats already lack claims
    /// whose departure is not yet reported here, so these would be subtracted twice.
    excess: u64,
    /// How much weight may be ahead of the claim when it is granted.
    room: u64,
}

impl Watches {
    /// Creates the watches of a claim. At first only its own child is watched.
    pub(super) fn new(own: Event, position: QueuePosition) -> Self {
        let QueuePosition { ahead, excess, room, mut spare, .. } = position;
        spare.reverse();
        Self { own: Some(own), others: Vec::new(), spare, ahead, excess, room }
    }

    pub(super) fn watch(&mut self, blocker: Blocker, event: Event) {
        self.others.push((blocker, event));
    }

    /// Returns the watch on the claim's own child.
    pub(super) fn into_own(self) -> Option<Event> {
        self.own
    }

    /// Returns all watches, so that the caller can keep them.
    pub(super) fn take(self) -> (Option<Event>, Vec<(Blocker, Event)>) {
        (self.own, self.others)
    }

    /// Returns which claim to watch next, if those that are watched do not block the claim.
    pub(super) fn next_watch(&mut self) -> NextWatch {
        let watched: u64 = self.others.iter().map(|(b, _)| u64::from(b.weight)).sum();
        if watched > self.room {
            return NextWatch::Enough;
        }
        // If no claim is left to watch and there are more ahead than are known, the known ones have
        // most likely left before. The predecessor of a mutex waiter leaves after it was a holder,
        // and so after all others.
        if self.others.is_empty() && self.ahead > self.spare.len() {
            return NextWatch::Unknown;
        }
        self.spare.pop().map_or(NextWatch::Unknown, NextWatch::One)
    }

    /// Records that a claim ahead with this weight has left, or was already gone. Returns whether
    /// the waiter fits now.
    pub(super) fn left(&mut self, weight: u32) -> bool {
        self.ahead = self.ahead.saturating_sub(1);
        self.excess = self.excess.saturating_sub(u64::from(weight));
        self.excess == 0
    }

    /// Waits for the next event. Events of the claim's own child come first, so that an evicted
    /// claim does not mistake the departure of another for its own grant.
    pub(super) async fn next(&mut self) -> QueueEvent {
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
                // Both events may have arrived since the own child was checked, and then its event
                // came first.
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
            (_, EventType::Session) | (None, EventType::NodeDeleted) => QueueEvent::Over,
            (None, _) => {
                self.own = None;
                QueueEvent::Changed
            }
            (Some(gone), EventType::NodeDeleted) if self.left(gone.weight) => QueueEvent::Free,
            (Some(_), EventType::NodeDeleted) => QueueEvent::NeedsWatch,
            // Another client has written to the node, which keeps its position.
            (Some(changed), _) => {
                self.spare.push(changed);
                QueueEvent::NeedsWatch
            }
        }
    }
}

/// The claim to watch next.
pub(super) enum NextWatch {
    /// Enough claims are watched.
    Enough,
    One(Blocker),
    /// No known claim is left, so the queue must be read.
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

    /// The claim's own child is deleted, and then its predecessor, between two checks of the
    /// events.
    #[test]
    fn evicted_waiter_does_not_mistake_a_departure_for_its_grant() {
        let deleted = || WatchedEvent::new(EventType::NodeDeleted, "/n");
        let mut polls = 0;
        let own = poll_fn(move |_| {
            polls += 1;
            if polls == 1 { Poll::Pending } else { Poll::Ready(deleted()) }
        });
        let (blockers, spare) = (Vec::new(), Vec::new());
        let position = QueuePosition { ahead: 1, excess: 1, room: 0, blockers, spare };
        let mut watches = Watches::new(Box::pin(own), position);
        let predecessor = Blocker { name: "p".into(), weight: 1 };
        watches.watch(predecessor, Box::pin(ready(deleted())));
        let reported = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let reported = reported.block_on(watches.next());
        assert!(matches!(reported, QueueEvent::Over), "an evicted waiter was treated as granted");
    }

    proptest! {
        // F45
        /// Claims leave in any order, and their departures are reported at any time. No waiter is
        /// reported to fit before it does, and while it does not fit, the claims that it watches
        /// block it.
        #[test]
        fn departure_costs_at_most_one_more_watch(
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
            let read_position = |there: &[String]| {
                Children::order(Naming::Curator, there.to_vec()).unwrap().position_of(&own).unwrap()
            };
            let mut position = read_position(&there);
            prop_assume!(!position.blockers.is_empty());
            let first = std::mem::take(&mut position.blockers);
            let mut watches = Watches::new(never(), position);
            first.into_iter().for_each(|blocker| watches.watch(blocker, never()));
            for next in order {
                let before: Vec<String> = there.iter().filter(|n| **n != own).cloned().collect();
                if before.is_empty() {
                    break;
                }
                let leaves = next.get(&before).clone();
                there.retain(|n| *n != leaves);
                let fits = read_position(&there).blockers.is_empty();
                let Some(i) = watches.others.iter().position(|(b, _)| b.name == leaves) else {
                    prop_assert!(!fits, "a claim fits, but did not watch the deleted node");
                    continue;
                };
                let gone = watches.others.swap_remove(i).0;
                let mut free = watches.left(gone.weight);
                while !free {
                    match watches.next_watch() {
                        NextWatch::Enough => break,
                        NextWatch::One(one) if there.contains(&one.name) => {
                            watches.watch(one, never());
                        }
                        NextWatch::One(gone) => free = watches.left(gone.weight),
                        NextWatch::Unknown => {
                            let mut position = read_position(&there);
                            free = position.blockers.is_empty();
                            let chosen = std::mem::take(&mut position.blockers);
                            watches = Watches::new(never(), position);
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
