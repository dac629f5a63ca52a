//! What one waiting claim watches: its own child, and as many of those before it as must go first.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use zookeeper_client::{EventType, OneshotWatcher, WatchedEvent};

/// What becomes of a claim that listens.
pub(super) enum Heard {
    /// So much has left that the claim fits.
    Free,
    /// Something else happened to one of them.
    Changed,
    /// Its own child was deleted, or the session is over.
    Over,
}

pub(super) type Event = Pin<Box<dyn Future<Output = WatchedEvent> + Send>>;

/// What a waiting claim watches.
pub(super) struct Watches {
    own: Event,
    others: Vec<(u32, Event)>,
    /// How much more than there is room for was before it in the listing by which they were chosen.
    /// Only what leaves of these is taken off: other listings, which heartbeats look at, lack by then
    /// some whose departure is news here still, and those would be taken off twice.
    excess: u64,
}

impl Watches {
    pub(super) fn new(
        own: OneshotWatcher,
        others: Vec<(u32, OneshotWatcher)>,
        excess: u64,
    ) -> Self {
        let others =
            others.into_iter().map(|(w, watcher)| (w, Box::pin(watcher.changed()) as Event));
        Self { own: Box::pin(own.changed()), others: others.collect(), excess }
    }

    /// The next event. Those of one's own child come first, so that nobody who was evicted takes the
    /// departure of another for its turn.
    pub(super) async fn next(&mut self) -> Heard {
        poll_fn(|cx| {
            if let Poll::Ready(event) = self.own.as_mut().poll(cx) {
                return Poll::Ready(match event.event_type {
                    EventType::Session | EventType::NodeDeleted => Heard::Over,
                    _ => Heard::Changed,
                });
            }
            for (weight, event) in &mut self.others {
                if let Poll::Ready(event) = event.as_mut().poll(cx) {
                    return Poll::Ready(match event.event_type {
                        EventType::Session => Heard::Over,
                        EventType::NodeDeleted if self.excess <= u64::from(*weight) => Heard::Free,
                        _ => Heard::Changed,
                    });
                }
            }
            Poll::Pending
        })
        .await
    }
}
