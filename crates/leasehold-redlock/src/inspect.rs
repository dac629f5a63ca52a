//! Status and eviction for operators. No code here decides which client holds a lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::attempt::LATE;
use super::node::Trouble;
use super::round::majority;
use super::scripts::{self, Elements};
use super::shared::Shared;
use leasehold_core::store::{ClaimInfo, ClaimState, Evict, LockInfo};
use leasehold_core::{Holder, Kind, Name, Result, Token};
use leasehold_redis::redis::keys::escaped;

/// Number of waiters that one script call reads, and maximum number of waiters shown.
const PAGE: u64 = 500;
const SHOWN: u64 = 10_000;

/// One node's view of a lock.
#[derive(Debug)]
struct View {
    value: String,
    left: Option<Duration>,
    token: Option<Token>,
    holder: Option<Holder>,
    since: Duration,
    /// Number of waiters that were read, including dead ones.
    looked: u64,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    who: String,
    since: Duration,
    left: Duration,
}

impl View {
    fn read(answer: &mut Elements) -> Option<Self> {
        let value = answer.text()?;
        let left = u64::try_from(answer.number()?).ok().map(Duration::from_millis);
        let token = Token::new(answer.natural()?);
        let holder = serde_json::from_str(&answer.text()?).ok();
        let since = Duration::from_millis(answer.natural()?);
        let looked = answer.natural()?;
        let mut waiting = Vec::new();
        while !answer.is_empty() {
            let who = answer.text()?;
            let since = Duration::from_millis(answer.natural()?);
            let left = Duration::from_millis(answer.natural()?);
            waiting.push(Waiting { who, since, left });
        }
        Some(Self { value, left, token, holder, since, looked, waiting })
    }
}

/// Parses a reply to SCAN: the next cursor, and keys.
fn page(answer: Value) -> Option<(String, Vec<String>)> {
    let Value::Array(answer) = answer else { return None };
    let mut answer = answer.into_iter();
    let (Some(Value::BulkString(next)), Some(Value::Array(keys))) = (answer.next(), answer.next())
    else {
        return None;
    };
    let text = |key| match key {
        Value::BulkString(key) => String::from_utf8(key).ok(),
        _ => None,
    };
    Some((String::from_utf8(next).ok()?, keys.into_iter().filter_map(text).collect()))
}

impl Shared {
    async fn views(self: &Arc<Self>, name: &Name) -> Result<Vec<View>> {
        let mut answers = self.ask_each(self.patient(), LATE, |i| {
            let (shared, keys) = (self.clone(), self.keys(name));
            async move { shared.view(i, &keys).await }
        });
        self.majority_of(&mut answers).await
    }

    /// Returns one node's view, read in pages. A waiter that leaves in between may hide a later
    /// one, which the other nodes know as well.
    async fn view(&self, node: usize, keys: &[String; 5]) -> Result<View, Trouble> {
        let (mut view, mut looked) = (None::<View>, 0);
        loop {
            let mut call = self.scripts.read.call(4);
            call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]).arg(looked).arg(PAGE);
            let mut answer = self.nodes[node].ask(&self.scripts.read, &call).await?;
            let page = View::read(&mut answer).ok_or(Trouble::Strange)?;
            looked += page.looked;
            let is_last = page.looked < PAGE || looked >= SHOWN;
            let whole = match view.take() {
                None => page,
                Some(mut whole) => {
                    whole.waiting.extend(page.waiting);
                    whole
                }
            };
            if is_last {
                return Ok(whole);
            }
            view = Some(whole);
        }
    }

    /// Returns the replies of all nodes that replied, or an error if they are not a majority.
    async fn majority_of<T>(&self, answers: &mut super::attempt::Answers<T>) -> Result<Vec<T>> {
        let (mut replies, mut troubles) = (Vec::new(), Vec::new());
        while let Some((i, answer)) = answers.recv().await {
            match answer {
                Ok(answer) => replies.push(answer),
                Err(trouble) => troubles.push((i, trouble)),
            }
        }
        if replies.len() >= majority(self.nodes.len()) {
            return Ok(replies);
        }
        let what = format!("only {} of {} servers responded", replies.len(), self.nodes.len());
        Err(self.in_trouble(what, &troubles))
    }

    /// Returns how long to wait for a slow node after others have replied.
    pub(super) fn patient(&self) -> Duration {
        self.node_timeout.saturating_mul(4)
    }

    pub(super) async fn read(self: &Arc<Self>, name: &Name) -> Result<Option<LockInfo>> {
        let views = self.views(name).await?;
        let claims = self.claims_of(&views);
        Ok((!claims.is_empty()).then(|| LockInfo::new(name.clone(), Kind::Mutex, 1, claims)))
    }

    /// Returns the holder, if it has a majority, and all waiters that at least half of the nodes
    /// know. A few nodes may still know a waiter that has left or holds the lock by now.
    fn claims_of(&self, views: &[View]) -> Vec<ClaimInfo> {
        let held = self.value_held(views);
        let holding = held.map(|value| {
            let theirs = || views.iter().filter(|view| view.value == value);
            let best = theirs().max_by_key(|view| view.token);
            let holder = best.and_then(|view| view.holder.clone());
            // Other Redlock clients store no holder information.
            let label = match value {
                scripts::NO_LOCK => "a key of another type, which belongs to another program",
                _ => "a client of another library",
            };
            let unknown = || Holder { host: "?".into(), pid: 0, label: label.into() };
            let mut left: Vec<Duration> = theirs().filter_map(|view| view.left).collect();
            left.sort_unstable_by(|a, b| b.cmp(a));
            ClaimInfo::new(
                ClaimState::Holding,
                holder.unwrap_or_else(unknown),
                best.and_then(|view| view.token),
                1,
                best.map(|view| view.since).unwrap_or_default(),
                left.get(majority(self.nodes.len()) - 1).copied(),
            )
        });
        let mut waiting: HashMap<&str, (usize, &Waiting)> = HashMap::new();
        for one in views.iter().flat_map(|view| &view.waiting) {
            waiting.entry(&one.who).or_insert((0, one)).0 += 1;
        }
        let holder = held.and_then(|value| value.split_once('.')).map(|(claim, _)| claim);
        let mut waiting: Vec<&Waiting> = waiting
            .into_values()
            .filter(|(nodes, one)| nodes * 2 >= views.len() && one.who.split(' ').next() != holder)
            .map(|(_, one)| one)
            .collect();
        waiting.sort_by(|a, b| b.since.cmp(&a.since).then_with(|| a.who.cmp(&b.who)));
        let shown = waiting.into_iter().filter_map(|one| {
            let json = one.who.splitn(3, ' ').nth(2)?;
            let holder = serde_json::from_str(json).ok()?;
            let left = Some(one.left);
            Some(ClaimInfo::new(ClaimState::Waiting, holder, None, 1, one.since, left))
        });
        holding.into_iter().chain(shown).collect()
    }

    /// Returns the main key's value that a majority has.
    fn value_held<'a>(&self, views: &'a [View]) -> Option<&'a str> {
        let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
        for view in views.iter().filter(|view| !view.value.is_empty()) {
            *votes.entry(&view.value).or_default() += 1;
        }
        let (value, count) = votes.into_iter().max_by_key(|(_, count)| *count)?;
        (count >= majority(self.nodes.len())).then_some(value)
    }

    pub(super) async fn list(self: &Arc<Self>, prefix: &str) -> Result<Vec<LockInfo>> {
        let records = self.record_key(prefix);
        let pattern = format!("{}*", escaped(&records));
        let mut answers = self.ask_each(Duration::from_secs(5), LATE, |i| {
            let (shared, pattern) = (self.clone(), pattern.clone());
            async move {
                let mut found = Vec::new();
                let mut cursor = String::from("0");
                loop {
                    let mut scan = redis::cmd("SCAN");
                    scan.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(1_000);
                    let answer = shared.nodes[i].call(&scan).await?;
                    let (next, keys) = page(answer).ok_or(Trouble::Strange)?;
                    found.extend(keys);
                    cursor = next;
                    if cursor == "0" {
                        return Ok(found);
                    }
                }
            }
        });
        let keys: BTreeSet<String> =
            self.majority_of(&mut answers).await?.into_iter().flatten().collect();
        let start = self.record_key("");
        let names = keys.iter().filter_map(|key| Name::new(key.strip_prefix(&start)?).ok());
        let mut locks = Vec::new();
        for name in names {
            locks.extend(self.read(&name).await?);
        }
        Ok(locks)
    }

    /// Reads the values on the nodes, and then removes only these values. A request to a server may
    /// arrive late, or twice after its reply was lost. If another client has acquired the lock
    /// meanwhile, its value is a different one and stays.
    pub(super) async fn evict(self: &Arc<Self>, name: &Name, which: Evict) -> Result<usize> {
        let views = self.views(name).await?;
        let values: BTreeSet<&str> = match which {
            // Votes of attempts without a majority are removed as well.
            Evict::Holders => views.iter().map(|view| &*view.value).collect(),
            Evict::Token(token) => {
                let held = self.value_held(&views);
                let its = views.iter().filter(|view| held == Some(&*view.value));
                let has_token = its.filter_map(|view| view.token).max() == Some(token);
                held.filter(|_| has_token).into_iter().collect()
            }
        };
        let values: Vec<String> =
            values.into_iter().filter(|value| !value.is_empty()).map(str::to_owned).collect();
        if values.is_empty() {
            return Ok(0);
        }
        let mut answers = self.ask_each(self.patient(), LATE, |i| {
            let (shared, keys, values) = (self.clone(), self.keys(name), values.clone());
            async move {
                let mut call = shared.scripts.evict.call(4);
                call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]).arg(values);
                let mut answer = shared.nodes[i].ask(&shared.scripts.evict, &call).await?;
                answer.natural().ok_or(Trouble::Strange)
            }
        });
        let removed: u64 = self.majority_of(&mut answers).await?.into_iter().sum();
        Ok(usize::from(removed > 0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_view_is_parsed_or_refused(answer in values(&[
            "0123456789abcdef.1", r#"{"host":"a","pid":1,"label":""}"#, "",
            r#"0123456789abcdef lock-channel {"host":"a","pid":1,"label":""}"#,
        ])) {
            let length = match &answer {
                Value::Array(all) => all.len(),
                _ => 1,
            };
            if let Some(view) = View::read(&mut Elements::of(answer.clone())) {
                prop_assert_eq!(6 + 3 * view.waiting.len(), length);
            }
            if let Some((_, keys)) = page(answer) {
                prop_assert!(length >= 2 && keys.len() <= 6);
            }
        }
    }
}
