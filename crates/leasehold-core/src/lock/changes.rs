//! Changes in queues: the differences between successive polls.
//!
//! It polls when the store reports a change ([`looks`](crate::lock::looks)). It takes no locks, so
//! it blocks no client. Each poll is one request. Claims that come and go between two polls are not
//! seen, and an ended claim may have been released or have expired. Two claims that look alike (two
//! waiting tasks of one process) are distinguished by their tokens, or by their order until they
//! have tokens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;

use crate::client::core::Core;
use crate::lock::acquire::LockHandle;
use crate::lock::looks::Looks;
use crate::lock::stream::Asked;
use crate::store::Queues;
use crate::words::answer::{ClaimInfo, LockInfo, Standing};
use crate::words::claim::Kind;
use crate::words::error::Result;
use crate::words::name::Name;

/// How often it looks where nobody tells it when to.
const EVERY: Duration = Duration::from_millis(500);

/// What happened to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Became {
    /// It waits in the queue.
    #[cfg_attr(feature = "serde", serde(rename = "waiting"))]
    Waits,
    /// It holds the lock.
    #[cfg_attr(feature = "serde", serde(rename = "held"))]
    Holds,
    /// Its holder is gone, and the lock is in a cooldown.
    Departed,
    /// It is no longer in the queue: released, lost or given up.
    Ended,
}

impl Became {
    /// Returns one word: that of the claim's current [`Standing`], or `ended`.
    ///
    /// ```
    /// assert_eq!(leasehold::Became::Waits.as_str(), "waiting");
    /// assert_eq!(leasehold::Became::Ended.as_str(), "ended");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waits => Standing::Waiting.as_str(),
            Self::Holds => Standing::Holding.as_str(),
            Self::Departed => Standing::Departed.as_str(),
            Self::Ended => "ended",
        }
    }
}

impl From<Standing> for Became {
    fn from(standing: Standing) -> Self {
        match standing {
            Standing::Waiting => Self::Waits,
            Standing::Holding => Self::Holds,
            Standing::Departed => Self::Departed,
        }
    }
}

/// One change in a queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Change {
    /// The lock.
    pub name: Name,
    /// What happened to the claim.
    pub became: Became,
    /// The claim, as last seen.
    pub claim: ClaimInfo,
}

/// All that stays the same of a claim while it stands in its queue, but for the token: some stores draw that when
/// they grant, so that who waits has none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: Name,
    host: String,
    pid: u32,
    label: String,
    weight: u32,
}

/// Those that are alike are in the order of their queue.
type Seen = BTreeMap<Key, Vec<ClaimInfo>>;

fn seen(locks: Vec<LockInfo>) -> Seen {
    let mut seen = Seen::new();
    for lock in locks {
        for claim in lock.claims {
            let key = Key {
                name: lock.name.clone(),
                host: claim.holder.host.clone(),
                pid: claim.holder.pid,
                label: claim.holder.label.clone(),
                weight: claim.weight,
            };
            seen.entry(key).or_default().push(claim);
        }
    }
    seen
}

/// What ended, and then what came: in this order a lock is free before it is held again.
fn changes(before: &Seen, now: &Seen) -> VecDeque<Change> {
    let keys: BTreeSet<&Key> = before.keys().chain(now.keys()).collect();
    let (mut ended, mut came) = (VecDeque::new(), VecDeque::new());
    for key in keys {
        let alike = |seen: &'_ Seen| seen.get(key).cloned().unwrap_or_default();
        let mut gone = alike(before);
        let mut there = alike(now);
        let change = |claim: ClaimInfo, became| Change { name: key.name.clone(), became, claim };
        // By their tokens, and then whoever had none yet.
        for has_token in [true, false] {
            there.retain(|claim| {
                let is_same = |old: &ClaimInfo| match has_token {
                    true => claim.token.is_some() && old.token == claim.token,
                    false => old.token.is_none(),
                };
                let Some(same) = gone.iter().position(is_same) else { return true };
                if gone.remove(same).standing != claim.standing {
                    came.push_back(change(claim.clone(), claim.standing.into()));
                }
                false
            });
        }
        ended.extend(gone.into_iter().map(|claim| change(claim, Became::Ended)));
        let new = |claim: ClaimInfo| {
            let became = claim.standing.into();
            change(claim, became)
        };
        came.extend(there.into_iter().map(new));
    }
    ended.append(&mut came);
    ended
}

/// Which queues.
#[derive(Clone, Debug)]
enum Which {
    Of(LockHandle),
    All { prefix: String },
}

/// All queues of this prefix.
pub(crate) async fn list(core: &Core, prefix: &str) -> Result<Vec<LockInfo>> {
    let listed = async { core.ours()?.list(prefix).await };
    let listed = core.background.with_runtime(pin!(listed)).await;
    listed.map_err(|e| e.during("list").at(core.store.url()))
}

/// Reports changes in one queue, or in several.
///
/// It is created by [`Leasehold::watch`](crate::Leasehold::watch) and
/// [`Leasehold::watch_all`](crate::Leasehold::watch_all).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
///
/// use leasehold::Became;
/// # let locks = leasehold::connect("memory:").await?;
/// let mut changes = locks.watch_all("stock:").every(Duration::from_millis(10));
/// let guard = locks.mutex("stock:7").lock().await?;
/// let change = changes.next().await?;
/// assert_eq!((change.name.as_str(), change.became), ("stock:7", Became::Holds));
/// guard.release().await?;
/// assert_eq!(changes.next().await?.became, Became::Ended);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Changes {
    which: Which,
    looks: Looks,
    seen: Seen,
    told: VecDeque<Change>,
}

impl Changes {
    pub(crate) fn of(core: &Arc<Core>, name: &str) -> Self {
        let which = Which::Of(LockHandle::new(core, name, Kind::Mutex, 1));
        Self::new(core, which, Name::new(name).ok().map(Queues::Of))
    }

    pub(crate) fn of_all(core: &Arc<Core>, prefix: &str) -> Self {
        let which = Which::All { prefix: prefix.to_owned() };
        Self::new(core, which, Some(Queues::All(prefix.to_owned())))
    }

    fn new(core: &Arc<Core>, which: Which, queues: Option<Queues>) -> Self {
        let (looks, seen, told) = (Looks::new(core, queues, EVERY), Seen::new(), VecDeque::new());
        Self { which, looks, seen, told }
    }

    /// Sets the longest pause between two polls (minimum 10 ms).
    ///
    /// The default is 500 ms, or 2 s if the store [notifies
    /// watchers](crate::store::Guarantees::followed). Such a store is also polled whenever it
    /// reports a change, up to fifty times per second. Each poll is one request.
    #[must_use]
    pub fn every(mut self, pause: Duration) -> Self {
        self.looks.every(pause.max(Duration::from_millis(10)));
        self
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        self.looks.core()
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
    pub fn stream(self) -> impl Stream<Item = Result<Change>> + Send + Unpin + 'static {
        Asked::of(self, |mut changes| async move {
            let next = changes.next().await;
            (changes, next)
        })
    }

    /// Waits for the next change and returns it.
    ///
    /// At first, all existing claims are returned, and then what changes. Ended claims are returned
    /// before new ones.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No change that a poll has seen is missed.
    ///
    /// # Errors
    /// The same as [`Leasehold::read`](crate::Leasehold::read), for each poll that fails. Call it
    /// again after an error. Changes in the meantime are returned then.
    pub async fn next(&mut self) -> Result<Change> {
        loop {
            if let Some(change) = self.told.pop_front() {
                return Ok(change);
            }
            self.looks.time().await;
            let looked = self.look().await;
            self.looks.looked(looked.is_ok());
            let now = seen(looked?);
            self.told = changes(&self.seen, &now);
            self.seen = now;
        }
    }

    async fn look(&self) -> Result<Vec<LockInfo>> {
        match &self.which {
            Which::Of(lock) => Ok(lock.read().await?.into_iter().collect()),
            Which::All { prefix } => list(self.core(), prefix).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::holder::Holder;
    use crate::words::token::Token;

    fn claim(standing: Standing, token: Option<u64>) -> ClaimInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "x".into() };
        ClaimInfo::new(standing, holder, token.and_then(Token::new), 1, Duration::ZERO, None)
    }

    fn lock(name: &str, claims: Vec<ClaimInfo>) -> LockInfo {
        LockInfo::new(Name::new(name).unwrap(), Kind::Mutex, 1, claims)
    }

    fn told(before: &Seen, now: &Seen) -> Vec<(String, Option<u64>, Became)> {
        let told =
            |c: Change| (c.name.as_str().to_owned(), c.claim.token.map(Token::get), c.became);
        changes(before, now).into_iter().map(told).collect()
    }

    #[test]
    fn a_lock_is_free_before_it_is_held_again() {
        use Standing::{Departed, Holding, Waiting};
        let before = seen(vec![
            lock("a", vec![claim(Holding, Some(3))]),
            lock("b", vec![claim(Holding, Some(1)), claim(Waiting, Some(2))]),
        ]);
        let now = seen(vec![
            lock("a", vec![claim(Departed, Some(3))]),
            lock("b", vec![claim(Holding, Some(2))]),
        ]);
        let b = |token, became| ("b".to_owned(), Some(token), became);
        let departed = ("a".to_owned(), Some(3), Became::Departed);
        assert_eq!(told(&before, &now), [b(1, Became::Ended), departed, b(2, Became::Holds)]);
        assert_eq!(told(&now, &now), []);
    }

    #[test]
    fn who_looks_like_another_is_another() {
        let waits = |n| seen(vec![lock("a", vec![claim(Standing::Waiting, None); n])]);
        let waiting = || ("a".to_owned(), None, Became::Waits);
        assert_eq!(told(&Seen::new(), &waits(2)), [waiting(), waiting()]);
        assert_eq!(told(&waits(1), &waits(2)), [waiting()]);
        assert_eq!(told(&waits(2), &waits(1)).len(), 1);
    }

    /// Where who waits has no token: the first of those who wait becomes the holder, and does not end.
    #[test]
    fn who_is_granted_is_who_waited() {
        use Standing::{Holding, Waiting};
        let waits = || claim(Waiting, None);
        let before = seen(vec![lock("a", vec![claim(Holding, Some(1)), waits(), waits()])]);
        let now = seen(vec![lock("a", vec![claim(Holding, Some(2)), waits()])]);
        let a = |token, became| ("a".to_owned(), Some(token), became);
        assert_eq!(told(&before, &now), [a(1, Became::Ended), a(2, Became::Holds)]);
    }
}
