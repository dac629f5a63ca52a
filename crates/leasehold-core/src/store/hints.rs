//! Notifications of a store: a claim should be polled, or a queue may have changed.
//!
//! Both are hints, and no decision depends on them: the receiver polls the store and uses the
//! answer. So a hint may come late, twice, without a receiver, or never. But it must not be lost
//! between two polls: a receiver that is notified while it polls polls again afterwards.
//!
//! - *A claim of this client* ([`EvictionListener`]) was evicted. The client renews it immediately.
//! - *A queue* ([`Follow`]) may have changed. Its watchers poll it. A new watcher polls after it
//!   has subscribed, so it misses no change.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;

use crate::types::claim::ClaimId;
use crate::types::name::Name;
use crate::util::locked::locked;

/// A receiver of notifications that claims should be polled: a client.
pub trait EvictionListener: fmt::Debug + Send + Sync {
    /// Notifies the receiver that this claim should be polled now, if the claim is one of its own.
    /// Must not block or call the store.
    fn ask(&self, id: ClaimId);
}

/// The receivers of one store's notifications.
#[derive(Debug, Default)]
pub struct EvictionListeners(Mutex<Vec<Weak<dyn EvictionListener>>>);

impl EvictionListeners {
    /// Adds a receiver, for as long as it exists.
    pub fn add(&self, listener: Weak<dyn EvictionListener>) {
        let mut all = locked(&self.0);
        all.retain(|listener| listener.strong_count() > 0);
        all.push(listener);
    }

    /// Notifies all receivers that this claim should be polled. Must not be called while a mutex is
    /// locked that a call of the store also locks.
    pub fn ask(&self, id: ClaimId) {
        let all: Vec<Arc<dyn EvictionListener>> =
            locked(&self.0).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|listener| listener.ask(id));
    }
}

/// The queues of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Queues {
    /// The queue of this lock.
    Of(Name),
    /// All queues whose names begin with this prefix.
    All(String),
}

impl Queues {
    /// Returns whether the queue with this name is one of them.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Of(one) => one.as_str() == name,
            Self::All(prefix) => name.starts_with(prefix.as_str()),
        }
    }
}

/// A subscription that reports that queues may have changed. Dropping it ends the subscription.
pub struct Follow {
    signal: Arc<ChangeSignal>,
    _kept: Option<Box<dyn Any + Send + Sync>>,
}

/// The sender of the notifications that a [`Follow`] receives.
#[derive(Clone, Debug)]
pub struct Notifier(Weak<ChangeSignal>);

#[derive(Debug, Default)]
struct ChangeSignal {
    wake: Notify,
}

impl Follow {
    /// Creates a subscription and its sender.
    pub fn new() -> (Self, Notifier) {
        let signal = Arc::<ChangeSignal>::default();
        let notifier = Notifier(Arc::downgrade(&signal));
        (Self { signal, _kept: None }, notifier)
    }

    /// Keeps a value for as long as the subscription exists. Dropping that value can end the
    /// subscription at the store.
    #[must_use]
    pub fn keeping(self, kept: impl Any + Send + Sync) -> Self {
        Self { _kept: Some(Box::new(kept)), ..self }
    }

    /// Waits until something may have changed since the last call returned.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No notification is missed.
    pub async fn changed(&self) {
        // `Notify` stores a notification until it is received. A receiver that is dropped while it
        // is being notified passes the notification on.
        self.signal.wake.notified().await;
    }
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").finish_non_exhaustive()
    }
}

impl Notifier {
    /// Reports that something may have changed. Returns whether the subscription still exists.
    pub fn notify(&self) -> bool {
        let followed = self.0.upgrade();
        followed.as_ref().inspect(|signal| signal.wake.notify_one());
        followed.is_some()
    }

    /// Returns whether the subscription still exists.
    pub fn is_followed(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// The subscriptions to queues of one store, for stores that see each change themselves.
#[derive(Debug, Default)]
pub struct Followers {
    all: Mutex<Vec<(Queues, Notifier)>>,
    /// Whether there may be subscriptions. Without any, reporting a change costs only this load.
    any: AtomicBool,
}

impl Followers {
    /// Subscribes to these queues.
    pub fn follow(&self, queues: Queues) -> Follow {
        let (follow, notifier) = Follow::new();
        let mut all = locked(&self.all);
        all.push((queues, notifier));
        // If a reporter reads `false`, it made its change before this line. The subscriber polls
        // after it has subscribed, so it sees the change.
        self.any.store(true, Ordering::SeqCst);
        follow
    }

    /// Returns whether there are no subscriptions.
    pub fn is_empty(&self) -> bool {
        locked(&self.all).iter().all(|(_, notifier)| !notifier.is_followed())
    }

    /// Reports a change in the queue with this name.
    pub fn notify(&self, name: &str) {
        self.notify_if(|queues| queues.has(name));
    }

    /// Reports that any queue may have changed.
    pub fn notify_all(&self) {
        self.notify_if(|_| true);
    }

    fn notify_if(&self, concerns: impl Fn(&Queues) -> bool) {
        if !self.any.load(Ordering::SeqCst) {
            return;
        }
        let mut all = locked(&self.all);
        all.retain(|(queues, notifier)| match concerns(queues) {
            true => notifier.notify(),
            false => notifier.is_followed(),
        });
        self.any.store(!all.is_empty(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn has_changed(follow: &Follow) -> bool {
        let polled = pin!(follow.changed()).poll(&mut Context::from_waker(Waker::noop()));
        polled == Poll::Ready(())
    }

    #[test]
    fn subscriber_is_notified_of_its_own_queues_only() {
        let followers = Followers::default();
        assert!(followers.is_empty());
        let one = followers.follow(Queues::Of(Name::new("a:1").unwrap()));
        let all = followers.follow(Queues::All("a:".into()));
        followers.notify("b");
        assert!(!has_changed(&one) && !has_changed(&all));
        followers.notify("a:12");
        assert!(!has_changed(&one) && has_changed(&all));
        assert!(!has_changed(&all), "a change was reported twice");
        followers.notify("a:1");
        followers.notify("a:1");
        assert!(has_changed(&one) && has_changed(&all) && !has_changed(&one));
        drop((one, all));
        assert!(followers.is_empty());
    }

    #[test]
    fn resources_of_a_subscription_are_dropped_with_it() {
        let (kept, (follow, notifier)) = (Arc::new(()), Follow::new());
        let follow = follow.keeping(kept.clone());
        assert!(notifier.notify() && Arc::strong_count(&kept) == 2);
        drop(follow);
        assert!(!notifier.notify() && Arc::strong_count(&kept) == 1);
    }
}
