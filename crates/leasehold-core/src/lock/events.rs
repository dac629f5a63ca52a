//! Changes in queues: the differences between successive polls.
//!
//! [`LockEvents`] polls when the store reports a change, and periodically otherwise
//! ([`poll_schedule`](crate::lock::poll_schedule)). It takes no locks, so it blocks no client. Each
//! poll is one request. A claim that joins and ends between two polls is not seen. An ended claim
//! may have been released or have expired. Two claims may look alike, such as those of two waiting
//! tasks of one process. They are distinguished by their tokens, or by their order until they have
//! tokens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::poll_schedule::PollSchedule;
use crate::lock::stream::RequestStream;
use crate::store::Queues;
use crate::types::answer::{ClaimInfo, ClaimState, LockInfo};
use crate::types::claim::Kind;
use crate::types::error::Result;
use crate::types::name::Name;

/// The default pause between two polls if the store does not report changes.
const EVERY: Duration = Duration::from_millis(500);

/// What happened to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LockEventKind {
    /// The claim waits in the queue.
    #[cfg_attr(feature = "serde", serde(rename = "waiting"))]
    Waits,
    /// The claim holds the lock. This is reported again, with the new weight, after a downgrade or
    /// an upgrade.
    #[cfg_attr(feature = "serde", serde(rename = "held"))]
    Holds,
    /// The holder is gone, and the lock is in a cooldown.
    #[cfg_attr(feature = "serde", serde(rename = "cooldown"))]
    Cooldown,
    /// The claim has ended, because it was released, lost or given up.
    Ended,
}

impl LockEventKind {
    /// Returns one word: the word for the claim's current [`ClaimState`], or `ended`.
    ///
    /// ```
    /// assert_eq!(leasehold::LockEventKind::Waits.as_str(), "waiting");
    /// assert_eq!(leasehold::LockEventKind::Ended.as_str(), "ended");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waits => ClaimState::Waiting.as_str(),
            Self::Holds => ClaimState::Holding.as_str(),
            Self::Cooldown => ClaimState::Cooldown.as_str(),
            Self::Ended => "ended",
        }
    }
}

impl From<ClaimState> for LockEventKind {
    fn from(claim_state: ClaimState) -> Self {
        match claim_state {
            ClaimState::Waiting => Self::Waits,
            ClaimState::Holding => Self::Holds,
            ClaimState::Cooldown => Self::Cooldown,
        }
    }
}

/// One change in a queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockEvent {
    /// The lock.
    pub name: Name,
    /// What happened to the claim.
    pub became: LockEventKind,
    /// The claim, as last seen.
    pub claim: ClaimInfo,
}

/// The properties by which a claim is recognized in the next poll.
///
/// The token is not included, because some stores assign tokens at the grant, so waiters in those
/// stores have no token. The weight is not included, because a downgrade or an upgrade changes the
/// weight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: Name,
    host: String,
    pid: u32,
    label: String,
}

/// The claims of one poll. Claims with the same key are in queue order.
type Polled = BTreeMap<Key, Vec<ClaimInfo>>;

fn by_key(locks: Vec<LockInfo>) -> Polled {
    let mut seen = Polled::new();
    for lock in locks {
        for claim in lock.claims {
            let key = Key {
                name: lock.name.clone(),
                host: claim.holder.host.clone(),
                pid: claim.holder.pid,
                label: claim.holder.label.clone(),
            };
            seen.entry(key).or_default().push(claim);
        }
    }
    seen
}

/// Returns the changes between two polls. Claims that ended come first, so a lock is reported as
/// free before it is reported as held again.
fn changes(before: &Polled, now: &Polled) -> VecDeque<LockEvent> {
    let keys: BTreeSet<&Key> = before.keys().chain(now.keys()).collect();
    let (mut ended, mut came) = (VecDeque::new(), VecDeque::new());
    for key in keys {
        let alike = |seen: &'_ Polled| seen.get(key).cloned().unwrap_or_default();
        let mut gone = alike(before);
        let mut there = alike(now);
        let change = |claim: ClaimInfo, became| LockEvent { name: key.name.clone(), became, claim };
        // Claims are matched by their tokens first, and then with waiters that had no token yet.
        // The weight of a waiter does not change.
        for has_token in [true, false] {
            there.retain(|claim| {
                let is_same = |old: &ClaimInfo| match has_token {
                    true => claim.token.is_some() && old.token == claim.token,
                    false => old.token.is_none() && old.weight == claim.weight,
                };
                let Some(same) = gone.iter().position(is_same) else { return true };
                let old = gone.remove(same);
                if (old.state, old.weight) != (claim.state, claim.weight) {
                    came.push_back(change(claim.clone(), claim.state.into()));
                }
                false
            });
        }
        ended.extend(gone.into_iter().map(|claim| change(claim, LockEventKind::Ended)));
        let new = |claim: ClaimInfo| {
            let became = claim.state.into();
            change(claim, became)
        };
        came.extend(there.into_iter().map(new));
    }
    ended.append(&mut came);
    ended
}

/// The queues that are watched.
#[derive(Clone, Debug)]
enum Which {
    Of(LockHandle),
    All { prefix: String },
}

/// Returns all queues in use whose names begin with `prefix`.
pub(crate) async fn list(core: &Core, prefix: &str) -> Result<Vec<LockInfo>> {
    let listed = async { core.ours()?.list(prefix).await };
    let listed = core.background.with_runtime(pin!(listed)).await;
    listed.map_err(|e| e.with_operation("list").with_store(core.store.url()))
}

/// Reports changes in one queue, or in several.
///
/// A watch is created by [`Client::watch`](crate::Client::watch) and
/// [`Client::watch_all`](crate::Client::watch_all).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
///
/// use leasehold::LockEventKind;
/// # let locks = leasehold::connect("memory:").await?;
/// let mut changes = locks.watch_all("stock:").every(Duration::from_millis(10));
/// let guard = locks.mutex("stock:7").lock().await?;
/// let change = changes.next().await?;
/// assert_eq!((change.name.as_str(), change.became), ("stock:7", LockEventKind::Holds));
/// guard.release().await?;
/// assert_eq!(changes.next().await?.became, LockEventKind::Ended);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct LockEvents {
    which: Which,
    schedule: PollSchedule,
    seen: Polled,
    unreported: VecDeque<LockEvent>,
}

impl LockEvents {
    pub(crate) fn of(core: &Arc<Core>, name: &str) -> Self {
        let which = Which::Of(LockHandle::new(core, name, Kind::Mutex, 1));
        Self::new(core, which, Name::new(name).ok().map(Queues::Of))
    }

    pub(crate) fn of_all(core: &Arc<Core>, prefix: &str) -> Self {
        let which = Which::All { prefix: prefix.to_owned() };
        Self::new(core, which, Some(Queues::All(prefix.to_owned())))
    }

    fn new(core: &Arc<Core>, which: Which, queues: Option<Queues>) -> Self {
        let schedule = PollSchedule::new(core, queues, EVERY);
        Self { which, schedule, seen: Polled::new(), unreported: VecDeque::new() }
    }

    /// Sets the longest pause between two polls (minimum 10 ms).
    ///
    /// The default is 500 ms, or 2 s if the store [notifies
    /// watchers](crate::store::Guarantees::followed). Such a store is also polled whenever it
    /// reports a change, up to fifty times per second. Each poll is one request.
    #[must_use]
    pub fn every(mut self, pause: Duration) -> Self {
        self.schedule.every(pause.max(Duration::from_millis(10)));
        self
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        self.schedule.core()
    }

    /// Converts the value into a stream without an end. An error is an item too, and the stream
    /// continues after it. Works in any executor.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use futures_util::StreamExt; // or another crate with stream methods
    ///
    /// # let locks = leasehold::connect("memory:").await?;
    /// let _guard = locks.mutex("deploy:web").lock().await?;
    /// let mut changes = locks.watch_all("deploy:").stream();
    /// let change = changes.next().await.expect("it has no end")?;
    /// assert_eq!(change.name.as_str(), "deploy:web");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn stream(self) -> impl Stream<Item = Result<LockEvent>> + Send + Unpin + 'static {
        RequestStream::of(self, |mut changes| async move {
            let next = changes.next().await;
            (changes, next)
        })
    }

    /// Waits for the next change and returns it.
    ///
    /// The first calls return all existing claims, and later calls return changes. Ended claims are
    /// returned before new ones.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No change that a poll has seen is missed.
    ///
    /// # Errors
    /// The same as [`Client::inspect`](crate::Client::inspect), for each poll that fails. Call this
    /// method again after an error. It then returns the changes in the meantime.
    pub async fn next(&mut self) -> Result<LockEvent> {
        loop {
            if let Some(change) = self.unreported.pop_front() {
                return Ok(change);
            }
            self.schedule.until_due().await;
            let polled = self.poll().await;
            self.schedule.polled(polled.is_ok());
            let now = by_key(polled?);
            self.unreported = changes(&self.seen, &now);
            self.seen = now;
        }
    }

    async fn poll(&self) -> Result<Vec<LockInfo>> {
        match &self.which {
            Which::Of(lock) => Ok(lock.read().await?.into_iter().collect()),
            Which::All { prefix } => list(self.core(), prefix).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::holder::Holder;
    use crate::types::token::Token;

    fn claim(claim_state: ClaimState, token: Option<u64>) -> ClaimInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "x".into() };
        ClaimInfo::new(claim_state, holder, token.and_then(Token::new), 1, Duration::ZERO, None)
    }

    fn lock(name: &str, claims: Vec<ClaimInfo>) -> LockInfo {
        LockInfo::new(Name::new(name).unwrap(), Kind::Mutex, 1, claims)
    }

    fn reported(before: &Polled, now: &Polled) -> Vec<(String, Option<u64>, LockEventKind)> {
        let parts =
            |c: LockEvent| (c.name.as_str().to_owned(), c.claim.token.map(Token::get), c.became);
        changes(before, now).into_iter().map(parts).collect()
    }

    #[test]
    fn end_of_a_hold_is_reported_before_the_next_hold() {
        use ClaimState::{Cooldown, Holding, Waiting};
        let before = by_key(vec![
            lock("a", vec![claim(Holding, Some(3))]),
            lock("b", vec![claim(Holding, Some(1)), claim(Waiting, Some(2))]),
        ]);
        let now = by_key(vec![
            lock("a", vec![claim(Cooldown, Some(3))]),
            lock("b", vec![claim(Holding, Some(2))]),
        ]);
        let b = |token, became| ("b".to_owned(), Some(token), became);
        let departed = ("a".to_owned(), Some(3), LockEventKind::Cooldown);
        assert_eq!(
            reported(&before, &now),
            [b(1, LockEventKind::Ended), departed, b(2, LockEventKind::Holds)]
        );
        assert_eq!(reported(&now, &now), []);
    }

    #[test]
    fn a_downgraded_hold_does_not_end() {
        let queue = |weight| {
            let holding = claim(ClaimState::Holding, Some(3));
            by_key(vec![lock("a", vec![ClaimInfo { weight, ..holding }])])
        };
        let holds = ("a".to_owned(), Some(3), LockEventKind::Holds);
        assert_eq!(reported(&queue(9), &queue(1)), [holds]);
    }

    #[test]
    fn identical_claims_are_reported_separately() {
        let waits = |n| by_key(vec![lock("a", vec![claim(ClaimState::Waiting, None); n])]);
        let waiting = || ("a".to_owned(), None, LockEventKind::Waits);
        assert_eq!(reported(&Polled::new(), &waits(2)), [waiting(), waiting()]);
        assert_eq!(reported(&waits(1), &waits(2)), [waiting()]);
        assert_eq!(reported(&waits(2), &waits(1)).len(), 1);
    }

    /// If waiters have no tokens, a new holder is recognized as the former first waiter. Only the
    /// previous holder is reported as ended, not that waiter.
    #[test]
    fn granted_waiter_is_not_reported_as_ended() {
        use ClaimState::{Holding, Waiting};
        let waits = || claim(Waiting, None);
        let before = by_key(vec![lock("a", vec![claim(Holding, Some(1)), waits(), waits()])]);
        let now = by_key(vec![lock("a", vec![claim(Holding, Some(2)), waits()])]);
        let a = |token, became| ("a".to_owned(), Some(token), became);
        assert_eq!(
            reported(&before, &now),
            [a(1, LockEventKind::Ended), a(2, LockEventKind::Holds)]
        );
    }
}
